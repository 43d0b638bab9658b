"""A real Kubernetes control plane on loopback; KWOK simulates nodes and kubelets.

etcd, kube-apiserver, kube-controller-manager, kube-scheduler and KWOK run as children, each with
free ports and own certificates. They end with the process that started them, however it ends. Only
the machines are simulated: pods run by the stages of `kwok.yaml`, to which
`kubernetes_objects.pod` gives the duration and the outcome.
"""

import contextlib
import csv
import faulthandler
import random
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import Template
from typing import Any, ClassVar, Final, Self, TypeVar

import httpx
import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from kubernetes_binaries import BinariesError, binaries
from kubernetes_objects import device_class

HERE: Final = Path(__file__).parent
READY_SECONDS_MAX: Final = 120.0
"""Longest start of a program in seconds; three are usual on an idle machine."""
POLL_SECONDS: Final = 0.05
USERS: Final = ("admin", "moorage", "nobody")
"""Users of the plane: an administrator, and two users without rights until a test grants some."""
NODE_GRACE_SECONDS: Final = 20
"""Seconds without a report of its kubelet after which a node counts as lost."""
KINDS: Final[Mapping[str, tuple[str, bool]]] = {
    "ClusterRole": ("rbac.authorization.k8s.io/v1", False),
    "ClusterRoleBinding": ("rbac.authorization.k8s.io/v1", False),
    "Deployment": ("apps/v1", True),
    "DeviceClass": ("resource.k8s.io/v1", False),
    "Event": ("v1", True),
    "Job": ("batch/v1", True),
    "Namespace": ("v1", False),
    "Node": ("v1", False),
    "Pod": ("v1", True),
    "ReplicaSet": ("apps/v1", True),
    "ResourceClaim": ("resource.k8s.io/v1", True),
    "ResourceQuota": ("v1", True),
    "ResourceSlice": ("resource.k8s.io/v1", False),
    "Role": ("rbac.authorization.k8s.io/v1", True),
    "RoleBinding": ("rbac.authorization.k8s.io/v1", True),
    "Service": ("v1", True),
}
"""By kind: its API version, and whether its objects have namespaces."""

_CONTROLLERS: Final = (
    "deployment-controller",
    "endpointslice-controller",
    "garbage-collector-controller",
    "job-controller",
    "namespace-controller",
    "node-lifecycle-controller",
    "pod-garbage-collector-controller",
    "replicaset-controller",
    "resourceclaim-controller",
    "resourcequota-controller",
    "root-ca-certificate-publisher-controller",
    "serviceaccount-controller",
    "taint-eviction-controller",
)
_T = TypeVar("_T")


class PlaneError(Exception):
    """A program of the plane ended or did not get ready, or the API server refused a call."""


class Plane:
    """A control plane that runs until `close`.

    Args:
        folder: An empty folder for all data and logs.
        grace_seconds: A node counts as lost after this time without a report of its kubelet; KWOK
            reports about four times in this time.

    Attributes:
        url: URL of the API server.
        etcd_url: URL of etcd, which stores all objects.
        ca: File with the certificate of the authority of the API server's certificate.
        logs: Folder with one `NAME.log` for each program.
        pod_log: File with the log of every pod; lines `RFC3339 stdout F text`.
        audit_log: File with the calls of accounts of the namespace `moorage`, one JSON per line.
    """

    _shared: ClassVar["Plane | None"] = None

    def __init__(self, folder: Path, grace_seconds: int = NODE_GRACE_SECONDS) -> None:
        self._grace_seconds = grace_seconds
        self.programs = binaries()
        self.folder = folder
        self.logs = folder / "logs"
        self.pod_log = folder / "pod.log"
        self.audit_log = folder / "audit.log"
        self.ca = folder / "certs" / "apiserver.crt"
        self._starter = ThreadPoolExecutor(1)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._clients: dict[str, httpx.Client] = {}
        self._ports = dict(zip(("etcd", "peer", "api", "kwok"), _free_ports(4), strict=True))
        self.url = f"https://127.0.0.1:{self._ports['api']}"
        self.etcd_url = f"http://127.0.0.1:{self._ports['etcd']}"
        self._write_files()
        self._commands = self._all_commands()

    @classmethod
    @contextlib.contextmanager
    def run(cls, folder: Path, grace_seconds: int = NODE_GRACE_SECONDS) -> Iterator[Self]:
        """Run a control plane until the block ends."""
        plane = cls(folder, grace_seconds)
        try:
            plane._start_all()
            yield plane
        finally:
            plane.close()

    @classmethod
    def share(cls, folders: pytest.TempPathFactory) -> "Plane":
        """Return the plane that test files share; start it for the first file."""
        if Plane._shared is None:
            Plane._shared = cls(folders.mktemp("plane"))
            Plane._shared._start_all()
        return Plane._shared

    @classmethod
    def end_shared(cls) -> None:
        """End the plane that test files share, if it runs."""
        plane, Plane._shared = Plane._shared, None
        if plane is not None:
            plane.close()

    def close(self) -> None:
        """End every program, and delete its data."""
        for client in self._clients.values():
            client.close()
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait()
        self._starter.shutdown()

    # Its programs -----------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a stopped program; for the API server, wait until it answers."""
        # The plane must end even if the tests are killed. Linux ends a child with the thread that
        # started it, so one thread that lives as long as the plane starts all programs.
        self._children[name] = self._starter.submit(self._spawn, name).result()
        if name == "kube-apiserver":
            self.until(self._answers, f"{self.url}/readyz answers", READY_SECONDS_MAX)

    def _spawn(self, name: str) -> "subprocess.Popen[bytes]":
        with (self.logs / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", self.programs[name]]
                + self._commands[name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,  # Ctrl-C reaches only the tests, which then end the plane.
            )

    def kill(self, name: str) -> None:
        """Kill a program; its data and its port stay for `start`."""
        child = self._children[name]
        child.kill()
        child.wait()

    def pause(self, name: str) -> None:
        """Pause a program: it keeps its connections and answers nothing."""
        self._children[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Resume a paused program."""
        self._children[name].send_signal(signal.SIGCONT)

    def pid(self, name: str) -> int:
        """Return the process of a program."""
        return self._children[name].pid

    def mend(self) -> None:
        """Restart killed programs of the plane, and resume paused programs."""
        for name, child in self._children.items():
            if child.poll() is None:
                child.send_signal(signal.SIGCONT)
            else:
                self.start(name)

    # Its objects ------------------------------------------------------------------------------

    def token(self, user: str = "admin") -> str:
        """Return the bearer token of a user in `USERS`."""
        assert user in USERS
        return f"token-of-{user}"

    def kubeconfig(self, user: str = "admin") -> Path:
        """Return a kubeconfig file of a user in `USERS`."""
        return self.folder / f"kubeconfig-{user}"

    def call(
        self, method: str, path: str, body: Any = None, *, user: str = "admin", **parameters: Any
    ) -> Any:
        """Make a call of the API and return its JSON.

        Raises:
            PlaneError: The call was refused; the message has the status and the server's text.
        """
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        answer = self._client(user).request(
            method, path, json=body, params=parameters, headers={"Content-Type": kind}
        )
        if answer.is_error:
            raise PlaneError(f"{method} {path}: {answer.status_code}: {answer.text}")
        return answer.json()

    def create(self, *objects: dict[str, Any], user: str = "admin") -> list[dict[str, Any]]:
        """Create objects of `kubernetes_objects`; return them as the API server returns them."""
        return [
            self.call("POST", _path(each["kind"], _namespace(each)), each, user=user)
            for each in objects
        ]

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any] | None:
        """Return an object, or None if it does not exist."""
        try:
            return self.call("GET", _path(kind, namespace, name))
        except PlaneError as error:
            if ": 404: " in str(error):
                return None
            raise

    def all(self, kind: str, namespace: str = "", **parameters: Any) -> list[dict[str, Any]]:
        """Return all objects of a kind, of one namespace or of all."""
        return self.call("GET", _path(kind, namespace), **parameters)["items"]

    def patch(
        self, kind: str, name: str, change: dict[str, Any], namespace: str = "default", at: str = ""
    ) -> dict[str, Any]:
        """Merge a change into an object, or into its subresource `at`, such as `status`."""
        path = _path(kind, namespace, name)
        return self.call("PATCH", f"{path}/{at}" if at else path, change)

    def delete(self, kind: str, name: str, namespace: str = "default") -> None:
        """Delete an object; a pod disappears once KWOK has noticed."""
        self.call("DELETE", _path(kind, namespace, name))

    def clear(self) -> None:
        """Delete all objects that tests create, and wait until they are gone."""
        makers = ("Deployment", "ReplicaSet", "Job")
        kinds = (*makers, "Pod", "ResourceClaim", "ResourceSlice", "DeviceClass", "Node")
        for kind in kinds:
            spaces = {_namespace(each) for each in self.all(kind)} if KINDS[kind][1] else {""}
            for namespace in spaces:
                policy = {"propagationPolicy": "Background", "gracePeriodSeconds": 0}
                self.call("DELETE", _path(kind, namespace), policy)
            if kind == "ResourceClaim":
                self._free_claims()
            self.until(lambda kind=kind: not self.all(kind), f"no {kind} is left")

    def _free_claims(self) -> None:
        """Remove the finalizers of deleted claims: the controller may miss the end of a new pod."""
        for each in self.all("ResourceClaim"):
            with contextlib.suppress(PlaneError):  # Gone meanwhile.
                change = {"metadata": {"finalizers": None}}
                self.patch("ResourceClaim", each["metadata"]["name"], change, _namespace(each))

    # Its nodes --------------------------------------------------------------------------------

    def lose_node(self, name: str) -> None:
        """Silence a node's kubelet; the node counts as lost about 20 s later."""
        self.patch("Node", name, {"metadata": {"labels": {"kubelet": None}}})
        self.kill("kwok")  # KWOK may still report for an earlier node of this name.
        self.start("kwok")

    def find_node(self, name: str) -> None:
        """Restart the reports of a lost node's kubelet."""
        self.patch("Node", name, {"metadata": {"labels": {"kubelet": "up"}}})

    def until(
        self, happened: Callable[[], _T], what: str, seconds: float = READY_SECONDS_MAX
    ) -> _T:
        """Call a function repeatedly until its result is true, and return this result.

        Raises:
            PlaneError: No true result came in time, or a program of the plane ended meanwhile.
        """
        deadline = time.monotonic() + seconds
        while not (answer := happened()):
            self._check()
            if time.monotonic() > deadline:
                raise PlaneError(
                    f"within {seconds:g} s, this did not happen: {what}; logs are in {self.logs}"
                )
            time.sleep(POLL_SECONDS)  # Another program's state; a watch is no simpler.
        return answer

    # How it starts ----------------------------------------------------------------------------

    def _start_all(self) -> None:
        self.start("etcd")
        self.start("kube-apiserver")
        for name in ("kube-controller-manager", "kube-scheduler", "kwok"):
            self.start(name)
        # Without a ServiceAccount, no pod is admitted.
        path = "/api/v1/namespaces/default/serviceaccounts"
        self.until(lambda: self.call("GET", path)["items"], "the default ServiceAccount is there")

    def _answers(self) -> bool:
        if not self.ca.exists() or not self.ca.stat().st_size:
            return False
        try:
            self.call("GET", "/version")
            return self._client("admin").get("/readyz").is_success
        except (httpx.TransportError, PlaneError):
            return False

    def _check(self) -> None:
        for name, child in self._children.items():
            if child.poll() is not None and child.returncode != -signal.SIGKILL:
                text = (self.logs / f"{name}.log").read_text(errors="replace")
                last = "\n".join(text.splitlines()[-10:])
                raise PlaneError(f"{name} ended with exit code {child.returncode}:\n{last}")

    def _client(self, user: str) -> httpx.Client:
        if user not in self._clients:
            self._clients[user] = httpx.Client(
                base_url=self.url,
                verify=ssl.create_default_context(cafile=self.ca),
                headers={"Authorization": f"Bearer {self.token(user)}"},
                timeout=30,
                trust_env=False,
            )
        return self._clients[user]

    def _write_files(self) -> None:
        self.logs.mkdir()
        (self.folder / "certs").mkdir()
        self.pod_log.write_text("2026-01-01T00:00:00.000000000Z stdout F started\n")
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (self.folder / "sa.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        (self.folder / "sa.pub").write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        with (self.folder / "tokens.csv").open("w", newline="") as file:
            groups = {"admin": "system:masters"}
            csv.writer(file).writerows(
                [self.token(user), user, user, groups.get(user, "")] for user in USERS
            )
        for user in USERS:
            self.kubeconfig(user).write_text(yaml.safe_dump(self._kubeconfig(user)))
        values = {
            "pod_log": self.pod_log,
            "kwok_port": self._ports["kwok"],
            "heartbeat_ms": 250 * self._grace_seconds,
            "heartbeat_ms_max": 300 * self._grace_seconds,
        }
        stages = Template((HERE / "kwok.yaml").read_text()).substitute(values)
        (self.folder / "kwok.yaml").write_text(stages)
        scheduler = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {
                "kubeconfig": str(self.kubeconfig()),
                "qps": 10000,
                "burst": 10000,
                "contentType": "application/vnd.kubernetes.protobuf",
            },
        }
        (self.folder / "scheduler.yaml").write_text(yaml.safe_dump(scheduler))
        logged = {"level": "Metadata", "userGroups": ["system:serviceaccounts:moorage"]}
        audit = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["ResponseStarted", "ResponseComplete"],
            "rules": [logged, {"level": "None"}],
        }
        (self.folder / "audit.yaml").write_text(yaml.safe_dump(audit))

    def _kubeconfig(self, user: str) -> dict[str, Any]:
        cluster = {"server": self.url, "certificate-authority": str(self.ca)}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self.token(user)}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
        }

    def _all_commands(self) -> dict[str, list[str]]:
        etcd = self.etcd_url
        peer = f"http://127.0.0.1:{self._ports['peer']}"
        kubeconfig = f"--kubeconfig={self.kubeconfig()}"
        return {
            "etcd": [
                "--data-dir=etcd",
                f"--listen-client-urls={etcd}",
                f"--advertise-client-urls={etcd}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                "--unsafe-no-fsync",
            ],
            "kube-apiserver": [
                f"--etcd-servers={etcd}",
                "--cert-dir=certs",
                f"--secure-port={self._ports['api']}",
                "--bind-address=127.0.0.1",
                # An address without a host: without it, the machine must have a route.
                "--advertise-address=192.0.2.1",
                "--endpoint-reconciler-type=none",
                "--service-account-issuer=https://kubernetes.default.svc",
                "--service-account-key-file=sa.pub",
                "--service-account-signing-key-file=sa.key",
                "--token-auth-file=tokens.csv",
                "--authorization-mode=RBAC",
                "--service-cluster-ip-range=10.96.0.0/16",
                "--audit-policy-file=audit.yaml",
                f"--audit-log-path={self.audit_log}",
            ],
            "kube-controller-manager": [
                kubeconfig,
                "--leader-elect=false",
                "--secure-port=0",
                "--service-account-private-key-file=sa.key",
                f"--root-ca-file={self.ca}",
                f"--controllers={','.join(_CONTROLLERS)}",
                "--node-monitor-period=2s",
                f"--node-monitor-grace-period={self._grace_seconds}s",
                "--kube-api-qps=500",
                "--kube-api-burst=1000",
            ],
            "kube-scheduler": ["--config=scheduler.yaml", "--secure-port=0"],
            "kwok": [
                kubeconfig,
                "--config=kwok.yaml",
                "--manage-all-nodes=false",
                "--manage-nodes-with-label-selector=kubelet=up",
            ],
        }


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Plane:
    """A control plane of several files of tests; `tests/conftest.py` ends it after the last one."""
    _build_programs()
    return Plane.share(tmp_path_factory)


@pytest.fixture(scope="module")
def own_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """A control plane for one file, which leaves namespaces, rights or many nodes behind."""
    _build_programs()
    with Plane.run(tmp_path_factory.mktemp("plane")) as running:
        yield running


def _build_programs() -> None:
    faulthandler.cancel_dump_traceback_later()  # A build takes longer than any test may.
    try:
        binaries()
    except BinariesError as error:
        pytest.skip(str(error))


@pytest.fixture
def fresh_plane(plane: Plane) -> Iterator[Plane]:
    """The control plane, running, with no object but the device class of `DRIVER`."""
    plane.create(device_class())
    yield plane
    plane.mend()
    plane.clear()


def _path(kind: str, namespace: str, name: str = "") -> str:
    version, namespaced = KINDS[kind]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    place = f"/namespaces/{namespace}" if namespaced and namespace else ""
    plural = kind.lower() + ("es" if kind.endswith("ss") else "s")
    return f"{root}{place}/{plural}" + (f"/{name}" if name else "")


def _namespace(document: dict[str, Any]) -> str:
    return document["metadata"].get("namespace", "default")


def _free_ports(count: int) -> list[int]:
    """Return free ports below the range of outgoing connections.

    So a killed program finds its port free when it starts again.
    """
    found: dict[int, None] = {}
    while len(found) < count:
        port = random.randint(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found[port] = None
    return list(found)

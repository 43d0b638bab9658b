"""Runs etcd, an API server and kube-scheduler on loopback, for `moored bench kubernetes`.

The plane runs no controllers and no kubelets: the benchmark only needs pods that are bound to
nodes. The programs are in the folder that `KUBEBUILDER_ASSETS` names, on the `PATH`, or where the
tests have built them.
"""

import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from moorage.lab.errors import CommandError
from moorage.records.json_values import JsonObject

PROGRAMS: Final = ("etcd", "kube-apiserver", "kube-scheduler")
READY_SECONDS_MAX: Final = 120.0
STOP_SECONDS_MAX: Final = 20.0
POLL_SECONDS: Final = 0.2
WRITERS: Final = 16
"""Maximum objects that are created at the same time."""
_TOKEN: Final = "bench"  # noqa: S105  # Of an API server on loopback that ends with the run.
_CONFIG: Final = """\
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {{leaderElect: false}}
clientConnection:
  kubeconfig: {kubeconfig}
  qps: 10000
  burst: 10000
  contentType: application/vnd.kubernetes.protobuf
"""
_KUBECONFIG: Final = """\
apiVersion: v1
kind: Config
current-context: bench
clusters: [{{name: bench, cluster: {{server: "{url}", certificate-authority: "{ca}"}}}}]
users: [{{name: bench, user: {{token: {token}}}}}]
contexts: [{{name: bench, context: {{cluster: bench, user: bench}}}}]
"""


def programs() -> dict[str, str]:
    """Return the path of each of `PROGRAMS`, by its name.

    Raises:
        CommandError: A program is not installed.
    """
    found: dict[str, str] = {}
    for name in PROGRAMS:
        path = find_program(name)
        if path is None:
            raise CommandError(
                f"{name} is not installed: set KUBEBUILDER_ASSETS to a folder with "
                f"{', '.join(PROGRAMS)}, or build them with `make kubernetes-tools`"
            )
        found[name] = path
    return found


def find_program(name: str) -> str | None:
    """Return the path of a Kubernetes program; None if it is not on this machine."""
    given = os.environ.get("KUBEBUILDER_ASSETS")
    path = shutil.which(name, path=given) if given else None
    if path := path or shutil.which(name):
        return path
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    built = cache.glob(f"moorage-tests/kubernetes/{name}-*/{name}")
    return max(map(str, built), key=lambda each: Path(each).stat().st_mtime, default=None)


class SchedulerPlane:
    """A control plane whose scheduler starts on demand.

    Args:
        folder: An empty folder, for the files that the programs write.
        synced: Whether etcd syncs what it writes.
    """

    def __init__(self, folder: Path, *, synced: bool = False) -> None:
        self._folder = folder
        self._synced = synced
        self.pids: list[int] = []
        self._programs = programs()
        self._ca = folder / "certs" / "apiserver.crt"
        self._etcd, self._peer, self._port = (_free_port() for _ in range(3))
        self._url = f"https://127.0.0.1:{self._port}"
        self._http: httpx.Client | None = None

    @classmethod
    @contextmanager
    def run(cls, folder: Path, *, synced: bool = False) -> Iterator["SchedulerPlane"]:
        """Run the control plane without its scheduler until the block ends.

        Raises:
            CommandError: A program is missing, or does not get ready in time.
        """
        plane = cls(folder, synced=synced)
        with ExitStack() as stack:
            plane._write_files()
            stack.enter_context(plane._program("etcd", plane._etcd_flags()))
            stack.enter_context(plane._program("kube-apiserver", plane._api_flags()))
            stack.callback(plane._close)
            _until(plane._answers, "the API server answers")
            yield plane

    @contextmanager
    def scheduler(self) -> Iterator[None]:
        """Run the scheduler until the block ends."""
        with self._program("kube-scheduler", ["--config=scheduler.yaml", "--secure-port=0"]):
            yield

    def create(self, path: str, objects: Iterable[JsonObject]) -> None:
        """Create objects.

        Raises:
            CommandError: The API server refused an object.
        """
        client = self._client()

        def post(thing: JsonObject) -> None:
            answer = client.post(path, json=thing)
            if answer.is_error:
                raise CommandError(f"POST {path} failed: {answer.status_code}: {answer.text[:500]}")

        with ThreadPoolExecutor(WRITERS) as pool:
            for _ in pool.map(post, objects):
                pass

    def pods(self) -> list[JsonObject]:
        """Return all pods of the control plane's API server."""
        items: list[JsonObject] = self._client().get("/api/v1/pods").json()["items"]
        return items

    def until_bound(self, count: int) -> None:
        """Wait until all of `count` pods have a node."""
        query = {"fieldSelector": "spec.nodeName=", "limit": "1"}

        def bound() -> bool:
            found = self._client().get("/api/v1/namespaces/default/pods", params=query).json()
            return not found["items"]

        _until(bound, f"{count} pods have a node", POLL_SECONDS * 5)

    def _client(self) -> httpx.Client:
        if self._http is None:
            self._http = httpx.Client(**self.client_options())
        return self._http

    def client_options(self) -> dict[str, Any]:
        """Return the arguments for a client of the API server."""
        return {
            "base_url": self._url,
            "verify": ssl.create_default_context(cafile=self._ca),
            "headers": {"Authorization": f"Bearer {_TOKEN}"},
            "timeout": 60,
            "trust_env": False,
        }

    def _close(self) -> None:
        if self._http is not None:
            self._http.close()

    def _answers(self) -> bool:
        if not self._ca.exists() or not self._ca.stat().st_size:
            return False
        try:
            return self._client().get("/readyz").is_success
        except httpx.TransportError:
            return False

    @contextmanager
    def _program(self, name: str, flags: list[str]) -> Iterator[None]:
        tied = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
        with (self._folder / f"{name}.log").open("wb") as log:
            child = subprocess.Popen(  # noqa: S603  # Programs that the operator has put there.
                [*tied, self._programs[name], *flags], stdout=log, stderr=log, cwd=self._folder
            )
        self.pids.append(child.pid)
        try:
            yield
        finally:
            child.terminate()
            try:
                child.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _write_files(self) -> None:
        (self._folder / "certs").mkdir()
        for command in (["genrsa", "-out", "sa.key", "2048"], ["rsa", *_PUBLIC]):
            try:
                subprocess.run(  # noqa: S603  # With arguments of our own.
                    ["openssl", *command],  # noqa: S607  # Wherever it is installed.
                    cwd=self._folder,
                    check=True,
                    capture_output=True,
                )
            except (OSError, subprocess.CalledProcessError) as error:
                raise CommandError(f"openssl could not make a key: {error}") from error
        token = f"{_TOKEN},bench,bench,system:masters\n"
        (self._folder / "tokens.csv").write_text(token, encoding="ascii")
        kubeconfig = self._folder / "kubeconfig"
        text = _KUBECONFIG.format(url=self._url, ca=self._ca, token=_TOKEN)
        kubeconfig.write_text(text, encoding="utf-8")
        text = _CONFIG.format(kubeconfig=kubeconfig)
        (self._folder / "scheduler.yaml").write_text(text, encoding="utf-8")

    def _etcd_flags(self) -> list[str]:
        url, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd, self._peer))
        return [
            "--data-dir=etcd",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            *([] if self._synced else ["--unsafe-no-fsync"]),
        ]

    def _api_flags(self) -> list[str]:
        return [
            f"--etcd-servers=http://127.0.0.1:{self._etcd}",
            "--cert-dir=certs",
            f"--secure-port={self._port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=192.0.2.1",
            "--endpoint-reconciler-type=none",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-account-key-file=sa.pub",
            "--service-account-signing-key-file=sa.key",
            "--token-auth-file=tokens.csv",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            # No controller creates service accounts, or marks nodes as ready.
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
        ]


_PUBLIC: Final = ("-in", "sa.key", "-pubout", "-out", "sa.pub")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _until(happened: Callable[[], bool], what: str, pause: float = POLL_SECONDS) -> None:
    deadline = time.monotonic() + READY_SECONDS_MAX
    while not happened():
        if time.monotonic() > deadline:
            raise CommandError(f"after {READY_SECONDS_MAX:g} s it is not yet true that {what}")
        time.sleep(pause)  # No event: other programs change the state.

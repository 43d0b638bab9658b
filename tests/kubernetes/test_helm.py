"""Helm renders, installs, upgrades and rolls back the chart deploy/helm/moorage."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from kubernetes_binaries import KUBERNETES, BinariesError, binaries
from kubernetes_objects import node
from kubernetes_plane import Plane, own_plane
from kubernetes_processes import ProcessKubelet

from benchmarks.faults.database import PostgresServer
from moorage.config.settings import Config, settings

pytestmark = [pytest.mark.kubernetes, pytest.mark.heavy]

plane = own_plane

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "deploy" / "helm" / "moorage"
PLAIN: Final = ("--set", "insecurePlaintext=true")
TLS: Final = ("--set", "tls.secret=moored-tls")
TWO: Final = (
    *("--set", "replicas=2,persistence.enabled=false"),
    *("--set", "settings.storage=postgresql://moorage@db/moorage"),
    *("--set", "networkPolicy.toPorts={443,6443,5432}"),
)
SHARED: Final = ("--set", "kubernetes.namespace=moorage-workloads,persistence.enabled=false")
ALL: Final = (
    *("--set", "kubernetes.namespace=moorage-workloads,serviceMonitor.enabled=true"),
    *("--set", "serviceMonitor.tokenSecret=scraper,settings.history_days=90"),
    *("--set", "ingress.enabled=true,ingress.host=moorage.example,ingress.tlsSecret=outside"),
    *("--set", "nodeSelector.disk=fast,image.pullSecrets={registry}"),
)
"""Values that turn on all parts of the chart that are off by default."""


class Helm:
    """The program Helm, run with separate folders."""

    def __init__(
        self, folder: Path, kubeconfig: Path | None = None, namespace: str = "moorage"
    ) -> None:
        try:
            self._program = binaries("helm")["helm"]
        except BinariesError as error:
            pytest.skip(str(error))
        homes = {f"HELM_{each}_HOME": str(folder / each) for each in ("CACHE", "CONFIG", "DATA")}
        own = {} if kubeconfig is None else {"KUBECONFIG": str(kubeconfig)}
        self._namespace = namespace
        self._environment = {**os.environ, **homes, **own}

    def run(self, *words: str, fails: bool = False) -> str:
        """Run a command; return its stdout, or its stderr if it must fail."""
        done = subprocess.run(
            [
                self._program,
                *words,
                *(() if words[0] == "lint" else ("--namespace", self._namespace)),
            ],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert bool(done.returncode) == fails, done.stdout + done.stderr
        return done.stderr + done.stdout if fails else done.stdout

    def template(self, *words: str) -> list[dict[str, Any]]:
        """Return the manifests that the chart makes."""
        text = self.run("template", "moorage", str(CHART), "--kube-version", KUBERNETES, *words)
        return [each for each in yaml.safe_load_all(text) if each]


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="module")
def namespaces(plane: Plane) -> Plane:
    for name in ("moorage", "moorage-workloads", "other"):
        plane.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return plane


@pytest.fixture
def helm(namespaces: Plane, fresh_plane: Plane, tmp_path: Path) -> Iterator[Helm]:
    """Helm on the control plane; its release is uninstalled before the plane is cleared."""
    yield (helm := Helm(tmp_path, fresh_plane.kubeconfig()))
    helm.run("uninstall", "moorage", "--ignore-not-found")


@pytest.mark.parametrize(
    "words", [(), PLAIN, TLS, (*TLS, *ALL), (*TLS, *TWO), (*TLS, "--set", "tls.clientCa=true")]
)
def test_helm_lint_finds_no_fault(offline: Helm, words: tuple[str, ...]) -> None:
    assert "0 chart(s) failed" in offline.run("lint", "--strict", str(CHART), *words)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("replicas=3,insecurePlaintext=true", "one leads, and one may stand by"),
        ("replicas=0,insecurePlaintext=true", "one leads, and one may stand by"),
        ("replicas=2,insecurePlaintext=true,persistence.enabled=false", "storage"),
        ("replicas=2,insecurePlaintext=true,settings.storage=postgres://db/m", "in PostgreSQL"),
        (
            "replicas=2,tls.secret=a,tls.clientCa=true,settings.storage=postgres://db/m",
            "would not see which one leads",
        ),
        (
            "replicas=2,insecurePlaintext=true,settings.storage=/data,persistence.enabled=false",
            "settings/storage",
        ),
        ("replicas=1", "without TLS, moored does not start"),
        ("insecurePlaintext=null", "insecurePlaintext"),
        ("insecurePlaintext=true,tls.secret=moored-tls", "false where there is a tls.secret"),
        ("insecurePlaintext=true,tls.clientCa=true", "false where there is no tls.secret"),
        ("insecurePlaintext=true,tokens.secret=", "/tokens/secret"),
        ("insecurePlaintext=true,tokens=null", "tokens"),
        ("insecurePlaintext=true,settings.tokens=a:b", "set by other values of this chart"),
        ("insecurePlaintext=true,securityContext.privileged=true", "securityContext"),
        ("insecurePlaintext=true,serviceMonitor.enabled=true", "/serviceMonitor/tokenSecret"),
        ("insecurePlaintext=true,ingress.enabled=true,ingress.host=a.b", "/ingress/tlsSecret"),
        ("insecurePlaintext=true,ingress.host=https://a.b", "/ingress/host"),
        ("insecurePlaintext=true,settings.bogus=1", "bogus"),
        ("insecurePlaintext=true,env[0].name=MOORAGE_TOKENS,env[0].value=a:b", "/env/0/name"),
    ],
)
def test_the_chart_refuses_wrong_values_by_name(offline: Helm, values: str, said: str) -> None:
    assert said in offline.run("template", "moorage", str(CHART), "--set", values, fails=True)


def of_kind(manifests: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (each for each in manifests if each["kind"] == kind)
    return found


def container(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = of_kind(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    return found


def test_the_chart_has_the_rights_of_the_plain_manifests(offline: Helm) -> None:
    ours = offline.template(*PLAIN, *ALL)
    plain = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "rbac.yaml").read_text()))
    for kind in ("ClusterRole", "Role"):
        assert of_kind(ours, kind)["rules"] == of_kind(plain, kind)["rules"]
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        (subject,) = of_kind(ours, kind)["subjects"]
        assert subject["name"] == of_kind(ours, "ServiceAccount")["metadata"]["name"]
    kinds = {each["kind"] for each in offline.template(*PLAIN, "--set", "kubernetes.enabled=false")}
    assert kinds.isdisjoint({"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"})


@pytest.mark.parametrize("words", [PLAIN, (*TLS, *ALL)])
def test_the_pod_of_the_chart_has_no_privilege(offline: Helm, words: tuple[str, ...]) -> None:
    manifests = offline.template(*words)
    spec = of_kind(manifests, "Deployment")["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(spec)
    assert all("hostPath" not in each for each in spec["volumes"])
    assert container(manifests)["securityContext"] == {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_chart_sets_only_existing_settings(offline: Helm) -> None:
    known = {each.environment for each in settings().values()}
    own = (
        "settings.backends=memory,settings.kubernetes_clusters=a=b,settings.kubernetes_namespace=c"
    )
    client_ca = (*TLS, "--set", "tls.clientCa=true")
    for words in (PLAIN, (*TLS, *ALL), (*TLS, *TWO), client_ca, (*TLS, *ALL, "--set", own)):
        names = [each["name"] for each in container(offline.template(*words))["env"]]
        assert set(names) <= known
        assert len(names) == len(set(names))


def test_the_schema_of_the_chart_has_each_setting(offline: Helm) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    (rule,) = [each["then"] for each in schema["allOf"] if "backends" in json.dumps(each["if"])]
    names = rule["properties"]["settings"]["propertyNames"]["enum"]
    assert names == sorted(settings())
    others = "settings.backends=local\\,mine,settings.mine_address=a"
    known = {"name": "MOORAGE_MINE_ADDRESS", "value": "a"}
    assert known in container(offline.template(*PLAIN, "--set", others))["env"]


def test_settings_in_the_values_of_the_chart_are_read_as_they_are_written(
    offline: Helm, tmp_path: Path
) -> None:
    """Helm reads whole numbers of a file as floating-point numbers."""
    given = {
        "message_bytes_max": 4_194_304,
        "agent_lost_seconds": 62.5,
        "traces": True,
        "log_level": "debug",
    }
    secret = {"secretKeyRef": {"name": "receiver", "key": "headers"}}
    env = [
        {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4318"},
        {"name": "OTEL_EXPORTER_OTLP_HEADERS", "valueFrom": secret},
    ]
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({"settings": given, "env": env}))
    rows = container(offline.template(*PLAIN, "--values", str(file)))["env"]
    assert rows[-2:] == env
    variables = {each["name"]: each.get("value", "") for each in rows[:-2]}
    config = Config.load({}, variables | {"MOORAGE_TOKENS": "ann:a-long-secret"})
    assert {name: getattr(config, name) for name in given} == given


def test_the_tls_values_of_the_chart_apply_to_daemon_probes_and_scraper(offline: Helm) -> None:
    manifests = offline.template(*TLS, *ALL)
    daemon = container(manifests)
    given = {each["name"]: each.get("value", "") for each in daemon["env"]}
    assert "MOORAGE_INSECURE_PLAINTEXT" not in given
    (mount,) = (each for each in daemon["volumeMounts"] if each["name"] == "tls")
    assert given["MOORAGE_TLS_CERT"] == f"{mount['mountPath']}/tls.crt"
    assert daemon["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"
    (endpoint,) = of_kind(manifests, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert "moorage.example" in given["MOORAGE_ALLOWED_HOSTS"].split(",")
    daemon = container(offline.template(*TLS, "--set", "tls.clientCa=true"))
    assert daemon["readinessProbe"]["tcpSocket"] == {"port": "http"}, "kubelets have none"


def test_the_job_in_prometheus_has_the_name_that_the_alerts_expect(offline: Helm) -> None:
    manifests = offline.run(
        "template", "prod", str(CHART), "--kube-version", KUBERNETES, *TLS, *ALL
    )
    found = [each for each in yaml.safe_load_all(manifests) if each]
    label = of_kind(found, "ServiceMonitor")["spec"]["jobLabel"]
    job = of_kind(found, "Service")["metadata"]["labels"][label]
    alerts = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    assert f'up{{job="{job}"}}' in alerts


def test_of_two_pods_only_the_leader_is_ready(offline: Helm) -> None:
    manifests = offline.template(*TLS, *TWO)
    deployment = of_kind(manifests, "Deployment")["spec"]
    assert (deployment["replicas"], deployment["strategy"]["type"]) == (2, "RollingUpdate")
    pod = deployment["template"]["spec"]
    assert {"name": "data", "emptyDir": {}} in pod["volumes"]
    assert "podAntiAffinity" in pod["affinity"]
    probe = container(manifests)["readinessProbe"]
    assert (probe["httpGet"]["path"], probe["periodSeconds"]) == ("/readyz", 1)
    assert container(manifests)["livenessProbe"]["httpGet"]["path"] == "/healthz"
    given = {each["name"]: each.get("value") for each in container(manifests)["env"]}
    assert given["MOORAGE_ADVERTISE_URL"] == "wss://moorage.moorage.svc:8765"
    assert "MOORAGE_ROLLOUT" in given, "a new pod is ready while an old one leads"
    # An eviction may end the only ready pod: then the other pod takes over.
    assert of_kind(manifests, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 2
    own = ("--set", "settings.advertise_url=wss://moorage.example/ws,affinity.nodeAffinity.a=b")
    manifests = offline.template(*TLS, *TWO, *own)
    urls = [
        each["value"]
        for each in container(manifests)["env"]
        if each["name"] == "MOORAGE_ADVERTISE_URL"
    ]
    assert urls == ["wss://moorage.example/ws"]
    affinity = of_kind(manifests, "Deployment")["spec"]["template"]["spec"]["affinity"]
    assert affinity == {"nodeAffinity": {"a": "b"}}


@pytest.mark.parametrize(
    ("storage", "ports"),
    [
        ("postgresql://db/m", {443, 6443, 5432}),
        ("postgres://me:a%2Fb@db.example:6432/m?sslmode=verify-full", {443, 6443, 6432}),
        ("postgresql://me@one:5433\\,two/m", {443, 6443, 5433, 5432}),
        ("postgresql://[fd00::1]/m", {443, 6443, 5432}),
    ],
)
def test_the_network_policy_allows_connections_to_the_database(
    offline: Helm, storage: str, ports: set[int]
) -> None:
    two = "replicas=2,persistence.enabled=false,insecurePlaintext=true"
    manifests = offline.template("--set", f"{two},settings.storage={storage}")
    _, to = of_kind(manifests, "NetworkPolicy")["spec"]["egress"]
    assert {each["port"] for each in to["ports"]} == ports


def test_the_network_policy_allows_dns_on_the_ports_of_its_pods(offline: Helm) -> None:
    policy = of_kind(offline.template(*PLAIN), "NetworkPolicy")
    dns, _ = policy["spec"]["egress"]
    assert dns["ports"] == [{"port": 53, "protocol": each} for each in ("UDP", "TCP")]
    words = (*PLAIN, "--set", "networkPolicy.dnsPorts={5353}")
    dns, _ = of_kind(offline.template(*words), "NetworkPolicy")["spec"]["egress"]
    assert {each["port"] for each in dns["ports"]} == {5353}


def test_the_two_pods_of_one_template_avoid_each_other(offline: Helm) -> None:
    def term(version: str) -> dict[str, Any]:
        words = ("template", "moorage", str(CHART), "--kube-version", version, *PLAIN, *TWO)
        found = [each for each in yaml.safe_load_all(offline.run(*words)) if each]
        affinity = of_kind(found, "Deployment")["spec"]["template"]["spec"]["affinity"]
        kind = "preferredDuringSchedulingIgnoredDuringExecution"
        (only,) = affinity["podAntiAffinity"][kind]
        return only["podAffinityTerm"]

    # In a rollout, old pods have the same labels; without this key they also count, and push new
    # pods onto one node.
    assert term("1.31.0")["matchLabelKeys"] == ["pod-template-hash"]
    assert "matchLabelKeys" not in term("1.30.0"), "Kubernetes 1.28 refuses unknown fields"


def test_an_upgrade_of_the_chart_scales_one_pod_to_two_and_back(
    helm: Helm, fresh_plane: Plane
) -> None:
    where = "/apis/apps/v1/namespaces/moorage/deployments/moorage"

    def replicas() -> tuple[int, str]:
        spec = fresh_plane.call("GET", where)["spec"]
        return spec["replicas"], spec["strategy"]["type"]

    helm.run("install", "moorage", str(CHART), *PLAIN, "--set", "persistence.enabled=false")
    assert replicas() == (1, "Recreate")
    helm.run("upgrade", "moorage", str(CHART), *PLAIN, *TWO)
    assert replicas() == (2, "RollingUpdate")
    helm.run("rollback", "moorage", "1")
    assert replicas() == (1, "Recreate")


def test_an_api_server_accepts_every_field_of_the_chart(
    helm: Helm, fresh_plane: Plane, tmp_path: Path
) -> None:
    kubectl = binaries("kubectl")["kubectl"]
    words = (*TLS, *ALL, "--set", "serviceMonitor.enabled=false")
    file = tmp_path / "rendered.yaml"
    file.write_text(yaml.safe_dump_all(helm.template(*words)))
    config = yaml.safe_load(fresh_plane.kubeconfig().read_text())
    config["contexts"][0]["context"]["namespace"] = "moorage"
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    subprocess.run(
        [kubectl, "apply", "--dry-run=server", "--validate=strict", "-f", file],
        env={**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig")},
        check=True,
    )
    helm.run("install", "moorage", str(CHART), *TLS, *TWO, "--dry-run=server")
    # An invalid label proves that the API server checks fields.
    helm.run("install", "moorage", str(CHART), *PLAIN, "--set", "nodeSelector.a=b c", fails=True)
    helm.run("uninstall", "moorage")


def test_releases_of_one_name_share_a_namespace_of_workloads(
    helm: Helm, fresh_plane: Plane, tmp_path: Path
) -> None:
    other = Helm(tmp_path, fresh_plane.kubeconfig(), "other")
    for each in (helm, other):
        each.run("install", "moorage", str(CHART), *TLS, *SHARED)
    path = "/apis/rbac.authorization.k8s.io/v1/namespaces/moorage-workloads/rolebindings"
    bound = fresh_plane.call("GET", path)["items"]
    assert {(each["subjects"][0]["namespace"], each["roleRef"]["name"]) for each in bound} == {
        (space, f"{space}.moorage-workloads") for space in ("moorage", "other")
    }
    other.run("uninstall", "moorage")


def revisions(helm: Helm) -> list[tuple[int, str]]:
    found = json.loads(helm.run("history", "moorage", "--output", "json"))
    return [(each["revision"], each["status"]) for each in found]


def test_the_chart_is_installed_upgraded_and_rolled_back(helm: Helm, fresh_plane: Plane) -> None:
    fresh_plane.create(node("n1", gpus=1))
    short = (*PLAIN, "--set", "persistence.enabled=false", "--wait", "--timeout", "100s")
    where = "/apis/apps/v1/namespaces/moorage/deployments/moorage"

    def image() -> str:
        spec = fresh_plane.call("GET", where)["spec"]["template"]["spec"]
        found: str = spec["containers"][0]["image"]
        return found

    helm.run("install", "moorage", str(CHART), *short)
    assert image() == "moorage:0.1.0"
    (running,) = fresh_plane.all("Pod", "moorage")
    assert running["status"]["phase"] == "Running"
    slices = "/apis/discovery.k8s.io/v1/namespaces/moorage/endpointslices"
    assert fresh_plane.call("GET", slices)["items"][0]["endpoints"], "the Service finds the pod"
    new = ("--set", "image.tag=0.2.0", *short)
    helm.run("upgrade", "moorage", str(CHART), "--atomic", *new)
    assert image() == "moorage:0.2.0"
    helm.run("upgrade", "moorage", str(CHART), *new, "--set", "replicas=2", fails=True)
    helm.run("rollback", "moorage", "1", "--wait", "--timeout", "100s")
    assert image() == "moorage:0.1.0"
    states = [(1, "superseded"), (2, "superseded"), (3, "deployed")]
    assert revisions(helm) == states, "values that the schema refuses leave no revision"
    (running,) = fresh_plane.all("Pod", "moorage")
    assert running["spec"]["containers"][0]["image"] == "moorage:0.1.0"


def test_an_upgrade_of_two_pods_changes_the_leader_once(
    helm: Helm, fresh_plane: Plane, postgres: PostgresServer, tmp_path: Path
) -> None:
    from moorage.storage.postgres.leadership import look_around  # noqa: PLC0415  # An extra.

    fresh_plane.create(node("n1"))
    storage = postgres.database()
    own = f"settings.storage={storage},kubernetes.enabled=false"
    fate = "env[0].name=SIM_FATE,env[0].value=hang"
    words = (*PLAIN, *TWO, "--set", own, "--set", fate, "--wait", "--timeout", "200s")

    def images() -> list[tuple[str, bool]]:
        return sorted(
            (each["spec"]["containers"][0]["image"], is_ready(each))
            for each in fresh_plane.all("Pod", "moorage")
        )

    with ProcessKubelet(fresh_plane, tmp_path / "pods", storage):
        helm.run("install", "moorage", str(CHART), *words)
        pods = [("moorage:0.1.0", False), ("moorage:0.1.0", True)]
        fresh_plane.until(lambda: images() == pods, "one leads, and one stands by")
        before, _ = look_around(storage)
        assert before is not None
        helm.run("upgrade", "moorage", str(CHART), "--set", "image.tag=0.2.0", *words)
        fresh_plane.until(
            lambda: leads_since(storage, before.epoch), "another one leads, without hands"
        )
        pods = [("moorage:0.2.0", False), ("moorage:0.2.0", True)]
        fresh_plane.until(lambda: images() == pods, "both are new")
        # The pod of a standby is never ready, so its state does not show that it stands by.
        fresh_plane.until(lambda: look_around(storage)[1], "the new server stands by")
        after, standbys = look_around(storage)
    assert after is not None
    assert after.epoch == before.epoch + 1
    assert before.seat.rollout != after.seat.rollout
    assert [each.rollout for each in standbys] == [after.seat.rollout]


def leads_since(storage: str, epoch: int) -> bool:
    from moorage.storage.postgres.leadership import look_around  # noqa: PLC0415  # An extra.

    leader, _ = look_around(storage)
    return leader is not None and leader.epoch > epoch


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)


def test_helm_uninstall_leaves_the_volume_of_the_ledger(helm: Helm, namespaces: Plane) -> None:
    helm.run("install", "moorage", str(CHART), *PLAIN)
    helm.run("uninstall", "moorage")
    claims = "/api/v1/namespaces/moorage/persistentvolumeclaims"
    assert [each["metadata"]["name"] for each in namespaces.call("GET", claims)["items"]] == [
        "moorage"
    ]
    helm.run("install", "moorage", str(CHART), *PLAIN)

"""An API server accepts the manifests of deploy/kubernetes, and their rights suffice."""

import asyncio
import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_binaries import binaries
from kubernetes_objects import claim, dra_node, node, pod
from kubernetes_plane import Plane, PlaneError, own_plane

from moorage.backends.base import BackendError, Order
from moorage.backends.kubernetes.backend import KubernetesBackend
from moorage.backends.kubernetes.connection import ClusterConnection
from moorage.backends.kubernetes.errors import KubernetesError
from moorage.backends.kubernetes.following import ClusterSource
from moorage.backends.kubernetes.inventory import ClusterInventory
from moorage.backends.kubernetes.specs import (
    JobResourceSpec,
    PodResourceSpec,
    PodServiceResourceSpec,
)
from moorage.config.settings import settings
from moorage.model import ClusterId, NodeId, Share
from moorage.testing.daemon_process import daemon
from moorage_client import BlockingClient
from moorage_client.services import Services
from moorage_policies import catalog

pytestmark = [pytest.mark.kubernetes, pytest.mark.heavy]

plane = own_plane

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
INVENTORY = "/apis/rbac.authorization.k8s.io/v1/clusterroles/moorage-inventory"
ACCOUNT = "/api/v1/namespaces/moorage/serviceaccounts/moored"
USER = "system:serviceaccount:moorage:moored"
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
GROUPS = {
    "Deployment": "/apis/apps/v1",
    "NetworkPolicy": "/apis/networking.k8s.io/v1",
    "PersistentVolumeClaim": "/api/v1",
    "Namespace": "/api/v1",
    "Service": "/api/v1",
    "ServiceAccount": "/api/v1",
}
CLUSTER_WIDE = {"Namespace", "ClusterRole", "ClusterRoleBinding"}


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def path(manifest: dict[str, Any]) -> str:
    kind = manifest["kind"]
    root = GROUPS.get(kind, "/apis/rbac.authorization.k8s.io/v1")
    place = "" if kind in CLUSTER_WIDE else f"/namespaces/{manifest['metadata']['namespace']}"
    plural = kind.lower()[:-1] + "ies" if kind.endswith("y") else kind.lower() + "s"
    return f"{root}{place}/{plural}"


def apply(plane: Plane, manifest: dict[str, Any], **parameters: str) -> None:
    plane.call("POST", path(manifest), manifest, fieldValidation="Strict", **parameters)


@pytest.fixture(scope="module")
def plane_with_roles(plane: Plane) -> Plane:
    """The control plane, whose account of the Deployment has the rights in rbac.yaml."""
    for manifest in (*manifests("0-namespaces.yaml"), *manifests("rbac.yaml")):
        apply(plane, manifest)
    return plane


@pytest.fixture
def account(plane_with_roles: Plane, fresh_plane: Plane, tmp_path: Path) -> Path:
    """Return a kubeconfig that logs in as the account of the Deployment."""
    wanted = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = plane_with_roles.call("POST", f"{ACCOUNT}/token", wanted)["status"]["token"]
    config = yaml.safe_load(plane_with_roles.kubeconfig().read_text())
    config["users"][0]["user"] = {"token": token}
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return file


def test_an_api_server_accepts_each_manifest_with_every_field(plane_with_roles: Plane) -> None:
    for manifest in manifests("moored.yaml"):
        apply(plane_with_roles, manifest, dryRun="All")


def test_the_commands_of_the_manifests_work_in_order(fresh_plane: Plane, tmp_path: Path) -> None:
    kubectl = str(binaries("kubectl")["kubectl"])
    (tmp_path / "kubectl").symlink_to(kubectl)
    path = os.pathsep.join((str(tmp_path), os.environ["PATH"]))
    environment = {"PATH": path, "KUBECONFIG": str(fresh_plane.kubeconfig()), "HOME": str(tmp_path)}
    for name in ("moored.yaml", "rbac.yaml"):
        commands = re.findall(r"^#   (kubectl .*)$", (FOLDER / name).read_text(), re.MULTILINE)
        assert len(commands) > 2
        for command in (*commands, "kubectl apply --dry-run=server -f deploy/kubernetes"):
            subprocess.run(
                ["bash", "-euc", command], cwd=FOLDER.parents[1], env=environment, check=True
            )


def test_the_deployment_uses_the_defined_account_volume_and_ports() -> None:
    found = {each["kind"]: each for each in manifests("moored.yaml")}
    spec = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    account = next(x for x in manifests("rbac.yaml") if x["kind"] == "ServiceAccount")["metadata"]
    assert (spec["serviceAccountName"], "moorage") == (account["name"], account["namespace"])
    ports = {each["name"] for each in container["ports"]}
    assert {each["targetPort"] for each in found["Service"]["spec"]["ports"]} == ports
    (ingress,) = found["NetworkPolicy"]["spec"]["ingress"]
    assert {each["port"] for each in ingress["ports"]} == ports
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")]
    assert {each["port"] for each in probes} == {"http"}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts["data"] == "/var/lib/moorage"
    claimed = {each["name"]: each for each in spec["volumes"]}["data"]["persistentVolumeClaim"]
    assert claimed["claimName"] == found["PersistentVolumeClaim"]["metadata"]["name"]
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels == found["Service"]["spec"]["selector"]
    assert labels == found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert {each["name"] for each in container["env"]} <= {
        each.environment for each in settings().values()
    }
    given = {each["name"]: each.get("value") for each in container["env"]}
    (role,) = (x for x in manifests("rbac.yaml") if x["kind"] == "Role")
    assert given["MOORAGE_KUBERNETES_NAMESPACE"] == role["metadata"]["namespace"]
    # With links, a Service called `moorage` would set MOORAGE_PORT to a URL.
    assert spec["enableServiceLinks"] is False


@contextlib.contextmanager
def without(plane: Plane, group: int, resource: str) -> Iterator[None]:
    """Remove a right of the account until the block ends."""
    rules = plane.call("GET", INVENTORY)["rules"]
    fewer = [{**each, "resources": [*each["resources"]]} for each in rules]
    fewer[group]["resources"].remove(resource)

    def set_rules(now: list[dict[str, Any]], *, allowed: bool) -> None:
        """Change the rules of a role, and wait until the API server applies the rules."""
        plane.call("PATCH", INVENTORY, {"rules": now})
        named = {"group": rules[group]["apiGroups"][0], "resource": resource, "verb": "list"}
        review = {"spec": {"user": USER, "resourceAttributes": named}}
        plane.until(
            lambda: plane.call("POST", REVIEWS, review)["status"]["allowed"] is allowed, resource
        )

    set_rules(fewer, allowed=False)
    try:
        yield
    finally:
        set_rules(rules, allowed=True)


async def test_the_inventory_needs_exactly_the_rights_that_it_has(
    plane_with_roles: Plane, account: Path
) -> None:
    plane_with_roles.create(
        *dra_node("n1", 2), claim("theirs", ["GPU-n1-0"]), pod("p", claim_name="theirs")
    )
    async with await ClusterConnection.open(account) as connection:
        async with ClusterInventory(connection, "c1") as inventory:
            await inventory.listed()
            assert inventory.document()["gpus"]["count"] == 2
        for number, rule in enumerate(plane_with_roles.call("GET", INVENTORY)["rules"]):
            assert rule["verbs"] == ["list", "watch"]
            for resource in rule["resources"]:
                with without(plane_with_roles, number, resource):
                    async with ClusterInventory(connection, "c1") as inventory:
                        with pytest.raises(KubernetesError, match=f"{resource}: .*forbidden"):
                            await inventory.listed(2)


@pytest.mark.parametrize(
    ("method", "where"),
    [
        ("POST", "/api/v1/namespaces/default/pods"),
        ("DELETE", "/api/v1/namespaces/default/pods/theirs"),
        ("GET", "/api/v1/namespaces/moorage-workloads/secrets"),
        ("GET", "/api/v1/nodes/n1"),
        ("PATCH", "/api/v1/nodes/n1"),
        ("POST", "/api/v1/namespaces/moorage-workloads/pods/theirs/eviction"),
        ("POST", "/api/v1/namespaces/moorage-workloads/pods/theirs/binding"),
        ("GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles"),
    ],
)
async def test_the_role_of_moored_forbids_all_other_calls(
    account: Path, method: str, where: str
) -> None:
    async with await ClusterConnection.open(account) as connection:
        with pytest.raises(KubernetesError, match="403 Forbidden"):
            await connection.call(method, where, None if method == "GET" else {})


def test_a_daemon_with_the_rights_of_the_manifests_leases_gpus(
    plane_with_roles: Plane, account: Path
) -> None:
    plane_with_roles.create(node("n1", gpus=2))
    environment = {
        "MOORAGE_KUBERNETES_CLUSTERS": "here="
        + yaml.safe_load(account.read_text())["current-context"],
        "MOORAGE_KUBERNETES_CONFIG": str(account),
    }
    with daemon(environment=environment) as running, BlockingClient(running.ws) as client:
        with Services(running.http) as services:
            services.publish_policy(catalog.document("first_fit"))
        plane_with_roles.until(client.fleet, "the cluster is there")
        answer = client.ask(
            "first_fit:1.0-stable", resources={"gpus": 2}, lease={"ttl_seconds": 60}
        )
        assert answer.lease.placement[0].node_id == "n1"


def calls_since(plane: Plane, since: int) -> set[tuple[str, str]]:
    """Return the account's calls since a line of the log, in the terms of RBAC."""
    found = set[tuple[str, str]]()
    for line in plane.audit_log.read_text().splitlines()[since:]:
        event = json.loads(line)
        about = event.get("objectRef", {})
        if name := about.get("resource"):
            sub = about.get("subresource")
            found.add((f"{name}/{sub}" if sub else name, event["verb"]))
    return found


def rights(*names: str) -> set[tuple[str, str]]:
    return {
        (resource, verb)
        for manifest in manifests("rbac.yaml")
        if manifest["kind"] in {"Role", "ClusterRole"} and manifest["metadata"]["name"] in names
        for rule in manifest["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


async def test_the_backend_needs_exactly_the_rights_that_it_has(
    plane_with_roles: Plane, account: Path, tmp_path: Path
) -> None:
    plane_with_roles.create(*dra_node("n1", 4))
    log = plane_with_roles.audit_log
    since = len(log.read_text().splitlines()) if log.exists() else 0
    source = ClusterSource("c1", kubeconfig=account)
    backend = KubernetesBackend(tmp_path / "data", [source], "moorage-workloads")

    def order(name: str, spec: Any, gpu: int) -> Order:
        share = Share(ClusterId("c1"), NodeId("n1"), (f"GPU-n1-{gpu}",))
        return Order(name, spec, (share,), {}, 60, fencing=7)

    def spec(kind: Any, **more: Any) -> Any:
        return kind(image="registry.example/none:1", stop_seconds=5, **more)

    await backend.start(order("pod", spec(PodResourceSpec), 0))
    await backend.start(order("job", spec(JobResourceSpec, environment={"SIM_RUN": "300s"}), 1))
    service = spec(PodServiceResourceSpec, port=8000)
    await backend.start(order("service", service, 2))
    async with asyncio.timeout(60):
        while "started" not in (await backend.logs("pod")).text:  # noqa: ASYNC110  # As below.
            await asyncio.sleep(0.1)  # No event reports that it follows the log.
    assert (await backend.execute("pod", ["true"], timeout_seconds=30)).exit_code == 0
    await backend.close()
    backend = KubernetesBackend(tmp_path / "data", [source], "moorage-workloads")
    assert {each.id for each in await backend.discover()} == {"pod", "job", "service"}
    plane_with_roles.kill("kwok")  # The backend polls pods that end slowly.
    ending = asyncio.gather(*(backend.stop(name) for name in ("pod", "job", "service")))
    wanted = {(name, "get") for name in ("pods", "jobs", "resourceclaims")}
    await asyncio.to_thread(
        plane_with_roles.until,
        lambda: wanted <= calls_since(plane_with_roles, since),
        f"they are called: {wanted}",
        60,
    )
    plane_with_roles.start("kwok")
    await ending
    assert not await backend.discover()
    await backend.close()
    # Kubernetes 1.35 also needs the right to create an execution; 1.36 has PodGroups.
    assert calls_since(plane_with_roles, since) == rights(
        "moorage-inventory", "moorage-workloads"
    ) - {
        ("pods/exec", "create"),
        ("podgroups", "create"),
        ("podgroups", "delete"),
    }


async def test_without_the_right_to_create_pods_a_start_fails_at_once_and_leaves_nothing_behind(
    plane_with_roles: Plane, account: Path, tmp_path: Path
) -> None:
    plane_with_roles.create(*dra_node("n1", 4))
    backend = KubernetesBackend(
        tmp_path / "data", [ClusterSource("c1", kubeconfig=account)], "default"
    )
    spec = PodResourceSpec(image="registry.example/none:1", stop_seconds=5)
    share = Share(ClusterId("c1"), NodeId("n1"), ("GPU-n1-0",))
    async with asyncio.timeout(60):
        with pytest.raises(
            BackendError, match=r"may not create a ResourceClaim in namespace default"
        ):
            await backend.start(Order("a", spec, (share,), {}, 300, fencing=7))
        await backend.stop("a")
        await backend.close()


def test_the_api_server_refuses_misspelt_manifests(plane_with_roles: Plane) -> None:
    manifest = next(x for x in manifests("moored.yaml") if x["kind"] == "Service")
    manifest["spec"]["selektor"] = {}
    with pytest.raises(PlaneError, match="selektor"):
        apply(plane_with_roles, manifest, dryRun="All")

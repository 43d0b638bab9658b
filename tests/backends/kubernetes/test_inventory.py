"""The inventory of a real cluster follows every change, and outlives cuts and restarts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from kubernetes_objects import claim, dra_node, gpu, node, pod, resource_slice
from kubernetes_plane import Plane
from kubernetes_wire import Wire

from moorage.backends.kubernetes.connection import ClusterConnection
from moorage.backends.kubernetes.errors import (
    ConfigurationError,
    KubernetesError,
    NoAnswerError,
    RefusedError,
)
from moorage.backends.kubernetes.inventory import ClusterInventory
from moorage.backends.kubernetes.records import SERVER_LABEL
from moorage.backends.kubernetes.watching import Kind, ObjectWatcher

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.heavy,
    # If the API server ends during a handshake, garbage collection may close the connection.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SEEN_SECONDS_MAX = 90


@contextlib.asynccontextmanager
async def following(kubeconfig: Path) -> AsyncIterator[ClusterInventory]:
    async with (
        await ClusterConnection.open(kubeconfig) as connection,
        ClusterInventory(connection, "c1", server="ours") as inventory,
    ):
        await inventory.listed()
        yield inventory


async def wait_nodes(inventory: ClusterInventory, happened: Callable[[dict[str, Any]], Any]) -> Any:
    """Call `happened` with the nodes by name until its result is true; return that result."""
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        while True:
            version = inventory.version
            nodes = {each["id"]: each for each in inventory.document()["nodes"]["nodeData"]}
            if answer := happened(nodes):
                return answer
            await inventory.wait_for_change(version)


def used(nodes: dict[str, Any], name: str) -> dict[str, Any]:
    return nodes[name].get("used", {})


async def test_the_inventory_lists_existing_nodes(fresh_plane: Plane) -> None:
    plane = fresh_plane
    plane.create(*dra_node("n1", 2), node("n2", gpus=4), node("n3"))
    plane.create(pod("theirs", gpus=3, node_name="n2", cpu="2"))
    await asyncio.to_thread(
        plane.until, lambda: plane.get("Pod", "theirs")["spec"].get("nodeName"), "it is bound"
    )
    async with following(plane.kubeconfig()) as inventory:
        document = inventory.document()
        nodes = {each["id"]: each for each in document["nodes"]["nodeData"]}
        assert list(nodes) == ["n1", "n2", "n3"]
        assert [each["id"] for each in nodes["n1"]["gpus"]["gpus"]] == ["GPU-n1-0", "GPU-n1-1"]
        assert used(nodes, "n2") == {"cpuMilli": 2000, "memoryMib": 1024, "gpus": ["1", "2", "3"]}
        assert document["gpus"]["count"] == 6
        assert [(each.error, each.lists) for each in inventory.health()] == [("", 1)] * 4


async def test_the_inventory_follows_every_change_of_the_cluster(fresh_plane: Plane) -> None:
    plane = fresh_plane
    async with following(plane.kubeconfig()) as inventory:
        assert inventory.document()["nodes"]["count"] == 0
        plane.create(node("n1", gpus=2, labels={"pool": "a"}))
        await wait_nodes(
            inventory, lambda nodes: "n1" in nodes and "unavailable" not in nodes["n1"]
        )
        plane.patch("Node", "n1", {"metadata": {"labels": {"pool": "b"}}})
        await wait_nodes(inventory, lambda nodes: nodes["n1"]["labels"]["pool"] == "b")
        plane.patch("Node", "n1", {"spec": {"unschedulable": True}})
        await wait_nodes(inventory, lambda nodes: nodes["n1"].get("unavailable") == "cordoned")
        await wait_nodes(inventory, lambda nodes: nodes["n1"].get("taints"))
        plane.patch("Node", "n1", {"spec": {"unschedulable": False}})
        await wait_nodes(inventory, lambda nodes: "unavailable" not in nodes["n1"])
        sick = {"allocatable": {"nvidia.com/gpu": "1"}}
        plane.patch("Node", "n1", {"status": sick}, at="status")
        await wait_nodes(inventory, lambda nodes: nodes["n1"]["gpus"]["count"] == 1)
        plane.delete("Node", "n1")
        await wait_nodes(inventory, lambda nodes: not nodes)


async def test_the_inventory_follows_use_by_other_pods_and_ignores_our_own_pods(
    fresh_plane: Plane,
) -> None:
    plane = fresh_plane
    plane.create(*dra_node("n1", 3))
    ours = {SERVER_LABEL: "ours"}
    async with following(plane.kubeconfig()) as inventory:
        plane.create(claim("own", ["GPU-n1-0"], labels=ours))
        plane.create(pod("own", claim_name="own", labels=ours))
        plane.create(claim("theirs", ["GPU-n1-2"]), pod("theirs", claim_name="theirs", run="1s"))
        await wait_nodes(inventory, lambda nodes: used(nodes, "n1").get("gpus") == ["GPU-n1-2"])
        await wait_nodes(inventory, lambda nodes: not used(nodes, "n1"))  # The other pod has ended.
        assert plane.get("ResourceClaim", "own")["status"]["allocation"]


async def test_our_own_pods_do_not_change_the_document(fresh_plane: Plane) -> None:
    fresh_plane.create(*dra_node("n1", 3))
    async with following(fresh_plane.kubeconfig()) as inventory:
        await wait_nodes(inventory, lambda nodes: "unavailable" not in nodes["n1"])
        made, heard = inventory.remade, inventory.version
        fresh_plane.create(pod("own", node_name="n1", labels={SERVER_LABEL: "ours"}))
        await inventory.wait_for_change(heard)
        assert used(await wait_nodes(inventory, lambda nodes: nodes), "n1") == {}
        assert inventory.remade == made


async def test_a_removed_device_leaves_the_document(fresh_plane: Plane) -> None:
    plane = fresh_plane
    plane.create(*dra_node("n1", 2))
    async with following(plane.kubeconfig()) as inventory:
        (name,) = [each["metadata"]["name"] for each in plane.all("ResourceSlice")]
        devices = [gpu(0, "GPU-n1-0")]
        plane.patch("ResourceSlice", name, {"spec": {"devices": devices}})
        await wait_nodes(inventory, lambda nodes: nodes["n1"]["gpus"]["count"] == 1)
        plane.delete("ResourceSlice", name)
        await wait_nodes(inventory, lambda nodes: nodes["n1"]["gpus"]["count"] == 0)


async def test_a_broken_watch_continues_at_its_last_version(
    fresh_plane: Plane, tmp_path: Path
) -> None:
    plane, wire = fresh_plane, Wire(fresh_plane, tmp_path)
    await wire.mend()
    plane.create(node("n1"), node("n2"))
    async with following(wire.kubeconfig) as inventory:
        await wire.cut()
        plane.delete("Node", "n1")
        plane.create(node("n3"), resource_slice("n3", [gpu(0, "GPU-1")]))
        await wire.mend()
        await wait_nodes(inventory, lambda nodes: sorted(nodes) == ["n2", "n3"])
        await wait_nodes(inventory, lambda nodes: nodes["n3"]["gpus"]["count"] == 1)
        assert [each.lists for each in inventory.health()] == [1] * 4
    await wire.cut()


async def test_after_an_expired_watch_version_the_inventory_lists_the_nodes_again(
    fresh_plane: Plane, tmp_path: Path
) -> None:
    plane, wire = fresh_plane, Wire(fresh_plane, tmp_path)
    await wire.mend()
    plane.create(node("n1"), *dra_node("n2", 1))
    async with following(wire.kubeconfig) as inventory:
        await wire.cut()
        plane.delete("Node", "n1")
        plane.create(pod("theirs", gpus=0, cpu="3"))
        plane.kill("kube-apiserver")
        await asyncio.to_thread(plane.start, "kube-apiserver")
        await wire.mend()
        await wait_nodes(inventory, lambda nodes: sorted(nodes) == ["n2"])
        await wait_nodes(inventory, lambda nodes: used(nodes, "n2").get("cpuMilli") == 3000)
        assert max(each.lists for each in inventory.health()) > 1
        plane.create(node("n3"))
        await wait_nodes(inventory, lambda nodes: "n3" in nodes)
    await wire.cut()


async def test_health_reports_an_unreachable_api_server(fresh_plane: Plane) -> None:
    plane = fresh_plane
    plane.create(node("n1"))
    async with following(plane.kubeconfig()) as inventory:
        plane.kill("kube-apiserver")
        async with asyncio.timeout(SEEN_SECONDS_MAX):
            while not all(each.error for each in inventory.health()):  # noqa: ASYNC110  # No event reports this.
                await asyncio.sleep(0.05)  # Health is a value without an event.
        assert inventory.document()["nodes"]["count"] == 1
        await asyncio.to_thread(plane.start, "kube-apiserver")
        plane.create(node("n2"))
        await wait_nodes(inventory, lambda nodes: "n2" in nodes)


async def test_an_unreadable_object_does_not_end_the_watch(fresh_plane: Plane) -> None:
    fresh_plane.create(node("n1"))
    heard = asyncio.Event()
    odd = True

    def read(raw: msgspec.Raw) -> bytes:
        if odd:
            raise TypeError("an object that no API documents")
        return bytes(raw)

    async with await ClusterConnection.open(fresh_plane.kubeconfig()) as connection:
        kind = Kind("nodes", "/api/v1/nodes", read)
        watcher = ObjectWatcher(connection, kind, lambda *_: heard.set())
        task = asyncio.create_task(watcher.run())
        async with asyncio.timeout(SEEN_SECONDS_MAX):
            while watcher.error is None:  # noqa: ASYNC110  # No event reports this.
                await asyncio.sleep(0.05)  # As above.
            assert "an object that no API documents" in str(watcher.error)
            odd = False
            await heard.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_after_a_burst_of_pods_the_document_is_correct(fresh_plane: Plane) -> None:
    plane = fresh_plane
    plane.create(node("n1", cpu=1000, memory="2Ti"), node("n2", cpu=1000, memory="2Ti"))
    async with following(plane.kubeconfig()) as inventory:

        def burst() -> None:
            for number in range(150):
                plane.create(pod(f"p{number}", run="50ms" if number % 3 else ""))

        await asyncio.to_thread(burst)
        await wait_nodes(
            inventory,
            lambda nodes: sum(used(nodes, each).get("cpuMilli", 0) for each in nodes) == 50_000,
        )


def role(*resources: str) -> list[dict[str, Any]]:
    """Return the role and the binding with which the user `moorage` may read these resources."""
    api = "rbac.authorization.k8s.io"
    groups = ["", "resource.k8s.io"]
    rules = [{"apiGroups": groups, "resources": list(resources), "verbs": ["list", "watch"]}]
    subject = {"kind": "User", "name": "moorage", "apiGroup": api}
    reference = {"kind": "ClusterRole", "name": "reads", "apiGroup": api}
    meta = {"name": "reads"}
    return [
        {"apiVersion": f"{api}/v1", "kind": "ClusterRole", "metadata": meta, "rules": rules},
        {
            "apiVersion": f"{api}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": meta,
            "roleRef": reference,
            "subjects": [subject],
        },
    ]


async def test_the_error_names_missing_permissions_of_the_account(fresh_plane: Plane) -> None:
    plane = fresh_plane
    async with await ClusterConnection.open(plane.kubeconfig("moorage")) as connection:
        with pytest.raises(RefusedError, match='cannot list resource "pods"') as refused:
            await connection.read("/api/v1/pods")
        assert (refused.value.status, refused.value.reason) == (403, "Forbidden")
        plane.create(*role("nodes", "pods", "resourceclaims"))
        async with ClusterInventory(connection, "c1") as inventory:
            with pytest.raises(KubernetesError, match=r"resourceslices\S* is forbidden"):
                await inventory.listed(5)
            change = {
                "rules": role("nodes", "pods", "resourceslices", "resourceclaims")[0]["rules"]
            }
            plane.patch("ClusterRole", "reads", change)
            await inventory.listed()
    plane.delete("ClusterRoleBinding", "reads")
    plane.delete("ClusterRole", "reads")


async def test_a_connection_replaces_an_expired_token(fresh_plane: Plane, tmp_path: Path) -> None:
    config = yaml.safe_load(fresh_plane.kubeconfig().read_text())
    good = config["users"][0]["user"]["token"]
    file = tmp_path / "kubeconfig"
    config["users"][0]["user"]["token"] = "expired"  # noqa: S105  # A test's value.
    file.write_text(yaml.safe_dump(config))
    async with await ClusterConnection.open(file) as connection:
        config["users"][0]["user"]["token"] = good
        file.write_text(yaml.safe_dump(config))
        assert await connection.call("GET", "/api/v1/nodes")


async def test_the_error_names_an_unreadable_or_unreachable_cluster(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        await ClusterConnection.open(tmp_path / "nowhere")
    file = tmp_path / "kubeconfig"
    file.write_text(
        yaml.safe_dump(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
                "users": [{"name": "u", "user": {}}],
            }
        )
    )
    with pytest.raises(ConfigurationError, match="other"):
        await ClusterConnection.open(file, "other")
    async with await ClusterConnection.open(file) as connection:
        with pytest.raises(NoAnswerError, match=r"127\.0\.0\.1:9"):
            await connection.read("/version")

"""Tests of a daemon that follows a Kubernetes cluster: inventory, silent clusters, no grants."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from kubernetes_objects import claim, dra_node, gpu, node, pod
from kubernetes_plane import Plane

from moorage.protocol.cluster_documents import machine_key
from moorage.testing.daemon_process import Running, daemon
from moorage_client import BlockingClient, RequestRefused
from moorage_client.services import Services
from moorage_policies import catalog

pytestmark = [pytest.mark.kubernetes, pytest.mark.heavy]

FIRST_FIT = "first_fit:1.0-stable"


def contexts(plane: Plane, path: Path) -> Path:
    """Write a kubeconfig with two contexts: `west` is the plane, `east` has no server."""
    config = yaml.safe_load(plane.kubeconfig().read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["name"]
    nowhere = {"server": "https://127.0.0.1:9"}
    config["clusters"] = [
        {"name": "west", "cluster": cluster},
        {"name": "east", "cluster": nowhere},
    ]
    config["contexts"] = [
        {"name": name, "context": {"cluster": name, "user": user}} for name in ("west", "east")
    ]
    path.write_text(yaml.safe_dump(config))
    return path


class World:
    """A daemon that follows two clusters, and its client."""

    def __init__(self, plane: Plane, running: Running, client: BlockingClient) -> None:
        self.plane, self.running, self.client = plane, running, client
        self.held: list[Any] = []

    def document(self, cluster: str = "west") -> dict[str, Any]:
        return httpx.get(f"{self.running.http}/clusters/{cluster}").json()

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {each["node_id"]: each for each in self.client.fleet("west")}

    def free(self, name: str) -> int:
        return sum(self.nodes()[name]["gpus"].values())

    def until(self, happened: Callable[[], Any], what: str) -> Any:
        def attempt() -> Any:
            try:
                return happened()
            except (KeyError, RequestRefused):
                return None

        return self.plane.until(attempt, what, 60)

    def lease(self, gpus: int = 1) -> Any:
        answer = self.client.ask(FIRST_FIT, resources={"gpus": gpus}, lease={"ttl_seconds": 600})
        self.held.append(answer.lease)
        return answer.lease

    def refused(self, gpus: int = 1) -> str:
        with pytest.raises(RequestRefused) as refused:
            self.lease(gpus)
        return refused.value.code

    def drift(self, kind: str) -> float:
        text = httpx.get(f"{self.running.http}/metrics").text
        name = f'moorage_drift{{cluster="west",kind="{kind}"}} '
        return next((float(x[len(name) :]) for x in text.splitlines() if x.startswith(name)), 0.0)

    def state(self, lease: Any) -> str:
        return self.client.status(lease.id)["state"]

    def release(self, lease: Any) -> None:
        self.client.release(lease.id, lease.token)

    def said(self, lease: Any) -> str:
        return "; ".join(self.client.why(lease.id).get("drift", []))


@pytest.fixture(scope="module")
def running(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("moored")
    environment = {
        "MOORAGE_KUBERNETES_CLUSTERS": "west,east",
        "MOORAGE_KUBERNETES_CONFIG": str(contexts(plane, folder / "kubeconfig")),
    }
    with daemon(environment=environment) as running:
        with Services(running.http) as services:
            services.publish_policy(catalog.document("first_fit"))
        yield running


@pytest.fixture
def world(fresh_plane: Plane, running: Running) -> Iterator[World]:
    with BlockingClient(running.ws) as client:
        world = World(fresh_plane, running, client)
        world.until(lambda: world.nodes() == {}, "nodes of the test before are gone")
        yield world
        for each in world.held:
            world.release(each)


def test_gpus_that_other_pods_use_are_not_granted(world: World) -> None:
    world.plane.create(node("n1", gpus=4), pod("theirs", gpus=3, node_name="n1"))
    world.until(lambda: world.free("n1") == 1000, "three of four GPUs are in use")
    assert world.lease().placement[0].node_id == "n1"
    assert world.refused() == "no_capacity"
    world.plane.delete("Pod", "theirs")
    world.until(lambda: world.free("n1") == 3000, "they are free again")
    assert len(world.lease(3).placement[0].gpus) == 3


def test_a_cordoned_drained_or_tainted_node_keeps_its_leases_and_gets_no_new_lease(
    world: World,
) -> None:
    world.plane.create(node("n1", gpus=4))
    world.until(lambda: world.free("n1") == 4000, "the node is there")
    held = world.lease()
    for change, back, why in (
        ({"unschedulable": True}, {"unschedulable": None}, "cordoned"),
        ({"taints": [{"key": "repair", "effect": "NoSchedule"}]}, {"taints": []}, "tainted repair"),
    ):
        world.plane.patch("Node", "n1", {"spec": change})
        world.until(lambda why=why: world.nodes()["n1"].get("unavailable") == why, why)
        assert world.refused() == "no_capacity"
        assert world.state(held) == "granted"
        assert world.said(held) == f"west/n1 takes nothing new: {why}"
        world.until(lambda: world.drift("node_unavailable") == 1, "it is counted as drift")
        world.plane.patch("Node", "n1", {"spec": back})
        world.until(lambda: world.free("n1") == 3000, "it takes pods again, less what is held")
    world.until(lambda: world.drift("node_unavailable") == 0, "it is no longer drift")
    assert len(world.lease(3).placement[0].gpus) == 3
    assert world.refused() == "no_capacity"


def test_a_foreign_claim_on_a_granted_device_is_reported_and_no_lease_gets_the_device(
    world: World,
) -> None:
    world.plane.create(*dra_node("d1", 2))
    world.until(lambda: world.free("d1") == 2000, "the node is there")
    held = world.lease()
    (device,) = held.placement[0].gpus
    with world.client.watch("leases", timeout=60) as news:
        world.plane.create(claim("theirs", [device]), pod("theirs", claim_name="theirs"))
        drift = next(each for each in news if each.event == "drift").data
    assert (drift["id"], drift["kind"], drift["node_id"], drift["over"]) == (
        held.id,
        "device_taken",
        "d1",
        False,
    )
    assert device in drift["detail"]
    assert world.state(held) == "granted"
    assert device in world.said(held)
    other = world.lease()
    assert other.placement[0].gpus != (device,)
    world.release(held)
    assert world.refused() == "no_capacity"
    world.plane.delete("Pod", "theirs")
    world.plane.delete("ResourceClaim", "theirs")
    world.until(lambda: world.free("d1") == 1000, "the foreign claim is gone")
    assert world.lease().placement[0].gpus == (device,)


def test_vanished_devices_and_deleted_nodes_are_drift_until_they_return_with_their_leases(
    world: World,
) -> None:
    made, devices = dra_node("d1", 2)
    world.plane.create(made, devices)
    world.until(lambda: world.free("d1") == 2000, "the node is there")
    held = world.lease(2)
    name = devices["metadata"]["name"]
    world.plane.patch("ResourceSlice", name, {"spec": {"devices": [gpu(0, "GPU-d1-0")]}})
    world.until(lambda: "GPU-d1-1" in world.said(held), "a device is gone")
    world.until(lambda: world.drift("device_gone") == 1, "it is counted as drift")
    world.plane.patch("ResourceSlice", name, {"spec": devices["spec"]})
    world.until(lambda: not world.said(held), "it is back")
    assert world.refused() == "no_capacity"
    world.plane.delete("Node", "d1")
    world.until(lambda: "no longer in the inventory" in world.said(held), "the node is gone")
    world.until(lambda: world.drift("node_gone") == 1, "it is counted as drift")
    assert world.state(held) == "granted"
    world.plane.create(made)
    world.until(lambda: world.nodes()["d1"]["gpus"], "it is back")
    assert world.free("d1") == 0
    assert world.refused() == "no_capacity"


def test_a_silent_cluster_is_stale_and_keeps_its_leases_and_gets_no_new_leases(
    world: World,
) -> None:
    world.until(lambda: "127.0.0.1:9" in world.document("east")["unavailable"], "east is stale")
    world.plane.create(node("n1", gpus=2))
    world.until(lambda: world.free("n1") == 2000, "the node is there")
    held = world.lease()
    for stop, go_on in (
        (world.plane.pause, world.plane.resume),
        (world.plane.kill, world.plane.start),
    ):
        stop("kube-apiserver")
        world.until(lambda: world.document()["unavailable"], "the cluster is stale")
        world.until(lambda: world.nodes()["n1"]["unavailable"], "the core knows")
        assert world.refused() == "no_capacity"
        assert world.state(held) == "granted"
        go_on("kube-apiserver")
        world.until(lambda: world.free("n1") == 1000, "it answers again")
    assert world.lease().placement[0].node_id == "n1"


def test_a_cluster_whose_registration_was_refused_is_registered_later(world: World) -> None:
    machine = {"machineID": "11111111111111111111111111111111"}
    twin = node("n1", gpus=2)
    twin["status"]["nodeInfo"] = machine
    document = {
        "id": "elsewhere",
        "nodes": {"nodeData": [{"id": "x", "machineId": machine_key(machine["machineID"])}]},
    }
    httpx.post(f"{world.running.http}/clusters", json=document).raise_for_status()
    try:
        world.plane.create(twin)
        log = world.running.log
        world.until(
            lambda: "it cannot be registered" in log.read_text(), "it is refused, and logged"
        )
        assert "n1" not in world.nodes()
    finally:
        httpx.delete(f"{world.running.http}/clusters/elsewhere")
    world.until(lambda: world.free("n1") == 2000, "the node is there")

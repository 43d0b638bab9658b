"""Workloads at a real API server get exactly the devices and nodes of their leases."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kubernetes_objects import claim, dra_node, node, pod
from kubernetes_plane import Plane

from moorage.backends.base import (
    BackendError,
    Order,
    Phase,
    UnknownWorkloadError,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.kubernetes.backend import KubernetesBackend
from moorage.backends.kubernetes.following import ClusterSource
from moorage.backends.kubernetes.specs import (
    JobResourceSpec,
    PodResourceSpec,
    PodServiceResourceSpec,
)
from moorage.backends.kubernetes.workloads import runs
from moorage.backends.kubernetes.workloads.manifests import start_objects
from moorage.backends.kubernetes.workloads.states import PodState, pod_state, view
from moorage.backends.kubernetes.workloads.translation import pod_order
from moorage.backends.specs import (
    BaseResourceSpec,
    ContainerResourceSpec,
    Readiness,
    VLLMModelResourceSpec,
)
from moorage.model import ClusterId, NodeId, Share
from tests.waiting import async_until as until

pytestmark = [pytest.mark.kubernetes, pytest.mark.heavy]

IMAGE = "registry.example/none:1"


def share(node_id: str, *gpus: str, **sizes: int) -> Share:
    return Share(ClusterId("c1"), NodeId(node_id), gpus, **sizes)


def on(spec: BaseResourceSpec, *shares: Share, name: str = "a", fencing: int = 7) -> Order:
    return Order(name, spec, shares, {"MOORAGE_LEASE_ID": name}, 120, fencing=fencing)


def simulated_spec(**variables: str) -> PodResourceSpec:
    return PodResourceSpec(image=IMAGE, environment=variables, stop_seconds=0)


class World:
    """A Kubernetes backend under test, and the reports that it sends."""

    def __init__(self, plane: Plane, root: Path, namespace: str = "default") -> None:
        self.plane = plane
        self._arguments = (root, [ClusterSource("c1", kubeconfig=plane.kubeconfig())], namespace)
        self.reports: list[WorkloadReport] = []
        self._open()

    def _open(self) -> None:
        self.backend = KubernetesBackend(*self._arguments)
        self.backend.listen(self.reports.append)

    async def restart(self) -> None:
        """Open a new backend on the folder of the old one, as after a crash of the daemon."""
        await self.backend.close()
        self._open()

    async def heard(self, *phases: Phase) -> WorkloadReport:
        def last() -> WorkloadReport | None:
            return next((each for each in self.reports if each.phase in phases), None)

        return await until(last)

    def pods(self) -> list[dict[str, Any]]:
        return sorted(self.plane.all("Pod"), key=lambda each: each["metadata"]["name"])


@pytest.fixture
async def world(fresh_plane: Plane, tmp_path: Path) -> AsyncIterator[World]:
    made = World(fresh_plane, tmp_path)
    yield made
    for each in await made.backend.discover():
        await made.backend.stop(each.id)
    await made.backend.close()


def devices(plane: Plane) -> list[list[str]]:
    return [
        [each["device"] for each in found["status"]["allocation"]["devices"]["results"]]
        for found in plane.all("ResourceClaim")
    ]


async def test_a_pod_gets_the_devices_of_its_lease_in_the_order_of_the_lease(world):
    world.plane.create(*dra_node("n1"), *dra_node("n2"))
    order = on(
        simulated_spec(), share("n2", "GPU-n2-3", "GPU-n2-1", cpu_milli=1500, memory_mib=512)
    )
    ready = await world.backend.start(order)
    assert ready.phase is Phase.READY
    assert devices(world.plane) == [["gpu-3", "gpu-1"]]
    (made,) = world.pods()
    assert made["spec"]["nodeName"] == "n2"
    (container,) = made["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "1500m", "memory": "536870912"}
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["MOORAGE_LEASE_ID"] == "a"
    assert (variables["MOORAGE_NODE_ID"], variables["MOORAGE_RANK"]) == ("n2", "0")
    await world.backend.stop("a")
    assert world.plane.all("ResourceClaim") == []


async def test_on_nodes_that_only_count_gpus_a_pod_requests_their_number(world):
    world.plane.create(node("n1", gpus=4), node("n2", gpus=4))
    await world.backend.start(on(simulated_spec(), share("n2", "0", "2")))
    (made,) = world.pods()
    assert made["spec"]["nodeName"] == "n2"
    assert made["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert made["metadata"]["annotations"]["moorage.dev/gpus"] == "0,2"
    assert world.plane.all("ResourceClaim") == []


async def test_all_pods_of_a_gang_start_at_the_same_time_and_end_at_the_same_time(world):
    world.plane.create(*dra_node("n1"), *dra_node("n2"))
    gang = (share("n1", "GPU-n1-0"), share("n2", "GPU-n2-0"))
    await world.backend.start(on(simulated_spec(), *gang))
    assert [each["spec"]["nodeName"] for each in world.pods()] == ["n1", "n2"]
    first = world.pods()[0]["metadata"]["name"]
    await asyncio.to_thread(world.plane.delete, "Pod", first)
    over = await world.heard(Phase.FAILED)
    assert "another client deleted it" in over.detail
    await world.backend.stop("a")
    assert world.pods() == []


def test_pods_of_a_gang_name_their_pod_group_if_the_cluster_supports_groups():
    order = on(simulated_spec(), share("n1"), share("n2"))
    wanted = pod_order(order.spec)
    made = start_objects(order, wanted, "server", "default", {}, "scheduling.k8s.io/v1beta1")
    ((path, group),) = made.owned
    assert path == "/apis/scheduling.k8s.io/v1beta1/namespaces/default/podgroups"
    name = group["metadata"]["name"]
    assert [x["spec"]["schedulingGroup"] for x in made.pods] == [{"podGroupName": name}] * 2
    alone = on(simulated_spec(), share("n1"))
    made = start_objects(alone, wanted, "server", "default", {}, "scheduling.k8s.io/v1beta1")
    assert (made.owned, "schedulingGroup" in made.pods[0]["spec"]) == ((), False)


def waiting(index: int, why: str) -> PodState:
    """Return a pod of a gang that the scheduler of Kubernetes 1.37 holds back."""
    notes = {"moorage.dev/workload": "a", "moorage.dev/pods": "2"}
    condition = {"type": "PodScheduled", "status": "False", "message": why}
    made = {
        "metadata": {"name": f"a-{index}", "namespace": "default", "annotations": notes},
        "status": {"phase": "Pending", "conditions": [condition] if why else []},
    }
    return pod_state(msgspec.Raw(msgspec.json.encode(made)))


@pytest.mark.parametrize(
    "other",
    ["", "pod group is unschedulable, minCount (2) cannot be satisfied: 0 scheduled, 1 remaining"],
)
def test_the_report_of_a_waiting_gang_names_the_blocked_pod(other):
    lacks = "0/2 nodes are available: 1 cannot allocate all claims"
    seen = view("a", [waiting(0, other), waiting(1, lacks)], {}, listed=True)
    assert seen.report.detail.startswith(f"the scheduler cannot place pod default/a-1: {lacks}")
    assert "another claim has its devices" in seen.report.detail


async def test_a_gang_that_cannot_start_completely_leaves_no_pods(world):
    world.plane.create(*dra_node("n1"), *dra_node("n2"))
    world.plane.create(claim("theirs", ["GPU-n2-0"]), pod("theirs", claim_name="theirs"))
    world.plane.until(
        lambda: world.plane.get("ResourceClaim", "theirs").get("status", {}).get("allocation"),
        "it is held",
    )
    gang = (share("n1", "GPU-n1-0"), share("n2", "GPU-n2-0"))
    with pytest.raises(BackendError, match="another claim has its devices"):
        await world.backend.start(on(simulated_spec(), *gang))
    assert [each["metadata"]["name"] for each in world.pods()] == ["theirs"]
    assert len(world.plane.all("ResourceClaim")) == 1


async def test_a_kubernetes_service_routes_to_its_pod(world):
    world.plane.create(*dra_node("n1"))
    spec = PodServiceResourceSpec(image=IMAGE, port=8080, readiness=Readiness(path="health"))
    ready = await world.backend.start(on(spec, share("n1", "GPU-n1-0")))
    (service,) = [x for x in world.plane.all("Service") if x["metadata"]["name"] != "kubernetes"]
    name = service["metadata"]["name"]
    assert ready.endpoint == f"http://{name}.default.svc:8080"
    (made,) = world.pods()
    assert service["spec"]["selector"].items() <= made["metadata"]["labels"].items()
    probe = made["spec"]["containers"][0]["readinessProbe"]
    assert probe["httpGet"]["path"] == "/health"
    await world.backend.stop("a")
    assert [x["metadata"]["name"] for x in world.plane.all("Service")] == ["kubernetes"]


async def test_a_service_missing_after_a_crash_is_created(world):
    """The daemon is killed right after it created the pod."""
    world.plane.create(*dra_node("n1"))
    order = on(PodServiceResourceSpec(image=IMAGE, port=8080), share("n1", "GPU-n1-0"))
    await world.backend.start(order)
    (before,) = world.pods()
    world.plane.delete("Service", before["metadata"]["name"])
    await world.restart()
    await world.backend.start(order)
    assert world.plane.get("Service", before["metadata"]["name"])
    assert [each["metadata"]["uid"] for each in world.pods()] == [before["metadata"]["uid"]]


async def test_a_job_is_created_and_ends_with_its_pod(world):
    world.plane.create(*dra_node("n1"))
    spec = JobResourceSpec(image=IMAGE, environment={"SIM_RUN": "500ms"})
    await world.backend.start(on(spec, share("n1", "GPU-n1-0")))
    assert len(world.plane.all("Job")) == 1
    assert devices(world.plane) == [["gpu-0"]]
    ended = await world.heard(Phase.SUCCEEDED)
    assert ended.exit_code == 0
    await world.backend.stop("a")
    assert (world.plane.all("Job"), world.pods()) == ([], [])


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            ContainerResourceSpec(image=IMAGE, command=["serve"], container_port=80),
            {"image": IMAGE, "args": ["serve"]},
        ),
        (
            VLLMModelResourceSpec(model_name_or_path="m/7b", tensor_parallel_size=2, port=0),
            {"image": "vllm/vllm-openai:v0.11.0"},
        ),
    ],
)
async def test_the_kubernetes_backend_makes_pods_from_specs_of_the_local_backend(world, spec, said):
    world.plane.create(*dra_node("n1"))
    order = on(spec, share("n1", "GPU-n1-0", "GPU-n1-1"))
    ready = await world.backend.start(order)
    assert ".default.svc:" in ready.endpoint
    container = world.pods()[0]["spec"]["containers"][0]
    assert said.items() <= container.items()
    if spec.category == "vllm":
        assert container["args"][:2] == ["--model", "m/7b"]
        assert container["readinessProbe"]["httpGet"] == {
            "path": "/v1/models",
            "port": 8000,
            "scheme": "HTTP",
        }


async def test_each_tenant_has_a_namespace_and_the_error_names_a_missing_namespace(
    fresh_plane, tmp_path
):
    world = World(fresh_plane, tmp_path, "gpu-{tenant}")
    fresh_plane.create(node("n1"))
    order = on(simulated_spec(), share("n1"))
    try:
        with pytest.raises(BackendError, match="is no namespace gpu-ann of cluster c1: create"):
            await world.backend.start(replace(order, tenant="ann"))
        body = {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "gpu-ann"}}
        fresh_plane.create(body)
        path = "/api/v1/namespaces/gpu-ann/serviceaccounts"
        await asyncio.to_thread(
            fresh_plane.until, lambda: fresh_plane.call("GET", path)["items"], "it is usable"
        )
        await world.backend.start(replace(order, tenant="ann"))
        assert [each["metadata"]["namespace"] for each in world.pods()] == ["gpu-ann"]
        with pytest.raises(UnsupportedSpecError, match="namespace: expected nothing"):
            world.backend.refuse(PodResourceSpec(image=IMAGE, namespace="kube-system"))
        await world.backend.stop("a")
    finally:
        await world.backend.close()


@pytest.mark.parametrize(
    ("variables", "phase", "said", "code"),
    [
        ({"SIM_RUN": "100ms"}, Phase.SUCCEEDED, "ended", 0),
        ({"SIM_RUN": "300ms", "SIM_EXIT": "3"}, Phase.FAILED, "exit status 3", 3),
        ({"SIM_RUN": "300ms", "SIM_EXIT": "137"}, Phase.FAILED, "ask for more memory_mib", -9),
    ],
)
async def test_the_report_says_how_a_pod_ended(world, variables, phase, said, code):
    world.plane.create(node("n1"))
    await world.backend.start(on(simulated_spec(**variables), share("n1")))
    over = await world.heard(Phase.SUCCEEDED, Phase.FAILED)
    assert (over.phase, over.exit_code) == (phase, code)
    assert said in over.detail
    assert over.log_tail == ("started",)
    await world.backend.stop("a")
    stored = await world.backend.logs("a")
    assert (stored.text, stored.over, stored.exit_code) == ("started\n", True, code)


async def test_the_first_reader_of_an_output_gets_the_output_so_far(world):
    world.plane.create(node("n1"))
    await world.backend.start(on(simulated_spec(), share("n1")))
    read = await world.backend.logs("a")
    assert (read.text, read.over) == ("started\n", False)


@pytest.mark.parametrize(
    ("fate", "said"),
    [("evicted", "was evicted: .*request more memory"), ("imagepull", "check the image's name")],
)
async def test_the_error_says_why_a_pod_did_not_start(world, fate, said):
    world.plane.create(node("n1"))
    with pytest.raises(BackendError, match=said):
        await world.backend.start(on(simulated_spec(SIM_FATE=fate), share("n1")))
    assert world.pods() == []


async def test_the_error_quotes_the_scheduler_if_a_node_takes_no_pod(world):
    world.plane.create(node("n1"))
    world.plane.patch("Node", "n1", {"spec": {"unschedulable": True}})
    said = r"unschedulable.*the node of the lease is cordoned or tainted"
    with pytest.raises(BackendError, match=said):
        await world.backend.start(on(simulated_spec(), share("n1")))


async def test_the_error_names_an_exhausted_quota(world):
    world.plane.create(node("n1"))
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none", "namespace": "default"},
        "spec": {"hard": {"pods": "0"}},
    }
    world.plane.create(quota)
    world.plane.until(
        lambda: world.plane.get("ResourceQuota", "none").get("status", {}).get("hard"),
        "the quota counts",
    )
    try:
        with pytest.raises(BackendError, match=r"no quota left .*exceeded quota.*ResourceQuota"):
            await world.backend.start(on(simulated_spec(), share("n1")))
    finally:
        world.plane.delete("ResourceQuota", "none")


async def test_a_pod_that_another_client_deletes_ends_its_workload(world):
    world.plane.create(node("n1"))
    await world.backend.start(on(simulated_spec(), share("n1")))
    (made,) = world.pods()
    await asyncio.to_thread(world.plane.delete, "Pod", made["metadata"]["name"])
    assert "another client deleted" in (await world.heard(Phase.FAILED)).detail
    await world.backend.stop("a")
    with pytest.raises(UnknownWorkloadError):
        await world.backend.status("a")


async def test_a_pod_of_a_lost_node_starts_again_and_a_gang_fails(world):
    """A node counts as lost after some seconds, so both pods lose their nodes at the same time."""
    world.plane.create(node("n1"), node("n2"))
    await world.backend.start(on(simulated_spec(), share("n1")))
    await world.backend.start(on(simulated_spec(), share("n1"), share("n2"), name="gang"))
    await asyncio.to_thread(world.plane.lose_node, "n1")

    def last(name: str) -> str:
        return [each.detail for each in world.reports if each.id == name][-1]

    await until(lambda: "is lost" in last("a"))
    assert "delete the Node" in last("a")
    assert (await world.backend.probe("a")).phase is Phase.STARTING
    detail = (await world.heard(Phase.FAILED)).detail
    assert "its node n1 is lost" in detail
    assert "delete the Node" in detail
    await asyncio.to_thread(world.plane.find_node, "n1")
    # KWOK leaves the pod marked as not ready; a real kubelet would report that it is ready.
    await until(lambda: "is not ready" in last("a"))


async def test_a_gang_lost_during_a_server_stop_is_not_created_again(world):
    world.plane.create(node("n1"), node("n2"))
    order = on(simulated_spec(), share("n1"), share("n2"))
    await world.backend.start(order)
    for each in world.pods():
        await asyncio.to_thread(world.plane.delete, "Pod", each["metadata"]["name"])
    await until(lambda: not world.pods())
    await world.restart()
    with pytest.raises(BackendError, match=r"the pod on n1, n2 is gone .*; 0 of 2 pods are left"):
        await world.backend.start(replace(order, resumed=True))
    assert world.pods() == []


async def test_a_claim_left_by_a_crash_is_found(world):
    """The daemon is killed before the start creates the pod."""
    world.plane.create(*dra_node("n1"))
    await world.backend.start(on(simulated_spec(), share("n1", "GPU-n1-0")))
    (made,) = world.plane.all("ResourceClaim")
    meta = {key: made["metadata"][key] for key in ("labels", "annotations")}
    meta["annotations"] = {**meta["annotations"], "moorage.dev/workload": "ghost"}
    world.plane.create({**claim("left"), "metadata": {"name": "left", **meta}})

    async def both() -> bool:
        return sorted(each.id for each in await world.backend.discover()) == ["a", "ghost"]

    await until(both)
    await world.backend.stop("ghost")
    assert len(world.plane.all("ResourceClaim")) == 1


async def test_a_pod_of_another_client_with_our_labels_hides_no_workload(world):
    world.plane.create(node("n1"))
    await world.backend.start(on(simulated_spec(), share("n1")))
    (made,) = world.pods()
    theirs = pod("theirs")
    notes = {"moorage.dev/workload": "a", "moorage.dev/pods": "many"}
    theirs["metadata"] |= {"labels": made["metadata"]["labels"], "annotations": notes}
    world.plane.create(theirs)
    await world.backend.start(on(simulated_spec(), share("n1"), name="b"))
    assert sorted(each.id for each in await world.backend.discover()) == ["a", "b"]


async def test_a_start_that_takes_too_long_reports_the_last_status(world):
    world.plane.create(node("n1"))
    await world.backend.discover()
    world.plane.pause("kube-scheduler")
    order = replace(on(simulated_spec(), share("n1")), timeout_seconds=5)
    with pytest.raises(TimeoutError) as late:
        await world.backend.start(order)
    assert re.fullmatch(
        r"it was not ready within 5 s: pod default/(\S+) waits for the scheduler; nothing new was "
        r"heard in the last \d+ s: see `kubectl -n default describe pod -l moorage.dev/start=\1`",
        str(late.value),
    )
    assert world.pods() == []


async def test_the_error_names_a_missing_node(world):
    world.plane.create(node("n1"))
    with pytest.raises(BackendError, match=r"NodeAffinity.*there is no node gone"):
        await world.backend.start(on(simulated_spec(), share("gone")))
    assert world.pods() == []


async def test_the_error_of_a_start_says_that_the_claim_was_deleted(world, monkeypatch):
    """Kubernetes may report nothing about a pod that waits."""
    monkeypatch.setattr(runs, "SILENCE_SECONDS_MAX", 5.0)
    world.plane.create(*dra_node("n1"))
    world.plane.pause("kube-scheduler")
    order = replace(on(simulated_spec(), share("n1", "GPU-n1-0")), timeout_seconds=90)
    start = asyncio.create_task(world.backend.start(order))
    (made,) = await until(lambda: world.pods() and world.plane.all("ResourceClaim"))
    world.plane.delete("ResourceClaim", made["metadata"]["name"])
    world.plane.resume("kube-scheduler")
    with pytest.raises(BackendError, match="deleted its claim"):
        await start
    assert world.pods() == []

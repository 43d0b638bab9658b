"""Cluster documents made from objects of Kubernetes, without a control plane."""

from typing import Any

import msgspec
import pytest
from kubernetes_objects import claim, gpu, mig, node, pod, resource_slice

from moorage.backends.kubernetes.documents import (
    complete_devices,
    free_capacity_document,
    machine_document,
    whole_document,
)
from moorage.backends.kubernetes.objects import ApiPod, ApiResourceClaim, ApiResourceSlice
from moorage.backends.kubernetes.records import (
    GPUS_ANNOTATION,
    SERVER_LABEL,
    claim_record,
    node_record,
    pod_record,
    slice_record,
)
from moorage.catalog.documents.clusters import read_cluster_document

GIB = 1 << 10
OURS = {SERVER_LABEL: "ours"}


def bound(made: dict[str, Any], node_name: str = "n1", phase: str = "Running") -> Any:
    """Return the record of a pod on a node."""
    made["spec"]["nodeName"] = node_name
    made["status"] = {"phase": phase}
    return pod_record(msgspec.convert(made, ApiPod))


def published_devices(*slices: dict[str, Any]) -> Any:
    """Return the devices of a pool."""
    records = [slice_record(msgspec.convert(each, ApiResourceSlice)) for each in slices]
    found = complete_devices(records)
    return found and found["n1"]


def allocation(made: dict[str, Any], *devices: str, **more: Any) -> Any:
    """Return the claim record of each allocated device."""
    results = [
        {"request": "gpus", "driver": "gpu.nvidia.com", "pool": "n1", "device": each, **more}
        for each in devices
    ]
    made["status"] = {"allocation": {"devices": {"results": results}}}
    record = claim_record(msgspec.convert(made, ApiResourceClaim))
    return dict.fromkeys(record.devices, record)


def machine(made: dict[str, Any], devices: Any = (), pods: Any = (), claims: Any = None) -> Any:
    return machine_document(node_record(made), devices, pods, claims or {}, "ours")


def test_counted_devices_have_the_ids_that_an_import_gives_them() -> None:
    found = machine(node("n1", gpus=2, cpu=64, memory="512Gi", labels={"rack": "r1"}))
    assert [each["id"] for each in found["gpus"]["gpus"]] == ["0", "1"]
    assert found["gpus"]["modelNames"] == ["NVIDIA-A100-SXM4-80GB"]
    assert (found["vcpus"]["count"], found["memory"], found["rack"]) == (64, 512 * GIB, "r1")
    assert {"used", "unavailable", "taints"} & found.keys() == set()


def test_published_devices_have_an_identity_and_replace_counted_devices() -> None:
    slices = [
        gpu(1, "GPU-b", nvlinkGroup="g0", numaNode=1),
        gpu(0, "GPU-a", **{"resource.kubernetes.io/numaNode": 0}),
    ]
    found = machine(node("n1", gpus=2), published_devices(resource_slice("n1", slices)))
    assert found["gpus"]["gpus"] == [
        {
            "modelName": "NVIDIA-A100-SXM4-80GB",
            "memory": 80 * GIB,
            "id": "GPU-a",
            "numa": 0,
            "driver": "gpu.nvidia.com",
            "pool": "n1",
            "device": "gpu-0",
            "uuid": "GPU-a",
            "index": 0,
        },
        {
            "modelName": "NVIDIA-A100-SXM4-80GB",
            "memory": 80 * GIB,
            "id": "GPU-b",
            "linkGroup": "g0",
            "numa": 1,
            "driver": "gpu.nvidia.com",
            "pool": "n1",
            "device": "gpu-1",
            "uuid": "GPU-b",
            "index": 1,
        },
    ]


def test_mig_instances_are_exclusive_and_name_their_parent() -> None:
    (found,) = published_devices(resource_slice("n1", [mig(0, 0, "MIG-1")]))
    assert found["exclusive"]
    assert found["modelName"] == "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"
    assert found["memory"] == 9728
    assert (found["profile"], found["parentUuid"]) == ("1g.10gb", "GPU-parent-0")


def test_devices_that_cannot_be_allocated_are_skipped() -> None:
    cut = mig(0, 0, "MIG-1") | {"consumesCounters": [{"counterSet": "gpu-0"}]}
    sick = gpu(1, "GPU-sick") | {"taints": [{"key": "ecc", "effect": "NoExecute"}]}
    network_card = {"name": "nic-0", "attributes": {"rdma": {"bool": True}}}
    found = published_devices(resource_slice("n1", [gpu(0, "GPU-0"), cut, sick, network_card]))
    assert [each["id"] for each in found] == ["GPU-0"]


def test_devices_of_a_pool_count_only_if_all_its_newest_slices_exist() -> None:
    old = resource_slice("n1", [gpu(0, "GPU-0")])
    one = resource_slice("n1", [gpu(1, "GPU-1")], name="a", generation=2, slices=2)
    two = resource_slice("n1", [gpu(2, "GPU-2")], name="b", generation=2, slices=2)
    assert published_devices(old, one) is None
    assert [each["id"] for each in published_devices(old, one, two)] == ["GPU-1", "GPU-2"]


def test_a_pool_may_have_devices_of_several_nodes() -> None:
    made = [
        resource_slice("n1", [gpu(0, "GPU-0")], name="a", slices=2),
        resource_slice("n2", [gpu(1, "GPU-1")], name="b", slices=2),
    ]
    made[1]["spec"]["pool"]["name"] = "n1"
    records = [slice_record(msgspec.convert(each, ApiResourceSlice)) for each in made]
    found = complete_devices(records)
    assert {name: [each["id"] for each in part] for name, part in found.items()} == {
        "n1": ["GPU-0"],
        "n2": ["GPU-1"],
    }


def test_devices_of_other_pods_count_as_taken_and_devices_of_our_own_pods_do_not() -> None:
    devices = published_devices(resource_slice("n1", [gpu(n, f"GPU-{n}") for n in range(4)]))
    claims = allocation(claim("theirs"), "gpu-0") | allocation(claim("c", labels=OURS), "gpu-1")
    claims |= allocation(claim("monitor"), "gpu-2", adminAccess=True)
    pods = [
        bound(pod("theirs", cpu="1500m", memory="3Gi")),
        bound(pod("own", cpu="2", labels=OURS)),
    ]
    found = machine(node("n1", cpu=8, memory="16Gi"), devices, pods, claims)
    assert found["used"] == {"cpuMilli": 1500, "memoryMib": 3 * GIB, "gpus": ["GPU-0"]}
    assert found["vcpus"]["count"] == 8
    (offered,) = free_capacity_document(whole_document("c1", [found]))["nodes"]["nodeData"]
    assert [each["id"] for each in offered["gpus"]["gpus"]] == ["GPU-1", "GPU-2", "GPU-3"]
    assert (offered["vcpus"]["count"], offered["memory"]) == (6.5, 13 * GIB)


def test_counted_gpus_of_other_pods_are_not_those_of_our_own_pods() -> None:
    own = pod("own", gpus=1, labels=OURS)
    own["metadata"]["annotations"] = {GPUS_ANNOTATION: "3"}
    pods = [bound(own), bound(pod("theirs", gpus=2))]
    assert machine(node("n1", gpus=4), pods=pods)["used"]["gpus"] == ["1", "2"]


def test_mig_instances_and_time_slices_are_counted_separately() -> None:
    sliced = node("n1", gpus=8, labels={"nvidia.com/gpu.replicas": "4"})
    assert machine(sliced, pods=[bound(pod("theirs", gpus=5))])["used"]["gpus"] == ["0", "1"]
    parts = node("n1", gpus=1, resources={"nvidia.com/mig-1g.10gb": 2})
    theirs = pod("theirs", gpus=1)
    sizes = theirs["spec"]["containers"][0]["resources"]
    sizes["limits"] = {"nvidia.com/mig-1g.10gb": "1"}
    sizes["requests"] = {}
    assert machine(parts, pods=[bound(theirs)])["used"]["gpus"] == ["mig-1g.10gb-1"]


@pytest.mark.parametrize(("node_name", "phase"), [("", "Pending"), ("n1", "Failed")])
def test_a_pod_without_resources_has_no_record(node_name: str, phase: str) -> None:
    assert bound(pod("p1"), node_name, phase) is None


def test_a_pod_counts_with_its_largest_request_during_start_or_run() -> None:
    made = pod("p1", cpu="1", memory="1Gi")

    def starting(cpu: str, **more: str) -> dict[str, Any]:
        return {"name": "x", "resources": {"requests": {"cpu": cpu}}, **more}

    made["spec"]["initContainers"] = [starting("500m", restartPolicy="Always"), starting("2")]
    made["spec"]["overhead"] = {"cpu": "250m"}
    assert bound(made).cpu_milli == 2750
    made["spec"]["resources"] = {"requests": {"cpu": "4"}}
    assert bound(made).cpu_milli == 4250


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"spec": {"unschedulable": True}}, "cordoned"),
        ({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}, "not ready"),
        ({"spec": {"taints": [{"key": "mine", "effect": "NoExecute"}]}}, "tainted mine"),
    ],
)
def test_an_unschedulable_node_is_listed_with_its_reason(change: dict[str, Any], why: str) -> None:
    made = node("n1", gpus=1)
    for part, value in change.items():
        made[part] |= value
    found = machine(made)
    assert found["unavailable"] == why
    (offered,) = free_capacity_document(whole_document("c1", [found]))["nodes"]["nodeData"]
    assert (offered["unavailable"], offered["gpus"]["count"]) == (why, 1)


def test_taints_of_gpu_nodes_do_not_exclude_leases() -> None:
    taints = [
        {"key": "nvidia.com/gpu", "effect": "NoSchedule"},
        {"key": "soft", "effect": "PreferNoSchedule"},
    ]
    assert "unavailable" not in machine(node("n1", gpus=1, taints=taints))


def test_gpus_that_other_pods_use_are_counted_on_unleased_devices_first() -> None:
    def used(theirs: int, leased: tuple[str, ...]) -> list[str]:
        pods = [bound(pod("p", gpus=theirs))]
        made = machine_document(node_record(node("n1", gpus=4)), (), pods, {}, "ours", leased)
        return made["used"]["gpus"]

    assert used(1, ()) == ["3"]
    assert used(1, ("3",)) == ["2"]
    assert used(2, ("3", "2")) == ["0", "1"]
    assert sorted(used(3, ("3", "2"))) == ["0", "1", "3"]  # More than are free: that is drift.


def test_the_catalog_accepts_the_document_of_a_cluster() -> None:
    taint = {"key": "gpu", "value": "only", "effect": "NoSchedule"}
    labels = {"topology.kubernetes.io/region": "eu-west-1"}
    nodes = [
        machine(node("n2", gpus=1, labels=labels)),
        machine(
            node("n1", labels=labels, taints=[taint]),
            published_devices(resource_slice("n1", [gpu(0, "GPU-0")])),
            [bound(pod("p1"))],
        ),
    ]
    read = read_cluster_document(whole_document("c1", nodes))
    assert read.live
    assert read.document["regionId"] == "eu-west-1"
    assert [
        (each.id, [gpu.id for gpu in each.gpus], each.unavailable) for each in read.cluster.nodes
    ] == [("n1", ["GPU-0"], "tainted gpu"), ("n2", ["0"], "")]

"""Objects for clusters of tests: nodes with GPUs, DRA slices, claims and pods.

Node labels are those of NVIDIA's GPU feature discovery; the attributes of devices are those that
NVIDIA's DRA driver publishes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

DRIVER: Final = "gpu.nvidia.com"
"""NVIDIA's DRA driver, and the name of its device class."""
A100: Final = "NVIDIA-A100-SXM4-80GB"


def node(
    name: str,
    *,
    gpus: int = 0,
    product: str = A100,
    memory_mib: int = 81920,
    cpu: int = 64,
    memory: str = "512Gi",
    resources: Mapping[str, int] | None = None,
    labels: Mapping[str, str] | None = None,
    taints: Sequence[dict[str, str]] = (),
) -> dict[str, Any]:
    """Return a node.

    Args:
        name: Name of the object.
        gpus: Number of `nvidia.com/gpu` that a device plugin advertises.
        product: The model of the GPUs, as a label.
        memory_mib: Memory of each GPU, as a label.
        cpu: Cores of the node.
        memory: Memory of the node.
        resources: Further extended resources.
        labels: Further labels.
        taints: Taints of the node.
    """
    sizes = {"cpu": str(cpu), "memory": memory, "pods": "110"}
    known = {"kubernetes.io/hostname": name, "kubelet": "up"}  # `lose_node` removes `kubelet`.
    if gpus:
        sizes["nvidia.com/gpu"] = str(gpus)
        known |= {"nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": str(memory_mib)}
    sizes |= {key: str(value) for key, value in (resources or {}).items()}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**known, **(labels or {})}},
        "spec": {"taints": list(taints)},
        "status": {"capacity": sizes, "allocatable": sizes},
    }


def gpu(
    index: int, uuid: str, *, product: str = A100, memory: str = "80Gi", **attributes: Any
) -> dict[str, Any]:
    """Return a whole GPU for `resource_slice`; `attributes` are texts or integers."""
    known: dict[str, Any] = {
        "type": "gpu",
        "uuid": uuid,
        "index": index,
        "productName": product,
        "brand": "Nvidia",
    }
    return {
        "name": f"gpu-{index}",
        "attributes": {key: _attribute(value) for key, value in (known | attributes).items()},
        "capacity": {"memory": {"value": memory}},
    }


def mig(parent: int, number: int, uuid: str, *, profile: str = "1g.10gb") -> dict[str, Any]:
    """Return a MIG instance of the GPU with the number `parent`, for `resource_slice`."""
    known = {
        "type": "mig",
        "uuid": uuid,
        "parentUUID": f"GPU-parent-{parent}",
        "profile": profile,
        "productName": A100,
    }
    return {
        "name": f"gpu-{parent}-mig-{number}",
        "attributes": {key: _attribute(value) for key, value in known.items()},
        "capacity": {"memory": {"value": "9728Mi"}},
    }


def _attribute(value: Any) -> dict[str, Any]:
    return {"int": value} if isinstance(value, int) else {"string": value}


def resource_slice(
    node_name: str,
    devices: Sequence[dict[str, Any]],
    *,
    name: str = "",
    generation: int = 1,
    slices: int = 1,
    driver: str = DRIVER,
) -> dict[str, Any]:
    """Return the slice that a driver publishes for a node; its pool has the node's name."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name or f"{node_name}-{driver}"},
        "spec": {
            "driver": driver,
            "nodeName": node_name,
            "pool": {
                "name": node_name,
                "generation": generation,
                "resourceSliceCount": slices,
            },
            "devices": list(devices),
        },
    }


def device_class(driver: str = DRIVER) -> dict[str, Any]:
    """Return a driver's DeviceClass, by whose name claims request devices of the driver."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": driver},
        "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{driver}'"}}]},
    }


def dra_node(name: str, gpus: int = 4, **node_fields: Any) -> list[dict[str, Any]]:
    """Return a node and its slice: devices `gpu-0` …, with the uuids `GPU-{name}-0` …."""
    devices = [gpu(index, f"GPU-{name}-{index}") for index in range(gpus)]
    return [node(name, **node_fields), resource_slice(name, devices)]


def claim(
    name: str,
    uuids: Sequence[str] = (),
    *,
    count: int = 0,
    namespace: str = "default",
    labels: Mapping[str, str] | None = None,
    driver: str = DRIVER,
) -> dict[str, Any]:
    """Return a claim on the devices with these uuids, or on any `count` devices."""
    exactly: dict[str, Any] = {
        "deviceClassName": driver,
        "allocationMode": "ExactCount",
        "count": count or len(uuids),
    }
    if uuids:
        wanted = ", ".join(f"'{uuid}'" for uuid in uuids)
        expression = f"device.attributes['{driver}'].uuid in [{wanted}]"
        exactly["selectors"] = [{"cel": {"expression": expression}}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels or {})},
        "spec": {"devices": {"requests": [{"name": "gpus", "exactly": exactly}]}},
    }


def pod(
    name: str,
    *,
    namespace: str = "default",
    gpus: int = 0,
    claim_name: str = "",
    node_name: str = "",
    cpu: str = "1",
    memory: str = "1Gi",
    labels: Mapping[str, str] | None = None,
    run: str = "",
    exit_code: int = 0,
    fate: str = "",
) -> dict[str, Any]:
    """Return a pod.

    Args:
        name: Name of the object.
        namespace: Namespace of the pod.
        gpus: Number of requested `nvidia.com/gpu`.
        claim_name: The pod's ResourceClaim.
        node_name: The node that the scheduler must choose.
        cpu: Requested CPU.
        memory: Requested memory.
        labels: Labels of the pod.
        run: Duration of the run, e.g. `2s`; empty: without end.
        exit_code: Exit code at the end; 137 means OOMKilled.
        fate: `imagepull`, `evicted`, or `hang`: the pod is bound to its node, and never starts.
    """
    simulated = {"SIM_RUN": run, "SIM_EXIT": str(exit_code or ""), "SIM_FATE": fate}
    sizes = {"cpu": cpu, "memory": memory} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    resources: dict[str, Any] = {"requests": sizes, "limits": sizes}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "containers": [
            {
                "name": "main",
                "image": "registry.example/none:1",
                "resources": resources,
                "env": [{"name": k, "value": v} for k, v in simulated.items() if v],
            }
        ],
    }
    if claim_name:
        spec["resourceClaims"] = [{"name": "gpus", "resourceClaimName": claim_name}]
        resources["claims"] = [{"name": "gpus"}]
    if node_name:
        field = {"key": "metadata.name", "operator": "In", "values": [node_name]}
        terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        spec["affinity"] = {"nodeAffinity": {required: terms}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels or {})},
        "spec": spec,
    }

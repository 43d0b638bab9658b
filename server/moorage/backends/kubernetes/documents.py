"""Makes the cluster document of a Kubernetes cluster from records of its objects. No I/O.

A node's document has the fields that the import of `kubectl get nodes -o json` makes, and:

    unavailable    the reason why no pod can start there: `cordoned`, `not ready`, `tainted KEY`
    taints         as in its spec
    used           use by pods and claims of others: `cpuMilli`, `memoryMib`, `gpus` (ids)

Each device that a DRA driver publishes also has `driver`, `pool` and `device` (the names in a
claim), `uuid`, `index`, and as a MIG instance `profile` and `parentUuid`.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from moorage.backends.kubernetes.records import (
    ClaimRecord,
    DeviceName,
    NodeRecord,
    PodRecord,
    SliceRecord,
)
from moorage.protocol.cluster_documents import cluster_document, gpu_group
from moorage.protocol.kubernetes_nodes import REGION_LABEL, mig_profile, without_copies
from moorage.protocol.registry import Document

_NOTHING: Final[Document] = {"cpuMilli": 0, "memoryMib": 0, "gpus": []}


def complete_devices(slices: Iterable[SliceRecord]) -> dict[str, tuple[Document, ...]] | None:
    """Return the devices of one pool, by node; None until its driver has published all slices."""
    known = list(slices)
    newest = max((each.generation for each in known), default=0)
    parts = [each for each in known if each.generation == newest]
    if not parts or len(parts) < parts[0].slices:
        return None
    found: dict[str, tuple[Document, ...]] = {}
    for part in parts:
        found[part.node] = (*found.get(part.node, ()), *part.devices)
    return found


def machine_document(
    node: NodeRecord,
    published: Iterable[Document],
    pods: Iterable[PodRecord],
    claims: Mapping[DeviceName, ClaimRecord],
    server: str,
    leased: Collection[str] = (),
) -> Document:
    """Return the catalog's document of one node.

    Args:
        node: The node.
        published: Devices of the node that DRA drivers publish. If there are any, they replace
            those that a device plugin counts, which are the same devices.
        pods: The pods on the node.
        claims: The claim that holds a device, by device.
        server: Name of this server, as in the label of its pods and claims.
        leased: Ids of devices that leases of this server hold.
    """
    document = dict(node.document)
    own, others = list[PodRecord](), list[PodRecord]()
    for pod in pods:
        (own if server and pod.server == server else others).append(pod)
    devices = sorted(published, key=_order)
    if devices:
        document["gpus"] = gpu_group(devices)
        held = [
            each["id"]
            for each in devices
            if (claim := claims.get((each["driver"], each["pool"], each["device"])))
            and not (server and claim.server == server)
        ]
    else:
        ours = {name for pod in own for name in pod.gpus}.union(leased)
        held = _count(node, others, ours)
    used = {
        "cpuMilli": sum(pod.cpu_milli for pod in others),
        "memoryMib": sum(pod.memory_mib for pod in others),
        "gpus": held,
    }
    return document | ({"used": used} if used != _NOTHING else {})


def _order(device: Document) -> tuple[str, str, int, str]:
    index = device.get("index", 0)
    return device["driver"], device["pool"], index, device["device"]


def _count(node: NodeRecord, others: Iterable[PodRecord], ours: Collection[str]) -> list[str]:
    """Return ids that stand for devices held by others, on nodes that only count devices.

    Only the kubelet knows the actual devices. So this returns the last ids without a lease of this
    server, and if these are too few, leased ones.
    """
    counts: dict[str, int] = {}
    for pod in others:
        for resource, number in pod.counts:
            profile = mig_profile(resource)
            counts[profile] = counts.get(profile, 0) + number
    held = list[str]()
    ids = [each["id"] for each in node.document["gpus"]["gpus"]]
    for profile, number in sorted(counts.items()):
        if profile:
            places, taken = [each for each in ids if each.startswith(f"{profile}-")], number
        else:
            places, taken = [each for each in ids if each.isdecimal()], -(-number // node.replicas)
        places.sort(key=lambda each: each not in ours)  # A stable sort: leased ids are taken last.
        held += places[len(places) - min(taken, len(places)) :]
    return held


def whole_document(cluster_id: str, machines: Iterable[Document]) -> Document:
    """Return the document of a cluster, with its nodes in the order of their names."""
    nodes, _ = without_copies(sorted(machines, key=lambda node: str(node["id"])))
    regions = {node.get("labels", {}).get(REGION_LABEL, "") for node in nodes}
    return cluster_document(
        cluster_id,
        nodes,
        tag="kubernetes",
        description="Nodes of a Kubernetes cluster",
        region=regions.pop() if len(regions) == 1 else "",
    )


def free_capacity_document(document: Document) -> Document:
    """Return a cluster document with only the capacity that others do not use now.

    The size of each node is the capacity that others leave. Nodes on which no pod can start stay,
    with the reason in `unavailable`.
    """
    nodes = [_free_capacity(node) for node in document["nodes"]["nodeData"]]
    return whole_document(document["id"], nodes) | {"unavailable": ""}


def _free_capacity(node: Document) -> Document:
    used = node.get("used", _NOTHING)
    cores = max(round(node["vcpus"]["count"] * 1000) - used["cpuMilli"], 0) / 1000
    return node | {
        "vcpus": {"count": cores},
        "memory": max(node["memory"] - used["memoryMib"], 0),
        "gpus": gpu_group([x for x in node["gpus"]["gpus"] if x["id"] not in used["gpus"]]),
    }

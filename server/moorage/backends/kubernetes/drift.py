"""Finds differences between leases and the objects in their cluster. No I/O.

The daemon reports the findings to the owners of the leases. A finding frees nothing: a lease keeps
its capacity until its owner or its backend ends it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from moorage.model import Lease, RequestId, Tenant
from moorage.protocol.registry import Document

DriftKind = Literal["node_gone", "node_unavailable", "device_gone", "device_taken"]


@dataclass(frozen=True, slots=True)
class Drift:
    """One difference between a lease and its cluster."""

    lease: RequestId
    tenant: Tenant
    kind: DriftKind
    node: str
    detail: str


def drifts(
    leases: Iterable[Lease], cluster_id: str, machines: Mapping[str, Document]
) -> list[Drift]:
    """Return the differences between a cluster and the leases on it.

    Args:
        leases: All leases that hold capacity, also in other clusters.
        cluster_id: The cluster.
        machines: The present documents of the cluster's nodes, by id, with the use by others.
    """
    found: list[Drift] = []
    for lease in leases:
        for share in lease.placement:
            if share.cluster_id == cluster_id:
                found += (
                    Drift(lease.id, lease.tenant, kind, share.node_id, detail)
                    for kind, detail in _of_share(
                        share.node_id, share.gpus, machines.get(share.node_id)
                    )
                )
    return found


def _of_share(
    node: str, gpus: Iterable[str], machine: Document | None
) -> Iterable[tuple[DriftKind, str]]:
    if machine is None:
        yield "node_gone", f"node {node} is no longer in the cluster"
        return
    if why_not := machine.get("unavailable"):
        yield "node_unavailable", f"node {node} takes no new pods: {why_not}"
    there = {each["id"] for each in machine["gpus"]["gpus"]}
    taken = machine.get("used", {}).get("gpus", ())
    if gone := [gpu for gpu in gpus if gpu not in there]:
        yield "device_gone", f"node {node} no longer has GPU {', '.join(gone)}"
    if foreign := [gpu for gpu in gpus if gpu in taken]:
        who = "a pod or claim that is not of this server"
        yield "device_taken", f"GPU {', '.join(foreign)} of node {node} is used by {who}"

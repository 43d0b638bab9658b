"""Finds the lost machine of a lease. Its workloads may still run, or not."""

from collections.abc import Callable

from moorage.core.state.state import State
from moorage.model import LOST, ClusterId, Lease, NodeId

__all__ = ["lost_machine_finder"]


def lost_machine_finder(state: State) -> Callable[[Lease], str]:
    """Return a function that says which machine of a lease is lost; empty: none is."""
    lost: dict[ClusterId, dict[NodeId, str]] = {}

    def of(lease: Lease) -> str:
        found: list[str] = []
        for share in lease.placement:
            row = state.fleet.row(share.cluster_id, share.node_id)
            if row is None or not state.fleet.closed[row]:
                continue
            if share.cluster_id not in lost:
                nodes = state.clusters[share.cluster_id].nodes
                lost[share.cluster_id] = {
                    each.id: each.unavailable.removeprefix(LOST)
                    for each in nodes
                    if each.unavailable.startswith(LOST)
                }
            if why := lost[share.cluster_id].get(share.node_id):
                found.append(f"node {share.cluster_id}/{share.node_id} is lost: {why}")
        return "; ".join(found)

    return of

"""The built-in policies for a block that names none, and the nodes that all policies see.

`daemon.blocks.placement` uses them for a role without a `policyRuleURI`, and only then. They
read the fleet as the allocator knows it: resources that leases hold are not free.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from moorage.model import GPU_MILLI, Demand
from moorage.policy import Fleet
from moorage.records.json_values import JsonMapping, JsonObject


def nodes_of(fleet: Fleet, cluster_id: str) -> dict[str, tuple[str, ...]]:
    """Return the nodes of a cluster with the ids of their devices; {} for an unknown cluster."""
    return {fleet.node_ids[row][1]: fleet.gpu_ids[row] for row in fleet.rows_of(cluster_id)}


def dry_run(fleet: Fleet, cluster_id: str, demand: Demand | None) -> JsonObject:
    """Score a cluster by its node with the most free capacity, and name that node.

    The score of a node is the smallest of the free fractions of its GPUs, CPU and memory, of those
    that the demand asks for. Nodes that cannot take the demand now do not count; if no node can,
    the score is 0. Of nodes with equal scores, the one with more free GPUs wins, then the first.

    Args:
        fleet: The fleet with the amounts that are free now.
        cluster_id: The cluster.
        demand: The demand that must fit; None: whatever a node has free.

    Returns:
        `{"score", "node_info": {"node_id", "gpus"}}`: the devices that the demand would be given,
        or all that are wholly free. Where the score is 0, `node_info` is empty, and `error`
        says why.
    """
    own = fleet.rows_of(cluster_id)
    rows = slice(own.start, own.stop)
    gpu_free = fleet.gpu_free[rows].sum(1)
    scores = np.ones(len(gpu_free)) if demand is None else fleet.feasible(demand, rows) * 1.0
    if demand is None or demand.gpus:
        scores *= _part(gpu_free, fleet.gpu_total[rows].sum(1))
    for wanted, free, total in (
        (demand is None or demand.cpu_milli, fleet.cpu_free, fleet.cpu_total),
        (demand is None or demand.memory_mib, fleet.memory_free, fleet.memory_total),
    ):
        if wanted:
            scores = np.minimum(scores, _part(free[rows], total[rows]))
    if not scores.any():
        what = "free capacity" if demand is None else "room for the block's `resources` now"
        nodes = "its node has no" if len(scores) == 1 else f"none of its {len(scores)} nodes has"
        why = f"{nodes} {what}" if len(scores) else "it has no nodes"
        return {"score": 0.0, "node_info": {}, "error": why}
    best = int(np.lexsort((-gpu_free, -scores))[0])
    row = own[best]
    if demand is None:
        columns = np.flatnonzero(fleet.gpu_free[row] >= GPU_MILLI).tolist()
    else:
        columns = fleet.pick_gpus(row, demand) if demand.gpus else []
    ids = fleet.gpu_ids[row]
    info = {"node_id": fleet.node_ids[row][1], "gpus": [ids[column] for column in columns]}
    return {"score": float(scores[best]), "node_info": info}


def best(scores: Iterable[tuple[str, JsonMapping]]) -> str | None:
    """Return the first cluster with the highest score above 0; None: no score is above 0.

    Args:
        scores: Clusters, each with the answer of its dry run: `{"score", …}`.
    """
    name, data = max(scores, key=lambda each: each[1]["score"], default=("", {"score": 0}))
    return name if data["score"] > 0 else None


def _part(free: npt.NDArray[np.int64], total: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the free fraction of each total; 1 where the total is 0."""
    return np.where(total > 0, np.clip(free, 0, None) / np.maximum(total, 1), 1.0)

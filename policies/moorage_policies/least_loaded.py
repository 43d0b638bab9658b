"""Least loaded: the node with the lowest load, by its live metrics.

For machines that others use too, or that are promised and idle. The load of a node, 0 to 1, is
made of what is *measured* and what is *promised*:

    load = (1 - promised_weight) * measured + promised_weight * promised

Measured is the utilisation of the GPUs that the request would get, the least used of those that
fit (`gpus[].cudaUtilization`, else `gpu.avgCudaUtilization`), and the load average per core
(`vcpu.load1m`); promised, the part of the node's GPUs and cores that leases hold. In both, CPU
counts `cpu_weight` against the GPUs; a request without GPUs counts CPU alone. Metrics are older
than leases: what is promised keeps a burst of requests from landing on the node that was idle a
minute ago.

A node that reports nothing, or whose metrics say that they are `stale`, counts as `unmeasured`.
Equal loads go to the first node. No client is called: the metrics come with the cluster documents,
those that changed all at once, and are read again every `refresh_seconds`.

Parameters:
    cpu_weight: 0 (GPUs alone decide) to 1 (CPU alone decides), default 0.25.
    promised_weight: 0 (metrics alone decide) to 1 (leases alone decide), default 0.25.
    unmeasured: 0 to 1, default 1: the measured load of a node that has none.
    refresh_seconds: 0 and more, default 1; 0 reads the metrics for every request.
"""

from math import inf, isnan, nan
from time import monotonic
from typing import Any

import numpy as np

from moorage.policy import best_rows, decline, propose, read_demand


class AIOSv1PolicyRule:
    """Proposes the node with the lowest load."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:  # noqa: ARG002  # The contract's signature.
        self._nodes: Any = None
        self._layout = -1
        self._read_at = -inf
        self._read: set[str] = set()
        self._gpu = np.zeros((0, 0))
        self._cpu = np.zeros(0)

    def eval(self, parameters: dict[str, Any], input_data: Any, context: dict[str, Any]) -> Any:  # noqa: ARG002  # As above.
        """Return the placement, or `{"declined": reason}`."""
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        self._refresh(fleet, input_data["cluster_data"], parameters.get("refresh_seconds", 1))
        unmeasured = parameters.get("unmeasured", 1)
        cpu_weight = parameters.get("cpu_weight", 0.25) if demand.gpus else 1
        promised_weight = parameters.get("promised_weight", 0.25)
        rows = np.flatnonzero(fleet.feasible(demand))
        fitting = fleet.fitting_gpus(demand)[rows]

        measured = cpu_weight * np.where(np.isnan(self._cpu[rows]), unmeasured, self._cpu[rows])
        promised = cpu_weight * (1 - fleet.cpu_free[rows] / np.maximum(1, fleet.cpu_total[rows]))
        if demand.gpus:
            used = np.where(np.isnan(self._gpu[rows]), unmeasured, self._gpu[rows])
            least = np.sort(np.where(fitting, used, inf), axis=1)[:, : demand.gpus]
            held = 1 - fleet.gpu_free[rows].sum(1) / fleet.gpu_total[rows].sum(1)
            measured = measured + (1 - cpu_weight) * least.sum(1) / demand.gpus
            promised = promised + (1 - cpu_weight) * held
        load = (1 - promised_weight) * measured + promised_weight * promised
        scores = np.full(len(fleet), -1)
        scores[rows[np.argsort(load, kind="stable")]] = np.arange(len(rows), 0, -1)

        def idlest(row: int) -> list[int]:
            used = np.where(np.isnan(self._gpu[row]), unmeasured, self._gpu[row])
            usable = np.where(fleet.fitting_gpus(demand)[row], used, inf)
            least_first = np.lexsort((-fleet.gpu_free[row], usable))[: demand.gpus]
            return sorted(least_first.tolist())

        # With a topology the GPUs must also belong together, which `pick_gpus` sees to.
        pick = None if demand.topology in {"nvlink", "numa"} else idlest
        return propose(fleet, demand, best_rows(fleet, demand, scores), pick)

    def _refresh(self, fleet: Any, cluster_data: Any, refresh_seconds: float) -> None:
        """Read the metrics of all candidates, unless the stored ones are recent enough."""
        same = self._nodes is fleet.node_ids and self._layout == fleet.layout
        now = monotonic()
        fresh = now - self._read_at < refresh_seconds
        known = len(self._read) >= len(fleet.cluster_ids) or cluster_data.keys() <= self._read
        if same and fresh and known:
            return
        if not (same and fresh):
            self._nodes, self._layout, self._read_at = fleet.node_ids, fleet.layout, now
            self._read.clear()
            self._gpu = np.full(fleet.gpu_total.shape, nan)
            self._cpu = np.full(len(fleet), nan)
        for cluster_id, entry in cluster_data.items():
            self._read.add(cluster_id)
            for tree in (entry["cluster_metrics"] or {}).get("nodes") or ():
                row = fleet.row(cluster_id, str(tree.get("id")))
                if row is not None and not tree.get("stale"):
                    self._measure(fleet, row, tree)

    def _measure(self, fleet: Any, row: int, tree: dict[str, Any]) -> None:
        """Store the metrics of one node (docs/reference/allocation-server.md, "Nodes")."""
        cores = max(1, fleet.cpu_total[row]) / 1000
        self._cpu[row] = _part((tree.get("vcpu") or {}).get("load1m"), cores)
        self._gpu[row] = _part((tree.get("gpu") or {}).get("avgCudaUtilization"), 100)
        ids = fleet.gpu_ids[row]
        for device in tree.get("gpus") or ():
            name, used = str(device.get("gpu_id")), _part(device.get("cudaUtilization"), 100)
            if name in ids and not isnan(used):
                self._gpu[row, ids.index(name)] = used


def _part(value: Any, whole: float) -> float:
    """Return a measured value as a fraction from 0 to 1; NaN if the value is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return nan
    return min(1.0, max(0.0, value / whole))

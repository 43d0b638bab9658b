"""GPU packing: prefer GPUs in use to idle ones, and nodes in use to idle ones.

The strategy that production schedulers for shared GPUs ship (Gandiva, OSDI'18, and others), in the
form of the ATC'23 comparison. A node falls into the first of three classes that is true of it:

    every GPU of it is idle               max(33 - GPUs, GPUs)            the last resort
    at least one idle GPU has to be used  max(50 - idle GPUs used, 33)
    GPUs in use have the room             max(100 - left // 10, 50)       the first choice

where `left` is what is free of the GPUs that would be used, in percent of one GPU. A request
without GPUs scores 0 everywhere. Equal scores go to the first node. A share takes the GPU with the
least left.

Parameters: none.
"""

from typing import Any

import numpy as np

from moorage.model import GPU_MILLI
from moorage.policy import best_rows, decline, propose, read_demand


class AIOSv1PolicyRule:
    """Proposes the node with the most GPUs in use."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:
        pass

    def eval(self, parameters: dict[str, Any], input_data: Any, context: dict[str, Any]) -> Any:  # noqa: ARG002  # The contract's signature.
        """Return the placement, or `{"declined": reason}`."""
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        rows = np.flatnonzero(fleet.feasible(demand))
        scores = np.full(len(fleet), -1)
        scores[rows] = self._scores(fleet, demand, rows) if demand.gpus else 0
        return propose(fleet, demand, best_rows(fleet, demand, scores))

    def _scores(self, fleet: Any, demand: Any, rows: Any) -> Any:
        free, total = fleet.gpu_free[rows], fleet.gpu_total[rows]
        # The GPUs that would be used: the fitting ones with the least left.
        left = np.where(fleet.fitting_gpus(demand)[rows], free, 2 * GPU_MILLI)
        used = np.sort(left, axis=1)[:, : demand.gpus]
        gpus, idle_used = (total > 0).sum(1), (used == GPU_MILLI).sum(1)
        all_idle = (free == total).all(1)
        percent_left = (used * 100 // GPU_MILLI).sum(1)
        in_use = np.maximum(100 - percent_left // 10, 50)
        some_idle = np.maximum(50 - idle_used, 33)
        last_resort = np.maximum(33 - gpus, gpus)
        return np.where(all_idle, last_resort, np.where(idle_used > 0, some_idle, in_use))

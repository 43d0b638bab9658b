"""Best fit: the node that has the least free CPU and GPU after the placement.

Small requests go where little is left, so empty nodes stay empty for large ones. It looks at
amounts only, not at which requests the leftovers could still serve; `fgd` does.

The score is that of the ATC'23 comparison: 100 * (1 - (free CPU + free GPU after placement) / 2),
each as a fraction of the fleet's largest node, cut to a whole number and then stretched over the
candidates to 0..100. Equal scores go to the first node. A share takes the GPU with the least left.

Parameters: none.
"""

from typing import Any

import numpy as np

from moorage.model import GPU_MILLI
from moorage.policy import best_rows, decline, propose, read_demand


class AIOSv1PolicyRule:
    """Proposes the node that has the least free CPU and GPU after the placement."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:
        pass

    def eval(self, parameters: dict[str, Any], input_data: Any, context: dict[str, Any]) -> Any:  # noqa: ARG002  # The contract's signature.
        """Return the placement, or `{"declined": reason}`."""
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        rows = np.flatnonzero(fleet.feasible(demand))
        scores = np.full(len(fleet), -1)
        if len(rows):
            largest_cpu = max(1, fleet.cpu_total.max())
            largest_gpu = max(1, fleet.gpu_total.shape[1] * GPU_MILLI)
            cpu_left = fleet.cpu_free[rows] - demand.cpu_milli
            gpu_left = fleet.gpu_free[rows].sum(1) - demand.gpus * demand.gpu_milli
            fit = (100 * (1 - cpu_left / largest_cpu / 2 - gpu_left / largest_gpu / 2)).astype(int)
            scores[rows] = (fit - fit.min()) * 100 // max(1, fit.max() - fit.min())
        return propose(fleet, demand, best_rows(fleet, demand, scores))

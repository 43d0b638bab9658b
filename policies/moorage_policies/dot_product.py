"""Dot product: the node whose free capacity aligns least with the request.

The alignment heuristic of "Multi-resource packing for cluster schedulers" (Tetris, SIGCOMM'14), in
the form of the ATC'23 comparison. The dot product d of free and requested amounts, CPU and GPU,
each as a fraction of the fleet's largest node, is large on empty nodes; the score

    int(100 * (1 - d / 2))

prefers the node where it is small: a full one. It cares less than `best_fit` about amounts that
the request does not ask for. Equal scores go to the first node; there are many, since small
requests have small products. A share takes the GPU with the least left.

Parameters: none.
"""

from typing import Any

import numpy as np

from moorage.model import GPU_MILLI
from moorage.policy import best_rows, decline, propose, read_demand


class AIOSv1PolicyRule:
    """Proposes the node with the smallest dot product."""

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
            cpu = (fleet.cpu_free[rows] / largest_cpu) * (demand.cpu_milli / largest_cpu)
            wanted = demand.gpus * demand.gpu_milli
            gpu = (fleet.gpu_free[rows].sum(1) / largest_gpu) * (wanted / largest_gpu)
            scores[rows] = (100 * (1 - (cpu + gpu) / 2)).astype(int)
        return propose(fleet, demand, best_rows(fleet, demand, scores))

"""Spread: the node with the most free capacity, and its GPUs with the most free capacity.

Evens out load, heat and contention, and limits what the loss of one node takes along. The price
is fragmentation: large requests find no empty node sooner than with any packing policy.

The score of a node is the free fraction it keeps: (1 - cpu_weight) * GPU + cpu_weight * CPU. A
request without GPUs counts CPU alone. Equal scores go to the first node.

Parameters:
    cpu_weight: 0 (GPUs alone decide) to 1 (CPU alone decides), default 0.5.
"""

from typing import Any

import numpy as np

from moorage.policy import best_rows, decline, propose, read_demand


class AIOSv1PolicyRule:
    """Proposes the node with the most free capacity."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:
        pass

    def eval(self, parameters: dict[str, Any], input_data: Any, context: dict[str, Any]) -> Any:  # noqa: ARG002  # The contract's signature.
        """Return the placement, or `{"declined": reason}`."""
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        rows = np.flatnonzero(fleet.feasible(demand))
        cpu_weight = parameters.get("cpu_weight", 0.5) if demand.gpus else 1.0
        share_left = (fleet.cpu_free[rows] - demand.cpu_milli) / np.maximum(
            1, fleet.cpu_total[rows]
        )
        if cpu_weight < 1:
            gpu_left = fleet.gpu_free[rows].sum(1) - demand.gpus * demand.gpu_milli
            gpu_share_left = gpu_left / fleet.gpu_total[rows].sum(1)
            share_left = (1 - cpu_weight) * gpu_share_left + cpu_weight * share_left
        scores = np.full(len(fleet), -1.0)
        scores[rows] = share_left

        def emptiest(row: int) -> list[int]:
            free = np.where(fleet.fitting_gpus(demand)[row], fleet.gpu_free[row], -1)
            most_first = np.argsort(-free, kind="stable")[: demand.gpus]
            return sorted(most_first.tolist())

        # With a topology the GPUs must also belong together, which `pick_gpus` sees to.
        pick = None if demand.topology in {"nvlink", "numa"} else emptiest
        return propose(fleet, demand, best_rows(fleet, demand, scores), pick)

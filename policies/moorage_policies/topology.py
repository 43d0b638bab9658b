"""Topology: prefer GPUs with fast links between them, but accept others.

The GPUs of a node come from one NVLink group where one has the room, else from one NUMA domain,
else from the node as a whole; the nodes of a gang from one rack where one has the room.
`resources` with a `topology` demands such a thing and waits for it; this policy prefers it and
takes what there is.

A node of a better level wins; within a level the node with the least free GPU, then the first.
From a group, the one that fits tightest is taken. A request of one GPU takes one from the group
that has the fewest whole ones left, so that larger groups stay whole for those who need them.

Parameters: none.
"""

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from moorage.model import GPU_MILLI
from moorage.policy import best_rows, decline, propose, read_demand

LEVELS: tuple[Literal["nvlink", "numa"], ...] = ("nvlink", "numa")
"""Levels of closeness, the best first; the last one, the whole node, is not listed."""


class AIOSv1PolicyRule:
    """Proposes GPUs that are close to each other."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:
        pass

    def eval(self, parameters: dict[str, Any], input_data: Any, context: dict[str, Any]) -> Any:  # noqa: ARG002  # The contract's signature.
        """Return the placement, or `{"declined": reason}`."""
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        free = fleet.gpu_free.sum(1)
        fullest = int(free.max(initial=0)) - free  # Higher is better, and 0 or more.
        step = int(fullest.max(initial=0)) + 1
        scores = np.where(fleet.feasible(demand), fullest, -1)
        # A requested topology is no longer a preference: `feasible` has seen to it.
        levels = LEVELS if demand.gpus > 1 and demand.topology not in LEVELS else ()
        closer = [replace(demand, topology=level) for level in levels]
        for better, wanted in enumerate(reversed(closer), start=1):
            together = fleet.feasible(wanted)
            scores[together] = better * step + fullest[together]

        def close(row: int) -> list[int]:
            if demand.gpus == 1:
                return self._one(fleet, demand, row)
            for wanted in (*closer, demand):
                if columns := fleet.pick_gpus(row, wanted):
                    return list(columns)
            return []

        rows = best_rows(fleet, demand, scores)
        if demand.topology != "zone":  # A rack may have nodes of no zone.
            rows = best_rows(fleet, replace(demand, topology="rack"), scores) or rows
        return propose(fleet, demand, rows, close)

    def _one(self, fleet: Any, demand: Any, row: int) -> list[int]:
        """Return a GPU of the group with the fewest idle GPUs; for a share, the fullest GPU."""
        linked = (fleet.gpu_link[row] >= 0).any()
        groups = fleet.gpu_link[row] if linked else fleet.gpu_numa[row]
        whole = fleet.gpu_free[row] == GPU_MILLI
        together = [int((whole & (groups == group)).sum()) if group >= 0 else 0 for group in groups]
        fitting = np.flatnonzero(fleet.fitting_gpus(demand)[row]).tolist()
        # To break a whole GPU costs its group; one that is in use already costs nothing.
        cost = {
            column: (together[column] if whole[column] else -1, int(fleet.gpu_free[row, column]))
            for column in fitting
        }
        return [min(cost, key=cost.__getitem__)]

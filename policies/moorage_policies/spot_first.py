"""Spot first: prefer spot machines, which may be reclaimed, to others.

For work that survives an interruption. A node's capacity type comes from its labels, those of
Karpenter, EKS, GKE, AKS and Ray (see `capacity_type` in `moorage.policy`); a node without one
counts as `on-demand`. The types are used in the order of `order`; within a type the node with the
least free GPU is taken, then the first.

Parameters:
    order: list of capacity types, the first choice first; default spot, reserved, on-demand.
    others: whether nodes of other types are used when these have no room, default true. With
        `order` ["spot"] and `others` false, nothing is ever placed on a machine that stays.
"""

from typing import Any

import numpy as np

from moorage.policy import NodeLabels, best_rows, capacity_type, decline, propose, read_demand

ORDER = ["spot", "reserved", "on-demand"]


class AIOSv1PolicyRule:
    """Proposes a spot node if one fits."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:  # noqa: ARG002  # The contract's signature.
        self._labels = NodeLabels()
        self._known: Any = None
        self._ranks = np.zeros(0, np.int64)

    def eval(self, parameters: dict[str, Any], input_data: Any, context: dict[str, Any]) -> Any:  # noqa: ARG002  # As above.
        """Return the placement, or `{"declined": reason}`."""
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        order = parameters.get("order", ORDER)
        ranks = self._ranked(fleet, input_data["cluster_data"], order)
        fits = fleet.feasible(demand)
        if not parameters.get("others", True):
            fits &= ranks < len(order)
        rows = np.flatnonzero(fits)
        scores = np.full(len(fleet), -1)
        # By type, then by what is left, then by row.
        best_first = np.lexsort((fleet.gpu_free[rows].sum(1), ranks[rows]))
        scores[rows[best_first]] = np.arange(len(rows), 0, -1)
        return propose(fleet, demand, best_rows(fleet, demand, scores))

    def _ranked(self, fleet: Any, cluster_data: Any, order: list[str]) -> Any:
        """Return the index of each node's type in `order`; other types come last."""
        types = self._labels.column(fleet, cluster_data, capacity_type)
        if self._known is None or self._known[0] is not types or self._known[1] != order:
            place = {name: number for number, name in reversed(list(enumerate(order)))}
            self._ranks = np.array([place.get(name, len(order)) for name in types], np.int64)
            self._known = (types, list(order))
        return self._ranks

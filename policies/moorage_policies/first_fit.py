"""First fit: the first node with room, in the order of (cluster id, node id).

The cheapest policy, and the baseline that the others are measured against. It fills nodes from the
front, so the last ones stay empty, but it leaves small gaps wherever a request happens to fit.

Parameters: none.
"""

from typing import Any

import numpy as np

from moorage.policy import best_rows, decline, propose, read_demand


class AIOSv1PolicyRule:
    """Proposes the first node on which the request fits."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:
        pass

    def eval(self, parameters: dict[str, Any], input_data: Any, context: dict[str, Any]) -> Any:  # noqa: ARG002  # The contract's signature.
        """Return the placement, or `{"declined": reason}`."""
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        scores = np.where(fleet.feasible(demand), 0, -1)  # All equal: the first one wins.
        return propose(fleet, demand, best_rows(fleet, demand, scores))

"""Random: any node and GPU that fits, each with the same probability.

The baseline of the ATC'23 comparison, and a fair choice where placement does not matter. The
draw comes from a seed alone: the same fleet and seed give the same answer. The seed is
`inputs["seed"]` where the request gives one (any JSON value), else the server's own for it.
Whole GPUs are the lowest-numbered free ones.

Parameters: none.
"""

from random import Random
from typing import Any

import numpy as np

from moorage.policy import best_rows, decline, propose, read_demand


class AIOSv1PolicyRule:
    """Proposes a random node."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:
        pass

    def eval(self, parameters: dict[str, Any], input_data: Any, context: dict[str, Any]) -> Any:  # noqa: ARG002  # The contract's signature.
        """Return the placement, or `{"declined": reason}`."""
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        seed = (input_data["inputs"] or {}).get("seed", input_data["seed"])
        rng = Random(str(seed))  # noqa: S311  # A reproducible choice, not a secret.
        rows = np.flatnonzero(fleet.feasible(demand))
        scores = np.full(len(fleet), -1)
        if demand.nodes > 1:
            scores[rows] = rng.sample(range(len(rows)), len(rows))
        elif len(rows):
            scores[rng.choice(rows.tolist())] = 100

        def any_gpu(row: int) -> list[int]:
            fitting = np.flatnonzero(fleet.fitting_gpus(demand)[row]).tolist()
            return [rng.choice(fitting)]

        share_of_one = demand.gpus == 1 and demand.gpu_milli < fleet.gpu_total.max(initial=0)
        pick = any_gpu if share_of_one else None
        return propose(fleet, demand, best_rows(fleet, demand, scores), pick)

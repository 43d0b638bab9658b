"""Most memory: the GPUs with the most free memory, and the node that has them.

For models whose size is unknown beforehand, and batches that grow into what is there. The free
memory of a GPU is its memory times its free part. The score of a node is the sum over the GPUs that
the request would get: those that fit with the most free memory. If the memory of GPUs is not known,
and for requests without GPUs, it chooses the node with the most free main memory; among equal
nodes, the first.

With NVLink or NUMA topology the GPUs of a node are those that belong together.

Parameters: none.
"""

from typing import Any

import numpy as np

from moorage.model import GPU_MILLI
from moorage.policy import best_rows, decline, propose, read_demand


class AIOSv1PolicyRule:
    """Proposes the GPUs with the most free memory."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:
        pass

    def eval(self, parameters: dict[str, Any], input_data: Any, context: dict[str, Any]) -> Any:  # noqa: ARG002  # The contract's signature.
        """Return the placement, or `{"declined": reason}`."""
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        rows = np.flatnonzero(fleet.feasible(demand))
        # Free MiB of each GPU, in thousandths; of GPUs that do not fit, less than nothing.
        free = np.where(
            fleet.fitting_gpus(demand), fleet.gpu_memory * fleet.gpu_free.clip(0, GPU_MILLI), -1
        )
        most = np.sort(free[rows], axis=1)[:, ::-1][:, : demand.gpus].sum(1)
        order = np.lexsort((-fleet.memory_free[rows], -most))
        scores = np.full(len(fleet), -1)
        scores[rows[order]] = np.arange(len(rows), 0, -1)

        def emptiest(row: int) -> list[int]:
            most_first = np.argsort(-free[row], kind="stable")[: demand.gpus]
            return sorted(most_first.tolist())

        # With a topology the GPUs must also belong together, which `pick_gpus` sees to.
        pick = None if demand.topology in {"nvlink", "numa"} else emptiest
        return propose(fleet, demand, best_rows(fleet, demand, scores), pick)

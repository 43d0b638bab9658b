"""GPU clustering: place requests of one kind on the same nodes.

The strategy of production schedulers that keep jobs of equal GPU needs on the same machines
(Gandiva, OSDI'18), in the form of the ATC'23 comparison. A request is tagged "share" or with its
number of whole GPUs. The score of a node is what it holds,

    75   only requests of the same tag
    50   that tag, and others
    25   nothing
     0   only other tags

plus 25 * used // all, the GPU milli in use of as many GPUs as the fleet's largest node has. A
request without GPUs scores 0 everywhere. Equal scores go to the first node. A share takes the GPU
with the least left.

A policy sees what is free, not what for. So this one remembers where it placed what, until a node
is empty again. Of a node that others filled, or that was filled before this cell began, it knows
what can be seen: a GPU in part in use holds shares, and one wholly in use a request of one GPU.

Parameters: none.
"""

from typing import Any, Final

import numpy as np

from moorage.model import GPU_MILLI
from moorage.policy import best_rows, decline, propose, read_demand

_SHARE: Final = 1
"""The tag of a share: bit 0. The tag of k whole GPUs is bit k."""
_ONE_GPU: Final = 1 << 1
_GPUS_MAX: Final = 62
"""Most GPUs with a tag of their own; larger requests have the last tag."""


class AIOSv1PolicyRule:
    """Proposes the node that holds requests of the same kind."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:  # noqa: ARG002  # The contract's signature.
        self._nodes: tuple[tuple[str, str], ...] = ()
        self._layout = self._version = -1
        self._held = np.zeros(0, np.int64)
        self._proposed: tuple[list[int], int] = ([], 0)

    def eval(self, parameters: dict[str, Any], input_data: Any, context: dict[str, Any]) -> Any:  # noqa: ARG002  # As above.
        """Return the placement, or `{"declined": reason}`."""
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        self._look(fleet)
        rows = np.flatnonzero(fleet.feasible(demand))
        whole = demand.gpu_milli == GPU_MILLI
        tag = 1 << min(demand.gpus, _GPUS_MAX) if whole else _SHARE
        scores = np.full(len(fleet), -1)
        scores[rows] = self._scores(fleet, rows, tag) if demand.gpus else 0
        chosen = best_rows(fleet, demand, scores)
        self._proposed = (chosen, tag if demand.gpus else 0)
        return propose(fleet, demand, chosen)

    def _scores(self, fleet: Any, rows: Any, tag: int) -> Any:
        held = self._held[rows]
        same = np.where(held == tag, 75, 50)
        base = np.where(held & tag, same, np.where(held, 0, 25))
        largest = max(1, fleet.gpu_total.shape[1] * GPU_MILLI)
        return base + 25 * (largest - fleet.gpu_free[rows].sum(1)) // largest

    def _look(self, fleet: Any) -> None:
        """Update the counts of requests on nodes that changed since the last call."""
        changed = None
        if self._nodes is fleet.node_ids and self._layout == fleet.layout:
            changed = fleet.changed_since(self._version)
            # A proposal that was taken up has changed its nodes by now; of others nothing is left.
            taken = sorted(set(changed or ()).intersection(self._proposed[0]))
            self._held[taken] |= self._proposed[1]
        else:  # Rows may mean other nodes now: carry over by name.
            known = dict(zip(self._nodes, self._held.tolist(), strict=True))
            self._held = np.array([known.get(node, 0) for node in fleet.node_ids], np.int64)
        self._proposed = ([], 0)
        self._nodes, self._layout, self._version = fleet.node_ids, fleet.layout, fleet.version
        rows = np.arange(len(fleet)) if changed is None else np.array(changed, np.int64)
        free, total, seen = fleet.gpu_free[rows], fleet.gpu_total[rows], self._held[rows]
        shares = ((free > 0) & (free < total)).any(1) * _SHARE
        wholes = ((free <= 0) & (total > 0)).any(1) * _ONE_GPU
        in_use = (free < total).any(1)
        self._held[rows] = np.where(in_use, np.where(seen, seen, shares | wholes), 0)

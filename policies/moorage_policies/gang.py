"""Gang: places a request on several nodes or on none, close together or far apart.

A request with `resources.nodes` above 1 gets that many different nodes, or none. The names of the
strategies are those of Ray's placement groups, with racks as what is shared or not:

- `pack`: the rack with the fewest nodes to offer that still has room for all, and in it the
  fullest nodes; where no rack has, the cluster with the fewest nodes that has, from as few racks
  as possible. For training, whose members talk all the time.
- `spread`: as many different racks as possible, and in each the emptiest nodes; within one
  cluster where one has room for all. For services, of which one rack's loss shall not take
  everything.

A node without a named rack is a rack of its own. `topology: "rack"` in `resources` leaves one
rack to both, and `zone` one zone: `spread` then takes the one that offers the most nodes. A
request for one node is placed as a gang of one: on the fullest node, or the emptiest.

Parameters:
    strategy: `pack` (the default) or `spread`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from moorage.policy import decline, gang_groups, propose, read_demand

Place = tuple[int, int]
"""A rack: the numbers of its cluster and of the rack; below 0 for a node without a rack."""


class AIOSv1PolicyRule:
    """Proposes a whole gang, or nothing."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:
        pass

    def eval(self, parameters: dict[str, Any], input_data: Any, context: dict[str, Any]) -> Any:  # noqa: ARG002  # The contract's signature.
        """Return the placement, or `{"declined": reason}`."""
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        spread = parameters.get("strategy", "pack") == "spread"
        rows = np.flatnonzero(fleet.feasible(demand))
        left = fleet.gpu_free[rows].sum(1) if demand.gpus else fleet.cpu_free[rows]
        ranking = rows[np.argsort(-left if spread else left, kind="stable")].tolist()
        if demand.nodes == 1:
            return propose(fleet, demand, ranking[:1])
        group = self._group(fleet, demand, ranking, spread=spread)
        members = self._apart(fleet, group) if spread else self._together(fleet, group)
        return propose(fleet, demand, members[: demand.nodes])

    def _group(self, fleet: Any, demand: Any, ranking: list[int], *, spread: bool) -> list[int]:
        """Return the nodes of the rack, cluster or fleet that holds the gang; [] if none does."""

        def rack(row: int) -> Place:
            return _rack(fleet, row)

        def cluster(row: int) -> Place:
            return int(fleet.cluster[row]), 0

        def everything(_: int) -> Place:
            return 0, 0

        together = gang_groups(fleet, demand)

        def shared(row: int) -> Place:
            return _place(fleet, row, together)

        packed = (rack, cluster, everything)
        for place in (shared,) if together is not None else packed[spread:]:
            groups = [g for g in _grouped(ranking, place).values() if len(g) >= demand.nodes]
            if groups:
                return max(groups, key=len) if spread else min(groups, key=len)
        return []

    def _together(self, fleet: Any, group: list[int]) -> list[int]:
        """Return the nodes ordered by rack, the rack with the most nodes first."""
        racks = _grouped(group, lambda row: _rack(fleet, row)).values()
        return [row for rack in sorted(racks, key=len, reverse=True) for row in rack]

    def _apart(self, fleet: Any, group: list[int]) -> list[int]:
        """Return the best node of each rack, then the second-best node of each, and so on."""
        racks = _grouped(group, lambda row: _rack(fleet, row)).values()
        place = {row: number for rack in racks for number, row in enumerate(rack)}
        return sorted(group, key=place.__getitem__)  # Stable: the best racks stay in front.


def _rack(fleet: Any, row: int) -> Place:
    return _place(fleet, row, fleet.rack)


def _place(fleet: Any, row: int, groups: Any) -> Place:
    group = int(groups[row])
    return int(fleet.cluster[row]), group if group >= 0 else -1 - row


def _grouped(rows: list[int], place: Callable[[int], Place]) -> dict[Place, list[int]]:
    groups: dict[Place, list[int]] = {}
    for row in rows:
        groups.setdefault(place(row), []).append(row)
    return groups

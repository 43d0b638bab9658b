"""The view of one evaluation: the columns of the fleet, read-only, and the usable nodes.

The cell builds a view for each consultation and passes it as `input_data["fleet"]`; the author's
offline tests do the same.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from moorage.model import Demand
from moorage.policy.fleet import Fleet, Misfit
from moorage.policy.inventory import Bools, Ints
from moorage.records.json_values import JsonObject

_CHANGING: Final = frozenset(
    {
        "give",
        "install",
        "part",
        "put",
        "remove",
        "restore",
        "set_capacity",
        "snapshot",
        "splice",
        "take",
        "touch",
    }
)
"""Methods of the fleet that change it (or copy all of it), which policies may not call."""


class FleetView:
    """A policy's view of the fleet.

    All columns of `Fleet` are attributes of the view (`cpu_free`, `gpu_free`, `node_ids`, …);
    `Fleet` has their shapes and units. The columns cannot be written.

    Args:
        fleet: The fleet, or a cell's replica of it.
        demand: The `resources` of the request, or None.
        candidates: Clusters that the request may use; None: all.
        reserved: Nodes reserved for other tenants, as `(cluster_id, node_id)`.
        matching: A bit for each node, set where it has the required labels; empty: all have.

    Attributes:
        demand: The argument `demand`.
        allowed: bool `[nodes]`: candidates that are not reserved and have the required labels; None
            when every node is.
    """

    def __init__(
        self,
        fleet: Fleet,
        demand: Demand | None = None,
        candidates: Sequence[str] | None = None,
        reserved: Sequence[tuple[str, str]] = (),
        matching: bytes = b"",
    ) -> None:
        self._fleet = fleet
        self.demand = demand
        self.allowed: Bools | None = None
        if candidates is not None:
            wanted = set(candidates)
            numbers = [n for n, name in enumerate(fleet.cluster_ids) if name in wanted]
            if len(numbers) < len(fleet.cluster_ids):
                self.allowed = np.isin(fleet.cluster, numbers)
        if matching:
            bits = np.frombuffer(matching, np.uint8)
            meets = np.unpackbits(bits, count=len(fleet)).view(np.bool_)
            self.allowed = meets if self.allowed is None else self.allowed & meets
        if reserved:
            allowed = np.ones(len(fleet), np.bool_) if self.allowed is None else self.allowed
            for cluster_id, node_id in reserved:
                row = fleet.row(cluster_id, node_id)
                if row is not None:
                    allowed[row] = False
            self.allowed = allowed

    def __getattr__(self, name: str) -> Any:
        """Return a column or another public attribute of the fleet, arrays read-only."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _CHANGING:
            raise AttributeError(f"{name}: a policy reads the fleet and cannot change it")
        try:
            value = getattr(self._fleet, name)
        except AttributeError as error:  # Python suggests similar names of `obj`: the view's.
            error.obj = self
            raise
        if isinstance(value, np.ndarray):
            value = value.view()
            value.flags.writeable = False
        self.__dict__[name] = value
        return value

    def __dir__(self) -> list[str]:
        """Return the names of all attributes that a policy may read, also those of the fleet."""
        return [each for each in {*super().__dir__(), *dir(self._fleet)} if each not in _CHANGING]

    def __len__(self) -> int:
        return len(self._fleet)

    @property
    def version(self) -> int:
        """The version of the fleet, for a later `changed_since`."""
        return self._fleet.version

    @property
    def layout(self) -> int:
        """A number that changes when row numbers may mean other nodes than before."""
        return self._fleet.layout

    def changed_since(self, version: int) -> list[int] | None:
        """Return rows whose free capacity changed after `version`, each once; None: maybe all."""
        return self._fleet.changed_since(version)

    def feasible(self, demand: Demand | None = None) -> Bools:
        """Return which allowed nodes could take the part of the demand for one node now.

        Args:
            demand: The demand; None: that of the request.

        Returns:
            bool `[nodes]`; without a demand, all allowed nodes.
        """
        demand = demand or self.demand
        fits = (
            np.ones(len(self._fleet), np.bool_) if demand is None else self._fleet.feasible(demand)
        )
        return fits if self.allowed is None else fits & self.allowed

    def fitting_gpus(self, demand: Demand | None = None) -> Bools:
        """Return which devices could serve the demand now: bool `[nodes, devices]`."""
        return self._fleet.fitting_gpus(self._need(demand))

    def pick_gpus(self, row: int, demand: Demand | None = None) -> list[int]:
        """Return device columns of `row`: whole GPUs by lowest index, shares by best fit."""
        return self._fleet.pick_gpus(row, self._need(demand))

    def why_not(self, row: int, demand: Demand | None = None) -> Misfit:
        """Return the first constraint that excludes node `row` for the demand."""
        return Misfit(int(self._fleet.misfits(self._need(demand), slice(row, row + 1))[0]))

    def placement(self, row: int, columns: Sequence[int] | None = None) -> JsonObject:
        """Return a proposal of node `row` with these devices, in the documented output format.

        Args:
            row: Row of the node.
            columns: Device columns; None: `pick_gpus` chooses them.
        """
        cluster_id, node_id = self._fleet.node_ids[row]
        if columns is None:
            columns = self.pick_gpus(row) if self.demand else []
        ids = self._fleet.gpu_ids[row]
        return {
            "cluster_id": cluster_id,
            "node_id": node_id,
            "gpus": [ids[column] for column in columns],
        }

    def free_gpu_milli(self) -> Ints:
        """Return the total free GPU milli of every node: int64 `[nodes]`."""
        total: Ints = self._fleet.gpu_free.sum(1)
        return total

    def _need(self, demand: Demand | None) -> Demand:
        demand = demand or self.demand
        if demand is None:
            raise ValueError("the request gave no `resources`; pass a Demand")
        return demand

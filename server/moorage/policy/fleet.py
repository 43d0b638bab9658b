"""The fleet in columns: totals and free amounts of each node, and checks of what fits.

The core has a `Fleet`, every cell has a replica of it, and a policy reads the replica as
`input_data["fleet"]`. So the policy (which proposes), the allocator (which verifies) and the
replies (which explain) use the same feasibility functions, and cannot disagree.
"""

from collections.abc import Collection, Sequence
from copy import copy
from enum import IntEnum
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moorage.model import GPU_MILLI, Demand, Requirement, Share
from moorage.policy.inventory import Bools, Ints, NodeInventory
from moorage.policy.matching import Matching

ELIGIBLE_MAX: Final = 256
"""At most this many cached device masks; a further one clears the cache."""


class Misfit(IntEnum):
    """The reason why a node cannot take a demand: the first failing constraint, in this order.

    The members up to `MEMORY` say that the node could not take it even when empty ("never
    here"); the later ones that it cannot take it now.
    """

    FITS = 0
    LABELS = 1
    GPU_MODEL = 2
    GPU_MEMORY = 3
    GPU_COUNT = 4
    TOPOLOGY = 5
    CPU = 6
    MEMORY = 7
    UNAVAILABLE = 8
    GPUS_BUSY = 9
    TOPOLOGY_BUSY = 10
    CPU_BUSY = 11
    MEMORY_BUSY = 12


ALL: Final = slice(None)
"""The index of all rows."""
COPIES_MAX: Final = 1_000_000
"""The number of times that an empty demand fits on a node."""
NEVER: Final = Misfit.MEMORY
"""Misfits up to `NEVER` do not depend on the present leases."""


class Fleet(NodeInventory):
    """A `NodeInventory` whose free amounts follow the leases; finds nodes that fit a demand."""

    def __init__(self) -> None:
        self._eligible: dict[tuple[Any, ...], Bools] = {}
        self._matching = Matching()
        self._eligible_layout = 0
        super().__init__()

    # Capacity ------------------------------------------------------------------------------

    def take(self, share: Share) -> None:
        """Subtract `share` from the free amounts; skip nodes and devices missing or closed here."""
        self._move(share, -1)

    def give(self, share: Share) -> None:
        """Add `share` to the free amounts again."""
        self._move(share, 1)

    def imagined(self) -> "Fleet":
        """Return a copy of this fleet, to try `take` and `give` on it.

        The copy has its own free amounts. The copy shares everything else with this fleet, so do
        not change the inventory of either fleet.
        """
        other = copy(self)
        other.cpu_free, other.memory_free = self.cpu_free.copy(), self.memory_free.copy()
        other.gpu_free = self.gpu_free.copy()
        other._changes = []  # noqa: SLF001  # `other` is a `Fleet`, too.
        other._changes_base = other.version  # noqa: SLF001  # As above.
        return other

    def _move(self, share: Share, sign: int) -> None:
        row = self.row(share.cluster_id, share.node_id)
        if row is None or self.closed.item(row):
            return
        self.cpu_free[row] = self.cpu_free.item(row) + sign * share.cpu_milli
        self.memory_free[row] = self.memory_free.item(row) + sign * share.memory_mib
        ids = self.gpu_ids[row]
        for gpu in share.gpus:
            if gpu in ids:
                place = row, ids.index(gpu)
                self.gpu_free[place] = self.gpu_free.item(place) + sign * share.gpu_milli
        self.touch(row)

    def capacity(self, row: int) -> tuple[int, int, list[int]]:
        """Return the free amounts of a node: CPU milli, memory MiB, milli per device."""
        cpu, memory = self.cpu_free.item(row), self.memory_free.item(row)
        return cpu, memory, self.gpu_free[row].tolist()

    def set_capacity(self, row: int, cpu: int, memory: int, gpus: Sequence[int]) -> None:
        """Overwrite the free amounts of a node (for a replica)."""
        self.cpu_free[row] = cpu
        self.memory_free[row] = memory
        self.gpu_free[row] = gpus
        self.touch(row)

    # Feasibility ---------------------------------------------------------------------------

    def eligible_gpus(self, demand: Demand) -> Bools:
        """Return which devices could ever serve `demand`: bool `[nodes, devices]`, read-only."""
        if self._eligible_layout != self.layout:
            self._eligible_layout = self.layout
            self._eligible.clear()
        share = demand.gpu_milli < GPU_MILLI
        key = (demand.models, demand.gpu_memory_mib, share, demand.where)
        mask = self._eligible.get(key)
        if mask is None:
            mask = self.gpu_total > 0
            if demand.models:
                mask &= np.isin(self.gpu_model, self._codes(demand.models))
            if demand.gpu_memory_mib:
                mask &= self.gpu_memory >= demand.gpu_memory_mib
            if share:
                mask &= ~self.gpu_exclusive
            if demand.where:
                mask &= self.matching(demand.where)[:, None]
            if len(self._eligible) >= ELIGIBLE_MAX:
                self._eligible.clear()
            mask.flags.writeable = False
            self._eligible[key] = mask
        return mask

    def matching(self, where: tuple[Requirement, ...]) -> Bools:
        """Return which nodes have the required labels: bool `[nodes]`, read-only."""
        return self._matching.mask(self, where)

    def has_labels(self, row: int, where: tuple[Requirement, ...]) -> bool:
        """Return the result of `matching` for one node, without caching it."""
        return self._matching.meets(self, row, where)

    def fitting_gpus(self, demand: Demand, rows: Any = ALL) -> Bools:
        """Return which devices could serve `demand` now: bool `[rows, devices]`."""
        fitting: Bools = self.gpu_free[rows] >= demand.gpu_milli
        fitting &= self.eligible_gpus(demand)[rows]
        return fitting

    def feasible(self, demand: Demand, rows: Any = ALL) -> Bools:
        """Return which nodes could take the part of `demand` for one node now: bool `[rows]`.

        Args:
            demand: The demand that must fit on the node.
            rows: Index of the rows to judge (slice, or array of row numbers); all by default.
        """
        fits: Bools = self.cpu_free[rows] >= demand.cpu_milli
        fits &= self.memory_free[rows] >= demand.memory_mib
        if demand.where:
            fits &= self.matching(demand.where)[rows]
        if demand.gpus:
            fits &= self._enough(self.fitting_gpus(demand, rows), demand, rows)
        return fits

    def takes(self, row: int, demand: Demand, columns: Collection[int] = ()) -> bool:
        """Return the result of `feasible` for one node, in Python, since numpy is slow for one row.

        Args:
            row: The node.
            demand: The demand that must fit on the node.
            columns: Different devices that must all be able to serve the demand now.
        """
        if (
            self.cpu_free.item(row) < demand.cpu_milli
            or self.memory_free.item(row) < demand.memory_mib
            or (demand.where and not self.matching(demand.where).item(row))
        ):
            return False
        if columns and len(columns) >= demand.gpus and self._groups(demand) is None:
            able, free, milli = self.eligible_gpus(demand), self.gpu_free, demand.gpu_milli
            for column in columns:
                if free.item(row, column) < milli or not able.item(row, column):
                    return False
            return True
        if not demand.gpus and not columns:
            return True
        fitting = self.fitting_columns(row, demand)
        if len(self._one_group(row, demand, fitting)) < demand.gpus:
            return False
        return not columns or set(fitting).issuperset(columns)

    def fitting_columns(self, row: int, demand: Demand) -> list[int]:
        """Return the device columns of one node that could serve `demand` now."""
        milli, able = demand.gpu_milli, self.eligible_gpus(demand)[row].tolist()
        free = self.gpu_free[row].tolist()
        return [column for column, fit in enumerate(able) if fit and free[column] >= milli]

    def _one_group(self, row: int, demand: Demand, columns: list[int]) -> list[int]:
        """Return the devices of the smallest sufficient group; all, if `demand` wants no group."""
        groups = self._groups(demand)
        if groups is None:
            return columns
        by_group: dict[int, list[int]] = {}
        of_column = groups[row].tolist()
        for column in columns:
            if of_column[column] >= 0:
                by_group.setdefault(of_column[column], []).append(column)
        enough = [found for found in by_group.values() if len(found) >= demand.gpus]
        return min(enough, key=len, default=[])

    def copies(self, demand: Demand, rows: Any = ALL) -> Ints:
        """Return how often the part of `demand` for one node fits on each node now: int64 `[rows]`.

        The result is above 0 exactly for the nodes that `feasible` returns. An empty demand fits
        `COPIES_MAX` times.
        """
        cpu, memory = self.cpu_free[rows], self.memory_free[rows]
        copies = np.where(cpu >= demand.cpu_milli, COPIES_MAX, 0)
        if demand.where:
            copies = np.where(self.matching(demand.where)[rows], copies, 0)
        if demand.cpu_milli:
            copies = np.minimum(copies, np.maximum(cpu, 0) // demand.cpu_milli)
        if demand.memory_mib:
            copies = np.minimum(copies, memory // demand.memory_mib)
        if demand.gpus:
            able = self.eligible_gpus(demand)[rows]
            parts = np.where(able, self.gpu_free[rows] // demand.gpu_milli, 0)
            groups = self._groups(demand)
            if groups is None:
                return np.minimum(copies, rounds(parts, demand.gpus))
            here = groups[rows]
            numbers = range(int(groups.max(initial=-1)) + 1)
            in_groups = (rounds(np.where(here == each, parts, 0), demand.gpus) for each in numbers)
            return np.minimum(copies, sum(in_groups, np.zeros_like(copies)))
        return copies

    def misfits(self, demand: Demand, rows: Any = ALL) -> npt.NDArray[np.int8]:
        """Return the first failing constraint per node, as `Misfit` values: int8 `[rows]`.

        A node is `FITS` exactly when `feasible` says so.
        """
        verdict = np.zeros(len(self.cpu_free[rows]), np.int8)

        def fail(bad: Bools, why: Misfit) -> None:
            verdict[bad & (verdict == 0)] = why

        if demand.where:
            fail(~self.matching(demand.where)[rows], Misfit.LABELS)
        if demand.gpus:
            exists = self.gpu_total[rows] > 0
            if demand.models:
                exists &= np.isin(self.gpu_model[rows], self._codes(demand.models))
                fail(_devices(exists) < demand.gpus, Misfit.GPU_MODEL)
            if demand.gpu_memory_mib:
                exists &= self.gpu_memory[rows] >= demand.gpu_memory_mib
                fail(_devices(exists) < demand.gpus, Misfit.GPU_MEMORY)
            able = self.eligible_gpus(demand)[rows]
            fail(_devices(able) < demand.gpus, Misfit.GPU_COUNT)
            fail(~self._enough(able, demand, rows), Misfit.TOPOLOGY)
        fail(self.cpu_total[rows] < demand.cpu_milli, Misfit.CPU)
        fail(self.memory_total[rows] < demand.memory_mib, Misfit.MEMORY)
        fail(self.closed[rows] > 0, Misfit.UNAVAILABLE)
        if demand.gpus:
            fitting = self.fitting_gpus(demand, rows)
            fail(_devices(fitting) < demand.gpus, Misfit.GPUS_BUSY)
            fail(~self._enough(fitting, demand, rows), Misfit.TOPOLOGY_BUSY)
        fail(self.cpu_free[rows] < demand.cpu_milli, Misfit.CPU_BUSY)
        fail(self.memory_free[rows] < demand.memory_mib, Misfit.MEMORY_BUSY)
        return verdict

    def pick_gpus(self, row: int, demand: Demand) -> list[int]:
        """Return device columns of `row` that serve `demand`, or [] if there are too few.

        A demand for whole devices gets the free devices with the lowest numbers. A demand for
        shares gets the devices with the least free milli that suffice. With `nvlink` or `numa`,
        all come from the smallest group that suffices.
        """
        columns = self._one_group(row, demand, self.fitting_columns(row, demand))
        if demand.gpu_milli < GPU_MILLI:
            columns.sort(key=lambda column: int(self.gpu_free[row, column]))
        return sorted(columns[: demand.gpus]) if len(columns) >= demand.gpus else []

    def share(self, row: int, demand: Demand, columns: Sequence[int]) -> Share:
        """Return the share of node `row` that serves `demand` on the devices `columns`."""
        cluster_id, node_id = self.node_ids[row]
        return Share(
            cluster_id=cluster_id,  # type: ignore[arg-type]  # Plain strings in the replica.
            node_id=node_id,  # type: ignore[arg-type]  # As above.
            gpus=tuple([self.gpu_ids[row][column] for column in columns]),
            gpu_milli=demand.gpu_milli,
            cpu_milli=demand.cpu_milli,
            memory_mib=demand.memory_mib,
        )

    def _codes(self, models: Sequence[str]) -> list[int]:
        return [code for code, model in enumerate(self.models) if model in models]

    def _groups(self, demand: Demand) -> Ints | None:
        if demand.gpus <= 1:
            return None  # One device is its own group.
        if demand.topology == "nvlink":
            return self.gpu_link
        return self.gpu_numa if demand.topology == "numa" else None

    def _enough(self, usable: Bools, demand: Demand, rows: Any) -> Bools:
        """Return which rows have enough usable devices, in one group if the demand wants that."""
        groups = self._groups(demand)
        enough: Bools
        if groups is None:
            enough = _devices(usable) >= demand.gpus
            return enough
        enough = np.zeros(len(usable), np.bool_)
        for group in range(int(groups.max(initial=-1)) + 1):
            enough |= _devices(usable & (groups[rows] == group)) >= demand.gpus
        return enough


def rounds(parts: Ints, size: int) -> Ints:
    """Return, per row, the largest number of groups, each of `size` different places.

    Args:
        parts: In how many groups each place may be: int64 `[rows, places]`.
        size: Number of places in a group.
    """
    low = np.zeros(len(parts), np.int64)
    high = parts.sum(1) // size
    while (low < high).any():
        middle = (low + high + 1) // 2
        enough = np.minimum(parts, middle[:, None]).sum(1) >= size * middle
        low, high = np.where(enough, middle, low), np.where(enough, high, middle - 1)
    return low


def _devices(mask: Bools) -> npt.NDArray[np.uint8]:
    """Count the devices of each node that are set in `mask`.

    A product of bytes is three times as fast here as numpy's sum over the last axis, and no node
    has 256 devices.
    """
    count: npt.NDArray[np.uint8] = mask.view(np.uint8) @ _ones(mask.shape[1])
    return count


@cache
def _ones(length: int) -> npt.NDArray[np.uint8]:
    return np.ones(length, np.uint8)

"""Where a policy gets its next cell: on a worker, or on this machine. Used by `pool` alone.

Where workers are up, cells are on them, and this machine has those that no worker can have: of what
a worker failed at, of what is asked on the side, and of policies without any cell where all workers
are full of others that are busy.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from moorage.sandbox.host.channel import Cell
from moorage.sandbox.host.groups import Group, GroupKey
from moorage.sandbox.host.spawner import Spawner
from moorage.sandbox.host.work import Work
from moorage.sandbox.host.workers import Workers
from moorage.sandbox.wire.limits import Limits

DOUBT_SECONDS: Final = 30.0
"""How long a worker gets no cell of a policy that failed there as it does not fail elsewhere."""


class CellSupply:
    """Finds a home for cells, after ending an idle one where that is needed.

    Args:
        limits: All bounds.
        spawner: Of this machine.
        workers: All others; None: there are none.
        groups: All groups, the one that was asked least lately first.
        group_of: All cells that hold a policy.
        evict: Removes an idle cell.

    """

    def __init__(
        self,
        limits: Limits,
        spawner: Spawner,
        workers: Workers | None,
        groups: Mapping[GroupKey, Group],
        group_of: Mapping[Cell, Group],
        evict: Callable[[Cell], None],
    ) -> None:
        self._limits = limits
        self._spawner = spawner
        self._workers = workers
        self._groups = groups
        self._group_of = group_of
        self._evict = evict

    @property
    def cells_per_policy_max(self) -> int:
        """How many cells one policy may have."""
        remote = self._workers.cells_max if self._workers is not None else 0
        return max(self._limits.cells_per_policy_max, remote)

    def home(self, group: Group, work: Work, now: float) -> Spawner | None:
        """Return what is to make a cell for a group, since this work waits for one."""
        if self._workers is None or not self._workers.up or group.aside or work.here:
            return self._here(group)
        avoided = group.avoids(work, now)
        worker = self._workers.choose(avoided)
        if worker is None and self._end_idle(cell for cell in self._elsewhere(avoided)):
            worker = self._workers.choose(avoided)
        if worker is None and not any(work.may_go_to(cell.worker) for cell in group.cells):
            return self._here(group)  # They wait for no other policy's cells.
        return worker

    def returns(self, cell: Cell, group: Group, now: float) -> bool:
        """Return whether an idle cell of this machine is to go, since a worker has room again."""
        if cell.worker or self._workers is None or group.aside or group.backlog:
            return False
        group.doubted = {name: until for name, until in group.doubted.items() if until > now}
        return self._workers.choose(group.doubted) is not None

    def _elsewhere(self, avoided: Iterable[str]) -> Iterable[Cell]:
        cells = (cell for group in self._groups.values() for cell in group.cells)
        return [cell for cell in cells if cell.worker and cell.worker not in avoided]

    def _here(self, wanting: Group) -> Spawner | None:
        # Bursts leave a quarter to policies that have no cell yet: these wait for no other's.
        reserved = self._limits.cells_max // 4 if wanting.cells else 0
        taken = sum(not cell.worker for cell in self._group_of) + self._spawner.spawning
        if taken < self._limits.cells_max - reserved:
            return self._spawner
        if wanting.aside:
            return None
        cells = [cell for group in self._groups.values() for cell in group.cells]
        return self._spawner if self._end_idle(c for c in cells if not c.worker) else None

    def _end_idle(self, cells: Iterable[Cell]) -> bool:
        """End the first of these that has nothing to do; return whether there was one."""
        for cell in cells:
            group = self._group_of.get(cell)
            if group is not None and not cell.sent and not group.backlog:
                self._evict(cell)
                return True
        return False

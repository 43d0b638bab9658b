"""Chooses where the next cell of a policy runs: here or on a worker. Only `pool` uses it.

While workers are up, cells run on the workers. This machine runs only cells that no worker can
have: for work that failed on a worker, for shadows, and for policies without a cell while all
workers are full of busy cells.

No tenant gets all cells: each may have three quarters of the cells that are not busy with other
tenants' work. A cell that other tenants used recently is only ended for a tenant with few cells.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from moorage.sandbox.host.channel import Cell
from moorage.sandbox.host.groups import Group, GroupKey
from moorage.sandbox.host.spawner import Spawner
from moorage.sandbox.host.work import Work
from moorage.sandbox.host.workers import Workers
from moorage.sandbox.wire.limits import Limits

SHARE: Final = 0.75
"""Largest share, for one tenant, of the cells that do no work of other tenants."""
BURNING_CELLS_MIN: Final = 4
"""Evaluations of a tenant at idle priority from which its new cells start at that priority."""
IN_USE_SECONDS: Final = 60.0
"""How long a cell counts as in use after the latest evaluation of its policy."""
DOUBT_SECONDS: Final = 30.0
"""How long a worker gets no cell of a policy that failed there, but not elsewhere."""


@dataclass(frozen=True, slots=True)
class CellSupply:
    """Chooses where cells run, and ends an idle cell first if there is no room.

    Args:
        limits: All limits of the sandbox.
        workers: Other machines that run cells; None: there are none.
        groups: All groups, the least recently used first.
        group_of: The group of each cell with a policy.
        evict: Removes an idle cell.
    """

    _limits: Limits
    _spawner: Spawner
    _workers: Workers | None
    _groups: Mapping[GroupKey, Group]
    _group_of: Mapping[Cell, Group]
    _evict: Callable[[Cell], None]

    @property
    def cells_per_policy_max(self) -> int:
        """The largest number of cells of one policy."""
        remote = self._workers.cells_max if self._workers is not None else 0
        return max(self._limits.cells_per_policy_max, remote)

    def home(self, group: Group, work: Work, now: float) -> Spawner | None:
        """Return the spawner that makes the next cell of a group, since this work waits for one."""
        held, share = self._count_and_share(work.tenant)
        if held >= share and not group.aside:
            return None
        if self._workers is None or not self._workers.up or group.aside or work.here:
            return self._here(group, work, held, now)
        avoided = group.avoids(work, now)
        worker = self._workers.choose(avoided)
        if worker is None and self._end_idle(self._elsewhere(avoided), work, held, now):
            worker = self._workers.choose(avoided)
        if worker is None and not any(work.may_go_to(cell.worker) for cell in group.cells):
            return self._here(group, work, held, now)  # Must not wait for other policies.
        return worker

    def shortage(self, tenant: str) -> str:
        """Return why a tenant gets no cell now, as a sentence; "" if it may get one."""
        held, share = self._count_and_share(tenant)
        if held >= max(share, 1):
            return f"{held} evaluations of your tenant run, the most that may; end some"
        if self._busy_cells().total() >= self._cells_max:
            return f"all {self._cells_max} cells of this server are busy"
        return ""

    def burns(self, tenant: str, now: float) -> bool:
        """Return whether new cells of a tenant start at idle priority.

        They do if many of the tenant's evaluations were demoted, and other tenants use cells.
        """
        demoted = (cell for cell in self._group_of if cell.sent and cell.demoted)
        if sum(cell.sent[0].tenant == tenant for cell in demoted) < BURNING_CELLS_MIN:
            return False
        others = (group for group in self._groups.values() if not group.is_of(tenant))
        return any(now - group.used_at < IN_USE_SECONDS for group in others)

    @property
    def _cells_max(self) -> int:
        remote = self._workers.cells_max if self._workers is not None and self._workers.up else 0
        return self._limits.cells_max + remote

    def _count_and_share(self, tenant: str) -> tuple[int, int]:
        """Return the number of cells that a tenant's evaluations occupy, and may occupy."""
        busy = self._busy_cells()
        others = busy.total() - busy[tenant]
        return busy[tenant], math.ceil((self._cells_max - others) * SHARE)

    def _busy_cells(self) -> Counter[str]:
        """Return the number of cells that work or start, for each tenant."""
        busy = Counter[str]()
        for cell, group in self._group_of.items():
            if cell.sent:
                head = cell.sent[0]
                busy[group.wanted_by if head.kind == "load" else head.tenant] += 1
        for group in self._groups.values():
            busy[group.wanted_by] += group.spawning
        return busy

    def returns(self, cell: Cell, group: Group, now: float) -> bool:
        """Return whether to end an idle cell of this machine, since a worker has room again."""
        if cell.worker or self._workers is None or group.aside or group.backlog:
            return False
        group.doubted = {name: until for name, until in group.doubted.items() if until > now}
        return self._workers.choose(group.doubted) is not None

    def _elsewhere(self, avoided: Iterable[str]) -> Iterable[Cell]:
        cells = (cell for group in self._groups.values() for cell in group.cells)
        return [cell for cell in cells if cell.worker and cell.worker not in avoided]

    def _here(self, wanting: Group, work: Work, held: int, now: float) -> Spawner | None:
        # Policies with cells leave a quarter free, so that policies without cells need not wait.
        reserved = self._limits.cells_max // 4 if wanting.cells else 0
        taken = sum(not cell.worker for cell in self._group_of) + self._spawner.spawning
        if taken < self._limits.cells_max - reserved:
            return self._spawner
        if wanting.aside:
            return None
        cells = [cell for group in self._groups.values() for cell in group.cells]
        local = (cell for cell in cells if not cell.worker)
        return self._spawner if self._end_idle(local, work, held, now) else None

    def _end_idle(self, cells: Iterable[Cell], work: Work, held: int, now: float) -> bool:
        """End one cell to make room for a tenant with `held` cells; return whether one ended."""
        has_few = held < self._limits.cells_max // 4
        for cell in cells:
            group = self._group_of.get(cell)
            if group is None or cell.sent or group.backlog:
                continue
            unused = now - group.used_at > IN_USE_SECONDS
            if has_few or unused or group.is_of(work.tenant):
                self._evict(cell)
                return True
        return False

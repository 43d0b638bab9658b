"""Handles the work of cells that end, for `pool`, whose class inherits from `CellsAndDeaths`.

A cell's death costs only the work that the cell evaluated. The work that waited in its pipe is sent
again, in order, to another cell. If a cell on a worker fails, and the worker may be the cause, the
evaluation is repeated on this machine, which shows whether the policy is the cause.
"""

import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

from moorage.core.state.facts import Refusal
from moorage.records.json_values import JsonValue
from moorage.sandbox.host import work as outcomes
from moorage.sandbox.host.channel import Cell
from moorage.sandbox.host.groups import Group, GroupKey
from moorage.sandbox.host.spawner import Spawner
from moorage.sandbox.host.supply import DOUBT_SECONDS
from moorage.sandbox.host.work import Work
from moorage.sandbox.host.zygote import ORPHANED, WORKER_LOST, Death
from moorage.sandbox.wire.limits import Limits

FAULT_SECONDS: Final = 5.0
"""Seconds for which a policy that could not be loaded is refused, before it is loaded again."""
Finish = Callable[[Work, JsonValue, Refusal | None, Cell | None], None]


class CellsAndDeaths(ABC):
    """All cells that have a policy, and the actions when one of them ends."""

    def __init__(self, limits: Limits, finish: Finish) -> None:
        self.limits = limits
        self.counters: Counter[str] = Counter()
        self._finish = finish
        self._home_of: WeakKeyDictionary[Cell, Spawner] = WeakKeyDictionary()
        self._groups: OrderedDict[GroupKey, Group] = OrderedDict()
        self._group_of: dict[Cell, Group] = {}

    @abstractmethod
    def _mark(self, group: Group) -> None:
        """Mark a group to be checked at the end of this turn of the event loop."""

    def drop_cell(self, cell: Cell, cause: str) -> None:
        """Handle a closed channel, or kill a cell that broke the protocol; see `Owner`."""
        home = self._home_of[cell]
        if home.handle_closed_channel(cell):
            return
        cell.count_burnt(dead=True)
        if cause != "exit":
            self.counters["protocol_breaches"] += 1
            self.counters["kills"] += 1
            if self._run_here(cell):
                return
            self._bury(
                cell, outcomes.crash_refusal(cause, cell.sent[0].code.ref) if cell.sent else None
            )
            return
        self.counters["crashes"] += 1
        group = self._group_of.get(cell)
        if not cell.sent:
            self._bury(cell, None)
        elif cell.sent[0].kind == "load":
            works = self._detach(cell)
            home.call_at_end(cell, partial(self._died, cell, group, works))
        else:
            # The cause of death arrives later; the rest of the pipe need not wait for it.
            head, *behind = self._detach(cell)
            self._resend(group, behind)
            home.call_at_end(cell, partial(self._died, cell, group, [head]))

    def _died(self, cell: Cell, group: Group | None, works: list[Work], death: Death) -> None:
        """Report a cell's end to the work it evaluated, or to all work that waited for loading."""
        ref = works[0].code.ref
        if not death.innocent and self._again_here(cell, group, works):
            return
        if not death.innocent and works[0].kind == "load":
            fault = outcomes.death_refusal(death, ref, self.limits, ", while the policy was loaded")
            self._fault(group, works, fault)
        elif not death.innocent:
            self._finish(works[0], None, outcomes.death_refusal(death, ref, self.limits), None)
        else:
            self.counters["killed_outside"] += death not in {ORPHANED, WORKER_LOST}
            refused = {work: outcomes.kill_refusal(death, work, self.limits) for work in works}
            for work, refusal in refused.items():
                if refusal is not None:
                    self._finish(work, None, refusal, None)
            self._resend(group, [work for work in works if refused[work] is None])

    def _bury(self, cell: Cell, refusal: Refusal | None) -> None:
        """Remove a cell; refuse the work it evaluated, and queue the work behind it again."""
        group = self._group_of.get(cell)
        works = self._remove(cell)
        if works and works[0].kind == "load" and refusal is not None:
            self._fault(group, works, refusal)
            return
        if works and refusal is not None:
            self._finish(works.pop(0), None, refusal, None)
        self._resend(group, works)

    def _run_here(self, cell: Cell) -> bool:
        """End a cell whose worker may be at fault, and repeat its first work on this machine.

        Returns:
            False, with nothing done, if the cell is on this machine or has no repeatable work.
        """
        group, works = self._group_of.get(cell), list(cell.sent)
        if not cell.worker or not works or not self._again_here(cell, group, works):
            return False
        self._remove(cell)
        return True

    def _again_here(self, cell: Cell, group: Group | None, works: list[Work]) -> bool:
        """Repeat the first work, or all work behind a load, on this machine, to find the cause."""
        head = works[0]
        if not cell.worker or group is None or not (head.kind == "load" or head.repeatable):
            return False
        for work in works if head.kind == "load" else [head]:
            work.here = True
        self.counters["worker_doubts"] += 1
        self._resend(group, works)
        self._doubt(group, cell.worker)
        return True

    def _doubt(self, group: Group, worker: str) -> None:
        """Give a worker no cells of one policy for a while; other policies still use it."""
        group.doubted[worker] = time.monotonic() + DOUBT_SECONDS
        for cell in [each for each in group.cells if each.worker == worker]:
            cell.retired = True
            if not cell.sent:
                self._remove(cell)
        self._mark(group)

    def _fault(self, group: Group | None, works: list[Work], refusal: Refusal) -> None:
        """Refuse all work that waits for a policy that cannot be loaded; retry only later."""
        for work in works:
            self._finish(work, None, refusal, None)
        if group is not None:
            group.fault, group.fault_until = refusal, time.monotonic() + FAULT_SECONDS
            self._refuse_backlog(group, refusal)
        self._wake_starving()

    def _resend(self, group: Group | None, works: list[Work]) -> None:
        again = [work for work in works if work.kind != "load" and not work.forgotten]
        if group is not None and (again or group.backlog):
            self.counters["resent"] += len(again)
            self.counters["respawns"] += 1
            group.backlog.put_back(again)
            self._groups.setdefault(group.key, group)
            self._mark(group)
        self._wake_starving()

    def _remove(self, cell: Cell) -> list[Work]:
        """Kill a cell and return the work in its pipe."""
        works = self._detach(cell)
        self._home_of[cell].destroy(cell)
        return works

    def _detach(self, cell: Cell) -> list[Work]:
        works = list(cell.sent)
        group = self._group_of.pop(cell, None)
        if group is not None:
            group.cells.remove(cell)
            if group.single_use and not group.backlog and not group.spawning:
                self._groups.pop(group.key, None)
        cell.destroy()
        cell.sent.clear()
        return works

    def _refuse_backlog(self, group: Group, refusal: Refusal) -> None:
        for work in group.backlog.clear():
            self._finish(work, None, refusal, None)

    def _wake_starving(self) -> None:
        """Find a cell for each group with work but no cells, since a place became free."""
        for group in self._groups.values():
            if group.backlog and not group.cells and not group.spawning:
                self._mark(group)

    def _evict(self, cell: Cell) -> None:
        self._remove(cell)
        self.counters["evicted"] += 1

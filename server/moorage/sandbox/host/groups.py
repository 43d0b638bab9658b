"""The cells of one policy, the work that waits, and the tenant served next, for `pool` alone.

Evaluations that take long get a cell each, up to as many as a policy may have, with nothing behind
them. Tenants take turns at shared cells, and a tenant with long evaluations never has all of them:
so another tenant waits only for evaluations that already run.

Cells that decide about leases at the same time may choose the same place, and then only one of
their proposals is granted. So a slow policy gets half as many such cells after each failed
proposal, and one more after several grants.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from moorage.core.state.facts import Refusal
from moorage.sandbox.host.channel import Cell
from moorage.sandbox.host.contract import PolicyCode
from moorage.sandbox.host.work import Work, late_refusal

HOG_OVERRUNS: Final = 2
"""After this number of overruns in a row a policy's fresh cells run at idle priority, until one of
them answers: a policy that never answers would use other policies' processor time with
every new cell."""
HEAVY_SECONDS: Final = 30.0
"""How long a tenant counts as slow after its latest slow evaluation."""
HEAVY_TENANTS_MAX: Final = 1024
"""Slow tenants that a group remembers; with one more, it forgets the tenant that was slow longest
ago."""
QUICK_ANSWERS_MIN: Final = 32
"""Quick answers in a row after which the only tenant of a group counts as quick again."""
GRANTS_PER_CELL: Final = 4
"""Granted leases after which one more cell may decide at the same time."""
GroupKey = tuple[str, str, str]
"""URI and digest of a policy version, and the isolation key."""


class Backlog:
    """Waiting work, in one lane per tenant; lanes take turns, each lane keeps its order."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, deque[Work]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Work]:
        return (work for lane in self._lanes.values() for work in lane)

    def heads(self) -> Iterator[Work]:
        """Yield the first work of each lane, in the order in which the lanes are served."""
        return (lane[0] for lane in self._lanes.values())

    def is_full(self, tenant: str, most: int) -> bool:
        """Return whether all lanes together have `most` works, and a tenant its fair part of them.

        So one tenant's requests never keep another out; in all there are at most twice as many
        works.
        """
        if self._count < most:
            return False
        return len(self._lanes.get(tenant, ())) >= most // max(len(self._lanes), 1)

    def append(self, work: Work) -> None:
        """Append work to its tenant's lane."""
        self._lanes.setdefault(work.tenant, deque()).append(work)
        self._count += 1

    def put_back(self, works: list[Work]) -> None:
        """Put works that were sent already back into their tenants' lanes, at the front."""
        for work in reversed(works):
            if work.tenant not in self._lanes:
                self._lanes[work.tenant] = deque()
                self._lanes.move_to_end(work.tenant, last=False)
            self._lanes[work.tenant].appendleft(work)
        self._count += len(works)

    def take(self, work: Work) -> None:
        """Remove the first work of a lane, and move the lane to the end."""
        self._lanes[work.tenant].popleft()
        self._count -= 1
        if self._lanes[work.tenant]:
            self._lanes.move_to_end(work.tenant)
        else:
            del self._lanes[work.tenant]

    def remove(self, work: Work) -> bool:
        """Remove work; return whether it was in a lane."""
        lane = self._lanes.get(work.tenant)
        if lane is None or work not in lane:
            return False
        lane.remove(work)
        self._count -= 1
        if not lane:
            del self._lanes[work.tenant]
        return True

    def clear(self) -> list[Work]:
        """Remove all work and return it."""
        works = list(self)
        self._lanes.clear()
        self._count = 0
        return works


@dataclass(eq=False)
class Group:
    """The cells of one policy version (and isolation key), and the work that waits for them."""

    key: GroupKey
    code: PolicyCode
    single_use: bool
    aside: bool = False
    cells: list[Cell] = field(default_factory=list[Cell])
    backlog: Backlog = field(default_factory=Backlog)
    spawning: int = 0
    wanted_by: str = ""
    """The tenant for which the group's latest cell was made."""
    used_at: float = 0.0
    """Time of the group's last evaluation, by the monotonic clock."""
    fault: Refusal | None = None
    fault_until: float = 0.0
    overruns: int = 0
    """Evaluations that were stopped at their deadline since the last evaluation that answered."""
    doubted: dict[str, float] = field(default_factory=dict[str, float])
    """By worker, until when it gets no cell of this policy, since a cell failed there."""
    _tenant: str | None = None
    """The first tenant that used the group."""
    _shared: bool = False
    """Whether another tenant has also used the group."""
    _heavy: OrderedDict[str, float] = field(default_factory=OrderedDict[str, float])
    """Until when a tenant's evaluations are expected to take long."""
    _quick_answers: dict[str, int] = field(default_factory=dict[str, int])
    """Quick answers to each slow tenant since its latest slow evaluation."""
    _deciders: float = math.inf
    """How many cells may run slow evaluations for leases at one time."""

    @property
    def hogs(self) -> bool:
        """Whether the group's last evaluations were all stopped at their deadline."""
        return self.overruns >= HOG_OVERRUNS

    def avoids(self, work: Work, now: float) -> set[str]:
        """Return the workers that must not do this work."""
        self.doubted = {name: until for name, until in self.doubted.items() if until > now}
        return {*self.doubted, work.avoided}

    # The next turn -------------------------------------------------------------------------

    def note_use(self, work: Work) -> None:
        """Record a tenant that uses this policy; a single tenant may use every cell."""
        self.used_at = work.submitted_at
        if self._tenant is None:
            self._tenant = work.tenant
        elif self._tenant != work.tenant:
            self._shared = True

    def is_of(self, tenant: str) -> bool:
        """Return whether all requests of the group came from one tenant."""
        return self._tenant == tenant and not self._shared

    def took_long(self, work: Work, now: float) -> None:
        """Record a long evaluation: the tenant's next ones are expected to be long, too."""
        self._quick_answers[work.tenant] = 0
        self._heavy[work.tenant] = now + HEAVY_SECONDS
        self._heavy.move_to_end(work.tenant)
        if len(self._heavy) > HEAVY_TENANTS_MAX:
            tenant, _ = self._heavy.popitem(last=False)
            del self._quick_answers[tenant]

    def note_answer(self, work: Work) -> None:
        """Record an answer: after quick answers, the next one is expected to be quick."""
        if work.slow or work.tenant not in self._heavy:
            return
        self._quick_answers[work.tenant] += 1
        if not self._shared and self._quick_answers[work.tenant] >= QUICK_ANSWERS_MIN:
            del self._heavy[work.tenant], self._quick_answers[work.tenant]

    def settle(self, cells_max: int, *, granted: bool) -> None:
        """Record that a proposal for a lease was decided, if such evaluations are long."""
        if self._heavy:
            deciders = min(self._deciders, cells_max)
            self._deciders = deciders + 1 / GRANTS_PER_CELL if granted else max(1.0, deciders / 2)

    def refuse_late(self, work: Work, fleet_version: int) -> Refusal | None:
        """Refuse shadow work if the fleet has changed since the live request."""
        late = self.aside and work.fleet_version != fleet_version
        return late_refusal(self.code.ref) if late else None

    def heavy(self, work: Work, now: float) -> bool:
        """Return whether no other work may wait behind this work in a pipe."""
        return bool(self._heavy) and self._heavy.get(work.tenant, 0.0) > now

    def owes(self, now: float) -> bool:
        """Return whether a tenant with quick evaluations waits for these shared cells."""
        return self._shared and any(not self.heavy(work, now) for work in self.backlog.heads())

    def turn(self, cells_max: int, now: float) -> tuple[Work, Cell] | None:
        """Return the next work and a cell for it, if there is such a cell."""
        reserved: Cell | None = None
        for work in self.backlog.heads():
            cell = self._choose(work, cells_max, now, reserved)
            if cell is not None:
                return work, cell
            if (
                reserved is None
                and self.heavy(work, now)
                and not self._has_enough_cells(work, cells_max, now)
            ):
                # Work needs a cell with an empty pipe; a busy tenant would keep all pipes full.
                reserved = min(self._quick(), key=lambda each: len(each.sent), default=None)
        return None

    def needs_cell(self, cells_max: int, now: float) -> Work | None:
        """Return waiting work that needs a new cell, since no cell here takes it soon; or None."""
        if self.spawning:
            return None
        for work in self.backlog.heads():
            if self._has_enough_cells(work, cells_max, now):
                continue
            cells = [cell for cell in self._quick() if work.may_go_to(cell.worker)]
            if self.heavy(work, now):  # Such work only goes into an empty pipe.
                coming = sum(len(c.sent) == 1 and c.sent[0].kind == "load" for c in cells)
                if coming < (1 if work.here or work.avoided else len(self.backlog)):
                    return work
            elif not cells:  # The full pipe of a quick cell drains by itself.
                return work
        return None

    def _choose(self, work: Work, cells_max: int, now: float, reserved: Cell | None) -> Cell | None:
        """Return a quick cell with room, preferably the first one with normal priority."""
        heavy = self.heavy(work, now)
        if heavy and self._has_enough_cells(work, cells_max, now):
            return None
        demoted = None
        for cell in self._quick():
            free = cell.accepts and cell is not reserved and not (heavy and cell.sent)
            if free and work.may_go_to(cell.worker):
                if not cell.demoted:
                    return cell
                demoted = demoted or cell
        return demoted

    def _quick(self) -> Iterator[Cell]:
        """Yield the cells with quick evaluations, which will soon take more work."""
        return (c for c in self.cells if not (c.slow or c.retired or _alone(c)))

    def _has_enough_cells(self, work: Work, cells_max: int, now: float) -> bool:
        """Return whether the tenant's long evaluations use all cells that they may use."""
        if not self.heavy(work, now):
            return False
        heads = [cell.sent[0] for cell in self.cells if cell.sent]
        if work.provisional and sum(head.provisional for head in heads) >= int(
            min(self._deciders, cells_max)
        ):
            return True
        taken = sum(head.tenant == work.tenant for head in heads)
        return self._shared and taken >= max(1, cells_max - 1)

    def idle_cell(self, work: Work, cells_max: int, now: float) -> Cell | None:
        """Return the first cell if it is idle and may take the work, and nothing else waits."""
        if self.backlog or not self.cells:
            return None
        cell = self.cells[0]
        busy = cell.sent or cell.retired or cell.demoted or not cell.alive
        busy = busy or not work.may_go_to(cell.worker)
        return None if busy or self._has_enough_cells(work, cells_max, now) else cell


def _alone(cell: Cell) -> bool:
    """Return whether the cell may get no further work in its pipe."""
    return bool(cell.sent) and cell.sent[0].alone

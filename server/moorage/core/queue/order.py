"""The order of the queue: priority, then fair share, then age; similar waiters are checked once.

An index of the waiters in `State.waiting` that do not pause. The order is built at start and
updated with each change, made here or by another server. When capacity grows, `Backfill` asks this
index which waiters are next; nothing is polled.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from itertools import islice
from typing import Any, Final

from msgspec.structs import replace

from moorage.core.queue.alternatives import loosest
from moorage.core.queue.ranking import Rank, Ranking, WakeLimits
from moorage.core.state.accounts import Account, Amounts, accounts_of, demand_amounts
from moorage.core.state.facts import (
    ClockMoved,
    Dequeued,
    Ended,
    Fact,
    Granted,
    Paused,
    Queued,
    Refusal,
    Requeued,
    Resumed,
)
from moorage.core.state.growth import GrownPlace
from moorage.core.state.state import State
from moorage.core.state.waiters import (
    UNJUDGED,
    ClassLines,
    LineKey,
    Seniority,
    Shape,
    Waiter,
    WaiterClass,
    WaiterLine,
    seniority,
)
from moorage.model import (
    OVERTAKEN_MAX,
    Ask,
    Code,
    Demand,
    Lease,
    Nodes,
    Placement,
    RequestId,
    Tenant,
)

CONSULTED_MAX: Final = 8
"""Maximum waiters of one policy under consultation; at this number, lower priorities wait."""
CLASSES_AT_ONCE: Final = 2 * CONSULTED_MAX
"""Number of classes that are sorted at a time."""
PIECE: Final = 200
"""Number of waiters that are indexed before other tasks may run."""


class WaitingQueue:
    """The waiters that do not pause, in lines of waiters that differ only in age.

    Args:
        state: The present state, which is only read, except for `growth`.
        overtaken_max: Maximum number of later requests that may overtake a waiter.

    Attributes:
        head: The line for which nodes are reserved, or None.
    """

    def __init__(self, state: State, overtaken_max: int = OVERTAKEN_MAX) -> None:
        self._state = state
        self._overtaken_max = overtaken_max
        self._begin()

    def restore(self) -> None:
        """Index all waiters again, after their arrival times were changed."""
        for _ in self.index():
            pass

    def index(self) -> Iterator[None]:
        """Index all waiters, piece by piece. Until the end, no waiter may be added or removed."""
        self._begin()
        for number, waiter in enumerate(self._state.waiting.values()):
            if not waiter.pauses:
                self.add(waiter.ask)
            if number % PIECE == PIECE - 1:
                yield

    def _begin(self) -> None:
        self._ranking = Ranking(self._state)
        self._lines: dict[LineKey, WaiterLine] = {}
        self._line_of: dict[RequestId, WaiterLine] = {}
        self._numbers: dict[int, WaiterLine] = {}
        self._by_seniority: list[Seniority] = []
        self._classes: dict[WaiterClass, ClassLines] = {}
        self._numbered = 0
        self._unreserved = 0
        self._declined: dict[WaiterLine, None] = {}
        self._first: WaiterLine | None = None
        self._first_as_of = UNJUDGED
        self.head: WaiterLine | None = None
        self._reserved: Nodes = ()
        self._find_reserved: Callable[[], Nodes] | None = None
        """Finds the reserved nodes at the first use; None: the nodes are known."""

    def __bool__(self) -> bool:
        """Return whether the queue has a waiter."""
        return bool(self._lines)

    @property
    def changes(self) -> int:
        """Number of capacity gains and ended reservations; a refusal is valid until it grows."""
        return self._state.gains + self._unreserved

    # Waiters ---------------------------------------------------------------------------------

    def add(self, ask: Ask) -> None:
        """Add a waiter to its line: at the end, or by its age if it returns."""
        key = self._key(ask)
        line = self._lines.get(key)
        if line is None:
            self._numbered += 1
            line = self._lines[key] = WaiterLine(key, self._numbered)
            self._numbers[line.number] = line
            if key.waiters not in self._classes:
                self._classes[key.waiters] = ClassLines(self._ranking.add(key.waiters))
        newest = next(reversed(line.waiters), None)
        line.waiters[ask.id] = None
        self._line_of[ask.id] = line
        waiting = self._state.waiting
        insort(self._by_seniority, seniority(waiting[ask.id]))
        if newest is not None and waiting[newest].at > waiting[ask.id].at:
            by_age = sorted(line.waiters, key=lambda request: waiting[request].at)
            line.waiters = dict.fromkeys(by_age)
        self._aged(line)
        if self._state.reserved:  # Its lease may end before a reservation that blocks the line.
            line.refused_at = UNJUDGED
            self._look_again(line)
        self._ranking.judge_again(self._classes[key.waiters].row)

    def has_room(self, ask: Ask) -> bool:
        """Return whether one more request with a demand like that of `ask` may wait."""
        return self._ranking.has_room(ask.tenant, _shape(ask))

    def remove(self, ask: Ask) -> None:
        """Remove a waiter that was granted or that gave up."""
        line = self._line_of.pop(ask.id)
        del line.waiters[ask.id]
        oldest_first = self._by_seniority
        del oldest_first[bisect_left(oldest_first, seniority(self._state.waiting[ask.id]))]
        if line.waiters:
            self._aged(line)
            self._look_again(line)  # The removed waiter may have stood for the others.
            self._ranking.judge_again(self._classes[line.of].row)
            return
        its = self._classes[line.of]
        self._leave(line)
        del self._lines[line.key], self._numbers[line.number]
        self._ranking.line(line.number, its.row, line.since, 0)
        if not its.ready and not its.declined:
            del self._classes[line.of]
            self._ranking.remove(line.of)
        if line is self.head:
            self.reserve(None, ())

    def _key(self, ask: Ask) -> LineKey:
        terms, waiter, demand = ask.terms, self._state.waiting[ask.id], loosest(ask)
        patient = waiter.lease is not None or (terms is not None and terms.wait_seconds > 0)
        waiters = WaiterClass(
            tenant=ask.tenant,
            project=ask.project,
            needs=demand_amounts(replace(ask, demand=demand))
            if ask.alternatives
            else demand_amounts(ask),
            policy=ask.policy,
            demand=demand,
            alternatives=ask.alternatives,
            candidates=ask.candidates,
            priority=ask.priority,
            reserves=patient and ask.demand is not None,
            overdue=self._state.overtaken.get(ask.id, 0) >= self._overtaken_max,
        )
        # Inputs that only the policy reads may change its answer, so they tell lines apart.
        inputs = sha256(repr((ask.inputs, ask.parameters, ask.settings)).encode()).hexdigest()
        apart = terms.anti_affinity if terms is not None else None
        return LineKey(waiters, inputs, ask.avoid, apart)

    def _aged(self, line: WaiterLine) -> None:
        """Move a line to its place by the age of its first waiter."""
        since = self._state.waiting[next(iter(line.waiters))].at
        if since != line.since:
            if not line.declined:
                self._leave(line)
            line.since = since
            if not line.declined:
                self._enter(line)
        self._ranking.line(line.number, self._classes[line.of].row, since, len(line.waiters))

    def _enter(self, line: WaiterLine) -> None:
        its = self._classes[line.of]
        at = bisect_left(its.ready, (line.since, line.number))
        its.ready.insert(at, (line.since, line.number, line))
        its.passed = min(its.passed, at)
        self._together(its)
        self._ready_from(its, its.visited)
        if line.of.reserves and (self._first is None or self._rank(line) < self._rank(self._first)):
            self._first_as_of = UNJUDGED

    def _leave(self, line: WaiterLine) -> None:
        """Remove a line from the ready lines, or from the lines that are passed over."""
        its = self._classes[line.of]
        if line in its.declined:
            del its.declined[line], self._declined[line]
            line.declined = None
            return
        at = bisect_left(its.ready, (line.since, line.number))
        if at < len(its.ready) and its.ready[at][2] is line:
            del its.ready[at]
            its.visited -= at < its.visited  # A running wake-up may have visited the line.
            its.passed -= at < its.passed
            self._ready_from(its, its.visited)
        if line is self._first or line.of.overdue:
            self._first_as_of = UNJUDGED

    def _look_again(self, line: WaiterLine) -> None:
        its = self._classes[line.of]
        line.looked_at = UNJUDGED
        its.passed = min(its.passed, bisect_left(its.ready, (line.since, line.number)))
        self._together(its)

    def _together(self, its: ClassLines) -> None:
        """Mark that the refusal of one line does not hold for the other lines of its class."""
        if its.alone:
            its.alone = False
            self._ranking.note_refused_class(its.row, UNJUDGED)

    def _ready_from(self, its: ClassLines, visited: int) -> None:
        """Report to the ranking the first line of a class that the current wake has not visited."""
        since, number = its.ready[visited][:2] if visited < len(its.ready) else (math.inf, 0)
        oldest = its.ready[0][0] if its.ready else math.inf
        self._ranking.ready_since(its.row, since, number, oldest)

    # Facts of another server -----------------------------------------------------------------

    def take_out(self, fact: Fact) -> None:
        """Remove the waiter that a fact of another server takes out of its line."""
        match fact:
            case Granted(lease=Lease(id=request)) | Dequeued(request) | Ended(request):
                waiter = self._state.waiting.get(request)
                if waiter is not None and not waiter.pauses:
                    self.remove(waiter.ask)
            case Paused(request):
                self.remove(self._state.waiting[request].ask)

    def put_in(self, fact: Fact) -> None:
        """Add or move the waiter that a fact of another server queues or moves."""
        match fact:
            case Queued(ask=Ask(id=request)) | Requeued(request) | Resumed(request):
                self.add(self._state.waiting[request].ask)
            case Granted(overtakes=str(request)):
                self.overtook(request)
            case ClockMoved():
                self.restore()

    # Obstacles ------------------------------------------------------------------------------

    def does_not_fit(self, ask: Ask, gains: int, reserved: Nodes, excluded: bool = False) -> None:
        """Record that no demand like that of `ask` fits now.

        Args:
            ask: A waiter with this demand.
            gains: `State.gains` at the time of the check; if that has grown, the result is void.
            reserved: The nodes that were reserved for others during the check.
            excluded: Whether the waiter's line has excluded nodes, so that the result does not hold
                for other lines. Treated as True if another tenant reserved one of the head's nodes.
        """
        excluded = excluded or self._partly_open(reserved) != reserved
        line = self._line_of[ask.id]
        its = self._classes[line.of]
        if gains != self._state.gains or (reserved and not set(reserved) <= set(self.reservation)):
            self._ranking.judge_again(its.row)
            return
        line.looked_at = self.changes
        if not reserved:
            line.refused_at = self.changes
        if not excluded:
            self._ranking.note_refusal(its.row, self.changes, reserved)
        elif len(its.ready) == 1 and its.ready[0][2] is line:
            its.alone = True
            self._ranking.note_refused_class(its.row, self.changes)

    def declined(self, ask: Ask, refusal: Refusal, gains: int, excluded: Nodes) -> None:
        """Pass over the waiters in the line of `ask`: its policy declines all free capacity.

        Args:
            ask: A waiter in the line.
            refusal: The answer to a waiter whose time expires before the policy finds a placement.
            gains: `State.gains` at the consultation; if that has grown, the policy is consulted
                again.
            excluded: Nodes not offered to the policy: they are reserved for the head of the queue.
        """
        line = self._line_of[ask.id]
        its = self._classes[line.of]
        if line is self.head:
            self.reserve(None, ())
        if gains != self._state.gains or not set(excluded) <= set(self.nodes_reserved_for(line)):
            self._ranking.judge_again(its.row)
            return
        self._leave(line)
        its.declined[line] = self._declined[line] = None
        line.declined, line.excluded = refusal, excluded
        over = refusal.code is Code.QUOTA_EXCEEDED
        line.over_quota_at = self._ranking.rooms() if over else 0

    def last_decline(self, ask: Ask) -> Refusal | None:
        """Return the last refusal by a waiter's policy, if the waiter waits for that reason."""
        line = self._line_of.get(ask.id)
        return line.declined if line is not None else None

    def is_over_quota(self, ask: Ask) -> bool:
        """Return whether a waiter exceeds its quota; then its line is passed over."""
        return self._ranking.is_over(self._classes[self._line_of[ask.id].of].row)

    def take_over_quota(self) -> list[Ask]:
        """Return the first waiter of each class found over its quota since the last call."""
        rows = self._ranking.take_over_quota(CLASSES_AT_ONCE)
        lines = [self._classes[self._ranking.waiters(row)].ready[0][2] for row in rows]
        return [self._state.waiting[next(iter(line.waiters))].ask for line in lines]

    def waits_for_quota(self, tenant: Tenant | None) -> bool:
        """Return whether a request of `tenant` (None: of any tenant) waits for quota."""
        if not self._state.accounts.quotas:
            return False
        declined = any(
            line.over_quota_at and tenant in {None, line.of.tenant} for line in self._declined
        )
        number = None if tenant is None else self._state.accounts.number((tenant, None))
        return declined or self._ranking.is_any_over(number)

    def quota_reservation(self, ask: Ask, account: Account) -> tuple[Amounts, RequestId] | None:
        """Return how much of an account's quota another request reserves, and that request.

        The reserving request was overtaken too often. None: no request reserves quota.
        """
        row = self._ranking.claims().get(self._state.accounts.number(account))
        if row is None:
            return None
        first, own = self._ranking.waiters(row), self._line_of.get(ask.id)
        if ask.priority > first.priority or (own is not None and own.of == first):
            return None
        return first.needs, next(iter(self._classes[first].ready[0][2].waiters))

    # Turns -----------------------------------------------------------------------------------

    def grew(self, places: Collection[GrownPlace] | None) -> None:
        """Record the places where capacity grew or is about to grow; None: everywhere."""
        if places is not None and not places:
            return
        for row in self._ranking.grew(places, wanted=bool(self._declined)):
            its = self._classes[self._ranking.waiters(row)]
            for line in list(its.declined):
                self._ask_again(line)

    def rethink(self) -> None:
        """Check waiters again whose policy declined, if they may now use more nodes or quota."""
        rooms = self._ranking.rooms()
        for line in [each for each in self._declined if each.excluded or each.over_quota_at]:
            room = line.over_quota_at not in {0, rooms}
            if room or not set(line.excluded) <= set(self.nodes_reserved_for(line)):
                self._ask_again(line)

    def retry(self, ask: Ask) -> None:
        """Check a waiter again, since its lease may now have another duration."""
        line = self._line_of[ask.id]
        line.refused_at = line.looked_at = UNJUDGED
        self._ask_again(line)

    def _ask_again(self, line: WaiterLine) -> None:
        self._leave(line)
        self._enter(line)
        self._ranking.judge_again(self._classes[line.of].row)

    def first(self) -> WaiterLine | None:
        """Return the first line for which nodes are to be reserved: the head of the queue."""
        if self._first_as_of != self._state.accounts.version:
            row = self._ranking.head()
            ready = [] if row is None else self._classes[self._ranking.waiters(row)].ready
            self._first = ready[0][2] if ready else None
            self._first_as_of = self._state.accounts.version
        return self._first

    def reserve(self, head: WaiterLine | None, nodes: Nodes) -> None:
        """Reserve these nodes for a line, in place of all nodes reserved before."""
        free = set(self._reserved) - set(nodes)
        self.head, self._reserved, self._find_reserved = head, nodes, None
        if free:
            self._unreserved += 1
            self._ranking.grew(free, wanted=False)

    def reserve_later(self, head: WaiterLine, find: Callable[[], Nodes]) -> None:
        """Reserve nodes for a line like `reserve`, but call `find` only when another request comes.

        While a line waits alone, its policy mostly answers before another request comes.
        """
        if self._reserved and len(self._lines) > 1:  # Others may use nodes that are freed here.
            self.reserve(head, find())
        else:
            self.head, self._reserved, self._find_reserved = head, (), find

    @property
    def reservation(self) -> Nodes:
        """The nodes reserved for the head; they stay the same until capacity grows."""
        if self._find_reserved is not None:
            self._reserved, self._find_reserved = self._find_reserved(), None
        return self._reserved

    def _partly_open(self, nodes: Nodes) -> Nodes:
        """Return the head's reserved nodes on which no other tenant has a reservation."""
        on = self._state.reserved.on
        return tuple(node for node in nodes if node not in on) if on else nodes

    def nodes_reserved_for(self, line: WaiterLine) -> Nodes:
        """Return the nodes reserved for the head if it is served before this line."""
        ahead = self.head is not None and self._rank(self.head) < self._rank(line)
        return self.reservation if ahead and line is not self.head else ()

    def nodes_reserved_ahead(self, ask: Ask) -> Nodes:
        """Return the nodes reserved for a waiter ahead of `ask`, a new request or a waiter.

        A request for advice excludes no nodes: advice holds no capacity and delays no request.
        """
        if ask.terms is None or self.head is None:
            return ()
        own = self._line_of.get(ask.id)
        if own is not None:
            return self.nodes_reserved_for(own)
        newest = -2 * ask.priority, *self._shares(ask.tenant, ask.project), math.inf, 0
        return self.reservation if self._rank(self.head) < newest else ()

    def overtaken_by(self, ask: Ask, placement: Placement, since: float) -> RequestId | None:
        """Return the oldest waiter that a grant overtakes: it came earlier and still waits.

        Args:
            ask: The granted request; waiters of lower priority are not overtaken.
            placement: The granted placement; waiters that could not use the placement are not
                overtaken, unless they share a quota.
            since: Arrival of the request, in seconds since the epoch.
        """
        if not self._lines:
            return None
        nodes = tuple((share.cluster_id, share.node_id) for share in placement)
        counts_on = accounts_of(ask.tenant, ask.project)
        row = self._ranking.overtaken(nodes, counts_on, ask.priority, since)
        if row is None:
            return None
        return next(iter(self._classes[self._ranking.waiters(row)].ready[0][2].waiters))

    def overtook(self, request: RequestId) -> None:
        """Move a waiter to its new place in the queue once `overtaken_max` grants overtook it."""
        if self._state.overtaken[request] == self._overtaken_max:
            ask = self._state.waiting[request].ask
            self.remove(ask)
            self.add(ask)

    @property
    def is_head_alone(self) -> bool:
        """Whether the head of the queue is the only line."""
        return self.head is not None and len(self._lines) == 1

    def note_exhausted(self) -> None:
        """Record that all lines that may be served now have been checked."""
        self._ranking.note_exhausted()

    def servable(
        self, limits: Callable[[], WakeLimits], before: WaiterLine | None = None
    ) -> Generator[WaiterLine, None, None]:
        """Yield the lines that may be served now, in order, without the head.

        The caller consults the policy of a line, or records its obstacle, before it takes the next.

        Args:
            limits: Returns the classes that are not served now.
            before: The line before which to stop; None: yield all lines.
        """
        seen: dict[int, ClassLines] = {}
        last = None if before is None else self._rank(before)
        try:
            while True:
                busy = limits()
                closed = self._partly_open(self.reservation)
                rows, more = self._ranking.servable(self.changes, busy, closed)
                if not len(rows):
                    if not more and before is None:
                        self._ranking.note_exhausted()
                    return
                first = self._ranking.first(rows, CLASSES_AT_ONCE + 1)
                passed = [self._passes_by(row, seen) for row in first]
                if any(passed):
                    continue  # The order has changed.
                if last is not None and self._rank(self._next(first[0])) >= last:
                    return
                for line in filter(self._is_not_head, self._in_order(first, seen, last)):
                    yield line
                    if limits() != busy:
                        break
        finally:
            for its in seen.values():
                its.visited = 0
                if its.ready:  # Another class may have the row of an emptied class.
                    self._ready_from(its, 0)

    def _is_not_head(self, line: WaiterLine) -> bool:
        return line is not self.head

    def _passes_by(self, row: int, seen: dict[int, ClassLines]) -> bool:
        """Skip the next lines of a class that were checked since capacity last grew."""
        its = seen[row] = self._classes[self._ranking.waiters(row)]
        ready, changes, visited = its.ready, self.changes, its.visited
        if its.passed_at != changes:
            its.passed_at, its.passed = changes, 0
        from_first = visited <= its.passed
        if from_first:
            visited = its.passed
        while visited < len(ready) and ready[visited][2].looked_at == changes:
            visited += 1
        if from_first:
            its.passed = visited
        if visited == its.visited:
            return False
        its.visited = visited
        self._ready_from(its, visited)
        if visited == len(ready):
            self._ranking.note_judgement(row)
        return True

    def _next(self, row: int) -> WaiterLine:
        """Return the first line of a class that the current wake has not visited."""
        its = self._classes[self._ranking.waiters(row)]
        return its.ready[its.visited][2]

    def _in_order(
        self, rows: list[int], seen: dict[int, ClassLines], last: Rank | None
    ) -> Iterator[WaiterLine]:
        """Yield lines of these classes in order, up to `last` or to the start of a later class."""
        merged: list[tuple[Rank, int, ClassLines]] = []
        for row in rows:
            its = seen[row]
            merged.append((self._rank(self._next(row)), row, its))
        end = merged.pop()[0] if len(merged) > CLASSES_AT_ONCE else None
        heapq.heapify(merged)
        while merged and (end is None or merged[0][0] <= end):
            if last is not None and merged[0][0] >= last:
                return
            _, row, its = merged[0]
            if self._ranking.is_refused(row, self.changes):
                heapq.heappop(merged)
                continue
            line = its.ready[its.visited][2]
            its.visited += 1
            self._ready_from(its, its.visited)
            self._passes_by(row, seen)
            if its.visited < len(its.ready):
                following = its.ready[its.visited][2]
                heapq.heapreplace(merged, (self._rank(following), row, its))
            else:
                self._ranking.note_judgement(row)
                heapq.heappop(merged)
            yield line

    def _rank(self, line: WaiterLine) -> Rank:
        of = line.of
        shares = (0.0, 0.0) if of.overdue else self._shares(of.tenant, of.project)
        return -of.precedence, *shares, line.since, line.number

    def _shares(self, tenant: Tenant, project: str) -> tuple[float, float]:
        whole, part = accounts_of(tenant, project)
        return self._state.accounts.share(whole), self._state.accounts.share(part)

    # Listings --------------------------------------------------------------------------------

    def lines(self) -> list[WaiterLine]:
        """Return all lines, in the order in which their first waiters are served."""
        return sorted(self._lines.values(), key=self._rank)

    def positions(self, requests: Iterable[RequestId]) -> dict[RequestId, int]:
        """Return the positions of some waiters in the queue, from 1; paused waiters come last."""
        positions = dict.fromkeys(requests, 0)
        lines: dict[WaiterLine, int] = {}
        for request in positions:
            line = self._line_of.get(request)
            if line is not None:
                lines[line] = lines.get(line, 0) + 1
        ahead = self._ranking.ahead([line.number for line in lines])
        for (line, left), before in zip(lines.items(), ahead, strict=True):
            _count(line.waiters, before, left, positions)
        left = sum(not each for each in positions.values())
        if left:
            pausing = (name for name, waiter in self._state.waiting.items() if waiter.pauses)
            _count(pausing, len(self._line_of), left, positions)
        return {request: at for request, at in positions.items() if at}

    def by_seniority(self, after: Any = None) -> Iterator[Waiter]:
        """Yield all waiters, paused ones too, in an order that stays the same as waiters leave.

        Args:
            after: The `seniority` key of the waiter before the first one to yield; any other value:
                yield all waiters.
        """
        waiting, ranked, start = self._state.waiting, self._by_seniority, 0
        if after is not None:
            with suppress(TypeError):  # `page` refuses such a cursor.
                start = bisect_left(ranked, after)
        keys: Iterable[Seniority] = (ranked[at] for at in range(start, len(ranked)))
        if len(ranked) != len(waiting):
            pausing = sorted(seniority(each) for each in waiting.values() if each.pauses)
            keys = heapq.merge(keys, pausing)
        yield from (waiting[each.request] for each in keys)

    def in_turn(self, most: int) -> list[Waiter]:
        """Return the first waiters in the order in which they are served now."""
        waiting = self._state.waiting
        # Only these lines have such waiters: a line's first waiter leads.
        lines = [self._numbers[number] for number in self._ranking.first_lines(most)]

        def rank_of(line: WaiterLine) -> Iterator[tuple[Any, ...]]:
            rank = self._rank(line)[:3]
            return ((*rank, waiting[each].at, line.number, each) for each in line.waiters)

        merged = heapq.merge(*map(rank_of, lines))
        return [waiting[each[-1]] for each in islice(merged, most)]


def _shape(ask: Ask) -> Shape:
    return loosest(ask) or Demand(), ask.candidates, ask.alternatives


def _count(
    line: Iterable[RequestId], before: int, wanted: int, positions: dict[RequestId, int]
) -> None:
    """Store positions in a line, from `before` + 1, until `wanted` requests have one."""
    for at, request in enumerate(line, before + 1):
        if request in positions:
            positions[request] = at
            wanted -= 1
            if not wanted:
                return

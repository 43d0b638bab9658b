"""What a request may not get, since others reserved it or its own group is near.

Nodes are shut to it: a policy sees them as full, and a proposal that names one is not granted. Of
nodes that are reserved in part, the rest is open. `Requests` and what gives way ask for both.
"""

from bisect import bisect_left

import numpy as np

from moorage.core.fit import anti_affinity, room
from moorage.core.fit.feasibility import Feasibility
from moorage.core.fit.room import Amounts
from moorage.core.queue.order import WaitingQueue
from moorage.core.state import refusals
from moorage.core.state.facts import Refusal
from moorage.core.state.reserved import Place
from moorage.core.state.state import State
from moorage.core.turns.turn import TurnWriter
from moorage.model import Ask, Code, Demand, Lease, Nodes, Placement, Tenant

__all__ = ["Withheld", "explained", "parts", "shortened", "withheld"]


def withheld(
    state: State,
    feasibility: Feasibility,
    ask: Ask,
    now: float,
    kept: Nodes = (),
    *,
    for_good: bool = False,
) -> Nodes:
    """Return the nodes that a request may not get: near its group, or reserved for others.

    Args:
        state: As it is now.
        feasibility: Knows what fits.
        ask: The request.
        now: Seconds since the epoch.
        kept: Nodes that are kept for who goes before it.
        for_good: Only those on which there is no room for it beside what is reserved when all
            else is free; otherwise also where there is none now.

    """
    own = anti_affinity.shut(state, ask)
    if not state.reserved or ask.terms is None:
        return own
    until = _until(state, feasibility, ask, now, (*kept, *own))
    lease = ask.tenant, ask.demand, now, until
    return (*own, *_shut(state, feasibility, lease, for_good=for_good))


def parts(
    state: State,
    feasibility: Feasibility,
    ask: Ask,
    now: float,
    kept: Nodes = (),
    *,
    whatever_ends: bool = False,
    only_own: Nodes = (),
) -> Placement:
    """Return what a request may not get of nodes that are open to it: others reserved that.

    The arguments are those of `withheld`; of the last two, see `room.left_alone`.
    """
    if not state.reserved or ask.terms is None:
        return ()
    kept = (*kept, *anti_affinity.shut(state, ask))
    until = _until(state, feasibility, ask, now, kept)
    return room.left_alone(
        state, ask.tenant, now, until, whatever_ends=whatever_ends, only_own=only_own
    )


def _until(state: State, feasibility: Feasibility, ask: Ask, now: float, kept: Nodes) -> float:
    """Return until when a lease of a request would last.

    Where it fits nowhere for so long as it asks, less nodes that are `kept` from it, a shorter
    lease will do if it says so.
    """
    assert ask.terms is not None
    waiter = state.waiting.get(ask.id)
    if waiter is not None and waiter.lease is not None:
        return waiter.lease.expires_at
    whole, shortest = now + ask.terms.ttl_seconds, ask.terms.ttl_seconds_min
    if not shortest:
        return whole
    found = _shut(state, feasibility, (ask.tenant, ask.demand, now, whole))
    demand, where = ask.demand, ask.candidates
    if not found or (demand is not None and feasibility.fits(demand, where, (*found, *kept))):
        return whole
    return now + shortest


_Lasting = tuple[Tenant, Demand | None, float, float]
"""A lease: whose, what it needs, from when and until when."""


def _shut(
    state: State, feasibility: Feasibility, lease: _Lasting, *, for_good: bool = False
) -> Nodes:
    """Return the nodes on which a lease would run into a reservation."""
    tenant, demand, now, until = lease
    theirs = {
        place: found
        for place in state.reserved.on
        if (found := room.before(state, place, tenant, until))
    }
    shut = {place: None for place, found in theirs.items() if not all(x.parts for x in found)}
    fleet = state.fleet
    partly = {
        place: row
        for place in theirs
        if place not in shut and (row := fleet.row(*place)) is not None
    }
    if demand is None or not partly:
        return tuple(shut)
    rows = np.fromiter(partly.values(), np.int64)
    empty = fleet.imagined()
    for place, row in partly.items():
        peak = Amounts()
        for at in {max(now, each.starts_at) for each in theirs[place]}:
            peak |= room.reserved(theirs[place], place, at)
        room.set_free(empty, row, room.total(state, row) - peak)
    full = ~empty.feasible(demand, rows)
    if not for_good:
        beside = feasibility.beside(room.left_alone(state, tenant, now, until))
        full |= fleet.feasible(demand, rows) & ~beside.feasible(demand, rows)
    places = np.flatnonzero(full).tolist()
    names = list(partly)
    return (*shut, *(names[each] for each in places))


def shortened(lease: Lease) -> float | None:
    """Return how long a new lease lasts, in seconds, where that is less than was asked for."""
    if lease.attempt > 1 or lease.expires_at >= lease.granted_at + lease.terms.ttl_seconds:
        return None
    return lease.expires_at - lease.granted_at


def explained(
    refusal: Refusal, state: State, feasibility: Feasibility, ask: Ask, reserved: Nodes, now: float
) -> Refusal:
    """Add to a refusal for how long a lease could last, where only reservations are in its way.

    Args:
        refusal: That there is no room.
        state: What is true.
        feasibility: Knows what fits.
        ask: The request; its demand is known.
        reserved: Nodes kept from it, also such as are kept for the head of the queue.
        now: Seconds since the epoch.

    """
    assert ask.demand is not None
    if not state.reserved or ask.terms is None:
        return refusal
    shut = set(reserved)
    needs, until = (ask.tenant, ask.demand, now), _until(state, feasibility, ask, now, ())
    own = tuple(node for node in _shut(state, feasibility, (*needs, until)) if node in shut)
    mine = sum(ask.candidates is None or cluster in ask.candidates for cluster, _ in own)
    if not mine or refusal.code is not Code.NO_CAPACITY:
        return refusal
    kept = tuple(node for node in reserved if node not in own)
    begins = sorted(
        {each.starts_at for each in state.reserved.by_id.values() if each.tenant != ask.tenant}
    )
    begins = begins[bisect_left(begins, now) :]

    def runs_into_one(until: float) -> int:
        shut = (*kept, *_shut(state, feasibility, (*needs, until)))
        return 1 - feasibility.fits(ask.demand, ask.candidates, shut)  # type: ignore[arg-type]  # The assertion above.

    late = bisect_left(begins, 1, key=runs_into_one)
    if not late or begins[late - 1] <= now:
        return refusals.reserved_for_others(refusal, mine)
    return refusals.runs_into_reservation(refusal, mine, begins[late - 1] - now)


class Withheld:
    """What is not for a request, since others reserved it, wait for it, or are too near.

    Args:
        writer: What the turn is written on.
        feasibility: Knows what fits.
        queue: Keeps nodes for its head.

    """

    def __init__(self, writer: TurnWriter, feasibility: Feasibility, queue: WaitingQueue) -> None:
        self._turn = writer
        self._state = writer.state
        self._feasibility = feasibility
        self._queue = queue

    def _is_open(self, ask: Ask) -> bool:
        """Return whether no node is excluded: most servers reserve none and have no queue."""
        terms = ask.terms
        return (
            self._queue.head is None
            and not self._state.reserved
            and (terms is None or terms.anti_affinity is None)
        )

    def nodes(self, ask: Ask, *, for_good: bool = False) -> Nodes:
        """Return the nodes that are reserved before its lease ends, or too near to its group.

        With `for_good`, only those on which there is no room beside what is reserved.
        """
        if self._is_open(ask):
            return ()
        kept, now = self._queue.reserved_before(ask), self._turn.now
        return withheld(self._state, self._feasibility, ask, now, kept, for_good=for_good)

    def parts(self, ask: Ask) -> Placement:
        """Return what of other nodes is reserved for others before its lease ends.

        Of a node that is kept for a waiter, it gets what its tenant reserved there, and no more.
        """
        if self._is_open(ask):
            return ()
        kept = self._queue.reserved_before(ask)
        own = self.only_own(ask, kept)
        return parts(self._state, self._feasibility, ask, self._turn.now, kept, only_own=own)

    def reserved(self, ask: Ask, kept: Nodes | None = None) -> Nodes:
        """Return the nodes that are not for a request: kept for a waiter, or reserved for later.

        Args:
            ask: The request.
            kept: Those that are kept; None: as they are for it now.

        """
        if kept is None:
            if self._is_open(ask):
                return ()
            kept = self._queue.reserved_before(ask)
        own = self.only_own(ask, kept)
        return (*(node for node in kept if node not in own), *self.nodes(ask))

    def only_own(self, ask: Ask, kept: Nodes | None = None) -> Nodes:
        """Return the nodes that are kept for others, and of which its tenant reserved enough.

        The arguments are those of `reserved`.
        """
        kept = self._queue.reserved_before(ask) if kept is None else kept
        if not kept or not self._state.reserved or ask.terms is None:
            return ()
        fleet, rows = self._state.fleet.imagined(), dict[Place, int]()
        for place in kept:
            row, own = fleet.row(*place), room.own(self._state, place, ask.tenant)
            if row is not None and own:
                room.set_free(fleet, row, own)
                rows[place] = row
        if ask.demand is None:
            return tuple(rows)
        fits = fleet.feasible(ask.demand, np.array([*rows.values()], np.int64)).tolist()
        return tuple(place for place, fit in zip(rows, fits, strict=True) if fit)

    def less_own(self, ask: Ask, reserved: Nodes) -> Nodes:
        """Return the nodes that are kept for others who wait, of those that are not for it."""
        own = self.nodes(ask)
        return tuple(node for node in reserved if node not in own) if own else reserved

    def refusal(self, ask: Ask, reserved: Nodes) -> Refusal:
        """Return why a request does not fit, with what reservations and its group have to do."""
        assert ask.demand is not None
        kept = self.less_own(ask, reserved)
        refusal = self._feasibility.refusal(ask.demand, ask.candidates, kept)
        now = self._turn.now
        refusal = explained(refusal, self._state, self._feasibility, ask, reserved, now)
        return anti_affinity.explained(refusal, self._state, ask)

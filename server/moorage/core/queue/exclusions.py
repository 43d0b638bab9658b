"""Exclusions: computes the nodes, and parts of nodes, that one request may not use.

Reasons: a reservation of another tenant begins before the request's lease would end, a waiter ahead
needs the node, or a lease of the request's own group is too near. A policy sees excluded nodes as
full and excluded parts as held; a proposal that names an excluded node or part is not granted.
`Requests` computes the exclusions once per consultation; verification, refusals and wake-ups read
that value.
"""

from bisect import bisect_left

import msgspec
import numpy as np

from moorage.core.fit import anti_affinity, room
from moorage.core.fit.feasibility import Feasibility
from moorage.core.fit.room import Amounts
from moorage.core.queue.order import WaitingQueue
from moorage.core.state import refusals
from moorage.core.state.facts import Refusal
from moorage.core.state.reserved import Place
from moorage.core.turns.turn import TurnWriter
from moorage.model import Ask, Code, Demand, Lease, Nodes, Placement, Tenant
from moorage.policy import Fleet


class Exclusions(msgspec.Struct, frozen=True, gc=False):
    """The nodes and parts of nodes that one request may not use.

    Args:
        by_waiters: Nodes reserved for waiters ahead of the request.
        by_others: Nodes that other tenants reserve before the request's lease would end, and nodes
            too near to leases of the request's group.
        own: The nodes of `by_waiters` where the request may use its tenant's own reservation.
        parts: Parts of other nodes that other tenants reserve before the request's lease would end.
    """

    by_waiters: Nodes = ()
    by_others: Nodes = ()
    own: Nodes = ()
    parts: Placement = ()

    @property
    def nodes(self) -> Nodes:
        """All nodes that are excluded as a whole."""
        return (*self.by_waiters, *self.by_others)

    @property
    def by_waiters_only(self) -> Nodes:
        """Nodes that only waiters ahead of the request exclude."""
        if not self.by_others:
            return self.by_waiters
        return tuple(node for node in self.by_waiters if node not in self.by_others)


NONE = Exclusions()

_Lasting = tuple[Tenant, Demand | None, float, float]
"""A planned lease as (tenant, demand, start, end), in seconds since the epoch."""


class ExclusionRules:
    """Computes the exclusions of requests.

    Args:
        writer: Writer of the turn's facts and effects.
        feasibility: Decides which demands fit.
        queue: The queue, which reserves nodes for its first waiter.
    """

    def __init__(self, writer: TurnWriter, feasibility: Feasibility, queue: WaitingQueue) -> None:
        self._turn = writer
        self._state = writer.state
        self._feasibility = feasibility
        self._queue = queue
        self._last_near: tuple[object, Nodes] = None, ()

    def find(self, ask: Ask, by_waiters: Nodes | None = None) -> Exclusions:
        """Return the present exclusions of a request.

        Args:
            ask: The request.
            by_waiters: Nodes reserved for waiters ahead of the request; None: read them from the
                queue.
        """
        if by_waiters is None:
            if self._excludes_nothing(ask):
                return NONE
            by_waiters = self._queue.nodes_reserved_ahead(ask)
        near = self._near(ask)
        if not self._state.reserved or ask.terms is None:
            return Exclusions(by_waiters, near)
        until = self._until(ask, (*by_waiters, *near), self._turn.now)
        own = self._own(ask, by_waiters)
        parts = room.parts_reserved_by_others(self._state, ask.tenant, self._turn.now, until)
        beside = self._feasibility.beside(parts)
        reserved = self._nodes_reserved((ask.tenant, ask.demand, self._turn.now, until), beside)
        if own:
            parts = room.parts_reserved_by_others(
                self._state, ask.tenant, self._turn.now, until, only_own=own
            )
        others = tuple(node for node in by_waiters if node not in own)
        return Exclusions(others, (*near, *reserved), own, parts)

    def find_on_empty(
        self, ask: Ask, by_waiters: Nodes = (), at: float | None = None
    ) -> Exclusions:
        """Return the exclusions that a request would have if all leases had ended.

        Args:
            ask: The request.
            by_waiters: Nodes reserved for waiters ahead of the request.
            at: Start of the request's lease, in seconds since the epoch; None: now.
        """
        now = self._turn.now if at is None else at
        near = self._near(ask)
        if not self._state.reserved or ask.terms is None:
            return Exclusions(by_waiters, near)
        until = self._until(ask, (*by_waiters, *near), now)
        reserved = self._nodes_reserved((ask.tenant, ask.demand, now, until))
        parts = room.parts_reserved_by_others(
            self._state, ask.tenant, now, until, ignore_leases=True
        )
        return Exclusions(by_waiters, (*near, *reserved), (), parts)

    def _near(self, ask: Ask) -> Nodes:
        """Return the nodes too near to leases of the request's group, from a cache."""
        apart = ask.terms.anti_affinity if ask.terms is not None else None
        if apart is None:
            return ()
        state = self._state
        as_of = ask.tenant, apart, state.fleet.layout, state.fleet.version, state.gains
        if self._last_near[0] != as_of:
            self._last_near = as_of, anti_affinity.near(state, ask)
        return self._last_near[1]

    def _excludes_nothing(self, ask: Ask) -> bool:
        """Return whether there is no source of exclusions: no queue head, reservation or group."""
        terms = ask.terms
        return (
            self._queue.head is None
            and not self._state.reserved
            and (terms is None or terms.anti_affinity is None)
        )

    def _own(self, ask: Ask, by_waiters: Nodes) -> Nodes:
        """Return nodes of `by_waiters` on which the tenant's own reservation has enough room."""
        if not by_waiters:
            return ()
        fleet, rows = self._state.fleet.imagined(), dict[Place, int]()
        for place in by_waiters:
            row, own = fleet.row(*place), room.own(self._state, place, ask.tenant)
            if row is not None and own:
                room.set_free(fleet, row, own)
                rows[place] = row
        if ask.demand is None:
            return tuple(rows)
        fits = fleet.feasible(ask.demand, np.array([*rows.values()], np.int64)).tolist()
        return tuple(place for place, fit in zip(rows, fits, strict=True) if fit)

    def _until(self, ask: Ask, excluded: Nodes, now: float) -> float:
        """Return when a request's lease that begins at `now` would end, in seconds since the epoch.

        A request that accepts a shorter lease gets the shortest if it fits nowhere for its full
        TTL.
        """
        assert ask.terms is not None
        waiter = self._state.waiting.get(ask.id)
        if waiter is not None and waiter.lease is not None:
            return waiter.lease.expires_at
        whole, shortest = now + ask.terms.ttl_seconds, ask.terms.ttl_seconds_min
        if not shortest:
            return whole
        reserved = self._nodes_reserved_now((ask.tenant, ask.demand, now, whole))
        if not reserved or self._fits(ask, (*reserved, *excluded)):
            return whole
        return now + shortest

    def _fits(self, ask: Ask, excluded: Nodes) -> bool:
        demand = ask.demand
        return demand is not None and self._feasibility.fits(demand, ask.candidates, excluded)

    def _nodes_reserved_now(self, lease: _Lasting) -> Nodes:
        tenant, _, now, until = lease
        parts = room.parts_reserved_by_others(self._state, tenant, now, until)
        return self._nodes_reserved(lease, self._feasibility.beside(parts))

    def _nodes_reserved(self, lease: _Lasting, beside: Fleet | None = None) -> Nodes:
        """Return the nodes on which a lease would overlap a reservation.

        Args:
            lease: The planned lease.
            beside: The present fleet without the parts that others reserve; None: ignore leases.
        """
        tenant, demand, now, until = lease
        state, fleet = self._state, self._state.fleet
        theirs = {
            place: found
            for place in state.reserved.on
            if (found := room.before(state, place, tenant, until))
        }
        whole = {place: None for place, found in theirs.items() if not all(x.parts for x in found)}
        partly = {
            place: row
            for place in theirs
            if place not in whole and (row := fleet.row(*place)) is not None
        }
        if demand is None or not partly:
            return tuple(whole)
        rows = np.fromiter(partly.values(), np.int64)
        empty = fleet.imagined()
        for place, row in partly.items():
            peak = Amounts()
            for at in {max(now, each.starts_at) for each in theirs[place]}:
                peak |= room.amounts_reserved_at(theirs[place], place, at)
            room.set_free(empty, row, room.total(state, row) - peak)
        full = ~empty.feasible(demand, rows)
        if beside is not None:
            full |= fleet.feasible(demand, rows) & ~beside.feasible(demand, rows)
        names = list(partly)
        return (*whole, *(names[each] for each in np.flatnonzero(full).tolist()))

    def refusal(self, ask: Ask, exclusions: Exclusions) -> Refusal:
        """Return why a request does not fit, including reservations and its anti-affinity group."""
        assert ask.demand is not None
        waiters = exclusions.by_waiters_only
        refusal = self._feasibility.refusal(ask.demand, ask.candidates, waiters)
        refusal = self._explain_reservations(refusal, ask, exclusions)
        return anti_affinity.add_reasons(refusal, self._state, ask)

    def _explain_reservations(self, refusal: Refusal, ask: Ask, exclusions: Exclusions) -> Refusal:
        """Add to a refusal how long a lease could last, if only reservations exclude it."""
        assert ask.demand is not None
        state, now = self._state, self._turn.now
        if not state.reserved or ask.terms is None:
            return refusal
        shut = set(exclusions.nodes)
        until = self._until(ask, (), now)
        lease = ask.tenant, ask.demand, now, until
        reserved = tuple(node for node in self._nodes_reserved_now(lease) if node in shut)
        mine = sum(ask.candidates is None or cluster in ask.candidates for cluster, _ in reserved)
        if not mine or refusal.code is not Code.NO_CAPACITY:
            return refusal
        rest = tuple(node for node in exclusions.nodes if node not in reserved)
        begins = sorted(
            {each.starts_at for each in state.reserved.by_id.values() if each.tenant != ask.tenant}
        )
        begins = begins[bisect_left(begins, now) :]

        def runs_into_one(until: float) -> int:
            found = self._nodes_reserved_now((ask.tenant, ask.demand, now, until))
            return 1 - self._fits(ask, (*rest, *found))

        late = bisect_left(begins, 1, key=runs_into_one)
        if not late or begins[late - 1] <= now:
            return refusals.reserved_for_others(refusal, mine)
        return refusals.runs_into_reservation(refusal, mine, begins[late - 1] - now)


def shortest_ttl(lease: Lease) -> float | None:
    """Return the seconds that a new lease may last; None if it lasts as long as requested."""
    if lease.attempt > 1 or lease.expires_at >= lease.granted_at + lease.terms.ttl_seconds:
        return None
    return lease.expires_at - lease.granted_at

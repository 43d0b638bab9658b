"""Reservations in advance: nodes that from a moment on only one tenant gets.

What else holds something there ends before: nodes are chosen where all leases of others do, none
that would last longer is granted there any more, and none is renewed for longer. The allocator is
the only caller.
"""

from bisect import bisect_left
from dataclasses import asdict, replace
from heapq import nsmallest
from typing import Any, Final

import numpy as np

from moorage.core import refusals
from moorage.core.effects import Information
from moorage.core.events import ReserveAsked, UnreserveAsked
from moorage.core.facts import Refusal, Reserved, Unreserved
from moorage.core.feasibility import Feasibility
from moorage.core.reserved import NodeReservation, touches
from moorage.core.state import State
from moorage.core.turn import TurnWriter
from moorage.model import Ask, Code, Lease, Nodes, RequestId
from moorage.policy import Fleet

RESERVATIONS_MAX: Final = 1_000
"""Reservations at one time; one more is refused."""
NODES_MAX: Final = 1_000
"""Nodes that are reserved at one time, counted once for each reservation; more are refused."""
NAMED_MAX: Final = 20
"""Leases, and reservations, in the way of another reservation that a "no" names."""


class AdvanceReservations:
    """The part for reservations.

    Args:
        writer: What the turn is written on.
        feasibility: Knows what fits.

    """

    def __init__(self, writer: TurnWriter, feasibility: Feasibility) -> None:
        self._turn = writer
        self._state = writer.state
        self._feasibility = feasibility

    def asked(self, event: ReserveAsked) -> None:
        """Reserve nodes for a tenant, or say why not."""
        starts_at = max(event.starts_at, self._turn.now)
        chosen = self._turned_away(event) or self._choose(event, starts_at)
        if isinstance(chosen, Refusal):
            self._turn.respond(event.to, chosen)
            return
        reservation = NodeReservation(
            id=event.id,
            tenant=event.tenant,
            nodes=chosen,
            demand=event.demand,
            starts_at=starts_at,
            ends_at=event.ends_at,
            lapse_seconds=event.lapse_seconds,
        )
        if not event.dry_run:
            self._turn.record(Reserved(reservation))
            self._turn.wakes = True  # What is kept for the head of the queue may be others' now.
        self._turn.respond(event.to, Information(row(reservation)))

    def ended(self, event: UnreserveAsked) -> None:
        """End a reservation before its time."""
        known = self._state.reserved.by_id.get(event.reservation)
        if known is None:
            self._turn.respond(event.to, refusals.no_such_reservation(event.reservation))
            return
        self._over(known.id, f"ended by {event.who}")
        self._turn.respond(event.to, Information(row(known)))

    def due(self, request: RequestId) -> None:
        """End a reservation whose time is up, or that was not used in time."""
        reservation = self._state.reserved.by_id[request]
        if reservation.ends_at <= self._turn.now:
            self._over(request, "its time is up")
        elif self._is_in_use(reservation):
            self._turn.record(Reserved(replace(reservation, used=True)))
        else:
            self._over(request, f"unused for {reservation.lapse_seconds:g} s")

    def _over(self, request: RequestId, reason: str) -> None:
        self._turn.record(Unreserved(request, self._turn.now, reason))
        self._turn.wakes = True

    def _is_in_use(self, reservation: NodeReservation) -> bool:
        return any(
            lease.tenant == reservation.tenant and touches(lease.placement, reservation.nodes)
            for lease in self._state.leases.values()
            if lease.state != "warm"
        )

    def _turned_away(self, event: ReserveAsked) -> Refusal | None:
        """Return why a reservation is not looked at, or None."""
        reserved = self._state.reserved.by_id
        if event.ends_at <= max(event.starts_at, self._turn.now):
            return refusals.ends_too_early()
        many = len(reserved) >= RESERVATIONS_MAX
        if many or event.demand.nodes + sum(len(e.nodes) for e in reserved.values()) > NODES_MAX:
            return refusals.too_many_reservations(RESERVATIONS_MAX, NODES_MAX)
        return None if self._state.clusters else refusals.no_cluster()

    def _choose(self, event: ReserveAsked, starts_at: float) -> Nodes | Refusal:
        """Return nodes that can take the demand when it begins, as small as will do."""
        staying: list[Lease] = []
        fleet = self._state.fleet.imagined()
        for lease in self._state.leases.values():
            if lease.expires_at <= starts_at or lease.over or lease.state == "warm":
                for share in lease.placement:
                    fleet.give(share)
            elif lease.tenant != event.tenant:
                staying.append(lease)
        stays = {(share.cluster_id, share.node_id) for x in staying for share in x.placement}
        demand, where = event.demand, event.candidates
        taken = self._state.reserved.during(starts_at, event.ends_at)
        allowed = fleet.feasible(demand) & self._feasibility.allowed(where, (*stays, *taken))
        if not self._feasibility.enough_nodes(allowed, demand):
            refusal = self._feasibility.refusal(demand, where)
            if refusal.code is Code.NEVER_FITS:
                return refusal
            free = int(np.count_nonzero(allowed))
            refusal = refusals.not_free_then(demand.nodes, free, len(set(taken)), len(stays))
            named = self._in_the_way(event, starts_at, staying, fleet)
            return replace(refusal, details={**refusal.details, **named})
        rows = np.flatnonzero(allowed)
        rows = rows[np.lexsort((fleet.cpu_total[rows], fleet.gpu_total[rows].sum(1)))]
        best = self._feasibility.together(rows.tolist(), demand)
        return tuple(fleet.node_ids[row] for row in best)

    def _in_the_way(
        self, event: ReserveAsked, starts_at: float, staying: list[Lease], fleet: Fleet
    ) -> dict[str, Any]:
        """Return what is on nodes that would do without it: leases and reservations, by name."""
        for share in (share for lease in staying for share in lease.placement):
            fleet.give(share)
        able = fleet.feasible(event.demand) & self._feasibility.allowed(event.candidates, ())
        places = {fleet.node_ids[row] for row in np.flatnonzero(able)}
        leases = {each.id: each.expires_at for each in staying if touches(each.placement, places)}
        others = {
            each.id: each.ends_at
            for each in self._state.reserved.by_id.values()
            if each.starts_at < event.ends_at and starts_at < each.ends_at
            if not places.isdisjoint(each.nodes)
        }
        return {"leases": _first(leases, "lease"), "reservations": _first(others, "reservation")}


def withheld(
    state: State, feasibility: Feasibility, ask: Ask, now: float, kept: Nodes = ()
) -> Nodes:
    """Return the nodes that a request may not get, since its lease would run into a reservation.

    Where it fits on no others, less those `kept` for who goes before it, a shorter lease will do
    if the request says so.
    """
    if not state.reserved or ask.terms is None:
        return ()
    waiter = state.waiting.get(ask.id)
    comes_back = waiter.lease if waiter is not None else None
    if comes_back is not None:
        return state.reserved.withheld(ask.tenant, comes_back.expires_at)
    found = state.reserved.withheld(ask.tenant, now + ask.terms.ttl_seconds)
    shortest, demand = ask.terms.ttl_seconds_min, ask.demand
    if not found or not shortest:
        return found
    if demand is not None and feasibility.fits(demand, ask.candidates, (*found, *kept)):
        return found
    return state.reserved.withheld(ask.tenant, now + shortest)


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
    shut = set(reserved)
    own = tuple(node for node in withheld(state, feasibility, ask, now) if node in shut)
    if not own or refusal.code is not Code.NO_CAPACITY:
        return refusal
    kept = tuple(node for node in reserved if node not in own)
    begins = sorted(
        {each.starts_at for each in state.reserved.by_id.values() if each.tenant != ask.tenant}
    )
    begins = begins[bisect_left(begins, now) :]

    def runs_into_one(until: float) -> int:
        shut = (*kept, *state.reserved.withheld(ask.tenant, until))
        return 1 - feasibility.fits(ask.demand, ask.candidates, shut)  # type: ignore[arg-type]  # The assertion above.

    late = bisect_left(begins, 1, key=runs_into_one)
    if not late or begins[late - 1] <= now:
        return refusals.reserved_for_others(refusal, len(own))
    return refusals.runs_into_reservation(refusal, len(own), begins[late - 1] - now)


def _first(ends: dict[RequestId, float], kind: str) -> list[dict[str, Any]]:
    """Return the first that end of what is in the way, and when, as JSON values."""
    first = nsmallest(NAMED_MAX, ends.items(), key=lambda each: (each[1], each[0]))
    return [{kind: name, "until": until} for name, until in first]


def row(reservation: NodeReservation) -> dict[str, Any]:
    """Return a reservation as JSON values."""
    where = [each._asdict() for each in reservation.demand.where]
    return {
        "reservation": reservation.id,
        "tenant": reservation.tenant,
        "nodes": [{"cluster_id": cluster, "node_id": node} for cluster, node in reservation.nodes],
        "resources": asdict(reservation.demand) | {"where": where},
        "starts_at": reservation.starts_at,
        "ends_at": reservation.ends_at,
        "lapse_seconds": reservation.lapse_seconds,
        "used": reservation.used,
    }

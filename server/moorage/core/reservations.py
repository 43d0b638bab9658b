"""Reservations in advance: nodes that from a moment on only one tenant gets.

What else holds something there ends before: nodes are chosen where all leases of others do, none
that would last longer is granted there any more, and none is renewed for longer. The allocator is
the only caller.
"""

from bisect import bisect_left
from dataclasses import asdict, replace
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
from moorage.model import Ask, Code, Nodes, RequestId

RESERVATIONS_MAX: Final = 1_000
"""Reservations at one time; one more is refused."""
NODES_MAX: Final = 1_000
"""Nodes that are reserved at one time, counted once for each reservation; more are refused."""


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
        stays: set[tuple[str, str]] = set()
        fleet = self._state.fleet.imagined()
        for lease in self._state.leases.values():
            leaves = lease.expires_at <= starts_at or lease.over or lease.state == "warm"
            for share in lease.placement:
                if leaves:
                    fleet.give(share)
                elif lease.tenant != event.tenant:
                    stays.add((share.cluster_id, share.node_id))
        demand, where = event.demand, event.candidates
        taken = self._state.reserved.during(starts_at, event.ends_at)
        allowed = fleet.feasible(demand) & self._feasibility.allowed(where, (*stays, *taken))
        if not self._feasibility.enough_nodes(allowed, demand):
            refusal = self._feasibility.refusal(demand, where)
            if refusal.code is Code.NEVER_FITS:
                return refusal
            free = int(np.count_nonzero(allowed))
            return refusals.not_free_then(demand.nodes, free, len(set(taken)), len(stays))
        rows = np.flatnonzero(allowed)
        rows = rows[np.lexsort((fleet.cpu_total[rows], fleet.gpu_total[rows].sum(1)))]
        best = self._feasibility.together(rows.tolist(), demand)
        return tuple(fleet.node_ids[row] for row in best)


def withheld(state: State, ask: Ask, now: float) -> Nodes:
    """Return the nodes that a request may not get, since its lease would run into a reservation."""
    if not state.reserved or ask.terms is None:
        return ()
    waiter = state.waiting.get(ask.id)
    comes_back = waiter.lease if waiter is not None else None
    until = now + ask.terms.ttl_seconds if comes_back is None else comes_back.expires_at
    return state.reserved.withheld(ask.tenant, until)


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
    own = withheld(state, ask, now)
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

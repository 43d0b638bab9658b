"""Advance reservations: nodes, or parts of them, that only one tenant gets from a set time on.

A reservation gets nodes on which the leases of all other tenants end before it starts. From then
on, no lease of another tenant is granted or renewed beyond the start. The allocator is the only
caller.
"""

from collections.abc import Iterable
from heapq import nsmallest
from typing import Final

import numpy as np
from msgspec.structs import asdict, replace

from moorage.core.fit import room
from moorage.core.fit.feasibility import Feasibility
from moorage.core.fit.room import Amounts
from moorage.core.state import refusals
from moorage.core.state.deadlines import Grace
from moorage.core.state.facts import Refusal, Reserved, Unreserved
from moorage.core.state.reserved import NodeReservation, Place, touches
from moorage.core.turns.effects import Information
from moorage.core.turns.events import ReserveAsked, UnreserveAsked
from moorage.core.turns.turn import TurnWriter
from moorage.model import Code, Demand, Lease, Nodes, Placement, RequestId, Share
from moorage.policy import Fleet, Misfit
from moorage.records.json_values import JsonObject
from moorage.records.requests import resources_of

RESERVATIONS_MAX: Final = 1_000
"""Maximum reservations at one time; one more is refused."""
NODES_MAX: Final = 1_000
"""Maximum reserved nodes at one time, counted once per reservation; more are refused."""
NAMED_MAX: Final = 20
"""Maximum leases that a refusal lists as obstacles; also the maximum reservations."""


class AdvanceReservations:
    """Creates, starts and ends reservations."""

    def __init__(self, writer: TurnWriter, feasibility: Feasibility) -> None:
        self._turn = writer
        self._state = writer.state
        self._feasibility = feasibility

    def apply(self, event: ReserveAsked) -> None:
        """Reserve nodes for a tenant, or answer why that is impossible."""
        starts_at = max(event.starts_at, self._turn.now)
        chosen = self._refusal_of(event) or self._choose(event, starts_at)
        if isinstance(chosen, Refusal):
            self._turn.respond(event.to, chosen)
            return
        nodes, parts = chosen
        reservation = NodeReservation(
            id=event.id,
            tenant=event.tenant,
            nodes=nodes,
            demand=event.demand,
            starts_at=starts_at,
            ends_at=event.ends_at,
            lapse_seconds=event.lapse_seconds,
            parts=parts,
            begun=starts_at <= self._turn.now,
        )
        if not event.dry_run:
            self._turn.record(Reserved(reservation))
            self._turn.wakes = True  # The nodes reserved for the queue's head may change.
        self._turn.respond(event.to, Information(row(reservation)))

    def end(self, event: UnreserveAsked) -> None:
        """End a reservation that an operator no longer wants."""
        known = self._state.reserved.by_id.get(event.reservation)
        if known is None:
            self._turn.respond(event.to, refusals.no_such_reservation(event.reservation))
            return
        self._over(known.id, f"ended by {event.who}")
        self._turn.respond(event.to, Information(row(known)))

    def due(self, request: RequestId) -> None:
        """Begin a reservation, or end a reservation that has expired or was not used in time."""
        reservation = self._state.reserved.by_id[request]
        if not reservation.begun:
            self._turn.record(Reserved(replace(reservation, begun=True)))
            self._turn.wakes = True  # The queue's head may lose some of its nodes.
        elif reservation.ends_at <= self._turn.now:
            self._over(request, "its time is up")
        elif self._is_in_use(reservation):
            self._turn.record(Reserved(replace(reservation, used=True)))
        else:
            self._over(request, f"unused for {reservation.lapse_seconds:g} s")

    def give_grace(self, grace: Grace) -> None:
        """Postpone the moment at which unused reservations lapse."""
        for each in list(self._state.reserved.by_id.values()):
            due = each.lapses_at
            if due is None or (each.starts_at > grace.now and not each.begun):
                continue  # After the clock went back, a start may be ahead again.
            until = min(grace.until(due), each.ends_at)
            if due < until:
                self._turn.record(Reserved(replace(each, lapse_seconds=until - each.starts_at)))

    def follow_clock(self, seconds: float) -> None:
        """After `ClockMoved`, update which reservations have begun, and when unused ones lapse."""
        now = self._turn.now
        before = now - seconds
        for each in list(self._state.reserved.by_id.values()):
            begun, lapse = each.begun and each.starts_at <= now, each.lapse_seconds
            if each.lapses_at is not None and each.starts_at <= now:
                lapse += now - max(each.starts_at, before) if seconds > 0 else seconds
            if (begun, lapse) != (each.begun, each.lapse_seconds):
                self._turn.record(Reserved(replace(each, begun=begun, lapse_seconds=lapse)))

    def _over(self, request: RequestId, reason: str) -> None:
        self._turn.record(Unreserved(request, self._turn.now, reason))
        self._turn.wakes = True

    def _is_in_use(self, reservation: NodeReservation) -> bool:
        return any(
            lease.tenant == reservation.tenant and touches(lease.placement, reservation.nodes)
            for lease in self._state.leases.values()
            if lease.state != "warm"
        )

    def _refusal_of(self, event: ReserveAsked) -> Refusal | None:
        """Return why a reservation is refused before nodes are chosen, or None."""
        reserved = self._state.reserved.by_id
        if event.ends_at <= max(event.starts_at, self._turn.now):
            return refusals.ends_too_early()
        many = len(reserved) >= RESERVATIONS_MAX
        if many or event.demand.nodes + sum(len(e.nodes) for e in reserved.values()) > NODES_MAX:
            return refusals.too_many_reservations(RESERVATIONS_MAX, NODES_MAX)
        known, named = self._state.clusters, event.candidates
        if known and named and known.keys().isdisjoint(named):
            places = self._state.fleet.node_ids
            return replace(refusals.no_such_cluster(named[0], known, places), field="clusters")
        return None if known else refusals.no_cluster()

    def _choose(self, event: ReserveAsked, starts_at: float) -> tuple[Nodes, Placement] | Refusal:
        """Return the smallest nodes that fit a demand at `starts_at`, and the parts to reserve."""
        state, demand, where = self._state, event.demand, event.candidates
        lasting = [x for x in state.leases.values() if x.expires_at > starts_at and not x.over]
        staying = [(x, state.held_by(x)) for x in lasting if x.tenant != event.tenant]
        others = [
            each
            for each in state.reserved.by_id.values()
            if each.starts_at < event.ends_at and starts_at < each.ends_at
        ]
        stays = {node for _, held in staying for node in _nodes(held)}
        taken = {node for each in others for node in each.nodes}
        shut = set[Place]() if demand.gpus else stays | taken
        fleet = state.fleet.imagined()
        lost = {name: state.lost_by(state.leases[name]) for name in state.lost.of}
        for place in state.places.keys() | taken | _nodes(x for s in lost.values() for x in s):
            row, left = fleet.row(*place), self._free_throughout(place, starts_at, event.ends_at)
            if left is None:
                shut.add(place)
            elif row is not None and not fleet.closed[row]:
                room.set_free(fleet, row, left)
        for share in (share for each in lasting for share in lost.get(each.id, ())):
            fleet.take(share)
        allowed = fleet.feasible(demand) & self._feasibility.allowed(where, tuple(shut))
        if not self._feasibility.enough_nodes(allowed, demand):
            refusal = self._feasibility.refusal(demand, where)
            if refusal.code is Code.NEVER_FITS:
                return refusal
            able = self._able(event)
            counted = (int(np.count_nonzero(allowed)), len(taken & able), len(stays & able))
            refusal = refusals.not_free_then(demand.nodes, *counted)
            named = _in_the_way(able, staying, others)
            return replace(refusal, details={**refusal.details, **named})
        rows = np.flatnonzero(allowed)
        devices, free_then = fleet.gpu_total[rows].sum(1), fleet.gpu_free[rows].sum(1)
        rows = rows[np.lexsort((fleet.cpu_total[rows], free_then, devices))]
        best = self._feasibility.together(rows.tolist(), demand)
        parts = (_part(fleet, row, demand) for row in best)
        return tuple(fleet.node_ids[row] for row in best), tuple(parts) if demand.gpus else ()

    def _free_throughout(self, place: Place, starts_at: float, ends_at: float) -> Amounts | None:
        """Return the part of a node that is free throughout a period; None: no part is free."""
        begins = (each.starts_at for each in self._state.reserved.of_others(place, None))
        left = room.room(self._state, place, starts_at, None)
        for at in [each for each in begins if starts_at < each < ends_at]:
            then = room.room(self._state, place, at, None)
            if left is None or then is None:
                return None
            left = Amounts({key: min(much, then[key]) for key, much in left.items()})
        return left

    def _able(self, event: ReserveAsked) -> set[Place]:
        """Return the nodes that could take a demand if they were empty and without reservations."""
        fleet = self._state.fleet
        misfits = fleet.misfits(event.demand)
        able = (misfits == Misfit.FITS) | (misfits > Misfit.UNAVAILABLE)
        able &= self._feasibility.allowed(event.candidates, ())
        return {fleet.node_ids[row] for row in np.flatnonzero(able)}


def _nodes(shares: Iterable[Share]) -> set[Place]:
    return {(share.cluster_id, share.node_id) for share in shares}


def _part(fleet: Fleet, row: int, demand: Demand) -> Share:
    """Return the part of a node to reserve: devices, and CPU and memory in proportion if free."""
    part = fleet.share(row, demand, fleet.pick_gpus(row, demand))
    devices, every = demand.gpus * demand.gpu_milli, int(fleet.gpu_total[row].sum())
    cpu, memory = (
        int(each[row]) * devices // every for each in (fleet.cpu_total, fleet.memory_total)
    )
    free_cpu, free_memory, _ = fleet.capacity(row)
    return replace(
        part,
        cpu_milli=max(demand.cpu_milli, min(cpu, free_cpu)),
        memory_mib=max(demand.memory_mib, min(memory, free_memory)),
    )


def _in_the_way(
    places: set[Place], staying: list[tuple[Lease, Placement]], others: list[NodeReservation]
) -> JsonObject:
    """Return the leases and reservations that block otherwise suitable nodes."""
    leases = {x.id: x.expires_at for x, held in staying if touches(held, places)}
    ends = {each.id: each.ends_at for each in others if not places.isdisjoint(each.nodes)}
    return {"leases": _first(leases, "lease"), "reservations": _first(ends, "reservation")}


def _first(ends: dict[RequestId, float], kind: str) -> list[JsonObject]:
    """Return the obstacles that end first, each with its end, as JSON values."""
    first = nsmallest(NAMED_MAX, ends.items(), key=lambda each: (each[1], each[0]))
    return [{kind: name, "until": until} for name, until in first]


def row(reservation: NodeReservation) -> JsonObject:
    """Return a reservation as JSON values."""
    return {
        "reservation": reservation.id,
        "tenant": reservation.tenant,
        "nodes": [_node_row(reservation, place) for place in reservation.nodes],
        "resources": resources_of(reservation.demand),
        "starts_at": reservation.starts_at,
        "ends_at": reservation.ends_at,
        "lapse_seconds": reservation.lapse_seconds,
        "used": reservation.used,
    }


def _node_row(reservation: NodeReservation, place: Place) -> JsonObject:
    part = reservation.part(place)
    if part is None:
        return {"cluster_id": place[0], "node_id": place[1], "whole": True}
    return {**asdict(part), "gpus": list(part.gpus), "whole": False}

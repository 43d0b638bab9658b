"""When will a waiter have its turn? An estimate from the deadlines of leases; `explain` tells it.

Leases and reservations are taken to end at their deadlines, the waiters to come one after another,
each at the first moment at which the places that it needs are free and not reserved for others. A
lease that is released early makes it sooner, one that is renewed makes it later.
"""

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterable
from operator import itemgetter
from typing import Final

import numpy as np

from moorage.core.feasibility import Feasibility
from moorage.core.reserved import NodeReservation
from moorage.core.state import State
from moorage.core.waiters import Waiter
from moorage.model import ClusterId, Demand, Lease, Nodes, RequestId, Share, Tenant
from moorage.policy import Fleet

WAITERS_MAX: Final = 1_000
"""Waiters that are estimated; of those behind them nothing is known."""
LOOKS_MAX: Final = 500
"""Leases that end, and looks at what they leave; behind them nothing is known."""
ROWS_A_LOOK: Final = 100
"""What has more nodes than this counts as several looks."""
CANDIDATES_MAX: Final = 64
"""Clusters that an estimated waiter may choose from, where it may not go to all."""

AWAITED_MAX: Final = 20
"""Leases that a "no" names."""

_Class = tuple[Demand, tuple[ClusterId, ...] | None, Tenant, float, float]
"""Demand, candidates; where nodes are reserved the tenant, its TTL, or when its lease ends, too."""
_Lines = dict[_Class, deque[tuple[int, Waiter]]]


def expected(state: State, waiters: Iterable[Waiter]) -> dict[RequestId, float]:
    """Return when waiters have their turn, in seconds since the epoch, as far as it is known.

    Args:
        state: As it is now.
        waiters: Of all tenants, in the order in which they are served.

    Returns:
        No entry for who waits for several nodes, pauses, says not what it needs, is behind the
        bounds, or has its turn after its deadline or after all ends that are known.

    """
    lines, on = _lines(waiters, bool(state.reserved)), state.reserved.by_node()
    if not lines:
        return {}
    fleet, found, looks = state.fleet.imagined(), dict[RequestId, float](), 0
    order = [(line[0][0], each) for each, line in lines.items()]
    leases = (lease for lease in state.leases.values() if lease.state != "ending")
    ending: list[Lease | NodeReservation] = heapq.nsmallest(LOOKS_MAX, leases, key=_when)
    ending += state.reserved.by_id.values()
    for end in sorted(ending, key=_when):
        moment, rows = _when(end)[0], _left(fleet, end)
        at = 0
        while at < len(order):
            looks += 1 + len(rows) // ROWS_A_LOOK
            if looks > LOOKS_MAX:
                return found
            first = order[at][1]
            free = [row for row in rows if _is_open(on.get(fleet.node_ids[row]), first, moment)]
            if not _put(fleet, first, free):
                at += 1
                continue
            waiter = lines[first].popleft()[1]
            del order[at]
            if lines[first]:  # Whose next one comes after all that were passed.
                insort(order, (lines[first][0][0], first), key=itemgetter(0))
            if moment <= waiter.deadline:
                found[waiter.ask.id] = moment
    return found


def awaited(
    state: State, feasibility: Feasibility, demand: Demand, where: tuple[ClusterId, ...] | None
) -> list[tuple[Lease, Share]]:
    """Return which leases a demand waits for, each with one place of it, the earliest end first.

    These are the leases on the nodes on which it is the first to fit, where all last until their
    deadlines; none where it fits now. At most `AWAITED_MAX` are told.
    """
    fleet, allowed = state.fleet.imagined(), feasibility.allowed(where, ())
    fits = fleet.feasible(demand) & allowed
    if feasibility.enough_nodes(fits, demand):
        return []
    before, found = fits.copy(), list[tuple[int, Lease, Share]]()
    leases = heapq.nsmallest(LOOKS_MAX, state.leases.values(), key=_end)
    for lease in leases:
        for share in lease.placement:
            fleet.give(share)
            row = fleet.row(share.cluster_id, share.node_id)
            if row is None or not allowed[row] or before[row]:
                continue
            found.append((row, lease, share))
            fits[row] = fleet.feasible(demand, np.array([row]))[0]
        if feasibility.enough_nodes(fits, demand):
            needed = {id(each): (each, share) for row, each, share in found if fits[row]}
            return list(needed.values())[:AWAITED_MAX]
    return []


def _end(lease: Lease) -> tuple[bool, float, str]:
    """Return what orders leases by their end; those that are ending do so first."""
    return lease.state != "ending", lease.expires_at, lease.id


def _when(each: Lease | NodeReservation) -> tuple[float, str]:
    return (each.expires_at if isinstance(each, Lease) else each.ends_at), each.id


def _left(fleet: Fleet, end: Lease | NodeReservation) -> list[int]:
    """Give back what a lease or a reservation leaves; return the rows of its nodes."""
    if isinstance(end, Lease):
        for share in end.placement:
            fleet.give(share)
        places: Nodes = tuple((share.cluster_id, share.node_id) for share in end.placement)
    else:
        places = end.nodes
    rows = (fleet.row(*place) for place in places)
    return [row for row in rows if row is not None]


def _lines(waiters: Iterable[Waiter], reserved: bool) -> _Lines:
    """Return those that can be estimated with their numbers, by what they need."""
    lines: _Lines = {}
    for number, waiter in enumerate(waiters):
        demand, where = waiter.ask.demand, waiter.ask.candidates
        if demand is None or demand.nodes > 1 or waiter.pauses:
            continue
        if len(where or ()) <= CANDIDATES_MAX:
            whose = (Tenant(""), 0.0, 0.0)
            terms, back = waiter.ask.terms, waiter.lease
            if reserved and terms is not None:
                times = (
                    (terms.ttl_seconds_min or terms.ttl_seconds, 0.0)
                    if back is None
                    else (0.0, back.expires_at)
                )
                whose = (waiter.ask.tenant, *times)
            lines.setdefault((demand, where, *whose), deque()).append((number, waiter))
    return lines


def _is_open(reservations: list[NodeReservation] | None, needs: _Class, moment: float) -> bool:
    """Return whether a lease that begins at a moment runs into none of a node's reservations."""
    *_, tenant, ttl, ends = needs
    until = max(moment + ttl, ends)
    return all(
        each.tenant == tenant or each.starts_at >= until or each.ends_at <= moment
        for each in reservations or ()
    )


def _put(fleet: Fleet, needs: _Class, rows: list[int]) -> bool:
    """Take what is needed on one of the rows; return whether it fits on any."""
    demand, where = needs[:2]
    able = [row for row in rows if where is None or fleet.node_ids[row][0] in where]
    fits = fleet.feasible(demand, np.array(able, np.int64))
    if not fits.any():
        return False
    row = able[int(fits.argmax())]
    fleet.take(fleet.share(row, demand, fleet.pick_gpus(row, demand)))
    return True

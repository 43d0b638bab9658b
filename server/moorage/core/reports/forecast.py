"""Estimates when waiters are served, from the durations of similar leases, for `explain`.

Assumptions: a lease lasts as long as similar leases of at least its age did
(`core.state.durations`), or until its deadline if too few are known; a reservation lasts until its
end. Waiters are served in order, each as soon as the places that it needs are free and not reserved
for others; their leases last as long as similar ones did.
"""

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterable
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from moorage.core.fit.feasibility import Feasibility
from moorage.core.fit.room import leaves_by
from moorage.core.state.state import State
from moorage.core.state.waiters import Waiter
from moorage.model import ClusterId, Demand, Lease, Nodes, Placement, RequestId, Share, Tenant
from moorage.policy import NEVER, Misfit

WAITERS_MAX: Final = 1_000
"""Maximum waiters with an estimate; the waiters behind them get none."""
LEASES_MAX: Final = 4_000
"""Maximum leases with an estimated end, the earliest deadlines first; others count as endless."""
LOOKS_MAX: Final = 1_000
"""Maximum checks of waiters against freed places; waiters beyond these get no estimate."""
CLASSES_MAX: Final = 16
"""Maximum classes of waiters up to which rows that fit no waiter are skipped."""
CHOSEN_AGAIN: Final = 32
"""Ended leases and reservations after which the rows of a gang at the head are chosen again."""
FEW_ROWS: Final = 8
"""Maximum rows that are checked one by one, since numpy is slow on few rows."""
ROWS_A_LOOK: Final = 100
"""Number of nodes that one check may cover; a check of more nodes counts as several."""
CANDIDATES_MAX: Final = 64
"""Maximum candidate clusters of an estimated waiter, unless it may use all."""

AWAITED_MAX: Final = 20
"""Maximum leases that a refusal lists."""


class _Class(NamedTuple):
    """Attributes that all waiters of a line have; the last three are set if reservations exist."""

    demand: Demand
    where: tuple[ClusterId, ...] | None
    lasts: float
    tenant: Tenant = Tenant("")
    ttl: float = 0.0
    ends_at: float = 0.0


class _End(NamedTuple):
    """The expected end of a lease or reservation, with its places."""

    at: float
    name: str
    leaves: Placement | Nodes


_Lines = dict[_Class, deque[tuple[int, Waiter]]]


def expect_turns(
    state: State, feasibility: Feasibility, waiters: Iterable[Waiter], now: float
) -> dict[RequestId, float]:
    """Return the estimated start of each waiter, in seconds since the epoch, as far as known.

    Args:
        state: The present state.
        feasibility: Decides which demands fit.
        waiters: The waiters of all tenants, in the order in which they are served.
        now: The present time, in seconds since the epoch.

    Returns: Start by request, without an entry for a waiter that has anti-affinity, pauses, names
        no demand, is beyond the limits, or would be served after its deadline or after all known
        ends.
    """
    lines = _lines(state, waiters)
    if not lines:
        return {}
    course = _Course(state, feasibility, lines)
    ends = _ends(state, now)
    while ends and course.looks < LOOKS_MAX and lines:
        end = heapq.heappop(ends)
        for each in course.passes(end):
            heapq.heappush(ends, each)
    return course.found


def waiters_after(
    state: State,
    feasibility: Feasibility,
    waiters: Iterable[Waiter],
    leases: Iterable[Lease],
    now: float,
) -> list[RequestId]:
    """Return the waiters that could be served if some leases ended now.

    Args:
        state: The present state.
        feasibility: Decides which demands fit.
        waiters: The waiters of all tenants, in the order in which they are served.
        leases: The leases that would end.
        now: The present time, in seconds since the epoch.
    """
    lines = _lines(state, waiters)
    if not lines:
        return []
    course = _Course(state, feasibility, lines)
    left = tuple(share for lease in leases for share in state.held_by(lease))
    course.passes(_End(now, "", left))
    return list(course.found)


class _Course:
    """The expected course: leases end, and waiters get their places in order."""

    def __init__(self, state: State, feasibility: Feasibility, lines: _Lines) -> None:
        self._fleet = state.imagined(state.fleet)
        self._feasibility = feasibility
        self._reservations = state.reserved.on
        self._lines = lines
        self._order = [(line[0][0], each) for each, line in lines.items()]
        self._reserved: set[int] = set()
        self._useful = self._rows_of_use()
        self._since_chosen = 0
        self._able: dict[_Class, tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], int]] = {}
        """Per gang: the rows that fit one member, the allowed rows, and the fleet's version."""
        self.found: dict[RequestId, float] = {}
        self.looks = 0

    def _rows_of_use(self) -> npt.NDArray[np.bool_]:
        """Return the rows that could fit at least one of the waiters if they were empty."""
        if len(self._lines) > CLASSES_MAX:
            return np.ones(len(self._fleet), np.bool_)
        useful = np.zeros(len(self._fleet), np.bool_)
        for each in self._lines:
            lacks = self._fleet.misfits(each.demand)
            capable = (lacks == Misfit.FITS) | (lacks > NEVER)
            useful |= capable & self._feasibility.allowed(each.where, ())
        return useful

    def passes(self, end: _End) -> list[_End]:
        """End a lease, and give its place to waiters; return the expected ends of their leases."""
        rows, coming, before = self._free_rows(end), list[_End](), self._reserved
        if not self._useful[rows].any():
            return []
        reserved = self._reserved = set[int]()
        at, is_head = 0, True
        while at < len(self._order):
            self.looks += 1 + len(rows) // ROWS_A_LOOK
            if self.looks > LOOKS_MAX:
                break
            first = self._order[at][1]
            placement: Placement = ()
            gives_up = self._lines[first][0][1].deadline < end.at
            if not gives_up:
                placement = self._place(first, rows, reserved, end.at)
                if not placement:
                    if is_head:
                        reserved = self._reserved = self._head_rows(first, rows, before, end.at)
                    is_head, at = False, at + 1
                    continue
            request = self._leaves(at)
            if is_head:  # Others may now use the head's reserved rows.
                rows += [row for row in before if row not in rows]
                before = set()
            if not gives_up:
                self.found[request] = end.at
                coming.append(_End(end.at + first.lasts, request, placement))
        return coming

    def _leaves(self, at: int) -> RequestId:
        """Remove the first waiter of a line; the line moves to the place of its next waiter."""
        _, needs = self._order.pop(at)
        line = self._lines[needs]
        _, waiter = line.popleft()
        if line:
            insort(self._order, (line[0][0], needs), key=itemgetter(0))
        else:
            del self._lines[needs]
        return waiter.ask.id

    def _free_rows(self, end: _End) -> list[int]:
        """Free the places of an end; return the rows of their nodes."""
        rows = []
        for each in end.leaves:
            if isinstance(each, Share):
                self._fleet.give(each)
                rows.append(self._fleet.row(each.cluster_id, each.node_id))
            else:
                rows.append(self._fleet.row(*each))
        return [row for row in rows if row is not None]

    def _head_rows(
        self, first: _Class, rows: list[int], before: set[int], moment: float
    ) -> set[int]:
        """Return the rows reserved for the head of the queue, after `rows` were freed.

        Freed rows that suit a gang are reserved for the gang, too. All rows are chosen again after
        `CHOSEN_AGAIN` ends.
        """
        if not before or first.demand.nodes == 1 or self._since_chosen >= CHOSEN_AGAIN:
            self._since_chosen = 0
            return self._rows_for_head(first, moment)
        self._since_chosen += 1
        able = self._able[first][0]
        return before.union(row for row in rows if able[row])

    def _rows_for_head(self, first: _Class, moment: float) -> set[int]:
        """Return the rows that are reserved for the head of the queue."""
        rows = {node: self._fleet.row(*node) for node in self._reservations}
        shut = [
            node
            for node, row in rows.items()
            if row is not None and self._parts_reserved(row, first, moment) is None
        ]
        nodes = self._feasibility.reservation(first.demand, first.where, self._fleet, tuple(shut))
        return {row for row in (self._fleet.row(*node) for node in nodes) if row is not None}

    def _place(
        self, needs: _Class, rows: list[int], reserved: set[int], moment: float
    ) -> Placement:
        """Place a demand on freed rows if it fits there, or a gang on any rows.

        Nodes reserved for the head of the queue are left out.
        """
        fleet, demand, ids = self._fleet, needs.demand, self._fleet.node_ids
        gang = demand.nodes > 1 and bool(rows)
        if gang:
            able_rows = self._able_rows(needs)
            if not self._feasibility.enough_nodes(able_rows, demand):
                return ()
            rows = np.flatnonzero(able_rows).tolist()
        elif needs.where is not None:
            rows = [row for row in rows if ids[row][0] in needs.where]
        if len(rows) <= FEW_ROWS:
            rows = [row for row in rows if fleet.takes(row, demand)]
            if not rows:
                return ()
        rows = [
            row
            for row in rows
            if row not in reserved or (self._reservations and self._is_own(row, needs, moment))
        ]
        beside = {row: self._parts_reserved(row, needs, moment) for row in rows}
        able = [row for row in rows if beside[row] is not None]
        parts = [part for row in able for part in beside[row] or ()]
        for part in parts:
            fleet.take(part)
        fits = fleet.feasible(demand, np.array(able, np.int64))
        able = [row for row, fit in zip(able, fits.tolist(), strict=True) if fit]
        shares = tuple(
            fleet.share(row, demand, fleet.pick_gpus(row, demand))
            for row in (self._whole(able, demand) if gang else able[:1])
        )
        for part in parts:
            fleet.give(part)
        for share in shares:
            fleet.take(share)
        return shares

    def _able_rows(self, needs: _Class) -> npt.NDArray[np.bool_]:
        """Return a mask of the nodes that fit a member of a gang; check only changed nodes."""
        fleet, demand = self._fleet, needs.demand
        known = self._able.get(needs)
        changed = None if known is None else fleet.changed_since(known[2])
        if known is None or changed is None:
            self.looks += len(fleet) // ROWS_A_LOOK
            allowed = self._feasibility.allowed(needs.where, ())
            able = fleet.feasible(demand) & allowed
        else:
            able, allowed, _ = known
            for row in changed:
                able[row] = allowed[row] and fleet.takes(row, demand)
        self._able[needs] = able, allowed, fleet.version
        return able

    def _whole(self, able: list[int], demand: Demand) -> list[int]:
        """Return the rows of a whole gang; [] if too few suitable nodes are close to each other."""
        mask = np.zeros(len(self._fleet), np.bool_)
        mask[able] = True
        enough = self._feasibility.enough_nodes(mask, demand)
        return self._feasibility.together(able, demand) if enough else []

    def _is_own(self, row: int, needs: _Class, moment: float) -> bool:
        """Return whether the waiter's own tenant has reserved a part of this node at `moment`."""
        return any(
            each.tenant == needs.tenant and each.starts_at <= moment < each.ends_at
            for each in self._reservations.get(self._fleet.node_ids[row], {}).values()
        )

    def _parts_reserved(self, row: int, needs: _Class, moment: float) -> Placement | None:
        """Return the part of a node that others reserve during a lease that begins at `moment`.

        The result is None if others reserve the whole node.
        """
        until, place = max(moment + needs.ttl, needs.ends_at), self._fleet.node_ids[row]
        parts = [
            each.part(place)
            for each in self._reservations.get(place, {}).values()
            if each.tenant != needs.tenant and each.starts_at < until and each.ends_at > moment
        ]
        return None if None in parts else tuple(part for part in parts if part is not None)


def _ends(state: State, now: float) -> list[_End]:
    """Return a heap of the expected ends of leases, reservations and warm workloads."""
    found = [_End(each.ends_at, each.id, each.nodes) for each in state.reserved.by_id.values()]
    leases = (lease for lease in state.leases.values() if lease.state != "ending")
    for lease in heapq.nsmallest(LEASES_MAX, leases, key=_end):
        lasts = None if lease.over else state.durations.of_lease(lease, now - lease.granted_at)
        until = lease.expires_at if lasts is None else lease.granted_at + lasts
        until = max(now, min(until, leaves_by(state, lease)))
        found.append(_End(until, lease.id, state.held_by(lease)))
    heapq.heapify(found)
    return found


def _lines(state: State, waiters: Iterable[Waiter]) -> _Lines:
    """Return the waiters that get an estimate, by class, each with its position."""
    lines: _Lines = {}
    lasting: dict[tuple[Tenant, str, Demand], float | None] = {}
    for number, waiter in enumerate(waiters):
        ask, terms, back = waiter.ask, waiter.ask.terms, waiter.lease
        if ask.demand is None or waiter.pauses or len(ask.candidates or ()) > CANDIDATES_MAX:
            continue
        assert terms is not None
        if terms.anti_affinity is not None:
            continue
        like = (ask.tenant, ask.policy.uri, ask.demand)
        if like not in lasting:
            lasting[like] = state.durations.of_request(ask)
        needs = _Class(ask.demand, ask.candidates, lasting[like] or terms.ttl_seconds)
        if state.reserved:
            ttl = (terms.ttl_seconds_min or terms.ttl_seconds) if back is None else 0.0
            ends_at = 0.0 if back is None else back.expires_at
            needs = needs._replace(tenant=ask.tenant, ttl=ttl, ends_at=ends_at)
        lines.setdefault(needs, deque()).append((number, waiter))
    return lines


class Awaited(NamedTuple):
    """The leases that a demand waits for.

    Args:
        leases: Leases on the nodes where the demand fits first if all leases last until their
            deadlines; each with one of its places, the earliest end first; at most `AWAITED_MAX`.
        room_at: The time at which all these leases will have ended; None: not known.
    """

    leases: list[tuple[Lease, Share]]
    room_at: float | None


def find_awaited(
    state: State, feasibility: Feasibility, demand: Demand, where: tuple[ClusterId, ...] | None
) -> Awaited:
    """Return the leases that a demand waits for; none if it fits now, or will never fit."""
    fleet, allowed = state.imagined(state.fleet), feasibility.allowed(where, ())
    fits = fleet.feasible(demand) & allowed
    if feasibility.enough_nodes(fits, demand):
        return Awaited([], None)
    could = allowed & (fleet.misfits(demand) > Misfit.UNAVAILABLE)  # Others never fit.
    found: dict[int, list[tuple[Lease, Share]]] = {
        row: [] for row in np.flatnonzero(could).tolist()
    }
    for lease in heapq.nsmallest(LEASES_MAX, state.leases.values(), key=_end):
        has_grown = False
        for share in state.held_by(lease):
            row = fleet.row(share.cluster_id, share.node_id)
            if row not in found or fits[row]:
                continue
            fleet.give(share)
            found[row].append((lease, share))
            fits[row] = fleet.takes(row, demand)
            has_grown = has_grown or bool(fits[row])
        if has_grown and feasibility.enough_nodes(fits, demand):
            needed: dict[RequestId, tuple[Lease, Share]] = {}
            for each in (each for row, leases in found.items() if fits[row] for each in leases):
                needed.setdefault(each[0].id, each)
            shown = sorted(needed.values(), key=lambda each: _end(each[0]))
            return Awaited(shown[:AWAITED_MAX], lease.expires_at)
    return Awaited([], None)


def _end(lease: Lease) -> tuple[bool, float, str]:
    """Return the key that orders leases by end; leases that are ending come first."""
    return lease.state != "ending", lease.expires_at, lease.id

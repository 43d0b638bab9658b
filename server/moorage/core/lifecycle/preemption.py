"""Ends leases for a waiting request: those of lower priority, or on quota that its tenant lent.

Only the head of the queue preempts: nodes are reserved for it, so it gets the capacity that is
freed. The fewest leases that must end so that the head fits get a notice, which names the request
and the reason. They end when the notice expires, if the head still waits then. The allocator is the
only caller.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, islice
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from moorage.core.fit.feasibility import Feasibility
from moorage.core.fit.room import keeps_to_itself
from moorage.core.lifecycle.leases import LeaseLifecycle
from moorage.core.queue.exclusions import ExclusionRules
from moorage.core.queue.open_requests import OpenRequests
from moorage.core.state.accounts import demand_amounts, placement_amounts
from moorage.core.state.facts import Preempted, Spared
from moorage.core.state.state import State
from moorage.core.turns.turn import TurnWriter
from moorage.model import Ask, Demand, Lease, Nodes, Quota
from moorage.policy import Fleet, gang_groups

NODES_MAX: Final = 256
"""Maximum nodes examined for one request: those with the fewest preemptible leases."""
CHOICES_MAX: Final = 512
"""Maximum combinations of leases tried on one node; after these, the youngest leases are chosen."""


class _Option(NamedTuple):
    """The leases to preempt on a node so that a request fits; fewer leases sort first."""

    victims: int
    lost_seconds: float
    row: int
    leases: tuple[Lease, ...]


class Preemption:
    """Chooses leases to preempt, gives them notice, and ends them.

    Args:
        writer: Writer of the turn's facts and effects.
        feasibility: Decides which demands fit.
        leases: Ends and moves leases.
        requests: The open requests.
        exclusions: Computes what each request may not use.

    Attributes:
        spared: Number of notices withdrawn because they were not needed or would not help.
    """

    def __init__(
        self,
        writer: TurnWriter,
        feasibility: Feasibility,
        leases: LeaseLifecycle,
        requests: OpenRequests,
        exclusions: ExclusionRules,
    ) -> None:
        self._turn = writer
        self._exclusions = exclusions
        self._state = writer.state
        self._feasibility = feasibility
        self._leases = leases
        self._requests = requests
        self.spared = 0

    def capacity(self, ask: Ask) -> Nodes | None:
        """Preempt as few leases as possible so that the head of the queue fits.

        Returns:
            The nodes that will have room once these leases end; None if preemption would not help
            or is not needed: no lease gets notice.
        """
        given, until = self._who_may(ask)
        leases = self._state.leases
        waits = any(self._comes(leases[name], ask) for name in self._state.noticed)
        if ask.demand is None or not (given or waits):
            return None
        coming = [each for each in leases.values() if self._comes(each, ask)]
        at = max([self._turn.now, *(each.notice.until for each in coming if each.notice)])
        attempt = self._attempt(ask, ask.demand, at)
        chosen = attempt.choose(coming, given)
        last = max((until[each.id] for each in chosen or ()), default=at)
        if last > at and self._state.reserved:  # A later grant may meet more reservations.
            attempt = self._attempt(ask, ask.demand, last)
            chosen = attempt.choose(coming, [each for each in given if until[each.id] <= last])
        if chosen is None:
            return None
        for lease in chosen:
            self._tell(ask, lease, until[lease.id])
        return attempt.nodes if chosen or waits else None

    def due(self, lease: Lease) -> None:
        """End a lease whose notice has expired, if that still helps a waiter."""
        assert lease.notice is not None
        waiter = self._state.waiting.get(lease.notice.by)
        if (
            waiter is None
            or waiter.pauses
            or self._requests.undecided.get(lease.notice.by)
            or not self._helps(waiter.ask)
        ):
            self._turn.record(Spared(lease.id, self._turn.now))
            self.spared += 1
            self._turn.wakes = True
        else:
            self._leave(lease, lease.notice.reason)

    def _helps(self, ask: Ask) -> bool:
        """Return whether a request would fit once all leases with a notice have ended."""
        coming = [each for each in self._state.leases.values() if self._comes(each, ask)]
        assert ask.demand is not None
        return self._attempt(ask, ask.demand, self._turn.now).choose(coming, ()) is not None

    def _attempt(self, ask: Ask, demand: Demand, at: float) -> "_Attempt":
        """Return a copy of the fleet for trials, as it will be when the request is granted."""
        known, found = self._feasibility, self._exclusions.find_on_empty(ask, (), at)
        allowed = known.allowed(ask.candidates, found.nodes)
        fleet = known.beside(found.parts)
        return _Attempt(self._state, fleet, known, allowed, demand, self._turn.now)

    def _leave(self, lease: Lease, reason: str) -> None:
        if lease.may_start_again and lease.state in {"starting", "active"}:
            self._leases.move(lease, reason)
        else:
            self._leases.end(lease, reason)

    def _tell(self, ask: Ask, lease: Lease, until: float) -> None:
        why = f"of priority {ask.priority}"
        if not _lower(lease, ask):
            why = "which needs its own quota back"
        reason = f"preempted by request {ask.id} of tenant {ask.tenant}, {why}"
        self._turn.record(Preempted(lease.id, self._turn.now, ask.id, until, reason))
        if until <= self._turn.now:
            self._leave(self._state.leases[lease.id], reason)

    def _comes(self, lease: Lease, ask: Ask) -> bool:
        """Return whether a lease makes room anyway: it is ending, warm, or under notice for `ask`.

        A notice for an answered request, or for one of lower priority, counts as one for `ask`.
        """
        if lease.notice is not None:
            other = self._state.waiting.get(lease.notice.by)
            return lease.notice.by == ask.id or other is None or other.ask.priority < ask.priority
        return lease.state in {"ending", "failing", "warm"}

    # Preemptible leases ----------------------------------------------------------------------

    def _who_may(self, ask: Ask) -> tuple[list[Lease], dict[str, float]]:
        """Return the leases that may be preempted, and the end of each one's notice by lease id."""
        deadline, now = self._state.waiting[ask.id].deadline, self._turn.now
        until: dict[str, float] = {}
        found: list[Lease] = []
        for name in self._state.preemptible:
            lease = self._state.leases[name]
            if _lower(lease, ask) and _stays(lease):
                young = lease.granted_at + lease.terms.runtime_seconds_min
                until[name] = max(now + lease.terms.notice_seconds, young)
                found.append(lease)
        quota = self._state.accounts.quota((ask.tenant, None))
        for lease in self._borrowing_leases(ask, quota) if quota is not None else ():
            if lease.id not in until:
                until[lease.id] = now + quota.notice_seconds  # type: ignore[union-attr]  # The line above.
                found.append(lease)
        # A notice that outlasts the request's deadline would be useless.
        in_time = (lease for lease in found if until[lease.id] <= deadline)
        return [lease for lease in in_time if not keeps_to_itself(self._state, lease)], until

    def _borrowing_leases(self, ask: Ask, quota: Quota) -> Iterator[Lease]:
        """Yield other tenants' leases on quota that this tenant lent them, the youngest first."""
        accounts, needs = self._state.accounts, demand_amounts(ask)
        own = accounts.own_room((ask.tenant, None))
        if quota.nominal.gpu_milli is None or any(
            need > room for need, room in zip(needs, own, strict=True)
        ):
            return
        left: dict[str, list[int]] = {}
        youngest = sorted(self._state.leases.values(), key=lambda lease: -lease.fencing)
        for lease in youngest:
            if not _stays(lease) or lease.tenant == ask.tenant:
                continue
            over = left.setdefault(
                lease.tenant, list(accounts.borrowed_amounts((lease.tenant, None)))
            )
            amounts = placement_amounts(lease.placement)
            if 0 < amounts[0] <= over[0]:  # All of its GPUs are borrowed.
                over[0] -= amounts[0]
                yield lease


def _lower(lease: Lease, ask: Ask) -> bool:
    return lease.terms.preemptible and lease.terms.priority < ask.priority


def _stays(lease: Lease) -> bool:
    """Return whether a lease has no end in sight: it is neither ending nor under notice."""
    return lease.state in {"granted", "starting", "active"} and lease.notice is None


class _Attempt:
    """A copy of the fleet on which leases can be ended by trial.

    Attributes:
        nodes: The nodes for the request once all chosen leases have ended.
    """

    def __init__(
        self,
        state: State,
        fleet: Fleet,
        feasibility: Feasibility,
        allowed: npt.NDArray[np.bool_],
        demand: Demand,
        now: float,
    ) -> None:
        self._feasibility = feasibility
        self._demand = demand
        self._now = now
        self._held_by = state.held_by
        self._fleet = state.imagined(fleet)
        self._allowed = allowed
        self.nodes: Nodes = ()

    def choose(self, coming: Iterable[Lease], given: Iterable[Lease]) -> list[Lease] | None:
        """Return the leases to preempt beside those that end anyway; None: that is not enough."""
        for lease in coming:
            for share in self._held_by(lease):
                self._fleet.give(share)
        fits = self._fleet.feasible(self._demand) & self._allowed
        rows = np.flatnonzero(fits).tolist()
        options = [_Option(0, 0.0, row, ()) for row in rows]
        if not self._feasibility.enough_nodes(fits, self._demand):
            options += self._options(given, set(rows))
        picked = self._pick(options)
        if picked is None:
            return None
        self.nodes = tuple(self._fleet.node_ids[option.row] for option in picked)
        chosen = {lease.id: lease for option in picked for lease in option.leases}
        return self._without_spares(list(chosen.values()), [option.row for option in picked])

    def _options(self, given: Iterable[Lease], fitting: set[int]) -> Iterator[_Option]:
        by_row: dict[int, list[Lease]] = defaultdict(list)
        for lease in given:
            places = {(share.cluster_id, share.node_id) for share in self._held_by(lease)}
            for row in (self._fleet.row(*place) for place in places):
                if row is not None and self._allowed[row] and row not in fitting:
                    by_row[row].append(lease)
        rows = sorted(by_row, key=lambda row: (len(by_row[row]), row))
        most = max(NODES_MAX, self._demand.nodes)
        for row in rows[:most]:
            here = sorted(by_row[row], key=lambda lease: (-lease.granted_at, lease.fencing))
            found = self._fewest(row, here)
            if found is not None:
                yield _Option(len(found), self._seconds_lost(found), row, found)

    def _fewest(self, row: int, leases: Sequence[Lease]) -> tuple[Lease, ...] | None:
        """Return the fewest, youngest leases to preempt on a node so that the demand fits."""
        if not self._fits_without(row, leases):
            return None
        for many in range(1, len(leases)):
            tried = list(islice(combinations(leases, many), CHOICES_MAX + 1))
            if len(tried) > CHOICES_MAX:
                break
            enough = [each for each in tried if self._fits_without(row, each)]
            if enough:
                return min(enough, key=self._seconds_lost)
        chosen = list(leases)
        for lease in leases[::-1]:  # Prefer to keep the oldest leases.
            rest = [each for each in chosen if each is not lease]
            if self._fits_without(row, rest):
                chosen = rest
        return tuple(chosen)

    def _without_spares(self, chosen: list[Lease], rows: list[int]) -> list[Lease]:
        """Return the chosen leases less superfluous ones: a lease may make room on two nodes."""
        for lease in sorted(chosen, key=lambda each: each.granted_at):
            rest = [each for each in chosen if each is not lease]
            if all(self._fits_without(row, rest) for row in rows):
                chosen = rest
        return chosen

    def _fits_without(self, row: int, leases: Iterable[Lease]) -> bool:
        here = self._fleet.node_ids[row]
        shares = [
            share
            for lease in leases
            for share in self._held_by(lease)
            if (share.cluster_id, share.node_id) == here
        ]
        for share in shares:
            self._fleet.give(share)
        fits = bool(self._fleet.feasible(self._demand, slice(row, row + 1))[0])
        for share in shares:
            self._fleet.take(share)
        return fits

    def _pick(self, options: list[_Option]) -> list[_Option] | None:
        """Return the nodes for a gang with the fewest leases to preempt, in one rack if wanted."""
        many, groups = self._demand.nodes, defaultdict[int, list[_Option]](list)
        together = gang_groups(self._fleet, self._demand)
        for option in sorted(options, key=lambda each: each[:3]):
            place = 0 if together is None else int(together[option.row])
            if place >= 0 and len(groups[place]) < many:
                groups[place].append(option)
        whole = [group for group in groups.values() if len(group) == many]
        cost = lambda group: (  # noqa: E731  # Used only on the next line.
            sum(each.victims for each in group),
            sum(each.lost_seconds for each in group),
        )
        return min(whole, key=cost, default=None)

    def _seconds_lost(self, leases: Iterable[Lease]) -> float:
        """Return the sum of the seconds that leases have run: the work that preemption may lose."""
        return sum(self._now - lease.granted_at for lease in leases)

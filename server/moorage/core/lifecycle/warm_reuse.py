"""Warm leases: lets requests take them over, and ends them for requests that need their place.

A warm lease holds its place like any other lease, so no GPU is promised twice, and its amounts are
part of its tenant's use; but no client has its token. The next similar request takes over its
workload without a start. If a request otherwise does not fit, or exceeds its quota, warm leases end
for it.
The allocator is the only caller.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from msgspec.structs import astuple

from moorage.core.fit.feasibility import Candidates, Feasibility
from moorage.core.fit.verification import verify
from moorage.core.lifecycle.leases import LeaseLifecycle, likeness
from moorage.core.queue.exclusions import ExclusionRules, Exclusions
from moorage.core.queue.order import WaitingQueue
from moorage.core.state.accounts import Account, placement_amounts
from moorage.core.state.facts import Ended, Refusal, Warmed
from moorage.core.state.reserved import touches
from moorage.core.state.state import RELEASED, State
from moorage.core.turns.effects import Address, Information, Stop
from moorage.core.turns.events import WorkloadKept
from moorage.core.turns.turn import TurnWriter
from moorage.model import (
    RESOURCES,
    Ask,
    ClusterId,
    Code,
    Demand,
    Lease,
    Nodes,
    Placement,
    RequestId,
    Tenant,
)
from moorage.policy import Fleet, ProposedShare

WARM_MAX: Final = 256
"""Maximum warm workloads of one tenant; one more ends the workload with the earliest deadline.
"""
ROOM_SECONDS_MAX: Final = 60.0
"""Seconds that a request without a queue time waits anyway while warm leases end for it."""
EVICTED: Final = "evicted: another request needs its place"


class WarmReuse:
    """Keeps warm leases, lets requests take them over, and ends them.

    Args:
        writer: Writer of the turn's facts and effects.
        feasibility: Decides which demands fit.
        leases: Ends leases.
        queue: Tells whether requests wait for a quota.
        exclusions: Computes what each request may not use.
    """

    def __init__(
        self,
        writer: TurnWriter,
        feasibility: Feasibility,
        leases: LeaseLifecycle,
        queue: WaitingQueue,
        exclusions: ExclusionRules,
    ) -> None:
        self._turn = writer
        self._exclusions = exclusions
        self._feasibility = feasibility
        self._leases = leases
        self._queue = queue
        self._evicted: dict[RequestId, RequestId] = {}
        self._awaited: dict[RequestId, RequestId] = {}
        self._hopeless: dict[tuple[Demand, Candidates, Nodes, Placement], int] = {}

    def restore(self) -> None:
        """Find evictions that a crash interrupted; the requests that caused them are unknown."""
        leases = self._turn.state.leases.values()
        evicted = (each.id for each in leases if (each.state, each.reason) == ("ending", EVICTED))
        self._evicted = dict.fromkeys(evicted, RequestId(""))

    # Keeping and taking over ---------------------------------------------------------------

    def add(self, news: WorkloadKept) -> None:
        """Keep a released lease as warm, since its workload is fit for the next user."""
        lease = self._leases.engaged(news.lease, news.fencing)
        if lease is None or lease.provision is None:
            return
        if (lease.state, lease.reason) != ("ending", RELEASED):
            return  # It is warm already, or it has ended meanwhile.
        if self._has_vanished(lease) or self._is_in_the_way(lease):
            self._turn.emit(Stop(lease))
            return
        until = self._turn.now + lease.provision.keep_warm_seconds
        self._turn.record(Warmed(lease.id, self._turn.now, until))
        own = [each for each in self._oldest() if each.tenant == lease.tenant]
        for each in own[: max(0, len(own) - WARM_MAX)]:
            self._leases.end(each, f"only {WARM_MAX} workloads stay warm")
        self._turn.wakes = True

    def like(self, ask: Ask, reserved: Nodes) -> Lease | None:
        """Return a warm lease that `ask` may take over, if possible the last released; or None.

        The policy once chose this place for an equal request, so it is not consulted again. The
        place is verified like a proposal.
        """
        if ask.terms is None or ask.dry_run or ask.provision is None or not self._turn.state.warm:
            return None
        wanted, found = likeness(ask), None
        for lease in reversed(list(self._oldest())):
            if lease.likeness != wanted:
                continue
            found = found or self._exclusions.find_on_empty(ask, reserved)
            if self._may_reuse(ask, lease, found):
                return lease
        return None

    def take_over(self, warm: Lease, by: RequestId) -> None:
        """End a warm lease whose place and workload the lease `by` gets in the same turn."""
        self._turn.record(Ended(warm.id, self._turn.now, f"lease {by} took its workload over"))

    def _may_reuse(self, ask: Ask, lease: Lease, exclusions: Exclusions) -> bool:
        if touches(lease.placement, (*exclusions.nodes, *ask.avoid)):
            return False
        fleet = self._turn.state.imagined(self._feasibility.beside(exclusions.parts))
        for share in lease.placement:
            fleet.give(share)
        wishes = tuple(ProposedShare(*astuple(share)) for share in lease.placement)
        return verify(ask, wishes, fleet, self._turn.state.clusters) == lease.placement

    # Eviction ------------------------------------------------------------------------------

    def _is_in_the_way(self, lease: Lease) -> bool:
        """Return whether other requests wait for the quota that a warm lease would use."""
        borrows = any(self._turn.state.accounts.borrowed_amounts((lease.tenant, None)))
        return self._queue.waits_for_quota(None if borrows else lease.tenant)

    def room_after(self, refusal: Refusal, ask: Ask, reserved: Nodes) -> Nodes | None:
        """Evict warm leases if the refusal could then become a grant; return the nodes with room.

        () if these nodes are not known; None if eviction would not help.
        """
        if refusal.code is Code.QUOTA_EXCEEDED:
            return self._quota(refusal, ask)
        declined = ask.demand is None and refusal.code is Code.POLICY_DECLINED
        wanting = declined or refusal.code is Code.NO_CAPACITY
        return self.capacity(ask, reserved) if wanting else None

    def capacity(self, ask: Ask, reserved: Nodes) -> Nodes | None:
        """End the fewest warm leases, the oldest first, so that `ask` fits.

        Returns:
            The nodes that will have room once these leases have ended, () if the request names no
            demand; None if ending warm leases would not help.
        """
        state = self._turn.state
        self._evicted = {name: by for name, by in self._evicted.items() if name in state.leases}
        coming = [state.leases[name] for name in self._evicted if self._is_for(ask, name)]
        if ask.terms is None or ask.dry_run or not (coming or state.warm or state.resetting):
            return None
        own = self._resetting_for(ask)  # The request takes these over.
        for lease in own:
            self._awaited[lease.id] = ask.id
        found = self._exclusions.find_on_empty(ask, reserved)
        reserved = found.nodes
        if ask.demand is None:
            return self._room_unknown(ask, reserved, [*coming, *own])
        key = (ask.demand, ask.candidates, reserved, found.parts)
        if not (coming or own) and self._hopeless.get(key) == state.gains:
            return None
        fleet = self._feasibility.beside(found.parts)
        attempt = _Attempt(state, fleet, self._feasibility, ask, reserved)
        others = (each for each in self._idle() if self._awaited.get(each.id) != ask.id)
        chosen = attempt.choose([*coming, *own], others)
        if chosen is None:
            if len(self._hopeless) >= WARM_MAX:
                self._hopeless.clear()
            self._hopeless[key] = state.gains
            return None
        self._evict(ask, chosen)
        for lease in coming:
            self._evicted[lease.id] = ask.id
        return attempt.nodes()

    def _quota(self, over: Refusal, ask: Ask) -> Nodes | None:
        """End warm leases, the oldest first, so that `ask` fits into a quota.

        Returns:
            (), since the nodes are not known; None if ending all warm leases would not help.
        """
        state, details = self._turn.state, over.details
        if ask.terms is None or ask.dry_run:
            return None
        column, lacking = RESOURCES.index(details["resource"]), details["asked"] - details["room"]
        lacking += details.get("kept", 0)
        coming = [
            each for each in self._evicted if each in state.leases and self._is_for(ask, each)
        ]
        chosen = list[Lease]()
        for lease in (*map(state.leases.__getitem__, coming), *self._idle()):
            if lacking <= 0:
                break
            left = self._remaining_quota((details["tenant"], details["project"]), lease, column)
            if left > 0 and lease.id not in coming:
                chosen.append(lease)
            lacking -= left
        if lacking > 0:
            return None
        self._evict(ask, chosen)
        return ()

    def _remaining_quota(self, account: Account, lease: Lease, column: int) -> int:
        """Return how much of a resource an account gains once a lease has ended."""
        tenant, project = account
        its: Account = (lease.tenant, None if project is None else lease.terms.project)
        amount = placement_amounts(lease.placement)[column]
        if its == account:
            return amount
        if project is not None and its[0] != tenant:
            return 0  # Projects lend only within their tenant.
        return min(amount, self._turn.state.accounts.borrowed_amounts(its)[column])

    def _room_unknown(self, ask: Ask, reserved: Nodes, coming: list[Lease]) -> Nodes | None:
        """Evict warm leases for a request without `resources`: one by one, until its policy agrees.

        Only the policy knows the demand, and it found no placement on the free capacity.
        """
        if coming:
            return ()
        allowed = ask.candidates
        for lease in self._idle():
            nodes = {(share.cluster_id, share.node_id) for share in lease.placement}
            if any(allowed is None or node[0] in allowed for node in nodes.difference(reserved)):
                self._evict(ask, [lease])
                return ()
        return None

    def _evict(self, ask: Ask, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._leases.end(lease, EVICTED)
            self._evicted[lease.id] = ask.id

    def _is_for(self, ask: Ask, name: RequestId) -> bool:
        """Return whether the place of an evicted lease is for `ask`, or for no open request."""
        return self._is_left(self._evicted[name], ask.id)

    # Other ends ----------------------------------------------------------------------------

    def end_vanished(self) -> None:
        """End warm leases on nodes or devices that no longer exist."""
        for lease in [*self._oldest()]:
            if self._has_vanished(lease):
                self._leases.end(lease, "its node or device left the inventory")
        self._turn.wakes = True

    def flush(self, to: Address, tenant: Tenant, cluster: ClusterId | None) -> None:
        """End the warm leases of a tenant, in one cluster or everywhere; return them."""
        flushed = self.warm_leases(tenant, cluster)
        for lease in flushed:
            self._leases.end(lease, "flushed")
        self._turn.respond(to, Information({"flushed": [lease.id for lease in flushed]}))

    def warm_leases(self, tenant: Tenant, cluster: ClusterId | None) -> list[Lease]:
        """Return the warm leases of a tenant, in one cluster or everywhere."""
        return [
            lease
            for lease in self._warm_leases()
            if lease.tenant == tenant
            and (cluster is None or any(each.cluster_id == cluster for each in lease.placement))
        ]

    def _has_vanished(self, lease: Lease) -> bool:
        fleet = self._turn.state.fleet
        if lease.lost:
            return True
        for share in lease.placement:
            row = fleet.row(share.cluster_id, share.node_id)
            if row is None or not set(share.gpus) <= set(fleet.gpu_ids[row]):
                return True
        return False

    def _resetting_for(self, ask: Ask) -> list[Lease]:
        """Return a lease in reset that matches `ask` and that no other request awaits; or []."""
        leases, resetting = self._turn.state.leases, self._turn.state.resetting
        self._awaited = {name: by for name, by in self._awaited.items() if name in resetting}
        if not resetting or ask.provision is None:
            return []
        wanted = likeness(ask)
        for name in resetting:
            if leases[name].likeness == wanted and self._is_left(self._awaited.get(name), ask.id):
                return [leases[name]]
        return []

    def _is_left(self, by: RequestId | None, to: RequestId) -> bool:
        """Return whether room that was made for the request `by` may go to the request `to`."""
        waiter = None if by is None else self._turn.state.waiting.get(by)
        return by == to or waiter is None or waiter.pauses

    def _warm_leases(self) -> Iterator[Lease]:
        """Yield the warm leases, then those that are being reset for their next user."""
        yield from self._oldest()
        yield from [self._turn.state.leases[name] for name in self._turn.state.resetting]

    def _idle(self) -> Iterator[Lease]:
        """Yield the warm leases that no waiter will take over."""
        no_request = RequestId("")
        yield from (
            each
            for each in self._warm_leases()
            if self._is_left(self._awaited.get(each.id), no_request)
        )

    def _oldest(self) -> Iterator[Lease]:
        """Yield the warm leases, the earliest deadline first."""
        leases = self._turn.state.leases
        warm = [leases[name] for name in self._turn.state.warm]
        yield from sorted(warm, key=lambda lease: (lease.expires_at, lease.fencing))


class _Attempt:
    """A copy of the fleet on which warm leases are ended by trial."""

    def __init__(
        self, state: State, fleet: Fleet, feasibility: Feasibility, ask: Ask, reserved: Nodes
    ) -> None:
        assert ask.demand is not None
        self._feasibility = feasibility
        self._demand = ask.demand
        self._candidates = ask.candidates
        self._reserved = reserved
        self._held_by = state.held_by
        self._fleet = state.imagined(fleet)
        self._allowed = feasibility.allowed(ask.candidates, reserved)
        self._fits = self._fleet.feasible(ask.demand) & self._allowed

    def choose(self, coming: Iterable[Lease], warm: Iterable[Lease]) -> list[Lease] | None:
        """Return the fewest warm leases to end; None: ending all of them would not be enough.

        Args:
            coming: Leases that end anyway.
            warm: The warm leases that may be ended.
        """
        for lease in coming:
            self._free(lease, 1)
        chosen: list[Lease] = []
        for lease in warm:
            if self._enough():
                break
            if self._free(lease, 1):
                chosen.append(lease)
        if not self._enough():
            return None
        for lease in chosen[::-1]:  # Keep leases that are not needed after all.
            self._free(lease, -1)
            if self._enough():
                chosen.remove(lease)
            else:
                self._free(lease, 1)
        return chosen

    def nodes(self) -> Nodes:
        """Return the nodes that the demand would get."""
        return self._feasibility.reservation(
            self._demand, self._candidates, self._fleet, self._reserved
        )

    def _enough(self) -> bool:
        return self._feasibility.enough_nodes(self._fits, self._demand)

    def _free(self, lease: Lease, sign: int) -> bool:
        """Free a lease's share (`sign` 1) or take it (-1); return whether allowed nodes changed."""
        shares = self._held_by(lease)
        found = [self._fleet.row(share.cluster_id, share.node_id) for share in shares]
        rows = np.array([row for row in found if row is not None and self._allowed[row]], np.int64)
        if not len(rows):
            return False
        for share in shares:
            if sign > 0:
                self._fleet.give(share)
            else:
                self._fleet.take(share)
        self._fits[rows] = self._fleet.feasible(self._demand, rows)
        return True

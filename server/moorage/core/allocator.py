"""The allocator: a state machine without I/O that takes events, and returns facts and effects.

The daemon is the only caller. The allocator passes each event to `requests`, `leases`, `warm_reuse`
or another part. The allocator reads no clock and draws no random numbers.
"""

import math
from collections import ChainMap
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import fields
from typing import assert_never

from moorage.core.fit.feasibility import Feasibility
from moorage.core.fit.reservations import AdvanceReservations
from moorage.core.lifecycle.backfill import Backfill
from moorage.core.lifecycle.cordons import Cordons
from moorage.core.lifecycle.dry_runs import DryRuns
from moorage.core.lifecycle.leases import LeaseLifecycle
from moorage.core.lifecycle.preemption import Preemption
from moorage.core.lifecycle.requests import RequestLifecycle
from moorage.core.lifecycle.warm_reuse import WarmReuse
from moorage.core.queue.exclusions import ExclusionRules
from moorage.core.queue.open_requests import OpenRequests
from moorage.core.queue.quotas import Quotas
from moorage.core.reports import explain
from moorage.core.reports.estimates import Estimates
from moorage.core.state.deadlines import Grace
from moorage.core.state.devices import follow
from moorage.core.state.facts import ClockMoved, ClusterRemoved, ClusterSet, Counted, Fact
from moorage.core.state.invariants import check
from moorage.core.state.state import apply
from moorage.core.turns.effects import Recall
from moorage.core.turns.events import (
    Asked,
    CancelAsked,
    ClockSet,
    ClusterGone,
    ClusterSeen,
    ConsultFailed,
    CordonAsked,
    DryRun,
    Event,
    FlushAsked,
    HalfLifeConfigured,
    Inquired,
    Proposed,
    QuotaAsked,
    ReleaseAsked,
    RenewAsked,
    ReserveAsked,
    Restarted,
    SessionLost,
    Stalled,
    Tick,
    UnreserveAsked,
    WorkloadEnded,
    WorkloadFailed,
    WorkloadKept,
    WorkloadStarted,
    WorkloadStopped,
)
from moorage.core.turns.turn import Turn, TurnWriter
from moorage.model import (
    OVERTAKEN_MAX,
    REQUEUE_PAUSE_SECONDS,
    Cluster,
    ClusterId,
    RequestId,
    Tenant,
)
from moorage.records.json_values import JsonObject


class Allocator:
    """Owns the state of all requests and leases.

    Args:
        requeue_pause_seconds: How long a lease whose workload failed waits before its second start;
            the wait doubles before each later start.
        overtaken_max: Maximum number of later requests that may overtake a waiter.

    Attributes:
        state: The state that follows from the facts; read-only for callers.
    """

    def __init__(
        self,
        requeue_pause_seconds: float = REQUEUE_PAUSE_SECONDS,
        overtaken_max: int = OVERTAKEN_MAX,
    ) -> None:
        self._turn = TurnWriter()
        self.state = self._turn.state
        self.feasibility = Feasibility(self.state)
        self.requests = OpenRequests(self._turn, overtaken_max)
        self.estimates = Estimates(self.state, self.feasibility, self.requests.queue)
        self._leases = LeaseLifecycle(self._turn, self.requests, requeue_pause_seconds)
        exclusions = ExclusionRules(self._turn, self.feasibility, self.requests.queue)
        self._warm = WarmReuse(
            self._turn, self.feasibility, self._leases, self.requests.queue, exclusions
        )
        self._cordons = Cordons(self._turn, self._leases, self._warm)
        self._quotas = Quotas(self._turn, self.requests.queue)
        self._reservations = AdvanceReservations(self._turn, self.feasibility)
        self._lifecycle = RequestLifecycle(
            self._turn,
            self.feasibility,
            self.requests,
            self._leases,
            self._warm,
            self._quotas,
            exclusions,
        )
        self._preemption = Preemption(
            self._turn, self.feasibility, self._leases, self.requests, exclusions
        )
        self._waking = Backfill(
            self.state, self.requests, self._warm, self._lifecycle, self._preemption
        )
        parts = (self._leases, self._warm, self._cordons)
        self._dry_runs = DryRuns(self.state, self.feasibility, self.requests, *parts)
        self._freed = -1  # After a restart, all duplicates are checked.
        self._keeps_index = False
        """Whether the index of the waiters exists, so that `follow` must update it."""

    @property
    def undecided(self) -> int:
        """The number of requests whose policy has not answered yet."""
        return len(self.requests.undecided)

    def policy_of(self, tenant: Tenant, idempotency_key: str) -> str:
        """Return the URI of the policy for the first request with this key; "": no such request."""
        return self.requests.policy_of(tenant, idempotency_key)

    def replay(self, facts: Iterable[Fact], fencing: int = 0) -> None:
        """Restore the state from the ledger's facts. No decision is made again.

        Args:
            facts: The ledger's facts; after `follow`, only facts that `follow` has not applied.
            fencing: Fencing numbers up to this one may be in use, even if no fact has them.
        """
        self.follow(facts)
        apply(self.state, Counted(max(self.state.fencing, fencing)))
        check(self.state)
        self._index_all()
        self._warm.restore()

    def follow(self, facts: Iterable[Fact]) -> None:
        """Apply the next facts that another allocator has recorded."""
        queue = self.requests.queue if self._keeps_index else None
        for fact in facts:
            if queue is not None:
                queue.take_out(fact)
            apply(self.state, fact)
            if queue is not None:
                queue.put_in(fact)

    def index(self) -> Iterator[None]:
        """Build the index of all waiters in steps; the caller may pause after each step."""
        if not self._keeps_index:
            yield from self.requests.queue.index()
            self._keeps_index = True

    def _index_all(self) -> None:
        for _ in self.index():
            pass

    def read(self, inquiry: Inquired, now: float) -> Turn:
        """Answer a question from the state that `follow` built; record no fact."""
        self._index_all()
        turn = self._turn.begin(now)
        self._answer_inquiry(inquiry)
        return turn

    def forget(self) -> None:
        """Drop the large parts of the state to free memory. No method may be called afterwards."""
        self.state.waiting.clear()
        self.requests.queue.restore()
        vars(self.feasibility).clear()
        self.estimates.clear()
        for each in fields(self.state):
            delattr(self.state, each.name)

    def next_deadline(self) -> float | None:
        """Return when the next `Tick` is due, in seconds since the epoch; None: no tick is due."""
        if self._waking.is_unfinished:
            return self._turn.now
        first = self.state.deadlines.first()
        return None if first is None else first[0]

    def step(self, event: Event, now: float) -> Turn:
        """Handle one event.

        Args:
            event: The event that happened.
            now: Seconds since the epoch; never less than at the last call, except with `ClockSet`.

        Returns:
            Facts that the caller makes durable, and effects that the caller carries out afterwards.
            Effects of the kinds in `EARLY` may be carried out before.
        """
        turn = self.begin(event, now)
        if self._turn.wakes:
            self._waking.wake()
        return turn

    def begin(self, event: Event, now: float) -> Turn:
        """Handle one event, but serve no waiters: `finish` serves them.

        See `step`, which does both in one turn.
        """
        turn = self._turn.begin(now)
        self._decide(event)
        while self.state.identities.freed != self._freed:
            self._freed = self.state.identities.freed
            for cluster_id in [*self.state.identities.duplicates]:
                self._record_cluster(self.state.clusters[cluster_id])
        return turn

    def finish(self) -> Turn | None:
        """Serve the waiters after `begin`, in a second turn; None if there is nothing to do."""
        if not self._turn.wakes:
            return None
        turn = self._turn.begin(self._turn.now)
        self._waking.wake()
        return turn

    def _decide(self, event: Event) -> None:  # noqa: C901, PLR0912, PLR0915  # One case per event.
        match event:
            case Asked():
                self._lifecycle.take(event.to, event.ask)
            case Proposed() | ConsultFailed():
                self._lifecycle.take_answer(event)
            case ReleaseAsked(to, request, token_digest, tenant):
                self._leases.release(to, request, token_digest, tenant)
            case RenewAsked(to, request, token_digest, ttl_seconds):
                self._leases.renew(to, request, token_digest, ttl_seconds)
            case CancelAsked(to, request, tenant):
                self._lifecycle.cancel(to, request, tenant)
            case Inquired():
                self._answer_inquiry(event)
            case SessionLost(session):
                self.requests.drop_session_requests(session)
            case WorkloadStarted():
                self._leases.note_start(event)
            case WorkloadFailed():
                self._leases.note_failure(event)
            case WorkloadEnded():
                self._leases.over(event)
            case WorkloadStopped():
                self._leases.note_stop(event)
            case WorkloadKept():
                self._warm.add(event)
            case FlushAsked(to, tenant, cluster):
                self._warm.flush(to, tenant, cluster)
            case CordonAsked():
                self._cordons.apply(event)
            case DryRun(to):
                self._turn.respond(to, self._dry_runs.answer(event, self._turn.now))
            case ReserveAsked():
                self._reservations.apply(event)
            case UnreserveAsked():
                self._reservations.end(event)
            case QuotaAsked():
                self._quotas.apply(event)
            case HalfLifeConfigured(seconds):
                self._quotas.half_life(seconds)
            case ClusterSeen(cluster):
                self._record_cluster(cluster)
            case ClusterGone(cluster_id):
                if cluster_id in self.state.clusters:
                    self._change(cluster_id, ClusterRemoved(cluster_id))
            case Restarted(grace_seconds):
                self._give_grace(math.inf, grace_seconds)
                self._leases.restarted()
                self._turn.wakes = True
            case Stalled(seconds, grace_seconds):
                self._give_grace(seconds, grace_seconds)
            case ClockSet(seconds):
                self._clock_set(seconds)
            case Tick():
                self._tick()
            case _:
                assert_never(event)

    def _record_cluster(self, cluster: Cluster) -> None:
        """Record a new or changed cluster; mark nodes whose machine counts as another node."""
        decided = self.state.identities.with_decisions(cluster, self.state.places_with_leases)
        if self.state.clusters.get(cluster.id) != decided:
            self._change(cluster.id, ClusterSet(decided))

    def _change(self, cluster_id: ClusterId, fact: ClusterSet | ClusterRemoved) -> None:
        """Record a changed cluster, and new names of its devices in leases and reservations."""
        before = self.state.clusters.get(cluster_id)
        self._turn.record(fact)
        after = self.state.clusters.get(cluster_id)
        for moved in [*follow(self.state, before, after, self._turn.now)]:
            self._turn.record(moved)
        self._warm.end_vanished()

    def _give_grace(self, seconds: float, grace_seconds: float) -> None:
        """Extend deadlines that expired or came closer while the daemon read no messages."""
        grace = Grace(self._turn.now, seconds, grace_seconds)
        self._leases.give_grace(grace)
        self._reservations.give_grace(grace)

    def _clock_set(self, seconds: float) -> None:
        """Shift deadlines with the calendar, so that the remaining time stays the same."""
        self._turn.record(ClockMoved(self._turn.now, seconds))
        self._reservations.follow_clock(seconds)
        self.requests.move_times(seconds)
        self._turn.wakes = True  # Other nodes may be reserved for the head of the queue.

    def _tick(self) -> None:
        self._turn.wakes = self._waking.is_unfinished
        while (due := self.state.deadlines.first()) is not None and due[0] <= self._turn.now:
            request = due[1]
            lease = self.state.lease(request)
            notice = lease.notice if lease is not None else None
            if lease is not None and notice is not None and notice.until < lease.expires_at:
                self._preemption.due(lease)
            elif lease is not None:
                self._leases.due(lease)
            elif request in self.state.reserved.by_id:
                self._reservations.due(request)
            else:
                self._lifecycle.end_wait(request)

    def _answer_inquiry(self, inquiry: Inquired) -> None:
        known: MutableMapping[str, JsonObject] = self._turn.decisions
        waiter = self.state.waiting.get(RequestId(inquiry.subject))
        if waiter is not None and waiter.lease is None:
            last = self._lifecycle.in_the_way(waiter.ask)  # The stored refusal may be outdated.
            record = explain.refusal_object(last) if last else known.get(waiter.ask.id, {})
            known = ChainMap({waiter.ask.id: {"state": "waiting", **record}}, known)
        queue, now = self.requests.queue, self._turn.now
        parts = self.feasibility, self.estimates
        answer = explain.answer(inquiry, self.state, queue, known, *parts, now)
        if answer is None:
            self._turn.emit(Recall(inquiry.to, inquiry.tenant, inquiry.subject, inquiry.sees_all))
        else:
            self._turn.respond(inquiry.to, answer)

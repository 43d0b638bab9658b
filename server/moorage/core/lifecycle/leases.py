"""Handles leases after their grant: renewal, release, expiry, and reports of the backend.

A lease whose workload failed goes back into the queue if its request allows that. In the queue it
keeps its id, token and age, but holds no capacity; the next grant is another start of the same
lease.

The allocator is the only caller.
"""

import json
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from moorage.core.fit.room import begins, drain_of, leaves_by
from moorage.core.queue.alternatives import choice
from moorage.core.queue.open_requests import OpenRequests
from moorage.core.reports.explain import lost_machine_finder
from moorage.core.state import refusals
from moorage.core.state.deadlines import Grace
from moorage.core.state.facts import (
    Ended,
    Ending,
    Finished,
    Granted,
    Paused,
    Preempted,
    Refusal,
    Renewed,
    Requeued,
    Resumed,
    Started,
    WaitExtended,
)
from moorage.core.state.state import RELEASED
from moorage.core.turns.effects import Address, KeepWarm, LeaseNews, Start, Stop
from moorage.core.turns.events import (
    WorkloadEnded,
    WorkloadFailed,
    WorkloadStarted,
    WorkloadStopped,
)
from moorage.core.turns.turn import TurnWriter
from moorage.model import (
    REQUEUE_PAUSE_SECONDS_MAX,
    Ask,
    Demand,
    DeviceId,
    Lease,
    Outcome,
    Placement,
    RequestId,
    Tenant,
)
from moorage.records.json_values import JsonValue

_DEMANDED: Final = tuple(
    each.name for each in msgspec.structs.fields(Demand) if each.name != "where"
)


def _demand_fields(demand: Demand) -> list[JsonValue]:
    """Return the fields of a demand; an empty `where` is left out, as in older digests."""
    fields = [getattr(demand, name) for name in _DEMANDED]
    return [*fields, demand.where] if demand.where else fields


def likeness(ask: Ask) -> str:
    """Return a digest of everything that determines a request's workload and placement.

    Candidates are left out: a take-over checks whether the warm lease's place is among them.
    """
    assert ask.provision is not None
    parts = (
        ask.tenant,
        (ask.policy.uri, ask.policy.digest),
        None if ask.demand is None else _demand_fields(ask.demand),
        (ask.inputs, ask.parameters, ask.settings),
        (ask.provision.backend, ask.provision.spec),
    )
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


class LeaseLifecycle:
    """Handles leases, except the reuse of warm leases: see `warm_reuse`.

    Args:
        writer: Writer of the turn's facts and effects.
        requests: The open requests, including leases that wait for another place.
        pause_seconds: Wait of a lease before its second start; the wait doubles before each later
            start. 0: no wait.
    """

    def __init__(self, writer: TurnWriter, requests: OpenRequests, pause_seconds: float) -> None:
        self._turn = writer
        self._requests = requests
        self._pause_seconds = pause_seconds

    def grant(
        self, ask: Ask, placement: Placement, asked_at: float, warm: Lease | None = None
    ) -> Lease:
        """Grant a placement to a request, or to a lease that waits for another placement.

        A lease that waited keeps its deadline, since its holder renews it while it waits.

        Args:
            ask: The request.
            placement: The placement to grant.
            asked_at: Arrival of the request, in seconds since the epoch.
            warm: The lease whose workload is taken over; None: a new workload is started.
        """
        inherited = "" if warm is None else warm.workload
        like = "" if not _stays_warm(ask) else likeness(ask) if warm is None else warm.likeness
        assert ask.terms is not None
        now, fencing = self._turn.now, self._turn.state.fencing + 1
        waiting = self._turn.state.lease(ask.id)
        if waiting is None:
            lease = Lease(  # For more arguments with names than these, Python would make a dict.
                ask.id,
                ask.tenant,
                ask.token_digest,
                ask.policy,
                placement=placement,
                fencing=fencing,
                granted_at=now,
                expires_at=now + ask.terms.ttl_seconds,
                terms=ask.terms,
                provision=ask.provision,
                state="starting" if ask.provision else "granted",
                asked_at=asked_at,
                inherited=inherited,
                likeness=like,
                choice=choice(ask),
                devices=self._devices(placement),
            )
            if ask.terms.ttl_seconds_min and self._turn.state.reserved:
                until = min(lease.expires_at, begins(self._turn.state, lease, now))
                lease = replace(lease, expires_at=until)
        else:
            lease = replace(
                waiting,
                placement=placement,
                devices=self._devices(placement),
                lost=(),
                fencing=fencing,
                granted_at=now,
                state="starting",
                reason="",
                faults=0,
                attempt=waiting.attempt + 1,
                choice=choice(ask),
                inherited=inherited,
            )
        retained = ask if lease.may_start_again else None
        if lease.ask is not retained:
            lease = replace(lease, ask=retained)
        queue = self._requests.queue
        overtaken = queue.overtaken_by(ask, placement, asked_at)
        self._turn.record(Granted(lease, overtaken))
        if overtaken is not None:
            queue.overtook(overtaken)
        return lease

    def _devices(self, placement: Placement) -> tuple[tuple[DeviceId, ...], ...]:
        """Return the devices of a placement; () if the inventory has no UUIDs for them."""
        fleet = self._turn.state.fleet
        found: list[tuple[DeviceId, ...]] = []
        for share in placement:
            row = fleet.row(share.cluster_id, share.node_id)
            if row is not None and (known := fleet.devices[row]):
                gpus = fleet.gpu_ids[row]
                found.append(tuple(known[gpus.index(gpu)] for gpu in share.gpus))
            else:
                found.append(())
        return tuple(found) if any(found) else ()

    def release(
        self, to: Address, request: RequestId, token_digest: str, tenant: Tenant | None = None
    ) -> None:
        """End a lease for its owner. A repeated release gets the same answer."""
        lease = self.find_owned(request, token_digest, tenant)
        if isinstance(lease, Refusal):
            self._turn.respond(to, lease)
            return
        if lease.state == "active" and lease.likeness:
            self._turn.record(Ending(request, self._turn.now, RELEASED))
            self._turn.emit(KeepWarm(self._turn.state.leases[request]))
        elif not lease.over:
            self.end(lease, RELEASED)
        lease = self._turn.state.lease(request) or lease
        self._turn.respond(to, LeaseNews(lease))
        self._turn.wakes = True  # A waiter may take the place before the lease is warm.

    def renew(
        self, to: Address, request: RequestId, token_digest: str, ttl_seconds: float | None
    ) -> None:
        """Extend a lease to `ttl_seconds` from now (by default, the lease's own TTL)."""
        lease = self.find_owned(request, token_digest)
        if isinstance(lease, Refusal):
            self._turn.respond(to, lease)
            return
        if lease.over:
            self._turn.respond(to, refusals.lease_over(lease))
            return
        ttl = lease.terms.ttl_seconds if ttl_seconds is None else ttl_seconds
        until = min(self._turn.now + ttl, leaves_by(self._turn.state, lease))
        if until <= self._turn.now:  # Already expired, e.g. during a long restart.
            self.due(lease)
            over = self._turn.state.lease(request) or lease
            self._turn.respond(to, refusals.lease_over(over))
            return
        sooner = until < lease.expires_at and bool(self._turn.state.reserved)
        self._turn.wakes = self._turn.wakes or sooner  # May block no reservation now.
        self._turn.record(Renewed(request, until))
        waiter = self._turn.state.waiting.get(request)
        if waiter is not None and not waiter.pauses and self._turn.state.reserved:
            self._requests.queue.retry(waiter.ask)
            self._turn.wakes = True
        shortened = max(0.0, until - self._turn.now) if until < self._turn.now + ttl else None
        renewed = self._turn.state.lease(request) or lease
        lost = lost_machine_finder(self._turn.state)(renewed)
        self._turn.respond(to, LeaseNews(renewed, ttl_max_seconds=shortened, lost=lost))

    def move(self, lease: Lease, reason: str) -> None:
        """Stop a lease's workload and start it elsewhere, if the lease allows another start."""
        self._note_end(lease, "failed", WorkloadFailed(lease.id, lease.fencing, reason))
        self._turn.emit(Stop(lease))

    def end(self, lease: Lease, reason: str) -> None:
        """End a lease: at once, or when its backend reports that its workload is gone."""
        if lease.state == "queued":
            self._requests.withdraw(self._turn.state.waiting[lease.id].ask)
        if lease.provision is None or lease.state == "queued":
            self._turn.record(Ended(lease.id, self._turn.now, reason))
            self._turn.wakes = True
        else:
            self._turn.record(Ending(lease.id, self._turn.now, reason))
            self._turn.emit(Stop(lease))
            # The lease blocks no reservation now, so others may use free capacity there.
            self._turn.wakes = self._turn.wakes or bool(self._turn.state.reserved)

    def note_start(self, news: WorkloadStarted) -> None:
        """Mark the workload of a lease as running."""
        lease = self.engaged(news.lease, news.fencing)
        if lease is not None and lease.state == "starting":
            self._turn.record(Started(lease.id, self._turn.now, news.endpoint))

    def note_failure(self, news: WorkloadFailed) -> None:
        """Record that a lease's workload did not start and left nothing running."""
        lease = self.engaged(news.lease, news.fencing)
        if lease is None:
            return
        if lease.state in {"starting", "active"}:
            lease = self._note_end(lease, "failed", news)
        self._let_go(lease, _failure(lease) or f"backend failed: {news.reason}")

    def over(self, news: WorkloadEnded) -> None:
        """Record that a lease's workload ended by itself, and order the backend to clean up."""
        lease = self.engaged(news.lease, news.fencing)
        if lease is not None and lease.state == "warm":
            self.end(lease, news.reason)
        if lease is None or lease.state not in {"starting", "active"}:
            return
        lease = self._note_end(lease, news.phase, news)
        if news.phase == "succeeded":
            self.end(lease, news.reason)
        elif lease.may_start_again:
            self._turn.emit(Stop(lease))
        else:
            self.end(lease, _failure(lease) or news.reason)

    def note_stop(self, news: WorkloadStopped) -> None:
        """Record that a lease's workload is gone, and free its devices or queue the lease again."""
        lease = self.engaged(news.lease, news.fencing)
        if lease is not None and news.unfit and lease.reason == RELEASED:
            self._turn.record(
                Ended(lease.id, self._turn.now, f"{RELEASED}; not kept warm: {news.unfit}")
            )
            self._turn.wakes = True
        elif lease is not None:
            self._let_go(lease, "backend stopped")

    def _let_go(self, lease: Lease, reason: str) -> None:
        """End a lease whose workload has stopped, or queue it again if it may start again."""
        if lease.state == "failing" and lease.may_start_again:
            self._turn.record(Requeued(lease.id, self._turn.now, _failure(lease)))
            self.pause(lease.id, self._pause_seconds * 2.0 ** (lease.attempt - 1))
        else:
            self._turn.record(Ended(lease.id, self._turn.now, lease.reason or reason))
        self._turn.wakes = True

    def pause(self, request: RequestId, seconds: float, faults: int = 0) -> None:
        """Queue a lease again after a pause, during which the cause of its failure may vanish.

        Args:
            request: The lease; it is in no line of the queue.
            seconds: Length of the pause, limited by a maximum.
            faults: Number of consultations in a row that failed through no fault of the policy.
        """
        seconds = min(seconds, REQUEUE_PAUSE_SECONDS_MAX)
        if seconds > 0:
            self._turn.record(Paused(request, self._turn.now, self._turn.now + seconds, faults))
        else:
            self._requests.queue.add(self._turn.state.waiting[request].ask)

    def due(self, lease: Lease) -> None:
        """End an expired lease, or end the pause of a lease in the queue."""
        if lease.retry_at and lease.expires_at > self._turn.now:
            self._turn.record(Resumed(lease.id, self._turn.now))
            self._requests.queue.add(self._turn.state.waiting[lease.id].ask)
            self._turn.wakes = True
        else:
            drained = drain_of(self._turn.state, lease)
            self.end(lease, f"its node was {drained}" if drained else "expired")

    def _note_end(
        self,
        lease: Lease,
        phase: Literal["succeeded", "failed"],
        news: WorkloadFailed | WorkloadEnded,
    ) -> Lease:
        """Record the outcome of a workload that ended by itself; return its lease."""
        outcome = Outcome(
            attempt=lease.attempt,
            phase=phase,
            detail=news.reason,
            at=self._turn.now,
            nodes=tuple((share.cluster_id, share.node_id) for share in lease.placement),
            exit_code=news.exit_code,
            log_tail=news.log_tail,
        )
        self._turn.record(Finished(lease.id, outcome))
        return self._turn.state.leases[lease.id]

    def engaged(self, request: RequestId, fencing: int) -> Lease | None:
        """Return the lease that a backend's report is about; None if that grant has ended."""
        lease = self._turn.state.leases.get(request)
        if lease is None or lease.provision is None or lease.fencing != fencing:
            return None
        return lease

    def give_grace(self, grace: Grace) -> None:
        """Postpone deadlines and notices of leases, and the deadlines of requests in the queue."""
        state = self._turn.state
        notices = [*_late_notices(state.leases.values(), grace, self._turn.now)]
        moved = [(until, notice.until) for until, notice in notices]
        for lease in list(state.leases.values()):
            until = grace.until(lease.expires_at)
            if lease.state == "ending" or lease.expires_at >= until:
                continue
            until = min(until, leaves_by(state, lease))
            if lease.expires_at < until:
                moved.append((lease.expires_at, until))
                self._turn.record(Renewed(lease.id, until))
        outlasting = grace.outlasting(moved)
        for waiter in list(state.waiting.values()):
            until = outlasting(waiter.deadline)
            if waiter.deadline < until:
                asks, name = waiter.lease is None, waiter.ask.id
                self._turn.record(WaitExtended(name, until) if asks else Renewed(name, until))
        for _, notice in notices:
            self._turn.record(notice)

    def restarted(self) -> None:
        """Send the backends the orders for all leases again."""
        for lease in list(self._turn.state.leases.values()):
            if lease.state == "warm":
                self._turn.emit(KeepWarm(lease))  # Its workload may have died with the machine.
            elif lease.provision is not None:
                over = lease.state in {"failing", "ending"}
                self._turn.emit(Stop(lease) if over else Start(lease))

    def find_owned(
        self, request: RequestId, token_digest: str, tenant: Tenant | None = None
    ) -> Lease | Refusal:
        """Return a lease if the caller has its token or is of its tenant, else a refusal."""
        lease = self._turn.state.lease(request)
        if lease is None:
            return refusals.unknown_lease(request)
        if lease.token_digest != token_digest and lease.tenant != tenant:
            return refusals.wrong_token(request)
        return lease


def _late_notices(
    leases: Iterable[Lease], grace: Grace, now: float
) -> Iterator[tuple[float, Preempted]]:
    """Yield the old deadline and the postponed notice of each lease that is being preempted."""
    for lease in leases:
        notice = lease.notice
        if notice is None or lease.state not in {"granted", "starting", "active"}:
            continue
        until = grace.until(notice.until)
        if notice.until < until:
            yield notice.until, Preempted(lease.id, now, notice.by, until, notice.reason)


def _failure(lease: Lease) -> str:
    """Return a sentence about a failed start, if the lease allows several attempts; else ""."""
    provision, outcome = lease.provision, lease.outcome
    if provision is None or outcome is None or provision.on_failure == "end":
        return ""
    return f"attempt {outcome.attempt} of {provision.attempts_max} failed: {outcome.detail}"


def _stays_warm(ask: Ask) -> bool:
    return ask.provision is not None and ask.provision.keep_warm_seconds > 0

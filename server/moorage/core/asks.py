"""What happens to an ask, from its arrival to its lease, its answer, or its place in the queue.

Rules propose; what they propose is verified against the state as it is now, and granted, asked for
again, queued or refused. The allocator is the only caller.
"""

from dataclasses import replace
from typing import Any, Final

from moorage.core import questions
from moorage.core.desk import Desk
from moorage.core.events import ConsultFailed, Proposed
from moorage.core.judge import Judge
from moorage.core.leases import Leases
from moorage.core.pending import ASKS_BYTES_MAX, Pending, Undecided
from moorage.core.queue import Queue
from moorage.core.repeats import mismatch
from moorage.core.verify import Stale, Unsound, verify
from moorage.core.waking import Waking
from moorage.core.warm import ROOM_SECONDS_MAX, Warm
from moorage.core.words import (
    Address,
    Advice,
    Answer,
    Consult,
    Dequeued,
    Forget,
    LeaseNews,
    Look,
    Queued,
    Refusal,
    Start,
    Told,
)
from moorage.model import Ask, Code, Lease, Nodes, Placement, RequestId, Tenant
from moorage.policy import ProposalError, Wish, parse_proposal

WAITING_MAX: Final = 100_000
"""Asks in the queue; the next one is answered `busy`."""
CONSULTS_MAX: Final = 8
"""Consultations for one ask before it is answered `conflict`, or takes a place in the queue if it
may wait. A waiter is asked about again until its deadline: each conflict was another's grant."""
FAULTS_MAX: Final = 6
"""Times in a row that a rule may fail to answer about a lease in the queue, for reasons that say
nothing about the lease, before that ends. With the pauses between them it is a minute."""
FAULT_PAUSE_SECONDS: Final = 1.0
"""Before such a rule is asked again; twice as long each time, and longer than any rest in all."""
PASSING: Final = frozenset(
    {
        Code.BUSY,
        Code.POLICY_CRASHED,
        Code.POLICY_TIMEOUT,
        Code.SHUTTING_DOWN,
        Code.UNAVAILABLE,
    }
)
"""What may be over when the rule is asked again."""


class Asks:
    """The clerk for asks.

    Args:
        desk: What the turn is written on.
        judge: Knows what fits.
        queue: The waiters in their order.
        leases: Grants and ends leases.
        warm: Knows what is kept for the next request like its own.

    Attributes:
        undecided: Those that rules are being consulted about.
        waking: Serves the queue.
        listeners: Who is told, beside the asker, what becomes of a waiter.

    """

    def __init__(self, desk: Desk, judge: Judge, queue: Queue, leases: Leases, warm: Warm) -> None:
        self._desk = desk
        self._state = desk.state
        self._judge = judge
        self._queue = queue
        self._leases = leases
        self._warm = warm
        self.undecided = self._pending = Undecided()
        self.waking = Waking(
            state=desk.state,
            queue=queue,
            judge=judge,
            warm=warm,
            undecided=self._pending,
            consult=self._consult,
            take_over=self._take_over,
        )
        self.listeners: dict[RequestId, list[Address]] = {}
        self._number = 0
        self._turned_down = 0

    def policy_asked(self, tenant: Tenant, idempotency_key: str) -> str:
        """Return the URI of the rule that the first request with this key went to, or ""."""
        named = self._pending.named(tenant, idempotency_key)
        first = self._state.keys.get((tenant, idempotency_key)) or named or RequestId("")
        known = self._pending.get(first) or self._state.waiting.get(first)
        lease = self._state.lease(first)
        return known.ask.policy.uri if known else lease.policy.uri if lease else ""

    def asked(self, to: Address, ask: Ask) -> None:
        """Take a request: answer it, or have its rule asked."""
        if not ask.dry_run and self._asked_before(to, ask):
            return
        known = self._pending.get(ask.id) or self._state.waiting.get(ask.id)
        if known or self._state.lease(ask.id):
            self._desk.tell(
                to, Refusal(Code.ALREADY_EXISTS, f"Request id {ask.id} is taken.", "id")
            )
            return
        if not self._pending.has_room(ask):
            reason = "Too many requests are being decided, or too large ones; try again shortly."
            self._desk.tell(to, Refusal(Code.BUSY, reason))
            return
        if not self._state.clusters:
            reason = "No cluster is registered; register one with POST /clusters."
            self._desk.tell(
                to, Refusal(Code.UNKNOWN_CLUSTERS, reason, "clusters", "a live cluster")
            )
            return
        pending = Pending(ask, [to], self._desk.now)
        reserved = self._queue.reserved_before(ask)
        if self._take_over(pending, reserved):
            self.waking.wake()
            return
        if ask.demand is None or self._judge.fits(ask.demand, ask.candidates, reserved):
            self._consult(pending, reserved)
            return
        refusal = self._judge.refusal(ask.demand, ask.candidates, reserved)
        if refusal.code is Code.NEVER_FITS:
            self._answer(pending, refusal)
        else:
            self._wait_or_refuse(pending, refusal, reserved, self._state.gains)

    def _asked_before(self, to: Address, ask: Ask) -> bool:
        """Answer a repeated request with what became of the first one."""
        key = ask.terms.idempotency_key if ask.terms else ""
        first = self._state.keys.get((ask.tenant, key)) or self._pending.named(ask.tenant, key)
        if first is None or not key:
            return False
        lease = self._state.lease(first)
        pending = self._pending.get(first)
        known = pending or self._state.waiting.get(first)
        refusal = mismatch(ask, first, known.ask if known else None, lease)
        if refusal is not None:
            self._desk.tell(to, refusal)
        elif lease is not None:
            self._desk.tell(to, LeaseNews(lease))
        elif pending is not None:
            pending.to.append(to)
        else:
            self.listeners.setdefault(first, []).append(to)
        return True

    def _consult(self, pending: Pending, reserved: Nodes) -> None:
        self._number += 1
        pending.consultation = self._number
        pending.consultations += 1
        pending.version, pending.layout = self._state.fleet.version, self._state.fleet.layout
        pending.gains, pending.turned_down = self._state.gains, self._turned_down
        pending.reserved = reserved
        pending.avoided = () if pending.insisted else self._judge.avoided(pending.ask, reserved)
        self._pending.add(pending)
        self._desk.do(Consult(pending.ask, self._number, (*reserved, *pending.avoided)))

    def _insist(self, pending: Pending) -> bool:
        """Ask a rule once more, about all nodes, that wants none of those it was offered."""
        if not pending.avoided:
            return False
        pending.insisted = True
        self._consult(pending, self._queue.reserved_before(pending.ask))
        return True

    def heard(self, news: Proposed | ConsultFailed) -> None:
        """Take a rule's answer; one to an earlier consultation is stale."""
        pending = self._pending.get(news.request)
        if pending is None or pending.consultation != news.consultation:
            return
        if isinstance(news, Proposed):
            self._proposed(pending, news.value)
        elif not self._comes_back(pending, news.refusal):
            self._refuse(pending, news.refusal)

    def _comes_back(self, pending: Pending, refusal: Refusal) -> bool:
        """Have a lease in the queue pause whose rule did not get to answer; return whether it does.

        Its workload has nothing to do with that, and it has been granted once.
        """
        ask = pending.ask
        waiter = self._state.waiting.get(ask.id)
        lease = waiter.lease if waiter is not None else None
        if lease is None or refusal.code not in PASSING or lease.faults >= FAULTS_MAX:
            return False
        self._desk.record(ask.id, {"last": questions.refusal_object(refusal)})
        self._pending.settle(ask)
        self._queue.remove(ask)
        self._leases.pause(ask.id, FAULT_PAUSE_SECONDS * 2.0**lease.faults, lease.faults + 1)
        self.waking.wake()  # What was kept for it is for the others now.
        return True

    def _proposed(self, pending: Pending, value: Any) -> None:
        ask = pending.ask
        try:
            wishes = parse_proposal(value, ask.demand)
        except ProposalError as error:
            reason = f"The rule's answer is malformed: {error}."
            code = Code.POLICY_BAD_OUTPUT
            self._refuse(pending, Refusal(code, reason, error.field, error.expected))
            return
        if not wishes:
            self._declined(pending, value)
            return
        self._judged(pending, wishes, value)
        if ask.terms is not None and ask.id not in self._state.leases:
            self._turned_down += 1

    def _judged(self, pending: Pending, wishes: tuple[Wish, ...], value: Any) -> None:
        """Grant what a rule proposed, or ask it again, or say why not."""
        ask = pending.ask
        reserved = self._queue.reserved_before(ask)
        shut = (*reserved, *pending.avoided)
        verdict = verify(ask, wishes, self._state.fleet, self._state.clusters, shut)
        if isinstance(verdict, tuple) and self._touches(verdict, pending.avoided):
            self._insist(pending)
        elif isinstance(verdict, tuple) and not self._touches(verdict, reserved):
            self._accept(pending, verdict, value)
        elif isinstance(verdict, tuple):
            kept = Refusal(Code.CONFLICT, "The nodes it proposed are kept for the queue's head.")
            if reserved == pending.reserved:
                # The rule knew; asked again, it would say the same.
                self._wait_or_refuse(pending, kept, reserved, pending.gains)
            else:
                self._propose_again(pending, kept)
        elif isinstance(verdict, Unsound) and pending.layout == self._state.fleet.layout:
            self._refuse(pending, verdict.refusal)
        elif isinstance(verdict, Stale) and pending.version == self._state.fleet.version:
            # Nothing changed since the rule was asked: it proposed what it could see is taken.
            reason = f"The rule's proposal is not sound: {verdict.refusal.reason}"
            details = verdict.refusal.details
            self._refuse(
                pending, Refusal(Code.POLICY_UNSOUND, reason, "gpus", "free ones", details)
            )
        else:
            self._propose_again(pending, verdict.refusal)

    def _propose_again(self, pending: Pending, conflict: Refusal) -> None:
        """Ask the rule again: others were faster. The fleet it sees now is another one."""
        ask, reserved = pending.ask, self._queue.reserved_before(pending.ask)
        if ask.demand is not None and not self._judge.fits(ask.demand, ask.candidates, reserved):
            refusal = self._judge.refusal(ask.demand, ask.candidates, reserved)
            self._wait_or_refuse(pending, refusal, reserved, self._state.gains)
        elif ask.id in self._state.waiting or pending.consultations < CONSULTS_MAX:
            self._consult(pending, reserved)
        else:
            reason = f"Others were faster {CONSULTS_MAX} times in a row; try again."
            refusal = Refusal(Code.CONFLICT, reason, "", "", conflict.details)
            self._wait_or_refuse(pending, refusal, reserved, -1)  # It fits, so nothing stands.

    def _declined(self, pending: Pending, value: Any) -> None:
        """The rule returned a value that names no cluster: it is passed on and grants nothing."""
        ask = pending.ask
        if self._insist(pending):
            return
        if ask.terms is None:
            explain = ask.explain and ask.demand is not None
            self._answer(pending, Advice(value, self._reasons(pending) if explain else None))
            return
        if self._missed_something(pending):
            self._consult(pending, self._queue.reserved_before(ask))
            return
        details = {"data": value}
        if ask.demand is not None and not self._judge.fits(
            ask.demand, ask.candidates, pending.reserved
        ):
            refusal = self._judge.refusal(ask.demand, ask.candidates, pending.reserved)
        else:
            refusal = Refusal(
                Code.POLICY_DECLINED, "The rule proposed no placement.", "", "", details
            )
        self._wait_or_refuse(pending, refusal, pending.reserved, pending.gains)

    def _missed_something(self, pending: Pending) -> bool:
        """Return whether there may be room for a new ask that its rule did not see.

        Capacity came back while it thought; or its cell held something free of another proposal
        that came to nothing; or something is no longer kept for somebody else. Who waits already
        is woken by all of these.
        """
        ask = pending.ask
        if ask.id in self._state.waiting or pending.consultations >= CONSULTS_MAX:
            return False
        reserved = self._queue.reserved_before(ask)
        seen = pending.gains, pending.turned_down, pending.reserved
        if seen == (self._state.gains, self._turned_down, reserved):
            return False
        return ask.demand is None or self._judge.fits(ask.demand, ask.candidates, reserved)

    def _touches(self, placement: Placement, reserved: Nodes) -> bool:
        return bool(reserved) and any((s.cluster_id, s.node_id) in reserved for s in placement)

    def _accept(self, pending: Pending, placement: Placement, value: Any) -> None:
        ask = pending.ask
        if ask.terms is None or ask.dry_run:
            self._answer(pending, Advice(value, self._reasons(pending) if ask.explain else None))
            return
        self._grant(pending, placement, value)
        self.waking.wake()

    def _take_over(self, pending: Pending, reserved: Nodes) -> bool:
        """Grant an ask the warm lease that is like it, if there is one; its rule is not asked."""
        ask = pending.ask
        warm = self._warm.like(ask, reserved)
        if warm is not None:
            self._warm.take_over(warm, ask.id)
            self._grant(pending, warm.placement, None, warm)
        return warm is not None

    def _grant(
        self, pending: Pending, placement: Placement, value: Any = None, warm: Lease | None = None
    ) -> None:
        ask = pending.ask
        if ask.id in self._state.waiting:
            self._queue.remove(ask)
        lease = self._leases.grant(ask, placement, pending.since, warm)
        if warm is not None:
            self._desk.do(Look(lease))
        reasons = self._reasons(pending) if ask.explain else None
        self._answer(pending, LeaseNews(lease, value, reasons))
        if lease.provision is not None:
            self._desk.do(Start(lease))

    def _reasons(self, pending: Pending) -> dict[str, Any]:
        """Return why the answer is what it is, for `explain` and `why`."""
        ask = pending.ask
        reasons: dict[str, Any] = {
            "policy_rule_uri": ask.policy.uri,
            "consultations": pending.consultations,
            "waited_seconds": round(self._desk.now - pending.since, 6),
        }
        if ask.demand is not None and ask.explain:
            reasons |= self._judge.reasons(ask.demand, ask.candidates)
        return reasons

    def _wait_or_refuse(
        self, pending: Pending, refusal: Refusal, reserved: Nodes, gains: int
    ) -> None:
        """Say no, or not yet where the ask may wait: the "no" stands as of `gains`.

        What is kept warm gives way first: an ask that would not wait does so until it has ended.
        """
        ask, terms = pending.ask, pending.ask.terms
        waiter = self._state.waiting.get(ask.id)
        room = self.waking.room(ask, refusal, reserved)
        comes_back = waiter is not None and waiter.lease is not None
        patient = terms is not None and (terms.wait_seconds > 0 or comes_back or room is not None)
        if terms is None or ask.dry_run or not patient:
            self._refuse(pending, refusal)
            return
        many, size = len(self._state.waiting), self._state.waiting_bytes + ask.size
        if waiter is None and (many >= WAITING_MAX or size > ASKS_BYTES_MAX):
            reason = "Too many requests wait already, or too large ones; try again later."
            self._answer(pending, Refusal(Code.BUSY, reason))
            return
        if waiter is None:
            patience = terms.wait_seconds or ROOM_SECONDS_MAX
            self._desk.be(Queued(ask, self._desk.now, self._desk.now + patience))
            self._queue.add(ask)
            self._desk.record(ask.id, {"state": "waiting", **questions.refusal_object(refusal)})
        self._pending.settle(ask)
        self.listeners.setdefault(ask.id, []).extend(pending.to)
        self.waking.refuse_line(ask, reserved, gains, room)
        self.waking.wake()  # What is kept for this line may have moved, or grown.

    def _refuse(self, pending: Pending, refusal: Refusal) -> None:
        """End an ask with a "no" that waiting would not change."""
        waiter = self._state.waiting.get(pending.ask.id)
        if waiter is not None and waiter.lease is not None:
            if not self._insist(pending):
                self._pending.settle(pending.ask)
                self._leases.end(waiter.lease, f"{waiter.lease.reason}; then: {refusal.reason}")
            return
        waited = waiter is not None
        if waited:
            self._queue.remove(pending.ask)
            self._desk.be(Dequeued(pending.ask.id, self._desk.now, refusal))
        self._answer(pending, refusal)
        if waited:
            self.waking.wake()  # What was kept for it is for the others now.

    def _answer(self, pending: Pending, answer: Answer) -> None:
        """Answer everybody who waits for this ask, and remember why for `why`."""
        ask = pending.ask
        self._pending.settle(ask)
        record = {"tenant": ask.tenant, **self._reasons(pending)} | questions.outcome(answer)
        self._desk.record(ask.id, record)
        for to in (*pending.to, *self.listeners.pop(ask.id, ())):
            self._desk.tell(to, answer)

    def leave(self, ask: Ask) -> None:
        """Take a lease that waits for another place out of the queue."""
        pending = self._pending.get(ask.id)
        if pending is not None:
            self._desk.do(Forget(ask.id, pending.consultation))
            self._pending.settle(ask)
        self.listeners.pop(ask.id, None)
        if not self._state.waiting[ask.id].pauses:
            self._queue.remove(ask)

    def cancel(self, to: Address, name: RequestId, tenant: Tenant) -> None:
        """Give up an undecided ask, named by its id or by its idempotency key."""
        named = self._state.keys.get((tenant, name)) or self._pending.named(tenant, name)
        request = named or name
        waiter, pending = self._state.waiting.get(request), self._pending.get(request)
        ask = waiter.ask if waiter else pending.ask if pending else None
        if ask is None or ask.tenant != tenant:
            reason = f"No request {name} is waiting."
            expected = "a waiting request"
            self._desk.tell(to, Refusal(Code.UNKNOWN_REQUEST, reason, "request", expected))
            return
        row = questions.waiter_row(waiter) if waiter else {"request": request}
        if waiter is not None and waiter.lease is not None:
            self._leases.end(waiter.lease, "cancelled")
            ended = replace(waiter, lease=self._state.lease(request))
            row = questions.waiter_row(ended)
        else:
            self.give_up(request, ask, Refusal(Code.CANCELLED, "The request was cancelled."))
        self._desk.tell(to, Told({"state": "cancelled", **row}))

    def give_up(self, request: RequestId, ask: Ask, refusal: Refusal) -> None:
        """End an ask that waits, or that its rule is being consulted about."""
        pending = self._pending.get(request) or Pending(ask, [], self._state.waiting[request].at)
        if pending.consultation:
            self._desk.do(Forget(request, pending.consultation))
        self._refuse(pending, refusal)

    def session_lost(self, session: str) -> None:
        """Drop the asks that nobody else waits for, but for those with a place in the queue."""
        for addresses in self.listeners.values():
            addresses[:] = [to for to in addresses if to.session != session]
        for pending in self._pending.all():
            request = pending.ask.id
            pending.to[:] = [to for to in pending.to if to.session != session]
            if not pending.to and request not in self._state.waiting:
                self._desk.do(Forget(request, pending.consultation))
                self._pending.settle(pending.ask)

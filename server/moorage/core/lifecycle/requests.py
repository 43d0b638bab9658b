"""Handles requests from their arrival to a lease, a refusal, or a place in the queue.

Policies only propose. A proposal is verified against the present state; then it is granted, the
policy is consulted again, or the request is queued or refused. The allocator is the only caller.
"""

from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from moorage.core.fit.feasibility import Feasibility
from moorage.core.fit.parts import with_reasons
from moorage.core.fit.verification import Stale, Unsound, verify
from moorage.core.lifecycle.leases import LeaseLifecycle
from moorage.core.lifecycle.warm_reuse import ROOM_SECONDS_MAX, WarmReuse
from moorage.core.queue import alternatives
from moorage.core.queue.exclusions import NONE, ExclusionRules, Exclusions, shortest_ttl
from moorage.core.queue.idempotency import gist, mismatch
from moorage.core.queue.open_requests import ASKS_BYTES_MAX, PENDING_MAX, OpenRequests, Pending
from moorage.core.queue.quotas import Quotas
from moorage.core.queue.ranking import FILTERS_OF_TENANT_MAX
from moorage.core.reports import explain
from moorage.core.state import refusals
from moorage.core.state.facts import Dequeued, Queued, Refusal
from moorage.core.state.reserved import touches
from moorage.core.turns.effects import (
    Address,
    Advice,
    Consult,
    Forget,
    Information,
    LeaseNews,
    Look,
    Response,
    Start,
)
from moorage.core.turns.events import ConsultFailed, Proposed
from moorage.core.turns.turn import TurnWriter
from moorage.model import Ask, Code, Lease, Nodes, Placement, RequestId, Tenant
from moorage.policy import ProposalError, ProposedShare, parse_proposal
from moorage.records.json_values import JsonObject, JsonValue

WAITING_MAX: Final = 100_000
"""Maximum waiters in the queue; one more request is refused as `busy`."""
CANDIDATES_KEPT_MAX: Final = 1_000
"""Maximum candidate clusters stored with a decision; with more, `why` lists no nodes."""
CONSULTS_MAX: Final = 8
"""Consultations for one request before it is refused as `conflict`, or queued if it may wait. A
waiter's policy is consulted until the deadline, as each conflict means that another request got a
grant."""
FAULTS_MAX: Final = 6
"""Consultations in a row that may fail for a queued lease through no fault of the lease, before the
lease ends. With the pauses between these consultations, that takes a minute."""
FAULT_PAUSE_SECONDS: Final = 1.0
"""Seconds of a queued lease's first pause after a fault; each later pause is twice as long. The sum
of the pauses exceeds the time for which a circuit breaker is open."""
_WITH_REASONS: Final = (LeaseNews, Advice)


class RequestLifecycle:
    """Handles requests until they get a lease, a refusal, or a place in the queue.

    Args:
        writer: Writer of the turn's facts and effects.
        feasibility: Decides which demands fit.
        requests: The open requests.
        leases: Grants and ends leases.
        warm: Finds warm leases that requests can take over.
        quotas: Refuses requests that exceed a quota.
        exclusions: Computes what each request may not use.
    """

    def __init__(  # Each argument is another part of the core.
        self,
        writer: TurnWriter,
        feasibility: Feasibility,
        requests: OpenRequests,
        leases: LeaseLifecycle,
        warm: WarmReuse,
        quotas: Quotas,
        exclusions: ExclusionRules,
    ) -> None:
        self._turn = writer
        self._state = writer.state
        self._feasibility = feasibility
        self._requests = requests
        self._pending = requests.undecided
        self._queue = requests.queue
        self._leases = leases
        self._warm = warm
        self._quotas = quotas
        self.exclusions = exclusions
        self._number = 0
        self._turned_down = 0

    def take(self, to: Address, ask: Ask) -> None:
        """Receive a request: answer it, or consult its policy."""
        if not ask.dry_run and self._answer_repeat(to, ask):
            return
        if (refusal := self._immediate_refusal(ask)) is not None:
            self._turn.respond(to, refusal)
            return
        self._requests.listen(ask.id, to)
        reserved = self._queue.nodes_reserved_ahead(ask)
        pending = Pending(ask, self._turn.now)
        refused: list[tuple[Ask, Refusal]] = []
        for pending.ask in alternatives.each(ask):
            if self.take_over(pending, reserved):  # A warm lease is in the tenant's quota already.
                self._turn.wakes = True
                return
            over = self._quotas.refusal(pending.ask)
            pending.over = over or pending.over
            found = self.exclusions.find(pending.ask)
            if over is None and self._fits(pending.ask, found):
                self.consult(pending, found)
                return
            refused.append((pending.ask, over or self.exclusions.refusal(pending.ask, found)))
        # The request waits for the last alternative that can ever fit.
        pending.ask, refusal = alternatives.waits_for(refused)
        if ask.alternatives:
            found = self.exclusions.find(pending.ask)
        if refusal.code is Code.NEVER_FITS:
            self._answer(pending, refusal)
        elif refusal.code is Code.QUOTA_EXCEEDED:
            self._beyond_quota(pending, refusal, found)
        else:
            self._wait_or_refuse(pending, refusal, found, self._state.gains)

    def _fits(self, ask: Ask, exclusions: Exclusions) -> bool:
        """Return whether a request fits; True if only its policy knows the demand."""
        demand = ask.demand
        return demand is None or self._feasibility.fits(demand, ask.candidates, exclusions.nodes)

    def settle(
        self, pending: Pending, by_waiters: Nodes, asks: Iterable[Ask] | None = None
    ) -> Exclusions | None:
        """Choose the first alternative that fits now; return its exclusions, or None: none fits.

        Args:
            pending: The request.
            by_waiters: Nodes reserved for waiters ahead of the request.
            asks: The alternatives to try; None: all.
        """
        for ask in alternatives.each(pending.ask) if asks is None else asks:
            over = self._quotas.refusal(ask) if ask.alternatives else None
            pending.over = over or pending.over
            found = self.exclusions.find(ask, by_waiters)
            if over is None and self._fits(ask, found):
                pending.ask = ask
                return found
        return None

    def _tries_next(self, pending: Pending, why: Refusal, exclusions: Exclusions) -> bool:
        """Consult the policy about another alternative that fits; return whether there is one."""
        if not pending.ask.alternatives:
            return False
        # An alternative may fit by capacity that was freed during the consultation.
        asks = None if why.code is Code.NO_CAPACITY else alternatives.following(pending.ask)
        found = self.settle(pending, exclusions.by_waiters_only, asks)
        if found is None:
            return False
        pending.insisted = False
        self.consult(pending, found)
        return True

    def _beyond_quota(self, pending: Pending, over: Refusal, exclusions: Exclusions) -> None:
        """Refuse a request that its quota can never allow; else queue it if it may wait."""
        if not over.details["never"]:
            self._wait_or_refuse(pending, over, exclusions, self._state.gains)
        elif not self._tries_next(pending, over, exclusions):
            self._refuse(pending, over, exclusions)

    def make_quota_room(self, ask: Ask) -> None:
        """End warm leases for a waiter that only its quota blocks."""
        over = None if ask.alternatives else self._quotas.refusal(ask)
        if over is not None:
            self._warm.room_after(over, ask, ())

    def _immediate_refusal(self, ask: Ask) -> Refusal | None:
        """Return why a request is refused on arrival, or None."""
        if self._requests.find(ask.id) or self._state.lease(ask.id):
            return refusals.duplicate_id(ask.id)
        if not self._pending.has_capacity(ask):
            return refusals.too_many_undecided(PENDING_MAX, ASKS_BYTES_MAX)
        return None if self._state.clusters else refusals.no_cluster()

    def _answer_repeat(self, to: Address, ask: Ask) -> bool:
        """Answer a repeated request like the first one; return False if it is not a repetition."""
        key = ask.terms.idempotency_key if ask.terms else ""
        first = self._requests.first_with(ask.tenant, key) if key else None
        if first is None:
            return False
        lease, known = self._state.lease(first), self._requests.find(first)
        earlier = gist(known) if known else self._turn.decisions.get(first, {}).get("gist")
        refusal = mismatch(ask, first, earlier, lease)
        if refusal is not None:
            self._turn.respond(to, refusal)
        elif lease is not None:
            self._turn.respond(to, LeaseNews(lease))
        else:
            self._requests.listen(first, to)
        return True

    def consult(self, pending: Pending, exclusions: Exclusions) -> None:
        """Consult the policy of a request, with its exclusions."""
        self._number += 1
        pending.consultation = self._number
        pending.consultations += 1
        pending.version, pending.layout = self._state.fleet.version, self._state.fleet.layout
        pending.gains, pending.turned_down = self._state.gains, self._turned_down
        pending.waits = pending.ask.id in self._state.waiting
        pending.exclusions, nodes = exclusions, exclusions.nodes
        pending.avoided = () if pending.insisted else self._feasibility.avoided(pending.ask, nodes)
        self._pending.add(pending)
        shut = (*nodes, *pending.avoided)
        self._turn.emit(Consult(pending.ask, self._number, shut, exclusions.parts))

    def _insist(self, pending: Pending, exclusions: Exclusions) -> bool:
        """Consult a policy again with all nodes, after it declined the offered ones."""
        if not pending.avoided:
            return False
        pending.insisted = True
        self.consult(pending, exclusions)
        return True

    def take_answer(self, news: Proposed | ConsultFailed) -> None:
        """Handle a policy's answer; ignore it if it answers an earlier consultation."""
        pending = self._pending.get(news.request)
        if pending is None or pending.consultation != news.consultation:
            return
        found = self.exclusions.find(pending.ask)
        if isinstance(news, Proposed):
            self._take_proposal(pending, news.value, found)
        elif not self._comes_back(pending, news.refusal):
            self._refuse(pending, news.refusal, found)

    def _comes_back(self, pending: Pending, refusal: Refusal) -> bool:
        """Pause a queued lease whose policy could not answer; return whether it pauses.

        The lease is not at fault, and was granted before.
        """
        ask = pending.ask
        waiter = self._state.waiting.get(ask.id)
        lease = waiter.lease if waiter is not None else None
        if lease is None or refusal.code not in refusals.PASSING or lease.faults >= FAULTS_MAX:
            return False
        self._turn.explain(ask, {"last": explain.refusal_object(refusal)})
        self._pending.settle(ask)
        self._queue.remove(ask)
        self._leases.pause(ask.id, FAULT_PAUSE_SECONDS * 2.0**lease.faults, lease.faults + 1)
        self._turn.wakes = True  # What was reserved for it is for the others now.
        return True

    def _take_proposal(self, pending: Pending, value: JsonValue, exclusions: Exclusions) -> None:
        ask = pending.ask
        value = with_reasons(ask, value, self._state.fleet, self._state.clusters)
        try:
            wishes = parse_proposal(value, ask.demand)
        except ProposalError as error:
            self._refuse(pending, refusals.malformed(error), exclusions)
            return
        if not wishes:
            self._pass_on_value(pending, value, exclusions)
            return
        self._judge(pending, wishes, value, exclusions)
        if ask.terms is not None and ask.id not in self._state.leases:
            self._turned_down += 1

    def _judge(
        self,
        pending: Pending,
        wishes: tuple[ProposedShare, ...],
        value: JsonValue,
        exclusions: Exclusions,
    ) -> None:
        """Grant the policy's proposal, consult the policy again, or refuse with the reason."""
        ask = pending.ask
        nodes = exclusions.nodes
        fleet = self._feasibility.beside(exclusions.parts)
        verdict = verify(ask, wishes, fleet, self._state.clusters, (*nodes, *pending.avoided))
        seen = (self._state.fleet.version, exclusions.parts)
        if isinstance(verdict, tuple) and touches(verdict, pending.avoided):
            self._insist(pending, exclusions)
        elif isinstance(verdict, tuple) and not touches(verdict, nodes):
            self._accept(pending, verdict, value)
        elif isinstance(verdict, tuple):
            refusal = refusals.reserved_for_head()
            if nodes == pending.exclusions.nodes:
                # The policy knew these exclusions, and would answer the same again.
                self._wait_or_refuse(pending, refusal, exclusions, pending.gains)
            else:
                self._propose_again(pending, refusal, exclusions)
        elif isinstance(verdict, Unsound) and pending.layout == self._state.fleet.layout:
            self._refuse(pending, verdict.refusal, exclusions)
        elif isinstance(verdict, Stale) and seen == (pending.version, pending.exclusions.parts):
            # Nothing has changed since: the policy proposed devices that it saw as taken.
            self._refuse(pending, refusals.devices_in_use(verdict.refusal), exclusions)
        else:
            self._propose_again(pending, verdict.refusal, exclusions)

    def _propose_again(self, pending: Pending, conflict: Refusal, exclusions: Exclusions) -> None:
        """Consult the policy again with the present fleet, since the proposed devices are taken."""
        ask = pending.ask
        if not self._fits(ask, exclusions):
            refusal = self.exclusions.refusal(ask, exclusions)
            self._wait_or_refuse(pending, refusal, exclusions, self._state.gains)
        elif ask.id in self._state.waiting or pending.consultations < CONSULTS_MAX:
            self.consult(pending, exclusions)
        else:
            refusal = refusals.others_were_faster(CONSULTS_MAX, conflict.details)
            self._wait_or_refuse(pending, refusal, exclusions, -1)  # It fits: no refusal is valid.

    def _pass_on_value(self, pending: Pending, value: JsonValue, exclusions: Exclusions) -> None:
        """Return a value that names no cluster to the client; nothing is granted."""
        ask = pending.ask
        if self._insist(pending, exclusions):
            return
        if ask.terms is None:
            explain = ask.explain and ask.demand is not None
            self._answer(pending, Advice(value, self._reasons(pending) if explain else None))
            return
        if self._may_have_missed(pending, exclusions):
            self.consult(pending, exclusions)
            return
        seen = pending.exclusions
        if not self._fits(ask, seen):
            refusal = self.exclusions.refusal(ask, seen)
        else:
            refusal = refusals.declined(value)
        self._wait_or_refuse(pending, refusal, seen, pending.gains)

    def _may_have_missed(self, pending: Pending, exclusions: Exclusions) -> bool:
        """Return whether a request may fit on capacity that its policy did not see.

        During the consultation, capacity was freed, a rejected proposal of the policy gave back its
        capacity, or a reservation for another request ended. False for a waiter with a queue time:
        freed capacity wakes it.
        """
        ask = pending.ask
        waits = ask.id in self._state.waiting and self._is_patient(ask)
        if waits or pending.consultations >= CONSULTS_MAX:
            return False
        then = pending.exclusions
        seen = pending.gains, pending.turned_down, then.nodes, then.own
        if seen == (self._state.gains, self._turned_down, exclusions.nodes, exclusions.own):
            return False
        return self._fits(ask, exclusions)

    def _accept(self, pending: Pending, placement: Placement, value: JsonValue) -> None:
        ask = pending.ask
        if ask.terms is None or ask.dry_run:
            self._answer(pending, Advice(value, self._reasons(pending) if ask.explain else None))
            return
        over = self._quotas.refusal(ask, placement)
        if over is not None:
            self._beyond_quota(pending, over, pending.exclusions)
            return
        self._grant(pending, placement, value)
        self._turn.wakes = True

    def take_over(self, pending: Pending, reserved: Nodes) -> bool:
        """Grant a request a matching warm lease, if there is one, without its policy."""
        ask = pending.ask
        warm = self._warm.like(ask, reserved)
        if warm is not None and self._quotas.refusal(ask, warm.placement, warm) is not None:
            return False
        if warm is not None:
            self._warm.take_over(warm, ask.id)
            self._grant(pending, warm.placement, None, warm)
        return warm is not None

    def _grant(
        self,
        pending: Pending,
        placement: Placement,
        value: JsonValue = None,
        warm: Lease | None = None,
    ) -> None:
        ask = pending.ask
        if ask.id in self._state.waiting:
            self._queue.remove(ask)
        lease = self._leases.grant(ask, placement, pending.since, warm)
        if warm is not None:
            self._turn.emit(Look(lease))
        reasons = self._reasons(pending) if ask.explain else None
        self._answer(pending, LeaseNews(lease, value, reasons, ttl_max_seconds=shortest_ttl(lease)))
        if lease.provision is not None:
            self._turn.emit(Start(lease))

    def _reasons(self, pending: Pending) -> JsonObject:
        """Return the reasons for an answer, for `explain` and `why`."""
        ask = pending.ask
        waited = self._turn.now - pending.since
        reasons: JsonObject = {
            "policy_rule_uri": ask.policy.uri,
            "consultations": pending.consultations,
            "waited_seconds": round(1e6 * waited) / 1e6,  # Quicker than `round(waited, 6)`.
        }
        if ask.demand is not None and ask.explain:
            reasons |= self._feasibility.reasons(ask.demand, ask.candidates)
        return reasons

    def _wait_or_refuse(
        self, pending: Pending, refusal: Refusal, exclusions: Exclusions, gains: int
    ) -> None:
        """Refuse a request, or queue it if it may wait.

        Warm leases are evicted first; a request without a queue time waits until they have ended.
        The refusal holds while `State.gains` is `gains`.
        """
        if self._tries_next(pending, refusal, exclusions):
            return
        ask, terms = pending.ask, pending.ask.terms
        waiter = self._state.waiting.get(ask.id)
        reserved = exclusions.by_waiters_only
        capacity = self._warm.room_after(refusal, ask, reserved)
        comes_back = waiter is not None and waiter.lease is not None
        patient = terms is not None and (
            terms.wait_seconds > 0 or comes_back or capacity is not None
        )
        if terms is None or ask.dry_run or not patient:
            self._refuse(pending, refusal, exclusions)
            return
        loads = self._state.waiting_loads
        if waiter is None and not loads.has_room(ask, WAITING_MAX, ASKS_BYTES_MAX):
            self._answer(pending, refusals.too_many_waiting(WAITING_MAX, ASKS_BYTES_MAX))
            return
        if waiter is None and not self._queue.has_room(ask):
            self._answer(pending, refusals.too_many_choices(FILTERS_OF_TENANT_MAX))
            return
        if waiter is None:
            patience = terms.wait_seconds or ROOM_SECONDS_MAX
            self._turn.record(Queued(ask, self._turn.now, self._turn.now + patience))
            self._queue.add(ask)
        self._turn.explain(ask, {"state": "waiting", **explain.refusal_object(refusal)})
        self._pending.settle(ask)
        excluded = (*reserved, *pending.exclusions.own)
        if ask.alternatives and pending.over is not None:
            # The request also waits until its quota has room.
            self._queue.declined(ask, pending.over, gains, excluded)
        elif ask.demand is not None and refusal.code is Code.NO_CAPACITY:
            # Otherwise the result does not hold for the whole class: the queue checks each waiter.
            if not exclusions.by_others:
                self._queue.does_not_fit(ask, gains, reserved)
        elif refusal.code is not Code.QUOTA_EXCEEDED or not self._queue.is_over_quota(ask):
            self._queue.declined(ask, refusal, gains, excluded)
        self._turn.wakes = True  # The nodes reserved for this line may have changed.

    def nodes_to_reserve(self, ask: Ask, reserved: Nodes, capacity: Nodes | None) -> Nodes:
        """Return the nodes to reserve for a line's first waiter, even during its consultation.

        () for a request without a queue time: it waits only for evicted leases, which end soon.
        """
        if ask.demand is None or reserved or not self._is_patient(ask):
            return ()
        own = self.exclusions.find_on_empty(ask).by_others
        return capacity or self._feasibility.reservation(ask.demand, ask.candidates, None, own)

    def _is_patient(self, ask: Ask) -> bool:
        comes_back = self._state.waiting[ask.id].lease is not None
        return comes_back or (ask.terms is not None and ask.terms.wait_seconds > 0)

    def end_wait(self, request: RequestId) -> None:
        """Refuse a request whose time in the queue has expired, with the current reason."""
        waiter = self._state.waiting[request]
        ask, last = waiter.ask, self.in_the_way(waiter.ask)
        details = {} if last is None else {"last": explain.refusal_object(last)}
        waited, patient = self._turn.now - waiter.at, self._is_patient(ask)
        self._give_up(ask, refusals.waited(waited, last, details, patient=patient))

    def refuse_hopeless(self, pending: Pending) -> bool:
        """Refuse a waiter without a queue time: others took the room that was made for it.

        Returns:
            Whether the waiter was refused; False if it may wait, or waits for its quota.
        """
        if pending.over is not None or self._is_patient(pending.ask):
            return False
        self.end_wait(pending.ask.id)
        return True

    def in_the_way(self, ask: Ask) -> Refusal | None:
        """Return why a waiter waits now; None if only its policy knows."""
        if last := self._queue.last_decline(ask) or self._quotas.refusal(ask):
            return last
        found = self.exclusions.find(ask)
        return None if self._fits(ask, found) else self.exclusions.refusal(ask, found)

    def _refuse(self, pending: Pending, refusal: Refusal, exclusions: Exclusions) -> None:
        """Refuse a request for a reason that waiting would not change."""
        waiter = self._state.waiting.get(pending.ask.id)
        if waiter is not None and waiter.lease is not None:
            # A quota or a policy's failure has nothing to do with the avoided nodes.
            elsewhere = refusal.code in {Code.QUOTA_EXCEEDED, *refusals.PASSING}
            if elsewhere or not self._insist(pending, exclusions):
                self._pending.settle(pending.ask)
                self._leases.end(waiter.lease, f"{waiter.lease.reason}; then: {refusal.reason}")
            return
        waited = waiter is not None
        if waited:
            self._queue.remove(pending.ask)
            self._turn.record(Dequeued(pending.ask.id, self._turn.now, refusal))
        self._answer(pending, refusal)
        if waited:
            self._turn.wakes = True  # What was reserved for it is for the others now.

    def _answer(self, pending: Pending, answer: Response) -> None:
        """Answer all sessions that wait for this request, and store the reasons for `why`."""
        ask = pending.ask
        listeners = self._requests.settle(ask)
        reasons = answer.reasons if isinstance(answer, _WITH_REASONS) else None
        record = {"tenant": ask.tenant, **(reasons or self._reasons(pending))}
        if isinstance(answer, LeaseNews):
            record["granted"] = answer.lease  # `why` makes the text of the reason.
            if ask.terms and ask.terms.idempotency_key:
                record["gist"] = gist(ask)
        else:
            record |= explain.outcome(answer)
        if len(ask.candidates or ()) <= CANDIDATES_KEPT_MAX:
            record["asked"] = ask.demand, ask.candidates
        self._turn.explain(ask, record)
        for to in listeners:
            self._turn.respond(to, answer)

    def cancel(self, to: Address, name: RequestId, tenant: Tenant) -> None:
        """Cancel a request that has no answer yet, by its id or its idempotency key."""
        request = self._requests.first_with(tenant, name) or name
        waiter, ask = self._state.waiting.get(request), self._requests.find(request)
        if ask is None or ask.tenant != tenant:
            self._turn.respond(to, refusals.not_waiting(name))
            return
        row = explain.waiter_row(waiter) if waiter else {"request": request}
        if waiter is not None and waiter.lease is not None:
            self._leases.end(waiter.lease, "cancelled")
            ended = replace(waiter, lease=self._state.lease(request))
            row = explain.waiter_row(ended)
        else:
            self._give_up(ask, refusals.cancelled())
        self._turn.respond(to, Information({"state": "cancelled", **row}))

    def _give_up(self, ask: Ask, refusal: Refusal) -> None:
        """Refuse a request that waits or whose policy is being consulted."""
        pending = self._pending.get(ask.id) or Pending(ask, self._state.waiting[ask.id].at)
        if pending.consultation:
            self._turn.emit(Forget(ask.id, pending.consultation))
        self._refuse(pending, refusal, NONE)

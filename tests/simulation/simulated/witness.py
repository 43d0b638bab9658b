"""Watches a world, and compares each step of the core with the laws."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec
from msgspec.structs import replace

from moorage.core.allocator import Allocator
from moorage.core.lifecycle.requests import CONSULTS_MAX, FAULTS_MAX
from moorage.core.lifecycle.warm_reuse import EVICTED
from moorage.core.queue import alternatives
from moorage.core.queue.order import CONSULTED_MAX, WaitingQueue
from moorage.core.state.checkpoint import condense
from moorage.core.state.facts import (
    Ended,
    Ending,
    Fact,
    Granted,
    Paused,
    Preempted,
    Refusal,
    Renewed,
    Requeued,
)
from moorage.core.state.invariants import check
from moorage.core.state.refusals import PASSING
from moorage.core.state.state import State, apply
from moorage.core.state.waiters import WaiterLine
from moorage.core.turns.effects import (
    Address,
    Advice,
    Consult,
    Forget,
    Information,
    KeepWarm,
    LeaseNews,
    Recall,
    Respond,
    Start,
    Stop,
)
from moorage.core.turns.events import (
    Asked,
    ClockSet,
    ConsultFailed,
    Event,
    Inquired,
    Proposed,
    ReleaseAsked,
    RenewAsked,
    Restarted,
    SessionLost,
    Stalled,
    Tick,
    WorkloadFailed,
    WorkloadStopped,
)
from moorage.core.turns.turn import Turn
from moorage.model import Ask, Code, Demand, Lease, Nodes
from simulated import agreed
from simulated.demands import holds, needs
from simulated.laws import Model, law
from simulated.policies import hidden_demand

if TYPE_CHECKING:
    from collections.abc import Iterable

    from simulated.world import World

INSTANT = 0.001
"""Least number of seconds between two different deadlines."""


class Witness:
    """Sees every event, turn, delivery and crash; raises `LawBroken` at the first violation."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.model = Model(pause_seconds=world.pause_seconds)
        self.asks: dict[str, Ask] = {}
        self.messages: dict[Address, Event] = {}
        self.unanswered: dict[Address, Event] = {}
        self.answered_to: set[Address] = set()
        self.gone: set[str] = set()
        self.refused: set[str] = set()
        self.known: dict[str, Lease] = {}
        self.let_go: set[tuple[str, int]] = set()
        self.released: dict[str, Lease] = {}
        self.stopped: set[tuple[str, int]] = set()
        self.reserved: tuple[Any, int, str] = ((), 0, "")
        self.head_nodes = set[tuple[str, str]]()
        """Nodes reserved for the head during the whole turn, in which the head may change."""
        self.declined: set[str] = set()
        self.due: dict[str, float] = {}
        self.noticed: dict[str, float] = {}
        self.granted: dict[tuple[str, int], Lease] = {}
        self.requeued: set[str] = set()
        self.over: set[str] = set()
        self.scanned = 0
        """Number of facts in the ledger that `_scan` has recorded."""
        self.consultations = Counter[str]()
        self.turns = 0

    def follow(self, queue: WaitingQueue) -> None:
        """Watch which nodes a new queue reserves, and for which waiter."""
        reserve = queue.reserve

        def watch_head(head: WaiterLine | None, nodes: Nodes) -> None:
            self.head_nodes &= {*nodes}
            reserve(head, nodes)

        queue.reserve = watch_head  # type: ignore[method-assign]  # Callers see no difference.

    # Steps ---------------------------------------------------------------------------------

    def said(self, to: Address, event: Event) -> None:
        self.messages[to] = self.unanswered[to] = event
        if isinstance(event, Asked):
            self.asks.setdefault(event.ask.id, event.ask)

    def lost(self, session: str) -> None:
        self.gone.add(session)
        self.unanswered = {to: e for to, e in self.unanswered.items() if to.session != session}

    def before(self, event: Event) -> None:
        if isinstance(event, WorkloadFailed | WorkloadStopped):
            self.let_go.add((event.lease, event.fencing))
        queue = self.world.allocator.requests.queue
        self.reserved, self.head_nodes = ((), 0, ""), {*queue.reservation}
        self.declined = self._declined_waiters()
        self.model.disturbed = isinstance(event, Restarted | Stalled | ClockSet)
        if self.model.disturbed:
            self.due = {name: waiter.deadline for name, waiter in self.model.waiting.items()}
            self.due |= self.model.expires
            self.noticed = {name: each.until for name, each in self.model.notices.items()}
        if queue.head is not None:
            first = next(iter(queue.head.waiters))
            self.reserved = (queue.reservation, queue.head.of.priority, first)

    def after(self, event: Event, turn: Turn) -> None:
        world, model = self.world, self.model
        waited, noticed_for = set(model.waiting), set[str]()
        self.declined |= self._declined_waiters()
        for number, fact in enumerate(turn.facts):
            if isinstance(fact, Granted):
                law(fact.lease.id not in self.refused, "no refused request is granted", fact)
                self._in_turn(fact.lease, event)
                self._keeps_quota(fact.lease, event)
                self._overtaking(fact, event)
            if isinstance(fact, Ended | Requeued) and fact.lease in model.leases:
                self._check_free(fact, event, turn.facts[number + 1 : number + 2])
            if isinstance(fact, Requeued):
                pauses = any(isinstance(after, Paused) for after in turn.facts[number + 1 :])
                law(
                    pauses == (world.pause_seconds > 0),
                    "a requeued lease pauses exactly if pauses are configured",
                    fact,
                )
            if isinstance(fact, Ended) and isinstance(event, ConsultFailed):
                self._blameless(fact, event)
            if self._is_new_notice(fact) and fact.by not in noticed_for:
                noticed_for.add(fact.by)
                facts = turn.facts[number:]
                self._not_in_vain([x for x in facts if self._is_new_notice(x) and x.by == fact.by])
            if isinstance(fact, Ending | Ended) and fact.reason.startswith("preempted"):
                self._helps(fact, noticed_for)
            model.learn(fact, self.asks, world.now)
            if isinstance(fact, Renewed) and fact.lease in model.leases:
                graced = isinstance(event, Restarted | Stalled)
                in_time = fact.expires_at <= model.leaves_by(model.leases[fact.lease])
                law(in_time or graced, "only grace renews leases past a drain or reservation", fact)
        for effect in turn.effects:
            if isinstance(effect, Respond | Recall):
                self._answer(effect, event)
                self._gave_way(effect, waited)
            if isinstance(effect, Consult):
                self.consultations[effect.ask.id] += 1
            if isinstance(effect, Consult) and len(turn.facts) < 2:  # The turn's state is final.
                self._check_consultation(effect)
                self._whole_first(effect)
            if isinstance(effect, Forget) and isinstance(event, SessionLost):
                stays = effect.request not in model.waiting
                law(stays, "no waiter loses its consultation when a session ends", event, effect)
        if turn.facts:
            model.check_names()
        state = world.allocator.state
        law(state.leases.keys() == model.leases.keys(), "the state has the leases of the facts")
        law(state.waiting.keys() == model.waiting.keys(), "the state has the waiters of the facts")
        in_line = {name for line in self._lines() for name in line.waiters}
        ready = model.waiting.keys() - model.paused.keys()
        law(in_line == ready, "the queue holds exactly the waiters without a pause", in_line, ready)
        due, true_due = world.allocator.next_deadline(), model.next_deadline()
        law(due == true_due, "the allocator's next deadline is that of the model", due, true_due)
        if isinstance(event, Restarted):
            orders = {e.lease.id for e in turn.effects if isinstance(e, Start | Stop | KeepWarm)}
            engaged = {name for name, lease in model.leases.items() if lease.provision}
            over = {fact.lease for fact in turn.facts if isinstance(fact, Ended)}  # Taken over.
            law(
                orders - over == engaged,
                "after a restart, exactly the leases with workloads get orders",
                orders,
                engaged,
            )
            self._check_grace(inf, event.grace_seconds)
        if isinstance(event, Stalled):
            self._check_grace(event.seconds, event.grace_seconds)
        if isinstance(event, ClockSet):
            expires = {name: lease.expires_at for name, lease in state.leases.items()}
            same = {name: self.due[name] + event.seconds for name in expires}
            law(expires == same, "a clock change moves each lease's end equally", expires, same)
        if isinstance(event, Tick):
            over = true_due is None or true_due > world.now
            law(over, "after a tick, no deadline is due", true_due, world.now)
        self.turns += 1
        if self.turns % 16 == 0:
            check(state)
            self._check_bounds()

    def _declined_waiters(self) -> set[str]:
        """Return waiters that are skipped since their policy declines all free nodes."""
        return {name for line in self._lines() if line.declined for name in line.waiters}

    def _lines(self) -> Iterable[WaiterLine]:
        """Return all lines of waiters, unsorted: sorting would take longer than the check."""
        return self.world.allocator.requests.queue._lines.values()

    def _overtaking(self, fact: Granted, event: Event) -> None:
        """Check that each grant that overtakes waiters names the oldest of these waiters."""
        model, lease = self.model, fact.lease
        before = model.waiting.get(lease.id)
        since = before.at if before is not None else lease.asked_at
        behind = [
            (waiter.at, name)
            for name, waiter in model.waiting.items()
            if name not in {lease.id, *model.paused}
            if waiter.at < since and waiter.ask.priority >= lease.terms.priority
            if model.overtaken[name] < self.world.overtaken_max
        ]
        if fact.overtakes is not None:
            counted = [at for at, name in behind if name == fact.overtakes]
            law(bool(counted), "an overtaking counts only for an overtaken waiter", fact, behind)
            behind = [(at, name) for at, name in behind if at < counted[0]]
        # A waiter whose policy has just declined may be overtaken, even if it is consulted again.
        said = event.request if isinstance(event, Proposed | ConsultFailed) else ""
        for _, name in behind:
            ask = model.waiting[name].ask
            if name == said or name in self.declined or ask.demand is None or ask.alternatives:
                continue
            shared = [None] if lease.tenant == ask.tenant else []
            shared += [ask.project] if shared and lease.terms.project == ask.project else []
            short = any(model.short(ask.tenant, each, needs(ask.demand)) for each in shared)
            there = model.could_be(lease, ask.demand, ask.candidates) and not self._beyond(ask)
            law(
                not short and not there,
                "each overtaking of a waiter that the lease may delay is counted",
                fact,
                name,
            )

    def _overdue(self, name: str) -> bool:
        return self.model.overtaken[name] >= self.world.overtaken_max

    def _keeps_quota(self, lease: Lease, event: Event) -> None:
        """An overtaken waiter gets its quota when a lease of its own account ends."""
        said = event.request if isinstance(event, Proposed | ConsultFailed) else ""
        for project in (None, lease.terms.project):
            first, *_ = [*self._overdue_on(lease.tenant, project), ""]
            if first in {"", said, *self.declined} or self._is_like(self.asks[lease.id], first):
                continue
            ask = self.model.waiting[first].ask
            if lease.terms.priority <= ask.priority:
                both = _sum(holds(lease.placement), needs(ask.demand))
                short = self.model.short(lease.tenant, project, both)
                law(
                    not short,
                    "no grant takes quota reserved for a waiter overtaken too often",
                    lease,
                    first,
                )

    def _overdue_on(self, tenant: str, project: str | None) -> list[str]:
        """Return the waiters for which an account's quota may be reserved, the first one first."""
        waiting = self.model.waiting
        names = [
            name
            for name, waiter in waiting.items()
            if self._overdue(name) and name not in self.model.paused
            if waiter.ask.tenant == tenant and project in {None, waiter.ask.project}
            if waiter.ask.demand is not None
            if self.model.owns(tenant, project, needs(waiter.ask.demand))
        ]
        return sorted(names, key=lambda name: (-waiting[name].ask.priority, waiting[name].at))

    def _is_like(self, ask: Ask, name: str) -> bool:
        """Return whether `ask` equals the request `name`, and was itself overtaken too often."""
        if name == ask.id or ask.id not in self.model.waiting or not self._overdue(ask.id):
            return name == ask.id
        other = self.model.waiting[name].ask
        alike = ("tenant", "project", "policy", "demand", "candidates", "priority")
        return all(getattr(ask, each) == getattr(other, each) for each in alike)

    def _is_new_notice(self, fact: Fact) -> TypeGuard[Preempted]:
        return isinstance(fact, Preempted) and fact.lease not in self.model.notices

    def _not_in_vain(self, new: list[Preempted]) -> None:
        """Check that leases get notice only if all of them are needed to make room.

        Args:
            new: The notices of one turn, before the model has them.
        """
        if not new:
            return
        model, ask = self.model, self.model.waiting[new[0].by].ask
        law(len({fact.by for fact in new}) == 1, "leases get notice together for one request", new)
        victims = [fact.lease for fact in new]
        over = model.ending.keys() | model.finished.keys() | model.warm
        noticed = {name for name in model.notices if name not in victims}
        assert ask.demand is not None
        all_gone = {*over, *noticed, *victims}
        waited = [notice.until for notice in model.notices.values() if notice.by == ask.id]
        now = max(self.world.now, *waited, *(fact.until for fact in new))  # It is granted then.
        shut = model.shut_for_good(ask, now)
        fits = model.fits_without(all_gone, ask.demand, ask.candidates, shut, ask, now)
        law(fits, "a request has room once all leases with notice are gone", new, ask)
        mine = {name for name in noticed if model.notices[name].by == ask.id}
        for name in victims:
            rest = {*over, *mine, *victims} - {name}
            spare = model.fits_without(rest, ask.demand, ask.candidates, shut, ask, now)
            law(
                not spare or (len(victims) > 1 and ask.demand.nodes > 1),
                "a request needs the end of each lease that gets notice for it",
                name,
                ask,
            )

    def _helps(self, fact: Ending | Ended, noticed_for: set[str]) -> None:
        """A lease that ends after a notice still makes room."""
        notice, model, now = self.model.notices.get(fact.lease), self.model, self.world.now
        if notice is None or notice.by in noticed_for or notice.by not in model.waiting:
            return
        ask, over = model.waiting[notice.by].ask, model.ending.keys() | model.finished.keys()
        gone, shut = {*over, *model.warm, *model.notices}, model.shut_for_good(ask, now)
        assert ask.demand is not None
        fits = model.fits_without(gone, ask.demand, ask.candidates, shut, ask, now)
        law(fits, "a preempted lease still makes room for its request", fact, ask)

    def _blameless(self, fact: Ended, event: ConsultFailed) -> None:
        """A policy that cannot answer at the moment ends no lease."""
        if fact.lease in self.model.requeued and event.refusal.code in PASSING:
            enough = self.model.faults[fact.lease] == FAULTS_MAX
            law(enough, "a lease survives fewer than FAULTS_MAX passing policy faults", fact, event)

    def _gave_way(self, effect: Respond | Recall, waited: set[str]) -> None:
        """No request is refused for lack of room while room exists or warm leases could make it."""
        message = self.messages[effect.to]
        answer = effect.answer if isinstance(effect, Respond) else None
        if not isinstance(message, Asked) or not isinstance(answer, Refusal):
            return
        ask, model = message.ask, self.model
        # After CONSULTS_MAX consultations a refusal is final; a repeated request is not consulted.
        consulted = 0 < self.consultations[ask.id] < CONSULTS_MAX and ask.terms is not None
        if self.world.honest and consulted and answer.code is Code.POLICY_DECLINED:
            need = ask.alternatives[-1] if ask.alternatives else ask.demand or hidden_demand(ask)
            shut = self._shut(ask, need)
            law(
                not model.fits(need, ask.candidates, shut),
                "no request is declined while nodes have room for it",
                ask,
            )
        holds = ask.terms is not None and not ask.dry_run and ask.demand is not None
        if not holds or answer.code is not Code.NO_CAPACITY or self.asks[ask.id] is not ask:
            return
        if ask.id not in waited and not ask.alternatives:  # An expired waiter evicts no lease.
            shut = self._shut(ask)
            fits = model.fits(ask.demand, ask.candidates, shut)  # type: ignore[arg-type]  # `holds` says so.
            shut = (*shut, *model.partly)
            could = model.fits_without(model.warm, ask.demand, ask.candidates, shut)  # type: ignore[arg-type]  # As above.
            law(fits or not could, "no refused request has room after an eviction", ask, model.warm)

    def _check_free(self, fact: Ended | Requeued, event: Event, after: list[Fact]) -> None:
        """Only the backend's report about the same grant frees the devices of a workload.

        The exception: an equal request takes over place and workload in the same turn.
        """
        lease = self.model.leases[fact.lease]
        heir = after[0].lease if after and isinstance(after[0], Granted) else None
        if heir is not None and heir.inherited:
            law(lease.id in self.model.warm, "only a warm lease is taken over", lease, heir)
            had = (lease.workload, lease.placement, lease.tenant, lease.policy)
            has = (heir.inherited, heir.placement, heir.tenant, heir.policy)
            law(had == has, "a takeover keeps workload, placement, tenant and policy", lease, heir)
            one, other = self.asks[lease.id], self.asks[heir.id]
            given = [
                ask.demand if its.choice is None else ask.alternatives[its.choice]
                for ask, its in ((one, lease), (other, heir))
            ]
            law(given[0] == given[1], "a takeover is for a request with an equal demand", heir)
            law(one.inputs == other.inputs, "a takeover is for a request with equal inputs", heir)
            return
        if lease.provision is not None:
            said = (fact.lease, lease.fencing) in self.let_go
            law(said, "a workload's devices are freed only after a report about its grant", fact)
            over = isinstance(event, WorkloadFailed | WorkloadStopped)
            law(over, "a workload's devices are freed only in the turn of a report", event)

    def _check_consultation(self, consult: Consult) -> None:
        """A node where a workload failed is excluded while another node has room."""
        ask = consult.ask
        left_out = set(ask.avoid) <= set(consult.reserved)
        if left_out or ask.demand is None or not self.world.honest:
            return
        shut = (*consult.reserved, *ask.avoid)
        elsewhere = self.model.fits(ask.demand, ask.candidates, shut)
        law(not elsewhere, "a node where the workload failed is offered last", consult)

    def _whole_first(self, consult: Consult) -> None:
        """A policy gets places for a shorter lease only if no full lease fits."""
        ask, terms = consult.ask, consult.ask.terms
        if terms is None or not terms.ttl_seconds_min or ask.demand is None:
            return
        if ask.id in self.model.requeued:
            return  # A requeued lease keeps its end.
        whole = self.world.now + terms.ttl_seconds
        shut = self.model.shut_to(ask, ask.demand, whole, self.world.now)
        if not shut <= set(consult.reserved):
            closed = self.world.allocator.requests.queue.nodes_reserved_ahead(ask)
            shut |= {*consult.reserved, *closed}
            elsewhere = self.model.fits(ask.demand, ask.candidates, shut)
            law(not elsewhere, "no lease is shortened while one of full length fits", consult)

    def _check_grace(self, seconds: float, grace_seconds: float) -> None:
        """Each lease and waiter gets its grace, or lasts until the lease must leave its node."""
        model, now = self.model, self.world.now
        held = {name: model.expires[name] for name in {*model.leases} - model.ending.keys()}
        held |= {name: waiter.deadline for name, waiter in model.waiting.items()}
        for name in held.keys() & self.due.keys():
            lease, due = model.leases.get(name), self.due[name]
            if lease is not None and lease.granted_at == now:
                continue  # The lease was granted after the stall.
            least = now + (grace_seconds if due <= now else min(seconds, grace_seconds))
            least = least if lease is None else min(least, model.leaves_by(lease))
            law(
                held[name] >= least,
                "leases and waiters get their grace after a stall or restart",
                name,
                due,
                least,
            )
        prolonged = [
            (self.due[name], held[name])
            for name, lease in model.leases.items()
            if name in held.keys() & self.due.keys() and lease.granted_at != now
        ]
        for name in model.waiting.keys() & self.due.keys():
            earlier = [e for d, e in prolonged if d < min(e, self.due[name] - INSTANT)]
            outlasts = held[name] > max(earlier, default=0.0)
            law(outlasts, "a waiter outlasts the same prolonged leases as before", name, earlier)
        over = model.ending.keys() | model.finished.keys()
        for name in self.noticed.keys() & model.notices.keys() - over:
            due, until = self.noticed[name], model.notices[name].until
            least = now + (grace_seconds if due <= now else min(seconds, grace_seconds))
            law(until >= least, "a notice has its grace after a stall or restart", name, due, least)
            waiter = model.waiting.get(model.notices[name].by)
            in_time = waiter is None or until <= waiter.deadline
            law(in_time, "a prolonged notice ends by the deadline of its waiter", name)
        for each in model.reserved.values():
            lapses = each.begun and each.lapse_seconds and not each.used
            least = min(each.ends_at, now + min(seconds, grace_seconds))
            until = each.starts_at + each.lapse_seconds
            law(
                not lapses or until >= least,
                "unused reservations get their grace after a stall or restart",
                each,
            )

    def _in_turn(self, lease: Lease, event: Event) -> None:
        """Check that no request takes the turn or the reserved nodes of a higher-ranking waiter."""
        closed, priority, head = self.reserved
        ask = self.asks[lease.id]
        ready = head in self.model.waiting and head not in self.model.paused
        # A waiter whose policy has just declined may be overtaken, even if it is consulted again.
        declined = isinstance(event, Proposed | ConsultFailed) and event.request == head
        behind = lease.terms.priority < priority
        if ready and self._overdue(head):
            behind |= lease.terms.priority == priority and not self._overdue(lease.id)
        if behind and ready and not declined:  # For a paused head, nothing is reserved.
            touched = {
                (share.cluster_id, share.node_id)
                for share in lease.placement
                if not agreed.is_own(self.model, lease, share)
            } & self.head_nodes
            law(not touched, "no lower-ranking lease gets the head's reserved nodes", lease, closed)
        if not self.world.honest or ask.demand is None:
            return
        if all(agreed.is_own(self.model, lease, share) for share in lease.placement):
            return  # The tenant had reserved it.
        if lease.inherited and EVICTED in self.model.ending.values():
            return  # The waiter gets the evicted lease's place.
        asleep = Counter[Any]()
        places = {(share.cluster_id, share.node_id) for share in lease.placement}
        for name, waiter in self.model.waiting.items():
            if name in self.model.paused:
                continue
            other = waiter.ask
            alike = (other.demand, other.candidates) == (ask.demand, ask.candidates)
            alike &= not ask.alternatives and not other.alternatives
            if name == lease.id or not alike or other.terms is None or self._beyond(other):
                continue
            if places & self.model.withheld(other, self.world.now):
                continue  # A lease there could not last long enough.
            if other.terms.priority > lease.terms.priority:
                key = (other.tenant, other.policy, other.terms.priority)
                busy = self.world.allocator.requests.undecided.get(name) is not None  # type: ignore[arg-type]  # Plain values in tests.
                asleep[key] += -CONSULTED_MAX if busy else 1
        undecided = self.world.allocator.requests.undecided.waiters
        for (tenant, policy, least), many in asleep.items():
            consulted = undecided.get(policy, Counter[int]())
            busy = sum(n for priority, n in consulted.items() if priority >= least)
            sleeps = many > 0 and busy < CONSULTED_MAX
            law(
                not sleeps,
                "no request is served before an equal one of higher priority",
                lease,
                tenant,
                policy,
                asleep,
            )

    def _answer(self, effect: Respond | Recall, event: Event) -> None:
        to = effect.to
        law(to in self.messages, "only a client's message is answered", effect)
        law(to not in self.answered_to, "no message is answered twice", effect)
        law(to.session not in self.gone, "no session gets an answer after its end", effect)
        self.answered_to.add(to)
        if isinstance(effect, Recall):
            law(
                isinstance(event, Inquired) and event.question == "why",
                "only a why inquiry is answered from the history",
                event,
            )
            return
        message, answer, now = self.messages[to], effect.answer, self.world.now
        match message:
            case Asked(_, ask):
                self._check_decision(ask, answer)
            case ReleaseAsked(_, request, token):
                self._check_release(request, token, answer)
            case RenewAsked(_, request, token, ttl):
                if isinstance(answer, LeaseNews):
                    law(
                        token == answer.lease.token_digest,
                        "only the owner of a lease renews it",
                        message,
                    )
                    ttl = answer.lease.terms.ttl_seconds if ttl is None else ttl
                    until = min(now + ttl, self.model.leaves_by(answer.lease))
                    law(
                        answer.lease.expires_at == until,
                        "a renewed lease lasts for its time from now, unless it must leave earlier",
                        answer,
                        now,
                    )
            case Inquired(tenant=tenant):
                if isinstance(answer, LeaseNews):
                    law(
                        answer.lease.tenant == tenant,
                        "an inquiry returns only leases of its own tenant",
                        answer,
                    )
                    law(not answer.owner, "no inquiry returns the token of a lease", answer)
                elif isinstance(answer, Information):
                    text = repr(msgspec.to_builtins(answer.data))
                    law("token of" not in text, "no listing contains a token", answer)
                    others = [name for name in self.world.tenants if name != tenant]
                    law(
                        all(f"'{name}'" not in text for name in others),
                        "no listing names another tenant",
                        answer,
                    )

    def _check_decision(self, ask: Ask, answer: Any) -> None:
        if ask.terms is None or ask.dry_run:
            law(
                isinstance(answer, Advice | Refusal),
                "a request for advice gets advice or a refusal",
                ask,
                answer,
            )
        else:
            law(
                isinstance(answer, LeaseNews | Refusal),
                "a request for a lease gets a lease or a refusal",
                ask,
                answer,
            )
        if isinstance(answer, LeaseNews):
            lease, key = answer.lease, ask.terms.idempotency_key if ask.terms else ""
            law(lease.tenant == ask.tenant, "a request gets only a lease of its tenant", ask, lease)
            if lease.id == ask.id and lease.granted_at == self.world.now and lease.attempt == 1:
                shorter = lease.expires_at < lease.granted_at + lease.terms.ttl_seconds
                said = answer.ttl_max_seconds is not None
                law(said == shorter, "ttl_max_seconds is set exactly if a lease is shorter", answer)
            if lease.id != ask.id:
                law(
                    lease.terms.idempotency_key == key != "",
                    "a repeated request gets only a lease with its idempotency key",
                    ask,
                    lease,
                )
                law(
                    lease.policy.uri == ask.policy.uri,
                    "a repeated request gets only a lease of its own policy",
                    ask,
                    lease,
                )
                first = self.asks[lease.id]
                some = first.alternatives or ask.alternatives or lease.state == "ended"
                if not some and first.demand is not None and ask.demand is not None:
                    counts = (first.demand.gpus, first.demand.nodes)
                    law(
                        counts == (ask.demand.gpus, ask.demand.nodes),
                        "a repeated request gets only a lease for as many GPUs and nodes",
                        ask,
                        first,
                    )
        elif isinstance(answer, Refusal) and self.asks[ask.id] is ask:
            if answer.code is Code.QUOTA_EXCEEDED and ask.demand is not None and self.world.honest:
                beyond = any(map(self._beyond, alternatives.each(ask)))
                law(beyond, "a refusal names a quota only if it has no room", ask, answer)
            law(ask.id not in self.model.leases, "a refused request has no lease", ask, answer)
            faulty = answer.code is Code.POLICY_UNSOUND
            law(
                not (faulty and self.world.honest),
                "an honest policy is never called unsound",
                ask,
                answer,
            )

    def _check_release(self, request: str, token: str, answer: Any) -> None:
        lease = self.world.allocator.state.lease(request)  # type: ignore[arg-type]  # Plain values in tests.
        if isinstance(answer, Refusal):
            code = Code.UNKNOWN_LEASE if lease is None else Code.WRONG_TOKEN
            law(answer.code is code, "a refused release names its cause: lease or token", answer)
            law(lease is None or lease.token_digest != token, "the owner's release succeeds", lease)
            return
        law(answer.lease.token_digest == token, "only the owner of a lease releases it", answer)
        law(
            answer.lease.state in {"ending", "warm", "ended"},
            "a released lease is ending, warm or ended",
            answer,
        )

    def _check_bounds(self) -> None:
        allocator = self.world.allocator
        things = len(allocator.state.leases) + len(allocator.state.waiting)
        law(
            len(allocator.state.deadlines) <= 1_001 + 2 * things,
            "the state holds at most two deadlines per lease or waiter plus 1,001",
        )
        requests = allocator.requests
        closed = [name for name in requests.listeners if requests.find(name) is None]
        law(not closed, "only open requests have listeners", closed)
        sessions = {to.session for heard in requests.listeners.values() for to in heard}
        law(
            sessions == requests._of_session.keys(),
            "the index by session has exactly the sessions with listeners",
        )
        law(
            len(allocator.requests.undecided._keys) <= allocator.undecided,
            "there are at most as many idempotency keys as undecided requests",
        )

    # Deliveries ----------------------------------------------------------------------------

    def heard(self, to: Address, answer: Any, ledger: list[Fact]) -> None:
        self.unanswered.pop(to, None)
        message = self.messages[to]
        own = isinstance(message, Asked) and self.asks[message.ask.id] is message.ask
        if own and isinstance(answer, Refusal):
            self.refused.add(message.ask.id)
        if isinstance(answer, LeaseNews):
            lease = self._without_devices(answer.lease)
            self._scan(ledger)
            granted = self.granted
            named = (lease.id, lease.fencing)
            law(named in granted, "no grant is announced before it is durable", lease)
            first = self._without_devices(granted[named])
            law(first.token_digest == lease.token_digest, "a lease keeps its token", lease)
            gave_back = lease.id in self.requeued
            held = () if gave_back and lease.state in {"queued", "ended"} else first.placement
            law(
                lease.placement in {held, first.placement},
                "a lease keeps its placement until it is requeued",
                lease,
            )
            if lease.state == "queued":
                law(gave_back, "no requeue is announced before it is durable", lease)
                law(lease.placement == (), "a queued lease has no placement", lease)
            if lease.state == "ended":
                law(lease.id in self.over, "no end is announced before it is durable", lease)
            self.known[lease.id] = lease
            if isinstance(self.messages[to], ReleaseAsked):
                before = self.released.setdefault(lease.id, lease)
                if (before.state, before.reason) == (lease.state, lease.reason):
                    same = before == lease or self.world.stalls  # Stalls move times.
                    law(same, "a repeated release gets the same answer", before, lease)

    def _without_devices(self, lease: Lease) -> Lease:
        """Return a lease without the names of its devices, which may change."""
        if not self.world.rebuilds:
            return lease
        placement = tuple(replace(share, gpus=()) for share in lease.placement)
        return replace(lease, placement=placement, devices=(), lost=())

    def ordered(self, lease: Lease, ledger: list[Fact], running: tuple[str, int] | None) -> None:
        self._scan(ledger)
        law(
            (lease.id, lease.fencing) in self.granted,
            "no workload starts before its grant is durable",
            lease,
        )
        own = running in {None, (lease.id, lease.fencing)}
        law(
            own or lease.inherited != "",
            "no workload starts while an earlier start of it runs, except in a takeover",
            lease,
        )
        stopped = (lease.id, lease.fencing) in self.stopped
        law(not stopped, "no workload starts again after its stop order", lease)

    def put_away(self, lease: Lease) -> None:
        self.stopped.add((lease.id, lease.fencing))

    def _scan(self, ledger: list[Fact]) -> None:
        """Record the grants, requeues and ends in the ledger."""
        for fact in ledger[self.scanned :]:
            match fact:
                case Granted(lease):
                    self.granted[lease.id, lease.fencing] = lease
                case Requeued(name):
                    self.requeued.add(name)
                case Ended(name):
                    self.over.add(name)
        self.scanned = len(ledger)

    # Rest, crash and the end ---------------------------------------------------------------

    def quiet(self) -> None:
        """When nothing is in progress, every request that can be served has been served."""
        allocator, model = self.world.allocator, self.model
        law(allocator.undecided == 0, "at rest, no request is undecided", allocator.undecided)
        keys = allocator.requests.undecided._keys
        law(not keys, "at rest, no idempotency key is undecided", keys)
        late = [to for to in self.unanswered if not self._waits(to)]
        if not self.world.turns and not self.world.writing:
            law(not late, "at rest, every message is answered or its request waits", late)
        due = allocator.next_deadline()
        if due is not None and due <= self.world.now:
            return  # The next step may serve them.
        if not self.world.honest or not allocator.requests.queue:
            return
        self._overdue_first()
        for line in self._lines():
            shut = allocator.requests.queue.nodes_reserved_for(line)
            closed = shut
            for name in list(line.waiters)[:CONSULTED_MAX]:
                waiter = model.waiting[name].ask
                now = self.world.now
                own = model.withheld(waiter, now, closed) or model.beside(waiter, now, ())
                if own and waiter.demand is None and len(line.waiters) > 1:
                    continue  # The policy answered for a waiter whose lease may last longer.
                needs_of = [
                    each.demand or hidden_demand(each)
                    for each in alternatives.each(waiter)
                    if not self._beyond(each, at_rest=True)
                ]
                where = waiter.candidates
                for need in needs_of:
                    own = model.withheld(waiter, now, closed, need)
                    shut = (*closed, *own)
                    fits = model.fits(need, where, shut)
                    law(not fits, "at rest, no waiter has room on open nodes", name, line, shut)
                    beyond = {x: agreed.beyond_own(model, x, waiter.tenant) for x in closed}
                    mine = {pair: less for pair, less in beyond.items() if less is not None}
                    shut = ({*closed} - mine.keys()) | own
                    fits = waiter.demand is not None and model.fits(need, where, shut, mine)
                    law(
                        not fits,
                        "at rest, no waiter has room in its tenant's reservations",
                        name,
                        line,
                        mine,
                    )
                if self._beyond(waiter, at_rest=True):
                    continue
                need = waiter.demand or hidden_demand(waiter)
                idle = model.warm | model.resetting
                shut = (*closed, *model.shut_for_good(waiter, now), *model.partly)
                if model.fits_without(idle, need, where, shut):
                    own = any(model.own(each.ask) for each in model.waiting.values())
                    coming = EVICTED in model.ending.values() or own
                    law(
                        coming,
                        "at rest, an eviction or reset is in progress if a waiter needs it",
                        name,
                        shut,
                    )

    def _overdue_first(self) -> None:
        """Nodes are reserved only for a waiter overtaken too often, or of higher priority."""
        first = self.world.allocator.requests.queue.first()
        head = next(iter(first.waiters), "") if first is not None else ""
        declined = self._declined_waiters()
        for name, waiter in self.model.waiting.items():
            ask, known = waiter.ask, self.model
            patient = name in known.requeued or (ask.terms is not None and ask.terms.wait_seconds)
            if not self._overdue(name) or not patient or ask.demand is None:
                continue
            if name in known.paused or name in declined:
                continue
            if self._beyond(ask, at_rest=True):
                continue
            law(head != "", "the head of the queue exists if a waiter is overtaken too often", name)
            higher = self.model.waiting[head].ask.priority > ask.priority
            law(
                higher or self._overdue(head),
                "the head of the queue was overtaken too often or has higher priority",
                name,
                head,
            )

    def _shut(self, ask: Ask, need: Demand | None = None) -> tuple[tuple[str, str], ...]:
        """Return the nodes excluded for a request: reserved by others, or for a waiter ahead."""
        closed = self.world.allocator.requests.queue.nodes_reserved_ahead(ask)
        return *closed, *self.model.withheld(ask, self.world.now, closed, need)

    def _beyond(self, ask: Ask, *, at_rest: bool = False) -> bool:
        """Return whether a quota does not allow a request, or may be reserved for another one."""
        model, need = self.model, needs(ask.demand or hidden_demand(ask))
        if model.beyond(ask.tenant, ask.project, need):
            return True
        for project in (None, ask.project):
            firsts = self._overdue_on(ask.tenant, project)
            if at_rest and firsts:
                declined = self._declined_waiters()
                firsts = [name for name in firsts if name not in declined][:1]
            for name in firsts:
                other = model.waiting[name].ask
                if other.priority >= ask.priority and not self._is_like(ask, name):
                    both = _sum(need, needs(other.demand))
                    if model.short(ask.tenant, project, both):
                        return True
        return False

    def _waits(self, to: Address) -> bool:
        message = self.unanswered[to]
        if not isinstance(message, Asked):
            return False
        ask = message.ask
        key = ask.terms.idempotency_key if ask.terms else ""
        waiting = self.model.waiting
        return ask.id in waiting or (
            key != ""
            and any(
                (w.ask.tenant, w.ask.terms and w.ask.terms.idempotency_key) == (ask.tenant, key)
                for w in waiting.values()
            )
        )

    def crashed(self, ledger: list[Fact]) -> list[Ask]:
        """Forget everything that was not durable; return the requests that clients will repeat."""
        retries = [
            message.ask
            for message in self.unanswered.values()
            if isinstance(message, Asked) and message.ask.terms and not message.ask.dry_run
            if message.ask.terms.idempotency_key
        ]
        self.unanswered.clear()
        self.gone |= set(self.world.sessions)
        self.model = Model(pause_seconds=self.world.pause_seconds, disturbed=True)
        for fact in ledger:
            now = fact.lease.granted_at if isinstance(fact, Granted) else 0.0
            self.model.learn(fact, self.asks, now)
        return retries

    def restored(self, ledger: list[Fact]) -> None:
        """The new allocator has the durable state, with or without a checkpoint."""
        state = self.world.allocator.state
        same_state(state, replay(ledger))
        law(
            state.leases.keys() == self.model.leases.keys(),
            "after a restart, the leases are those of the ledger",
        )
        law(
            state.waiting.keys() == self.model.waiting.keys(),
            "after a restart, the waiters are those of the ledger",
        )
        law(
            state.fencing == self.model.fencing,
            "after a restart, the last fencing number is the same",
            state.fencing,
        )
        for name, lease in self.known.items():
            found = state.lease(name)  # type: ignore[arg-type]  # Plain values in tests.
            law(found is not None, "each lease known to a client exists after a restart", lease)
            assert found is not None
            again = found.attempt > lease.attempt
            same = found.fencing > lease.fencing if again else found.fencing == lease.fencing
            law(same, "a lease has a higher fencing number only in a later attempt", lease, found)
            if lease.state == "ended":
                law(found.state == "ended", "a lease announced as ended stays ended", lease, found)

    def end(self) -> None:
        world = self.world
        state = world.allocator.state
        check(state)
        law(not self.unanswered, "at the end, every message is answered", self.unanswered)
        law(not state.leases and not state.waiting, "at the end, no lease and no waiter is left")
        fleet, shut = state.fleet, state.fleet.closed > 0
        law(
            (fleet.gpu_free == fleet.gpu_total)[~shut].all(),
            "at the end, all GPUs of open nodes are free",
        )
        law(
            (fleet.cpu_free == fleet.cpu_total)[~shut].all(),
            "at the end, all CPUs of open nodes are free",
        )
        law(not fleet.gpu_free[shut].any(), "at the end, closed nodes have no free GPUs")
        law(not +self.model.devices, "at the end, the model has no held device", self.model.devices)
        law(not world.allocator.requests.listeners, "at the end, no request has listeners")
        same_state(state, replay(world.ledger))
        fencing = [fact.lease.fencing for fact in world.ledger if isinstance(fact, Granted)]
        law(fencing == sorted(set(fencing)), "the ledger's fencing numbers always grow", fencing)


def _sum(wanted: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    """Return the sum of both amounts for each resource in `wanted`; 0 where `wanted` has 0."""
    return {name: much + more[name] if much else 0 for name, much in wanted.items()}


def replay(facts: list[Fact]) -> State:
    allocator = Allocator()
    allocator.replay(facts)
    return allocator.state


def same_state(one: State, other: State) -> None:
    law(one == other, "a replay of the ledger gives the live state")
    law(_shares(one) == _shares(other), "a replay of the ledger gives the same quotas and use")
    law(list(one.ended) == list(other.ended), "a replay keeps the order of ended leases")
    law(list(one.waiting) == list(other.waiting), "a replay keeps the order of waiters")
    condensed = State()
    for fact in condense(one):
        apply(condensed, fact)
    law(condensed == one, "a checkpoint restores the live state")
    law(_shares(condensed) == _shares(one), "a checkpoint restores the live state's quotas and use")
    law(list(condensed.ended) == list(one.ended), "a checkpoint keeps the order of ended leases")
    law(list(condensed.waiting) == list(one.waiting), "a checkpoint keeps the order of waiters")
    law(list(condensed.leases) == list(one.leases), "a checkpoint keeps the order of leases")


def _shares(state: State) -> Any:
    accounts = state.accounts
    shares = {each: accounts.share(each) for each, _ in accounts.past()}
    return accounts.quotas, accounts.half_life, accounts.usages(), dict(accounts.past()), shares

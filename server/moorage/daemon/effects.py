"""Routes the effects of the core's steps to the parts that carry them out."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import assert_never

from moorage.core.queue.open_requests import OpenRequests
from moorage.core.state.facts import Fact, Queued
from moorage.core.turns.effects import (
    Consult,
    Effect,
    Forget,
    KeepWarm,
    Look,
    Recall,
    Respond,
    Start,
    Stop,
)
from moorage.core.turns.events import CONSULTED, Asked, Event
from moorage.core.turns.turn import Turn
from moorage.daemon.access.audit_trail import AuditTrail
from moorage.daemon.history import recall
from moorage.daemon.history.decisions import Decisions
from moorage.daemon.news.watchers import Watchers
from moorage.daemon.observability.counters import Measures
from moorage.daemon.observability.durations import DurationMetrics
from moorage.daemon.observability.traces import RequestTraces
from moorage.daemon.policies.consultations import Consultations
from moorage.daemon.requests.replies import Replies
from moorage.daemon.workloads.control import WorkloadControl


@dataclass(frozen=True, slots=True)
class EffectCarrier:
    """Carries out the core's effects. The fields after `check` only observe each step.

    Args:
        workloads: Starts and stops the workloads of leases.
        requests: The addresses that wait for the answer to each open request.
        check: Called before each effect; raises if this server no longer leads.
        decisions: Stores refusals; its ledger has the decisions that the core has forgotten.
        trail: Writes the caller of each fact to the audit log.
        durations: Measures evaluations, commits and starts.
        traces: Traces each request; None: traces are switched off.
    """

    replies: Replies
    consultations: Consultations
    workloads: WorkloadControl
    requests: OpenRequests
    check: Callable[[], None]
    watchers: Watchers
    measures: Measures
    decisions: Decisions
    trail: AuditTrail
    durations: DurationMetrics
    traces: RequestTraces | None

    def observe_step(self, event: Event, turn: Turn, seconds: float) -> None:
        """Inform the observers of the step, before any of its effects leaves the server.

        The cells learn the outcome of their proposals before the next request reaches them; the
        gateway learns whose messages wait in the queue and are in flight no longer.
        """
        for fact in turn.facts:
            if type(fact) is Queued:
                for to in self.requests.listeners.get(fact.ask.id, ()):
                    self.replies.note_waiting(to)
        if type(event) is Asked:
            self.measures.requests += 1
            self.watchers.observe_request(event.ask)
            first = self.requests.repeated(event.to, event.ask)
            if first is not None:  # A repeated request makes no fact.
                self.replies.note_repeat(event.to, first, waits=self.requests.waits(first))
        elif isinstance(event, CONSULTED):
            self.durations.observe_decision(event, seconds)
            self.consultations.note_decision(event, turn)
        self.decisions.observe_step(event, turn)
        self.trail.observe_step(event, turn)
        if self.traces is not None:
            self.traces.observe_step(event, turn)

    def observe_commit(self, facts: Sequence[Fact], last: int, seconds: float) -> None:
        """Pass durable facts, up to seq `last`, to the audit log and the metrics."""
        self.measures.observe_facts(facts)
        self.durations.observe_facts(facts)
        self.durations.observe_commit(seconds)
        self.trail.observe_commit(facts, last)

    def note_durable(self, facts: Sequence[Fact]) -> None:
        """Pass a turn's durable facts to the traces and the watchers."""
        if self.traces is not None:
            self.traces.note_durable(facts)
        self.watchers.note_durable(facts)

    def carry_out(self, effect: Effect) -> None:
        """Hand an effect to the part that carries it out."""
        self.check()
        if self.traces is not None:
            self.traces.note_effect(effect)
        match effect:
            case Respond():
                self.measures.count(effect.answer)
                self.replies.answer(effect.to, effect.answer)
            case Consult():
                self.durations.observe_consultation(effect)
                self.consultations.consult(effect)
            case Forget():
                self.durations.forget_consultation(effect.request)
                self.consultations.forget(effect)
            case Look(lease):
                self.workloads.look(lease)
            case Start(lease):
                with nullcontext() if self.traces is None else self.traces.bound(lease):
                    self.workloads.start(lease)
            case Stop(lease):
                self.workloads.stop(lease)
            case KeepWarm(lease):
                self.workloads.keep(lease)
            case Recall(to):
                self.replies.answer_later(to, recall.recall(effect, self.decisions.ledger))
            case _:
                assert_never(effect)

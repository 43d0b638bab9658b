"""Traces each request from its socket to its workload, as spans and as `debug` log lines.

`Replies`, `Admission` and `EffectCarrier` call `RequestTraces`; they have None if neither the
setting `traces` nor `debug` is on. The core knows nothing of traces, which are made from the events
that it gets and the effects that it returns.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from moorage.core.state.facts import Ended, Fact, Granted, Queued
from moorage.core.turns.effects import Address, Consult, Effect, Forget, Start
from moorage.core.turns.events import (
    ConsultFailed,
    Event,
    Proposed,
    WorkloadEnded,
    WorkloadFailed,
    WorkloadStarted,
)
from moorage.core.turns.turn import Turn
from moorage.model import Lease, RequestId, Tenant
from moorage.protocol.messages import AllocationRequest

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from moorage.daemon.observability.otlp import Spans

_NONE: Final = RequestId("")
FOLLOWED_MAX: Final = 10_000
"""Maximum requests that are traced until their answer; with one more, the oldest is dropped."""
REQUESTS_MAX: Final = 2 * FOLLOWED_MAX
"""Maximum traced requests in all, including those whose lease has a traced workload."""

log = structlog.get_logger("moored")


@dataclass(slots=True, eq=False)
class _Trace:
    """A traced request.

    Args:
        to: The address of its answer.
        trace: The id of its trace, or "".
        span: Its span; None if it is only logged.
        request: The id of the request, once it has one.
        parts: Start time and span of each part that is under way.
        has_workload: Whether its lease starts a workload, which is traced beyond the answer.
        started: Fencing number of the grant whose workload runs.
    """

    to: Address
    trace: str
    span: "Span | None"
    request: RequestId = _NONE
    parts: "dict[str, tuple[float, Span | None]]" = field(default_factory=dict)
    has_workload: bool = False
    started: int = 0

    def ids(self) -> dict[str, Any]:
        """Return the ids of the request and its trace, for log lines.

        A request has no id before its admission ends; until then, session and number name it.
        """
        known = {"request": self.request} if self.request else msgspec.structs.asdict(self.to)
        return known | ({"trace": self.trace} if self.trace else {})


class RequestTraces:
    """Writes the spans and log lines of requests.

    Args:
        spans: The exporter of spans; None: requests are only logged.
    """

    def __init__(self, spans: "Spans | None") -> None:
        self._spans = spans
        self._open: dict[Address, _Trace] = {}
        self._requests: dict[RequestId, _Trace] = {}

    def begin(self, to: Address, tenant: Tenant, message: AllocationRequest) -> None:
        """Begin to trace a request."""
        span, trace = None, message.traceparent[3:35]
        if self._spans is not None:
            span = self._spans.begin_request(message.traceparent)
            span.set_attributes(
                {"moorage.tenant": tenant, "moorage.policy": message.policy_rule_uri}
            )
            trace = self._spans.trace_id(span)
        if len(self._open) >= FOLLOWED_MAX:
            self._close(self._open.pop(next(iter(self._open))), crowded_out=True)
        followed = self._open[to] = _Trace(to, trace, span)
        self._begin(followed, "admission")

    def admitted(self, to: Address, request: RequestId) -> None:
        """Store the id of a request that is posted to the core now."""
        followed = self._open.get(to)
        if followed is None:
            return
        followed.request = request
        if len(self._requests) >= REQUESTS_MAX:
            del self._requests[next(iter(self._requests))]
        self._requests[request] = followed
        self._end(followed, "admission", session=to.session, number=to.number)

    def note_answer(self, to: Address, reply: bytes) -> None:
        """Record the reply to a request."""
        followed = self._open.pop(to, None)
        if followed is not None:
            error = msgspec.json.decode(reply, type=_Verdict).error
            self._close(followed, **({} if error is None else {"code": error.code}))

    def forget(self, to: Address) -> None:
        """Record that no one waits for the reply any more."""
        followed = self._open.pop(to, None)
        if followed is not None:
            self._close(followed, lost=True)

    def observe_step(self, event: Event, turn: Turn) -> None:
        """Record the answers of policies and backends, and the core's decisions on them."""
        match event:
            case Proposed():
                self._finish(event.request, "policy")
            case ConsultFailed():
                self._finish(event.request, "policy", code=event.refusal.code.value)
            case WorkloadStarted():
                self._finish(event.lease, "start", address=event.endpoint)
                if (followed := self._requests.get(event.lease)) is not None:
                    followed.started = event.fencing
            case WorkloadFailed():
                self._finish(event.lease, "start", reason=event.reason)
            case WorkloadEnded(lease, _, phase, reason, exit_code):
                self._finish(lease, "start", reason=reason)
                if (followed := self._requests.get(lease)) is not None:
                    about = {"phase": phase, "reason": reason, "exit_code": exit_code}
                    log.debug("request_workload_ended", **followed.ids(), **about)
            case _:  # Other events belong to no part of a request.
                pass
        for fact in turn.facts:
            self._note(fact)

    def note_durable(self, facts: Sequence[Fact]) -> None:
        """Record the grants that became durable."""
        for fact in facts:
            if isinstance(fact, Granted):
                self._finish(fact.lease.id, "commit")

    def note_effect(self, effect: Effect) -> None:
        """Record the work that policies and backends begin."""
        match effect:
            case Consult(ask):
                if (followed := self._requests.get(ask.id)) is not None:
                    self._begin(followed, "policy", policy=ask.policy.uri)
            case Forget(request):
                self._finish(request, "policy", forgotten=True)
            case Start(lease):
                followed = self._requests.get(lease.id)
                if followed is not None and followed.started != lease.fencing:
                    backend = lease.provision.backend if lease.provision else ""
                    self._begin(followed, "start", backend=backend, attempt=lease.attempt)
            case _:  # Other effects belong to no part of a request.
                pass

    def bound(self, lease: Lease) -> AbstractContextManager[None]:
        """Add a lease's request id to log lines of a `with` block, and of tasks started in it."""
        followed = self._requests.get(lease.id)
        ids = {"request": str(lease.id)} if followed is None else followed.ids()
        return structlog.contextvars.bound_contextvars(**ids)

    def _note(self, fact: Fact) -> None:
        match fact:
            case Granted(lease):
                if (followed := self._requests.get(lease.id)) is not None:
                    followed.has_workload = lease.provision is not None
                    self._begin(followed, "commit")
            case Queued(ask):
                if (followed := self._requests.get(ask.id)) is not None:
                    log.debug("request_queued", **followed.ids())
                    if followed.span is not None:
                        followed.span.add_event("queued")
            case Ended(lease_id):
                if (followed := self._requests.pop(lease_id, None)) is not None:
                    self._end(followed, "start", reason=fact.reason)
                    log.debug("request_lease_ended", **followed.ids(), reason=fact.reason)
            case _:  # Others belong to no part of a request.
                pass

    def _begin(self, followed: _Trace, part: str, **attributes: Any) -> None:
        self._end(followed, part)  # A new consultation replaces this one.
        span = None
        if self._spans is not None and followed.span is not None:
            span = self._spans.begin(part, followed.span)
            span.set_attributes(_attribute_names(attributes))
        followed.parts[part] = perf_counter(), span
        log.debug("request_part_begun", part=part, **followed.ids(), **attributes)

    def _finish(self, request: RequestId, part: str, **attributes: Any) -> None:
        followed = self._requests.get(request)
        if followed is not None:
            self._end(followed, part, **attributes)

    def _end(self, followed: _Trace, part: str, **attributes: Any) -> None:
        begun, span = followed.parts.pop(part, (None, None))
        if begun is None:
            return
        seconds = round(perf_counter() - begun, 6)
        log.debug("request_part_ended", part=part, seconds=seconds, **followed.ids(), **attributes)
        self._end_span(followed, span, attributes)

    def _close(self, followed: _Trace, **attributes: Any) -> None:
        """End the span of a request; continue to trace its lease if the lease has a workload."""
        self._end(followed, "admission")
        if not followed.has_workload:
            for part in tuple(followed.parts):
                self._end(followed, part)
            self._requests.pop(followed.request, None)
        log.debug("request_answered", **followed.ids(), **attributes)
        self._end_span(followed, followed.span, attributes)

    def _end_span(self, followed: _Trace, span: "Span | None", attributes: dict[str, Any]) -> None:
        if self._spans is not None and span is not None:
            request = {"request": followed.request} if followed.request else {}
            span.set_attributes(_attribute_names(request | attributes))
            self._spans.end(span)


def _attribute_names(attributes: dict[str, Any]) -> dict[str, Any]:
    return {f"moorage.{name}": value for name, value in attributes.items()}


class _Error(msgspec.Struct):
    code: str


class _Verdict(msgspec.Struct):
    """The fields of a reply that its trace needs."""

    error: _Error | None = None

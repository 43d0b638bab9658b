"""Replies: stores the context of each awaited answer, and sends the reply.

`admission` and `operations` note an address, the commit loop's effects answer it. The gateway has
the addresses of sockets, `HttpCalls` those of `POST /allocate`.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec.structs import replace

from moorage.core.turns.effects import Address, LeaseNews, Response
from moorage.daemon.access.lease_tokens import LeaseTokens
from moorage.daemon.answers import encode, lease_answer, refusal_of
from moorage.daemon.news.request_progress import RequestProgress
from moorage.daemon.observability.traces import RequestTraces
from moorage.daemon.publishing.aliases import Noting
from moorage.daemon.requests.http_calls import HttpCalls
from moorage.daemon.tasks import Tasks
from moorage.daemon.workloads.control import WorkloadControl
from moorage.gateway.server import Gateway
from moorage.model import Lease, RequestId, SessionId
from moorage.protocol.faults import ServiceError
from moorage.protocol.replies import MessageId, Shared
from moorage.records.json_values import JsonObject
from moorage.records.rights import Caller

_NONE: Final = RequestId("")

GRANTED_MAX: Final = 256
"""Maximum leases that a resumed session is sent; if there are more, the oldest are left out."""


class ReplyContext(msgspec.Struct, frozen=True):
    """The context that the reply to a message needs beside the answer.

    Args:
        message_id: The message's own `id`.
        request: The id of its ask; empty for an operation.
        token: The token of the lease that the ask may be granted.
        shown: Whether the reply has the ask's id.
        warnings: Warnings for the reply.
        version: The version that was chosen; empty if the message named the version.
        note: Counts the outcome, if the message named an alias.
        admitted_at: Time of admission by the monotonic clock, for `note`.
        streams: Whether the client wants the progress of the ask.
        complete: Adds fields to the core's answer that the core does not know.
    """

    message_id: MessageId
    request: RequestId = _NONE
    token: str = ""
    shown: bool = False
    warnings: list[str] = []  # msgspec copies the default.
    version: str = ""
    note: Noting | None = None
    admitted_at: float = 0.0
    streams: bool = False
    complete: Callable[[Response], None] | None = None


@dataclass(frozen=True, slots=True)
class Followers:
    """Receivers of the progress and the outcome of requests.

    Args:
        traces: Writes spans and log lines; None: neither is wanted.
        stamp: Returns the last fact that an answer sent now reflects; None: answers do not have it.
        is_follower: Whether this is a standby, whose answers have the revision at which the
            request was read.
    """

    progress: RequestProgress
    traces: RequestTraces | None
    stamp: Callable[[], Shared] | None = None
    is_follower: bool = False


class Replies:
    """Sends replies to the addresses that await answers.

    Args:
        workloads: Says how far the workload of a lease is.
        tasks: Runs the tasks that wait for an answer.
        followers: Receive the progress of asks.

    Attributes:
        fail: Called with an unexpected error, which ends the process.
        traces: The traces of `followers`.
        asker: Returns the address that waits for the answer to a request; None: no address waits.
    """

    def __init__(
        self,
        gateway: Gateway,
        calls: HttpCalls,
        workloads: WorkloadControl,
        tokens: LeaseTokens,
        tasks: Tasks,
        followers: Followers,
    ) -> None:
        self._progress = followers.progress
        self.traces = followers.traces
        self._stamp = followers.stamp
        self._is_follower = followers.is_follower
        self._stamps: dict[Address, Shared] = {}
        self._gateway = gateway
        self._calls = calls
        self._workloads = workloads
        self._tokens = tokens
        self._tasks = tasks
        self.fail = tasks.fail
        self._open: dict[Address, ReplyContext] = {}
        self._askers: dict[RequestId, Address] = {}
        self.asker = self._askers.get
        self._numbers: dict[SessionId, set[Address]] = {}
        self._granted: dict[SessionId, dict[RequestId, MessageId]] = {}

    def open_session(self, session: SessionId) -> None:
        """Register a session."""
        self._numbers[session] = set()
        self._granted[session] = {}

    def drop_session(self, session: SessionId) -> None:
        """Handle the end of a session: no client reads its answers any more."""
        for to in tuple(self._numbers.pop(session, ())):
            self._forget(to)
            if self.traces is not None:
                self.traces.forget(to)
        self._granted.pop(session, None)

    def leave(self, to: Address) -> None:
        """Handle the disconnection of an HTTP caller that waits for an answer at this address."""
        self._calls.leave(to)
        self._forget(to)
        if self.traces is not None:
            self.traces.forget(to)

    def expect(self, to: Address, context: ReplyContext) -> None:
        """Store the context of an awaited answer, by its address, before the answer comes."""
        self._open[to] = context
        if self._is_follower and self._stamp is not None:
            self._stamps[to] = self._stamp()
        if context.request:
            self._askers[context.request] = to
            if self.traces is not None:
                self.traces.admitted(to, context.request)
        if context.streams:
            self._progress.add(to, context.request, context.message_id)
        self._numbers.get(to.session, set()).add(to)

    def named(self, to: Address, name: str) -> RequestId:
        """Return the id of a request, given that id or the `id` of the client's message."""
        for other in self._numbers.get(to.session, ()):
            context = self._open[other]
            own = context.message_id
            if context.request and own is not None and str(own) == name:
                return context.request
        return RequestId(name)

    def note_repeat(self, to: Address, first: RequestId, *, waits: bool) -> None:
        """Record that a message repeats an open request, whose answer goes to both messages.

        Args:
            to: The address of the message.
            first: The request that it repeats.
            waits: Whether the repeated request is in the queue.
        """
        context = self._open.get(to)
        if context is None:
            return
        self._askers.pop(context.request, None)
        # The lease gets the id of the first request, so this message needs no token of its own.
        self._open[to] = replace(context, request=first, token="")
        if context.streams:
            self._progress.repeat(to, first, context.message_id, waits=waits)
        if waits:
            self.note_waiting(to)

    def note_waiting(self, to: Address) -> None:
        """Mark a message as waiting for the answer to a request in the queue.

        The message is no longer in flight, and its waiting time is not added to the policy's time.
        """
        self._gateway.park(to)
        context = self._open.get(to)
        if context is not None and context.note is not None:
            self._open[to] = replace(context, admitted_at=0.0)

    def answer(self, to: Address, answer: Response) -> None:
        """Send an answer to an address; drop it if the client is gone."""
        context = self._open.get(to)
        if context is None:
            return
        stamp = self._stamps.get(to)
        if stamp is None and self._stamp is not None:
            stamp = self._stamp()
        self._forget(to)
        if context.complete is not None:
            context.complete(answer)
        self._progress.note_answer(to, answer)
        if context.note is not None:
            now, waited = time.monotonic(), context.admitted_at == 0.0
            context.note(answer, None if waited else now - context.admitted_at, now)
        lease = answer.lease if isinstance(answer, LeaseNews) else None
        if lease is not None and context.request:
            self._note_grant(to.session, lease.id, context.message_id)
        reply = encode(
            answer,
            message_id=context.message_id,
            request=context.request if context.shown else "",
            warnings=context.warnings,
            version=context.version,
            workload=self._workloads.report(lease) if lease else None,
            token=self._token(context, lease) if lease else "",
            stamp=stamp,
        )
        self.send(to, reply)

    def resumed(self, to: Address, find: Callable[[RequestId], Lease | None]) -> JsonObject:
        """Return the state of a session, for the client that resumes it."""
        requests = [self._open[each] for each in self._numbers[to.session]]
        report, token = self._workloads.report, self._tokens.of
        positions = self._progress.positions(each.request for each in requests if each.request)
        return {
            "session": to.session,
            "open": self._gateway.unanswered(to),
            "waiting": [
                {
                    "request": each.request,
                    "message": each.message_id,
                    "position": positions.get(each.request),
                }
                for each in requests
                if each.request
            ],
            "leases": [
                {
                    "message": message,
                    "lease": lease_answer(lease, report(lease), token=token(lease)),
                }
                for request, message in self._granted[to.session].items()
                if (lease := find(request)) is not None and lease.state != "ended"
            ],
        }

    def _note_grant(self, session: SessionId, lease: RequestId, message: MessageId) -> None:
        granted = self._granted.get(session)
        if granted is not None:  # Calls over HTTP have no session.
            granted[lease] = message
            if len(granted) > GRANTED_MAX:
                del granted[next(iter(granted))]

    def answer_later(self, to: Address, work: Awaitable[Response]) -> None:
        """Answer later, with the result of `work` or the `ServiceError` that it raises."""
        self._tasks.spawn(self._answer_later(to, work))

    def send(self, to: Address, reply: bytes) -> None:
        """Send a finished reply."""
        if self.traces is not None:
            self.traces.note_answer(to, reply)
        if self._calls.has(to):
            self._calls.reply(to, reply)
        else:
            self._gateway.tell(to, reply)

    def send_later(self, to: Address, work: Awaitable[bytes]) -> None:
        """Send the finished reply that `work` returns."""
        self._tasks.spawn(self._send_later(to, work))

    def remote(self, to: Address) -> str:
        """Return the network address of the client that waits at an address; "" if unknown."""
        return self.origin(to)[1]

    def origin(self, to: Address) -> tuple[Caller | None, str]:
        """Return the caller who waits at an address, and the caller's network address."""
        found = self._gateway.origin(to.session)
        return self._calls.origin(to) if found[0] is None else found

    def drain(self, answer: Response) -> None:
        """Send the same answer to all HTTP calls that still wait."""
        for to in self._calls.waiting():
            self.answer(to, answer)

    def _token(self, context: ReplyContext, lease: Lease) -> str:
        """Return the token of a lease: the stored token of this ask, or the token derived again."""
        if context.token and lease.id == context.request:
            return context.token
        return self._tokens.of(lease)

    async def _answer_later(self, to: Address, work: Awaitable[Response]) -> None:
        try:
            answer = await work
        except ServiceError as error:
            answer = refusal_of(error)
        self.answer(to, answer)

    async def _send_later(self, to: Address, work: Awaitable[bytes]) -> None:
        self.send(to, await work)

    def _forget(self, to: Address) -> None:
        context = self._open.pop(to, None)
        self._stamps.pop(to, None)
        if context is not None and self._askers.get(context.request) == to:
            del self._askers[context.request]
        self._numbers.get(to.session, set()).discard(to)

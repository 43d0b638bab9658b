"""A link to a server, or to the leader of several, that reconnects when its socket is lost.

A link opens sockets as needed, and repeats messages that are safe to repeat. `Client` and the
keeper that renews leases send all their messages through a link.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Final

from moorage.model import Code
from moorage.protocol.replies import Event, Reply
from moorage.records.json_values import JsonMapping, JsonObject
from moorage_client.addresses import Addresses, is_worth_another_try
from moorage_client.answers import Lease, read_from, read_lease, read_refusal
from moorage_client.connection import Connection, ServerLeft
from moorage_client.dialing import Dialer
from moorage_client.endpoint import Endpoint
from moorage_client.errors import ConnectionFailed, MoorageError, RequestRefused, Timeout

STREAMED_MAX: Final = 4096
"""Maximum requests whose progress is tracked; beyond this, the oldest are dropped."""

_LAST: Final = frozenset({"ready", "ended"})
"""States of a workload after which the server reports no more progress."""
_DECIDED: Final = frozenset({"decided"})
"""States of a request without a workload after which the server reports no more progress. This last
report may come after the reply."""


class _NotLeader(ConnectionFailed):
    """A server is a standby, and did not carry out the message.

    Args:
        reason: The outcome at the standby, for a person.
        names_another: Whether the client should try another address at once.
    """

    def __init__(self, url: str, reason: str, *, names_another: bool) -> None:
        super().__init__(url, reason)
        self.names_another = names_another


@dataclass(slots=True)
class _Call:
    """A message that needs a reply.

    Args:
        idempotent: Whether to send the message again if a socket breaks before the reply.
        orphaned: Called with a reply that comes after the call was cancelled or timed out.

    Attributes:
        sent: How often the message was sent to a server that may have carried it out.
        problem: The error of the last attempt; None: no attempt has failed yet.
        give_up_at: The time at which the call fails, on the monotonic clock.
        was_led: Whether a standby has redirected the message; the next redirection causes a pause.
    """

    message: JsonMapping
    number: int
    idempotent: bool
    orphaned: Callable[[Reply], None] | None
    sent: int = 0
    problem: ConnectionFailed | None = None
    give_up_at: float = 0.0
    was_led: bool = False


class Link:
    """A link to one server, or to the leader of several, over its current socket.

    Args:
        endpoints: The servers' addresses, with credentials.
        reconnect_seconds: How long to repeat a call after a socket broke.
        on_lost: Called with the reason when a call must be repeated for the first time.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        reconnect_seconds: float,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self._on_lost = on_lost or _say_nothing
        self._addresses = Addresses(endpoints)
        self._dialer = Dialer(self._addresses)
        self._reconnect_seconds = reconnect_seconds
        self._connection: Connection | None = None
        self._lost: Connection | None = None
        """The lost connection, whose session the next one resumes."""
        self._numbers = itertools.count(1)
        self._progress: dict[str, tuple[Callable[[JsonMapping], None], frozenset[str]]] = {}
        """By message id: the callback for progress, and the states after which no progress
        comes."""
        self._opening = asyncio.Lock()
        self._aside: set[Connection] = set()
        """Connections to standbys, still open for replies to earlier messages."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def url(self) -> str:
        """The address of the current socket, for messages; without a socket, all addresses."""
        connection = self._connection
        return self._addresses.shown if connection is None else connection.endpoint.shown

    async def open(self) -> None:
        """Connect now, in one round of attempts, so that a missing server is an error at once.

        Raises:
            ConnectionFailed: Nothing answers.
            RequestRefused: The server refused the token.
        """
        await self._connect()

    async def call(
        self,
        message: JsonMapping,
        *,
        seconds_max: float,
        idempotent: bool,
        orphaned: Callable[[Reply], None] | None = None,
        on_progress: Callable[[JsonMapping], None] | None = None,
    ) -> tuple[Reply, int]:
        """Send a message; return the success reply, and how often the message was sent.

        Args:
            message: The message to send.
            seconds_max: Longest time for the reply in seconds, repetitions included.
            idempotent: Whether to send the message again if a socket breaks before the reply.
            orphaned: Called with a reply that comes after the call was cancelled or timed out.
            on_progress: Called with each report of the request's progress, also after the reply.

        Raises:
            RequestRefused: The server refuses.
            ConnectionFailed: The server cannot be reached, or cannot be reached again after the
                socket broke.
            Timeout: No reply within `seconds_max`.
        """
        number, goes_on = next(self._numbers), False
        if on_progress is not None:
            self._hear(str(number), on_progress, _LAST if "provision" in message else _DECIDED)
        call = _Call(message, number, idempotent, orphaned)
        try:
            reply = await self._repeat(call, seconds_max)
            goes_on = reply.lease is not None
            return reply, call.sent
        finally:
            if not goes_on:
                self._progress.pop(str(number), None)

    async def _repeat(self, call: "_Call", seconds_max: float) -> Reply:
        try:
            async with asyncio.timeout(seconds_max):
                for pause in self._addresses.pauses():
                    try:
                        return await self._attempt(call)
                    except _NotLeader as error:
                        if error.names_another and not call.was_led:
                            call.was_led = True
                            continue
                        self._worry(call, error)
                    except ConnectionFailed as error:
                        if not is_worth_another_try(error) or (call.sent and not call.idempotent):
                            raise
                        self._worry(call, error)
                        is_elsewhere = isinstance(error, ServerLeft) and self._addresses.several
                        if is_elsewhere and not call.was_led:
                            call.was_led = True
                            continue
                    await asyncio.sleep(pause)
        except TimeoutError as error:
            last = f"; last problem: {call.problem.reason}" if call.problem else ""
            raise Timeout(f"{self.url}: no reply within {seconds_max:g} s{last}") from error
        raise AssertionError("this line is never reached: the pauses are endless")

    async def _attempt(self, call: "_Call") -> Reply:
        connection = await self._connect()
        call.sent += 1
        try:
            reply = await connection.ask(call.message, call.orphaned, call.number)
        except ConnectionFailed:
            call.problem = None  # The server was reached: earlier problems are over.
            raise
        if reply.success:
            if self._dialer.is_busy:
                self._spawn(self._dialer.settle())
            return reply
        refused = read_refusal(reply)
        if refused.code == Code.NOT_LEADER:
            call.sent -= 1
            raise self._led_away(connection, refused)
        if reply.lease is not None and call.orphaned is not None:
            call.orphaned(reply)  # The caller gets no answer, but the lease exists.
        if refused.code == Code.SHUTTING_DOWN and call.idempotent:
            if self._addresses.several:
                raise self._led_away(connection, refused)
            raise ConnectionFailed(self.url, refused.reason)
        raise refused

    def _worry(self, call: "_Call", error: ConnectionFailed) -> None:
        """Store a problem of a call, or raise it if it has lasted too long."""
        now = time.monotonic()
        if call.problem is None:
            call.give_up_at = now + self._reconnect_seconds
            self._on_lost(error.reason)
        if now >= call.give_up_at:
            raise self._addresses.failure(error) from error
        call.problem = error

    def _led_away(self, connection: Connection, refused: RequestRefused) -> "_NotLeader":
        """Leave a standby once it has answered earlier messages; return the error for `refused`."""
        names_another = True
        if connection is self._connection:  # Otherwise another call has left it already.
            self._connection = None
            self._aside.add(connection)
            self._spawn(self._leave(connection))
            names_another = self._addresses.redirected(connection.endpoint, refused)
            if refused.code == Code.SHUTTING_DOWN:  # Another server takes its place.
                names_another = True
        url, reason = connection.endpoint.shown, self._addresses.word_of(connection.endpoint)
        return _NotLeader(url, reason, names_another=names_another)

    def _hear(
        self, number: str, on_progress: Callable[[JsonMapping], None], last: frozenset[str]
    ) -> None:
        if len(self._progress) >= STREAMED_MAX:
            del self._progress[next(iter(self._progress))]
        self._progress[number] = on_progress, last

    def _take_event(self, event: Event) -> None:
        number, progress = str(event.id), event.data
        if number not in self._progress or not isinstance(progress, dict):
            return
        on_progress, last = self._progress[number]
        if progress.get("state") in last:
            del self._progress[number]
        # The event loop calls the callback, so that its error does not end the connection.
        asyncio.get_running_loop().call_soon(on_progress, progress)

    async def disconnect(self) -> None:
        """Close the socket without waiting for the server; the next call opens another socket."""
        if self._connection is not None:
            self._spawn(self._connection.close())
            self._connection = None

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        """Forget a task that closed a socket. Ignore its error, which unsent data may cause."""
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # Else the event loop reports it as never retrieved.

    async def close(self) -> None:
        """Close the socket, and open no other; a second close does nothing."""
        self._closed = True
        await self.disconnect()
        self._spawn(self._dialer.settle())
        for connection in self._aside:
            self._spawn(connection.close())
        await asyncio.wait(self._tasks)

    async def _leave(self, connection: Connection) -> None:
        try:
            await connection.leave()
        finally:
            self._aside.discard(connection)

    async def _connect(self) -> Connection:
        async with self._opening:
            if self._closed:
                raise MoorageError("this client is closed; make a new one")
            if self._connection is None or self._connection.ended:
                if self._connection is not None:
                    self._lost = self._lost or self._connection
                    self._addresses.note_loss(self._connection.endpoint, self._connection.end)
                await self.disconnect()
                self._connection = await self._open()
            return self._connection

    async def _open(self) -> Connection:
        """Open another socket, and resume the session of the lost one."""
        connection = await self._dialer.dial()
        connection.on_event = self._take_event
        try:
            if self._lost is not None and (
                not self._lost.unanswered
                or await connection.resume(self._lost, next(self._numbers))
            ):
                self._lost = None
        except BaseException as error:
            if isinstance(error, ConnectionFailed):
                self._addresses.note_loss(connection.endpoint, error)
            self._spawn(connection.close())
            raise
        if self._addresses.several:
            connection.expect_life()
        return connection


async def renew(
    link: Link, lease: str, token: str, ttl_seconds: float | None = None, *, seconds_max: float
) -> Lease:
    """Renew a lease; arguments and errors as in `Client.renew`."""
    message: JsonObject = {"op": "renew", "lease": lease, "token": token}
    if ttl_seconds is not None:
        message["ttl_seconds"] = ttl_seconds
    reply, _ = await link.call(message, seconds_max=seconds_max, idempotent=True)
    return read_from(link.url, read_lease, reply.lease or reply.data)


def _say_nothing(reason: str) -> None:
    """Do nothing when the link is lost: the call itself reports its outcome."""

"""A lasting link to one server: opens sockets as needed and repeats what is safe to repeat.

`Client` sends everything through its link; so does the keeper that renews leases.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from moorage.model import Code
from moorage.protocol.replies import Event, Reply
from moorage_client.answers import Lease, read_from, read_lease, read_refusal
from moorage_client.connection import Connection
from moorage_client.endpoint import Endpoint
from moorage_client.errors import ConnectionFailed, MoorageError, ProtocolViolated, Timeout

OPEN_SECONDS_MAX: Final = 10.0
"""How long one attempt to connect may take."""

STREAMED_MAX: Final = 4096
"""Requests whose progress is heard; the oldest are forgotten for more."""

_LAST: Final = frozenset({"ready", "ended"})
"""States of a workload after which no progress comes."""
_DECIDED: Final = frozenset({"decided"})
"""Where no workload is started; it may come after the reply."""
_PAUSES: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.0)
"""Seconds before each further attempt, times 0.5 to 1 by chance; the last one repeats."""


class Link:
    """One server, whichever socket leads there at the moment.

    Args:
        endpoint: Where it is, and who we are.
        reconnect_seconds: After a socket broke, how long to try to open another and repeat.
        on_lost: Called with the reason where a call has to be repeated, once until it succeeds.

    """

    def __init__(
        self,
        endpoint: Endpoint,
        reconnect_seconds: float,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self.url = endpoint.shown
        self._on_lost = on_lost or _say_nothing
        self._endpoint = endpoint
        self._reconnect_seconds = reconnect_seconds
        self._connection: Connection | None = None
        self._lost: Connection | None = None
        """Its session is to be resumed over the next one."""
        self._numbers = itertools.count(1)
        self._progress: dict[str, tuple[Callable[[Mapping[str, Any]], None], frozenset[str]]] = {}
        """By the message's id: what is called, and the states after which nothing comes."""
        self._opening = asyncio.Lock()
        self._farewells: set[asyncio.Task[None]] = set()
        self._closed = False

    async def open(self) -> None:
        """Connect now, in one attempt, so that a missing server is noticed at once.

        Raises:
            ConnectionFailed: Nothing answers.
            RequestRefused: The server refused the token.

        """
        await self._connected()

    async def call(
        self,
        message: Mapping[str, Any],
        *,
        seconds_max: float,
        idempotent: bool,
        orphaned: Callable[[Reply], None] | None = None,
        on_progress: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> tuple[Reply, int]:
        """Send a message; return the success reply and how often it was sent.

        Args:
            message: What to send.
            seconds_max: Seconds until the reply must be here, repetitions included.
            idempotent: It may be sent again when a socket broke before its reply came.
            orphaned: Called with a reply that comes after this call ended without it.
            on_progress: Called with how far the request is, also after the reply.

        Raises:
            RequestRefused: The server said no.
            ConnectionFailed: The server could not be reached, or not again.
            Timeout: No reply within `seconds_max`.

        """
        number, goes_on = next(self._numbers), False
        if on_progress is not None:
            self._hear(str(number), on_progress, _LAST if "provision" in message else _DECIDED)
        try:
            reply, sent = await self._repeat(message, number, seconds_max, idempotent, orphaned)
            goes_on = reply.lease is not None
            return reply, sent
        finally:
            if not goes_on:
                self._progress.pop(str(number), None)

    async def _repeat(
        self,
        message: Mapping[str, Any],
        number: int,
        seconds_max: float,
        idempotent: bool,
        orphaned: Callable[[Reply], None] | None,
    ) -> tuple[Reply, int]:
        problem: ConnectionFailed | None = None
        give_up_at = float("inf")
        sent = 0
        try:
            async with asyncio.timeout(seconds_max):
                for pause in _pauses():
                    before = sent
                    try:
                        connection = await self._connected()
                        problem = None
                        sent += 1
                        reply = await connection.ask(message, orphaned, number)
                        if reply.success:
                            return reply, sent
                        if reply.lease is not None and orphaned is not None:
                            orphaned(reply)  # The answer was lost on the way, the lease is there.
                        raise self._refusal(reply, idempotent)
                    except ProtocolViolated:
                        raise
                    except ConnectionFailed as error:
                        if sent > before and not idempotent:
                            raise
                        now = time.monotonic()
                        if problem is None:
                            give_up_at = now + self._reconnect_seconds
                            self._on_lost(error.reason)
                        if now >= give_up_at:
                            raise
                        problem = error
                    await asyncio.sleep(pause)
        except TimeoutError as error:
            last = f"; last problem: {problem.reason}" if problem else ""
            raise Timeout(f"{self.url}: no reply within {seconds_max:g} s{last}") from error
        raise AssertionError("the pauses never end")

    def _hear(
        self, number: str, on_progress: Callable[[Mapping[str, Any]], None], last: frozenset[str]
    ) -> None:
        if len(self._progress) >= STREAMED_MAX:
            del self._progress[next(iter(self._progress))]
        self._progress[number] = on_progress, last

    def _heard(self, event: Event) -> None:
        number, progress = str(event.id), event.data
        if number not in self._progress or not isinstance(progress, dict):
            return
        on_progress, last = self._progress[number]
        if progress.get("state") in last:
            del self._progress[number]
        # The event loop reports its error, which must not end the connection.
        asyncio.get_running_loop().call_soon(on_progress, progress)

    async def disconnect(self) -> None:
        """Drop the socket without waiting for the server; the next call opens another."""
        if self._connection is not None:
            farewell = asyncio.create_task(self._connection.close())
            self._connection = None
            self._farewells.add(farewell)
            farewell.add_done_callback(self._parted)

    def _parted(self, farewell: asyncio.Task[None]) -> None:
        """Forget a socket. Its end may fail where much is unsent, which needs no report."""
        self._farewells.discard(farewell)
        if not farewell.cancelled():
            farewell.exception()  # Else the event loop reports it as never retrieved.

    async def close(self) -> None:
        """Drop the socket for good; a second close does nothing."""
        self._closed = True
        await self.disconnect()
        if self._farewells:
            await asyncio.wait(self._farewells)

    def _refusal(self, reply: Reply, idempotent: bool) -> MoorageError:
        refused = read_refusal(reply)
        if refused.code == Code.SHUTTING_DOWN and idempotent:
            return ConnectionFailed(self.url, refused.reason)
        return refused

    async def _connected(self) -> Connection:
        async with self._opening:
            if self._closed:
                raise MoorageError("this client is closed; make a new one")
            if self._connection is None or self._connection.ended:
                if self._connection is not None:
                    self._lost = self._connection
                await self.disconnect()
                connection = await Connection.open(self._endpoint, OPEN_SECONDS_MAX)
                connection.on_event = self._heard
                self._connection = connection
                if self._lost is not None and self._lost.unanswered:
                    await self._resume(connection, self._lost)
                self._lost = None
            return self._connection

    async def _resume(self, connection: Connection, lost: Connection) -> None:
        try:
            await connection.resume(lost, next(self._numbers))
        except BaseException:
            await self.disconnect()
            raise


class Renewals:
    """Renews leases over a link: what a keeper needs of a client, and `Client` itself too."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def renew(
        self,
        lease: str,
        token: str,
        ttl_seconds: float | None = None,
        *,
        seconds_max: float,
    ) -> Lease:
        """Renew a lease; arguments and errors as in `Client.renew`."""
        message: dict[str, Any] = {"op": "renew", "lease": lease, "token": token}
        if ttl_seconds is not None:
            message["ttl_seconds"] = ttl_seconds
        reply, _ = await self._link.call(message, seconds_max=seconds_max, idempotent=True)
        return read_from(self._link.url, read_lease, reply.lease or reply.data)

    async def disconnect(self) -> None:
        """Drop the socket; the next renewal opens another."""
        await self._link.disconnect()

    async def close(self) -> None:
        """Drop the socket for good."""
        await self._link.close()


def _say_nothing(reason: str) -> None:
    """Leave it to the call to report how it ends."""


def _pauses() -> Iterator[float]:
    for pause in itertools.chain(_PAUSES, itertools.repeat(_PAUSES[-1])):
        yield pause * random.uniform(0.5, 1.0)  # noqa: S311  # Jitter.

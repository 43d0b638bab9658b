"""Watches the events of topics, over a separate socket.

`Client.watch` yields the events, `BlockingClient.watch` returns a `News`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Final, Self

from moorage.model import Code
from moorage.protocol.replies import Event
from moorage_client.addresses import Addresses, is_worth_another_try
from moorage_client.answers import read_refusal
from moorage_client.connection import Connection, TokenReplaced
from moorage_client.dialing import Dialer
from moorage_client.endpoint import Endpoint
from moorage_client.errors import ConnectionFailed, MoorageError, RequestRefused
from moorage_client.loops import LoopThread

UNREAD_MAX: Final = 10_000
"""Maximum events buffered for a slow program; beyond this, the oldest are dropped."""


class Watch:
    """Receives the news of topics over its own socket; made by `await Watch.begin(…)`.

    Args:
        addresses: The addresses of the servers.
        topics: The watched topics.
        reconnect_seconds: How long to look for another server if the connection is lost.
    """

    def __init__(
        self, addresses: Addresses, topics: Sequence[str], reconnect_seconds: float
    ) -> None:
        self._addresses = addresses
        self._dialer = Dialer(addresses)
        self._topics = list(topics)
        self._reconnect_seconds = reconnect_seconds
        self._unread: deque[Event] = deque()
        self._dropped = 0
        self._arrived = asyncio.Event()
        self._closed = False
        self._connection: Connection
        self._ending: asyncio.Task[MoorageError]

    @classmethod
    async def begin(
        cls, endpoints: Sequence[Endpoint], topics: Sequence[str], reconnect_seconds: float
    ) -> Self:
        """Begin to receive news; arguments and errors are those of `Client.watch`."""
        watch = cls(Addresses(endpoints), topics, reconnect_seconds)
        watch._connection = await watch._subscribe_and_settle(is_new=True)
        watch._ending = asyncio.create_task(watch._follow())
        return watch

    async def _follow(self) -> MoorageError:
        """Resubscribe after each lost connection; return the error that ends the watch."""
        while True:
            error = await self._connection.wait_end()
            goes_on = self._addresses.several or isinstance(error, TokenReplaced)
            if self._closed or not goes_on:
                return error
            self._addresses.note_loss(self._connection.endpoint, error)
            try:
                self._connection = await self._subscribe_and_settle(is_new=False)
            except MoorageError as problem:
                return problem
            data = {"url": self._connection.endpoint.shown, "reason": str(error)}
            self._hear(Event("reconnected", data))

    async def _subscribe_and_settle(self, *, is_new: bool) -> Connection:
        """Subscribe as `_subscribe` does, and cancel all other open attempts."""
        try:
            return await self._subscribe(is_new=is_new)
        finally:
            await self._dialer.settle()

    async def _subscribe(self, *, is_new: bool) -> Connection:
        """Return a socket to a server that sends its news.

        Args:
            is_new: Whether a missing server is an immediate error.

        Raises:
            RequestRefused: The server does not publish these topics.
            ConnectionFailed: The client can reach no server that publishes them.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._reconnect_seconds
        is_led = False
        for pause in self._addresses.pauses():
            problem: MoorageError
            try:
                connection = await self._dialer.dial()
                refused = await self._ask(connection)
            except ConnectionFailed as error:
                if is_new or not is_worth_another_try(error):
                    raise
                problem = error
            else:
                if refused is None:
                    return connection
                if self._addresses.redirected(connection.endpoint, refused) and not is_led:
                    is_led = True
                    continue
                at = connection.endpoint
                problem = ConnectionFailed(at.shown, self._addresses.word_of(at))
            if loop.time() >= give_up_at:
                raise self._addresses.failure(problem)
            await asyncio.sleep(pause)
        raise AssertionError("this line is never reached: the pauses are endless")

    async def _ask(self, connection: Connection) -> RequestRefused | None:
        """Subscribe to the news; return the refusal if the server is a standby, else None."""
        connection.on_event = self._hear
        connection.watches = True
        try:
            reply = await connection.ask({"op": "watch", "topics": self._topics})
            refused = None if reply.success else read_refusal(reply)
            match refused:
                case None:
                    if self._addresses.several:
                        connection.expect_life()
                case RequestRefused(code=Code.NOT_LEADER):
                    await connection.close()
                case RequestRefused(code=Code.SHUTTING_DOWN) if self._addresses.several:
                    raise ConnectionFailed(connection.endpoint.shown, refused.reason)  # noqa: TRY301  # It closes, too.
                case _:  # For any other code, another server would refuse too.
                    raise refused  # noqa: TRY301  # As above.
        except BaseException:
            await connection.close()
            raise
        return refused

    def _hear(self, event: Event) -> None:
        if len(self._unread) >= UNREAD_MAX:
            self._unread.popleft()
            self._dropped += 1
        self._unread.append(event)
        self._arrived.set()

    async def next(self, seconds_max: float | None = None) -> Event | None:
        """Return the next event; None if the watch is closed, or no event came in time.

        Raises:
            ConnectionFailed: The connection is lost, and all received events were returned.
        """
        loop = asyncio.get_running_loop()
        until = None if seconds_max is None else loop.time() + seconds_max
        while True:
            if self._dropped:
                lost, self._dropped = self._dropped, 0
                return Event("missed", {"missed": lost})
            if self._unread:
                return self._unread.popleft()
            if self._closed:
                return None
            if self._ending.done():
                raise self._ending.result()
            left = None if until is None else until - loop.time()
            if left is not None and left <= 0:
                return None
            self._arrived.clear()
            coming = asyncio.create_task(self._arrived.wait())
            try:
                what = [coming, self._ending]
                await asyncio.wait(what, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                coming.cancel()

    async def close(self) -> None:
        """Close the socket; pending calls of `next` return None. A second close does nothing."""
        self._closed = True
        self._unread.clear()
        self._arrived.set()
        self._ending.cancel()
        await asyncio.wait([self._ending])
        await self._connection.close()


async def watch(
    endpoints: Sequence[Endpoint], topics: Sequence[str], reconnect_seconds: float
) -> AsyncGenerator[Event, None]:
    """Yield news as they come; arguments and errors are those of `Client.watch`."""
    news = await Watch.begin(endpoints, topics, reconnect_seconds)
    try:
        while (event := await news.next()) is not None:
            yield event
    finally:
        await news.close()


class News:
    """Events for a thread: `with client.watch("leases") as news: for event in news: …`.

    `close`, the end of a `with` block, or the end of the client ends the news and each loop over
    them.

    Args:
        thread: The client's thread.
        watch: A watch that was begun on that thread.
        timeout: Seconds without an event after which a loop ends; None: no limit. Another loop
            continues with the next event.
        closed: Called when this object is closed.
    """

    def __init__(
        self,
        thread: LoopThread,
        watch: Watch,
        timeout: float | None,
        closed: Callable[["News"], None],
    ) -> None:
        self._thread = thread
        self._watch = watch
        self._timeout = timeout
        self._closed = closed
        self._open = True

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        event = self.next(self._timeout)
        if event is None:
            raise StopIteration
        return event

    def next(self, timeout: float | None = None) -> Event | None:
        """Return the next event; None if the watch is closed, or no event came in time.

        Raises:
            ConnectionFailed: The connection is lost.
        """
        return self._thread.run(self._watch.next(timeout)) if self._open else None

    def close(self) -> None:
        """Close the socket; a thread that waits for an event gets None. May be repeated."""
        if self._open:
            self._open = False
            self._closed(self)
            self._thread.run(self._watch.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

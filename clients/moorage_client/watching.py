"""Watching: the news of some topics, over a socket of its own.

`Client.watch` yields them, `BlockingClient.watch` returns a `News`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Final, Self

from moorage.protocol.replies import Event
from moorage_client.answers import read_refusal
from moorage_client.connection import Connection
from moorage_client.endpoint import Endpoint
from moorage_client.link import OPEN_SECONDS_MAX
from moorage_client.loops import LoopThread

UNREAD_MAX: Final = 10_000
"""News buffered for a slow program; beyond this the oldest are dropped."""


class Watch:
    """The news of some topics. Make one with `await Watch.begin(…)`.

    Args:
        connection: A socket that nothing else uses.

    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unread: deque[Event] = deque()
        self._dropped = 0
        self._arrived = asyncio.Event()
        self._closed = False
        connection.on_event = self._hear
        self._ending = asyncio.create_task(connection.ended_by())

    @classmethod
    async def begin(cls, endpoint: Endpoint, topics: Sequence[str]) -> Self:
        """Have the server tell its news from now on; arguments and errors as `Client.watch`."""
        watch = cls(await Connection.open(endpoint, OPEN_SECONDS_MAX))
        try:
            await watch._ask(topics)
        except BaseException:
            await watch.close()
            raise
        return watch

    async def _ask(self, topics: Sequence[str]) -> None:
        reply = await self._connection.ask({"op": "watch", "topics": list(topics)})
        if not reply.success:
            raise read_refusal(reply)

    def _hear(self, event: Event) -> None:
        if len(self._unread) >= UNREAD_MAX:
            self._unread.popleft()
            self._dropped += 1
        self._unread.append(event)
        self._arrived.set()

    async def next(self, seconds_max: float | None = None) -> Event | None:
        """Return the next news; None where it is closed, or nothing happened for so long.

        Raises:
            ConnectionFailed: The server went away, and all its news were returned.

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
        """Close the socket; waits for news return None. A second time does nothing."""
        self._closed = True
        self._unread.clear()
        self._arrived.set()
        await self._connection.close()
        await self._ending


async def watch(endpoint: Endpoint, topics: Sequence[str]) -> AsyncGenerator[Event, None]:
    """Yield news as they come; arguments and errors as `Client.watch`."""
    news = await Watch.begin(endpoint, topics)
    try:
        while (event := await news.next()) is not None:
            yield event
    finally:
        await news.close()


class News:
    """News for a thread: `with client.watch("leases") as news: for event in news: …`.

    Without `with`, `close` ends it; so does the client's own end. A loop over closed news ends.

    Args:
        thread: Where the client lives.
        watch: Began there.
        timeout: Seconds without news after which a loop ends; None: it never does. Another loop
            over it goes on.
        closed: Told when it is closed.

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
        """Return the next news; None where it is closed, or nothing happened for so many seconds.

        Raises:
            ConnectionFailed: The server went away.

        """
        return self._thread.run(self._watch.next(timeout)) if self._open else None

    def close(self) -> None:
        """Close the socket; a thread that waits for news gets None. Idempotent."""
        if self._open:
            self._open = False
            self._closed(self)
            self._thread.run(self._watch.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

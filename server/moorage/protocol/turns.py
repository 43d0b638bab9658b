"""One large message or body at a time, tenants in turn: what the gateway and the HTTP side read.

To read one takes up to twenty milliseconds, in which nothing else happens. So one waits for the
others, and after each the loop is free for as long as it took: all large messages together take at
most half of it, and a tenant that sends a thousand of them holds another one's up by one.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

__all__ = ["LARGE_BYTES", "Turns"]

LARGE_BYTES: Final = 32 * 1024
"""What is larger waits for its turn."""


class Turns:
    """Lets one go on at a time.

    Args:
        rests: Whether there is a pause after each, as long as it took.

    """

    def __init__(self, *, rests: bool = True) -> None:
        self._rests = rests
        self._taken = False
        self._closed = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn and hold it.

        Args:
            tenant: Whose it is. Each has one turn, then the next tenant has its own.

        """
        loop = asyncio.get_running_loop()
        if self._closed:
            yield
            return
        if self._taken:
            await self._wait(tenant)
        self._taken = True
        start = loop.time()
        try:
            yield
        finally:
            if self._rests:
                loop.call_later(loop.time() - start, self._pass_on)
            else:
                self._pass_on()

    def close(self) -> None:
        """Let all go on that wait, and who comes later, too: the server stops."""
        self._closed = True
        waiting, self._waiting = self._waiting, OrderedDict()
        for place in (each for line in waiting.values() for each in line):
            if not place.done():
                place.set_result(None)

    async def _wait(self, tenant: str) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # Its turn came in the same moment.
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        self._taken = False
        while self._waiting:
            tenant, line = self._waiting.popitem(last=False)
            place = line.popleft()
            if line:
                self._waiting[tenant] = line
            if not place.done():  # Else it was cancelled while it waited.
                self._taken = True
                place.set_result(None)
                return

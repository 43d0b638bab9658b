"""A TCP proxy that can hold back traffic in one or both directions, as a broken network does."""

import asyncio
import contextlib
from typing import Final, Literal

Way = Literal["there", "back"]
WAYS: Final[tuple[Way, Way]] = ("there", "back")
"""The two directions of traffic: to the target, and from it."""


class Proxy:
    """Passes bytes to a port; during a partition, holds the bytes back, and passes them on later.

    Attributes:
        target: The target port; may be changed.
        port: The port of the proxy.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self._passes = {way: asyncio.Event() for way in WAYS}
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self.heal()

    async def open(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self, *ways: Way) -> None:
        """Hold back all bytes, in one direction or in both."""
        for way in ways or WAYS:
            self._passes[way].clear()

    def heal(self) -> None:
        """Pass on traffic again, beginning with the bytes that were held back."""
        for each in self._passes.values():
            each.set()

    async def partition(self, seconds: float, *ways: Way) -> None:
        """Hold back all bytes for some seconds, in one direction or in both."""
        self.cut(*ways)
        await asyncio.sleep(seconds)
        self.heal()

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        if self._server is not None:
            self._server.close()
        for each in self._pumps:
            each.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._passes["there"].wait()
            there = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        self._begin("there", reader, there[1])
        self._begin("back", there[0], writer)

    def _begin(self, way: Way, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        pump = asyncio.create_task(self._pump(self._passes[way], source, target))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    async def _pump(
        self, passes: asyncio.Event, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        try:
            with contextlib.suppress(OSError):
                while piece := await source.read(65_536):
                    await passes.wait()
                    target.write(piece)
                    await target.drain()
                await passes.wait()  # The end of a connection is held back, too.
        finally:
            target.close()

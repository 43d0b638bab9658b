"""Runs a Redis that syncs each change to disk, and a client with many concurrent commands."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from benchmarks.peers.servers import find_program, folder, free_port, library, program, version_of
from moorage.bench.placements import CONNECTIONS
from moorage.lab.errors import CommandError


def version() -> str | None:
    """Return the version of the server; None unless it and its Python client are installed."""
    return version_of(find_program("redis-server")) if library("hiredis") else None


class RedisConnection(asyncio.Protocol):
    """A connection whose commands are answered in order."""

    def __init__(self) -> None:
        import hiredis  # noqa: PLC0415  # This peer's alone.

        self._reader: Any = hiredis.Reader()
        self._pack: Any = hiredis.pack_command
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._transport: Any = None  # uvloop's transport has no class of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport to which commands are written."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Complete the calls whose answers have arrived."""
        self._reader.feed(data)
        while (answer := self._reader.gets()) is not False:
            waiting = self._waiting.popleft()
            if isinstance(answer, Exception):
                waiting.set_exception(CommandError(f"Redis: {answer}"))
            else:
                waiting.set_result(answer)

    def send(self, *command: str | bytes | int) -> asyncio.Future[Any]:
        """Send a command, and return a future of its answer."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        self._transport.write(self._pack(command))
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[tuple[int, list[RedisConnection]]]:
    """Run a Redis server that syncs its append-only file before each answer.

    Yields:
        The server's process id, connections for requests, and one connection for waiting.
    """
    path, port = find_program("redis-server"), free_port()
    assert path is not None
    with folder() as data:
        flags = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(data), "--save", ""]
        flags += ["--appendonly", "yes", "--appendfsync", "always"]
        async with program([path, *flags], port, data / "log") as pid:
            loop = asyncio.get_running_loop()
            connections = [
                (await loop.create_connection(RedisConnection, "127.0.0.1", port))[1]
                for _ in range(CONNECTIONS + 1)
            ]
            try:
                yield pid, connections
            finally:
                for each in connections:
                    each.close()


INSTALL = "apt-get install redis-server; pip install hiredis"

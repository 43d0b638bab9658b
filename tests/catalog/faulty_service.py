"""An HTTP server for tests that answers correctly, late, partly, too much, or wrongly.

It speaks just enough HTTP/1.1 for a real client over a real socket, and remembers every
request, so that tests can count them.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


Writer = asyncio.StreamWriter
Behaviour = Callable[[Asked, Writer], Awaitable[None]]


def answer(body: Any, status: int = 200, **headers: str) -> Behaviour:
    """Answer with JSON, or with text as it is; `\\udce9` in it stands for the byte E9."""
    text = body if isinstance(body, str) else json.dumps(body)
    content = text.encode(errors="surrogateescape")

    async def behave(request: Asked, writer: Writer) -> None:
        said = {"content_length": str(len(content)), **headers}
        lines = [f"HTTP/1.1 {status} Whatever"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in said.items()]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + content)

    return behave


async def silence(request: Asked, writer: Writer) -> None:
    """Never send an answer."""
    await asyncio.Event().wait()


async def hang_up(request: Asked, writer: Writer) -> None:
    """Close the connection instead of answering."""
    writer.close()


async def stop_halfway(request: Asked, writer: Writer) -> None:
    """Announce more bytes than the service sends, then close the connection."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n[{")
    await writer.drain()
    writer.close()


async def fall_silent(request: Asked, writer: Writer) -> None:
    """Send the beginning of an answer and nothing more."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n[{")
    await asyncio.Event().wait()


async def drip(request: Asked, writer: Writer) -> None:
    """Send an answer so slowly that it never ends, with no long pause between its parts."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.01)  # One byte at a time.


async def flood(request: Asked, writer: Writer) -> None:
    """Send an oversized answer without a length."""
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    while True:
        writer.write(chunk)
        await writer.drain()


async def nonsense(request: Asked, writer: Writer) -> None:
    """Send bytes that are not HTTP."""
    writer.write(b"220 mail.example ESMTP\r\n")
    await writer.drain()
    writer.close()


class FaultyService:
    """An HTTP server whose answers `by_path`, or else `behave`, makes; tests may replace both."""

    def __init__(self) -> None:
        self.requests: list[Asked] = []
        self.behave: Behaviour = answer([])
        self.by_path: dict[str, Behaviour] = {}
        self.url = ""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> "FaultyService":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def count(self, path: str = "") -> int:
        return sum(each.path.startswith(path) for each in self.requests)

    async def _serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while not writer.is_closing():
                request = await self._read(reader)
                self.requests.append(request)
                await self.by_path.get(request.path, self.behave)(request, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader) -> Asked:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        pairs = (line.split(": ", 1) for line in lines if line)
        headers = {name.lower(): value for name, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split(" ")
        return Asked(method, path, headers, json.loads(body) if body else None)


class FaultyServiceInThread:
    """A `FaultyService` on a separate loop and thread, for tests that block."""

    def __init__(self) -> None:
        self.faulty = FaultyService()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> FaultyService:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.faulty.start(), self._loop).result(60)
        return self.faulty

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self.faulty.stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

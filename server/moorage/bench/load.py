"""Sends messages through WebSockets and measures the times, both for a daemon and for an echo.

Messages go out over several connections, each with a window of messages under way; replies come
in order, since the messages carry no `id`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from websockets.asyncio.client import ClientConnection, connect

REPLY_SECONDS_MAX: Final = 60.0
"""Maximum seconds for a reply; a run with a slower reply fails."""


@dataclass(slots=True)
class LoadResult:
    """The times of one run.

    Args:
        seconds: The time from the first sent message to the last reply.
        latencies: Seconds from a message to its reply, in the order of the messages.
        replies: The replies, in the same order.
    """

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list[float])
    replies: list[bytes] = field(default_factory=list[bytes])

    @property
    def per_second(self) -> float:
        """Replies per second."""
        return len(self.replies) / self.seconds if self.seconds else 0.0

    def quantile(self, share: float) -> float:
        """Return the quantile of the latencies at a share, 0 to 1, in seconds."""
        ranked = sorted(self.latencies)
        return ranked[min(int(share * len(ranked)), len(ranked) - 1)] if ranked else 0.0


async def drive(
    url: str,
    messages: Sequence[str],
    *,
    connections: int = 1,
    window: int = 1,
    progress: Callable[[int], None] | None = None,
) -> LoadResult:
    """Send `messages` and collect the replies.

    Args:
        url: URL of the WebSocket.
        messages: JSON texts; message i goes over connection i mod `connections`.
        connections: The largest number of sockets.
        window: The largest number of messages without a reply per socket; 1: wait for each reply.
        progress: Called with 1 for each reply.

    Raises:
        OSError: Nothing answers at `url`, or not within `REPLY_SECONDS_MAX`.
        WebSocketException: A socket broke.
    """
    load = LoadResult(latencies=[0.0] * len(messages), replies=[b""] * len(messages))
    sockets = [
        await connect(url, compression=None, max_size=None, max_queue=None, proxy=None)
        for _ in range(min(connections, max(len(messages), 1)))
    ]
    try:
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number, socket in enumerate(sockets):
                turns = range(number, len(messages), len(sockets))
                group.create_task(_one(socket, messages, turns, window, load, progress))
        load.seconds = time.perf_counter() - started
    except ExceptionGroup as group:  # The failure of one socket fails the run.
        raise group.exceptions[0] from None
    finally:
        for socket in sockets:
            await socket.close()
    return load


async def _one(
    socket: ClientConnection,
    messages: Sequence[str],
    turns: range,
    window: int,
    load: LoadResult,
    progress: Callable[[int], None] | None,
) -> None:
    sent: deque[tuple[int, float]] = deque()
    for number in turns:
        if len(sent) >= window:
            await _receive(socket, sent, load, progress)
        sent.append((number, time.perf_counter()))
        await socket.send(messages[number])
    while sent:
        await _receive(socket, sent, load, progress)


async def _receive(
    socket: ClientConnection,
    sent: deque[tuple[int, float]],
    load: LoadResult,
    progress: Callable[[int], None] | None,
) -> None:
    async with asyncio.timeout(REPLY_SECONDS_MAX):
        reply = await socket.recv(decode=False)
    number, at = sent.popleft()
    load.latencies[number] = time.perf_counter() - at
    load.replies[number] = reply
    if progress is not None:
        progress(1)

"""Watching: the news of some topics, over a socket of its own. Used by `Client.watch`."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from moorage.protocol.replies import Event
from moorage_client.answers import read_refusal
from moorage_client.connection import Connection
from moorage_client.link import OPEN_SECONDS_MAX

UNREAD_MAX: Final = 10_000
"""News kept for a program that is slow to take them; beyond it the oldest are dropped."""


async def watch(url: str, token: str | None, topics: Sequence[str]) -> AsyncGenerator[Event, None]:
    """Yield news as they come; arguments and errors as `Client.watch`."""
    connection = await Connection.open(url, token, OPEN_SECONDS_MAX)
    unread: deque[Event] = deque()
    dropped = 0
    arrived = asyncio.Event()

    def hear(event: Event) -> None:
        nonlocal dropped
        if len(unread) >= UNREAD_MAX:
            unread.popleft()
            dropped += 1
        unread.append(event)
        arrived.set()

    connection.on_event = hear
    ending = asyncio.create_task(connection.ended_by())
    try:
        reply = await connection.ask({"op": "watch", "topics": list(topics)})
        if not reply.success:
            raise read_refusal(reply)
        while True:
            while unread:
                if dropped:
                    lost, dropped = dropped, 0
                    yield Event("missed", {"missed": lost})
                yield unread.popleft()
            arrived.clear()
            coming = asyncio.create_task(arrived.wait())
            await asyncio.wait([coming, ending], return_when=asyncio.FIRST_COMPLETED)
            coming.cancel()
            if ending.done() and not unread:
                raise ending.result()
    finally:
        await connection.close()
        await ending

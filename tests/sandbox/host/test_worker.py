"""Tests of the daemon's view of a worker, by messages of the agent on Ray."""

import asyncio
from collections import Counter
from typing import Any

from moorage.sandbox.host.sandbox import Limits
from moorage.sandbox.host.worker import RemoteWorker
from moorage.sandbox.wire import relay


class Reader(asyncio.Protocol):
    """A reader of a cell's channel."""

    def __init__(self) -> None:
        self.heard: list[bytes | None] = []

    def data_received(self, data: bytes) -> None:
        self.heard.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.heard.append(None)


async def test_a_worker_reads_messages_that_are_sent_together_with_the_start_message() -> None:
    sent: list[Any] = []
    up = relay.WorkerUp("1/n", "n", 1, {}, {})
    worker = RemoteWorker(up, Limits(), "jail", lambda *_: None, Counter(), sent.append)
    spawning = asyncio.ensure_future(worker.spawn())
    await asyncio.sleep(0)
    assert sent == [relay.Spawn(1)]
    # An agent joins all that it sends at one time into one message.
    said = [relay.CellSaid(1, b"jailed", 0), relay.CellSaid(1, b"loaded", 7), relay.Closed(1)]
    for message in (relay.Born(1), *said):
        worker.take(relay.encode(message))
    reader = Reader()
    process = await spawning
    await process.join(reader)
    assert reader.heard == [b"jailed", b"loaded", None]
    assert process._transport.get_write_buffer_size() == -7

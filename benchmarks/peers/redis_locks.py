"""The peer Redis with locks: `SET NX PX` for each GPU, tried in random order; waiters poll."""

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Final

from benchmarks.peers import redis_server
from benchmarks.peers.session import Peer, Probes, devices
from moorage.bench.placements import Booking, Nodes

LOCK_MILLISECONDS: Final = 3_600_000
POLL_SECONDS: Final = 0.1
"""Seconds between two polls, as in the lock of the Python client."""
_RELEASE: Final = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
)


class _Session:
    def __init__(
        self, pid: int, connections: Sequence[redis_server.RedisConnection], nodes: Nodes
    ) -> None:
        self.pids = [pid]
        self._connections = itertools.cycle(connections)
        self._gpus = devices(nodes)
        self._keys = [f"gpu:{node}:{number}" for node, number in self._gpus]
        self._probes = Probes(len(self._keys))

    async def place(self) -> Booking | None:
        for place in self._probes():
            if (booking := await self._lock(place)) is not None:
                return booking
        held = await next(self._connections).send("MGET", *self._keys)
        for place in self._probes.shuffled([n for n, owner in enumerate(held) if owner is None]):
            if (booking := await self._lock(place)) is not None:
                return booking
        return None

    async def _lock(self, place: int) -> Booking | None:
        key, token = self._keys[place], uuid.uuid4().hex
        command = ("SET", key, token, "NX", "PX", LOCK_MILLISECONDS)
        if await next(self._connections).send(*command) is None:
            return None
        return Booking((key, token), *self._gpus[place])

    async def release(self, booking: Booking) -> None:
        gone = await next(self._connections).send("EVAL", _RELEASE, 1, *booking.handle)
        assert gone == 1

    async def wait(self, parked: asyncio.Event) -> Booking:
        while (booking := await self.place()) is None:
            parked.set()
            await asyncio.sleep(POLL_SECONDS)  # Locks send no event at a release.
        return booking


@contextlib.asynccontextmanager
async def _run(nodes: Nodes) -> AsyncIterator[_Session]:
    async with redis_server.server() as (pid, connections):
        yield _Session(pid, connections, nodes)


PEER: Final = Peer(
    name="redis-locks",
    group="home-made",
    title="Redis, a lock per GPU",
    decides="any free GPU",
    stores="yes, synced",
    install=redis_server.INSTALL,
    version=redis_server.version,
    run=_run,
)

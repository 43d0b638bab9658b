"""The peer Redis with a Lua script, which books GPUs with fencing numbers; `BLMOVE` waits."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from benchmarks.peers import redis_server
from benchmarks.peers.session import Peer, devices
from moorage.bench.placements import Booking, Nodes

LEASE_SECONDS: Final = 3_600
_BOOK: Final = """
for _, gpu in ipairs(redis.call('ZRANGEBYSCORE', 'expiry', '-inf', ARGV[1], 'LIMIT', 0, 8)) do
  redis.call('ZREM', 'expiry', gpu); redis.call('HDEL', 'held', gpu)
  redis.call('RPUSH', 'free', gpu)
end
local gpu = ARGV[3]
if gpu then redis.call('LREM', 'moving', 1, gpu) else gpu = redis.call('LPOP', 'free') end
if not gpu then return false end
local fencing = redis.call('INCR', 'fencing')
redis.call('HSET', 'held', gpu, fencing); redis.call('ZADD', 'expiry', ARGV[2], gpu)
return {gpu, fencing}
"""
_RELEASE: Final = """
if redis.call('HGET', 'held', ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HDEL', 'held', ARGV[1]); redis.call('ZREM', 'expiry', ARGV[1])
redis.call('RPUSH', 'free', ARGV[1])
return 1
"""


class _Session:
    def __init__(
        self,
        pid: int,
        connections: Sequence[redis_server.RedisConnection],
        scripts: Sequence[bytes],
    ) -> None:
        self.pids = [pid]
        *others, self._waiter = connections
        self._connections = itertools.cycle(others)
        self._book, self._release = scripts

    async def place(self) -> Booking | None:
        return await self._book_gpus()

    async def _book_gpus(self, *gpu: bytes) -> Booking | None:
        now = int(time.time())
        connection, until = next(self._connections), now + LEASE_SECONDS
        answer: list[Any] | None = await connection.send("EVALSHA", self._book, 0, now, until, *gpu)
        if answer is None:
            return None
        node, _, number = answer[0].decode().partition(":")
        return Booking(answer, node, number)

    async def release(self, booking: Booking) -> None:
        gpu, fencing = booking.handle
        connection = next(self._connections)
        assert await connection.send("EVALSHA", self._release, 0, gpu, fencing) == 1

    async def wait(self, parked: asyncio.Event) -> Booking:
        moved = self._waiter.send("BLMOVE", "free", "moving", "LEFT", "RIGHT", 0)
        parked.set()
        booking = await self._book_gpus(await moved)
        assert booking is not None
        return booking


@contextlib.asynccontextmanager
async def _run(nodes: Nodes) -> AsyncIterator[_Session]:
    async with redis_server.server() as (pid, connections):
        scripts = [
            await connections[0].send("SCRIPT", "LOAD", script) for script in (_BOOK, _RELEASE)
        ]
        await connections[0].send("RPUSH", "free", *map(":".join, devices(nodes)))
        yield _Session(pid, connections, scripts)


PEER: Final = Peer(
    name="redis-script",
    group="home-made",
    title="Redis, one Lua script",
    decides="any free GPU; fencing, expiry",
    stores="yes, synced",
    install=redis_server.INSTALL,
    version=redis_server.version,
    run=_run,
)

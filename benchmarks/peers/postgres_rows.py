"""PostgreSQL, a row per GPU: `FOR UPDATE SKIP LOCKED` takes any free row, `LISTEN` waits."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

from benchmarks.peers import postgres_server
from benchmarks.peers.session import Peer, devices
from moorage.bench.placements import Booking, Nodes

_TABLE: Final = """
create sequence fencing;
create table gpu (id int primary key, node text, device text, fencing bigint, until timestamptz);
create index free on gpu (id) where fencing is null;
"""
_BOOK: Final = """
update gpu set fencing = nextval('fencing'), until = now() + interval '1 hour'
where id = (select id from gpu where fencing is null limit 1 for update skip locked)
returning id, fencing, node, device
"""
_RELEASE: Final = """
with gone as (
    update gpu set fencing = null, until = null where id = $1 and fencing = $2 returning id
) select pg_notify('freed', id::text) from gone
"""
_ANY_FREE: Final = "select 1 from gpu where fencing is null limit 1"


class _Session:
    def __init__(self, pid: int, pool: Any, listener: Any) -> None:
        self.pids = [pid]
        self._pool, self._listener = pool, listener

    async def place(self) -> Booking | None:
        while (row := await self._pool.fetchrow(_BOOK)) is None:
            if await self._pool.fetchrow(_ANY_FREE) is None:
                return None
        return Booking((row[0], row[1]), row[2], row[3])

    async def release(self, booking: Booking) -> None:
        assert await self._pool.fetchrow(_RELEASE, *booking.handle) is not None

    async def wait(self, parked: asyncio.Event) -> Booking:
        booking: Booking = await postgres_server.next_free(self._listener, parked, self.place)
        return booking


@contextlib.asynccontextmanager
async def _run(nodes: Nodes) -> AsyncIterator[_Session]:
    async with postgres_server.server() as (pid, pool, listener):
        await pool.execute(_TABLE)
        rows = [(number, *gpu) for number, gpu in enumerate(devices(nodes))]
        await pool.executemany("insert into gpu (id, node, device) values ($1, $2, $3)", rows)
        await pool.execute("analyze gpu")
        yield _Session(pid, pool, listener)


PEER: Final = Peer(
    name="postgres-rows",
    group="home-made",
    title="PostgreSQL, SKIP LOCKED",
    decides="any free GPU; fencing, expiry",
    stores="yes, synced",
    install=postgres_server.INSTALL,
    version=postgres_server.version,
    run=_run,
)

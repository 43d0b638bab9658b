"""The peer PostgreSQL with a row per GPU: `FOR UPDATE SKIP LOCKED` takes a row, `LISTEN` waits."""

import contextlib
from collections.abc import AsyncIterator
from typing import Final

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


@contextlib.asynccontextmanager
async def _run(nodes: Nodes) -> AsyncIterator[postgres_server.PostgresSession]:
    async with postgres_server.server() as (pid, pool, listener):
        await pool.execute(_TABLE)
        rows = [(number, *gpu) for number, gpu in enumerate(devices(nodes))]
        await pool.executemany("insert into gpu (id, node, device) values ($1, $2, $3)", rows)
        await pool.execute("analyze gpu")
        statements = (_BOOK, _ANY_FREE, _RELEASE)
        yield postgres_server.PostgresSession(
            [pid], pool, listener, *statements, lambda row: Booking(row[:2], row[2], row[3])
        )


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

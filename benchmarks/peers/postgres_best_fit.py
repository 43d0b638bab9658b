"""The peer PostgreSQL with a row per node: a statement takes a GPU of the fullest usable node."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from benchmarks.peers import postgres_server
from benchmarks.peers.session import Peer
from moorage.bench.placements import CPU_MILLI, MEMORY_MIB, Booking, Nodes

_TABLES: Final = """
create sequence fencing;
create table node (id int primary key, name text, cpu int, memory int, gpus int, free bigint);
create index room on node (gpus, id) where gpus > 0;
create table lease (
    fencing bigint primary key, node int, device bigint, cpu int, memory int, until timestamptz
);
"""
# `free` has a bit for each GPU, of which the lowest is taken. `best` is the row when it was locked.
_BOOK: Final = f"""
with best as (
    select id, name, free & -free as device from node
    where gpus > 0 and cpu >= {CPU_MILLI} and memory >= {MEMORY_MIB}
    order by gpus, id limit 1 for update skip locked
), taken as (
    update node set cpu = node.cpu - {CPU_MILLI}, memory = node.memory - {MEMORY_MIB},
        gpus = node.gpus - 1, free = node.free - best.device
    from best where node.id = best.id returning node.id, best.name, best.device
)
insert into lease select nextval('fencing'), id, device, {CPU_MILLI}, {MEMORY_MIB},
    now() + interval '1 hour' from taken
returning fencing, (select name from taken), device
"""  # noqa: S608  # Our own numbers.
_RELEASE: Final = """
with gone as (
    delete from lease where fencing = $1 returning *
), back as (
    update node set cpu = node.cpu + gone.cpu, memory = node.memory + gone.memory,
        gpus = node.gpus + 1, free = node.free + gone.device
    from gone where node.id = gone.node returning node.id
) select pg_notify('freed', id::text) from back
"""
_ANY_FREE: Final = "select 1 from node where gpus > 0 limit 1"


@contextlib.asynccontextmanager
async def _run(nodes: Nodes) -> AsyncIterator[postgres_server.PostgresSession]:
    async with postgres_server.server() as (pid, pool, listener):
        await pool.execute(_TABLES)
        rows = [
            (number, node.name, node.cpu_milli, node.memory_mib, node.gpus, 2**node.gpus - 1)
            for number, node in enumerate(nodes)
        ]
        await pool.executemany("insert into node values ($1, $2, $3, $4, $5, $6)", rows)
        await pool.execute("analyze node")
        statements = (_BOOK, _ANY_FREE, _RELEASE)
        yield postgres_server.PostgresSession([pid], pool, listener, *statements, _booking)


def _booking(row: Sequence[Any]) -> Booking:
    fencing, node, device = row
    return Booking((fencing,), node, str(device.bit_length() - 1))


PEER: Final = Peer(
    name="postgres-best-fit",
    group="home-made",
    title="PostgreSQL, best fit",
    decides="node by CPU, memory and GPUs, device; one fixed rule",
    stores="yes, synced",
    install=postgres_server.INSTALL,
    version=postgres_server.version,
    run=_run,
)

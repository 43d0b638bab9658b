"""Tests of a lost primary, an old primary that returns, and commits without an answer."""

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.faults.database import PostgresServer, find_programs, running_postgres
from moorage.ledger.base import LedgerFailed
from moorage.ledger.stored import StoredLedger
from tests.ledger.facts import NOW, numbered_facts

pytestmark = [pytest.mark.heavy, pytest.mark.postgres]
pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")

from moorage.storage.postgres.storage import PostgresStorage  # noqa: E402  # After the skip.

WAITING = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
END_WAITING = f"SELECT pg_terminate_backend(pid) {WAITING}"


@pytest.fixture
def primary() -> Iterator[PostgresServer]:
    """A primary with a synchronous standby."""
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with running_postgres(programs) as server:
        server.add_standby()
        yield server


async def end_waiting(server: PostgresServer, waiting: "asyncio.Future[object]") -> None:
    """End the sessions that wait for a standby, as soon as there are any."""
    while not await asyncio.to_thread(server.execute, END_WAITING):
        assert not waiting.done()


async def test_an_old_primary_that_returns_admits_no_writer(primary: PostgresServer):
    """The old primary has the old epoch; without its standby it acknowledges no commit."""
    address = primary.database()
    name, old = address.rpartition("/")[2], primary.port
    ledger = StoredLedger(PostgresStorage(address).facts())
    await ledger.open()
    assert await ledger.append(numbered_facts(1, 2), NOW) == 2
    await asyncio.to_thread(primary.promote)
    with pytest.raises(LedgerFailed):
        await ledger.append(numbered_facts(3, 3), NOW)
    with pytest.raises(LedgerFailed):
        await ledger.close()
    new = StoredLedger(PostgresStorage(primary.url(name)).facts())
    await new.open()
    assert [entry.fact for entry in await new.read()] == numbered_facts(1, 2)
    assert await new.append(numbered_facts(3, 3), NOW) == 3
    with primary.revived() as before:
        assert before.port == old
        misled = StoredLedger(PostgresStorage(address).facts())
        opening = asyncio.ensure_future(misled.open())
        await end_waiting(before, opening)
        with pytest.raises(LedgerFailed):
            await opening
    assert [entry.fact for entry in await new.read()] == numbered_facts(1, 3)
    await new.close()


async def test_a_connection_that_breaks_during_a_commit_ends_the_server(primary: PostgresServer):
    """The facts are stored, so the server that wrote them must not report them as lost."""
    address = primary.database()
    ledger = StoredLedger(PostgresStorage(address).facts())
    await ledger.open()
    with primary.without_standby():
        appending = asyncio.ensure_future(ledger.append(numbered_facts(1, 1), NOW))
        await end_waiting(primary, appending)
        with pytest.raises(LedgerFailed, match=r"terminating connection|closed"):
            await appending
        with pytest.raises(LedgerFailed):
            await ledger.append(numbered_facts(1, 1), NOW)
        with pytest.raises(LedgerFailed):
            await ledger.close()
    after = StoredLedger(PostgresStorage(address).facts())
    await after.open()
    assert [entry.fact for entry in await after.read()] == numbered_facts(1, 1)
    assert await after.append(numbered_facts(2, 2), NOW) == 2
    await after.close()

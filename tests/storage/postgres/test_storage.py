"""Tests of PostgreSQL as storage: known pitfalls, and the error message of each."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.faults.database import PGBOUNCER
from moorage.daemon.access.audit_chain import ChainError
from moorage.daemon.access.audit_table import AuditTable, is_begin_known, verify_rows
from moorage.daemon.access.lease_tokens import digest
from moorage.daemon.access.token_store import TokenStore
from moorage.daemon.access.tokens import Tokens
from moorage.ledger.base import LedgerFailed
from moorage.ledger.stored import StoredLedger
from moorage.records.audit import AuditEntry
from moorage.storage.base import (
    AuditEnd,
    RecordRow,
    StorageError,
    StorageLocked,
    TokenRow,
)
from tests.ledger.facts import NOW, numbered_facts

pytestmark = [pytest.mark.heavy, pytest.mark.postgres]
pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")

from moorage.storage.postgres import connection, examination  # noqa: E402  # After the skip.
from moorage.storage.postgres.shared_table import FRESH_SECONDS  # noqa: E402  # As above.
from moorage.storage.postgres.storage import PostgresStorage, prepare  # noqa: E402  # As above.
from moorage.storage.sqlite.storage import SqliteStorage  # noqa: E402  # As above.

HOLDER = """
import sys
from moorage.storage.postgres.storage import PostgresStorage
facts = PostgresStorage(sys.argv[1]).facts()
facts.open()
print("open", flush=True)
input()
"""


@pytest.fixture
def address(postgres) -> str:
    return postgres.database()


def test_the_next_server_can_open_the_ledger_of_a_killed_server(address: str):
    command = [sys.executable, "-c", HOLDER, address]
    facts = PostgresStorage(address).facts()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(StorageLocked, match=f"in use by process {holder.pid} on ") as caught:
            facts.open()
        assert "one server writes at a time" in str(caught.value)
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
    facts.open()
    facts.end_writing(clean=True)
    facts.close()


async def test_a_deposed_server_stores_nothing_and_reports_that_it_is_deposed(
    postgres, address: str
):
    ledger = StoredLedger(PostgresStorage(address).facts())
    await ledger.open()
    assert await ledger.append(numbered_facts(1, 2), NOW) == 2
    name = address.rpartition("/")[2]
    postgres.execute("UPDATE moorage.epoch SET epoch = epoch + 1", name)
    with pytest.raises(LedgerFailed, match="another server has written to"):
        await ledger.append(numbered_facts(3, 3), NOW)
    with pytest.raises(LedgerFailed):
        await ledger.append(numbered_facts(3, 3), NOW)
    assert postgres.execute("SELECT max(seq) FROM moorage.fact", name) == [(2,)]
    with pytest.raises(LedgerFailed):
        await ledger.close()


@pytest.mark.parametrize("purpose", ["lock", "ledger"])
async def test_an_idle_ledger_fails_after_its_connection_was_ended(
    postgres, address: str, purpose: str
):
    ledger = StoredLedger(PostgresStorage(address).facts())
    await ledger.open()
    assert await ledger.append(numbered_facts(1, 1), NOW) == 1
    ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ %s"
    name = address.rpartition("/")[2]
    postgres.execute(f"{ended} AND datname = %s", "postgres", (f"moored {purpose} ", name))

    async def write_until_it_fails() -> None:
        while True:
            ledger.check()
            if purpose == "ledger":
                await ledger.append(numbered_facts(2, 2), NOW)
            await asyncio.sleep(0.05)  # The next check of the lock fails.

    with pytest.raises(LedgerFailed, match=r"terminating connection|closed"):
        await asyncio.wait_for(write_until_it_fails(), 30)
    with pytest.raises(LedgerFailed):
        await ledger.close()


async def test_a_reader_whose_session_was_ended_is_opened_again(postgres, address: str):
    ledger = StoredLedger(PostgresStorage(address).facts())
    await ledger.open()
    await ledger.append(numbered_facts(1, 1), NOW)
    postgres.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ %s"
        " AND datname = %s",
        "postgres",
        ("moored reader ", address.rpartition("/")[2]),
    )
    with pytest.raises(LedgerFailed):
        await ledger.read()
    assert [entry.fact for entry in await ledger.read()] == numbered_facts(1, 1)
    await ledger.close()


@pytest.fixture
def absent_standby(postgres) -> Iterator[None]:
    """Make commits wait for a standby that does not exist."""
    postgres.execute("ALTER SYSTEM SET synchronous_standby_names = 'absent'")
    postgres.execute("SELECT pg_reload_conf()")
    yield
    postgres.execute("ALTER SYSTEM RESET synchronous_standby_names")
    postgres.execute("SELECT pg_reload_conf()")


async def test_a_cancelled_wait_for_a_database_standby_does_not_count_as_a_commit(
    postgres, address: str, request: pytest.FixtureRequest
):
    """PostgreSQL reports success of the commit, and only warns that it may still be lost."""
    ledger = StoredLedger(PostgresStorage(address).facts())
    await ledger.open()
    request.getfixturevalue("absent_standby")
    appending = asyncio.ensure_future(ledger.append(numbered_facts(1, 1), NOW))
    cancel = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    while not await asyncio.to_thread(postgres.execute, cancel):
        if appending.done():  # PostgreSQL has not yet read its settings again.
            appending = asyncio.ensure_future(ledger.append(numbered_facts(1, 1), NOW))
    with pytest.raises(LedgerFailed, match="canceling wait for synchronous replication"):
        await appending
    with pytest.raises(LedgerFailed):
        await ledger.append(numbered_facts(2, 2), NOW)
    with pytest.raises(LedgerFailed):
        await ledger.close()


async def test_fencing_numbers_continue_above_the_reserved_numbers(address: str):
    for clean, floor in ((True, 0), (False, 7), (True, 10_008)):
        facts = PostgresStorage(address).facts()
        assert facts.open().fencing == floor
        facts.commit([], floor + 7 if floor != 7 else 8, [])
        facts.end_writing(clean=clean)
        facts.close()


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_a_connection_pooler_is_refused(postgres, address: str, mode: str):
    if not Path(PGBOUNCER).exists():
        pytest.skip("PgBouncer is not installed: apt-get install pgbouncer")
    with postgres.pooler(mode) as port:
        behind = f"postgresql://moorage@127.0.0.1:{port}/{address.rpartition('/')[2]}"
        with pytest.raises(StorageError, match="is behind a pooler, which would share locks"):
            PostgresStorage(behind).facts().open()
        (found,) = examination.examine(behind)
        assert (found.state, "is behind a pooler" in found.detail) == ("broken", True)


def test_a_newer_format_is_refused(postgres, address: str):
    prepare(address, None)
    name = address.rpartition("/")[2]
    postgres.execute("UPDATE moorage.meta SET value = 99 WHERE name = 'format'", name)
    with pytest.raises(StorageError, match="has format 99, and moored"):
        PostgresStorage(address).facts().open()


def test_a_database_of_the_first_format_is_migrated(postgres, address: str):
    prepare(address, None)
    name = address.rpartition("/")[2]
    before = (
        "DROP TABLE moorage.audit_line, moorage.audit_end, moorage.login;"
        "DELETE FROM moorage.meta WHERE name = 'logins'"
    )
    postgres.execute(before, name)
    postgres.execute("UPDATE moorage.meta SET value = 1 WHERE name = 'format'", name)
    with closing(PostgresStorage(address).audit()) as audit:
        assert audit.end() == AuditEnd(0, "0" * 64, None)
    found = postgres.execute("SELECT value FROM moorage.meta WHERE name = 'format'", name)
    assert found == [(3,)]


def test_several_writers_store_lines_of_the_audit_log_and_the_oldest_are_deleted(address: str):
    with (
        closing(PostgresStorage(address).audit()) as one,
        closing(PostgresStorage(address).audit()) as other,
    ):
        for each in (one, other) * 1_500:
            each.append(
                NOW, lambda end: ([b"12345\n"], AuditEnd(end.number + 1, str(end.number), 7))
            )
        assert [number for number, _ in one.lines(0)] == list(range(1, 3_001))
        assert list(other.lines(2_999)) == [(3_000, b"12345\n")]
        assert one.end() == AuditEnd(3_000, "2999", 7)
        one.prune(NOW, 1_000 * 6)
        assert [number for number, _ in one.lines(0)] == list(range(2_001, 3_001))
        other.prune(NOW + 1, 1 << 30)
        assert list(other.lines(0)) == []
        other.prune(NOW + 1, 0)
        assert other.end() == AuditEnd(3_000, "2999", 7)


def test_lines_removed_at_the_beginning_of_the_audit_log_are_found(postgres, address: str):
    name, entries = address.rpartition("/")[2], [AuditEntry(NOW, "x", "ann")] * 1_500
    with closing(PostgresStorage(address).audit()) as rows:
        AuditTable(rows, 1e9, 1 << 30).append(entries, NOW)
        rows.prune(0, 1)  # Deletes all, in pages of a thousand.
        assert list(rows.lines(0)) == []
        AuditTable(rows, 1e9, 1 << 30).append(entries[:5], NOW)
        assert verify_rows(rows)[0] == 1_501
        postgres.execute("DELETE FROM moorage.audit_line WHERE number BETWEEN 1 AND 1502", name)
        with pytest.raises(ChainError, match="entry 1503: entries 1501 to 1502 are missing"):
            verify_rows(rows)
        postgres.execute("DELETE FROM moorage.audit_line WHERE number = 0", name)  # An older log.
        assert not is_begin_known(rows)
        assert verify_rows(rows)[0] == 1_503
        AuditTable(rows, 1e9, 1 << 30).append(entries[:1], NOW)
        assert is_begin_known(rows)
        assert verify_rows(rows)[0] == 1_503
        postgres.execute("DELETE FROM moorage.audit_line WHERE number = 1503", name)
        with pytest.raises(ChainError, match="entry 1503 is missing"):
            verify_rows(rows)


def test_a_removed_audit_log_is_reported_and_a_new_one_may_begin(postgres, address: str):
    name, entries = address.rpartition("/")[2], [AuditEntry(NOW, "x", "ann")]
    with closing(PostgresStorage(address).audit()) as rows:
        AuditTable(rows, 1e9, 1 << 30).append(entries, NOW)
        postgres.execute("TRUNCATE moorage.audit_line, moorage.audit_end", name)
        with pytest.raises(StorageError, match="perhaps the whole log") as caught:
            verify_rows(rows)
        for read in (rows.end, lambda: AuditTable(rows, 1e9, 1 << 30).append(entries, NOW)):
            with pytest.raises(StorageError, match="from a backup; or begin a new log"):
                read()
        postgres.execute(str(caught.value).split("`")[1], name)
        AuditTable(rows, 1e9, 1 << 30).append(entries, NOW)
        assert verify_rows(rows)[0] == 1


def test_a_role_that_may_only_use_the_tables_is_enough_for_a_server(postgres, address: str):
    name = address.rpartition("/")[2]
    user = f"server_{name}"
    postgres.execute(f"CREATE ROLE {user} LOGIN")
    with pytest.raises(StorageError, match="has no tables of Moorage, and this role may not"):
        PostgresStorage(postgres.url(name, user)).facts().open()
    prepare(address, None)
    with pytest.raises(StorageError, match="moored storage prepare --for ROLE"):
        PostgresStorage(postgres.url(name, user)).facts().open()
    (_, granted) = prepare(address, user)
    assert granted == f"The role {user} may use them."
    storage = PostgresStorage(postgres.url(name, user))
    facts, records = storage.facts(), storage.records()
    facts.open()
    records.open()
    row = RecordRow("a", b"{}", b"", 1)
    records.transact(lambda table: table.put("cluster", row), durable=True)
    assert len(storage.secret()) == 32
    with closing(storage.audit()) as audit:
        audit.append(NOW, lambda end: ([b"{}\n"], end._replace(number=1)))
        audit.prune(NOW + 1, 0)
    assert storage.secret() == PostgresStorage(address).secret()
    assert storage.agree("kubernetes", "ours") == "ours"
    assert PostgresStorage(address).agree("kubernetes", "mine") == "ours"
    assert PostgresStorage(address).agree("aws", "mine") == "mine"
    records.close()
    facts.end_writing(clean=True)
    facts.close()
    postgres.run("pg_dump", "--schema=moorage", "--file=/dev/null", postgres.url(name, user))
    with pytest.raises(StorageError, match="has no role role_of_none"):
        prepare(address, "role_of_none")


def test_another_process_soon_sees_a_change_of_tokens(address: str):
    mine, other = (PostgresStorage(address).tokens() for _ in range(2))
    with closing(mine), closing(other):
        assert mine.version() is None
        row = TokenRow("ci", "d", "client", "ann", 1.0)
        assert other.insert(row)
        assert not other.insert(row)
        assert other.rows() == mine.rows() == [row]
        before = other.version()
        assert mine.revoke("ci", 2.0) is True
        assert (mine.revoke("ci", 3.0), mine.revoke("no", 3.0)) == (False, None)
        other._version = (other._version[0] - FRESH_SECONDS, other._version[1])
        assert other.version() != before


def test_a_server_that_lost_its_tokens_stays_closed(postgres, address: str):
    name = address.rpartition("/")[2]
    with closing(PostgresStorage(address).tokens()) as rows:
        assert rows.revoke("no", 1.0) is None
        assert rows.version() is None  # Nothing was changed.
        assert rows.insert(TokenRow("ci", digest("secret"), "client", "ann", 1.0))
        store = TokenStore(rows)
        tokens = Tokens({}, store=store)
        assert tokens.caller("secret") is not None
        postgres.execute("DELETE FROM moorage.token", name)
        assert rows.revoke("ci", 2.0) is None
        rows._version = (0.0, 0)
        assert tokens.caller(None) is None
        postgres.execute("UPDATE moorage.meta SET value = 0 WHERE name = 'tokens'", name)
        rows._version = (0.0, 0)
        assert tokens.caller(None) is None  # Without a server that knew tokens, nothing shows it.
        postgres.execute("UPDATE moorage.meta SET value = 1 WHERE name = 'tokens'", name)
    with closing(PostgresStorage(address).tokens()) as rows:
        for _ in range(2):
            with pytest.raises(StorageError, match=r"had some before: .* `moored token create`"):
                rows.version()
        assert rows.insert(TokenRow("other", digest("another"), "client", "ann", 1.0))
        assert rows.version() == 2  # The first change and this one.


def test_another_process_soon_sees_a_change_of_logins(address: str):
    mine, other = (PostgresStorage(address).logins() for _ in range(2))
    with closing(mine), closing(other):
        assert mine.version() is None
        for name in "abc":
            other.insert(name, name.encode(), [])
        mine.insert("d", b"d", ["b", "none"])
        assert list(other.rows().items()) == [("a", b"a"), ("c", b"c"), ("d", b"d")]
        before = other.version()
        mine.delete(["a", "d"])
        other._version = (other._version[0] - FRESH_SECONDS, other._version[1])
        assert other.version() != before
        assert other.rows() == {"c": b"c"}


def test_changes_of_agents_are_made_completely_or_not_at_all(address: str, tmp_path):
    for each in (PostgresStorage(address), SqliteStorage(tmp_path)):
        mine, other = each.agents(), each.agents()
        with closing(mine), closing(other):
            assert mine.version() is None
            with mine.change() as documents:
                documents |= {"a": b"1", "b": b"2"}
            with pytest.raises(KeyError), other.change() as documents:
                del documents["a"], documents["c"]
            with other.change() as documents:
                assert documents == {"a": b"1", "b": b"2"}
                documents["b"] = b"3"
                del documents["a"]
            assert mine.rows() == other.rows() == {"b": b"3"}
            for number, writer in enumerate((mine, mine, other, mine, other, other)):
                with writer.change() as documents:
                    assert len(documents) == number + 1
                    documents[f"c{number}"] = b"4"
                assert mine.rows() == other.rows()
            assert mine.version() is not None


@pytest.mark.parametrize(
    "address",
    ["postgresql://m:hunter2@127.0.0.1:1/d", "postgresql://m:hunter2@[::1/d?x=hunter2"],
)
def test_a_password_appears_in_no_message(address: str):
    with pytest.raises(StorageError) as caught:
        connection.connect(address, "ledger")
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None or "hunter2" not in str(caught.value.__cause__)


def test_the_doctor_names_unsuitable_settings(postgres, address: str):
    findings = {each.name: each for each in examination.examine(address)}
    assert findings["storage"].state == "ok"
    assert findings["storage: fsync"].state == "missing"
    assert "no synchronous standby" in findings["storage: standby"].detail
    broken = examination.examine("postgresql://127.0.0.1:1/d")
    assert [(each.name, each.state) for each in broken] == [("storage", "broken")]


def test_the_doctor_names_missing_rights(postgres, address: str):
    def find_faults(user: str = "moorage") -> dict[str, tuple[str, str]]:
        findings = examination.examine(postgres.url(name, user))
        return {each.name: (each.state, each.detail) for each in findings}

    name = address.rpartition("/")[2]
    prepare(address, None)
    assert find_faults()["storage: tables"] == ("ok", "this role may write them")
    postgres.execute(f"CREATE ROLE partly_{name} LOGIN")
    prepare(address, f"partly_{name}")
    assert find_faults(f"partly_{name}")["storage: tables"][0] == "ok"
    postgres.execute(f"REVOKE INSERT ON moorage.record FROM partly_{name}", name)
    assert find_faults(f"partly_{name}")["storage: tables"][0] == "broken"
    postgres.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    assert find_faults()["storage: read only"][0] == "broken"
    postgres.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    postgres.execute("UPDATE moorage.meta SET value = 99 WHERE name = 'format'", name)
    state, detail = find_faults()["storage: tables"]
    assert (state, "has format 99" in detail) == ("broken", True)


def test_the_refusal_without_a_database_ends_each_sentence_with_one_mark():
    with pytest.raises(StorageError) as failed:
        connection.connect("postgresql://127.0.0.1:1/moorage", "doctor")
    assert "accepting TCP/IP connections. Check" in str(failed.value)

"""Tests of `moored storage copy` between a data folder and a PostgreSQL, in both directions."""

import signal
import sqlite3
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from served import invoke, ran, until

from moorage.catalog.embedded.integrity import checksum
from moorage.core.state.facts import ClusterRemoved
from moorage.daemon.access import audit_files
from moorage.daemon.access.audit_chain import ChainError
from moorage.daemon.access.audit_files import AuditFiles, verify
from moorage.daemon.access.audit_table import verify_rows
from moorage.ledger.codec import FACTS, seal
from moorage.model import ClusterId
from moorage.records.audit import AuditEntry
from moorage.storage.base import Checkpoint, FactRow, Facts, RecordRow, Storage, TokenRow
from moorage.storage.opening import open_storage
from moorage.storage.postgres import contents as databases
from moorage.storage.sqlite import contents as folders
from moorage.storage.sqlite.storage import SqliteStorage
from moorage.testing.daemon_process import daemon, serve_command

pytestmark = [pytest.mark.heavy, pytest.mark.postgres]

NOW = 1_763_647_000.125
FACTS_THERE = 2_500
FENCING = 77


def facts_about(first: int, last: int, chain: int) -> list[FactRow]:
    rows: list[FactRow] = []
    for seq in range(first, last + 1):
        fact = ClusterRemoved(ClusterId(f"größe-{seq}"))
        rows.append(seal(seq, NOW + seq / 7, fact, rows[-1].chain if rows else chain))
    return rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with some data of every kind, including pruned facts and a checkpoint."""
    folder = tmp_path / "data"
    folder.mkdir()
    fill(SqliteStorage(folder))
    lines = AuditFiles(folder, 1e9, 1 << 30)
    for _ in range(2):
        lines.append([AuditEntry(NOW, "lease.granted", "ann", seq=3)] * 600, NOW)
    return folder


def fill(storage: Storage) -> None:
    facts, records = storage.facts(), storage.records()
    facts.open()
    facts.commit(facts_about(1, FACTS_THERE, 0), FENCING, [])
    body = FACTS.pack([ClusterRemoved(ClusterId("gone"))])

    def condense(tables: Facts) -> None:
        tables.insert_part(1, 0, body)
        tables.finish_checkpoint(Checkpoint.of_parts(1, 200, 1, zlib.crc32(body)), 2)
        tables.prune(50, NOW + 100, 1 << 40)

    facts.commit([], 0, [condense])
    facts.end_writing(clean=False)
    facts.close()
    records.open()
    for number in (3, 1, 2):
        row = ("cluster", f"ü-{number}", b"{}", bytes(300))
        stored = RecordRow(*row[1:], checksum(*row))
        records.transact(lambda table, stored=stored: table.put("cluster", stored), durable=True)
    records.close()
    storage.secret()
    with closing(storage.tokens()) as tokens:
        tokens.insert(TokenRow("ci", "d", "client", "ann", 1.25))
    with closing(storage.agents()) as agents, agents.change() as documents:
        documents["agent:a"] = b"{}"


def contents(storage: Storage) -> tuple[object, ...]:
    """Return all stored data, and the lowest fencing number that is still free."""
    facts, records = storage.facts(), storage.records()
    fencing = facts.open().fencing
    with facts.reading() as tables:
        there = tables.page(0, 10 * FACTS_THERE, 1 << 40)
        checkpoints = [(each, tables.checkpoint_parts(each)) for each in tables.checkpoints()]
        pruned = tables.pruned_seq()
    facts.end_writing(clean=False)
    facts.close()
    records.open()
    rows = records.transact(lambda table: sorted(table.rows("cluster")), durable=True)
    records.close()
    with closing(storage.tokens()) as tokens, closing(storage.agents()) as agents:
        known = (tokens.rows(), tokens.version() is not None, agents.rows())
    clusters = [row for _, row in rows]
    return fencing, there, checkpoints, pruned, clusters, known, storage.secret()


def test_a_server_moves_to_a_database_and_back(postgres, folder: Path, tmp_path: Path) -> None:
    address, back = postgres.database(), tmp_path / "back"
    before = contents(SqliteStorage(folder))
    assert before[0] >= FENCING
    done = invoke("storage", "copy", folder, address)
    assert done.returncode == 0, done.stderr
    assert "facts, 3 records, 1 tokens and 1 agents were copied" in done.stdout
    assert contents(open_storage(address, tmp_path)) == before
    again = invoke("storage", "copy", folder, address)
    assert (again.returncode, "were there" in again.stdout) == (0, True)
    done = invoke("storage", "copy", address, back)
    assert done.returncode == 0, done.stderr
    assert contents(SqliteStorage(back)) == before
    audit = [verify(each) for each in (folder, back)]
    with closing(open_storage(address, tmp_path).audit()) as rows:
        assert audit == [verify_rows(rows)] * 2
        assert (audit[0][1].number, rows.end().seq) == (1_200, 3)
    again = invoke("storage", "copy", address, back)
    assert (again.returncode, "were there" in again.stdout) == (0, True)
    assert invoke("ledger", "verify", "--data", back).returncode == 0


def drop_lines(audit: Path, first: int, last: int | None) -> None:
    """Remove lines from the oldest file of an audit log."""
    file = min(audit.glob("*.jsonl"))
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[first:last]))


@pytest.mark.parametrize(("first", "last", "said"), [(1, None, "begins at"), (0, -1, "ends at")])
def test_a_copied_audit_log_still_shows_what_is_removed_from_it(
    postgres, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first, last, said
) -> None:
    address, back = postgres.database(), tmp_path / "back"
    monkeypatch.setattr(audit_files, "FILE_BYTES_MAX", 1)
    lines = AuditFiles(folder, 1e9, 1)  # It deletes the oldest lines.
    for _ in range(2):
        lines.append([AuditEntry(NOW, "lease.granted", "ann", seq=4)] * 9, NOW)
    lines.close()
    whole = verify(folder)
    assert whole[0] > 1
    assert invoke("storage", "copy", folder, address).returncode == 0
    assert invoke("storage", "copy", address, back).returncode == 0
    assert verify(back) == whole
    drop_lines(back / "audit", first, last)
    with pytest.raises(ChainError, match=said):
        verify(back)
    end = whole[0] if first else whole[1].number
    name = address.rpartition("/")[2]
    postgres.execute("DELETE FROM moorage.audit_line WHERE number = %s", name, [end])
    with (
        closing(open_storage(address, tmp_path).audit()) as rows,
        pytest.raises(ChainError, match=said),
    ):
        verify_rows(rows)


def test_the_copy_of_a_storage_with_a_broken_audit_log_is_refused(
    postgres, folder: Path, tmp_path: Path
) -> None:
    address, other, back = postgres.database(), postgres.database(), tmp_path / "back"
    assert invoke("storage", "copy", folder, other).returncode == 0
    name = other.rpartition("/")[2]
    postgres.execute("DELETE FROM moorage.audit_line WHERE number = 1200", name)
    with (folder / "audit" / "00000001.jsonl").open("a") as file:
        file.write("garbage\n")
    for words in ((folder, address), (other, back)):
        refused = invoke("storage", "copy", *words)
        assert refused.returncode == 1
        assert "since `moored audit verify` fails there" in refused.stderr
    assert not back.exists()
    schemas = "SELECT 1 FROM pg_namespace WHERE nspname = 'moorage'"
    assert postgres.execute(schemas, address.rpartition("/")[2]) == []  # Also no unfinished copy.
    for words in ((folder, address), (other, back)):
        done = invoke("storage", "copy", "--without-audit", *words)
        assert done.returncode == 0, done.stderr
    assert not (back / "audit").exists()
    assert contents(open_storage(address, tmp_path)) == contents(SqliteStorage(back))


def test_the_copy_of_a_storage_that_a_server_writes_is_refused(
    postgres, folder: Path, tmp_path: Path
) -> None:
    address = postgres.database()
    with daemon(tmp_path / "running") as running:
        refused = invoke("storage", "copy", tmp_path / "running", address)
        assert f"is in use by process {running.pid}" in refused.stderr
    with daemon(tmp_path / "empty", environment={"MOORAGE_STORAGE": address}) as running:
        for words in ((folder, address), (address, tmp_path / "new")):
            refused = invoke("storage", "copy", *words)
            assert refused.returncode == 1
            assert f"is in use by process {running.pid}" in refused.stderr
    assert not (tmp_path / "new").exists()


def test_the_copy_of_a_storage_overwrites_no_data_and_is_verified(
    postgres, folder: Path, tmp_path: Path
) -> None:
    address, other = postgres.database(), tmp_path / "other"
    other.mkdir()
    fill(SqliteStorage(other))
    assert invoke("storage", "copy", folder, address).returncode == 0
    before = contents(open_storage(address, tmp_path))
    for words in ((other, address), (address, other)):  # The secrets differ.
        refused = invoke("storage", "copy", *words)
        assert (refused.returncode, "has other data than" in refused.stderr) == (1, True)
    assert contents(open_storage(address, tmp_path)) == before
    refused = invoke("storage", "copy", folder, tmp_path / "third")
    assert (refused.returncode, "must be a data folder" in refused.stderr) == (1, True)
    name = address.rpartition("/")[2]
    postgres.execute("UPDATE moorage.fact SET at = at + 1 WHERE seq = 1700", name)
    refused = invoke("storage", "copy", address, tmp_path / "back")
    assert (refused.returncode, "fact 1700 was changed" in refused.stderr) == (1, True)
    assert not (tmp_path / "back").exists()


def test_a_ledger_with_accepted_losses_is_refused(postgres, folder: Path) -> None:
    with closing(sqlite3.connect(folder / "ledger.db")) as file, file:
        file.execute("INSERT INTO lost VALUES (1000, 1001, 0)")
    refused = invoke("storage", "copy", folder, postgres.database())
    assert refused.returncode == 1
    assert "lacks facts 1000 to 1001, whose loss was accepted in a repair" in refused.stderr


@contextmanager
def kill_copy_at(postgres, address: str, table: str, *words: str | Path) -> Iterator[None]:
    """Kill a copy when it has reached a table."""
    name = address.rpartition("/")[2]
    waits = "SELECT 1 FROM pg_stat_activity WHERE datname = %s AND wait_event_type = 'Lock'"
    with psycopg.connect(address) as holder:
        holder.execute(f"LOCK TABLE moorage.{table} IN ACCESS EXCLUSIVE MODE")
        command = [sys.executable, "-m", "moorage", "storage", "copy", *words]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as copying:
            until(lambda: postgres.execute(waits, values=[name]) or copying.poll() is not None)
            copying.send_signal(signal.SIGKILL)
            assert copying.wait(60) == -signal.SIGKILL
        yield


def refuses_an_unfinished_copy(address: str, tmp_path: Path) -> None:
    """Check that neither a server nor a command uses a database after a copy was killed."""
    for done in (
        ran(*serve_command(tmp_path / "served"), MOORAGE_STORAGE=address),
        invoke(
            "token", "create", "ci", "--role", "admin", "--tenant", "ann", MOORAGE_STORAGE=address
        ),
        invoke("doctor", "--data", tmp_path / "served", MOORAGE_STORAGE=address),
    ):
        assert done.returncode != 0
        assert "an unfinished copy" in done.stdout + done.stderr


def test_no_server_uses_new_tables_of_a_copy_that_was_killed(
    postgres, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = postgres.database()

    def kill(_: psycopg.Connection, __: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, folders.reading(folder) as source:
        patched.setattr(databases, "_contents", kill)  # The tables are there, and nothing else.
        with pytest.raises(KeyboardInterrupt):
            databases.fill(address, source, lambda _: None)
    refuses_an_unfinished_copy(address, tmp_path)
    before = contents(SqliteStorage(folder))
    assert invoke("storage", "copy", folder, address).returncode == 0
    assert contents(open_storage(address, tmp_path)) == before


def test_the_copy_of_a_storage_can_be_repeated_after_a_kill(
    postgres, folder: Path, tmp_path: Path
) -> None:
    address, back = postgres.database(), tmp_path / "back"
    assert invoke("storage", "prepare", MOORAGE_STORAGE=address).returncode == 0
    before = contents(SqliteStorage(folder))
    # The copy writes facts before records, all in one transaction.
    with kill_copy_at(postgres, address, "record", folder, address):
        assert postgres.execute("SELECT * FROM moorage.fact", address.rpartition("/")[2]) == []
    refuses_an_unfinished_copy(address, tmp_path)
    assert invoke("storage", "copy", folder, address).returncode == 0
    assert contents(open_storage(address, tmp_path)) == before
    with kill_copy_at(postgres, address, "record", address, back):
        assert (tmp_path / "back.new" / "ledger.db").exists()
        assert not back.exists()
    assert invoke("storage", "copy", address, back).returncode == 0
    assert contents(SqliteStorage(back)) == before
    assert not (tmp_path / "back.new").exists()


def test_a_password_in_an_argument_is_refused(tmp_path: Path) -> None:
    words = [tmp_path, "postgresql://moorage:hunter2@127.0.0.1:1/d"]
    for each in (words, reversed(words)):
        said = invoke("storage", "copy", *each)
        assert (said.returncode, "by ps" in said.stderr) == (1, True)
        assert "hunter2" not in said.stderr


def test_a_data_folder_used_with_a_database_refuses_servers_and_backups(
    postgres, tmp_path: Path
) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    with daemon(data, environment={"MOORAGE_STORAGE": postgres.database()}) as running:
        for other in (postgres.database(), ""):
            said = ran(*serve_command(data), MOORAGE_STORAGE=other)
            place = f"the data folder {data} is in use by process {running.pid}"
            assert (said.returncode, place in said.stderr) == (3, True), said.stderr
    said = invoke("backup", copy, "--data", data)
    assert (said.returncode, "are old. Copy the database with pg_dump" in said.stderr) == (1, True)
    assert not copy.exists()
    with daemon(data):  # From now on, this server uses the ledger in the folder.
        assert invoke("backup", copy, "--data", data).returncode == 0


def test_a_backup_of_a_database_names_pg_dump_and_no_password(postgres, tmp_path: Path) -> None:
    named = postgres.database().replace("moorage@", "moorage:hunter2@")
    said = invoke("backup", tmp_path / "backup", MOORAGE_STORAGE=named)
    assert (said.returncode, "pg_dump" in said.stderr, "hunter2" in said.stderr) == (1, True, False)

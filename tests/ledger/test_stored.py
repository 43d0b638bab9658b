import asyncio
import contextlib
import sqlite3
import stat
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from moorage.ledger import stored
from moorage.ledger.base import (
    CHECKPOINTS_KEPT,
    PENDING_FACTS_MAX,
    LedgerCorrupt,
    LedgerError,
    LedgerFailed,
)
from moorage.ledger.stored import CHECKPOINT_PART_FACTS, StoredLedger
from moorage.ledger.walk import walk
from moorage.storage.sqlite.fact_tables import ROWS_PER_STATEMENT, SQL, connect_to_write
from moorage.storage.sqlite.facts import SqliteFacts
from tests.ledger.facts import NOW, numbered_facts, opened


def contents(path: Path) -> bytes:
    return path.read_bytes()


def spoil(path: Path, content: bytes) -> None:
    path.write_bytes(content)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


async def fill(path: Path, facts: int) -> None:
    ledger = await opened(path)
    await ledger.append(numbered_facts(1, facts), NOW)
    await ledger.close()


def run(path: Path, statement: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    rows = connection.execute(statement).fetchall()
    connection.commit()
    connection.close()
    return rows


def test_each_commit_of_the_ledger_is_synced(path: Path):
    connection = connect_to_write(path, str(path))
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    connection.close()


async def test_only_its_owner_may_read_the_file_of_the_ledger(tmp_path: Path):
    path = tmp_path / "made" / "too" / "ledger.sqlite"
    ledger = await opened(path)
    await ledger.append(numbered_facts(1, 1), NOW)
    names = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    beside = {"ledger.mark", "ledger.fencing", "ledger.reserve"}
    assert set(names) == beside | {path.name + end for end in ("", ".lock", "-wal", "-shm")}
    assert set(names.values()) == {0o600}
    await ledger.close()


async def test_facts_are_readable_with_the_sqlite_shell(path: Path):
    await fill(path, 2)
    rows = run(
        path, "SELECT seq, kind, version, subject, json_extract(body, '$.expires_at') FROM fact"
    )
    assert rows == [(1, "renewed", 1, "r-1", 1.0), (2, "renewed", 1, "r-2", 2.0)]


async def test_an_append_that_needs_several_statements_is_one_transaction(path: Path):
    facts = numbered_facts(1, 2 * ROWS_PER_STATEMENT + 1)
    ledger = await opened(path)
    assert await ledger.append(facts, NOW) == len(facts)
    await ledger.close()
    assert run(path, "SELECT max(seq), count(*) FROM fact") == [(len(facts), len(facts))]


async def test_facts_beyond_the_limit_wait_for_room_in_order(path: Path):
    ledger = await opened(path)
    sizes = (PENDING_FACTS_MAX, 2, PENDING_FACTS_MAX + 1, 1)
    calls, last = [], 0
    for size in sizes:
        calls.append(
            asyncio.ensure_future(ledger.append(numbered_facts(last + 1, last + size), NOW))
        )
        last += size
    await asyncio.sleep(0)
    assert ledger._pending == PENDING_FACTS_MAX
    assert await asyncio.gather(*calls) == [
        sum(sizes[: number + 1]) for number in range(len(sizes))
    ]
    assert [entry.fact for entry in await ledger.read(last - 3)] == numbered_facts(last - 2, last)
    await ledger.close()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Have the next commit of the ledger wait until the block ends, as on a hanging disk."""
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


@pytest.mark.parametrize("lone", [False, True])
async def test_the_ledger_fails_if_a_commit_takes_too_long(
    path: Path, monkeypatch: pytest.MonkeyPatch, lone: bool
):
    ledger = await opened(path)
    monkeypatch.setattr(stored, "COMMIT_SECONDS_MAX", 0.05)
    with locked(path):
        with pytest.raises(LedgerFailed, match="took longer than"):
            await ledger.append(numbered_facts(1, 1), NOW, lone=lone)
        with pytest.raises(LedgerFailed):
            ledger.check()
        monkeypatch.undo()
    with pytest.raises(LedgerFailed):
        await ledger.close()


async def test_a_lone_append_does_not_block_the_event_loop_while_the_disk_hangs(path: Path):
    ledger = await opened(path)
    with locked(path):
        appended = ledger.append(numbered_facts(1, 1), NOW, lone=True)
    assert await appended == 1
    await ledger.close()


async def test_only_the_two_newest_checkpoints_stay(path: Path):
    ledger = await opened(path)
    await ledger.append(numbered_facts(1, 9), NOW)
    for seq in range(1, 10):
        await ledger.checkpoint(seq, numbered_facts(1, 40 * CHECKPOINT_PART_FACTS))
    await ledger.close()
    assert run(path, "SELECT count(*), min(seq), max(seq) FROM checkpoint") == [
        (CHECKPOINTS_KEPT, 8, 9)
    ]
    [(parts,)] = run(path, "SELECT count(DISTINCT checkpoint) FROM checkpoint_part")
    assert parts == CHECKPOINTS_KEPT + 1, "the next checkpoint removes the last dropped one"


async def test_parts_of_an_unfinished_checkpoint_are_ignored(path: Path):
    await fill(path, 3)
    run(path, "INSERT INTO checkpoint_part VALUES (1, 0, 'torn')")
    ledger = StoredLedger(SqliteFacts(path))
    recovery = await ledger.open()
    assert list(recovery.facts) == numbered_facts(1, 3)
    await ledger.checkpoint(3, numbered_facts(7, 8))
    await ledger.close()
    assert run(path, "SELECT DISTINCT checkpoint FROM checkpoint_part") == [(2,)]
    ledger = StoredLedger(SqliteFacts(path))
    assert list((await ledger.open()).facts) == numbered_facts(7, 8)
    await ledger.close()


@pytest.mark.parametrize(
    ("statement", "parameters"),
    [
        (SQL["last"], ()),
        (SQL["after"], (5, 10)),
        (SQL["about"], ("r-1", 5, 10)),
        (SQL["parts"], (1,)),
    ],
)
async def test_no_query_of_the_ledger_scans_the_whole_history(
    path: Path, statement: str, parameters: tuple[object, ...]
):
    await fill(path, 1)
    connection = sqlite3.connect(path)
    plan = [row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + statement, parameters)]
    connection.close()
    assert plan
    assert all(step.startswith("SEARCH ") for step in plan), plan


async def test_a_file_that_is_not_a_database_is_left_unchanged(path: Path):
    spoil(path, b"not a database, but long enough to look at" * 100)
    before = contents(path)
    with pytest.raises(LedgerCorrupt, match=r"file is not a database.*from a backup"):
        await StoredLedger(SqliteFacts(path)).open()
    assert contents(path) == before


async def test_a_foreign_database_is_left_unchanged(path: Path):
    run(path, "CREATE TABLE recipes(name TEXT)")
    with pytest.raises(LedgerError, match=r"no ledger of Moorage.*another data directory"):
        await StoredLedger(SqliteFacts(path)).open()
    assert run(path, "SELECT name FROM sqlite_master") == [("recipes",)]


async def test_a_newer_format_is_refused(path: Path):
    await fill(path, 1)
    run(path, "UPDATE meta SET value = 99")
    with pytest.raises(
        LedgerError, match=rf"has format 99, .*: start moored {version('moorage')},"
    ):
        await StoredLedger(SqliteFacts(path)).open()
    run(path, "UPDATE release SET version = '9.1'")
    with pytest.raises(LedgerError, match=r"ledger\.sqlite has format 99, .*: start moored 9\.1,"):
        walk(path)


async def test_the_error_for_an_unwritable_path_asks_for_a_writable_directory(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="directory that this user may write to"):
        await StoredLedger(SqliteFacts(tmp_path / "file" / "ledger.sqlite")).open()


async def test_a_file_of_the_ledger_with_a_missing_part_is_detected(path: Path):
    await fill(path, 5000)
    whole = contents(path)
    spoil(path, whole[: len(whole) // 2])
    ledger = StoredLedger(SqliteFacts(path))
    with pytest.raises(LedgerCorrupt, match="malformed"):
        list((await ledger.open()).facts)
    await ledger.close()


async def test_corrupt_text_in_a_fact_is_noticed(path: Path):
    await fill(path, 3)
    run(path, "UPDATE fact SET subject = CAST(x'ff' AS TEXT) WHERE seq = 2")
    ledger = StoredLedger(SqliteFacts(path))
    recovery = await ledger.open()
    with pytest.raises(LedgerCorrupt, match="UTF-8"):
        list(recovery.facts)
    await ledger.close()


async def test_the_file_of_a_pruned_ledger_does_not_grow(path: Path):
    ledger = await opened(path)
    sizes, last = [], 0
    for _ in range(8):
        for _ in range(2):
            last = await ledger.append(numbered_facts(last + 1, last + 1000), NOW)
            await ledger.checkpoint(last, numbered_facts(1, 10))
        while await ledger.prune(NOW + 1, 1 << 40):
            pass
        await ledger.close()
        sizes.append(len(contents(path)))
        await ledger.open()
    assert sizes[-1] <= sizes[1] * 1.1, sizes
    await ledger.close()
    assert walk(path).findings == []

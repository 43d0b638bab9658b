"""Tests of the findings of `moored ledger verify`, and of the ledger after a repair."""

import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from moorage.commands import ledger_care
from moorage.core.state.facts import Fact, Renewed
from moorage.ledger.base import LedgerCorrupt, LedgerError
from moorage.ledger.repairing import rebuild, salvage
from moorage.ledger.stored import StoredLedger
from moorage.ledger.walk import walk
from moorage.model import RequestId
from moorage.storage.sqlite.facts import SqliteFacts
from tests.ledger.facts import NOW, grants, leave_as_killed, opened

COMMITS = 200
CHECKPOINTS = (50, 100)


async def write_and_kill(path: Path) -> list[Fact]:
    """Write grants, with checkpoints of the last grant before each; return what must be read."""
    await leave_as_killed(path, COMMITS, {each: grants(each, each) for each in CHECKPOINTS})
    return grants(CHECKPOINTS[-1], COMMITS)


async def read_back(path: Path) -> tuple[list[Fact], int]:
    ledger = StoredLedger(SqliteFacts(path))
    recovery = await ledger.open()
    try:
        facts = list(recovery.facts)
        await ledger.append([Renewed(RequestId("r-200"), 9.0)], NOW)
        while page := await ledger.read(ledger.last_seq):
            assert not page
        return facts, recovery.fencing
    finally:
        await ledger.close()


def change(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def repair(path: Path) -> list[str]:
    found = walk(path)
    left = salvage(found)
    rebuild(path, found, left)
    assert walk(path).findings == []
    return left.said


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "ledger.db"


async def test_an_intact_ledger_has_no_findings(path: Path):
    await write_and_kill(path)
    found = walk(path)
    assert found.findings == []
    assert [row.seq for row in found.rows] == list(range(1, COMMITS + 1))
    assert found.fencing_seen == COMMITS


async def test_a_check_of_the_data_reports_a_missing_catalog(path: Path):
    await write_and_kill(path)
    (finding,) = ledger_care.verify(path.parent).findings
    assert finding.startswith("catalog.db is missing, with all its records")
    said = ledger_care.repair(path.parent, accept_loss=True)
    assert said.damage == [finding]
    assert len(walk(path).rows) == COMMITS
    assert ledger_care.verify(path.parent).findings == []


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("UPDATE fact SET body = replace(body, 'r-', 's-') WHERE seq = 30", "fact 30 does not"),
        ("UPDATE fact SET chain = 7 WHERE seq = 30", "fact 30 is not linked"),
        ("DELETE FROM fact WHERE seq = 30", "fact 30 cannot be read"),
        ("UPDATE checkpoint_part SET body = x'00' WHERE checkpoint = 1", "as of fact 50 is dama"),
    ],
)
async def test_a_check_reports_a_damaged_old_fact_and_a_repair_loses_only_the_history(
    path: Path, statement: str, finding: str
):
    facts = await write_and_kill(path)
    change(path, statement)
    assert any(finding in each for each in walk(path).findings)
    said = repair(path)
    assert (await read_back(path))[0] == facts
    assert all("of the history" in each for each in said)


async def test_facts_after_a_damaged_recent_fact_are_reported_as_lost(path: Path):
    facts = await write_and_kill(path)
    change(path, "DELETE FROM fact WHERE seq = 150")
    said = repair(path)
    assert said[0].startswith("facts 150 to 200: ")
    assert said[1].startswith("50 leases: r-151, r-152, ")
    assert said[1].endswith(", r-170 and 30 more.")
    found, fencing = await read_back(path)
    assert found == facts[:50]
    assert fencing >= COMMITS


async def test_the_chain_continues_although_the_fact_of_the_checkpoint_is_lost(path: Path):
    facts = await write_and_kill(path)
    change(path, "DELETE FROM fact WHERE seq >= 100")
    repair(path)
    assert (await read_back(path))[0] == facts[:1]


async def test_a_damaged_link_between_facts_loses_no_fact(path: Path):
    facts = await write_and_kill(path)
    change(path, "UPDATE fact SET chain = 7 WHERE seq = 150")
    assert repair(path) == []
    assert (await read_back(path))[0] == facts


async def test_a_repair_without_a_checkpoint_replays_all_facts(path: Path):
    await write_and_kill(path)
    change(path, "UPDATE checkpoint SET seq = seq + 1")
    assert repair(path) == []
    assert (await read_back(path))[0] == grants(1, COMMITS)


async def test_a_repair_without_checkpoint_and_facts_saves_only_the_fencing_numbers(path: Path):
    await write_and_kill(path)
    change(
        path,
        "DELETE FROM checkpoint",
        "DELETE FROM fact WHERE seq < 50",
        "UPDATE meta SET value = 20 WHERE name = 'pruned'",
    )
    assert any("every lease" in each for each in repair(path))
    found, fencing = await read_back(path)
    assert found == []
    assert fencing >= COMMITS


async def test_a_repair_loses_no_other_fact_through_a_misplaced_fact(path: Path):
    """A B-tree with such a fact gives different results for different ranges."""
    facts = await write_and_kill(path)
    change(path, "PRAGMA journal_mode=DELETE")
    rename_in_its_page(path, 60, 120)
    change(path, "DELETE FROM fact WHERE seq = 110")
    assert repair(path)[:2] == [
        "fact 60 of the history: `why` and backtests lack them.",
        "facts 110 to 200: all later grants and ends of leases.",
    ]
    assert (await read_back(path))[0] == facts[:10]


def rename_in_its_page(path: Path, seq: int, name: int) -> None:
    """Give a fact another key in its place in the file (https://sqlite.org/fileformat2.html)."""
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[16:18])
    cell = bytes([seq])  # Below 128, a key is one byte, after the two bytes of the cell's size.
    for start in range(size, len(content), size):
        if content[start] != 0x0D:  # The page is no leaf of a table.
            continue
        count = int.from_bytes(content[start + 3 : start + 5])
        for place in range(start + 8, start + 8 + 2 * count, 2):
            at = start + int.from_bytes(content[place : place + 2])
            if content[at + 2 : at + 3] == cell and f"r-{seq}".encode() in content[at : at + 60]:
                content[at + 2] = name
                path.write_bytes(content)
                return
    raise AssertionError(f"fact {seq} is in no page")


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM meta WHERE name = 'format'",
        "UPDATE meta SET name = 'formau' WHERE name = 'format'",
        "DELETE FROM meta WHERE name = 'pruned'",
    ],
)
async def test_a_ledger_without_its_header_loses_no_fact(path: Path, statement: str):
    facts = await write_and_kill(path)
    change(path, statement)
    if "format" in statement:
        with pytest.raises(LedgerCorrupt, match="lacks the mark of a ledger"):
            await StoredLedger(SqliteFacts(path)).open()
    assert walk(path).findings
    assert repair(path) == []
    assert (await read_back(path))[0] == facts


async def test_a_repair_loses_no_facts_through_a_lost_header_page(path: Path):
    facts = await write_and_kill(path)
    change(path, "PRAGMA journal_mode=DELETE")
    blank_root(path, "meta")
    assert any("lacks its own format and version" in each for each in walk(path).findings)
    assert repair(path) == []
    assert (await read_back(path))[0] == facts


def blank_root(path: Path, table: str) -> None:
    """Fill the first page of a table with zeros."""
    with closing(sqlite3.connect(path)) as connection:
        roots = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        (page,) = connection.execute(roots, (table,)).fetchone()
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[16:18])
    content[(page - 1) * size : page * size] = bytes(size)
    path.write_bytes(content)


def invert_byte(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("place", [0, 20, 40, 4_200, 60_000, 300_000])
async def test_a_repair_recovers_facts_after_damage_in_the_write_ahead_log(path: Path, place: int):
    """SQLite reads no log record behind the damage; without a repair, most facts would be lost."""
    facts = await write_and_kill(path)
    invert_byte(path.with_name("ledger.db-wal"), place)
    with pytest.raises(LedgerCorrupt):
        await StoredLedger(SqliteFacts(path)).open()
    assert repair(path) == []
    assert (await read_back(path))[0] == facts


@pytest.mark.parametrize("name", ["catalog.db", "old.db"])
@pytest.mark.parametrize("foreign", [False, True])
async def test_a_renamed_ledger_is_not_replaced_by_an_empty_one(
    path: Path, name: str, foreign: bool
):
    facts = await write_and_kill(path)
    moved = path.with_name(name)
    for end in ("", "-wal"):
        path.with_name(path.name + end).rename(moved.with_name(moved.name + end))
    if foreign:
        change(path, "CREATE TABLE songs(title TEXT)")
    for accepted in (False, True):
        with pytest.raises(LedgerError, match=f"{moved.name} beside it is one. Nothing was chang"):
            ledger_care.repair(path.parent, accept_loss=accepted)
    for end in ("", "-wal"):
        moved.with_name(moved.name + end).rename(path.with_name(path.name + end))
    assert (await read_back(path))[0] == facts


async def test_a_ledger_with_only_its_reserved_numbers_counts_as_lost(path: Path):
    await write_and_kill(path)
    for file in path.parent.iterdir():
        if file.name.startswith("ledger.db") or file.name == "ledger.mark":
            file.unlink()
    with pytest.raises(LedgerCorrupt, match=r"numbers up to [0-9]+ were used"):
        await StoredLedger(SqliteFacts(path)).open()
    assert "every lease" in repair(path)[0]
    assert (await read_back(path))[1] >= COMMITS


@pytest.mark.parametrize("name", ["ledger.db", "ledger.mark", "ledger.fencing"])
async def test_a_ledger_with_a_missing_file_can_be_repaired(path: Path, name: str):
    facts = await write_and_kill(path)
    file = path.parent / name
    file.rename(file.with_name("gone"))
    repair(path)
    found, fencing = await read_back(path)
    assert found == ([] if name == "ledger.db" else facts)
    assert fencing >= COMMITS


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("ledger.db", 8),
        ("ledger.db-wal", 8),
        pytest.param("ledger.db", 40, marks=pytest.mark.heavy),
        pytest.param("ledger.db-wal", 40, marks=pytest.mark.heavy),
    ],
)
async def test_a_repair_adds_no_facts(path: Path, name: str, places: int):
    facts = await write_and_kill(path)
    if name == "ledger.db":
        ledger = await opened(path)
        await ledger.close()  # Moves the log's content into the file.
    everything = grants(1, COMMITS)
    dice = random.Random(places)
    whole = path.parent.rename(path.parent.with_name("whole"))
    for _ in range(places):
        shutil.rmtree(path.parent, ignore_errors=True)
        shutil.copytree(whole, path.parent)
        spoil(path.parent / name, dice)
        if not walk(path).findings:
            continue
        repair(path)
        found, fencing = await read_back(path)
        earlier = grants(CHECKPOINTS[0], COMMITS)
        wholes = (facts, earlier, everything)
        assert any(found == each[: len(found)] for each in wholes)
        assert fencing >= COMMITS


def spoil(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(8):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)

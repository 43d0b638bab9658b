"""Every loss of acknowledged facts is reported, and no fencing number is used twice."""

import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from moorage.core.state.facts import Fact, Renewed
from moorage.ledger.base import LedgerCorrupt, LedgerError
from moorage.ledger.stored import StoredLedger
from moorage.model import RequestId
from moorage.storage.base import FENCING_BLOCK
from moorage.storage.sqlite.facts import SqliteFacts
from moorage.storage.sqlite.fencing import LABEL
from moorage.storage.sqlite.marks import read_mark
from tests.ledger.facts import NOW, grants, leave_as_killed, opened

MARK_BYTES = 36
"""Bytes of one copy of a mark."""


async def write_and_kill(path: Path, commits: int = 60, checkpoint_at: int = 20) -> list[Fact]:
    """Write grants; the checkpoint has all grants before it."""
    await leave_as_killed(path, commits, {checkpoint_at: grants(1, checkpoint_at)})
    return grants(1, commits)


async def read_back(path: Path) -> tuple[list[Fact], tuple[str, ...], int]:
    ledger = StoredLedger(SqliteFacts(path))
    recovery = await ledger.open()
    try:
        return list(recovery.facts), recovery.warnings, recovery.fencing
    finally:
        await ledger.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "ledger.db"


def log(path: Path) -> Path:
    return path.with_name("ledger.db-wal")


def remove(path: Path) -> None:
    path.unlink()


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


async def test_a_ledger_is_complete_after_a_kill_of_its_process(path: Path):
    facts = await write_and_kill(path)
    assert await read_back(path) == (facts, (), 60 + FENCING_BLOCK - 59)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99])
async def test_a_truncated_write_ahead_log_is_noticed_and_left_unchanged(path: Path, keep: float):
    await write_and_kill(path)
    content = log(path).read_bytes()
    log(path).write_bytes(content[: int(len(content) * keep)])
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    for _ in range(2):
        with pytest.raises(LedgerCorrupt, match=r"durable and (is|are) missing.*ledger repair"):
            await read_back(path)
    after = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    assert [name for name in before if before[name] != after[name] and "shm" not in name] == []


@pytest.mark.parametrize("name", ["ledger.db-wal", "ledger.db", "ledger.mark"])
async def test_the_loss_of_a_database_file_is_noticed(path: Path, name: str):
    await write_and_kill(path)
    remove(path.parent / name)
    with pytest.raises(LedgerCorrupt):
        await read_back(path)


async def test_a_complete_ledger_opens_without_its_file_of_reserved_numbers(path: Path):
    facts = await write_and_kill(path)
    remove(path.with_name("ledger.fencing"))
    found, [warning], fencing = await read_back(path)
    assert (found, fencing) == (facts, 0)
    assert "ledger.fencing is missing" in warning


async def test_a_ledger_whose_creation_was_interrupted_is_not_damaged(path: Path):
    await read_back(path)
    remove(path)
    assert await read_back(path) == ([], (), 0)


async def test_a_damaged_mark_is_restored_from_the_other_copy_of_the_mark(path: Path):
    facts = await write_and_kill(path)
    for copy in (0, 4096):
        flip(path.with_name("ledger.mark"), (copy + 20) * 8)
        found, [warning], _ = await read_back(path)
        assert found == facts
        assert "ledger.mark is damaged; it was written again" in warning
    assert (await read_back(path))[:2] == (facts, ())
    for copy in (0, 4096):
        flip(path.with_name("ledger.mark"), (copy + 20) * 8)
    with pytest.raises(LedgerCorrupt, match="nothing else says how many facts the file must have"):
        await read_back(path)


async def test_a_fact_of_another_ledger_is_detected(path: Path):
    """Each file is valid by itself; one of them is an older copy."""
    await write_and_kill(path)
    other = path.parent / "other" / "ledger.db"
    ledger = await opened(other)
    await ledger.append([Renewed(RequestId("r"), 1.0)] * 60, NOW)
    await ledger.close()
    connection = sqlite3.connect(path)
    connection.execute("ATTACH ? AS other", (str(other),))
    connection.execute("REPLACE INTO fact SELECT * FROM other.fact WHERE seq = 40")
    connection.commit()
    connection.close()
    with pytest.raises(LedgerCorrupt, match=r"fact 40 is not linked to the fact before"):
        await read_back(path)


@pytest.mark.parametrize("column", ["number", "seq", "parts", "checksum"])
async def test_the_checksum_covers_the_fields_of_a_checkpoint(path: Path, column: str):
    facts = await write_and_kill(path)
    connection = sqlite3.connect(path)
    connection.execute(f"UPDATE checkpoint SET {column} = {column} + 1")  # noqa: S608  # Our own text.
    connection.commit()
    connection.close()
    found, [warning], _ = await read_back(path)
    assert found == facts, "all facts were replayed"
    assert "is damaged and was dropped" in warning


async def test_a_clean_end_of_the_ledger_releases_reserved_numbers(path: Path):
    ledger = await opened(path)
    await ledger.append(grants(1, 5), NOW)
    await ledger.close()
    assert (await read_back(path))[2] == 5


async def test_fencing_numbers_are_reserved_durably_before_they_are_used(path: Path):
    ledger = await opened(path)
    for fencing in (1, 2, FENCING_BLOCK, FENCING_BLOCK + 1, FENCING_BLOCK + 2, 3 * FENCING_BLOCK):
        await ledger.append(grants(fencing, fencing), NOW)
        assert read_mark(path.with_name("ledger.fencing"), LABEL).first >= fencing
    await ledger.close()


@pytest.mark.parametrize(
    ("name", "places"),
    [
        *(("ledger.db", 20), ("ledger.db-wal", 20), ("ledger.mark", 8), ("ledger.fencing", 8)),
        *(
            pytest.param(name, places, marks=pytest.mark.heavy)
            for name, places in (
                *(("ledger.db", 200), ("ledger.db-wal", 200)),
                *(("ledger.mark", 40), ("ledger.fencing", 40)),
            )
        ),
    ],
)
async def test_each_flipped_bit_is_noticed(path: Path, name: str, places: int):
    commits = 300 if name.startswith("ledger.db") else 60
    facts = await write_and_kill(path, commits=commits, checkpoint_at=commits // 2)
    if name == "ledger.db":
        await read_back(path)  # Moves the log's content into the file.
        assert not log(path).exists()
    dice = random.Random(places)
    whole = path.parent.rename(path.parent.with_name("whole"))
    size = (whole / name).stat().st_size
    for _ in range(places):
        shutil.rmtree(path.parent, ignore_errors=True)
        shutil.copytree(whole, path.parent)
        bit = dice.randrange(size * 8)
        if not name.startswith("ledger.db"):  # The file is empty behind each of the two copies.
            bit = 8 * dice.choice((0, 4096)) + bit % (8 * MARK_BYTES)
        flip(path.parent / name, bit)
        try:
            found, _, fencing = await read_back(path)
        except LedgerError:
            continue
        assert found == facts
        assert fencing == 0 or fencing >= commits


@pytest.mark.parametrize("place", [0.6, 0.9])
async def test_damage_in_the_middle_of_the_write_ahead_log_is_noticed_despite_an_old_mark(
    path: Path, place: float
):
    """A power cut may leave an old mark, since the new one was not on the disk yet."""
    await write_and_kill(path)
    whole = path.parent.rename(path.parent.with_name("whole"))
    shutil.copytree(whole, path.parent)
    old = path.parent.parent / "old" / "ledger.db"
    await write_and_kill(old, commits=20)
    remove(path.with_name("ledger.mark"))
    shutil.copy(old.with_name("ledger.mark"), path.parent)
    size = log(path).stat().st_size
    flip(log(path), int(size * place) * 8)
    with pytest.raises(LedgerCorrupt, match=r"ledger\.db-wal: frame \d+, at byte \d+, does not"):
        await read_back(path)


async def test_a_last_commit_that_is_incomplete_does_not_count_as_damage(path: Path):
    facts = await write_and_kill(path)
    old = path.parent.parent / "old" / "ledger.db"
    await write_and_kill(old, commits=20)
    remove(path.with_name("ledger.mark"))
    shutil.copy(old.with_name("ledger.mark"), path.parent)
    content = bytearray(log(path).read_bytes())
    frame = 24 + 4096
    commits = [at for at in range(32, len(content), frame) if content[at + 4 : at + 8] != bytes(4)]
    first = commits[-2] + frame  # A frame of the last commit, which has several.
    content[first : first + frame] = bytes(frame)
    log(path).write_bytes(content)
    assert (await read_back(path))[0] == facts[:-1]

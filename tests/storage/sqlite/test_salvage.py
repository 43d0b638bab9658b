"""Tests of reading a write-ahead log beyond a damaged place."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from moorage.storage.sqlite.files import connect_to_look
from moorage.storage.sqlite.salvage import readable

ROWS = 100
FRAME_BYTES = 24 + 4096


def write_and_kill(folder: Path, *, rounds: int) -> Path:
    """Write rows, one per commit; return the database with its log, as a kill leaves them."""
    path = folder / "alive.db"
    killed = folder / "killed.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE held(number INTEGER PRIMARY KEY, text TEXT)")
        for each in range(rounds):
            if each:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            for number in range(each * ROWS, each * ROWS + ROWS):
                connection.execute("INSERT INTO held VALUES (?, ?)", (number, "x" * 500))
        shutil.copy(path, killed)
        shutil.copy(f"{path}-wal", f"{killed}-wal")
    return killed


def numbers(path: Path, *, lacking: bool = True) -> list[int]:
    with readable(path, lacking=lacking) as found, closing(connect_to_look(found)) as connection:
        return [number for (number,) in connection.execute("SELECT number FROM held")]


def damage(path: Path, at: int, count: int = 1) -> None:
    log = path.with_name(path.name + "-wal")
    content = bytearray(log.read_bytes())
    content[at : at + count] = bytes(255 - each for each in content[at : at + count])
    log.write_bytes(content)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("place", ["salts", "page", "body", "sum", "header"])
def test_frames_after_a_damaged_frame_of_the_write_ahead_log_are_read(
    tmp_path: Path, place: str, rounds: int
):
    path = write_and_kill(tmp_path, rounds=rounds)
    assert numbers(path, lacking=False) == list(range(ROWS * rounds))
    fifth = 32 + 4 * FRAME_BYTES
    at = {"salts": fifth + 9, "page": fifth + 3, "body": fifth + 99, "sum": fifth + 17}
    damage(path, at.get(place, 5), 27 if place == "header" else 1)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert numbers(path) == list(range(ROWS * rounds))
    names = {*before, "killed.db-shm"}
    assert {file.name for file in tmp_path.iterdir()} <= names, "no file is left behind"
    assert all((tmp_path / name).read_bytes() == held for name, held in before.items())


def test_frames_of_the_write_ahead_log_without_a_commit_are_not_read(tmp_path: Path):
    path = write_and_kill(tmp_path, rounds=1)
    log = path.with_name(path.name + "-wal")
    damage(path, log.stat().st_size - FRAME_BYTES + 99)
    assert numbers(path) == list(range(ROWS - 1))


@pytest.mark.parametrize("size", [0, 20, 32, 32 + FRAME_BYTES // 2])
def test_a_write_ahead_log_without_a_complete_frame_adds_no_rows(tmp_path: Path, size: int):
    path = write_and_kill(tmp_path, rounds=2)
    log = path.with_name(path.name + "-wal")
    log.write_bytes(log.read_bytes()[:size])
    assert numbers(path) == list(range(ROWS))
    log.unlink()
    assert numbers(path) == list(range(ROWS))

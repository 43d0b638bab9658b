"""Tests of marks with two checksummed copies, and of the modes of a database's files."""

import os
import sqlite3
import stat
import time
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest

from moorage.storage.base import StorageError
from moorage.storage.formats import Format
from moorage.storage.sqlite.files import (
    connect,
    connect_to_look,
    note_release,
    owner_only,
    writer_of,
)
from moorage.storage.sqlite.marks import (
    ENOUGH_BYTES,
    LOW_BYTES,
    REFILL_SECONDS,
    DurableMark,
    Reserve,
    read_mark,
)
from moorage.storage.sqlite.storage import read_secret

COPY_BYTES = 4096


def write_mark(path: Path, *values: tuple[int, int]) -> None:
    found = read_mark(path, "ledger")
    mark = DurableMark(path, "ledger", found.first, found.second, found.writes)
    for first, second in values:
        mark.write(first, second)
    mark.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.mark"


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)


def test_a_mark_file_has_the_last_written_value(path: Path):
    assert read_mark(path, "ledger").exists is False
    write_mark(path, (1, 11), (2, 22), (3, 33))
    found = read_mark(path, "ledger")
    assert (found.exists, found.first, found.second, found.doubt) == (True, 3, 33, "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_mark(path)
    assert read_mark(path, "ledger").first == 3


@pytest.mark.parametrize("byte", range(0, 36, 5))
def test_a_damaged_copy_of_a_mark_is_reported_and_the_other_copy_is_used(path: Path, byte: int):
    write_mark(path, (1, 11), (2, 22))
    said = set()
    for copy in (0, COPY_BYTES):
        flip(path, copy + byte)
        found = read_mark(path, "ledger")
        assert found.known
        assert "one of the two copies in ledger.mark is damaged" in found.doubt
        said.add((found.first, found.second))
        flip(path, copy + byte)
    assert said == {(1, 11), (2, 22)}
    flip(path, byte)
    flip(path, COPY_BYTES + byte)
    found = read_mark(path, "ledger")
    assert (found.known, found.exists) == (False, True)


def test_a_mark_with_another_label_is_ignored(path: Path):
    write_mark(path, (1, 1))
    assert not read_mark(path, "catalog").known


@pytest.mark.parametrize("size", [0, 10, COPY_BYTES + 10])
def test_a_truncated_mark_file_counts_as_damaged(path: Path, size: int):
    write_mark(path, (1, 1), (2, 2))
    path.write_bytes(path.read_bytes()[:size])
    assert read_mark(path, "ledger").doubt


def test_a_database_and_its_side_files_are_private(tmp_path: Path):
    path = tmp_path / "some.db"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE here(x)")
    for file in tmp_path.iterdir():
        file.chmod(0o644)
    owner_only(path)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == {f"some.db{end}": 0o600 for end in ("", "-wal", "-shm")}
    connection.close()


@pytest.fixture
def later(monkeypatch) -> Callable[[], None]:
    """Advances the time until the next check of free space."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def passes() -> None:
        now[0] += REFILL_SECONDS

    return passes


def test_the_reserve_file_is_restored_once_the_disk_has_room(tmp_path: Path, later):
    reserve = Reserve(tmp_path / "reserve")
    assert not reserve.is_full
    assert reserve.spend()
    assert reserve.refill() == REFILL_SECONDS
    assert reserve.is_full
    later()
    reserve.refill()
    assert not reserve.is_full


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path, later, monkeypatch):
    reserve, real = Reserve(tmp_path / "reserve"), os.statvfs

    def has(room: int) -> None:
        seen = real(tmp_path)
        fields = [*seen]
        fields[3] = fields[4] = room // seen.f_frsize  # The fields `f_bfree` and `f_bavail`.
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
        later()
        reserve.refill()

    for room, full in ((LOW_BYTES, False), (0, True), (LOW_BYTES, True), (ENOUGH_BYTES, False)):
        has(room)
        assert (reserve.is_full, reserve.spent) == (full, False)


def test_an_old_format_of_a_database_is_migrated_step_by_step_or_refused():
    found = Format(3, {1: ["CREATE TABLE a(x)", "CREATE TABLE b(x)"], 2: ["DROP TABLE a"]})
    assert found.refusal(1, "") == ""
    assert list(found.migration(1)) == ["CREATE TABLE a(x)", "CREATE TABLE b(x)", "DROP TABLE a"]
    assert "format 0, and moored" in found.refusal(0, "")
    assert "start moored of a newer release" in found.refusal(4, "")
    assert "start moored 7.0" in found.refusal(4, "7.0")


def test_a_database_has_the_name_of_the_release_that_writes_it():
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        assert writer_of(connection) == ""
        connection.execute("CREATE TABLE release(version)")
        connection.execute("INSERT INTO release VALUES ('7.0')")
        assert writer_of(connection) == "7.0"
        note_release(connection)
        assert writer_of(connection) == version("moorage")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_path_that_is_not_a_file_is_refused_at_once(path: Path, make: Callable[[Path], None]):
    make(path)
    with pytest.raises(OSError, match=r"not a regular file.*ledger\.mark"):
        read_mark(path, "ledger")
    with pytest.raises(StorageError, match=r"ledger\.mark cannot be read: it is not a regular"):
        read_secret(path)


@pytest.mark.parametrize("end", ["", "-wal", "-shm", "-journal"])
def test_a_pipe_in_place_of_a_database_file_is_not_opened(tmp_path: Path, end: str):
    database = tmp_path / "ledger.db"
    if end:
        connect(database).close()
    os.mkfifo(f"{database}{end}")
    for each in (connect, connect_to_look):
        with pytest.raises(OSError, match=f"not a regular file.*ledger.db{end}'"):
            each(database)

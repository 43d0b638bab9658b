"""What the ledger and the catalog keep beside their databases, so that no loss goes unnoticed.

SQLite reads a write-ahead log up to the first frame that is damaged and says nothing of the rest.
So how far a database had come is written down a second time, in a small file of its own. The
number of a database's format is here, too: no release reads what it does not know.
"""

import contextlib
import os
import queue
import shutil
import sqlite3
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final, TypeVar

__all__ = [
    "SYNC_SECONDS",
    "DurableMark",
    "Format",
    "Found",
    "Reserve",
    "log_damage",
    "log_lost",
    "next_of",
    "note_release",
    "owner_only",
    "read_mark",
    "sync_directory",
]

SYNC_SECONDS: Final = 1.0
"""How old a mark may be after a power cut. A sync with every commit would cost a third of them."""
RESERVE_BYTES: Final = 16 << 20
"""Reserve for releases and renewals on a full disk: some ten thousand of them."""
REFILL_SECONDS: Final = 2.0
_SLOT_BYTES: Final = 4096
"""The two copies lie in blocks of their own: one torn write cannot spoil both."""
_RECORD: Final = struct.Struct(">8sQQQ")
_SUM: Final = struct.Struct(">I")
_OWNER_ONLY: Final = 0o600
T = TypeVar("T")
_LOG_MAGIC: Final = 0x377F0682
_LOG_HEADER_BYTES: Final = 32
_LOG_FRAME_BYTES: Final = 24
"""Of the header of each frame of SQLite's write-ahead log (fileformat2.html, section 4.1)."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a mark says.

    Args:
        exists: There is a file.
        first: The first number; 0 where nothing can be read.
        second: The second one.
        writes: How often it was written; 0 where neither copy can be read.
        doubt: What of it is damaged; empty where all is well.

    """

    exists: bool
    first: int = 0
    second: int = 0
    writes: int = 0
    doubt: str = ""

    @property
    def known(self) -> bool:
        """Whether there is a copy that can be believed."""
        return self.writes > 0


def read_mark(path: Path, label: str) -> Found:
    """Return what a mark says; never raises for damage.

    Raises:
        OSError: The file is there and cannot be read.

    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Found(exists=False, doubt=f"{path.name} is missing")
    copies = [_unpack(content[start : start + _SLOT_BYTES], label) for start in (0, _SLOT_BYTES)]
    good = [copy for copy in copies if copy is not None]
    if not good:
        return Found(exists=True, doubt=f"neither copy in {path.name} can be read")
    writes, first, second = max(good)
    doubt = "" if len(good) == len(copies) else f"one of the two copies in {path.name} is damaged"
    return Found(exists=True, first=first, second=second, writes=writes, doubt=doubt)


def _unpack(slot: bytes, label: str) -> tuple[int, int, int] | None:
    record, end = slot[: _RECORD.size], _RECORD.size + _SUM.size
    if len(slot) < end or _SUM.unpack(slot[_RECORD.size : end])[0] != zlib.crc32(record):
        return None
    name, writes, first, second = _RECORD.unpack(record)
    return (writes, first, second) if name.rstrip(b"\0") == label.encode() else None


class DurableMark:
    """A mark that is written. One thread at a time.

    Args:
        path: Its file, which is made where it is missing.
        label: Up to eight letters that say what it is about.
        first: The first number to begin with.
        second: The second one.
        writes: How often it was written before.

    Attributes:
        unsynced: Something was written that a power cut may take back.

    Raises:
        OSError: It cannot be written.

    """

    def __init__(self, path: Path, label: str, first: int, second: int, writes: int) -> None:
        self._label = label.encode()
        self._writes = writes
        self._synced_at = time.monotonic()
        self.unsynced = False
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _OWNER_ONLY)
        try:
            os.fchmod(self._descriptor, _OWNER_ONLY)
            self.write_both(first, second)
            sync_directory(path.parent)
        except BaseException:
            self.close()
            raise

    def write(self, first: int, second: int) -> None:
        """Write the numbers over the older copy. It outlives the process; `sync`, the power."""
        self._writes += 1
        record = _RECORD.pack(self._label, self._writes, first, second)
        slot = record + _SUM.pack(zlib.crc32(record))
        os.pwrite(self._descriptor, slot.ljust(_SLOT_BYTES, b"\0"), self._writes % 2 * _SLOT_BYTES)
        self.unsynced = True

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        if self.unsynced:
            os.fdatasync(self._descriptor)
            self.unsynced = False
            self._synced_at = time.monotonic()

    def sync_in_time(self) -> None:
        """Do so where the last time is `SYNC_SECONDS` ago."""
        if time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self.sync()

    def write_both(self, first: int, second: int) -> None:
        """Write both copies, one after the other, each durable before the next."""
        for _ in range(2):
            self.write(first, second)
            self.sync()

    def close(self) -> None:
        """Let go of the file. A second call does nothing."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # It is as if the power had been cut.
                self.sync()
            os.close(self._descriptor)
            self._descriptor = -1


class Reserve:
    """Room on the disk that is given up when there is no other: what is promised can still end.

    Args:
        path: A file of that size, which is there while all is well.

    Attributes:
        spent: It was given up, or there was no room for it.

    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.spent = not self._fill()
        self._tried_at = time.monotonic()

    def spend(self) -> bool:
        """Give it up; return whether there was any."""
        if self.spent:
            return False
        self.close()
        self.spent = True
        return True

    def refill(self) -> None:
        """Take it back where there is room again; looks every `REFILL_SECONDS`."""
        now = time.monotonic()
        if self.spent and now - self._tried_at >= REFILL_SECONDS:
            self._tried_at = now
            self.spent = not self._fill()

    def close(self) -> None:
        """Give the room back."""
        self._path.unlink(missing_ok=True)

    def _fill(self) -> bool:
        try:
            if shutil.disk_usage(self._path.parent).free < 2 * RESERVE_BYTES:
                return False
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, _OWNER_ONLY)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            finally:
                os.close(descriptor)
        except OSError:
            return False
        return True


def next_of(
    jobs: "queue.SimpleQueue[T]", mark: DurableMark | None, reserve: Reserve | None = None
) -> T:
    """Return the next job of a thread that writes; meanwhile do what is due by time.

    Args:
        jobs: Of that thread.
        mark: Is synced, should no job come within `SYNC_SECONDS`.
        reserve: Is taken back where there is room again, also where no job ever comes.

    """
    synced = mark is None or not mark.unsynced
    while not synced or (reserve is not None and reserve.spent):
        try:
            return jobs.get(timeout=REFILL_SECONDS if synced else SYNC_SECONDS)
        except queue.Empty:
            if mark is not None and not synced:
                synced = True
                with contextlib.suppress(OSError):  # The next write says so.
                    mark.sync()
            if reserve is not None:
                reserve.refill()
    return jobs.get()


@dataclass(frozen=True, slots=True)
class Format:
    """The number of a database's format.

    Args:
        current: What this release writes.
        steps: By an older number, the statements that make a database of the next one.

    """

    current: int
    steps: Mapping[int, Sequence[str]]

    def refusal(self, connection: sqlite3.Connection, found: int) -> str:
        """Return why a database of that number is not opened; empty where it is."""
        here = f"moored {version('moorage')} reads formats up to {self.current}"
        if found > self.current:
            needed = f"moored {_writer(connection) or 'of a newer release'}"
            return (
                f"has format {found}, and {here}: start {needed}, or restore the data directory "
                "from a backup that an older release wrote"
            )
        if any(number not in self.steps for number in range(found, self.current)):
            return f"has format {found}, and {here}, but not this one"
        return ""

    def migrate(self, connection: sqlite3.Connection, found: int) -> None:
        """Make a database of the current format of an older one, in the caller's transaction."""
        for number in range(found, self.current):
            for statement in self.steps[number]:
                connection.execute(statement)


def note_release(connection: sqlite3.Connection) -> None:
    """Write down which release writes a database, for older ones that cannot read it."""
    release = version("moorage")
    if _writer(connection) != release:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE IF NOT EXISTS release(version TEXT NOT NULL)")
        connection.execute("DELETE FROM release")
        connection.execute("INSERT INTO release VALUES (?)", (release,))
        connection.execute("COMMIT")


def _writer(connection: sqlite3.Connection) -> str:
    with contextlib.suppress(sqlite3.Error):
        for (found,) in connection.execute("SELECT version FROM release"):
            return str(found)
    return ""


def owner_only(path: Path) -> None:
    """Make a database where there is none, and see that none but its owner may read it.

    SQLite gives the files that it makes beside a database the database's own mode.

    Raises:
        OSError: It cannot be made, or belongs to another user.

    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _OWNER_ONLY))
    for each in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
        if each.exists() and each.stat().st_mode & 0o777 != _OWNER_ONLY:
            each.chmod(_OWNER_ONLY)


def sync_directory(directory: Path) -> None:
    """See to it that the names in a directory outlive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def log_damage(database: Path) -> str:
    """Return where a write-ahead log of SQLite ends before its time, in words.

    SQLite itself reads up to there and says nothing. Frames of an earlier round, which have other
    salts, are no damage: they were brought over into the database before.
    """
    return _read_log(database)[0]


def log_lost(database: Path) -> str:
    """Return where a log is damaged so that durable commits are lost; empty where none are.

    The frames of the one that was under way at a crash may be there or not, in any order. Each
    commit before that one was synced before the next began.
    """
    where, commits = _read_log(database)
    return where if commits > 1 else ""


def _read_log(database: Path) -> tuple[str, int]:
    """Return where a log ends, and how many commits there seem to be from there on."""
    try:
        content = database.with_name(database.name + "-wal").read_bytes()
    except FileNotFoundError:
        return f"{database.name}-wal is not there.", 0
    name = f"{database.name}-wal"
    if len(content) < _LOG_HEADER_BYTES:
        return (f"{name} is empty." if not content else f"{name} was cut in its header."), 0
    magic, _, page_bytes, _ = struct.unpack(">4I", content[:16])
    word_pair = struct.Struct(">2I" if magic & 1 else "<2I")
    sums = _log_sums(word_pair, content[:24], (0, 0))
    if magic & ~1 != _LOG_MAGIC or struct.pack(">2I", *sums) != content[24:32]:
        # It is written and synced by itself, before the first frame.
        where = (
            f"{name}: its header, the first {_LOG_HEADER_BYTES} bytes, does not match its checksum."
        )
        return where, 2 if len(content) > _LOG_HEADER_BYTES else 0
    frame_bytes = _LOG_FRAME_BYTES + page_bytes
    for start in range(_LOG_HEADER_BYTES, len(content), frame_bytes):
        frame = content[start : start + frame_bytes]
        ours = frame[8:16] == content[16:24] or content[16:24] in content[start + frame_bytes :]
        if not ours and len(frame) == frame_bytes:
            return "", 0  # An earlier round begins here.
        sums = _log_sums(word_pair, frame[:8] + frame[_LOG_FRAME_BYTES:], sums)
        if len(frame) < frame_bytes or struct.pack(">2I", *sums) != frame[16:24]:
            number = (start - _LOG_HEADER_BYTES) // frame_bytes + 1
            commits = sum(
                content[at + 8 : at + 16] == content[16:24]
                and content[at + 4 : at + 8] != b"\0" * 4
                for at in range(start, len(content), frame_bytes)
            )
            return (
                f"{name}: frame {number}, at byte {start}, does not match its checksum; "
                f"SQLite reads nothing of the {len(content) - start} bytes from there on."
            ), commits
    return f"{name} is whole as far as it goes: it was cut where a frame ends.", 0


def _log_sums(word_pair: struct.Struct, content: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    """Return SQLite's checksum of a log, continued over some more of it."""
    first, second = sums
    content = content[: len(content) - len(content) % word_pair.size]
    for one, other in word_pair.iter_unpack(content):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second

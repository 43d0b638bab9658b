"""Opens, examines and replaces SQLite files."""

import contextlib
import errno
import os
import sqlite3
import stat
import struct
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO, Final

from moorage.storage.base import StorageCorrupt, StorageError, StorageFailed

OWNER_ONLY: Final = 0o600
UNREADABLE: Final = (sqlite3.Error, ValueError, TypeError)
"""Errors that reading a damaged file raises, e.g. if text is not UTF-8 or a number is missing."""
BUSY_SECONDS: Final = 5.0
_BESIDE: Final = ("", "-wal", "-shm", "-journal")
"""Suffixes of the names of a database's files."""
_LOG_MAGIC: Final = 0x377F0682
_LOGGED_AT: Final = 18
"""Place of the byte that says that a database has a log (fileformat2.html, section 1.3.3)."""
_LOGGED: Final = b"\2"
LOG_HEADER_BYTES: Final = 32
LOG_FRAME_BYTES: Final = 24
"""Size of a frame's header in SQLite's write-ahead log (fileformat2.html, section 4.1)."""


@contextlib.contextmanager
def translate_errors(place: str, *, values: bool = True) -> Iterator[None]:
    """Convert errors of SQLite and of the file system into this package's errors.

    Args:
        place: Name of the database in messages.
        values: Whether errors of reading values of a wrong type are converted, too.

    Raises:
        StorageCorrupt: The database file is damaged, or is not a database.
        StorageFailed: The disk is full or has an I/O error, another program has a lock, and so on.
    """
    try:
        yield
    except (TypeError, ValueError) as no:
        if not values:
            raise
        raise StorageCorrupt(place, f"the file has contents that no server wrote: {no}") from no
    except (sqlite3.Error, OSError) as no:
        code = getattr(no, "sqlite_errorcode", None)
        # The module, not SQLite, finds text that is not UTF-8; its error has no code.
        rotten = code is None and isinstance(no, sqlite3.OperationalError)
        if rotten or (code or 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise StorageCorrupt(place, str(no)) from no
        raise StorageFailed(
            f"{place} failed: {no}. Make room on the disk or repair it, then start again: "
            "acknowledged changes are safe."
        ) from no


def read_file(path: Path) -> bytes:
    """Return the content of a regular file; see `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; opening a pipe would wait forever.

    Raises:
        OSError: The file is not regular, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _check_regular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file; move it away", str(path))


def check_files(database: Path) -> None:
    """Refuse a database with a file on which SQLite would wait forever, such as a pipe.

    Raises:
        OSError: A file is not regular.
    """
    for end in _BESIDE:
        path = database.with_name(database.name + end)
        with contextlib.suppress(FileNotFoundError):
            _check_regular(path.stat().st_mode, path)


def connect(path: Path) -> sqlite3.Connection:
    """Open a database that any thread may use, but only one thread at a time."""
    check_files(path)
    return sqlite3.connect(
        path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )


def connect_to_look(path: Path, *, missing: bool = False) -> sqlite3.Connection:
    """Open a file without changing it or its log, even a damaged one.

    Args:
        path: The file.
        missing: Whether a missing file is read as an empty database, which a start makes of it.
    """
    check_files(path)
    if missing and not path.exists():
        return sqlite3.connect(":memory:", isolation_level=None)
    address = f"{path.absolute().as_uri()}?mode=ro"
    if _is_unused(path):
        address += "&immutable=1"  # Otherwise SQLite makes a log, and leaves it there.
    return sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)


def _is_unused(path: Path) -> bool:
    """Return whether no process uses a database: it has a write-ahead log only while it is used."""
    with contextlib.suppress(OSError):
        if not path.with_name(path.name + "-wal").exists():
            with open_regular(path) as file:
                return file.read(_LOGGED_AT + 1)[_LOGGED_AT:] == _LOGGED
    return False


def keep_log(connection: sqlite3.Connection, place: str) -> None:
    """Switch on the write-ahead log of a database.

    Raises:
        StorageError: The file cannot have a write-ahead log.
    """
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    if mode != "wal":
        raise StorageError(
            f"{place} cannot have a write-ahead log here (mode {mode!r}). Use a data "
            "directory on a local disk."
        )


def note_release(connection: sqlite3.Connection) -> None:
    """Store the release that writes a database, for messages of older releases."""
    release = version("moorage")
    if writer_of(connection) != release:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE IF NOT EXISTS release(version TEXT NOT NULL)")
        connection.execute("DELETE FROM release")
        connection.execute("INSERT INTO release VALUES (?)", (release,))
        connection.execute("COMMIT")


def writer_of(connection: sqlite3.Connection) -> str:
    """Return the release that wrote a database; empty if unknown."""
    with contextlib.suppress(sqlite3.Error):
        for (found,) in connection.execute("SELECT version FROM release"):
            return str(found)
    return ""


def check_pages(connection: sqlite3.Connection, findings_max: int) -> Iterator[str]:
    """Yield SQLite's findings about a database."""
    for (line,) in connection.execute(f"PRAGMA integrity_check({findings_max})"):
        if line != "ok":
            yield str(line)


def check_pages_in_time(connection: sqlite3.Connection, seconds_max: float) -> str:
    """Return SQLite's first finding about a database; empty if there is none, or none in time.

    Args:
        connection: The database.
        seconds_max: Seconds after which the check ends, wherever it is.

    Raises:
        sqlite3.Error: SQLite cannot read the database.
    """
    bell = threading.Timer(seconds_max, connection.interrupt)
    bell.start()
    try:
        (line,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError as no:
        if no.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        return ""
    finally:
        bell.cancel()
        bell.join()  # It uses the connection, which the caller closes.
    return "" if line == "ok" else str(line)


def owner_only(path: Path) -> None:
    """Create a database if it is missing, and let only its owner read it.

    SQLite gives the files that it makes beside a database the database's own mode.

    Raises:
        OSError: The file cannot be created, or belongs to another user.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY))
    for each in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
        if each.exists() and each.stat().st_mode & 0o777 != OWNER_ONLY:
            each.chmod(OWNER_ONLY)


def sync_directory(directory: Path) -> None:
    """Sync a directory, so that the names in it survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Create or replace a file that only its owner reads; a power cut leaves the old or new one.

    Raises:
        OSError: The file cannot be written; then the old one stays.
    """
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)  # A crash may have left it.
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNER_ONLY)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_directory(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path for a new database; then replace the database at `path` by the new one."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    owner_only(new)
    yield new
    for end in ("-wal", "-shm"):  # SQLite would read the old database's log into the new database.
        path.with_name(path.name + end).unlink(missing_ok=True)
    new.replace(path)
    sync_directory(path.parent)


def log_damage(database: Path) -> str:
    """Return a text that says where SQLite's write-ahead log breaks off; empty if it is complete.

    SQLite itself reads up to this place and reports nothing. Frames with other salts are from an
    earlier round and no damage: the database already has their pages.
    """
    return _read_log(database)[0]


def find_log_damage(database: Path) -> str:
    """Return the damage in a log by which durable commits are lost; empty if there is none.

    After a crash, the frames of the last commit may be missing or complete, in any order. Each
    earlier commit was synced before the next began.
    """
    where, commits = _read_log(database)
    return where if commits > 1 else ""


def _read_log(database: Path) -> tuple[str, int]:
    """Return the place where a log ends, and the number of commits behind it."""
    try:
        content = read_file(database.with_name(database.name + "-wal"))
    except FileNotFoundError:
        return f"{database.name}-wal is not there.", 0
    name = f"{database.name}-wal"
    if len(content) < LOG_HEADER_BYTES:
        return (f"{name} is empty." if not content else f"{name} was cut in its header."), 0
    magic, _, page_bytes, _ = struct.unpack(">4I", content[:16])
    word_pair = struct.Struct(">2I" if magic & 1 else "<2I")
    sums = log_sums(word_pair, content[:24], (0, 0))
    if magic & ~1 != _LOG_MAGIC or struct.pack(">2I", *sums) != content[24:32]:
        # SQLite syncs the header before it writes the first frame.
        where = (
            f"{name}: its header, the first {LOG_HEADER_BYTES} bytes, does not match its checksum."
        )
        return where, 2 if len(content) > LOG_HEADER_BYTES else 0
    frame_bytes = LOG_FRAME_BYTES + page_bytes
    for start in range(LOG_HEADER_BYTES, len(content), frame_bytes):
        frame = content[start : start + frame_bytes]
        ours = frame[8:16] == content[16:24] or content[16:24] in content[start + frame_bytes :]
        if not ours and len(frame) == frame_bytes:
            return "", 0  # An earlier round begins here.
        sums = log_sums(word_pair, frame[:8] + frame[LOG_FRAME_BYTES:], sums)
        if len(frame) < frame_bytes or struct.pack(">2I", *sums) != frame[16:24]:
            number = (start - LOG_HEADER_BYTES) // frame_bytes + 1
            commits = sum(
                content[at + 8 : at + 16] == content[16:24]
                and content[at + 4 : at + 8] != b"\0" * 4
                for at in range(start, len(content), frame_bytes)
            )
            return (
                f"{name}: frame {number}, at byte {start}, does not match its checksum; "
                f"SQLite reads nothing of the {len(content) - start} bytes from there on."
            ), commits
    return f"{name} has no damage up to its end: it was cut at the end of a frame.", 0


def log_sums(word_pair: struct.Struct, content: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    """Return SQLite's checksum of a log, continued over the next bytes of the log."""
    first, second = sums
    content = content[: len(content) - len(content) % word_pair.size]
    for one, other in word_pair.iter_unpack(content):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second

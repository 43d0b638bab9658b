"""The tables of the SQLite ledger, and every statement on them. `SqliteLedger` calls these.

Everything here is synchronous and works on a connection that it is given. No statement looks at
more rows than it returns: what starting and asking cost does not grow with the history.
"""

import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, takewhile
from pathlib import Path
from typing import Final, NamedTuple

from moorage.durability import Format, note_release
from moorage.ledger.base import (
    CHECKPOINTS_KEPT,
    PAGE_BYTES_MAX,
    LedgerCorrupt,
    LedgerError,
    LedgerFailed,
    place_of,
)
from moorage.ledger.codec import FactRow

FORMAT: Final = Format(1, {})
"""Version of the tables. The shapes of facts have their own versions."""

ROWS_PER_STATEMENT: Final = 4_000
"""Facts in one INSERT: eight parameters each, and SQLite takes 32,766."""

PRUNED_PER_STEP: Final = 100
"""Facts that one transaction deletes at most: some milliseconds, between two commits."""

PARTS_PER_SWEEP: Final = 16
"""Parts of dropped checkpoints that one transaction deletes, so that appends are not held up."""

_BUSY_SECONDS = 5.0
_WAL_BYTES_KEPT = 64 * 1024 * 1024

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE meta(name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT INTO meta VALUES ('format', {FORMAT.current});
INSERT INTO meta VALUES ('pruned', 0);
CREATE TABLE fact(
    seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, version INTEGER NOT NULL,
    subject TEXT NOT NULL, body TEXT NOT NULL, checksum INTEGER NOT NULL,
    chain INTEGER NOT NULL);
CREATE TABLE lost(first INTEGER PRIMARY KEY, last INTEGER NOT NULL, at REAL NOT NULL);
CREATE INDEX fact_by_subject ON fact(subject);
CREATE TABLE checkpoint(
    number INTEGER PRIMARY KEY, seq INTEGER NOT NULL, parts INTEGER NOT NULL,
    checksum INTEGER NOT NULL);
CREATE TABLE checkpoint_part(
    checkpoint INTEGER NOT NULL, number INTEGER NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (checkpoint, number));
COMMIT;
"""  # noqa: S608  # Constants only.

_INSERT = "INSERT INTO fact VALUES "
_VALUES = "(?,?,?,?,?,CAST(? AS TEXT),?,?)"
# A damaged page may say NULL where none can be.
_COLUMNS = "seq, at, kind, version, subject, CAST(coalesce(body, '') AS BLOB), checksum, chain"

SELECT_FIRST: Final = "SELECT coalesce(min(seq), 1) FROM fact"
SELECT_LAST: Final = "SELECT coalesce(max(seq), 0) FROM fact"
SELECT_CHAIN: Final = "SELECT chain FROM fact WHERE seq = ?"
SELECT_AFTER: Final = f"SELECT {_COLUMNS} FROM fact WHERE seq > ? ORDER BY seq LIMIT ?"  # noqa: S608  # As above.
SELECT_BETWEEN: Final = f"SELECT {_COLUMNS} FROM fact WHERE seq > ? AND seq <= ? ORDER BY seq"  # noqa: S608  # As above.
SELECT_ABOUT: Final = (
    f"SELECT {_COLUMNS} FROM fact WHERE subject = ? AND seq > ? ORDER BY seq LIMIT ?"  # noqa: S608  # As above.
)
SELECT_OLDEST: Final = "SELECT seq, at FROM fact WHERE seq < ? ORDER BY seq LIMIT ?"
SELECT_OLDEST_AT: Final = "SELECT at FROM fact ORDER BY seq LIMIT 1"
SELECT_PARTS: Final = "SELECT body FROM checkpoint_part WHERE checkpoint = ? ORDER BY number"


class NoLedgerError(LedgerError):
    """A database that does not say that it is a ledger."""


class Checkpoint(NamedTuple):
    """One finished checkpoint.

    Args:
        number: Grows with every checkpoint that is begun; unfinished ones leave only parts.
        seq: The fact as of which it was taken.
        parts: How many parts it has.
        checksum: CRC-32 of the parts' bytes, in order, and then of the other numbers.

    """

    number: int
    seq: int
    parts: int
    checksum: int


def checkpoint(number: int, seq: int, parts: int, checksum: int) -> Checkpoint:
    """Return a finished checkpoint, given the CRC-32 of its parts."""
    return Checkpoint(number, seq, parts, zlib.crc32(f"{number} {seq} {parts}".encode(), checksum))


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn what SQLite raises into this package's errors.

    Raises:
        LedgerCorrupt: The file is damaged, or is no database.
        LedgerFailed: Anything else: full disk, I/O error, a foreign lock.

    """
    try:
        yield
    except (TypeError, ValueError) as no:
        # Text that is not UTF-8, or no number where each is one: SQLite checks neither.
        raise LedgerCorrupt(place_of(path), f"it holds what was never written ({no})") from no
    except sqlite3.Error as no:
        code = getattr(no, "sqlite_errorcode", None)
        # Text that is not UTF-8 comes without a code: the module finds it, not SQLite.
        rotten = code is None and isinstance(no, sqlite3.OperationalError)
        if rotten or (code or 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise LedgerCorrupt(place_of(path), str(no)) from no
        raise LedgerFailed(
            f"{place_of(path)} failed: {no}. Make room on the disk or repair it, then start "
            "again: what was acknowledged is safe."
        ) from no


def connect(path: Path) -> sqlite3.Connection:
    """Open the file for writing, and make the tables where it is new.

    Raises:
        LedgerError: Another release made it, it is no ledger, or the disk cannot hold one.
        LedgerCorrupt: It is damaged, or is no database.

    """
    connection = _connection(path)
    try:
        _set_journal(connection, path)
        if is_new(connection, path):
            connection.executescript(_SCHEMA)
        elif (found := _format(connection) or 0) < FORMAT.current:
            connection.execute("BEGIN IMMEDIATE")
            FORMAT.migrate(connection, found)
            connection.execute("UPDATE meta SET value = ? WHERE name = 'format'", (FORMAT.current,))
            connection.execute("COMMIT")
        note_release(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open the file a second time, for reading: it does not wait for the writer."""
    connection = _connection(path)
    connection.execute("PRAGMA query_only=ON")
    return connection


def connect_to_look(path: Path) -> sqlite3.Connection:
    """Open a file that is not to be changed: its log stays as it is, also where it is damaged."""
    address = f"{path.absolute().as_uri()}?mode=ro"
    return sqlite3.connect(address, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)


@contextmanager
def one_moment(connection: sqlite3.Connection) -> Iterator[None]:
    """Have several questions see the same facts, whatever is written or pruned meanwhile."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")


def _connection(path: Path) -> sqlite3.Connection:
    # Opened in one thread and used in another, by one at a time.
    return sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )


def _set_journal(connection: sqlite3.Connection, path: Path) -> None:
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    if mode != "wal":
        raise LedgerError(
            f"{place_of(path)} cannot have a write-ahead log here (mode {mode!r}). Use a data "
            "directory on a local disk."
        )
    # FULL syncs the log on every commit: NORMAL would lose acknowledged facts with the power.
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute(f"PRAGMA journal_size_limit={_WAL_BYTES_KEPT}")


def is_new(connection: sqlite3.Connection, path: Path) -> bool:
    """Return whether a file has no tables yet.

    Raises:
        NoLedgerError: It is no ledger.
        LedgerError: This release does not read it.

    """
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    if not tables:
        return True
    found = _format(connection) if "meta" in tables else None
    if found is None:
        raise NoLedgerError(
            f"{place_of(path)} is a database, but no ledger of Moorage. Nothing was changed. "
            "Name another data directory."
        )
    if refusal := FORMAT.refusal(connection, found):
        raise LedgerError(f"{place_of(path)} {refusal}. Nothing was changed.")
    return False


def _format(connection: sqlite3.Connection) -> int | None:
    row = connection.execute("SELECT value FROM meta WHERE name = 'format'").fetchone()
    return None if row is None else row[0]


def pruned_seq(connection: sqlite3.Connection) -> int:
    """Return the last fact that was deleted for its age or for room; 0 where none was."""
    return int(connection.execute("SELECT value FROM meta WHERE name = 'pruned'").fetchone()[0])


def kept_since(connection: sqlite3.Connection) -> float | None:
    """Return when the oldest fact was appended that was not deleted; None where none was."""
    if not pruned_seq(connection):
        return None
    (at,) = connection.execute(SELECT_OLDEST_AT).fetchone()
    return float(at)


def prune(connection: sqlite3.Connection, before: float, bytes_max: int) -> bool:
    """Delete some of the oldest facts. Return whether there are more to delete.

    What both checkpoints stand for, and nothing else: a start needs all the others.

    Args:
        connection: In a transaction.
        before: Those that were appended before this go, in seconds since the epoch.
        bytes_max: As long as the file uses more than this, the others go, too.

    """
    finished = checkpoints(connection)
    if len(finished) < CHECKPOINTS_KEPT:
        return False
    limit = min(each.seq for each in finished)
    oldest = connection.execute(SELECT_OLDEST, (limit, PRUNED_PER_STEP)).fetchall()
    if used_bytes(connection) <= bytes_max:
        oldest = list(takewhile(lambda row: row[1] < before, oldest))
    if not oldest:
        return False
    last = oldest[-1][0]
    connection.execute("DELETE FROM fact WHERE seq <= ?", (last,))
    set_pruned(connection, last)
    return len(oldest) == PRUNED_PER_STEP


def used_bytes(connection: sqlite3.Connection) -> int:
    """Return what the file holds, less what it has free for new facts."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def set_pruned(connection: sqlite3.Connection, seq: int) -> None:
    """Write down the last fact that was deleted."""
    connection.execute("UPDATE meta SET value = ? WHERE name = 'pruned'", (seq,))


def lost(connection: sqlite3.Connection) -> list[tuple[int, int]]:
    """Return the first and the last of each run of facts whose loss was accepted, in order."""
    return list(connection.execute("SELECT first, last FROM lost ORDER BY first"))


def chain_of(connection: sqlite3.Connection, seq: int) -> int | None:
    """Return the chain of a fact; 0 before the first one, None where the fact is not there."""
    if seq == 0:
        return 0
    row = connection.execute(SELECT_CHAIN, (seq,)).fetchone()
    return None if row is None else row[0]


def first_seq(connection: sqlite3.Connection) -> int:
    """Return the seq of the oldest fact, 1 where there is none."""
    return int(connection.execute(SELECT_FIRST).fetchone()[0])


def last_seq(connection: sqlite3.Connection) -> int:
    """Return the seq of the last fact, 0 where there is none."""
    return int(connection.execute(SELECT_LAST).fetchone()[0])


def insert(connection: sqlite3.Connection, rows: Sequence[FactRow]) -> None:
    """Add facts.

    One statement for all of them: every statement lets go of the interpreter lock and has to
    win it back from the event loop, up to 5 ms each time. Measured beside a busy loop, 100
    facts take 7 ms as one autocommitted statement and 160 ms as 100 of them.
    """
    for start in range(0, len(rows), ROWS_PER_STATEMENT):
        chunk = rows[start : start + ROWS_PER_STATEMENT]
        statement = _INSERT + ",".join([_VALUES] * len(chunk))
        connection.execute(statement, list(chain.from_iterable(chunk)))


def page(
    connection: sqlite3.Connection, after: int, limit: int, subject: str | None = None
) -> list[FactRow]:
    """Return up to `limit` facts after a seq, fewer where they are large.

    Args:
        connection: Any.
        after: The seq.
        limit: How many at most.
        subject: About this lease, request or cluster only; None for all.

    """
    cursor = (
        connection.execute(SELECT_AFTER, (after, limit))
        if subject is None
        else connection.execute(SELECT_ABOUT, (subject, after, limit))
    )
    rows: list[FactRow] = []
    size = 0
    try:
        for row in map(FactRow._make, cursor):
            rows.append(row)
            size += len(row.body)
            if size > PAGE_BYTES_MAX:
                break
    finally:
        # An open cursor would keep the write-ahead log from being recycled.
        cursor.close()
    return rows


def between(connection: sqlite3.Connection, after: int, last: int) -> list[FactRow]:
    """Return the facts after one and up to another, however large they are."""
    cursor = connection.execute(SELECT_BETWEEN, (after, last))
    return [FactRow._make(row) for row in cursor]


def checkpoints(connection: sqlite3.Connection) -> list[Checkpoint]:
    """Return the finished checkpoints, newest first."""
    query = "SELECT number, seq, parts, checksum FROM checkpoint ORDER BY number DESC"
    return [Checkpoint._make(row) for row in connection.execute(query)]


def last_checkpoint_number(connection: sqlite3.Connection) -> int:
    """Return the highest number of a checkpoint, finished or not; 0 where there is none."""
    query = "SELECT max(number) FROM checkpoint UNION SELECT max(checkpoint) FROM checkpoint_part"
    return max(number or 0 for (number,) in connection.execute(query))


def checkpoint_parts(connection: sqlite3.Connection, finished: Checkpoint) -> list[bytes] | None:
    """Return the parts of a checkpoint, or None where they are not as they were written."""
    parts = [body for (body,) in connection.execute(SELECT_PARTS, (finished.number,))]
    checksum = 0
    for part in parts:
        if not isinstance(part, bytes):
            return None
        checksum = zlib.crc32(part, checksum)
    number, seq, _, _ = finished
    return parts if checkpoint(number, seq, len(parts), checksum) == finished else None


def insert_part(connection: sqlite3.Connection, checkpoint: int, number: int, body: bytes) -> None:
    """Add one part of a checkpoint that is not finished yet."""
    connection.execute("INSERT INTO checkpoint_part VALUES (?,?,?)", (checkpoint, number, body))


def finish_checkpoint(connection: sqlite3.Connection, finished: Checkpoint) -> None:
    """Make a checkpoint count, and those that are too old not count any more."""
    connection.execute("INSERT INTO checkpoint VALUES (?,?,?,?)", finished)
    connection.execute(
        "DELETE FROM checkpoint WHERE number NOT IN "
        "(SELECT number FROM checkpoint ORDER BY number DESC LIMIT ?)",
        (CHECKPOINTS_KEPT,),
    )


def drop_checkpoint(connection: sqlite3.Connection, finished: Checkpoint) -> None:
    """Make a checkpoint not count any more; its parts go with the next sweeps."""
    connection.execute("DELETE FROM checkpoint WHERE number = ?", (finished.number,))


def sweep(connection: sqlite3.Connection) -> bool:
    """Delete some parts of checkpoints that do not count. Return whether there were any.

    Only to be called while no checkpoint is being written.
    """
    return (
        connection.execute(
            "DELETE FROM checkpoint_part WHERE rowid IN (SELECT rowid FROM checkpoint_part "
            "WHERE checkpoint NOT IN (SELECT number FROM checkpoint) LIMIT ?)",
            (PARTS_PER_SWEEP,),
        ).rowcount
        > 0
    )

"""The ledger in one SQLite file, with its marks beside it; the daemon uses it by default.

One thread at a time writes the file, and one connection reads it, for queries and for recovery.
`storage.sqlite.lock.WriterLock` keeps other processes out.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final, NamedTuple

from moorage.storage.base import FactRow, Facts, OpenedFacts, StorageCorrupt, StorageError, run
from moorage.storage.sqlite.fact_tables import (
    ROWS_PER_STATEMENT,
    FactTables,
    ForeignDatabaseError,
    connect_to_write,
)
from moorage.storage.sqlite.fencing import LABEL as FENCING
from moorage.storage.sqlite.fencing import Fencing, fencing_path
from moorage.storage.sqlite.files import (
    UNREADABLE,
    connect,
    connect_to_look,
    find_log_damage,
    owner_only,
    replacing,
    sync_directory,
    translate_errors,
)
from moorage.storage.sqlite.lock import WriterLock
from moorage.storage.sqlite.marks import DurableMark, Found, Reserve, read_mark
from moorage.storage.sqlite.salvage import readable

LABEL: Final = "ledger"
"""Label of the ledger's progress mark: seq and chain of its last durable fact."""


def place_of(path: Path) -> str:
    """Return how error messages name a ledger file."""
    return f"the ledger {path}"


def mark_path(ledger: Path) -> Path:
    """Return the path of the file that marks a ledger's last durable fact."""
    return ledger.with_suffix(".mark")


class _Writing(NamedTuple):
    """The resources of the thread that writes."""

    connection: sqlite3.Connection
    mark: DurableMark
    fencing: Fencing
    reserve: Reserve


class SqliteFacts:
    """The facts of a ledger in a file; implements `storage.base.FactStore`.

    Args:
        path: The database file; a missing file and its directory are created. Only the owner can
            read the file, since it contains requests of tenants.
    """

    is_local = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = WriterLock(path)
        self._writing: _Writing | None = None
        self._reader: sqlite3.Connection | None = None
        self._reading = threading.Lock()

    @property
    def place(self) -> str:
        return place_of(self._path)

    @property
    def is_full(self) -> bool:
        return self._writing is not None and self._writing.reserve.is_full

    def open(self) -> OpenedFacts:
        with ExitStack() as opened:
            self._make_file(opened)
            with translate_errors(self.place):
                found = look(self._path)
                fencing, mark = self._open_beside(opened, found)
                connection = connect_to_write(self._path, self.place)
                opened.callback(connection.close)
                reader = opened.enter_context(closing(connect(self._path)))
                reader.execute("PRAGMA query_only=ON")
                tables = FactTables(connection)
                last_seq = tables.last_seq()
                mark.write_both(last_seq, tables.chain_of(last_seq) or 0)
            opened.pop_all()
        reserve = Reserve(self._path.with_suffix(".reserve"))
        self._writing, self._reader = _Writing(connection, mark, fencing, reserve), reader
        doubts = [doubt for doubt in (found.doubt, fencing.found.doubt) if last_seq and doubt]
        warnings = [f"{self.place}: {doubt}; it was written again." for doubt in doubts]
        return OpenedFacts(fencing.floor, warnings)

    def _open_beside(self, opened: ExitStack, found: Found) -> tuple[Fencing, DurableMark]:
        """Open the files beside the database; a later start refuses a database without them."""
        try:
            fencing = Fencing(self._path)
            opened.callback(fencing.close, clean=False)
            mark = DurableMark(
                mark_path(self._path), LABEL, found.first, found.second, found.writes
            )
        except OSError as no:
            raise StorageError(f"{self.place} cannot be opened: {no}.") from no
        opened.callback(mark.close)
        return fencing, mark

    def _make_file(self, opened: ExitStack) -> None:
        """Lock the ledger, create the file if it is missing, and make its name durable."""
        directory = self._path.parent
        try:
            if not directory.exists():
                directory.mkdir(parents=True, exist_ok=True)
                sync_directory(directory.parent)
            owner_only(self._path)  # First, since the lock is on this file, too.
            self._lock.acquire()
            opened.callback(self._lock.release)
            sync_directory(directory)
        except OSError as no:
            raise StorageError(
                f"{self.place} cannot be opened: {no}. The data directory must be a directory "
                "that this user may write to."
            ) from no

    @contextlib.contextmanager
    def reading(self) -> Iterator[Facts]:
        with self._reading:
            if self._reader is None:
                raise StorageError(f"{self.place} is not open.")
            with translate_errors(self.place):
                self._reader.execute("BEGIN")
                try:
                    yield FactTables(self._reader)
                finally:
                    self._reader.execute("ROLLBACK")

    def commit(
        self, rows: Sequence[FactRow], fencing: int, works: Sequence[Callable[[Facts], object]]
    ) -> list[object]:
        assert self._writing
        connection, mark, numbers, reserve = self._writing
        with translate_errors(self.place):
            numbers.reserve(fencing)
            reserve.refill()
            try:
                results = _transact(connection, rows, works)
            except sqlite3.OperationalError as no:
                # Nothing was written: unlike after a failed sync, the caller may try again.
                if no.sqlite_errorcode & 0xFF != sqlite3.SQLITE_FULL or not reserve.spend():
                    raise
                results = _transact(connection, rows, works)
            if rows:
                mark.write(rows[-1].seq, rows[-1].chain)
        return results

    def upkeep(self) -> float | None:
        assert self._writing
        with translate_errors(self.place):
            sync_seconds = self._writing.mark.sync_in_time()
            look_seconds = self._writing.reserve.refill()
        return look_seconds if sync_seconds is None else min(sync_seconds, look_seconds)

    def end_writing(self, *, clean: bool) -> None:
        assert self._writing
        connection, mark, fencing, reserve = self._writing
        connection.close()
        mark.close()
        with contextlib.suppress(OSError):  # After an error, numbers stay reserved and unused.
            fencing.close(clean=clean)
            reserve.close()

    def close(self) -> None:
        with self._reading:
            if self._reader is not None:
                self._reader.close()
                self._reader = None
        self._lock.release()


def _transact(
    connection: sqlite3.Connection,
    rows: Sequence[FactRow],
    works: Sequence[Callable[[Facts], object]],
) -> list[object]:
    tables = FactTables(connection)
    if not works and len(rows) <= ROWS_PER_STATEMENT:
        tables.insert(rows)  # A single statement is its own transaction.
        return []
    connection.execute("BEGIN IMMEDIATE")
    try:
        tables.insert(rows)
        results = [work(tables) for work in works]
        connection.execute("COMMIT")
    except BaseException:
        # After some errors, such as a full disk, SQLite has rolled back already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return results


def read_marks(ledger: Path) -> tuple[Found, Found]:
    """Return the marks beside a ledger: its progress, and its reserved numbers.

    Raises:
        OSError: A file exists and cannot be read.
    """
    return read_mark(mark_path(ledger), LABEL), read_mark(fencing_path(ledger), FENCING)


@contextlib.contextmanager
def looking(ledger: Path, *, missing: bool = False) -> Iterator[FactTables]:
    """Read a ledger, which may be in use or damaged, in one transaction; change nothing.

    Raises:
        sqlite3.Error: SQLite cannot read it.
    """
    with closing(connect_to_look(ledger, missing=missing)) as connection:
        connection.execute("BEGIN")
        yield FactTables(connection)


class LookedFacts:
    """The facts of a ledger's file, which are only read; implements `storage.base.FollowedFacts`.

    Args:
        path: The file, which may be in use or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def place(self) -> str:
        return place_of(self._path)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Facts]:
        with translate_errors(self.place), looking(self._path) as tables:
            yield tables

    def last_seq(self) -> int:
        with self.reading() as facts:
            return facts.last_seq()

    def close(self) -> None:
        """Do nothing: each reading closes its connection."""


def is_ledger(file: Path) -> bool:
    """Return whether a file is a database that is marked as a ledger."""
    if not file.is_file():
        return False
    with contextlib.suppress(*UNREADABLE), looking(file) as tables:
        try:
            return not tables.is_new(file.name)
        except ForeignDatabaseError:
            return False
        except StorageError:  # A ledger of a newer release.
            return True
    return False


@contextlib.contextmanager
def deep_looking(ledger: Path, mark: Found) -> Iterator[FactTables]:
    """Read a ledger as `looking` does, but also read its log after a damaged place.

    Raises:
        sqlite3.Error: SQLite cannot read it.
    """
    lacking = True
    with contextlib.suppress(*UNREADABLE, StorageError), looking(ledger) as tables:
        new = is_unmade(tables, ledger, mark)
        lacking = bool(mark.first if new else missing(tables, mark, new=False))
    with readable(ledger, lacking=lacking) as found, looking(found) as tables:
        yield tables


def look(ledger: Path) -> Found:
    """Return a ledger's mark if the ledger has all facts up to the mark; change nothing.

    A missing file counts as empty, since a start makes an empty one.

    Raises:
        StorageCorrupt: Facts are missing, or no mark has the number of facts.
        StorageError: The file is not a ledger of this release.
        sqlite3.Error: SQLite cannot read it.
    """
    found = read_mark(mark_path(ledger), LABEL)
    place = place_of(ledger)
    with looking(ledger, missing=True) as tables:
        new = is_unmade(tables, ledger, found)
        if (found.exists or not new) and not found.known:
            raise StorageCorrupt(
                place,
                f"{found.doubt}, and nothing else says how many facts the file must have: "
                f"it has {0 if new else tables.last_seq()}",
            )
        if new and not found.exists and (given := read_mark(fencing_path(ledger), FENCING).first):
            raise StorageCorrupt(
                place,
                f"the file is empty and {mark_path(ledger).name} is missing, and fencing numbers "
                f"up to {given} were used or reserved",
            )
        lacking = missing(tables, found, new=new)
    # After a power cut the mark may be a second old; so damage in the log is looked for, too.
    lacking = lacking or find_log_damage(ledger).rstrip(".")
    if lacking:
        raise StorageCorrupt(place, lacking)
    return found


def is_unmade(tables: FactTables, ledger: Path, found: Found) -> bool:
    """Return whether a ledger has no tables yet.

    Raises:
        StorageCorrupt: The file lacks the sign of a ledger, but a mark beside it exists.
        StorageError: The file is not a ledger of this release.
    """
    try:
        return tables.is_new(place_of(ledger))
    except ForeignDatabaseError as no:
        if found.known:
            raise StorageCorrupt(place_of(ledger), "the file lacks the mark of a ledger") from no
        raise


def missing(tables: FactTables, found: Found, *, new: bool) -> str:
    """Return a text that says which facts of a ledger are missing; empty if none is."""
    last_seq = 0 if new else tables.last_seq()
    if last_seq < found.first:
        one = last_seq + 1 == found.first
        verbs = "was durable and is" if one else "were durable and are"
        return (
            f"{run(last_seq + 1, found.first)} {verbs} missing; its write-ahead log, or the file "
            "itself, is damaged, cut or gone"
        )
    if not new and tables.chain_of(found.first) != found.second:
        return f"fact {found.first} is missing, or is not the one that was made durable"
    return ""


def copy_ledger(ledger: Path, target: Path) -> None:
    """Copy a ledger, which may be in use, as of one moment, with its mark.

    Raises:
        StorageError: The ledger cannot be read, or the copy cannot be written.
    """
    with translate_errors(place_of(ledger)):
        found = read_mark(mark_path(ledger), LABEL)  # First, so that the mark is not newer.
        with closing(connect_to_look(ledger)) as before, closing(connect(target)) as new:
            before.backup(new)
        if found.known:
            DurableMark(mark_path(target), LABEL, found.first, found.second, found.writes).close()


def rebuild(
    ledger: Path,
    fill: Callable[[FactTables], None],
    last: tuple[int, int, int],
    fencing: tuple[int, int],
) -> None:
    """Replace a damaged ledger by another one.

    Args:
        ledger: File of the damaged ledger.
        fill: Function that fills the new tables.
        last: Seq and chain of the new last fact, and the number of earlier writes of the mark.
        fencing: The last reserved number, and the number of earlier writes of its file.

    Raises:
        StorageError: A file cannot be written or read.
    """
    with translate_errors(place_of(ledger)):
        with replacing(ledger) as new, closing(connect_to_write(new, place_of(new))) as connection:
            connection.execute("BEGIN IMMEDIATE")
            fill(FactTables(connection))
            connection.execute("COMMIT")
            connection.execute("PRAGMA journal_mode=DELETE")  # One synced file, no log.
        DurableMark(mark_path(ledger), LABEL, *last).close()
        DurableMark(fencing_path(ledger), FENCING, fencing[0], 0, fencing[1]).close()

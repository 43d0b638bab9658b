"""The catalog in one SQLite file; a mark beside it has the number of durable changes.

The file stores the number of records of each kind and the sum of their checksums. So a missing
record is noticed, and the mark reveals that the whole file is older than it should be.
"""

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, TypeVar

from moorage.storage.base import (
    RecordRow,
    RecordTable,
    RecordTally,
    SqlRow,
    StorageCorrupt,
    StorageError,
)
from moorage.storage.formats import Format
from moorage.storage.sqlite.files import (
    UNREADABLE,
    check_pages,
    connect_to_look,
    find_log_damage,
    note_release,
    owner_only,
    replacing,
    translate_errors,
    writer_of,
)
from moorage.storage.sqlite.marks import DurableMark, Found, read_mark
from moorage.storage.sqlite.salvage import readable
from moorage.storage.statements import read_statements

FORMAT: Final = Format(1, {})
"""The format of the tables, which is the file's `user_version`."""
LABEL: Final = "catalog"
"""Name of the database in its mark file."""
SQL: Final = read_statements(Path(__file__).with_name("records.sql"))
T = TypeVar("T")


def place_of(path: Path) -> str:
    """Return the name of a catalog's file for messages."""
    return f"the catalog {path}"


def mark_path(path: Path) -> Path:
    """Return the path of the file that has the number of a catalog's durable changes."""
    return path.with_suffix(".mark")


class RecordTables:
    """The records in a catalog's file, even if damaged; implements `storage.base.RecordTable`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._execute = connection.execute

    def get(self, kind: str, record_id: str) -> RecordRow | None:
        found = self._execute(SQL["get"], (kind, record_id)).fetchone()
        return None if found is None else RecordRow(*found)

    def has(self, kind: str, record_id: str) -> bool:
        return self._execute(SQL["has"], (kind, record_id)).fetchone() is not None

    def ids(self, kind: str) -> list[str]:
        return [each for (each,) in self._execute(SQL["ids"], (kind,))]

    def rows(self, kind: str) -> list[tuple[int, RecordRow]]:
        found = self._execute(SQL["rows"], (kind,))
        return [(number, RecordRow(*values)) for number, *values in found]

    def put(self, kind: str, row: RecordRow) -> None:
        self._execute(SQL["put"], (kind, *row))

    def insert(self, rows: Iterable[SqlRow]) -> None:
        """Add records with their kinds; of several records with the same id, add the first."""
        self._connection.executemany(SQL["insert"], rows)

    def remove(self, kind: str, record_id: str) -> bool:
        return self._execute(SQL["remove"], (kind, record_id)).rowcount > 0

    def number_of(self, kind: str, record_id: str) -> int:
        return int(self._execute(SQL["number"], (kind, record_id)).fetchone()[0])

    def set_aside(self, number: int, why: str) -> None:
        self._execute(SQL["copy_damaged"], (why, number))
        self._execute(SQL["remove_number"], (number,))

    def count(self, kind: str) -> int:
        return int(self._execute(SQL["count"], (kind,)).fetchone()[0])

    def usage(self) -> dict[str, tuple[int, int]]:
        return {kind: (records, size) for kind, records, size in self._execute(SQL["usage"])}

    def marks(self) -> dict[str, object]:
        return {kind: tuple(mark) for kind, *mark in self._execute(SQL["marks"])}

    def checksums(self, kind: str) -> dict[str, int]:
        return dict(self._execute(SQL["checksums"], (kind,)))

    def tallies(self) -> dict[str, RecordTally]:
        return {kind: RecordTally(*numbers) for kind, *numbers in self._execute(SQL["tallies"])}

    def take_tally(self, kind: str) -> None:
        self._execute(SQL["take_tally"], (kind,))

    def format(self) -> int:
        """Return the version of the tables; 0 if there are none."""
        return int(self._execute("PRAGMA user_version").fetchone()[0])

    def commits(self) -> int:
        """Return the number of durable changes."""
        return int(self._execute(SQL["commits"]).fetchone()[0])

    def refuse_format(self, place: str) -> int:
        """Return the version of the tables, if this release reads it.

        Raises:
            StorageError: This release cannot read the file.
        """
        found = self.format()
        if found and (refusal := FORMAT.refusal(found, writer_of(self._connection))):
            raise StorageError(f"{place} {refusal}. Nothing was changed.")
        return found

    def findings(self, findings_max: int) -> Iterator[str]:
        """Yield SQLite's findings about the file."""
        return check_pages(self._connection, findings_max)

    def last_number(self) -> int:
        """Return the highest number of a record."""
        return int(self._execute(SQL["last_number"]).fetchone()[0])

    def numbered(self, after: int, last: int) -> list[SqlRow]:
        """Return the records numbered above `after` and up to `last`, with their kinds."""
        return self._execute(SQL["numbers"], (after, last)).fetchall()


class SqliteRecords:
    """The records of a catalog in a file; implements `storage.base.RecordStore`.

    Args:
        path: The file; a missing file is created, a missing folder is not.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._mark: DurableMark | None = None

    @property
    def place(self) -> str:
        return place_of(self._path)

    def open(self) -> list[str]:
        try:
            owner_only(self._path)
            with translate_errors(self.place):
                found = look(self._path)
            mark = DurableMark(
                mark_path(self._path), LABEL, found.first, found.second, found.writes
            )
        except OSError as error:
            raise StorageError(
                f"{self.place} cannot be opened: {error}; the data directory must be a folder "
                "that this user may write to"
            ) from error
        with contextlib.ExitStack() as opened, translate_errors(self.place):
            opened.callback(mark.close)
            connection = opened.enter_context(
                closing(sqlite3.connect(self._path, isolation_level=None))
            )
            connection.execute("PRAGMA busy_timeout = 5000")
            connection.execute("PRAGMA journal_mode = WAL")
            tables = RecordTables(connection)
            version = tables.format()
            if version == 0:
                _make(connection)
            elif version < FORMAT.current:
                connection.execute("BEGIN IMMEDIATE")
                for statement in FORMAT.migration(version):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {FORMAT.current}")
                connection.execute("COMMIT")
            note_release(connection)
            mark.write_both(tables.commits(), 0)
            opened.pop_all()
        self._connection, self._mark = connection, mark
        if version and found.doubt:
            return [f"{self.place}: {found.doubt}; it was written again."]
        return []

    def transact(self, work: Callable[[RecordTable], T], *, durable: bool) -> T:
        connection, mark = self._connection, self._mark
        assert connection
        assert mark
        with translate_errors(self.place, values=False):
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            mark.sync_in_time()
            connection.execute("BEGIN")
            before = connection.total_changes
            number = 0
            tables = RecordTables(connection)
            try:
                result = work(tables)
                if durable and connection.total_changes > before:
                    connection.execute(SQL["count_commit"])
                    number = tables.commits()
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            if number:
                mark.write(number, 0)
        return result

    def upkeep(self) -> float | None:
        if self._mark is None:
            return None
        with translate_errors(self.place):
            return self._mark.sync_in_time()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._mark is not None:
            self._mark.close()


def _make(connection: sqlite3.Connection) -> None:
    connection.executescript(
        f"BEGIN EXCLUSIVE;\n{SQL['schema']};\nPRAGMA user_version = {FORMAT.current};\nCOMMIT;"
    )


@contextlib.contextmanager
def looking(path: Path, *, missing: bool = False) -> Iterator[RecordTables]:
    """Read a catalog, which may be in use or damaged, as of one moment; change nothing.

    Raises:
        sqlite3.Error: SQLite cannot read it.
    """
    with closing(connect_to_look(path, missing=missing)) as connection:
        connection.execute("BEGIN")
        yield RecordTables(connection)


@contextlib.contextmanager
def deep_looking(path: Path, mark: Found) -> Iterator[RecordTables]:
    """Read a catalog as `looking` does, but also read its log after a damaged place.

    Raises:
        sqlite3.Error: SQLite cannot read it.
    """
    lacking = True
    with contextlib.suppress(*UNREADABLE, StorageError), looking(path) as tables:
        changes = tables.commits() if tables.refuse_format(place_of(path)) else 0
        lacking = changes < mark.first
    with readable(path, lacking=lacking) as found, looking(found) as tables:
        yield tables


def look(path: Path) -> Found:
    """Return a catalog's mark if the catalog has all changes up to the mark; change nothing.

    A missing file counts as empty, since a start makes an empty one.

    Raises:
        StorageCorrupt: Changes are missing, or no mark has the number of changes.
        StorageError: Another release wrote the catalog.
        sqlite3.Error: The file cannot be read.
    """
    found, place = read_mark(mark_path(path), LABEL), place_of(path)
    with looking(path, missing=True) as tables:
        version = tables.refuse_format(place)
        changes = tables.commits() if version else 0
    if (found.exists or version) and not found.known:
        finding = f"{found.doubt}, and the number of the catalog's changes is stored nowhere else"
        raise StorageCorrupt(place, finding)
    if changes < found.first:
        raise StorageCorrupt(
            place,
            f"it has {changes} of {found.first} changes that were durable; its write-ahead"
            " log, or the file itself, is damaged, cut or gone",
        )
    if lost := find_log_damage(path):
        raise StorageCorrupt(place, lost.rstrip("."))
    return found


def rebuild(path: Path, found: Found, rows: Iterable[SqlRow]) -> None:
    """Replace a damaged catalog by a new one with the given records.

    Raises:
        StorageError: A file cannot be written.
    """
    with translate_errors(place_of(path)):
        with replacing(path) as new, closing(sqlite3.connect(new, isolation_level=None)) as file:
            _make(file)
            file.execute("BEGIN")
            RecordTables(file).insert(rows)
            file.execute(SQL["set_commits"], (found.first,))
            file.execute("COMMIT")
        DurableMark(mark_path(path), LABEL, found.first, 0, found.writes).close()

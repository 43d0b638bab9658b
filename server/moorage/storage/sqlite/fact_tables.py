"""The tables of a ledger in a SQLite file, for `storage.sqlite.facts` and `ledger.walk`."""

import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import Final

from moorage.storage.base import Checkpoint, FactRow, StorageError
from moorage.storage.formats import Format
from moorage.storage.sqlite.files import check_pages, connect, keep_log, note_release, writer_of
from moorage.storage.statements import read_statements

FORMAT: Final = Format(1, {})
"""Version of the tables. The shapes of facts have their own versions."""
ROWS_PER_STATEMENT: Final = 4_000
"""Maximum facts in one INSERT: each has eight parameters, and SQLite takes 32,766."""
PRUNED_PER_STEP: Final = 100
"""Maximum facts that one transaction deletes: it takes some milliseconds, between two commits."""
PARTS_PER_SWEEP: Final = 16
"""Maximum parts of dropped checkpoints that one transaction deletes, so that appends do not wait.
"""
_WAL_BYTES_KEPT: Final = 64 * 1024 * 1024
SQL: Final = read_statements(Path(__file__).with_name("facts.sql"))


class ForeignDatabaseError(StorageError):
    """The database is not marked as a ledger."""


class FactTables:
    """The tables of a ledger in a file, even if damaged; implements `storage.base.Facts`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._execute = connection.execute

    def is_new(self, place: str) -> bool:
        """Return whether there are no tables yet.

        Raises:
            ForeignDatabaseError: The database is not a ledger.
            StorageError: This release cannot read the ledger.
        """
        tables = {name for (name,) in self._execute(SQL["tables"])}
        if not tables:
            return True
        found = self.format() if "meta" in tables else None
        if found is None:
            raise ForeignDatabaseError(
                f"{place} is a database, but no ledger of Moorage. Nothing was changed. Use "
                "another data directory."
            )
        if refusal := FORMAT.refusal(found, writer_of(self._connection)):
            raise StorageError(f"{place} {refusal}. Nothing was changed.")
        return False

    def format(self) -> int | None:
        """Return the version of the tables; None if the file has no tables."""
        row = self._execute(SQL["format"]).fetchone()
        return None if row is None else row[0]

    def findings(self, findings_max: int) -> Iterator[str]:
        """Yield SQLite's findings about the file."""
        return check_pages(self._connection, findings_max)

    def last_seq(self) -> int:
        return int(self._execute(SQL["last"]).fetchone()[0])

    def first_seq(self) -> int:
        """Return the seq of the oldest fact; 1 without facts."""
        return int(self._execute(SQL["first"]).fetchone()[0])

    def pruned_seq(self) -> int:
        return int(self._execute(SQL["pruned"]).fetchone()[0])

    def write_pruned_seq(self, seq: int) -> None:
        """Store the seq of the last deleted fact."""
        self._execute(SQL["set_pruned"], (seq,))

    def oldest_at(self) -> float:
        return float(self._execute(SQL["oldest_at"]).fetchone()[0])

    def chain_of(self, seq: int) -> int | None:
        if seq == 0:
            return 0
        row = self._execute(SQL["chain"], (seq,)).fetchone()
        return None if row is None else row[0]

    def lost_ranges(self) -> list[tuple[int, int]]:
        return list(self._execute(SQL["lost"]))

    def write_lost(self, runs: Iterable[tuple[int, int]], at: float) -> None:
        """Store the runs of facts whose loss is accepted."""
        self._connection.executemany(SQL["insert_lost"], [(*run, at) for run in runs])

    def insert(self, rows: Sequence[FactRow]) -> None:
        """Add facts to the ledger.

        One statement adds all facts: each statement releases the interpreter lock, and waits up to
        5 ms until the event loop releases the lock again. Measured beside a busy loop, 100 facts
        take 7 ms in one autocommitted statement, and 160 ms in 100 statements.
        """
        for start in range(0, len(rows), ROWS_PER_STATEMENT):
            part = rows[start : start + ROWS_PER_STATEMENT]
            statement = SQL["insert"] + ",".join([SQL["insert_row"]] * len(part))
            self._execute(statement, list(chain.from_iterable(part)))

    def page(
        self, after: int, limit: int, bytes_max: int, subject: str | None = None
    ) -> list[FactRow]:
        cursor = (
            self._execute(SQL["after"], (after, limit))
            if subject is None
            else self._execute(SQL["about"], (subject, after, limit))
        )
        rows: list[FactRow] = []
        size = 0
        try:
            for row in map(FactRow._make, cursor):
                rows.append(row)
                size += len(row.body)
                if size > bytes_max:
                    break
        finally:
            # An open cursor would keep the write-ahead log from being recycled.
            cursor.close()
        return rows

    def between(self, after: int, last: int) -> list[FactRow]:
        """Return the facts after one seq up to another, without a limit of bytes."""
        return [FactRow._make(row) for row in self._execute(SQL["between"], (after, last))]

    def prune(self, limit: int, before: float, bytes_max: int) -> bool:
        oldest = self._execute(SQL["oldest"], (limit, PRUNED_PER_STEP)).fetchall()
        if self._used_bytes() <= bytes_max:
            oldest = list(takewhile(lambda row: row[1] < before, oldest))
        if not oldest:
            return False
        last = oldest[-1][0]
        self._execute(SQL["delete_to"], (last,))
        self.write_pruned_seq(last)
        return len(oldest) == PRUNED_PER_STEP

    def _used_bytes(self) -> int:
        """Return the size of the file without its free pages."""
        pages, free, size = (
            self._execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def checkpoints(self) -> list[Checkpoint]:
        return [Checkpoint._make(row) for row in self._execute(SQL["checkpoints"])]

    def checkpoint_parts(self, finished: Checkpoint) -> list[bytes] | None:
        parts = [body for (body,) in self._execute(SQL["parts"], (finished.number,))]
        checksum = 0
        for part in parts:
            if not isinstance(part, bytes):
                return None
            checksum = zlib.crc32(part, checksum)
        number, seq, _, _ = finished
        return parts if Checkpoint.of_parts(number, seq, len(parts), checksum) == finished else None

    def last_checkpoint_number(self) -> int:
        return max(number or 0 for (number,) in self._execute(SQL["checkpoint_numbers"]))

    def insert_part(self, checkpoint: int, number: int, body: bytes) -> None:
        self._execute(SQL["insert_part"], (checkpoint, number, body))

    def finish_checkpoint(self, finished: Checkpoint, keep: int) -> None:
        self._execute(SQL["insert_checkpoint"], finished)
        self._execute(SQL["delete_old_checkpoints"], (keep,))

    def drop_checkpoint(self, finished: Checkpoint) -> None:
        self._execute(SQL["delete_checkpoint"], (finished.number,))

    def sweep(self) -> bool:
        return self._execute(SQL["sweep"], (PARTS_PER_SWEEP,)).rowcount > 0


def connect_to_write(path: Path, place: str) -> sqlite3.Connection:
    """Open the file for writing, and create the tables in a new file.

    Raises:
        StorageError: Another release made the file, the file is not a ledger, or the disk is unfit.
        sqlite3.Error: The file is damaged, or is not a database.
    """
    connection = connect(path)
    try:
        keep_log(connection, place)
        # FULL syncs the log on every commit: with NORMAL, a power cut would lose committed facts.
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(f"PRAGMA journal_size_limit={_WAL_BYTES_KEPT}")
        tables = FactTables(connection)
        if tables.is_new(place):
            connection.executescript(f"BEGIN IMMEDIATE;\n{SQL['schema']};\nCOMMIT;")
        elif (found := tables.format() or 0) < FORMAT.current:
            connection.execute("BEGIN IMMEDIATE")
            for statement in FORMAT.migration(found):
                connection.execute(statement)
            connection.execute(SQL["set_format"], (FORMAT.current,))
            connection.execute("COMMIT")
        note_release(connection)
    except BaseException:
        connection.close()
        raise
    return connection

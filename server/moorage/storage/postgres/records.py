"""Stores the catalog in PostgreSQL. Each transaction share-locks the epoch, as in the ledger."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import psycopg

from moorage.storage.base import RecordRow, RecordTable, RecordTally, SqlRow, StorageFailed
from moorage.storage.postgres.connection import Connection, translate_errors
from moorage.storage.postgres.leadership import SQL as SCHEMA
from moorage.storage.postgres.leadership import Leadership
from moorage.storage.statements import read_statements

SQL: Final = read_statements(Path(__file__).with_name("records.sql"))
T = TypeVar("T")


class PostgresRecordTable:
    """The records of a catalog, on one connection; implements `storage.base.RecordTable`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get(self, kind: str, record_id: str) -> RecordRow | None:
        row = self._run("get", kind, record_id.encode()).fetchone()
        return None if row is None else _row(*row)

    def has(self, kind: str, record_id: str) -> bool:
        return self._run("has", kind, record_id.encode()).fetchone() is not None

    def ids(self, kind: str) -> list[str]:
        return [each.decode() for (each,) in self._run("ids", kind)]

    def rows(self, kind: str) -> list[tuple[int, RecordRow]]:
        return [(number, _row(*values)) for number, *values in self._run("rows", kind)]

    def put(self, kind: str, row: RecordRow) -> None:
        self._run("put", kind, row.id.encode(), *row[1:])

    def remove(self, kind: str, record_id: str) -> bool:
        return bool(self._run("remove", kind, record_id.encode()).rowcount > 0)

    def number_of(self, kind: str, record_id: str) -> int:
        return self._number("number", kind, record_id.encode())

    def set_aside(self, number: int, why: str) -> None:
        self._run("set_aside", number, why.replace("\0", " "))

    def count(self, kind: str) -> int:
        return self._number("count", kind)

    def usage(self) -> dict[str, tuple[int, int]]:
        return {kind: (records, size) for kind, records, size in self._run("usage")}

    def marks(self) -> dict[str, object]:
        return {kind: tuple(mark) for kind, *mark in self._run("marks")}

    def checksums(self, kind: str) -> dict[str, int]:
        return {each.decode(): checksum for each, checksum in self._run("checksums", kind)}

    def tallies(self) -> dict[str, RecordTally]:
        return {kind: RecordTally(*numbers) for kind, *numbers in self._run("tallies")}

    def take_tally(self, kind: str) -> None:
        self._run("take_tally", kind)

    def _run(self, name: str, *values: object) -> "psycopg.Cursor[SqlRow]":
        return self._connection.execute(SQL[name], values)

    def _number(self, name: str, *values: object) -> int:
        row = self._run(name, *values).fetchone()
        assert row is not None
        return int(row[0])


def _row(record_id: bytes, document: bytes, files: bytes, checksum: int) -> RecordRow:
    return RecordRow(record_id.decode(errors="replace"), document, files, checksum)


class PostgresRecords:
    """The records of a catalog in PostgreSQL; implements `storage.base.RecordStore`."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._connection: Connection | None = None

    @property
    def place(self) -> str:
        return self._leadership.place

    def open(self) -> list[str]:
        self._leadership.take()
        try:
            self._connection = self._leadership.open_writer("catalog")
        except BaseException:
            self._leadership.release()
            raise
        return []

    def transact(self, work: Callable[[RecordTable], T], *, durable: bool) -> T:
        connection = self._connection
        assert connection is not None
        self._leadership.check_failure()
        try:
            with translate_errors(self.place), connection.transaction():
                if not durable:
                    connection.execute("SET LOCAL synchronous_commit = off")
                if not connection.execute(SCHEMA["fence"], (self._leadership.epoch,)).rowcount:
                    raise self._leadership.deposition()
                result = work(PostgresRecordTable(connection))
        except StorageFailed as error:
            # Whether the change is stored is unknown, and the records in memory may differ.
            self._leadership.fail(str(error))
            raise
        self._leadership.check_failure()
        return result

    def upkeep(self) -> float | None:
        """Do nothing: the ledger's upkeep checks the lock; see `RecordStore.upkeep`."""
        return None

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                self._connection.close()
            self._connection = None
            self._leadership.release()

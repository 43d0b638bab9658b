"""Reads the database of another server's writes for a standby. It needs no leadership."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import psycopg

from moorage.storage.base import Facts, RecordTable, StorageError
from moorage.storage.postgres.connection import Connection, connect, place_of, translate_errors
from moorage.storage.postgres.facts import SQL, PostgresFactTables
from moorage.storage.postgres.leadership import FORMAT, check_server
from moorage.storage.postgres.leadership import SQL as SCHEMA
from moorage.storage.postgres.records import PostgresRecordTable

T = TypeVar("T")


class _Reader:
    """One connection that reads, opened again where it broke."""

    def __init__(self, address: str, purpose: str) -> None:
        self.place = place_of(address)
        self._address = address
        self._purpose = purpose
        self._guard = threading.Lock()
        self._connection: Connection | None = None

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        """Give the connection, alone.

        Raises:
            StorageError: The database cannot be read, or a newer release made its tables.
        """
        with self._guard, translate_errors(self.place):
            if self._connection is None or self._connection.closed:
                self._connection = self._open()
            yield self._connection

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """Give the connection in a transaction that sees one moment."""
        with self.connection() as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            yield connection

    def _open(self) -> Connection:
        connection = connect(self._address, self._purpose)
        try:
            connection.execute("SET statement_timeout = '30s'")
            check_server(connection, self.place)
            found, writer = (
                connection.execute(SCHEMA[name]).fetchone() for name in ("format", "writer")
            )
        except BaseException:
            connection.close()
            raise
        assert found is not None
        assert writer is not None
        if refusal := FORMAT.refusal(int(found[0]), str(writer[0])):
            connection.close()
            raise StorageError(f"{self.place} {refusal}.")
        return connection

    def close(self) -> None:
        """Close it."""
        with self._guard, contextlib.suppress(psycopg.Error):
            if self._connection is not None:
                self._connection.close()
                self._connection = None


class PostgresFollowedFacts(_Reader):
    """`storage.base.FollowedFacts` in PostgreSQL. Read the contract there."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "follower")

    def last_seq(self) -> int:
        """See `FollowedFacts.last_seq`."""
        with self.connection() as connection:
            row = connection.execute(SQL["last"]).fetchone()
            assert row is not None
            return int(row[0])

    @contextlib.contextmanager
    def reading(self) -> Iterator[Facts]:
        """See `FactReading.reading`."""
        with self.snapshot() as connection:
            yield PostgresFactTables(connection)


class PostgresFollowedRecords(_Reader):
    """`storage.base.RecordStore` that another server writes. Read the contract there."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "catalog follower")

    def open(self) -> list[str]:
        """See `RecordStore.open`."""
        with self.connection():
            return []

    def transact(self, work: Callable[[RecordTable], T], *, durable: bool) -> T:
        """See `RecordStore.transact`. What writes is refused by the database."""
        del durable
        with self.snapshot() as connection:
            return work(PostgresRecordTable(connection))

    def upkeep(self) -> float | None:
        """See `RecordStore.upkeep`."""
        return None

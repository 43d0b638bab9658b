"""A table that commands change while a server reads it: `tokens` and `agents` are such tables.

They need no leadership. A counter in `meta` changes with each change.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import ClassVar, Final

import psycopg

from moorage.storage.postgres.connection import Connection, connect, place_of, translate_errors
from moorage.storage.postgres.leadership import check_server, make_tables

_VERSION: Final = "SELECT value FROM meta WHERE name = %s"
COUNT_CHANGE: Final = "UPDATE meta SET value = value + 1 WHERE name = %s"
FRESH_SECONDS: Final = 0.25
"""How old the version may be: a server looks at it for each token that a client shows."""


class SharedTable:
    """The table.

    Args:
        address: Of the database, as libpq takes it.
    """

    counter: ClassVar[str]
    """Name of the counter."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: Connection | None = None
        self._guard = threading.RLock()
        self._version = (0.0, 0)

    @property
    def place(self) -> str:
        """See `TokenRows.place`."""
        return place_of(self._address)

    def version(self) -> object:
        """See `TokenRows.version`."""
        looked_at, version = self._version
        if not looked_at or time.monotonic() - looked_at > FRESH_SECONDS:
            with self.connection() as connection:
                version = self.count(connection)
            self._version = (time.monotonic(), version)
        return version or None

    def count(self, connection: Connection) -> int:
        """Return the number of changes."""
        row = connection.execute(_VERSION, (self.counter,)).fetchone()
        assert row is not None
        return int(row[0])

    def close(self) -> None:
        """See `TokenRows.close`."""
        with self._guard:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        """Give the connection, alone.

        Raises:
            StorageError: The database cannot be read or written.
        """
        with self._guard, translate_errors(self.place):
            yield self._open()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Give the connection in a transaction that writes, one after the other.

        Raises:
            StorageError: As `connection`; nothing was changed then.
        """
        with self.connection() as connection, connection.transaction():
            self._version = (0.0, 0)
            connection.execute(COUNT_CHANGE, (self.counter,))
            yield connection

    def _open(self) -> Connection:
        if self._connection is not None and not self._connection.closed:
            with contextlib.suppress(psycopg.Error):  # The database ended it; the next may be well.
                self._connection.execute("SELECT 1")
        if self._connection is None or self._connection.closed:
            connection = connect(self._address, self.counter)
            try:
                connection.execute("SET statement_timeout = '5s'")
                check_server(connection, self.place)
                make_tables(connection, self.place)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

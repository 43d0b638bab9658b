"""A SQLite file that commands write while a server reads it: `tokens` and `agents` are such files.

The server sees a change at once, since it looks at the version of the database whenever it needs
what is in it (https://sqlite.org/pragma.html#pragma_data_version).
"""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final

from moorage.storage.base import StorageError
from moorage.storage.sqlite.files import OWNER_ONLY

_FORMAT: Final = 1
_BUSY_SECONDS: Final = 10.0


class SharedFile:
    """The file, used from several threads; the first change makes it.

    Args:
        path: Where it is.
    """

    schema: ClassVar[str]
    """The statement that makes its table."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._changes = 0
        self._guard = threading.RLock()

    @property
    def place(self) -> str:
        """See `TokenRows.place`."""
        return str(self._path)

    def version(self) -> tuple[int, int] | None:
        """See `TokenRows.version`."""
        if self._connection is None and not self._path.exists():
            return None
        with self.connection() as connection:
            (version,) = connection.execute("PRAGMA data_version").fetchone()
        return version, self._changes  # The version tells of changes by other connections alone.

    def close(self) -> None:
        """See `TokenRows.close`."""
        with self._guard:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextlib.contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """Give the connection, alone.

        Raises:
            StorageError: The file cannot be read or written.
        """
        try:
            with self._guard:
                if self._connection is None:
                    self._connection = self._open()
                yield self._connection
        except (sqlite3.Error, OSError) as error:
            raise StorageError(f"{self.place}: {error}") from error

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Give the connection in a transaction that writes.

        Raises:
            StorageError: As `connection`; nothing was changed then.
        """
        with self.connection() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            self._changes += 1
            yield connection

    def _open(self) -> sqlite3.Connection:
        # Before SQLite makes it readable for others.
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, OWNER_ONLY))
        connection = sqlite3.connect(
            self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare(connection)
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make the table where it is missing; refuse the file of a newer release."""
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > _FORMAT:
            reason = f"format {version} is of a newer release; this one reads up to {_FORMAT}"
            raise sqlite3.DatabaseError(reason)
        connection.execute("PRAGMA synchronous = FULL")
        if not version:
            connection.execute(self.schema)
            connection.execute(f"PRAGMA user_version = {_FORMAT}")

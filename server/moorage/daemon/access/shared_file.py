"""A SQLite file that commands write and a running server reads, each change at once.

The server looks at the version of the database whenever it needs what is in it
(https://sqlite.org/pragma.html#pragma_data_version). `token_store` and `agents.agent_store` have
one each.
"""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["SharedFile"]

_FORMAT: Final = 1
_BUSY_SECONDS: Final = 10.0


class SharedFile:
    """A file with tables; it may be used from several threads.

    Args:
        path: Where. The first change makes it.
        tables: The statements that make the tables.
        failure: What is raised where it cannot be read or written.

    """

    def __init__(self, path: Path, tables: str, failure: type[Exception]) -> None:
        self._path = path
        self._tables = tables
        self._failure = failure
        self._connection: sqlite3.Connection | None = None
        self._version = -1
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection | None]:
        """Give a connection if the file changed since the last time, or None."""
        try:
            with self._lock:
                if self._connection is None and self._path.exists():
                    self._connection = self._open()
                if self._connection is None:
                    yield None
                    return
                (version,) = self._connection.execute("PRAGMA data_version").fetchone()
                yield None if version == self._version else self._connection
                self._version = version
        except (sqlite3.Error, ValueError) as error:
            raise self._failure(f"{self._path}: {error}") from error

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Give a connection in a transaction."""
        try:
            with self._lock:
                if self._connection is None:
                    self._connection = self._open()
                with self._connection as connection:
                    connection.execute("BEGIN IMMEDIATE")
                    self._version = -1  # The version tells of changes by other connections alone.
                    yield connection
        except (sqlite3.Error, OSError) as error:
            raise self._failure(f"{self._path}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        # Before SQLite makes it readable for others.
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
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
        """Make the tables where they are missing; refuse the file of a newer release."""
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > _FORMAT:
            reason = f"format {version} is of a newer release; this one reads up to {_FORMAT}"
            raise sqlite3.DatabaseError(reason)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA synchronous = FULL")
        if not version:
            connection.executescript(self._tables)
            connection.execute(f"PRAGMA user_version = {_FORMAT}")

"""Named tokens in a SQLite file that `moored token` writes while a server reads it.

The server sees a change at once, since it looks at the version of the database for each token that
a client shows (https://sqlite.org/pragma.html#pragma_data_version).
"""

import os
import sqlite3
from pathlib import Path
from typing import Final

from moorage.storage.base import StorageError, TokenRow
from moorage.storage.sqlite.files import OWNER_ONLY
from moorage.storage.statements import read_statements

_FORMAT: Final = 1
_BUSY_SECONDS: Final = 10.0
SQL: Final = read_statements(Path(__file__).with_name("tokens.sql"))


class SqliteTokens:
    """`storage.base.TokenRows` in a file. Read the contract there.

    Args:
        path: Where there is no file yet, the first `insert` makes it.

    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._changes = 0

    @property
    def place(self) -> str:
        """See `TokenRows.place`."""
        return str(self._path)

    def version(self) -> tuple[int, int] | None:
        """See `TokenRows.version`."""
        try:
            if self._connection is None and not self._path.exists():
                return None
            (version,) = self._open().execute("PRAGMA data_version").fetchone()
        except (sqlite3.Error, OSError) as error:
            raise self._failure(error) from error
        return version, self._changes  # The version tells of changes by other connections alone.

    def rows(self) -> list[TokenRow]:
        """See `TokenRows.rows`."""
        try:
            return [TokenRow(*row) for row in self._open().execute(SQL["rows"])]
        except (sqlite3.Error, OSError) as error:
            raise self._failure(error) from error

    def insert(self, row: TokenRow) -> bool:
        """See `TokenRows.insert`."""
        try:
            self._changes += 1
            return self._open().execute(SQL["insert"], row).rowcount > 0
        except (sqlite3.Error, OSError) as error:
            raise self._failure(error) from error

    def revoke(self, name: str, at: float) -> bool | None:
        """See `TokenRows.revoke`."""
        try:
            with self._open() as connection:
                connection.execute("BEGIN IMMEDIATE")
                row = connection.execute(SQL["revoked_at"], (name,)).fetchone()
                if row is None:
                    return None
                if row[0] is None:
                    self._changes += 1
                    connection.execute(SQL["revoke"], (at, name))
                return row[0] is None
        except (sqlite3.Error, OSError) as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """See `TokenRows.close`."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _failure(self, error: Exception) -> StorageError:
        return StorageError(f"{self.place}: {error}")

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None:
            return self._connection
        # Before SQLite makes it readable for others.
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, OWNER_ONLY))
        connection = sqlite3.connect(
            self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            _prepare(connection)
        except sqlite3.Error:
            connection.close()
            raise
        self._connection = connection
        return connection


def _prepare(connection: sqlite3.Connection) -> None:
    """Make the table where it is missing; refuse the file of a newer release."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > _FORMAT:
        reason = f"format {version} is of a newer release; this one reads up to {_FORMAT}"
        raise sqlite3.DatabaseError(reason)
    connection.execute("PRAGMA synchronous = FULL")
    if not version:
        connection.execute(SQL["schema"])
        connection.execute(f"PRAGMA user_version = {_FORMAT}")

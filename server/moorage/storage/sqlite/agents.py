"""Agents and their joining tokens in a SQLite file, which `moored agent` writes, too."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from moorage.storage.base import diff_rows
from moorage.storage.sqlite.shared_file import SharedFile
from moorage.storage.statements import read_statements

SQL: Final = read_statements(Path(__file__).with_name("agents.sql"))


class SqliteAgents(SharedFile):
    """`storage.base.AgentRows` in a file. Read the contract there."""

    schema = SQL["schema"]

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._rows: dict[str, bytes] = {}
        self._rows_of: tuple[sqlite3.Connection, int] | None = None

    def rows(self) -> dict[str, bytes]:
        """See `AgentRows.rows`."""
        with self.connection() as connection:
            return self._current(connection)

    def _current(self, connection: sqlite3.Connection) -> dict[str, bytes]:
        """Return all documents; read them only where others have written."""
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        if self._rows_of != (connection, version):
            self._rows = dict(connection.execute(SQL["rows"]))
            self._rows_of = connection, version
        return self._rows

    @contextlib.contextmanager
    def change(self) -> Iterator[dict[str, bytes]]:
        """See `AgentRows.change`."""
        with self.connection():  # No other thread changes the remembered rows meanwhile.
            with self.transaction() as connection:
                before = self._current(connection)
                after = dict(before)
                yield after
                put, gone = diff_rows(before, after)
                connection.executemany(SQL["put"], put)
                connection.executemany(SQL["delete"], gone)
            self._rows = after

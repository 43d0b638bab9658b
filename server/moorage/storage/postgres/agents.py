"""Agents and their joining tokens in PostgreSQL; `moored agent` writes them, too."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from moorage.storage.base import diff_rows
from moorage.storage.postgres.connection import Connection
from moorage.storage.postgres.shared_table import SharedTable
from moorage.storage.statements import read_statements

SQL: Final = read_statements(Path(__file__).with_name("agents.sql"))


class PostgresAgents(SharedTable):
    """`storage.base.AgentRows` in PostgreSQL. Read the contract there."""

    counter = "agents"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._rows: dict[str, bytes] = {}
        self._rows_of = -1

    def rows(self) -> dict[str, bytes]:
        """See `AgentRows.rows`."""
        with self.connection() as connection:
            return self._at(self.count(connection), connection)

    def _at(self, count: int, connection: Connection) -> dict[str, bytes]:
        """Return all documents; read them only where others have written since."""
        if count != self._rows_of:
            rows = connection.execute(SQL["rows"])
            self._rows = {key: bytes(document) for key, document in rows}
            self._rows_of = count
        return self._rows

    @contextlib.contextmanager
    def change(self) -> Iterator[dict[str, bytes]]:
        """See `AgentRows.change`."""
        with self.connection():  # No other thread changes the remembered rows meanwhile.
            with self.transaction() as connection:
                count = self.count(connection)
                before = self._at(count - 1, connection)
                after = dict(before)
                yield after
                put, gone = diff_rows(before, after)
                with connection.cursor() as cursor:
                    cursor.executemany(SQL["put"], put)
                    cursor.executemany(SQL["delete"], gone)
            self._rows, self._rows_of = after, count

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

    def rows(self) -> dict[str, bytes]:
        """See `AgentRows.rows`."""
        with self.connection() as connection:
            return _rows(connection)

    @contextlib.contextmanager
    def change(self) -> Iterator[dict[str, bytes]]:
        """See `AgentRows.change`."""
        with self.transaction() as connection:
            before = _rows(connection)
            after = dict(before)
            yield after
            put, gone = diff_rows(before, after)
            with connection.cursor() as cursor:
                cursor.executemany(SQL["put"], put)
                cursor.executemany(SQL["delete"], gone)


def _rows(connection: Connection) -> dict[str, bytes]:
    return {key: bytes(document) for key, document in connection.execute(SQL["rows"])}

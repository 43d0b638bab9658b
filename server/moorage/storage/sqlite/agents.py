"""Agents and their joining tokens in a SQLite file, which `moored agent` writes, too."""

import contextlib
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

    def rows(self) -> dict[str, bytes]:
        """See `AgentRows.rows`."""
        with self.connection() as connection:
            return dict(connection.execute(SQL["rows"]))

    @contextlib.contextmanager
    def change(self) -> Iterator[dict[str, bytes]]:
        """See `AgentRows.change`."""
        with self.transaction() as connection:
            before = dict(connection.execute(SQL["rows"]))
            after = dict(before)
            yield after
            put, gone = diff_rows(before, after)
            connection.executemany(SQL["put"], put)
            connection.executemany(SQL["delete"], gone)

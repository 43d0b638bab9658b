"""Logins to the console in a SQLite file: they outlast their server."""

from collections.abc import Collection
from pathlib import Path
from typing import Final

from moorage.storage.sqlite.shared_file import SharedFile
from moorage.storage.statements import read_statements

SQL: Final = read_statements(Path(__file__).with_name("logins.sql"))


class SqliteLogins(SharedFile):
    """`storage.base.LoginRows` in a file. Read the contract there."""

    schema = SQL["schema"]

    def rows(self) -> dict[str, bytes]:
        """See `LoginRows.rows`."""
        with self.connection() as connection:
            return dict(connection.execute(SQL["rows"]))

    def insert(self, digest: str, document: bytes, gone: Collection[str] = ()) -> None:
        """See `LoginRows.insert`."""
        with self.transaction() as connection:
            connection.execute(SQL["insert"], (digest, document))
            connection.executemany(SQL["delete"], [(each,) for each in gone])

    def delete(self, digests: Collection[str]) -> None:
        """See `LoginRows.delete`."""
        with self.transaction() as connection:
            connection.executemany(SQL["delete"], [(each,) for each in digests])

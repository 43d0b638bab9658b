"""Named tokens in a SQLite file that `moored token` writes while a server reads it."""

from pathlib import Path
from typing import Final

from moorage.storage.base import TokenRow
from moorage.storage.sqlite.shared_file import SharedFile
from moorage.storage.statements import read_statements

SQL: Final = read_statements(Path(__file__).with_name("tokens.sql"))


class SqliteTokens(SharedFile):
    """`storage.base.TokenRows` in a file. Read the contract there."""

    schema = SQL["schema"]

    def rows(self) -> list[TokenRow]:
        """See `TokenRows.rows`."""
        with self.connection() as connection:
            return [TokenRow(*row) for row in connection.execute(SQL["rows"])]

    def insert(self, row: TokenRow) -> bool:
        """See `TokenRows.insert`."""
        with self.transaction() as connection:
            return connection.execute(SQL["insert"], row).rowcount > 0

    def revoke(self, name: str, at: float) -> bool | None:
        """See `TokenRows.revoke`."""
        with self.transaction() as connection:
            row = connection.execute(SQL["revoked_at"], (name,)).fetchone()
            if row is None:
                return None
            if row[0] is None:
                connection.execute(SQL["revoke"], (at, name))
            return row[0] is None

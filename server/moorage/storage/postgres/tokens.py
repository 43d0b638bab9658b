"""Named tokens in PostgreSQL; `moored token` writes them at any time."""

from pathlib import Path
from typing import Final

from moorage.storage.base import TokenRow
from moorage.storage.postgres.shared_table import SharedTable
from moorage.storage.statements import read_statements

SQL: Final = read_statements(Path(__file__).with_name("tokens.sql"))


class PostgresTokens(SharedTable):
    """`storage.base.TokenRows` in PostgreSQL. Read the contract there."""

    counter = "tokens"

    def rows(self) -> list[TokenRow]:
        """See `TokenRows.rows`."""
        with self.connection() as connection:
            return [TokenRow(*row) for row in connection.execute(SQL["rows"])]

    def insert(self, row: TokenRow) -> bool:
        """See `TokenRows.insert`."""
        with self.transaction() as connection:
            return bool(connection.execute(SQL["insert"], row).rowcount > 0)

    def revoke(self, name: str, at: float) -> bool | None:
        """See `TokenRows.revoke`."""
        with self.transaction() as connection:
            if connection.execute(SQL["revoke"], (at, name)).rowcount > 0:
                return True
            known = connection.execute(SQL["has"], (name,)).fetchone() is not None
            return False if known else None

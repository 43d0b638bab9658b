"""Logins to the console in PostgreSQL: all servers on one database know them."""

from collections.abc import Collection
from pathlib import Path
from typing import Final

from moorage.storage.postgres.shared_table import SharedTable
from moorage.storage.statements import read_statements

SQL: Final = read_statements(Path(__file__).with_name("logins.sql"))


class PostgresLogins(SharedTable):
    """`storage.base.LoginRows` in PostgreSQL. Read the contract there."""

    counter = "logins"

    def rows(self) -> dict[str, bytes]:
        """See `LoginRows.rows`."""
        with self.connection() as connection:
            rows = connection.execute(SQL["rows"])
            return {digest: bytes(document) for digest, document in rows}

    def insert(self, digest: str, document: bytes, gone: Collection[str] = ()) -> None:
        """See `LoginRows.insert`."""
        with self.transaction() as connection:
            connection.execute(SQL["insert"], (digest, document))
            connection.execute(SQL["delete"], (list(gone),))

    def delete(self, digests: Collection[str]) -> None:
        """See `LoginRows.delete`."""
        with self.transaction() as connection:
            connection.execute(SQL["delete"], (list(digests),))

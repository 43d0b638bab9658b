"""Named tokens in PostgreSQL. They need no leadership: `moored token` writes them at any time."""

import threading
import time
from pathlib import Path
from typing import Final

from moorage.storage.base import TokenRow
from moorage.storage.postgres.connection import Connection, connect, place_of, translated
from moorage.storage.postgres.leadership import check_server, make_tables
from moorage.storage.statements import read_statements

SQL: Final = read_statements(Path(__file__).with_name("tokens.sql"))
FRESH_SECONDS: Final = 0.25
"""How old the version may be: a server looks at it for each token that a client shows."""


class PostgresTokens:
    """`storage.base.TokenRows` in PostgreSQL. Read the contract there.

    Args:
        address: As libpq takes it.

    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: Connection | None = None
        self._guard = threading.Lock()
        self._version = (0.0, 0)

    @property
    def place(self) -> str:
        """See `TokenRows.place`."""
        return place_of(self._address)

    def version(self) -> object:
        """See `TokenRows.version`."""
        looked_at, version = self._version
        if not looked_at or time.monotonic() - looked_at > FRESH_SECONDS:
            with self._guard, translated(self.place):
                row = self._open().execute(SQL["version"]).fetchone()
                assert row is not None
                version = int(row[0])
            self._version = (time.monotonic(), version)
        return version or None

    def rows(self) -> list[TokenRow]:
        """See `TokenRows.rows`."""
        with self._guard, translated(self.place):
            return [TokenRow(*row) for row in self._open().execute(SQL["rows"])]

    def insert(self, row: TokenRow) -> bool:
        """See `TokenRows.insert`."""
        with self._guard, translated(self.place):
            self._version = (0.0, 0)
            return bool(self._open().execute(SQL["insert"], row).rowcount > 0)

    def revoke(self, name: str, at: float) -> bool | None:
        """See `TokenRows.revoke`."""
        with self._guard, translated(self.place):
            self._version = (0.0, 0)
            connection = self._open()
            if connection.execute(SQL["revoke"], (at, name)).rowcount > 0:
                return True
            known = connection.execute(SQL["has"], (name,)).fetchone() is not None
            return False if known else None

    def close(self) -> None:
        """See `TokenRows.close`."""
        with self._guard:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _open(self) -> Connection:
        if self._connection is None or self._connection.closed:
            connection = connect(self._address, "tokens")
            try:
                connection.execute("SET statement_timeout = '5s'")
                check_server(connection, self.place)
                make_tables(connection, self.place)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

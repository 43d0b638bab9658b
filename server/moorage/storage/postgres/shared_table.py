"""Tables that commands change while a server reads them, such as `tokens` and `agents`.

A writer of these tables need not be the leader. A counter in `meta` grows with each change.
"""

import contextlib
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import ClassVar, Final

import psycopg

from moorage.storage.base import StorageError, TokenRow, diff_rows
from moorage.storage.postgres.connection import Connection, connect, place_of, translate_errors
from moorage.storage.postgres.leadership import check_server, make_tables, refuse_unfinished
from moorage.storage.statements import read_statements

_VERSION: Final = "SELECT value FROM meta WHERE name = %s"
COUNT_CHANGE: Final = "UPDATE meta SET value = value + 1 WHERE name = %s"
FRESH_SECONDS: Final = 0.25
"""Seconds for which the change counter is cached; a server needs it for each client's token."""
TOKENS_SQL: Final = read_statements(Path(__file__).with_name("tokens.sql"))
LOGINS_SQL: Final = read_statements(Path(__file__).with_name("logins.sql"))
AGENTS_SQL: Final = read_statements(Path(__file__).with_name("agents.sql"))


class SharedTable:
    """The common base of `PostgresTokens` and others: one table and its counter of changes.

    Args:
        address: Address of the database, as libpq expects it.
    """

    counter: ClassVar[str]
    """Name of the table's counter of changes."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: Connection | None = None
        self._guard = threading.RLock()
        self._version = (0.0, 0)

    @property
    def place(self) -> str:
        return place_of(self._address)

    def version(self) -> object:
        looked_at, version = self._version
        if not looked_at or time.monotonic() - looked_at > FRESH_SECONDS:
            with self.connection() as connection:
                version = self.count(connection)
            self._version = (time.monotonic(), version)
        return version or None

    def count(self, connection: Connection) -> int:
        """Return the number of changes of the table."""
        row = connection.execute(_VERSION, (self.counter,)).fetchone()
        assert row is not None
        return int(row[0])

    def close(self) -> None:
        with self._guard:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        """Yield the connection for exclusive use.

        Raises:
            StorageError: The database cannot be read or written.
        """
        with self._guard, translate_errors(self.place):
            yield self._open()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Yield the connection in a write transaction; transactions run one after another.

        Raises:
            StorageError: The database cannot be read or written; nothing was changed.
        """
        with self.connection() as connection, connection.transaction():
            self._version = (0.0, 0)
            connection.execute(COUNT_CHANGE, (self.counter,))
            yield connection

    def _open(self) -> Connection:
        if self._connection is not None and not self._connection.closed:
            with contextlib.suppress(psycopg.Error):  # The database ended the session.
                self._connection.execute("SELECT 1")
        if self._connection is None or self._connection.closed:
            connection = connect(self._address, self.counter)
            try:
                connection.execute("SET statement_timeout = '5s'")
                check_server(connection, self.place)
                make_tables(connection, self.place)
                refuse_unfinished(connection, self.place)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection


class PostgresTokens(SharedTable):
    """The named tokens in PostgreSQL; implements `storage.base.TokenRows`.

    Tokens are never deleted, so a table without rows that was changed before has lost its tokens.
    """

    counter = "tokens"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._checked: object = None

    def version(self) -> object:
        found = super().version()
        if found != self._checked and not self.rows():
            raise StorageError(
                f"{self.place} has no tokens, and had some before: put back its table "
                "moorage.token from a backup; or make a token with `moored token create`, and the "
                "old tokens stay invalid"
            )
        self._checked = found
        return found

    def rows(self) -> list[TokenRow]:
        with self.connection() as connection:
            return [TokenRow(*row) for row in connection.execute(TOKENS_SQL["rows"])]

    def insert(self, row: TokenRow) -> bool:
        with self.transaction() as connection:
            return bool(connection.execute(TOKENS_SQL["insert"], row).rowcount > 0)

    def revoke(self, name: str, at: float) -> bool | None:
        with self.connection() as connection:
            if connection.execute(TOKENS_SQL["has"], (name,)).fetchone() is None:
                return None
        with self.transaction() as connection:
            return bool(connection.execute(TOKENS_SQL["revoke"], (at, name)).rowcount > 0)


class PostgresLogins(SharedTable):
    """The logins to the console in PostgreSQL; implements `storage.base.LoginRows`."""

    counter = "logins"

    def rows(self) -> dict[str, bytes]:
        with self.connection() as connection:
            rows = connection.execute(LOGINS_SQL["rows"])
            return {digest: bytes(document) for digest, document in rows}

    def insert(self, digest: str, document: bytes, gone: Collection[str] = ()) -> None:
        with self.transaction() as connection:
            connection.execute(LOGINS_SQL["insert"], (digest, document))
            connection.execute(LOGINS_SQL["delete"], (list(gone),))

    def delete(self, digests: Collection[str]) -> None:
        with self.transaction() as connection:
            connection.execute(LOGINS_SQL["delete"], (list(digests),))


class PostgresAgents(SharedTable):
    """The agents and joining tokens in PostgreSQL; implements `storage.base.AgentRows`."""

    counter = "agents"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._rows: dict[str, bytes] = {}
        self._rows_of = -1

    def rows(self) -> dict[str, bytes]:
        with self.connection() as connection:
            return self._at(self.count(connection), connection)

    def _at(self, count: int, connection: Connection) -> dict[str, bytes]:
        """Return all agent documents; read them again only if the change counter differs."""
        if count != self._rows_of:
            rows = connection.execute(AGENTS_SQL["rows"])
            self._rows = {key: bytes(document) for key, document in rows}
            self._rows_of = count
        return self._rows

    @contextlib.contextmanager
    def change(self) -> Iterator[dict[str, bytes]]:
        with self.connection():  # The lock keeps other threads from changing these rows.
            with self.transaction() as connection:
                count = self.count(connection)
                before = self._at(count - 1, connection)
                after = dict(before)
                yield after
                put, gone = diff_rows(before, after)
                with connection.cursor() as cursor:
                    cursor.executemany(AGENTS_SQL["put"], put)
                    cursor.executemany(AGENTS_SQL["delete"], gone)
            self._rows, self._rows_of = after, count

"""A PostgreSQL database as the storage of a server."""

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Final, LiteralString, TypeVar

import psycopg
from psycopg import sql

from moorage.storage.base import SECRET_BYTES, Facts, Followed, RecordTable, StorageError
from moorage.storage.postgres.audit import PostgresAudit
from moorage.storage.postgres.connection import Connection, connect, place_of, translate_errors
from moorage.storage.postgres.facts import SQL, PostgresFacts, PostgresFactTables
from moorage.storage.postgres.leadership import FORMAT, Leadership, check_server, make_tables
from moorage.storage.postgres.leadership import SQL as SCHEMA
from moorage.storage.postgres.records import PostgresRecords, PostgresRecordTable
from moorage.storage.postgres.shared_table import PostgresAgents, PostgresLogins, PostgresTokens

_GRANTS: Final[tuple[LiteralString, ...]] = (
    "GRANT USAGE ON SCHEMA moorage TO {}",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA moorage TO {}",
    "GRANT SELECT ON ALL SEQUENCES IN SCHEMA moorage TO {}",  # For pg_dump.
)


T = TypeVar("T")


class _Reader:
    """A connection for reading; it is opened again after it breaks."""

    def __init__(self, address: str, purpose: str) -> None:
        self.place = place_of(address)
        self._address = address
        self._purpose = purpose
        self._guard = threading.Lock()
        self._connection: Connection | None = None

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        """Yield the connection for exclusive use.

        Raises:
            StorageError: The database cannot be read, or a newer release made its tables.
        """
        with self._guard, translate_errors(self.place):
            if self._connection is None or self._connection.closed:
                self._connection = self._open()
            yield self._connection

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """Yield the connection in a read transaction on one snapshot."""
        with self.connection() as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            yield connection

    def _open(self) -> Connection:
        connection = connect(self._address, self._purpose)
        try:
            connection.execute("SET statement_timeout = '30s'")
            check_server(connection, self.place)
            found, writer = (
                connection.execute(SCHEMA[name]).fetchone() for name in ("format", "writer")
            )
        except BaseException:
            connection.close()
            raise
        assert found is not None
        assert writer is not None
        if refusal := FORMAT.refusal(int(found[0]), str(writer[0])):
            connection.close()
            raise StorageError(f"{self.place} {refusal}.")
        return connection

    def close(self) -> None:
        with self._guard, contextlib.suppress(psycopg.Error):
            if self._connection is not None:
                self._connection.close()
                self._connection = None


class PostgresFollowedFacts(_Reader):
    """The ledger of another server, for reading; implements `storage.base.FollowedFacts`."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "follower")

    def last_seq(self) -> int:
        with self.connection() as connection:
            row = connection.execute(SQL["last"]).fetchone()
            assert row is not None
            return int(row[0])

    @contextlib.contextmanager
    def reading(self) -> Iterator[Facts]:
        with self.snapshot() as connection:
            yield PostgresFactTables(connection)


class PostgresFollowedRecords(_Reader):
    """The catalog of another server, for reading; implements `storage.base.RecordStore`."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "catalog follower")

    def open(self) -> list[str]:
        with self.connection():
            return []

    def transact(self, work: Callable[[RecordTable], T], *, durable: bool) -> T:
        """Return the result of `work`; the database refuses writes in its transaction."""
        del durable
        with self.snapshot() as connection:
            return work(PostgresRecordTable(connection))

    def upkeep(self) -> float | None:
        return None


class PostgresStorage:
    """The data of a server in a PostgreSQL database; implements `storage.base.Storage`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._leadership = Leadership(address)

    @property
    def place(self) -> str:
        """The name of the database in messages."""
        return self._leadership.place

    def facts(self) -> PostgresFacts:
        return PostgresFacts(self._leadership)

    def records(self) -> PostgresRecords:
        return PostgresRecords(self._leadership)

    def tokens(self) -> PostgresTokens:
        return PostgresTokens(self._address)

    def agents(self) -> PostgresAgents:
        return PostgresAgents(self._address)

    def logins(self) -> PostgresLogins:
        return PostgresLogins(self._address)

    def audit(self) -> PostgresAudit:
        return PostgresAudit(self._address)

    def election(self) -> Leadership:
        return self._leadership

    def followed(self) -> Followed:
        return Followed(
            PostgresFollowedFacts(self._address), PostgresFollowedRecords(self._address)
        )

    def names(self) -> "PostgresStorage":
        return self

    def has_records(self) -> bool:
        """Return True: a database with a ledger has a catalog, since one step creates both."""
        return True

    def secret(self) -> bytes:
        with closing(self._leadership.open("secret")) as connection, translate_errors(self.place):
            connection.execute(SCHEMA["insert_secret"], (secrets.token_bytes(SECRET_BYTES),))
            row = connection.execute(SCHEMA["secret"]).fetchone()
            assert row is not None
            return bytes(row[0])

    def agree(self, subject: str, proposal: str) -> str:
        name = f"{subject} name"
        with closing(self._leadership.open("names")) as connection, translate_errors(self.place):
            connection.execute(SCHEMA["insert_name"], (name, proposal.encode()))
            row = connection.execute(SCHEMA["name"], (name,)).fetchone()
            assert row is not None
            return bytes(row[0]).decode()

    def agreed(self, subject: str) -> list[str]:
        with closing(self._leadership.open("names")) as connection, translate_errors(self.place):
            rows = connection.execute(SCHEMA["names"], (subject,)).fetchall()
            return [bytes(row[0]).decode() for row in rows]


def prepare(address: str, role: str | None) -> list[str]:
    """Create or upgrade the tables, and permit another role to use them.

    Args:
        address: Address of the database, with a role that may create tables.
        role: The role of the server; None: the role in the address.

    Returns:
        The changes, each a sentence.

    Raises:
        StorageError: A server uses the database, or this role may not create tables.
    """
    leadership, done = Leadership(address), list[str]()
    leadership.take()
    try:
        with (
            closing(connect(address, "prepare")) as connection,
            translate_errors(place_of(address)),
        ):
            make_tables(connection, leadership.place)
            done.append(f"{leadership.place} has the tables of this release.")
            if role is not None:
                try:
                    with connection.transaction():
                        for grant in _GRANTS:
                            connection.execute(sql.SQL(grant).format(sql.Identifier(role)))
                except psycopg.errors.UndefinedObject as error:
                    reason = f"{leadership.place} has no role {role}; make it with CREATE ROLE."
                    raise StorageError(reason) from error
                done.append(f"The role {role} may use them.")
    finally:
        leadership.release()
    return done

"""A PostgreSQL database with everything that a server must not lose."""

import secrets
from contextlib import closing
from typing import Final, LiteralString

import psycopg
from psycopg import sql

from moorage.storage.base import SECRET_BYTES, Followed, StorageError
from moorage.storage.postgres.agents import PostgresAgents
from moorage.storage.postgres.audit import PostgresAudit
from moorage.storage.postgres.connection import connect, place_of, translate_errors
from moorage.storage.postgres.facts import PostgresFacts
from moorage.storage.postgres.followed import PostgresFollowedFacts, PostgresFollowedRecords
from moorage.storage.postgres.leadership import SQL, Leadership, make_tables
from moorage.storage.postgres.logins import PostgresLogins
from moorage.storage.postgres.records import PostgresRecords
from moorage.storage.postgres.tokens import PostgresTokens

_GRANTS: Final[tuple[LiteralString, ...]] = (
    "GRANT USAGE ON SCHEMA moorage TO {}",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA moorage TO {}",
)


class PostgresStorage:
    """`storage.base.Storage` in PostgreSQL. Read the contract there."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._leadership = Leadership(address)

    @property
    def place(self) -> str:
        """Its name in messages."""
        return self._leadership.place

    def facts(self) -> PostgresFacts:
        """See `Storage.facts`."""
        return PostgresFacts(self._leadership)

    def records(self) -> PostgresRecords:
        """See `Storage.records`."""
        return PostgresRecords(self._leadership)

    def tokens(self) -> PostgresTokens:
        """See `Storage.tokens`."""
        return PostgresTokens(self._address)

    def agents(self) -> PostgresAgents:
        """See `Storage.agents`."""
        return PostgresAgents(self._address)

    def logins(self) -> PostgresLogins:
        """See `Storage.logins`."""
        return PostgresLogins(self._address)

    def audit(self) -> PostgresAudit:
        """See `Storage.audit`."""
        return PostgresAudit(self._address)

    def election(self) -> Leadership:
        """See `Storage.election`."""
        return self._leadership

    def followed(self) -> Followed:
        """See `Storage.followed`."""
        return Followed(
            PostgresFollowedFacts(self._address), PostgresFollowedRecords(self._address)
        )

    def has_records(self) -> bool:
        """See `Storage.has_records`: its tables come with the ledger's."""
        return True

    def secret(self) -> bytes:
        """See `Storage.secret`."""
        with closing(self._leadership.open("secret")) as connection, translate_errors(self.place):
            connection.execute(SQL["insert_secret"], (secrets.token_bytes(SECRET_BYTES),))
            row = connection.execute(SQL["secret"]).fetchone()
            assert row is not None
            return bytes(row[0])


def prepare(address: str, role: str | None) -> list[str]:
    """Make the tables, or bring them up to date, and let another role use them.

    Args:
        address: Of a role that may make them.
        role: The one that serves; None: the same.

    Returns:
        What was done, each a sentence.

    Raises:
        StorageError: A server runs there, or this role may not.
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

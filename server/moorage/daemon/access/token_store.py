"""Named tokens in the data folder: `moored token` writes them, a running server reads them.

Only digests are stored. A running server sees a change at once, since it looks at the version of
the database for each token that a client shows (https://sqlite.org/pragma.html#pragma_data_version).
"""

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from moorage.config.together import NAMED_TOKENS_FILE
from moorage.daemon.access.lease_tokens import digest
from moorage.records.rights import Role

__all__ = ["NamedToken", "TokenStore", "TokenStoreError"]

TOKEN_PREFIX: Final = "moor_"  # noqa: S105  # By it, scanners for leaked secrets know a token.
_TOKEN_BYTES: Final = 24
_FORMAT: Final = 1
_BUSY_SECONDS: Final = 10.0
_TABLE: Final = """
CREATE TABLE IF NOT EXISTS tokens (
    name TEXT PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    role TEXT NOT NULL,
    tenant TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
    revoked_at REAL
) STRICT
"""
_COLUMNS: Final = "name, digest, role, tenant, created_at, expires_at, revoked_at"


class TokenStoreError(Exception):
    """The store of tokens cannot be used, or refuses a change; the text says what to do."""


class NamedToken(msgspec.Struct, frozen=True):
    """A token as it is stored.

    Args:
        name: What `moored token list` calls it.
        digest: SHA-256 of the token, in hexadecimal.
        role: Decides what its holder may do.
        tenant: Whose leases and policies its holder works with.
        created_at: In seconds since the epoch.
        expires_at: Likewise; None: it does not expire.
        revoked_at: Likewise; None: it is not revoked.

    """

    name: str
    digest: str
    role: Role
    tenant: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None

    def is_valid(self, now: float) -> bool:
        """Return whether the token lets its holder in."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def state(self, now: float) -> str:
        """Return `valid`, `expired` or `revoked`."""
        if self.revoked_at is not None:
            return "revoked"
        return "valid" if self.is_valid(now) else "expired"


class TokenStore:
    """Named tokens of one server.

    Args:
        folder: Its data folder. Where it has no tokens yet, the first `create` makes the file.

    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAMED_TOKENS_FILE
        self._connection: sqlite3.Connection | None = None
        self._version = -1
        self._tokens: dict[str, NamedToken] = {}

    def tokens(self) -> Mapping[str, NamedToken]:
        """Return all tokens by digest: expired and revoked ones, too.

        Raises:
            TokenStoreError: The file cannot be read.

        """
        with self._reading() as connection:
            if connection is None:
                return self._tokens
            (version,) = connection.execute("PRAGMA data_version").fetchone()
            if version != self._version:
                rows = connection.execute(f"SELECT {_COLUMNS} FROM tokens ORDER BY name")  # noqa: S608  # Fixed.
                found = (msgspec.convert(row, NamedToken) for row in map(dict, rows))
                self._tokens = {each.digest: each for each in found}
                self._version = version
        return self._tokens

    def create(
        self, name: str, role: Role, tenant: str, now: float, expires_at: float | None
    ) -> str:
        """Store a new token and return it; it cannot be read again.

        Raises:
            TokenStoreError: A token has this name, or the file cannot be written.

        """
        token = TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)
        row = (name, digest(token), role.value, tenant, now, expires_at)
        with self._writing() as connection:
            try:
                connection.execute(
                    "INSERT INTO tokens (name, digest, role, tenant, created_at, expires_at)"
                    " VALUES (?, ?, ?, ?, ?, ?)",
                    row,
                )
            except sqlite3.IntegrityError:
                reason = f"a token “{name}” exists; choose another name"
                raise TokenStoreError(reason) from None
        return token

    def revoke(self, name: str, now: float) -> bool:
        """Refuse a token from now on; return False if it was revoked already.

        Raises:
            TokenStoreError: No token has this name, or the file cannot be written.

        """
        with self._writing() as connection:
            found = connection.execute("SELECT revoked_at FROM tokens WHERE name = ?", (name,))
            row = found.fetchone()
            if row is None:
                reason = f"no token is named “{name}”; `moored token list` shows all"
                raise TokenStoreError(reason)
            if row[0] is None:
                connection.execute("UPDATE tokens SET revoked_at = ? WHERE name = ?", (now, name))
        return row[0] is None

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        try:
            if self._connection is None and self._path.exists():
                self._connection = self._open()
            yield self._connection
        except (sqlite3.Error, ValueError) as error:
            raise TokenStoreError(f"{self._path}: {error}") from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            if self._connection is None:
                self._connection = self._open()
            with self._connection as connection:
                connection.execute("BEGIN IMMEDIATE")
                self._version = -1  # The version tells of changes by other connections alone.
                yield connection
        except (sqlite3.Error, OSError) as error:
            raise TokenStoreError(f"{self._path}: {error}") from error

    def _open(self) -> sqlite3.Connection:
        # Before SQLite makes it readable for others.
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        connection = sqlite3.connect(
            self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            _prepare(connection)
        except sqlite3.Error:
            connection.close()
            raise
        return connection


def _prepare(connection: sqlite3.Connection) -> None:
    """Make the table where it is missing; refuse the file of a newer release."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > _FORMAT:
        reason = f"format {version} is of a newer release; this one reads up to {_FORMAT}"
        raise sqlite3.DatabaseError(reason)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA synchronous = FULL")
    if not version:
        connection.execute(_TABLE)
        connection.execute(f"PRAGMA user_version = {_FORMAT}")

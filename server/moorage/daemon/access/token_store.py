"""Named tokens in the data folder: `moored token` writes them, a running server reads them.

Only digests are stored. A running server sees a change at once, since it looks for one with each
token that a client shows.
"""

import secrets
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from moorage.config.together import NAMED_TOKENS_FILE
from moorage.daemon.access.lease_tokens import digest
from moorage.daemon.access.shared_file import SharedFile
from moorage.records.rights import Role

__all__ = ["NamedToken", "TokenStore", "TokenStoreError"]

TOKEN_PREFIX: Final = "moor_"  # noqa: S105  # By it, scanners for leaked secrets know a token.
_TOKEN_BYTES: Final = 24
_TABLE: Final = """
CREATE TABLE IF NOT EXISTS tokens (
    name TEXT PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    role TEXT NOT NULL,
    tenant TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
    revoked_at REAL
) STRICT;
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
        self._file = SharedFile(folder / NAMED_TOKENS_FILE, _TABLE, TokenStoreError)
        self._tokens: dict[str, NamedToken] = {}

    def tokens(self) -> Mapping[str, NamedToken]:
        """Return all tokens by digest: expired and revoked ones, too.

        Raises:
            TokenStoreError: The file cannot be read.

        """
        with self._file.reading() as connection:
            if connection is not None:
                rows = connection.execute(f"SELECT {_COLUMNS} FROM tokens ORDER BY name")  # noqa: S608  # Fixed.
                found = (msgspec.convert(row, NamedToken) for row in map(dict, rows))
                self._tokens = {each.digest: each for each in found}
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
        with self._file.writing() as connection:
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
        with self._file.writing() as connection:
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
        self._file.close()

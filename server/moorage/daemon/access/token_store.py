"""Named tokens: `moored token` and administrators write them, a running server reads them.

Only digests are stored.
"""

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Final, Literal

import msgspec

from moorage.daemon.access.lease_tokens import digest
from moorage.records.rights import Role
from moorage.records.tokens import TokenState
from moorage.storage.base import StorageError, TokenRow, TokenRows

TOKEN_PREFIX: Final = "moor_"  # noqa: S105  # By it, scanners for leaked secrets know a token.
_TOKEN_BYTES: Final = 24


class TokenStoreError(Exception):
    """The token store is unusable or refuses a change; the message says what to do."""


class TokenNameError(TokenStoreError):
    """A token of the name exists already, or none exists; nothing was changed."""


class NamedToken(msgspec.Struct, frozen=True):
    """A token as it is stored.

    Args:
        name: The name of the token in `moored token list`.
        digest: SHA-256 of the token, in hexadecimal.
        role: Decides what its holder may do.
        tenant: The tenant for which its holder acts.
        created_at: The time of its creation, in seconds since the epoch.
        expires_at: The end of the token, in seconds since the epoch; None: it does not expire.
        revoked_at: The time of its revocation, in seconds since the epoch; None: it is not revoked.
    """

    name: str
    digest: str
    role: Role
    tenant: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None

    def is_valid(self, now: float) -> bool:
        """Return whether the token is neither expired nor revoked."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def state(self, now: float) -> Literal["valid", "expired", "revoked"]:
        """Return the token's state."""
        if self.revoked_at is not None:
            return "revoked"
        return "valid" if self.is_valid(now) else "expired"

    def shown(self, now: float) -> TokenState:
        """Return what people may see of the token."""
        return TokenState(
            name=self.name,
            role=self.role,
            tenant=self.tenant,
            state=self.state(now),
            created_at=self.created_at,
            expires_at=self.expires_at,
            revoked_at=self.revoked_at,
        )


class TokenStore:
    """Named tokens of one server."""

    def __init__(self, rows: TokenRows) -> None:
        self._rows = rows
        self._version: object = None
        self._tokens: dict[str, NamedToken] = {}

    def tokens(self) -> Mapping[str, NamedToken]:
        """Return all tokens by digest: expired and revoked ones, too.

        Raises:
            TokenStoreError: The tokens cannot be read.
        """
        with self._errors():
            version = self._rows.version()
            if version != self._version:
                found = (msgspec.convert(row._asdict(), NamedToken) for row in self._rows.rows())
                tokens = {each.digest: each for each in found}
                if self._tokens and not tokens:  # A server that had tokens never opens to everyone.
                    reason = f"{self._rows.place} lost all its tokens while the server ran"
                    raise TokenStoreError(f"{reason}; put back a copy of them")
                self._tokens, self._version = tokens, version
        return self._tokens

    def create(
        self, name: str, role: Role, tenant: str, now: float, expires_at: float | None
    ) -> str:
        """Store a new token and return it; it cannot be read again.

        Raises:
            TokenNameError: Another token has this name.
            TokenStoreError: The new token cannot be stored.
        """
        token = TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)
        row = TokenRow(name, digest(token), role.value, tenant, now, expires_at)
        with self._errors():
            if not self._rows.insert(row):
                reason = f"a token “{name}” exists; choose another name"
                raise TokenNameError(reason)
        return token

    def revoke(self, name: str, now: float) -> bool:
        """Refuse a token from now on; return False if it was revoked already.

        Raises:
            TokenNameError: No token has this name.
            TokenStoreError: The revocation cannot be stored.
        """
        with self._errors():
            revoked = self._rows.revoke(name, now)
        if revoked is None:
            reason = f"no token is named “{name}”; `moored token list` or GET /tokens shows all"
            raise TokenNameError(reason)
        return revoked

    def close(self) -> None:
        """Close the store."""
        self._rows.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            raise TokenStoreError(str(error)) from error
        except ValueError as error:
            raise TokenStoreError(f"{self._rows.place}: {error}") from error

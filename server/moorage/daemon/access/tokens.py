"""Verifies tokens: those of the settings, named ones, and those of an OpenID Connect issuer.

Both ports ask this module. Tokens may change while the server runs: `token_refresh` changes those
of the settings, `token_store` has the named ones, `oidc` verifies the issuer's.
"""

import asyncio
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final, Protocol

import structlog

from moorage.daemon.access.lease_tokens import digest
from moorage.daemon.access.token_store import NamedToken, TokenStore, TokenStoreError
from moorage.model import Tenant
from moorage.records.rights import SERVER_ITSELF, Caller, Role

FOLLOW_SECONDS: Final = 0.5
"""Seconds between two checks for expired tokens, whose open sessions then end."""
LOOK_SECONDS: Final = 0.1
"""Seconds between two checks for changes by `moored token`: SQLite does not report changes."""
LOCAL: Final = Caller(Tenant("local"), Role.ADMIN)
_ITSELF: Final = Caller(Tenant("local"), Role.ADMIN, SERVER_ITSELF)
"""The caller in every session where no tokens are configured (loopback only)."""

log = structlog.get_logger("moored")


class IssuerTokens(Protocol):
    """Verifies an issuer's tokens. `oidc.OidcTokens` implements it, and needs the extra `oidc`."""

    @property
    def failing(self) -> bool:
        """Whether the last fetch of the issuer's keys failed."""

    def caller(self, bearer: str) -> Caller | None:
        """Return the caller of a token; None if it is not valid, or its key is not known."""

    def expires_at(self, bearer: str) -> float | None:
        """Return when an accepted token expires; None for other tokens."""

    def pending(self, bearer: str) -> Awaitable[bool] | None:
        """Return an awaitable if a token names an unknown key; else None."""

    def why_refused(self, bearer: str) -> str:
        """Return why a token was refused since the last call; empty: it is no issuer's token."""

    def ended(self) -> bool:
        """Return whether accepted tokens have expired since the last call."""


class Tokens:
    """Finds the caller of a token by its digest, so that timing reveals nothing of the token.

    Args:
        tokens: The tenant of each token in the settings. These tokens have the role author.
        operators: The tenants whose tokens have the role admin instead.
        store: The named tokens; None: there is no store.
        issuer: Verifies the tokens of an issuer; None: no issuer is configured.

    Attributes:
        own: The token with which the server calls itself, as the tenant `local`.
    """

    def __init__(
        self,
        tokens: Mapping[str, str],
        operators: Collection[str] = (),
        store: TokenStore | None = None,
        issuer: IssuerTokens | None = None,
    ) -> None:
        self.own = secrets.token_urlsafe(32)
        self._operators = frozenset(operators)
        self._callers: dict[str, Caller] = {}
        self._store = store
        self._failure = ""
        self._issuer = issuer
        self.change(tokens)

    def change(self, tokens: Mapping[str, str]) -> tuple[list[Tenant], list[Tenant]]:
        """Replace the tokens of the settings; return the tenants of added and of removed tokens."""
        before, self._callers = (
            self._callers,
            {
                digest(token): Caller(
                    Tenant(tenant), Role.ADMIN if tenant in self._operators else Role.AUTHOR
                )
                for token, tenant in tokens.items()
            },
        )
        added, removed = (
            sorted(caller.tenant for _, caller in these.items() - others.items())
            for these, others in ((self._callers, before), (before, self._callers))
        )
        return added, removed

    @property
    def required(self) -> bool:
        """Whether callers need a token: some are or were configured, or there is an issuer."""
        return bool(self._callers) or self._issuer is not None or self.read_named_tokens() != {}

    def caller(self, bearer: str | None) -> Caller | None:
        """Return the caller of a token; None if it is unknown, expired or revoked."""
        if bearer is not None and hmac.compare_digest(bearer.encode(), self.own.encode()):
            return _ITSELF
        if not self.required:
            return LOCAL
        shown = digest(bearer or "")
        if (found := self._callers.get(shown)) is not None:
            return found
        named = (self.read_named_tokens() or {}).get(shown)
        if named is not None:
            valid = named.is_valid(time.time())
            return Caller(Tenant(named.tenant), named.role, named.name) if valid else None
        return None if self._issuer is None or not bearer else self._issuer.caller(bearer)

    def why_refused(self, bearer: str | None) -> str:
        """Return what is wrong with a token that was refused, for the audit log."""
        if bearer is None:
            return "no token"
        named = (self.read_named_tokens() or {}).get(digest(bearer))
        if named is None:
            of_issuer = "" if self._issuer is None else self._issuer.why_refused(bearer)
            return of_issuer or "the token is unknown"
        ends = {"expired": "has expired", "revoked": "was revoked", "valid": "is not for this"}
        return f"the token “{named.name}” {ends[named.state(time.time())]}"

    def pending(self, bearer: str | None) -> Awaitable[bool] | None:
        """Return an awaitable after which `caller` can judge a token; None: it can now.

        Its result: whether the token can be verified now. It cannot be if its issuer does not
        answer, or the store of named tokens cannot be read: a database that restarts, say.
        """
        if bearer and self.read_named_tokens() is None and digest(bearer) not in self._callers:
            return _unverifiable()
        return None if self._issuer is None or not bearer else self._issuer.pending(bearer)

    def expires_at(self, bearer: str) -> float | None:
        """Return when the token of an issuer ends; None for other tokens."""
        return None if self._issuer is None else self._issuer.expires_at(bearer)

    async def follow(self, expel: Callable[[], None]) -> None:
        """Call `expel` when tokens end or the first one is created, until cancelled.

        Args:
            expel: Closes the sessions of callers who no longer have a valid token.
        """
        before, named, due = self._find_ended(), self.read_named_tokens(), 0.0
        while True:
            # A database that does not answer holds up the event loop at each look.
            await asyncio.sleep(FOLLOW_SECONDS if self._failure else LOOK_SECONDS)
            if (latest := self.read_named_tokens()) is named and time.monotonic() < due:
                continue
            named, due = latest, time.monotonic() + FOLLOW_SECONDS
            now = self._find_ended()
            if self._failure:  # An unreadable store ends no session: it may be restarting.
                continue
            if now != before or (self._issuer is not None and self._issuer.ended()):
                expel()
            before = now

    def _find_ended(self) -> tuple[bool, frozenset[str]]:
        """Return whether callers need a token, and which named tokens are no longer valid."""
        now, named = time.time(), self.read_named_tokens() or {}
        ended = frozenset(key for key, each in named.items() if not each.is_valid(now))
        return self.required, ended

    def read_named_tokens(self) -> Mapping[str, NamedToken] | None:
        """Return named tokens by digest; None if the store cannot be read: then all are refused."""
        if self._store is None:
            return {}
        try:
            found = self._store.tokens()
        except TokenStoreError as error:
            if self._failure != str(error):  # It is logged once, although each caller meets it.
                self._failure = str(error)
                log.error("token_store_failed", reason=str(error))  # noqa: TRY400  # A traceback says no more.
            return None
        self._failure = ""
        return found


async def _unverifiable() -> bool:
    return False

"""Lists, creates and revokes named tokens for administrators; the HTTP port calls it."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog
from msgspec.structs import asdict

from moorage.daemon.access.audit_log import AuditLog
from moorage.daemon.access.token_store import (
    NamedToken,
    TokenNameError,
    TokenStore,
    TokenStoreError,
)
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.records.audit import AuditEntry
from moorage.records.json_values import JsonObject
from moorage.records.rights import Caller
from moorage.records.tokens import CreatedToken, NewToken, TokenState, expected_tenant
from moorage.storage.base import StorageError, TokenRows

FOLLOW_SECONDS_MAX: Final = 1.0
"""Seconds for which a change waits until this server knows it; a database is asked seldom."""
_POLL_SECONDS: Final = 0.05
T = TypeVar("T")
log = structlog.get_logger("moored")


@dataclass(frozen=True, slots=True)
class TokenChanges:
    """Changes the named tokens of a running server, as `moored token` does.

    Every method raises `ServiceError` (`unavailable`) if the store cannot be read or written.

    Args:
        known: Returns the named tokens by digest, as this server knows them; None: unreadable.
        open_rows: Opens the store. It may wait for a disk or a database, so a thread calls it.
        audit: Gets an entry for each change.
        expel: Ends the sessions of callers whose token has ended, or who now need one.
    """

    known: Callable[[], Mapping[str, NamedToken] | None]
    open_rows: Callable[[], TokenRows]
    audit: AuditLog
    expel: Callable[[], None]

    def list(self) -> list[TokenState]:
        """Return all named tokens: expired and revoked ones, too."""
        known, now = self.known(), time.time()
        if known is None:
            raise _unavailable("the server cannot read its tokens")
        return [each.shown(now) for each in known.values()]

    async def create(self, new: NewToken, caller: Caller, remote: str) -> CreatedToken:
        """Create a token, which is valid at once.

        Raises:
            ServiceError: A token of this name exists (`already_exists`), or no tenant may have
                this name (`bad_message`).
        """
        if (expected := expected_tenant(new.tenant)) is not None:
            raise ServiceError.wrong_field("tenant", expected)
        now, lifetime = time.time(), new.lifetime_seconds
        end = None if lifetime is None else now + lifetime
        secret = await self._change(
            lambda store: store.create(new.name, new.role, new.tenant, now, end),
            Code.ALREADY_EXISTS,
        )
        by = caller.tenant, caller.role, caller.token_name, remote
        after: JsonObject = {"role": new.role, "tenant": new.tenant, "expires_at": end}
        about: JsonObject = {"token": new.name}
        self.audit.note(AuditEntry(now, "token.created", *by, about, after=after))
        made = await self._find(new.name)
        self.expel()
        return CreatedToken(token=secret, **asdict(made))

    async def revoke(self, name: str, caller: Caller, remote: str) -> tuple[TokenState, bool]:
        """Refuse a token from now on and end its sessions; return it, and whether it was valid.

        Raises:
            ServiceError: No token has this name (`not_found`).
        """
        now = time.time()
        is_new = await self._change(lambda store: store.revoke(name, now), Code.NOT_FOUND)
        if is_new:
            by = caller.tenant, caller.role, caller.token_name, remote
            found = (each for each in (self.known() or {}).values() if each.name == name)
            before = next(map(_terms, found), None)  # None: this server does not know it yet.
            self.audit.note(AuditEntry(now, "token.revoked", *by, {"token": name}, before))
        was = await self._find(name, is_revoked=True)
        self.expel()
        return was, is_new

    async def _change(self, change: Callable[[TokenStore], T], wrong_name: Code) -> T:
        """Change the store in a thread, over a connection that the event loop does not use."""

        def run() -> T:
            with closing(TokenStore(self.open_rows())) as store:
                return change(store)

        try:
            return await asyncio.to_thread(run)
        except TokenNameError as error:
            raise ServiceError(wrong_name, str(error), field="name") from error
        except (TokenStoreError, StorageError) as error:
            log.error("token_store_failed", reason=str(error))  # noqa: TRY400  # A traceback says no more.
            raise _unavailable("the server cannot write its tokens") from error

    async def _find(self, name: str, *, is_revoked: bool = False) -> TokenState:
        """Return a token once this server knows its change."""
        end = time.monotonic() + FOLLOW_SECONDS_MAX
        while time.monotonic() < end:
            for each in (self.known() or {}).values():
                if each.name == name and (each.revoked_at is not None or not is_revoked):
                    return each.shown(time.time())
            await asyncio.sleep(_POLL_SECONDS)
        raise _unavailable("the change is stored, but the server cannot read its tokens")


def _unavailable(what: str) -> ServiceError:
    return ServiceError(Code.UNAVAILABLE, f"{what}; its log says why. Send the request again later")


def _terms(made: NamedToken) -> JsonObject:
    return {"role": made.role, "tenant": made.tenant, "expires_at": made.expires_at}

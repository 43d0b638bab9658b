"""Logins to the console: cookies, each issued in exchange for a token. Both ports accept them.

The logins are stored, so that they outlast a server, and other servers on the same database know
them. The stored data gives no access: it has the digest of each cookie, and the token in a form
that only the cookie can decrypt.
"""

import hashlib
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Final

import msgspec
import structlog

from moorage.daemon.access.lease_tokens import digest
from moorage.model import Code
from moorage.protocol.faults import ServiceError, status_of
from moorage.protocol.logins import Login
from moorage.records.rights import Caller, Right
from moorage.storage.base import LoginRows, StorageError

LOGINS_OF_TENANT_MAX: Final = 100
"""Maximum logins of one tenant at a time; one more ends the tenant's oldest login."""
LOGINS_MAX: Final = 1_000
"""Maximum logins at a time; one more ends the oldest login of the tenant with most logins."""

log = structlog.get_logger("moored")


class _StoredLogin(msgspec.Struct, frozen=True):
    """A login as it is stored.

    Args:
        caller: The caller whose token was exchanged.
        veiled: The token, encrypted with the cookie.
        expires_at: The end of the login, in seconds since the epoch.
        veiled_id_token: `Login.id_token`, encrypted with the cookie.
    """

    caller: Caller
    veiled: bytes
    expires_at: float
    veiled_id_token: bytes | None = None


class ConsoleLogins:
    """Logins by the digest of their cookie.

    Args:
        authenticate: Given a token, returns the caller, or None.
        lasts_seconds: How long a login lasts.
        token_end: Given a token, returns when it ends, as far as that is known beforehand.
    """

    def __init__(
        self,
        rows: LoginRows,
        authenticate: Callable[[str | None], Caller | None],
        lasts_seconds: float,
        token_end: Callable[[str], float | None] = lambda _: None,
    ) -> None:
        self._rows = rows
        self._authenticate = authenticate
        self._lasts_seconds = lasts_seconds
        self._token_end = token_end
        self._version: object = None
        self._known: dict[str, _StoredLogin] = {}
        """Logins by digest, the oldest first."""

    def enter(self, token: str, id_token: str | None = None) -> tuple[str, Login] | None:
        """Exchange a token for a cookie; None: the token belongs to no tenant.

        Args:
            token: The token.
            id_token: See `Login`.

        Raises:
            ServiceError: `unavailable`: the login cannot be stored. `unauthorized` (403): the role
                has nothing to see in the console.
        """
        caller = self._authenticate(token)
        if caller is None:
            return None
        if not caller.may(Right.READ):
            refused = status_of(Code.FORBIDDEN)
            raise ServiceError(Code.UNAUTHORIZED, caller.refusal(Right.READ), status=refused)
        cookie, now, ends = secrets.token_urlsafe(32), time.time(), self._token_end(token)
        until = min(now + self._lasts_seconds, math.inf if ends is None else ends)
        stored = _StoredLogin(caller, _veil(token.encode(), cookie), until)
        if id_token is not None:
            veiled = _veil(id_token.encode(), cookie, b"id ")
            stored = msgspec.structs.replace(stored, veiled_id_token=veiled)
        try:
            self._read()
            gone = [name for name, each in self._known.items() if each.expires_at <= now]
            left = {name: each for name, each in self._known.items() if name not in gone}
            gone += _surplus({**left, digest(cookie): stored}, stored)
            self._rows.insert(digest(cookie), msgspec.json.encode(stored), gone)
        except StorageError as error:
            raise ServiceError(Code.UNAVAILABLE, f"logins cannot be stored: {error}") from error
        return cookie, _login(stored, token, cookie)

    def find(self, cookies: Iterable[str]) -> Login | None:
        """Return the login of one of these cookies, while the login and its token are valid."""
        found = [(cookie, digest(cookie)) for cookie in cookies]
        if not found:
            return None
        try:
            self._read()
        except StorageError as error:  # Known logins stay valid until the token can be checked.
            log.error("console_logins_failed", reason=str(error))  # noqa: TRY400  # It has no more to say.
        for cookie, name in found:
            stored = self._known.get(name)
            if stored is None or stored.expires_at <= time.time():
                continue
            token = _veil(stored.veiled, cookie).decode()
            if self._authenticate(token) == stored.caller:
                return _login(stored, token, cookie)
        return None

    def leave(self, cookies: Iterable[str]) -> None:
        """End the logins of these cookies.

        Raises:
            ServiceError: `unavailable`: the logout cannot be stored.
        """
        try:
            self._rows.delete([digest(cookie) for cookie in cookies])
        except StorageError as error:
            raise ServiceError(Code.UNAVAILABLE, f"the logout is not stored: {error}") from error

    def close(self) -> None:
        """Close the table of logins."""
        self._rows.close()

    def _read(self) -> None:
        version = self._rows.version()
        if version != self._version:
            rows = self._rows.rows() if version is not None else {}
            self._known = {
                name: msgspec.json.decode(document, type=_StoredLogin)
                for name, document in rows.items()
            }
            self._version = version


def _surplus(logins: dict[str, _StoredLogin], newest: _StoredLogin) -> Collection[str]:
    """Return the digest of the login that must end to make room for `newest`; []: none must."""
    held = Counter(each.caller.tenant for each in logins.values())
    if held[newest.caller.tenant] > LOGINS_OF_TENANT_MAX:
        tenant = newest.caller.tenant
    elif len(logins) > LOGINS_MAX:
        tenant = max(held, key=lambda each: held[each])
    else:
        return []
    return [next(name for name, each in logins.items() if each.caller.tenant == tenant)]


def _login(stored: _StoredLogin, token: str, cookie: str) -> Login:
    csrf = hashlib.shake_256(b"moorage console csrf " + cookie.encode()).hexdigest(32)
    veiled = stored.veiled_id_token
    id_token = None if veiled is None else _veil(veiled, cookie, b"id ").decode()
    return Login(stored.caller, token, csrf, stored.expires_at, id_token)


def _veil(text: bytes, cookie: str, kind: bytes = b"") -> bytes:
    """Encrypt or decrypt a token with a random cookie, which encrypts one token of each kind."""
    key = b"moorage console " + kind + b"token " + cookie.encode()
    stream = hashlib.shake_256(key).digest(len(text))
    return bytes(one ^ other for one, other in zip(text, stream, strict=True))

"""Logins to the console: cookies, and the token that each was exchanged for.

Both ports read them. A login lasts some hours and lies in memory only: after a restart of the
daemon, people log in again.
"""

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from moorage.daemon.access.lease_tokens import digest
from moorage.model import Tenant
from moorage.protocol.logins import Login
from moorage.records.rights import Caller

LOGINS_OF_TENANT_MAX: Final = 100
"""Logins of one tenant at one time; beyond it its oldest is over."""
LOGINS_MAX: Final = 1_000
"""The same for all; beyond it the oldest is over of the tenant that has most."""


class ConsoleLogins:
    """Logins by the digest of their cookie.

    Args:
        authenticate: Given a token, returns the caller, or None.
        lasts_seconds: How long a login lasts.
        token_end: Given a token, returns when it ends, as far as that is known beforehand.

    """

    def __init__(
        self,
        authenticate: Callable[[str | None], Caller | None],
        lasts_seconds: float,
        token_end: Callable[[str], float | None] = lambda _: None,
    ) -> None:
        self._authenticate = authenticate
        self._lasts_seconds = lasts_seconds
        self._token_end = token_end
        self._logins: dict[str, Login] = {}

    def enter(self, token: str) -> tuple[str, Login] | None:
        """Exchange a token for a cookie; None: it is no tenant's."""
        caller = self._authenticate(token)
        if caller is None:
            return None
        cookie = secrets.token_urlsafe(32)
        ends = self._token_end(token)
        until = min(time.time() + self._lasts_seconds, math.inf if ends is None else ends)
        login = Login(caller, token, secrets.token_urlsafe(32), until)
        self._logins[digest(cookie)] = login
        held = Counter(each.caller.tenant for each in self._logins.values())
        if held[caller.tenant] > LOGINS_OF_TENANT_MAX:
            self._end_oldest(caller.tenant)
        elif len(self._logins) > LOGINS_MAX:
            self._end_oldest(max(held, key=lambda each: held[each]))
        return cookie, login

    def _end_oldest(self, tenant: Tenant) -> None:
        logins = self._logins.items()
        del self._logins[next(name for name, each in logins if each.caller.tenant == tenant)]

    def find(self, cookies: Iterable[str]) -> Login | None:
        """Return the login that one of these cookies stands for, while it and its token last."""
        for cookie in cookies:
            login = self._logins.get(digest(cookie))
            if login is None:
                continue
            if login.expires_at > time.time() and self._authenticate(login.token) == login.caller:
                return login
            del self._logins[digest(cookie)]
        return None

    def leave(self, cookies: Iterable[str]) -> None:
        """End the logins that these cookies stand for."""
        for cookie in cookies:
            self._logins.pop(digest(cookie), None)

"""What a request says of who sends it; both ports read it with this.

A program sends its token in an `Authorization` header. Existing ones have credentials in their URLs
(`http://user:TOKEN@host`), which arrive as Basic: there, the password is the token, and the user
may be anybody. A page of the console cannot set that header on a WebSocket: it has exchanged the
token for a cookie.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Final

__all__ = ["CONSOLE_COOKIE", "console_cookies", "token_of"]

CONSOLE_COOKIE: Final = "moorage-console-"
"""Cookies of the console start with it; their port follows, since browsers keep cookies by host."""
COOKIES_MAX: Final = 16
"""Of one request, beyond which the rest is not looked at."""


def token_of(headers: Sequence[str]) -> tuple[str | None, bool]:
    """Return the token, and whether there is a readable one, or no header at all.

    Args:
        headers: The values of all `Authorization` headers: of several, a proxy may have looked at
            another one, so they are not readable.

    """
    if not headers:
        return None, True
    scheme, _, given = headers[0].partition(" ")
    token = given.strip() if scheme.lower() in {"bearer", "basic"} else ""
    if scheme.lower() == "basic":
        token = _password(token)
    return token, len(headers) == 1 and bool(token)


def console_cookies(headers: Sequence[str]) -> list[str]:
    """Return the values of the console's cookies: a browser sends those of all ports of a host.

    Args:
        headers: The values of all `Cookie` headers.

    """
    pairs = (pair.strip().partition("=") for header in headers for pair in header.split(";"))
    found = [value for name, _, value in pairs if name.startswith(CONSOLE_COOKIE) and value]
    return found[:COOKIES_MAX]


def _password(given: str) -> str:
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):  # Also text that is no UTF-8.
        return ""

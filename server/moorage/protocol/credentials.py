"""Reads the credentials of a request, for both ports.

A program sends its token in an `Authorization` header. Some programs have credentials in their URLs
(`http://user:TOKEN@host`), which arrive as Basic: there, the password is the token, and the user
name is ignored.

A page in a browser cannot set this header on a WebSocket. A page of the console has exchanged the
token for a cookie. Any other page names two subprotocols, `moorage` and one with its credentials:
`moorage.ticket.TICKET`, from `POST /websocket-ticket`, or `moorage.bearer.TOKEN`, the token in
base64url without padding. The server chooses `moorage`, so that no secret is sent back.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Final

SUBPROTOCOL: Final = "moorage"
"""The subprotocol that the server chooses from those that a client offers."""
BEARER_PREFIX: Final = "moorage.bearer."
TICKET_PREFIX: Final = "moorage.ticket."

CONSOLE_COOKIE: Final = "moorage-console-"
"""Start of the console's cookie names; the port follows, since browsers keep cookies by host."""
COOKIES_MAX: Final = 16
"""At most this many cookies of one request are examined; further cookies are ignored."""


def token_of(headers: Sequence[str]) -> tuple[str | None, bool]:
    """Return the token, and whether there is no header, or one with a token in a known form.

    Args:
        headers: The values of all `Authorization` headers. Several headers are refused, since a
            proxy may have checked another one.
    """
    if not headers:
        return None, True
    scheme, _, given = headers[0].partition(" ")
    token = given.strip() if scheme.lower() in {"bearer", "basic"} else ""
    if scheme.lower() == "basic":
        token = _password(token)
    return token, len(headers) == 1 and bool(token)


def console_cookies(headers: Sequence[str]) -> list[str]:
    """Return the values of the console's cookies; a browser sends those of all ports of a host.

    Args:
        headers: The values of all `Cookie` headers.
    """
    pairs = (pair.strip().partition("=") for header in headers for pair in header.split(";"))
    found = [value for name, _, value in pairs if name.startswith(CONSOLE_COOKIE) and value]
    return found[:COOKIES_MAX]


def read_subprotocols(headers: Sequence[str]) -> tuple[str, str] | None:
    """Return the credential among the subprotocols of a handshake: its kind and its text.

    Args:
        headers: The values of all `Sec-WebSocket-Protocol` headers.

    Returns:
        None: no credential. (`ticket`, ""), which is never valid: several credentials, or a token
        that is not base64url.
    """
    offered = [each.strip() for header in headers for each in header.split(",")]
    found = [each for each in offered if each.startswith((BEARER_PREFIX, TICKET_PREFIX))]
    if not found:
        return None
    if len(found) > 1:
        return "ticket", ""
    if found[0].startswith(TICKET_PREFIX):
        return "ticket", found[0].removeprefix(TICKET_PREFIX)
    given = found[0].removeprefix(BEARER_PREFIX)
    try:
        token = base64.b64decode(given + "=" * (-len(given) % 4), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return "ticket", ""
    return ("bearer", token) if token else ("ticket", "")


def _password(given: str) -> str:
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):  # Also text that is not UTF-8.
        return ""

"""The token in an `Authorization` header; both ports read it with this.

Existing programs have credentials in their URLs (`http://user:TOKEN@host`), which arrive as Basic:
there, the password is the token, and the user may be anybody.
"""

import base64
import binascii
from collections.abc import Sequence

__all__ = ["token_of"]


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


def _password(given: str) -> str:
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):  # Also text that is no UTF-8.
        return ""

"""Signs browsers in to the console at the issuer, and logs them out there.

The server signs in by an authorization code with PKCE, and logs out by RP-Initiated Logout 1.0.

The browser gets no token, only a cookie. The cookie has the `state`, which proves that the same
browser comes back from the issuer, and the verifier of RFC 7636.
"""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from urllib.parse import urldefrag, urlencode

import jwt
import structlog

from moorage.daemon.access.oidc_keys import (
    REASON_BYTES_MAX,
    IssuerKeys,
    IssuerRefusesError,
    KeysUnavailableError,
    is_safe,
)

log = structlog.get_logger("moored")


class BrowserSignIn:
    """Sends browsers to the issuer, and exchanges the codes that they bring back.

    Args:
        keys: The issuer's keys, and the addresses of its endpoints.
        request: Values of `issuer`, `client_id`, `scopes` and `audience` in requests to the issuer.
    """

    def __init__(self, keys: IssuerKeys, request: dict[str, str]) -> None:
        self._keys = keys
        self._request = request

    async def begin(self, redirect_uri: str) -> tuple[str, str] | None:
        """Return the issuer's URL and the proof for a cookie; None: the issuer does not answer.

        Args:
            redirect_uri: The address to which the issuer sends the browser back.
        """
        place = await self._endpoint("authorization_endpoint")
        if place is None:
            return None
        state, verifier = secrets.token_urlsafe(24), secrets.token_urlsafe(48)
        digest = hashlib.sha256(verifier.encode()).digest()
        query = {
            "response_type": "code",
            "client_id": self._request["client_id"],
            "scope": self._request["scopes"],
            "audience": self._request["audience"],
            "redirect_uri": redirect_uri,
            "state": state,
            "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
        }
        return _with_query(place, query), f"{state}.{verifier}"

    async def finish(
        self, proof: str, answer: Mapping[str, str], redirect_uri: str
    ) -> dict[str, str] | None:
        """Return the issuer's tokens by name; {}: refused; None: the issuer does not answer.

        The log has the reason: the person at the browser asks the operator for it.

        Args:
            proof: The proof from the browser's cookie; empty if there is no cookie for this answer.
            answer: The issuer's answer, as the browser brings it: `state`, and `code` or `error`.
            redirect_uri: The same address as in `begin`.
        """
        sent, _, verifier = proof.partition(".")
        code = answer.get("code", "")
        if not sent or not hmac.compare_digest(sent.encode(), answer.get("state", "").encode()):
            return _refuse("this browser did not begin the sign-in here, or took too long")
        if answer.get("iss", self._request["issuer"]) != self._request["issuer"]:  # RFC 9207.
            return _refuse("the answer names another issuer")
        if not code or answer.get("error"):
            return _refuse(f"the issuer answers {_shown(answer) or 'without a code'}")
        if not self._keys.discovered and not await self._keys.refresh():
            return None  # The server may have started after the browser was sent away.
        form = {
            "grant_type": "authorization_code",
            "client_id": self._request["client_id"],
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": verifier,
        }
        place = str(self._keys.discovered.get("token_endpoint"))
        try:
            tokens = await self._keys.post(place, form)
        except KeysUnavailableError as error:
            refused = _refuse(str(error))
            return refused if isinstance(error, IssuerRefusesError) else None
        named = {name: tokens.get(name) for name in ("access_token", "id_token")}
        return {name: each for name, each in named.items() if isinstance(each, str)}

    async def leave(self, id_token: str, redirect_uri: str) -> tuple[str, str] | None:
        """Return the URL that ends the issuer's login, and the state that comes back.

        None: the issuer has no such URL, or does not answer.

        Args:
            id_token: The ID token of the sign-in; empty if the issuer gave none.
            redirect_uri: The address to which the issuer sends the browser back.
        """
        place = await self._endpoint("end_session_endpoint")
        if place is None:
            return None
        state = secrets.token_urlsafe(24)
        query = {
            "client_id": self._request["client_id"],
            "post_logout_redirect_uri": redirect_uri,
            "state": state,
        }
        if id_token and not self._gives_access(id_token):
            query["id_token_hint"] = id_token
        return _with_query(place, query), state

    def _gives_access(self, id_token: str) -> bool:
        """Return whether this server could accept an ID token, which must then not be in a URL."""
        try:
            audience = jwt.decode(id_token, options={"verify_signature": False}).get("aud", "")
        except jwt.InvalidTokenError:
            return True
        return self._request["audience"] in ([audience] if isinstance(audience, str) else audience)

    async def _endpoint(self, name: str) -> str | None:
        if not self._keys.discovered and not await self._keys.refresh():
            return None
        place = self._keys.discovered.get(name)
        return place if isinstance(place, str) and is_safe(place) else None


def _with_query(place: str, query: Mapping[str, str]) -> str:
    place = urldefrag(place).url  # A query after a fragment would be a part of the fragment.
    return f"{place}{'&' if '?' in place else '?'}{urlencode(query)}"


def _refuse(reason: str) -> dict[str, str]:
    log.warning("console_sign_in_failed", reason=reason)
    return {}


def _shown(answer: Mapping[str, str]) -> str:
    """Return the issuer's error for the log; a browser may have forged it."""
    said = ": ".join(answer[each] for each in ("error", "error_description") if answer.get(each))
    return said[:REASON_BYTES_MAX]

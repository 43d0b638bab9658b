"""Signs browsers in to the console at the issuer: authorization code with PKCE, on the server.

The browser gets no token: only a cookie that proves, when it comes back, that it is the one that
was sent (`state`), and holds the verifier of RFC 7636.
"""

import base64
import hashlib
import hmac
import secrets
from urllib.parse import urlencode

import httpx

from moorage.daemon.access.oidc_keys import IssuerKeys, KeysUnavailableError
from moorage.records.json_values import JsonObject


class BrowserSignIn:
    """Sends browsers to the issuer, and exchanges the codes that they bring back.

    Args:
        keys: Of the issuer; know its endpoints.
        request: `client_id`, `scopes` and `audience`.
    """

    def __init__(self, keys: IssuerKeys, request: dict[str, str]) -> None:
        self._keys = keys
        self._request = request

    async def begin(self, redirect_uri: str) -> tuple[str, str] | None:
        """Return the issuer's URL and the proof for a cookie; None: the issuer does not answer.

        Args:
            redirect_uri: Where the issuer sends the browser back to.
        """
        if not self._keys.discovered and not await self._keys.refresh():
            return None
        place = self._keys.discovered.get("authorization_endpoint")
        if not isinstance(place, str):
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
        return f"{place}{'&' if '?' in place else '?'}{urlencode(query)}", f"{state}.{verifier}"

    async def finish(self, proof: str, state: str, code: str, redirect_uri: str) -> list[str]:
        """Return the issuer's tokens for a code; no tokens if anything is wrong.

        Args:
            proof: From the cookie.
            state: From the issuer, by way of the browser.
            code: From the issuer, by way of the browser.
            redirect_uri: As at the beginning.
        """
        sent, _, verifier = proof.partition(".")
        place = self._keys.discovered.get("token_endpoint")
        same = hmac.compare_digest(sent.encode(), state.encode())
        if not sent or not same or not code or not isinstance(place, str):
            return []
        form = {
            "grant_type": "authorization_code",
            "client_id": self._request["client_id"],
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": verifier,
        }
        try:
            answer: JsonObject = await self._keys.post(place, form)
        except (KeysUnavailableError, OSError, ValueError, httpx.HTTPError, httpx.InvalidURL):
            return []
        tokens = (answer.get(name) for name in ("access_token", "id_token"))
        return [each for each in tokens if isinstance(each, str)]

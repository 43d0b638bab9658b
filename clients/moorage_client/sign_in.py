"""The tokens of `moorage login`: stored per server, and refreshed before they expire.

The client sends a token only to the host for which the issuer gave the token. If this host is a
standby, the client also sends the token to the leader that the standby names. The client reads the
token again for each connection and each HTTP request, so long-running programs use fresh tokens.
"""

import base64
import contextlib
import json
import time
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from moorage.records.json_values import JsonMapping, JsonObject
from moorage_client.endpoint import Endpoint, read_token_file
from moorage_client.errors import (
    CertificateRefused,
    ConnectionFailed,
    MoorageError,
    ProxyFailed,
)
from moorage_client.home import HomeMissing
from moorage_client.state_file import Entries, StateFile, StateUnusable, state_folder

REFRESH_BEFORE_SECONDS: Final = 30.0
"""A token is refreshed this many seconds before its end."""
ISSUER_SECONDS_MAX: Final = 10.0
_PASSING: Final = frozenset({429, *range(500, 600)})
"""HTTP statuses of an issuer, or of its proxy, that is busy or failing."""
_SECURE: Final = ("https", "wss")


class IssuerSilent(ConnectionFailed):
    """The issuer does not answer, or cannot answer now."""


class SignInFailed(MoorageError):  # noqa: N818  # As the rest of the tree.
    """The sign-in failed: the issuer or the user refused it, or did not answer in time."""


def logins() -> StateFile:
    """Return the file with the stored logins.

    Raises:
        HomeMissing: This user has no home folder for the file.
    """
    path = state_folder("set XDG_STATE_HOME to a folder for logins") / "logins.json"
    return StateFile(path, "logins", "logins", "move it away, and sign in again")


def origin_of(url: str) -> str:
    """Return the origin for which a login is valid: the host, with or without TLS, on any port."""
    parts = urlsplit(url)
    return f"{'https' if parts.scheme.lower() in _SECURE else 'http'}://{parts.hostname or ''}"


def read_stored_login(url: str) -> JsonObject | None:
    """Return the stored login for the server of a URL; None without one that can be read."""
    with contextlib.suppress(HomeMissing, StateUnusable, ValueError):
        return logins().read().get(origin_of(url))
    return None


def bearer_of(endpoint: Endpoint) -> str | None:
    """Return the token to send to an endpoint now; refresh a stored token that soon expires.

    Raises:
        SettingRefused: The file that `MOORAGE_TOKEN_FILE` names has no token that can be sent.
    """
    if endpoint.token is not None or not endpoint.signs_in:
        return endpoint.token
    if endpoint.token_file:
        return read_token_file(endpoint.token_file)
    server = endpoint.named_by or endpoint.url
    login = read_stored_login(server)
    if login is not None and _is_due(login):
        with contextlib.suppress(StateUnusable):
            logins().change(lambda entries: _refresh(entries, origin_of(server)))
        login = read_stored_login(server)
    return None if login is None else str(login["token"])


def asks_issuer(endpoint: Endpoint) -> bool:
    """Return whether `bearer_of` would call the issuer now, which takes time."""
    if endpoint.token is not None or endpoint.token_file or not endpoint.signs_in:
        return False
    login = read_stored_login(endpoint.named_by or endpoint.url)
    return login is not None and _is_due(login)


def _is_due(login: JsonMapping) -> bool:
    ends = float(login["expires_at"])
    return bool(login.get("refresh_token")) and ends - REFRESH_BEFORE_SECONDS < time.time()


def _refresh(entries: Entries, origin: str) -> Entries:
    """Return the logins, with a new token for `origin` unless another command has refreshed it."""
    login = entries.get(origin)
    if login is None or not _is_due(login):
        return entries
    form = {
        "grant_type": "refresh_token",
        "refresh_token": login["refresh_token"],
        "client_id": login["client_id"],
    }
    try:
        status, answer = ask_issuer(login["token_endpoint"], login["ca_file"], form)
        if status is None:
            return {**entries, origin: {**login, **entry_of(answer, login["audience"])}}
    except ConnectionFailed:
        return entries  # The issuer may answer the next time.
    except SignInFailed:
        pass
    return {**entries, origin: {**login, "refresh_token": ""}}


def ask_issuer(
    url: str, ca_file: str, form: Mapping[str, str] | None = None
) -> tuple[str | None, JsonObject]:
    """Send a request to an issuer; return its error code or None, and its answer.

    Args:
        url: The issuer's endpoint.
        ca_file: File of the authority that signed the issuer's certificate; empty: as the
            environment says.
        form: The form to post; None: send a GET request.

    Raises:
        ConnectionFailed: The issuer does not answer, or cannot answer now.
        SignInFailed: The issuer's answer is unexpected, or could be forged.
    """
    from requests import RequestException  # noqa: PLC0415  # Slow to import.

    from moorage_client.http_session import HttpSession  # noqa: PLC0415  # It imports requests, too.

    endpoint = Endpoint(url, None, ca_file)
    if not url.startswith("https://") and not (url.startswith("http://") and endpoint.is_here):
        raise SignInFailed(f"{url}: expected an issuer's URL that begins with https://")
    with HttpSession(endpoint) as session:
        try:
            given: JsonObject = {"timeout": ISSUER_SECONDS_MAX, "allow_redirects": False}
            headers = {"Accept": "application/json"}
            method = "GET" if form is None else "POST"
            response = session.request(method, url, data=form, headers=headers, **given)
            if response.status_code in _PASSING:
                raise IssuerSilent(url, f"answers {response.status_code}")
            answer = response.json()
        except ValueError as error:
            raise SignInFailed(f"{url} did not answer with JSON") from error
        except RequestException as error:
            failed = session.failure(error)
            lasting = isinstance(failed, CertificateRefused | ProxyFailed)
            raise (failed if lasting else IssuerSilent(url, failed.reason)) from error
    if not isinstance(answer, dict):
        raise SignInFailed(f"{url} did not answer with a JSON object")
    return (None if response.ok else str(answer.get("error", response.status_code))), answer


def entry_of(answer: JsonMapping, audience: str) -> JsonObject:
    """Return the stored part of an issuer's answer: the token for the server, and its expiry.

    Raises:
        SignInFailed: No token in the answer is for the server.
    """
    for name in ("access_token", "id_token"):
        token = answer.get(name)
        claims = _claims(token) if isinstance(token, str) else {}
        meant = claims.get("aud")
        if audience in (meant if isinstance(meant, list) else [meant]) and "exp" in claims:
            entry = {"token": token, "expires_at": float(claims["exp"])}
            refresh = answer.get("refresh_token")
            return {**entry, "refresh_token": refresh} if refresh else entry
    raise SignInFailed(f"the issuer gave no JWT whose `aud` is {audience!r}")


def _claims(token: str) -> JsonObject:
    """Return the claims of a JWT without verifying it; the server verifies it."""
    try:
        body = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except (ValueError, IndexError):
        return {}
    return claims if isinstance(claims, dict) else {}

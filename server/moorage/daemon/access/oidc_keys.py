"""The keys with which an issuer of OpenID Connect signs: fetched in the background, and cached.

If a token names an unknown key, the keys are fetched again, since the issuer may have rotated them.
All requests that wait share one fetch. Two fetches are at least `REFRESH_PAUSE_SECONDS` apart. If a
fetch for an unknown key found nothing new, no token causes another for `VAIN_PAUSE_SECONDS`.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Mapping
from typing import Final
from urllib.parse import urlsplit

import httpx
import jwt
import msgspec
import structlog

from moorage.protocol.origins import is_loopback
from moorage.records.json_values import JsonMapping, JsonObject

REFRESH_SECONDS: Final = 300.0
"""Seconds after which the keys are fetched again even if no token names an unknown key."""
REFRESH_PAUSE_SECONDS: Final = 2.0
"""Least seconds between two fetches, no matter how many tokens name unknown keys."""
VAIN_PAUSE_SECONDS: Final = 10.0
"""Seconds without a fetch for unknown keys after such a fetch found no change."""
FETCH_SECONDS_MAX: Final = 5.0
"""Seconds that one fetch of the discovery document and the keys may take."""
WAITERS_MAX: Final = 1_000
"""Maximum callers that wait for a fetch at one time; further callers are refused at once."""
DOCUMENT_BYTES_MAX: Final = 1 << 20
REASON_BYTES_MAX: Final = 200
"""Maximum bytes of an issuer's error that the log shows."""
KEYS_MAX: Final = 100
_DISCOVERY: Final = "/.well-known/openid-configuration"
_PUBLIC: Final = frozenset({"kty", "kid", "use", "alg", "n", "e", "crv", "x", "y"})
_RSA: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_CURVES: Final = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512"}
ALGORITHMS: Final = (*_RSA, *_CURVES.values(), "EdDSA")
"""Accepted algorithms, all with public keys: an algorithm with a shared secret would accept the
public key as the secret."""
_HTTP_ERRORS: Final = (httpx.HTTPError, httpx.InvalidURL)

log = structlog.get_logger("moored")

Keys = Mapping[str, Mapping[str, jwt.PyJWK]]
"""Keys by id, then by algorithm."""


class KeysUnavailableError(Exception):
    """The issuer's keys cannot be fetched; the text says why."""


class IssuerRefusesError(KeysUnavailableError):
    """The issuer refuses the browser's authorization code."""


class IssuerKeys:
    """The keys of one issuer.

    Args:
        issuer: The URL of the issuer, as its tokens name it.

    Attributes:
        by_id: The keys, as last fetched.
        changes: How many times the keys have changed.
        discovered: The issuer's discovery document.
        failing: Whether the last fetch failed.
    """

    def __init__(self, issuer: str) -> None:
        self.by_id: Keys = {}
        self.changes = 0
        self.discovered: JsonObject = {}
        self._issuer = issuer
        self._trusted = httpx.create_ssl_context()
        self._fetched: list[JsonObject] = []
        self._tried_at = -REFRESH_PAUSE_SECONDS
        self._refreshing: asyncio.Task[bool] | None = None
        self._waiters = 0
        self._vain_until = -math.inf
        self._lacked = set[int]()
        """Hashes of the keys that the last fetch in vain was to find."""
        self.failing = False

    async def follow(self) -> None:
        """Fetch the keys now and repeatedly, until cancelled."""
        try:
            while True:
                known = await self._refresh()
                await asyncio.sleep(REFRESH_SECONDS if known else REFRESH_PAUSE_SECONDS)
        finally:
            if self._refreshing is not None:
                self._refreshing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._refreshing

    async def refresh(self) -> bool:
        """Wait for the next fetch to end; return whether it succeeded."""
        if self._waiters >= WAITERS_MAX:
            return False
        self._waiters += 1
        try:
            return await self._refresh()
        finally:
            self._waiters -= 1

    def seek(self, key: tuple[str, str]) -> Awaitable[bool] | None:
        """Look for an unknown key at the issuer; None: the issuer lacked it a moment ago.

        The result of the awaitable: whether the issuer has answered a request.

        Args:
            key: Id and algorithm of the key.
        """
        if time.monotonic() >= self._vain_until:
            self._lacked.clear()
            return self._seek(key)
        return None if hash(key) in self._lacked else _unanswered()

    async def _seek(self, key: tuple[str, str]) -> bool:
        changes = self.changes
        if not await self.refresh():
            return False
        if self.changes == changes:
            self._lacked.add(hash(key))
            self._vain_until = time.monotonic() + VAIN_PAUSE_SECONDS
        return True

    async def _refresh(self) -> bool:
        if self._refreshing is None:
            self._refreshing = asyncio.ensure_future(self._pause_and_fetch())
        return await asyncio.shield(self._refreshing)

    async def _pause_and_fetch(self) -> bool:
        try:
            await asyncio.sleep(self._tried_at + REFRESH_PAUSE_SECONDS - time.monotonic())
            return await self._take()
        finally:
            self._tried_at = time.monotonic()
            self._refreshing = None

    async def fetch(self) -> list[JsonObject]:
        """Return the issuer's current keys without storing them.

        Raises:
            KeysUnavailableError: The keys cannot be fetched.
        """
        try:
            async with asyncio.timeout(FETCH_SECONDS_MAX):
                return await self._fetch()
        except (TimeoutError, httpx.TimeoutException) as error:
            raise KeysUnavailableError(
                f"{self._issuer} did not answer within {FETCH_SECONDS_MAX:g} s; check the issuer, "
                "and the network from here to it"
            ) from error
        except (OSError, ValueError, *_HTTP_ERRORS) as error:
            raise KeysUnavailableError(str(error) or type(error).__name__) from error

    async def _take(self) -> bool:
        try:
            rows = await self.fetch()
        except KeysUnavailableError as error:
            if not self.failing:  # One log line per fault, however long it lasts.
                log.error("oidc_keys_failed", issuer=self._issuer, reason=str(error))  # noqa: TRY400  # It has no more to say.
            self.failing = True
            return False
        self.failing = False
        if rows != self._fetched:
            self._fetched, self.by_id = rows, _readable(rows)
            self.changes += 1
            self._vain_until = -math.inf
            log.info("oidc_keys_changed", issuer=self._issuer, ids=sorted(self.by_id))
        return True

    async def _fetch(self) -> list[JsonObject]:
        async with self._client() as client:
            found = await _document(client, self._issuer.rstrip("/") + _DISCOVERY)
            if found.get("issuer") != self._issuer:
                raise KeysUnavailableError(
                    f"its discovery document is of the issuer {found.get('issuer')!r}; "
                    "set oidc_issuer to exactly this value"
                )
            place = found.get("jwks_uri")
            if not isinstance(place, str) or not is_safe(place):
                raise KeysUnavailableError(f"jwks_uri: expected a URL of https, got {place!r}")
            rows = (await _document(client, place)).get("keys")
        self.discovered = found
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise KeysUnavailableError(f"{place} has no `keys`")
        return rows[:KEYS_MAX]

    async def post(self, url: str, form: Mapping[str, str]) -> JsonObject:
        """Return the answer of the issuer's endpoint to a form.

        Raises:
            KeysUnavailableError: The issuer refuses, or does not answer in time.
        """
        if not is_safe(url):
            raise KeysUnavailableError(f"{url}: expected a URL of https")
        try:
            async with asyncio.timeout(FETCH_SECONDS_MAX), self._client() as client:
                return await _document(client, url, form)
        except TimeoutError as error:
            raise KeysUnavailableError(f"{url} did not answer in time") from error
        except (OSError, ValueError, *_HTTP_ERRORS) as error:
            raise KeysUnavailableError(f"{url}: {str(error) or type(error).__name__}") from error

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            follow_redirects=False,
            timeout=FETCH_SECONDS_MAX,
            verify=self._trusted,
            trust_env=False,  # Neither proxies nor a .netrc that is not configured for this.
        )


async def _unanswered() -> bool:
    return False


def is_safe(url: str) -> bool:
    """Return whether a URL's traffic is safe from others: https, or to this machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))


async def _document(
    client: httpx.AsyncClient, url: str, form: Mapping[str, str] | None = None
) -> JsonObject:
    content, headers = bytearray(), {"accept": "application/json"}
    method = "GET" if form is None else "POST"
    async with client.stream(method, url, data=form, headers=headers) as response:
        async for part in response.aiter_bytes():
            content += part
            if len(content) > DOCUMENT_BYTES_MAX:
                raise KeysUnavailableError(
                    f"{url} answers with more than {DOCUMENT_BYTES_MAX} bytes"
                )
    if response.status_code != httpx.codes.OK:
        said = content[:REASON_BYTES_MAX].decode(errors="replace")
        refuses = form is not None and response.is_client_error
        kind = IssuerRefusesError if refuses else KeysUnavailableError
        raise kind(f"{url} answers {response.status_code}{': ' if said else ''}{said}")
    try:
        return msgspec.json.decode(content, type=JsonObject)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KeysUnavailableError(f"{url} did not answer with a JSON object") from error


def _readable(rows: list[JsonObject]) -> Keys:
    """Return the keys that can verify tokens; keys of unknown kinds are left out."""
    found: dict[str, dict[str, jwt.PyJWK]] = {}
    for row in rows:
        public = {name: value for name, value in row.items() if name in _PUBLIC}
        for algorithm in _algorithms(public):
            with contextlib.suppress(jwt.PyJWTError, ValueError, TypeError):
                key = jwt.PyJWK(public, algorithm)
                found.setdefault(str(public.get("kid", "")), {})[algorithm] = key
    return found


def _algorithms(row: JsonMapping) -> tuple[str, ...]:
    """Return the algorithms for a key of this kind; the key's own `alg` restricts them."""
    if row.get("use", "sig") != "sig":
        return ()
    of_kind: dict[str, tuple[str, ...]] = {
        "RSA": _RSA,
        "EC": (_CURVES.get(str(row.get("crv")), ""),),
        "OKP": ("EdDSA",),
    }
    fit = of_kind.get(str(row.get("kty")), ())
    return tuple(each for each in fit if each and row.get("alg", each) == each)

"""Finds the callers who sign in with OpenID Connect, and their roles, by the issuer's tokens.

The token is a JWT, verified here with the issuer's public keys: no request asks the issuer.
"""

import math
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Final

import jwt
import structlog

from moorage.daemon.access.lease_tokens import digest
from moorage.daemon.access.oidc_keys import ALGORITHMS, IssuerKeys
from moorage.model import Tenant
from moorage.records.json_values import JsonMapping, JsonValue
from moorage.records.rights import RESERVED_TENANTS, Caller, Role, is_tenant_name

SKEW_SECONDS: Final = 60.0
"""Seconds by which the issuer's clock may differ from this server's clock."""
VERIFIED_MAX: Final = 20_000
"""Maximum tokens whose callers are remembered; a forgotten token is verified again at its next
use."""
REFUSED_MAX: Final = 1_000
"""Maximum refused tokens whose reason is remembered until the audit log notes it."""
_EXPIRED: Final = "the issuer's token has expired"
TOKEN_CHARS_MAX: Final = 16_384
NAME_CHARS_MAX: Final = 200
REASON_CHARS_MAX: Final = 200
SUBJECT_CHARS_MAX: Final = 255
"""Greatest length of a subject (OpenID Connect Core, 2)."""
_TYPES: Final = frozenset({"jwt", "at+jwt", "application/jwt", "application/at+jwt"})
"""Accepted types of a JWT; other types, such as `logout+jwt`, do not identify callers."""
_ROLES: Final = (Role.METRICS, *(each for each in Role if each is not Role.METRICS))
"""Roles, the highest last."""
_UNREADABLE: Final = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)

log = structlog.get_logger("moored")


@dataclass(frozen=True, slots=True)
class ClaimSettings:
    """The claims that a token must have, and those that name its holder.

    Args:
        issuer: The `iss` of accepted tokens.
        audience: The text that the `aud` of accepted tokens contains.
        tenant: Name of the claim with the tenant; `a.b` may also mean `b` in the object `a`.
        role: Name of the claim with a role, or with a list of roles, of which the highest counts;
            dots mean the same as in `tenant`.
        roles: Role for each value of that claim; empty: the values are this server's role names.
    """

    issuer: str
    audience: str
    tenant: str
    role: str
    roles: Mapping[str, Role]


class OidcTokens:
    """Finds the caller of an issuer's token."""

    def __init__(self, claims: ClaimSettings, keys: IssuerKeys) -> None:
        self._claims = claims
        self._keys = keys
        self._roles = claims.roles or {each.value: each for each in Role}
        self._verified: dict[str, tuple[Caller, float]] = {}
        """Caller and expiry of each verified token, by the token's digest."""
        self._refused: dict[str, str] = {}
        """Why each of the last tokens was refused, by the token's digest."""
        self._of_changes = 0
        self._have_ended = False
        """Whether the keys have changed, so that tokens accepted earlier may be void."""
        self._ends: set[int] = set()
        """Expiry times of accepted tokens, in seconds."""

    @property
    def failing(self) -> bool:
        """Whether the last fetch of the issuer's keys failed."""
        return self._keys.failing

    def caller(self, bearer: str) -> Caller | None:
        """Return the caller of a token; None if it is not valid, or its key is not known."""
        self._forget_withdrawn()
        shown = digest(bearer)
        caller, expires_at = self._verified.get(shown, (None, 0.0))
        if caller is None:
            caller, expires_at = self._verify(bearer, shown)
            if caller is None:
                return None
            if len(self._verified) >= VERIFIED_MAX:
                del self._verified[next(iter(self._verified))]
            self._verified[shown] = caller, expires_at
            self._ends.add(math.ceil(expires_at))
        if time.time() < expires_at:
            return caller
        self._refuse(shown, _EXPIRED)
        return None

    def why_refused(self, bearer: str) -> str:
        """Return why a token was refused since the last call; empty: it is no issuer's token."""
        return self._refused.pop(digest(bearer), "")

    def expires_at(self, bearer: str) -> float | None:
        """Return when an accepted token expires; None for other tokens."""
        return None if (found := self._verified.get(digest(bearer))) is None else found[1]

    def pending(self, bearer: str) -> Awaitable[bool] | None:
        """Return an awaitable if a token names an unknown key; else None.

        Its result: whether the keys could be fetched now.
        """
        self._forget_withdrawn()
        if digest(bearer) in self._verified:
            return None
        header = _header(bearer)
        if header is None or not self._is_ours(bearer) or self._find_key(header) is not None:
            return None
        return self._keys.seek((str(header.get("kid")), str(header.get("alg"))))

    def ended(self) -> bool:
        """Return whether accepted tokens have expired since the last call."""
        now = time.time()
        over = {each for each in self._ends if each <= now}
        self._ends -= over
        if over:
            live = self._verified.items()
            self._verified = {key: each for key, each in live if now < each[1]}
        self._forget_withdrawn()
        ended, self._have_ended = self._have_ended or bool(over), False
        return ended

    def _forget_withdrawn(self) -> None:
        """Forget all verified tokens after the keys changed."""
        if self._of_changes != self._keys.changes:
            self._of_changes = self._keys.changes
            self._have_ended |= bool(self._verified)
            self._verified.clear()

    def _is_ours(self, bearer: str) -> bool:
        """Return whether a token, not verified yet, names the issuer and has not expired."""
        try:
            claims = jwt.decode(bearer, options={"verify_signature": False})
            lasts = float(claims["exp"]) + SKEW_SECONDS > time.time()
        except (*_UNREADABLE, KeyError):
            return False
        return lasts and claims.get("iss") == self._claims.issuer

    def _find_key(self, header: JsonMapping) -> jwt.PyJWK | None:
        """Return the key that a header names; if it names none, the only known key."""
        known, algorithm = self._keys.by_id, str(header.get("alg"))
        name = header.get("kid")
        if name is None and len(known) == 1:
            name = next(iter(known))
        return known.get(str(name), {}).get(algorithm)

    def _refuse(self, shown: str, reason: str, *, warns: bool = False, **more: str) -> None:
        """Remember and log why a token was refused: once, although a request asks several times."""
        if self._refused.get(shown) == reason:
            return
        if len(self._refused) >= REFUSED_MAX:
            del self._refused[next(iter(self._refused))]
        self._refused[shown] = reason
        (log.warning if warns else log.debug)("oidc_token_refused", reason=reason, **more)

    def _verify(self, bearer: str, shown: str) -> tuple[Caller | None, float]:
        """Return the caller of a token and when the token ends.

        Args:
            bearer: The token.
            shown: The token's digest.
        """
        header = _header(bearer)
        if header is None:
            return None, 0.0
        key = self._find_key(header)
        if key is None:
            self._refuse(shown, "the issuer has no key of the token's id and algorithm")
            return None, 0.0
        try:
            claims = jwt.decode(
                bearer,
                key,
                algorithms=[key.algorithm_name],
                audience=self._claims.audience,
                issuer=self._claims.issuer,
                leeway=SKEW_SECONDS,
                options={
                    "require": ["exp", "iss", "aud", "sub"],
                    "enforce_minimum_key_length": True,
                },
            )
            expires_at = float(claims["exp"]) + SKEW_SECONDS
        except jwt.InvalidAudienceError as error:  # The issuer signed it: tell the operator.
            wanted = f"{error}: oidc_audience is {self._claims.audience}"
            self._refuse(shown, wanted, warns=True)
            return None, 0.0
        except jwt.ExpiredSignatureError:
            self._refuse(shown, _EXPIRED)
            return None, 0.0
        except _UNREADABLE as error:
            self._refuse(shown, str(error)[:REASON_CHARS_MAX])
            return None, 0.0
        caller, reason = self._read(claims)
        if caller is None:  # The token is valid: tell the operator why.
            subject = claims["sub"][:NAME_CHARS_MAX]
            self._refuse(shown, reason, warns=True, subject=subject)
        return caller, expires_at

    def _read(self, claims: JsonMapping) -> tuple[Caller | None, str]:
        """Return the caller that the claims describe, or the reason why they describe no caller."""
        tenant, role = (_claim(claims, each) for each in (self._claims.tenant, self._claims.role))
        if isinstance(tenant, str) and tenant in RESERVED_TENANTS:
            return None, f"the claim {self._claims.tenant} is {tenant}, the server's own name"
        if not isinstance(tenant, str) or not is_tenant_name(tenant):
            return None, f"the claim {self._claims.tenant} names no tenant"
        given = role if isinstance(role, list) else [role]
        roles = [
            self._roles[each] for each in given if isinstance(each, str) and each in self._roles
        ]
        if not roles:
            return None, f"the claim {self._claims.role} has no value for a role"
        highest = max(roles, key=_ROLES.index)
        subject = str(claims["sub"])
        if not subject.isprintable() or not 0 < len(subject) <= SUBJECT_CHARS_MAX:
            return None, f"the claim sub is not a name of at most {SUBJECT_CHARS_MAX} characters"
        return Caller(Tenant(tenant), highest, f"oidc:{subject}"), ""


def _claim(claims: JsonMapping, name: str) -> JsonValue:
    """Return a claim by its name, else by the name as a dotted path; None: there is no claim."""
    if name in claims:
        return claims[name]
    found: JsonValue = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _header(bearer: str) -> JsonMapping | None:
    """Return the JWT header of a bearer text; None: the text cannot be an issuer's token."""
    if bearer.count(".") != 2 or len(bearer) > TOKEN_CHARS_MAX:  # noqa: PLR2004  # RFC 7515, 3.1.
        return None
    try:
        header = jwt.get_unverified_header(bearer)
    except _UNREADABLE:
        return None
    kind = header.get("typ", "jwt")
    fits = isinstance(kind, str) and kind.lower() in _TYPES
    return header if fits and header.get("alg") in ALGORITHMS else None

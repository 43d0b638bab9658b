"""Tests of tokens of an OpenID Connect issuer: their tenants and roles, and refused tokens."""

import asyncio
import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jwt
import pytest
import structlog.testing
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from moorage.daemon.access import oidc_keys
from moorage.daemon.access.lease_tokens import digest
from moorage.daemon.access.oidc import SKEW_SECONDS, ClaimSettings, OidcTokens
from moorage.daemon.access.oidc_keys import IssuerKeys
from moorage.daemon.access.oidc_sign_in import BrowserSignIn
from moorage.daemon.access.tokens import Tokens
from moorage.records.rights import Caller, Role
from tests.sites import Answer, Site

RSA_KEYS = [rsa.generate_private_key(65537, 2048) for _ in range(2)]


def public_row(key: Any, kid: str, **more: Any) -> dict[str, Any]:
    """Return a key as an issuer publishes it."""
    kinds = {
        rsa.RSAPublicKey: jwt.algorithms.RSAAlgorithm,
        ec.EllipticCurvePublicKey: jwt.algorithms.ECAlgorithm,
        ed25519.Ed25519PublicKey: jwt.algorithms.OKPAlgorithm,
    }
    public = key.public_key()
    to_jwk = next(each.to_jwk for kind, each in kinds.items() if isinstance(public, kind))
    return {**to_jwk(public, as_dict=True), "kid": kid, "use": "sig", **more}


class Issuer(Site):
    """An issuer on loopback that serves a discovery document and keys over HTTP."""

    def __init__(self) -> None:
        self.rows: list[Any] = [public_row(RSA_KEYS[0], "one")]
        self.fetches = 0
        self.broken = False
        self.hangs, self.go_on = threading.Event(), threading.Event()
        self.more: dict[str, Any] = {}
        super().__init__()

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> Answer:
        keys = request.path == "/jwks"
        self.fetches += keys
        if self.hangs.is_set():
            self.go_on.wait(30)
        named = {"issuer": self.url, "jwks_uri": f"{self.url}/jwks"}
        return 500 if self.broken else 200, {"keys": self.rows} if keys else named | self.more

    def token(
        self, key: Any = RSA_KEYS[0], alg: str = "RS256", kid: str | None = "one", **claims: Any
    ) -> str:
        """Return a token of the issuer without the claims that are None."""
        header = {} if kid is None else {"kid": kid}
        return jwt.encode(self.claims(**claims), key, alg, header)

    def claims(self, **more: Any) -> dict[str, Any]:
        given = {
            "iss": self.url,
            "aud": "moorage",
            "sub": "u1",
            "exp": time.time() + 300,
            "moorage_tenant": "research",
            "moorage_role": "client",
            **more,
        }
        return {name: value for name, value in given.items() if value is not None}


@pytest.fixture
def issuer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Issuer]:
    monkeypatch.setattr(oidc_keys, "REFRESH_PAUSE_SECONDS", 0.05)
    with Issuer() as issuer:
        yield issuer


def verifier(issuer: Issuer, roles: dict[str, Role] | None = None, **more: str) -> OidcTokens:
    names = {"tenant": "moorage_tenant", "role": "moorage_role", **more}
    claims = ClaimSettings(issuer.url, "moorage", names["tenant"], names["role"], roles or {})
    return OidcTokens(claims, IssuerKeys(issuer.url))


async def ask(tokens: OidcTokens, bearer: str) -> Caller | None:
    """Return the caller that both ports find for a token."""
    waiting = tokens.pending(bearer)
    if waiting is not None:
        await waiting
    return tokens.caller(bearer)


def part(content: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()


async def test_the_claims_of_an_issuers_token_give_tenant_and_role(
    issuer: Issuer,
) -> None:
    caller = await ask(verifier(issuer), issuer.token())
    assert caller == Caller("research", Role.CLIENT, "oidc:u1")  # type: ignore[arg-type]  # A name.


KEYS = {
    "PS256": RSA_KEYS[0],
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "ES384": ec.generate_private_key(ec.SECP384R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}


@pytest.mark.parametrize("algorithm", KEYS)
@pytest.mark.parametrize("kid", ["two", None])
async def test_tokens_with_other_kinds_of_keys_verify_and_a_single_key_needs_no_id(
    issuer: Issuer, algorithm: str, kid: str | None
) -> None:
    key = KEYS[algorithm]
    issuer.rows = [public_row(key, "two")]
    assert await ask(verifier(issuer), issuer.token(key, algorithm, kid)) is not None


def forgeries(issuer: Issuer) -> dict[str, str]:
    """Return invalid tokens, by the name of their fault."""
    good = issuer.token()
    head, body, signature = good.split(".")
    pem = (
        RSA_KEYS[0]
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    public = part({"alg": "HS256", "typ": "JWT", "kid": "one"}) + "." + part(issuer.claims())
    mac = hmac.new(pem, public.encode(), hashlib.sha256).digest()
    admin = part(issuer.claims(moorage_role="admin"))
    now = time.time()
    return {
        "another key": issuer.token(RSA_KEYS[1]),
        "other claims": f"{head}.{admin}.{signature}",
        "cut signature": good[:-8],
        "no signature": f"{head}.{body}.",
        "alg none": part({"alg": "none", "typ": "JWT", "kid": "one"}) + f".{admin}.",
        "alg None": part({"alg": "None", "kid": "one"}) + f".{admin}.{signature}",
        "alg missing": part({"kid": "one"}) + f".{body}.{signature}",
        "alg list": part({"alg": ["RS256"], "kid": "one"}) + f".{body}.{signature}",
        "HS256 with the public key": f"{public}.{base64.urlsafe_b64encode(mac).decode()}",
        "HS256 with a secret": issuer.token("s" * 32, "HS256"),
        "another algorithm of the key's kind": f"{head}."
        + issuer.token(alg="PS256").partition(".")[2],
        "wrong audience": issuer.token(aud="another"),
        "no audience": issuer.token(aud=None),
        "longer audience": issuer.token(aud="moorage2"),
        "wrong issuer": issuer.token(iss="https://evil.example"),
        "issuer with a slash": issuer.token(iss=f"{issuer.url}/"),
        "no issuer": issuer.token(iss=None),
        "expired": issuer.token(exp=now - SKEW_SECONDS - 5),
        "no end": issuer.token(exp=None),
        "not yet": issuer.token(nbf=now + SKEW_SECONDS + 60),
        "made in the future": issuer.token(iat=now + SKEW_SECONDS + 60),
        "no subject": issuer.token(sub=None),
        "empty subject": issuer.token(sub=""),
        "subject of two lines": issuer.token(sub="a\nb"),
        "no tenant": issuer.token(moorage_tenant=None),
        "tenant of all": issuer.token(moorage_tenant="*"),
        "tenant that is the server": issuer.token(moorage_tenant="(server)"),
        "tenant with the name of the audit log": issuer.token(moorage_tenant="moored"),
        "tenant with a space": issuer.token(moorage_tenant="a b"),
        "tenants": issuer.token(moorage_tenant=["a"]),
        "no role": issuer.token(moorage_role=None),
        "unknown role": issuer.token(moorage_role="king"),
        "role as an object": issuer.token(moorage_role={"client": True}),
        "a logout token": jwt.encode(
            issuer.claims(), RSA_KEYS[0], "RS256", {"kid": "one", "typ": "logout+jwt"}
        ),
        "huge end": f"{head}.{part(issuer.claims(exp=10**400))}.{signature}",
        "deep header": base64.urlsafe_b64encode(b"[" * 9_000).decode() + f".{body}.{signature}",
        "long": f"{head}.{'A' * 20_000}.{signature}",
        "dots": "..",
        "no JWT": "moor_abc",
        "no text": "ä.ö.ü",
    }


async def test_forged_expired_and_foreign_tokens_are_refused(issuer: Issuer) -> None:
    tokens = verifier(issuer)
    assert await ask(tokens, issuer.token()) is not None
    let_in = [why for why, each in forgeries(issuer).items() if await ask(tokens, each) is not None]
    assert let_in == []
    fresh = [why for why, each in forgeries(issuer).items() if await ask(verifier(issuer), each)]
    assert fresh == []


async def test_the_log_says_that_a_token_is_for_another_audience(issuer: Issuer) -> None:
    with structlog.testing.capture_logs() as logs:
        assert await ask(verifier(issuer), issuer.token(aud="another")) is None
        assert await ask(verifier(issuer), forgeries(issuer)["wrong audience"] + "x") is None
    found = [each for each in logs if each["event"] == "oidc_token_refused"]
    (refused,) = (each for each in found if each["log_level"] == "warning")
    assert refused["reason"].endswith("oidc_audience is moorage")


async def test_the_audit_log_has_the_reason_of_a_refusal_and_the_log_has_it_once_a_request(
    issuer: Issuer,
) -> None:
    found = verifier(issuer)
    tokens, now = Tokens({}, issuer=found), time.time()
    short = issuer.token(sub="u2")
    caller = await ask(found, short)
    assert caller is not None
    found._verified[digest(short)] = caller, now - 1
    refused = {
        issuer.token(exp=now - 300): "the issuer's token has expired",
        issuer.token(aud="another"): "Audience doesn't match: oidc_audience is moorage",
        issuer.token(iss="https://other"): "Invalid issuer",
        issuer.token(RSA_KEYS[1]): "Signature verification failed",
        issuer.token(
            RSA_KEYS[1], kid="no"
        ): "the issuer has no key of the token's id and algorithm",
        issuer.token(moorage_tenant=None): "the claim moorage_tenant names no tenant",
        "moor_abc": "the token is unknown",
        short: "the issuer's token has expired",
    }
    for _ in range(2):
        with structlog.testing.capture_logs() as logs:
            for bearer in refused:
                assert await ask(found, bearer) is tokens.caller(bearer) is None
            assert [tokens.why_refused(bearer) for bearer in refused] == list(refused.values())
        events = [each["reason"] for each in logs if each["event"] == "oidc_token_refused"]
        assert events == [each for each in refused.values() if "unknown" not in each]


async def test_a_key_that_names_its_algorithm_verifies_no_other_algorithm(issuer: Issuer) -> None:
    issuer.rows = [public_row(RSA_KEYS[0], "one", alg="RS256")]
    tokens = verifier(issuer)
    assert await ask(tokens, issuer.token(alg="PS256")) is None
    assert await ask(tokens, issuer.token()) is not None


async def test_tokens_are_accepted_if_the_clocks_differ_by_half_a_minute(issuer: Issuer) -> None:
    now, tokens = time.time(), verifier(issuer)
    for claims in ({"exp": now - 30}, {"nbf": now + 30}, {"iat": now + 30}):
        assert await ask(tokens, issuer.token(**claims)) is not None, claims


@pytest.mark.parametrize(
    ("claim", "role"),
    [
        ("gpu-admins", Role.ADMIN),
        (["staff", "gpu-users", "gpu-admins"], Role.ADMIN),
        (["scrapers", "gpu-users"], Role.CLIENT),
        (["scrapers"], Role.METRICS),
        ("admin", None),
        (["staff", 7, None], None),
    ],
)
async def test_of_several_mapped_roles_the_highest_counts(
    issuer: Issuer, claim: object, role: Role | None
) -> None:
    roles = {"gpu-users": Role.CLIENT, "gpu-admins": Role.ADMIN, "scrapers": Role.METRICS}
    caller = await ask(verifier(issuer, roles), issuer.token(moorage_role=claim))
    assert (caller and caller.role) == role


async def test_claims_may_lie_in_objects_and_have_names_with_dots(issuer: Issuer) -> None:
    tokens = verifier(issuer, tenant="https://a.example/tenant", role="realm_access.roles")
    more = {"https://a.example/tenant": "ann", "realm_access": {"roles": ["viewer"]}}
    caller = await ask(tokens, issuer.token(moorage_role="admin", **more))
    assert caller is not None
    assert (caller.tenant, caller.role) == ("ann", Role.VIEWER)


async def test_a_rotated_key_is_fetched_once_for_all_tokens_and_a_withdrawn_key_is_refused(
    issuer: Issuer,
) -> None:
    tokens, old, new = verifier(issuer), issuer.token(), issuer.token(RSA_KEYS[1], kid="two")
    assert await ask(tokens, old) is not None
    issuer.rows.append(public_row(RSA_KEYS[1], "two"))
    before = issuer.fetches
    assert all(await asyncio.gather(*(ask(tokens, new) for _ in range(20))))
    assert issuer.fetches == before + 1
    assert tokens.caller(old) is not None
    tokens.ended()
    issuer.rows = issuer.rows[1:]
    await tokens._keys.refresh()
    assert tokens.caller(old) is None
    assert tokens.ended()
    assert not tokens.ended()
    assert tokens.caller(new) is not None


async def test_unknown_keys_do_not_flood_the_issuer(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = verifier(issuer)
    await ask(tokens, issuer.token())
    monkeypatch.setattr(oidc_keys, "REFRESH_PAUSE_SECONDS", 3_600.0)
    monkeypatch.setattr(oidc_keys, "WAITERS_MAX", 5)
    waiting = [tokens.pending(issuer.token(kid=f"k{number}")) for number in range(9)]
    asking = [asyncio.ensure_future(each) for each in waiting if each is not None]
    done, pending = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    assert [each.result() for each in done] == [False] * 4
    assert (len(pending), issuer.fetches) == (5, 1)
    for each in (*pending, tokens._keys._refreshing):
        each.cancel()
    await asyncio.gather(*pending, tokens._keys._refreshing, return_exceptions=True)


async def test_a_fetch_in_vain_causes_no_other_for_a_while(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, unknown = verifier(issuer), issuer.token(RSA_KEYS[1], kid="two")
    await ask(tokens, issuer.token())
    assert await ask(tokens, unknown) is None
    fetched = issuer.fetches
    assert [tokens.pending(unknown) for _ in range(9)] == [None] * 9, "it is refused at once"
    others = [tokens.pending(issuer.token(kid=f"k{number}")) for number in range(9)]
    assert [await each for each in others if each is not None] == [False] * 9, "it may be valid"
    assert issuer.fetches == fetched

    issuer.rows.append(public_row(RSA_KEYS[1], "two"))
    monkeypatch.setattr(tokens._keys, "_vain_until", time.monotonic())
    assert await ask(tokens, unknown) is not None
    assert issuer.fetches == fetched + 1


async def test_keys_that_change_end_the_pause_after_a_fetch_in_vain(issuer: Issuer) -> None:
    tokens, unknown = verifier(issuer), issuer.token(RSA_KEYS[1], kid="two")
    await ask(tokens, issuer.token())
    assert await ask(tokens, unknown) is None
    issuer.rows.append(public_row(RSA_KEYS[1], "two"))
    await tokens._keys.refresh()
    assert await ask(tokens, unknown) is not None


async def test_foreign_tokens_cause_no_fetch_of_keys(issuer: Issuer) -> None:
    tokens = verifier(issuer)
    foreign = ("wrong issuer", "expired", "alg none", "HS256 with a secret", "no JWT", "huge end")
    assert [tokens.pending(forgeries(issuer)[each]) for each in foreign] == [None] * len(foreign)


@pytest.mark.parametrize(
    "trouble",
    [
        *("answers 500", "another issuer", "keys over http", "no keys", "not there"),
        *("hangs", "too long an answer"),
    ],
)
async def test_a_token_is_refused_until_its_key_can_be_fetched(
    issuer: Issuer, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc_keys, "FETCH_SECONDS_MAX", 1.0)
    tokens, token = verifier(issuer), issuer.token()
    issuer.broken = trouble == "answers 500"
    issuer.more = {
        "another issuer": {"issuer": "https://evil.example"},
        "keys over http": {"jwks_uri": "http://evil.example/jwks"},
        "no keys": {"jwks_uri": issuer.url},
        "too long an answer": {"x": "x" * oidc_keys.DOCUMENT_BYTES_MAX},
    }.get(trouble, {})
    if trouble == "not there":
        issuer.socket.close()
    if trouble == "hangs":
        issuer.hangs.set()
    waiting = tokens.pending(token)
    assert waiting is not None
    assert not tokens.failing
    assert await waiting is False
    assert tokens.failing
    assert tokens.caller(token) is None
    issuer.go_on.set()
    if trouble in {"answers 500", "hangs"}:
        issuer.broken = False
        issuer.hangs.clear()
        assert await ask(tokens, token) is not None
        assert not tokens.failing


async def test_an_issuer_that_hangs_is_named(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc_keys, "FETCH_SECONDS_MAX", 0.5)
    issuer.hangs.set()
    with pytest.raises(
        oidc_keys.KeysUnavailableError, match=r"did not answer within 0\.5 s; check"
    ):
        await verifier(issuer)._keys.fetch()
    issuer.go_on.set()


async def test_unusable_signing_keys_are_ignored(issuer: Issuer) -> None:
    odd = [
        {"kty": ["RSA"]},
        {"kty": "RSA", "kid": "one", "n": 5, "e": "AQAB"},
        {"kty": "oct", "kid": "one", "k": "c2VjcmV0"},
        {**public_row(RSA_KEYS[1], "one"), "use": "enc"},
        {"kty": "EC", "crv": "P-256", "kid": "one"},
    ]
    issuer.rows = [*odd, *issuer.rows]
    assert await ask(verifier(issuer), issuer.token()) is not None


async def test_with_an_issuer_every_caller_needs_a_token_that_has_not_expired(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    oidc = verifier(issuer)
    tokens = Tokens({"t-ann-secret": "ann"}, issuer=oidc)
    assert tokens.required
    assert tokens.caller(None) is None
    assert tokens.caller("t-ann-secret") is not None
    token = issuer.token(exp=time.time() - SKEW_SECONDS + 3)
    assert await ask(oidc, token) is not None
    assert tokens.expires_at(token) == pytest.approx(time.time() + 3, abs=3)
    assert not oidc.ended()
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 10)
    assert tokens.caller(token) is None
    assert oidc.ended()
    assert tokens.caller(token) is None


def signing_out(endpoint: object) -> BrowserSignIn:
    """Return the sign-in at an issuer whose discovery document has a given logout endpoint."""
    keys = IssuerKeys("https://login.example")
    keys.discovered = {"end_session_endpoint": endpoint}
    request = {"client_id": "console", "audience": "moorage", "scopes": "openid"}
    return BrowserSignIn(keys, {"issuer": "https://login.example", **request})


async def test_an_answer_that_names_another_issuer_is_refused() -> None:
    answer = {"state": "s", "error": "access_denied"}
    for issuer, reason in (
        ({}, "the issuer answers access_denied"),
        ({"iss": "https://login.example"}, "the issuer answers access_denied"),
        ({"iss": "https://login.example/"}, "the answer names another issuer"),
        ({"iss": ""}, "the answer names another issuer"),
    ):
        given = answer | issuer
        with structlog.testing.capture_logs() as logs:
            assert await signing_out(None).finish("s.verifier", given, "https://m.example") == {}
        assert [each["reason"] for each in logs] == [reason]


async def test_a_fragment_of_an_endpoint_is_no_part_of_the_address() -> None:
    for endpoint in ("https://login.example/end?a=b#c", "https://login.example/end#?c"):
        left = await signing_out(endpoint).leave("", "https://m.example")
        assert left is not None
        parts = urlsplit(left[0])
        assert (parts.path, parts.fragment) == ("/end", "")
        assert parse_qs(parts.query)["state"] == [left[1]]


@pytest.mark.parametrize(
    "endpoint", [None, 3, "javascript:alert()", "http://login.example/end", "//evil.example"]
)
async def test_a_logout_sends_the_browser_only_to_a_safe_address(endpoint: object) -> None:
    assert await signing_out(endpoint).leave("", "https://moorage.example/back") is None


@pytest.mark.parametrize(
    ("audience", "sent"), [("console", True), ("moorage", False), (["console", "moorage"], False)]
)
async def test_a_logout_sends_no_id_token_that_may_give_access(
    audience: object, sent: bool
) -> None:
    token = jwt.encode({"aud": audience, "sub": "ann"}, RSA_KEYS[0], "RS256")
    left = await signing_out("https://login.example/end?a=b").leave(token, "https://m.example/back")
    assert left is not None
    url, state = left
    query = parse_qs(urlsplit(url).query)
    assert query.pop("id_token_hint", []) == ([token] if sent else [])
    assert query == {
        "a": ["b"],
        "client_id": ["console"],
        "post_logout_redirect_uri": ["https://m.example/back"],
        "state": [state],
    }


async def test_a_logout_sends_no_id_token_that_cannot_be_read() -> None:
    left = await signing_out("https://login.example/end").leave("no.token", "https://m.example")
    assert left is not None
    assert "no.token" not in left[0]

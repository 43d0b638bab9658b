"""`credentials`: requests over both ports with credentials that must be refused.

The server knows tokens of its settings, named tokens and an OpenID Connect issuer. The credential
of each request is missing, bad, expired, forged, foreign or revoked.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from moorage.daemon.access.token_store import TokenStore
from moorage.lab.errors import CommandError
from moorage.protocol.credentials import BEARER_PREFIX, SUBPROTOCOL, TICKET_PREFIX
from moorage.records.rights import Role
from moorage.storage.opening import open_storage
from moorage.testing.daemon_process import Running, daemon

REQUESTS: Final = 10_000
AT_ONCE: Final = 16
AUDIENCE: Final = "moorage"
SETTINGS_TOKEN: Final = "a-long-secret-of-the-settings"  # noqa: S105  # Of this measurement.
SEED: Final = 42
ENDPOINTS: Final = (
    *("GET /policy", "GET /metrics", "GET /clusters/east", "GET /openapi.json", "GET /quotas"),
    *("POST /clusters", "POST /policy", "POST /allocate", "POST /websocket-ticket"),
    *("PUT /quotas/research", "DELETE /clusters/east", "DELETE /policy/first_fit:1.0-stable"),
)


class Shown(NamedTuple):
    """The credentials of one request.

    Args:
        kind: `missing`, `bad`, `expired`, `forged`, `foreign`, `revoked` or `valid`.
        headers: Headers of the request.
        query: Query of the URL.
    """

    kind: str
    headers: tuple[tuple[str, str], ...] = ()
    query: str = ""


def credentials(
    requests: int = REQUESTS, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Count accepted requests, and answers that differ from the documented ones; both must be 0.

    Args:
        requests: Number of requests, spread over both ports.
        progress: Called with a line for each step.

    Raises:
        CommandError: A valid credential is refused, so the other refusals prove nothing.
    """
    with tempfile.TemporaryDirectory(prefix="moorage-") as name, _issuer() as issuer:
        folder = Path(name)
        shown, valid = _credentials(issuer, folder)
        variables = {
            "MOORAGE_TOKENS": f"research:{SETTINGS_TOKEN}",
            "MOORAGE_OIDC_ISSUER": issuer.url,
            "MOORAGE_OIDC_AUDIENCE": AUDIENCE,
        }
        with daemon(folder / "data", environment=variables) as running:
            for each in valid:
                asyncio.run(_check_valid(running, each))
            chance = random.Random(SEED)
            order = [shown[n % len(shown)] for n in range(requests)]
            chance.shuffle(order)
            progress(f"{len(shown)} kinds of credentials, {requests} requests")
            return asyncio.run(_send_all(running, order, chance))


async def _check_valid(running: Running, shown: Shown) -> None:
    for door in (_http, _websocket):
        status, _ = await door(running, shown, "GET /policy")
        if status not in {101, 200}:
            raise CommandError(f"a valid credential is refused with {status}: {shown.headers}")


async def _send_all(
    running: Running, order: Sequence[Shown], chance: random.Random
) -> dict[str, Any]:
    sent: Counter[str] = Counter()
    let_in: list[str] = []
    undocumented: list[str] = []
    endpoints = [chance.choice(ENDPOINTS) for _ in order]

    async def send(number: int) -> None:
        shown, over_http = order[number], number % 2 == 0
        door = _http if over_http else _websocket
        status, answer = await door(running, shown, endpoints[number])
        sent[f"{shown.kind}_{'http' if over_http else 'websocket'}"] += 1
        text = f"{shown.kind} {shown.headers}: {answer[:300]!r}"
        if status != 401:  # noqa: PLR2004  # RFC 9110, 15.5.2.
            let_in.append(text)
        elif not (_is_documented if over_http else _is_documented_handshake)(answer):
            undocumented.append(text)

    async def work(numbers: Iterator[int]) -> None:
        for number in numbers:
            await send(number)

    began, numbers = time.perf_counter(), iter(range(len(order)))
    await asyncio.gather(*(work(numbers) for _ in range(AT_ONCE)))
    return {
        "requests": sum(sent.values()),
        **{f"requests_{kind}": count for kind, count in sorted(sent.items())},
        "let_in": len(let_in),
        "undocumented_answers": len(undocumented),
        "examples": [*let_in, *undocumented][:5],
        "per_second": len(order) / (time.perf_counter() - began),
    }


def _is_documented(answer: bytes) -> bool:
    """Return whether an HTTP answer is a documented refusal with the code `unauthorized`."""
    head, _, body = answer.partition(b"\r\n\r\n")
    said = json.loads(body)
    about = said["details"] if isinstance(said["error"], str) else said["error"]
    asks = b"www-authenticate: bearer" in head.lower()
    return asks and (said["success"], about["code"]) == (False, "unauthorized")


def _is_documented_handshake(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    return b"www-authenticate: bearer" in head.lower() and b"Send a valid token" in body


async def _http(running: Running, shown: Shown, endpoint: str) -> tuple[int, bytes]:
    method, _, path = endpoint.partition(" ")
    body = b"" if method in {"GET", "DELETE"} else b"{}"
    more = (("Content-Type", "application/json"), ("Content-Length", str(len(body))))
    return await _exchange(running.http, method, path, shown, more, body)


async def _websocket(running: Running, shown: Shown, _: str) -> tuple[int, bytes]:
    more = (
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", base64.b64encode(b"0123456789abcdef").decode()),
    )
    return await _exchange(running.ws, "GET", "/", shown, more, b"")


async def _exchange(
    url: str, method: str, path: str, shown: Shown, more: Sequence[tuple[str, str]], body: bytes
) -> tuple[int, bytes]:
    """Send an HTTP request; return the status and the answer, of a WebSocket only the head."""
    split = urlsplit(url)
    reader, writer = await asyncio.open_connection(split.hostname, split.port)
    try:
        target = f"{path}?{shown.query}" if shown.query else path
        closing = "Upgrade" if any(name == "Upgrade" for name, _ in more) else "close"
        headers = [("Host", split.netloc), ("Connection", closing), *more, *shown.headers]
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            opened = status == HTTPStatus.SWITCHING_PROTOCOLS
            return status, head if opened else head + await reader.read()
    finally:
        writer.close()


def _credentials(issuer: "Issuer", folder: Path) -> tuple[list[Shown], list[Shown]]:
    """Return credentials that must be refused, and credentials that must be accepted."""
    (folder / "data").mkdir()
    (folder / "other").mkdir()
    here, elsewhere = (
        TokenStore(open_storage("", folder / each).tokens()) for each in ("data", "other")
    )
    now = time.time()
    named = here.create("valid", Role.ADMIN, "research", now, None)
    expired = here.create("expired", Role.ADMIN, "research", now - 9, now - 1)
    revoked = here.create("revoked", Role.ADMIN, "research", now, None)
    here.revoke("revoked", now)
    foreign = elsewhere.create("valid", Role.ADMIN, "research", now, None)
    rows = next(each for each in here.tokens().values() if each.name == "valid")
    here.close()
    elsewhere.close()
    good = issuer.token()
    kinds = {
        "bad": (
            *(
                "x",
                "null",
                "undefined",
                "Bearer",
                "*",
                "moor_",
                "a" * 4000,
                "é",
                "{}",
                "' OR 1=1 --",
            ),
            *(named[:-1], named + "x", named.swapcase(), named[::-1], f"{named},{named}"),
            *(SETTINGS_TOKEN[:-1], SETTINGS_TOKEN.upper(), f"research:{SETTINGS_TOKEN}"),
            *(rows.digest, "valid", "research", "..", "a.b.c", good.rpartition(".")[0]),
        ),
        "expired": (expired, issuer.token(exp=now - 3600)),
        "revoked": (revoked,),
        "forged": issuer.forged(),
        "foreign": (foreign, *issuer.foreign()),
    }
    shown = [
        way(kind, token)
        for kind, tokens in kinds.items()
        for token in tokens
        for way in (_bearer, _basic, _subprotocol)
    ]
    shown += [
        Shown(kind, (("authorization", f"bearer   {token}"),))
        for kind in ("expired", "revoked")
        for token in kinds[kind]
    ]
    return shown + _malformed_requests(named), [
        _bearer("valid", each) for each in (SETTINGS_TOKEN, named, good)
    ]


def _malformed_requests(named: str) -> list[Shown]:
    """Return requests without a token, or with a valid token in a place that the server ignores."""
    authorization = "Authorization"
    return [
        Shown("missing"),
        Shown("missing", ((authorization, ""),)),
        Shown("missing", ((authorization, "Bearer "),)),
        Shown("missing", ((authorization, "Basic"),)),
        Shown("missing", (("Cookie", f"moorage-console-8080={named}"),)),
        Shown("missing", (("X-Api-Key", named),)),
        Shown("missing", (("Proxy-Authorization", f"Bearer {named}"),)),
        Shown("missing", (("X-Forwarded-User", "research"),)),
        Shown("missing", (), f"token={named}&access_token={named}"),
        Shown("bad", ((authorization, f"Digest {named}"),)),
        Shown("bad", ((authorization, named),)),
        Shown("bad", ((authorization, f"Bearer {named}"), (authorization, "Bearer x"))),
        Shown("bad", ((authorization, "Bearer x"), (authorization, f"Bearer {named}"))),
        Shown("bad", ((authorization, f"Basic {named}"),)),
        Shown("bad", (("Sec-WebSocket-Protocol", f"{SUBPROTOCOL}, {BEARER_PREFIX}{named}!"),)),
        Shown("bad", (("Sec-WebSocket-Protocol", f"{SUBPROTOCOL}, {TICKET_PREFIX}{named}"),)),
    ]


def _bearer(kind: str, token: str) -> Shown:
    return Shown(kind, (("Authorization", f"Bearer {token}"),))


def _basic(kind: str, token: str) -> Shown:
    pair = base64.b64encode(f"admin:{token}".encode()).decode()
    return Shown(kind, (("Authorization", f"Basic {pair}"),))


def _subprotocol(kind: str, token: str) -> Shown:
    packed = base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")
    return Shown(kind, (("Sec-WebSocket-Protocol", f"{SUBPROTOCOL}, {BEARER_PREFIX}{packed}"),))


@dataclass(frozen=True, slots=True)
class Issuer:
    """Serves as an issuer of OpenID Connect, and makes its tokens.

    Args:
        key: The key that signs the issuer's tokens.
        public: The public part of the key, as PEM.
    """

    url: str
    key: Any
    public: bytes

    def token(self, *, key: Any = None, alg: str = "RS256", typ: str = "JWT", **claims: Any) -> str:
        """Return a valid token with the given fields replaced."""
        import jwt  # noqa: PLC0415  # An extra.

        said = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "u1",
            "exp": time.time() + 3600,
            "moorage_tenant": "research",
            "moorage_role": "admin",
            **claims,
        }
        return jwt.encode(said, key or self.key, alg, {"kid": "one", "typ": typ})

    def forged(self) -> tuple[str, ...]:
        """Return tokens that name the issuer but have a false signature."""
        good = self.token(moorage_role="viewer")
        head, body, signature = good.split(".")
        raised = {**json.loads(_unpack(body)), "moorage_role": "admin"}
        plain = {"alg": "none", "typ": "JWT", "kid": "one"}
        keyed = {"alg": "HS256", "typ": "JWT", "kid": "one"}
        signed = f"{_pack(keyed)}.{_pack(raised)}"
        own_key = {"alg": "RS256", "typ": "JWT", "kid": "one", "jku": "http://127.0.0.1:1/jwks"}
        return (
            f"{head}.{_pack(raised)}.{signature}",
            f"{head}.{body}.",
            f"{head}.{body}.{signature[:-4]}AAAA",
            f"{_pack(plain)}.{_pack(raised)}.",
            f"{_pack(plain)}.{_pack(raised)}.{signature}",
            f"{signed}.{_hmac(self.public, signed)}",
            f"{_pack(own_key)}.{_pack(raised)}.{signature}",
            self.token(key=_new_key()),
        )

    def foreign(self) -> tuple[str, ...]:
        """Return tokens that the issuer signed for another server."""
        return (
            self.token(aud="another"),
            self.token(iss="http://issuer.example"),
            self.token(key=_new_key(), iss="http://issuer.example"),
            self.token(typ="logout+jwt"),
            self.token(nbf=time.time() + 3000),
            self.token(moorage_tenant=""),
            self.token(moorage_tenant="*"),
            self.token(moorage_role="king"),
        )


@contextmanager
def _issuer() -> Iterator[Issuer]:
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415  # An extra.
    from jwt.algorithms import RSAAlgorithm  # noqa: PLC0415  # An extra.

    key = _new_key()
    row = {**RSAAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": "one", "use": "sig"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = f"http://127.0.0.1:{server.server_port}"
            about = {"issuer": url, "jwks_uri": f"{url}/jwks"}
            body = json.dumps({"keys": [row]} if self.path == "/jwks" else about).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Write no log line for a request."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    try:
        yield Issuer(f"http://127.0.0.1:{server.server_port}", key, public)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import rsa  # noqa: PLC0415  # An extra.

    return rsa.generate_private_key(65537, 2048)


def _pack(part: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")


def _unpack(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def _hmac(key: bytes, text: str) -> str:
    made = hmac.digest(key, text.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(made).decode().rstrip("=")

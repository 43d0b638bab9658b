"""The endpoints of the web console: its files, logins and playground.

All clients may read the files, which are public in the wheel. Besides the files of this server, the
content security policy only allows the import map, by its hash.
"""

import asyncio
import hashlib
import hmac
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from moorage.model import Code
from moorage.protocol.credentials import CONSOLE_COOKIE, console_cookies
from moorage.protocol.faults import ServiceError
from moorage.protocol.logins import Login
from moorage.records.rights import Right
from moorage.web.bodies import (
    TENANT,
    UNCHANGED,
    BodyReader,
    caller_of,
    read_as,
    read_document,
    success,
)
from moorage.web.console_types import (
    ConsoleLogin,
    ConsoleSession,
    PlaygroundBacktest,
    PlaygroundOutcome,
    PlaygroundRun,
)
from moorage.web.router import HttpRouter
from moorage.web.schemas import operation
from moorage.web.services import Console
from moorage.web.sign_in import wait_for_issuer

CSRF_HEADER: Final = "x-console-token"
"""Header that every change needs; a page of another site cannot read or set it."""
LOGIN_BYTES_MAX: Final = 8 * 1024
"""Maximum bytes of the body of a login; small, since its sender is not authenticated yet."""
FAILED_LOGIN_SECONDS: Final = 0.5
"""Seconds after which a failed login is answered."""
FAILING_LOGINS_MAX: Final = 8
"""Maximum failed logins of an address that wait for their answer; further ones are answered 429."""
_UNCHANGING: Final = frozenset({"GET", "HEAD"})
_INDEX: Final = "index.html"
_TYPES: Final = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "json": "application/json",
    "mjs": "text/javascript",
    "png": "image/png",
    "svg": "image/svg+xml",
}
_TEXT: Final = "text/plain"
_IMPORT_MAP: Final = re.compile(rb'<script type="importmap">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    kind: str
    tag: str


def login_of(console: Console | None, request: Request) -> Login | None:
    """Return the login of a request's cookie; None without a valid cookie.

    Raises:
        ServiceError: `forbidden`: the request would change something, but has no proof that a page
            of this server sent it.
    """
    if console is None:
        return None
    login = console.logins.find(console_cookies(request.headers.getlist("cookie")))
    if login is None or request.method in _UNCHANGING:
        return login
    given = request.headers.get(CSRF_HEADER, "").encode()
    if "origin" not in request.headers or not hmac.compare_digest(given, login.csrf.encode()):
        raise ServiceError(
            Code.FORBIDDEN,
            "a cookie alone permits no change: it also needs `Origin`, which browsers send, and "
            "`X-Console-Token` with the value from GET /console/session; programs send a token",
            field=CSRF_HEADER,
            expected="`csrf` of GET /console/session",
        )
    return login


def needed_login_of(console: Console, request: Request) -> Login | None:
    """Return the login of a request's cookie; None: no valid cookie, and no login is needed.

    Raises:
        ServiceError: `unauthorized`: there is no valid cookie; `forbidden`: as in `login_of`.
    """
    login = login_of(console, request)
    if login is None and console.needs_login():
        raise ServiceError(
            Code.UNAUTHORIZED,
            "log in with a token",
            field="cookie",
            expected="a login",
            details={"sign_in": True} if console.sign_in is not None else {},
        )
    return login


def console_routes(console: Console, bodies: BodyReader) -> HttpRouter:
    """Return the router of the web console's endpoints."""
    router = HttpRouter("console")
    _sessions(router, console, bodies)
    known = dict(_walk(files("moorage.console").joinpath("static")))
    index = known.get(_INDEX)
    maps = _IMPORT_MAP.findall(index.content) if index else []
    hashes = "".join(f" 'sha256-{_digest(each)}'" for each in maps)

    async def static(name: str, request: Request) -> Response:
        """Return a file of the console."""
        if name not in known:
            raise ServiceError(Code.NOT_FOUND, f"the console has no file {name!r}")
        return _answer(request, known[name])

    async def page(request: Request) -> Response:
        """Return the console's HTML page; its address names the view."""
        if index is None:
            raise ServiceError(Code.NOT_FOUND, "this build has no console")
        response = _answer(request, index)
        socket = f"{_host(request)}:{console.websocket_port()}"
        response.headers["content-security-policy"] = (
            f"default-src 'self'; script-src 'self'{hashes}; connect-src 'self' ws://{socket} "
            f"wss://{socket}; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
            "object-src 'none'"
        )
        return response

    router.add("/console/static/{name:path}", static, ["GET"])
    router.add("/console", page, ["GET"])
    router.add("/console/{rest:path}", page, ["GET"])
    return router


def playground_routes(console: Console, bodies: BodyReader) -> HttpRouter:
    """Return the router of the playground's endpoints, which need a login or a token."""
    router = HttpRouter("console")

    @router.post("/console/playground", "Try a policy", operation(PlaygroundOutcome, PlaygroundRun))
    async def run(request: Request) -> Response:
        """Run a policy in the jail, in a separate process; the server's state does not change."""
        body = await read_document(request, bodies)
        body.pop("trace", None)
        return success(await console.try_policy(body, caller_of(request)))

    @router.post(
        "/console/playground/backtest",
        "Backtest a policy",
        operation(PlaygroundOutcome, PlaygroundBacktest),
    )
    async def backtest(request: Request) -> Response:
        """Backtest a policy on a table of requests, in a separate process."""
        body = await read_document(request, bodies)
        if not body.get("trace"):
            raise ServiceError.wrong_field("trace", "a table (CSV) as text")
        return success(await console.try_policy(body, caller_of(request)))

    return router


def _sessions(router: HttpRouter, console: Console, bodies: BodyReader) -> None:
    failing: Counter[str] = Counter()

    @router.get("/console/session", "Who is logged in?", operation(ConsoleSession))
    async def session(request: Request) -> Response:
        """Return the page's tenant and role, and the WebSocket's address; 401 without a login."""
        login = needed_login_of(console, request)
        return success(_describe(request, console, login))

    @router.post("/console/session", "Log in", operation(ConsoleSession, ConsoleLogin))
    async def log_in(request: Request) -> Response:
        """Exchange a token for a cookie of this browser, which lasts for some hours."""
        length = request.headers.get("content-length", "")
        if not length.isdigit() or int(length) > LOGIN_BYTES_MAX:
            raise ServiceError(
                Code.TOO_LARGE, "the body is too large", expected=f"at most {LOGIN_BYTES_MAX} bytes"
            )
        given = read_as(await read_document(request, bodies), ConsoleLogin)
        if not console.needs_login():
            setattr(request.state, UNCHANGED, True)
            return success(_describe(request, console, None))
        address = request.client.host if request.client is not None else ""
        cookie, login = await _enter(console, given.token, address, failing)
        setattr(request.state, TENANT, login.caller.tenant)  # For the log.
        response = success(_describe(request, console, login))
        secure = request.headers.get("origin", "").startswith("https:")
        give_cookie(request, response, cookie, secure=secure)
        return response


def give_cookie(request: Request, response: Response, cookie: str, *, secure: bool) -> None:
    """Set the cookie that logs a browser in."""
    name = _cookie_name(request)
    response.set_cookie(name, cookie, path="/", secure=secure, httponly=True, samesite="strict")


def take_cookie(request: Request, response: Response) -> None:
    """Delete the cookie that logs a browser in."""
    response.delete_cookie(_cookie_name(request), path="/", httponly=True, samesite="strict")


async def _enter(
    console: Console, token: str, address: str, failing: Counter[str]
) -> tuple[str, Login]:
    """Exchange a token for a cookie; delay the refusal of a wrong token.

    Args:
        console: The console, which has the logins.
        token: The given token.
        address: The caller's address.
        failing: The number of refused logins that wait for their answer, by address.

    Raises:
        ServiceError: `unauthorized`; `busy` if too many logins of the address failed just now.
    """
    if failing[address] >= FAILING_LOGINS_MAX:
        raise ServiceError(Code.BUSY, "logins from your address fail; try again in a moment")
    await wait_for_issuer(console.pending, token)
    entered = console.logins.enter(token)
    if entered is not None:
        return entered
    console.on_stranger(address, token)
    failing[address] += 1
    try:
        await asyncio.sleep(FAILED_LOGIN_SECONDS)
    finally:
        failing[address] -= 1
        if not failing[address]:
            del failing[address]
    raise ServiceError(Code.UNAUTHORIZED, "this is not a token of this server", field="token")


def _describe(request: Request, console: Console, login: Login | None) -> dict[str, object]:
    caller = console.local if login is None else login.caller
    return {
        "tenant": caller.tenant,
        "role": caller.role,
        "operator": caller.may(Right.READ_ALL),
        "rights": [right.label for right in Right if caller.may(right)],
        "login": console.needs_login(),
        "csrf": "" if login is None else login.csrf,
        "websocket": f"{console.websocket_scheme}://{_host(request)}:{console.websocket_port()}",
        "version": version("moorage"),
        "expires_at": None if login is None else login.expires_at,
    }


def _cookie_name(request: Request) -> str:
    return f"{CONSOLE_COOKIE}{(request.scope['server'] or ('', 0))[1]}"


def _host(request: Request) -> str:
    """Return the host name in the page's address, without a port."""
    return re.sub(r":\d*$", "", request.headers.get("host", "localhost"))


def _walk(folder: Traversable, above: str = "") -> Iterator[tuple[str, _File]]:
    for each in folder.iterdir() if folder.is_dir() else ():
        if each.is_dir():
            yield from _walk(each, f"{above}{each.name}/")
        else:
            content = each.read_bytes()
            kind = _TYPES.get(each.name.rpartition(".")[2], _TEXT)
            yield f"{above}{each.name}", _File(content, kind, f'"{_digest(content)}"')


def _digest(content: bytes) -> str:
    return b64encode(hashlib.sha256(content).digest()).decode()


def _answer(request: Request, file: _File) -> Response:
    """Return a file; browsers cache it, but check each time whether it has changed."""
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
        "etag": file.tag,
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    if file.tag in map(str.strip, request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(file.content, headers=headers, media_type=file.kind)

"""The HTTP endpoints of a served slot pool: the documented ones, `/renew` and `/state`.

    GET  /types         {"types"}
    POST /count         a type: {"count"}
    POST /accommodates  a request, or {"request"}: {"ok", "reason"}
    POST /checkout      a request, or {"request", "pid", "ttl_seconds"}:
                        {"resources", "transaction", "expires_at"}; 404: too few are free
    POST /checkin       resources, or {"transaction"}: {"ok"}
    POST /renew         {"transaction", "ttl_seconds"}: {"transaction", "expires_at"}
    GET  /state         what is free, all that there is, who holds what

A failure is `{"error", "message"}`; `error` is the name of an exception of `moorage.slots`, or
`Busy`, or `Forbidden` for a request of a web page.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from moorage.pool_server.holdings import TTL_SECONDS_MAX, Busy, Holdings
from moorage.protocol.origins import Origins
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.slots import EmptyResourcePoolError, InvalidRequest, ResourceUnavailable, SlotsError

BODY_BYTES_MAX: Final = 1_048_576
"""Maximum bytes in the body of a request."""


def create_app(holdings: Holdings, *, on_port: bool) -> ASGIApp:
    """Return the application that serves a pool.

    Args:
        holdings: The pool and its holders.
        on_port: Whether the address is a TCP port, which web browsers can reach, too.
    """
    endpoints = _Endpoints(holdings)
    routes = [
        _route("/types", endpoints.types, "GET"),
        _route("/state", endpoints.state, "GET"),
        _route("/count", endpoints.count),
        _route("/accommodates", endpoints.accommodates),
        _route("/checkout", endpoints.checkout),
        _route("/checkin", endpoints.checkin),
        _route("/renew", endpoints.renew),
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False  # Redirects would use the request's `Host`.
    return _without_pages(app) if on_port else app


def _without_pages(app: ASGIApp) -> ASGIApp:
    """Wrap the application so that it refuses requests of web pages: a pool is for programs."""
    origins = Origins()

    async def check_request(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        foreign = origins.refusal(scope["raw_path"].decode("latin-1"), request.headers.items())
        if foreign is None:
            await app(scope, receive, send)
        else:
            answer = JSONResponse({"error": "Forbidden", "message": foreign.reason}, 403)
            await answer(scope, receive, send)

    return check_request


class _Endpoints:
    """The endpoints: each takes a body and returns a document."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._pool = holdings.pool

    def types(self, _: JsonValue) -> JsonObject:
        return {"types": self._pool.types}

    def state(self, _: JsonValue) -> JsonObject:
        return {
            **self._pool.getstate(),
            "slots_per_resource_type": self._pool.slots_per_resource_type,
            "holdings": [each.document() for each in self._holdings],
        }

    def count(self, body: JsonValue) -> JsonObject:
        named = body.get("type") if isinstance(body, Mapping) else body
        if not isinstance(named, str):
            raise InvalidRequest(f"expected the name of a type, found {named!r}")
        return {"count": self._pool.count(named)}

    def accommodates(self, body: JsonValue) -> JsonObject:
        if isinstance(body, Mapping):
            _only(body, {"request"})
            body = body.get("request")
        outcome = self._pool.accommodates(body)
        return {"ok": outcome.ok, "reason": outcome.reason}

    def checkout(self, body: JsonValue) -> JsonObject:
        if not isinstance(body, Mapping):
            body = {"request": body}
        _only(body, {"request", "pid", "ttl_seconds"})
        pid, ttl = body.get("pid"), body.get("ttl_seconds")
        if pid is not None and (type(pid) is not int or pid <= 0):
            raise InvalidRequest(f"pid: expected the number of a process, found {pid!r}")
        holding = self._holdings.checkout(
            body.get("request"), pid, None if ttl is None else _seconds(ttl)
        )
        return {
            "resources": holding.allocation,
            "transaction": holding.transaction,
            "expires_at": holding.expires_at,
        }

    def checkin(self, body: JsonValue) -> JsonObject:
        if isinstance(body, Mapping) and "transaction" in body:
            _only(body, {"transaction", "resources"})
            self._holdings.checkin(str(body["transaction"]), body.get("resources"))
        else:
            self._holdings.checkin(None, body)
        return {"ok": True}

    def renew(self, body: JsonValue) -> JsonObject:
        if not isinstance(body, Mapping):
            raise InvalidRequest("expected an object with transaction and ttl_seconds")
        _only(body, {"transaction", "ttl_seconds"})
        seconds = _seconds(body.get("ttl_seconds"))
        holding = self._holdings.renew(str(body.get("transaction")), seconds)
        return {"transaction": holding.transaction, "expires_at": holding.expires_at}


def _only(body: JsonMapping, allowed: set[str]) -> None:
    if unknown := sorted(set(body) - allowed):
        raise InvalidRequest(
            f"unknown fields {', '.join(unknown)}; known are {', '.join(sorted(allowed))}"
        )


def _seconds(value: JsonValue) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= TTL_SECONDS_MAX:
        raise InvalidRequest(
            f"ttl_seconds: expected a number above 0, up to {TTL_SECONDS_MAX:.0f}: {value!r}"
        )
    return float(value)


def _route(path: str, answer: Callable[[JsonValue], JsonObject], method: str = "POST") -> Route:
    async def endpoint(request: Request) -> Response:
        try:
            body = None if method == "GET" else await _body(request)
            return JSONResponse(answer(body))
        except SlotsError as error:
            return _failure(error, _status(error))
        except Busy as error:
            return _failure(error, 503)

    handler: Callable[[Request], Awaitable[Response]] = endpoint
    return Route(path, handler, methods=[method])


async def _body(request: Request) -> JsonValue:
    """Return the JSON of a request.

    Other content types are refused, since any web page can make a browser send them to a local
    port.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidRequest(f"Content-Type: expected application/json, found {kind!r}")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > BODY_BYTES_MAX:
            raise InvalidRequest(f"the body has more than {BODY_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(bytes(body))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error


def _status(error: SlotsError) -> int:
    match error:
        case ResourceUnavailable():
            return 404  # As documented.
        case EmptyResourcePoolError():
            return 409
        case _:  # Every other error is about the request.
            return 400


def _failure(error: Exception, status: int) -> Response:
    return JSONResponse({"error": type(error).__name__, "message": str(error)}, status)

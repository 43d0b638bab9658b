"""Builds the HTTP application: authentication, failure bodies, health and service endpoints.

`web.server.WebServer` runs the application; its services come as `WebServices`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from msgspec import field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from moorage.model import Code
from moorage.protocol.credentials import SUBPROTOCOL, TICKET_PREFIX, token_of
from moorage.protocol.faults import ServiceError
from moorage.protocol.logins import Tickets
from moorage.protocol.on_behalf import ON_BEHALF_OF
from moorage.records.history import History
from moorage.web.bodies import (
    CALLER,
    CHECK,
    ENCODING,
    TENANT,
    BodyReader,
    CountedBodies,
    caller_of,
    failure,
    json_response,
    success,
)
from moorage.web.checks import Dated, HeadAsGet, is_read
from moorage.web.console import console_routes, login_of, playground_routes
from moorage.web.console_sign_in import console_sign_in_routes
from moorage.web.identity import identify, unknown_caller
from moorage.web.notes import Noted, remote_of
from moorage.web.rights import missing_right, right_of
from moorage.web.router import ROUTE, HttpRouter
from moorage.web.routes import service_routes
from moorage.web.schemas import HealthAnswer, ReadinessAnswer, WebType, operation, text_operation
from moorage.web.services import Console, StandbyServices, WebServices
from moorage.web.sign_in import sign_in_routes
from moorage.web.specifications import specification_routes

_WRONG_METHOD: Final = 405


MINUTES_MAX: Final = 24 * 60
STEP_MAX: Final = 60


def create_app(services: WebServices | StandbyServices) -> Starlette:
    """Return the HTTP application with all its endpoints."""
    standby = services if isinstance(services, StandbyServices) else None
    router = _few(services) if isinstance(services, StandbyServices) else _endpoints(services)

    async def refuse(request: Request, error: Exception) -> Response:
        """Return the response for a failure, also one of the framework, in the documented form."""
        if standby is not None and isinstance(error, HTTPException):  # The leader has the path.
            error = standby.refusal()
        if isinstance(error, HTTPException) and error.status_code == _WRONG_METHOD:
            return _wrong_method(router, request)
        return failure(_fault_of(error), request.url.path)

    middleware = [
        Middleware(HeadAsGet),
        Middleware(CountedBodies),
        Middleware(Noted, services.audit),
    ]
    if not isinstance(services, StandbyServices) and services.standby is not None:
        middleware.append(Middleware(Dated, services.standby))
    app = Starlette(
        routes=[each.route() for each in router.endpoints],
        middleware=middleware,
        exception_handlers=dict.fromkeys((ServiceError, HTTPException, Exception), refuse),
    )
    app.router.redirect_slashes = False  # A redirect would go to any host that the client named.
    setattr(app.state, ENCODING, asyncio.Lock())
    return app


def _endpoints(services: WebServices) -> HttpRouter:
    bodies, router, authenticate = BodyReader(), HttpRouter(), _authentication(services)
    router.include(_health_routes(services))
    router.include(sign_in_routes(services.sign_in))
    if services.console is not None:
        router.include(playground_routes(services.console, bodies), authenticate)
        router.include(console_sign_in_routes(services.console))
        router.include(console_routes(services.console, bodies))
    router.include(_about_routes(services), authenticate)
    router.include(history_routes(services), authenticate)
    router.include(ticket_routes(services.tickets, services.console), authenticate)
    router.include(specification_routes(router), authenticate)
    router.include(service_routes(services, bodies), authenticate)
    return router


def _few(services: StandbyServices) -> HttpRouter:
    """Return the endpoints of a standby server."""
    router = HttpRouter()
    router.include(_health_routes(services))
    router.include(_about_routes(services), _authentication(services))
    return router


def _authentication(
    services: WebServices | StandbyServices,
) -> Callable[[Request], Awaitable[None]]:
    reads = None if isinstance(services, StandbyServices) else services.standby

    async def note_stranger(request: Request) -> ServiceError:
        token, _ = token_of(request.headers.getlist("authorization"))
        why, client = services.why_refused(token), request.client
        services.audit.note_failed_login(client.host if client else "", "http", why)
        await services.audit.flush()
        return unknown_caller()

    async def check_again(request: Request) -> None:
        if await identify(services, request) != caller_of(request):
            raise await note_stranger(request)

    async def authenticate(request: Request) -> None:
        caller = await identify(services, request)
        if caller is None:
            raise await note_stranger(request)
        setattr(request.state, CALLER, caller)
        setattr(request.state, TENANT, caller.tenant)
        setattr(request.state, CHECK, partial(check_again, request))
        ON_BEHALF_OF.set(caller.tenant)
        right = right_of(request.method, request.scope[ROUTE])
        if not caller.may(right):
            what = f"{request.method} {request.scope[ROUTE]}"
            reason = caller.refusal(right)
            services.audit.note_refusal(caller, remote_of(request.scope), what, reason)
            await services.audit.flush()
            raise missing_right(caller, right)
        if reads is not None and request.scope[ROUTE] != "/metrics":
            no = reads.doubt() if is_read(request.method, request.scope[ROUTE]) else reads.refusal()
            if no is not None:
                raise no

    return authenticate


def _health_routes(services: WebServices | StandbyServices) -> HttpRouter:
    router = HttpRouter("health")

    @router.get("/healthz", "Is the process alive?", operation(HealthAnswer, bare=True))
    async def health() -> Response:
        """Answer 200 as long as the event loop runs."""
        return json_response({"status": "ok"})

    ready_or_not = operation(ReadinessAnswer, statuses=(200, 503), bare=True)

    @router.get("/readyz", "Can requests be served?", ready_or_not)
    async def readiness() -> Response:
        """Answer 200 or 503, with the state of each component."""
        ready, details = services.readiness()
        return json_response({"ready": ready, "details": details}, 200 if ready else 503)

    return router


def _about_routes(services: WebServices | StandbyServices) -> HttpRouter:
    router = HttpRouter("about")

    @router.get("/metrics", "The server's own metrics", text_operation("text/plain"))
    async def metrics(request: Request) -> Response:
        """Return the metrics in the Prometheus text format."""
        async with getattr(request.app.state, ENCODING):
            text = services.metrics_text()
            await asyncio.sleep(0)  # Other tasks run between two parts.
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def _wrong_method(router: HttpRouter, request: Request) -> Response:
    """Return the refusal of a wrong method for a path; the refusal names the right methods.

    The framework's own answer names only the methods of one route, but here each method is a route.
    """
    here = [each for each in router.described() if each.matches(request.url.path)]
    known = ", ".join(sorted({method for each in here for method in each.methods}))
    text = f"this path supports {known}; GET /openapi.json describes all paths"
    fault = ServiceError(
        Code.UNSUPPORTED, text, field="method", expected=known, status=_WRONG_METHOD
    )
    answer = failure(fault, request.url.path)
    answer.headers["allow"] = known  # RFC 9110, 15.5.6 requires it.
    return answer


def _fault_of(error: Exception) -> ServiceError:
    match error:
        case ServiceError():
            return error
        case HTTPException(status_code=404):
            return ServiceError(Code.NOT_FOUND, "no such path; GET /openapi.json lists all paths")
        case HTTPException(status_code=status, detail=detail):
            return ServiceError(Code.BAD_MESSAGE, str(detail), status=status)
        case _:  # Any exception may come.
            # Starlette raises the error again once the response is sent, so the operator sees all
            # of it.
            return ServiceError(
                Code.INTERNAL, "the server failed on this request; its log has the details"
            )


def history_routes(services: WebServices) -> HttpRouter:
    """Return the router of the endpoint `/history`."""
    router = HttpRouter("about")

    @router.get("/history", "The last day in numbers", operation(History))
    async def history(request: Request, minutes: int = MINUTES_MAX, step: int = 5) -> Response:
        """Return the current figures, and those of the last minutes in points of `step` minutes.

        The history covers at most a day, and continues over a restart of the server.
        """
        for name, given, most in (("minutes", minutes, MINUTES_MAX), ("step", step, STEP_MAX)):
            if not 1 <= given <= most:
                raise ServiceError.wrong_field(f"query.{name}", f"a whole number from 1 to {most}")
        return success(services.history(caller_of(request), minutes, step))

    return router


class SocketTicket(WebType):
    """A ticket, which opens one WebSocket until `expires_at`.

    `protocols`: the second argument for `new WebSocket(url, protocols)` in the page.
    """

    ticket: str
    protocols: list[str]
    expires_at: float = field(name="expires_at")


def ticket_routes(tickets: Tickets, console: Console | None) -> HttpRouter:
    """Return the router of the WebSocket ticket endpoint, which needs a token.

    Args:
        tickets: Issues tickets.
        console: The console, which has the logins; None: the console is off.
    """
    router = HttpRouter("about")

    @router.post("/websocket-ticket", "Let a page open a WebSocket", operation(SocketTicket))
    async def issue(request: Request) -> Response:
        """Return a ticket with which a page can open one WebSocket within ten seconds."""
        token, _ = token_of(request.headers.getlist("authorization"))
        if token is None and (login := login_of(console, request)) is not None:
            token = login.token
        secret, ticket = tickets.issue(token)
        protocols = [SUBPROTOCOL, TICKET_PREFIX + secret]
        document = {"ticket": secret, "protocols": protocols, "expires_at": ticket.expires_at}
        return success(document)

    return router

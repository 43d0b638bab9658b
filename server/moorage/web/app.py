"""The HTTP application: authentication, failure bodies, health, and the service endpoints.

`web.server.WebServer` runs it; what it serves it takes as `WebServices`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any, Final

from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import compile_path

from moorage.model import Code
from moorage.protocol.credentials import token_of
from moorage.protocol.faults import ServiceError
from moorage.web.bodies import (
    CALLER,
    ENCODING,
    TENANT,
    BodyReader,
    CountedBodies,
    failure,
    json_response,
)
from moorage.web.checks import HeadAsGet
from moorage.web.console import console_routes, login_of, playground_routes
from moorage.web.notes import Noted
from moorage.web.rights import check_right, right_of
from moorage.web.routes import service_routes
from moorage.web.schemas import HealthAnswer, ReadinessAnswer, operation
from moorage.web.services import WebServices
from moorage.web.specifications import specification_routes
from moorage.web.tickets import ticket_routes

__all__ = ["create_app"]

_WRONG_METHOD: Final = 405
_DESCRIPTION: Final = """\
Moorage decides which cluster, node and GPUs run a workload, by policies its users write in Python.

Failures are `{"success": false, "message", "error": {"code", "reason", "field", "expected"}}`;
under `/clusters` the text stands in `error` and the rest in `details`, as its clients expect.
Where tokens are configured, send `Authorization: Bearer <token>`, or Basic with it
as password.
"""


def create_app(services: WebServices) -> FastAPI:
    """Return the application.

    Args:
        services: What it serves.

    """
    # The interactive pages load scripts from elsewhere, so only the document itself is served.
    app = FastAPI(
        title="Moorage",
        version=version("moorage"),
        description=_DESCRIPTION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # It would send clients to whatever host they named.
    )
    setattr(app.state, ENCODING, asyncio.Lock())
    _add_failures(app)
    bodies = BodyReader()
    app.add_middleware(Noted)
    app.add_middleware(CountedBodies)
    app.add_middleware(HeadAsGet)
    app.include_router(_health_routes(services))
    protected = [Depends(_authentication(services))]
    if services.console is not None:
        app.include_router(playground_routes(services.console, bodies), dependencies=protected)
        app.include_router(console_routes(services.console, bodies))
    app.include_router(_about_routes(app, services), dependencies=protected)
    app.include_router(ticket_routes(services.tickets, services.console), dependencies=protected)
    app.include_router(specification_routes(app), dependencies=protected)
    app.include_router(service_routes(services, bodies), dependencies=protected)
    return app


def _authentication(services: WebServices) -> Callable[[Request], Awaitable[None]]:
    async def authenticate(request: Request) -> None:
        token, readable = token_of(request.headers.getlist("authorization"))
        caller = services.authenticate(token) if readable else None
        if caller is None and token is None:
            login = login_of(services.console, request)
            caller = None if login is None else login.caller
        if caller is None:
            raise ServiceError(
                Code.UNAUTHORIZED,
                "the request has no valid token; send `Authorization: Bearer <token>`",
                field="authorization",
                expected="Bearer <token>",
            )
        setattr(request.state, CALLER, caller)
        setattr(request.state, TENANT, caller.tenant)
        check_right(caller, right_of(request.method, request.scope["route"].path))

    return authenticate


def _health_routes(services: WebServices) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/healthz", summary="Is the process alive?", **operation(HealthAnswer, bare=True))
    async def health() -> Response:
        """Answer 200 as long as the event loop turns."""
        return json_response({"status": "ok"})

    ready_or_not = operation(ReadinessAnswer, statuses=(200, 503), bare=True)

    @router.get("/readyz", summary="Can requests be served?", **ready_or_not)
    async def readiness() -> Response:
        """Answer 200 or 503, and what says so by component."""
        ready, details = services.readiness()
        return json_response({"ready": ready, "details": details}, 200 if ready else 503)

    return router


def _about_routes(app: FastAPI, services: WebServices) -> APIRouter:
    router = APIRouter(tags=["about"])

    @router.get("/metrics", summary="The server's own metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Answer in the Prometheus text format."""
        async with getattr(app.state, ENCODING):
            text = services.metrics_text()
            await asyncio.sleep(0)  # Many are made one by one.
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def _add_failures(app: FastAPI) -> None:
    """Let every failure, the framework's own included, leave in the documented form."""

    async def refused(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == _WRONG_METHOD:
            return _wrong_method(request)
        return failure(_fault_of(error), request.url.path)

    for kind in (ServiceError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, refused)


def _wrong_method(request: Request) -> Response:
    """Return the answer to a method that a path does not know: it says which the path does know.

    The framework's own answer names those of one route only, and every method is a route here.
    """
    paths: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    here = [paths[each] for each in paths if compile_path(each)[0].match(request.url.path)]
    known = ", ".join(sorted({method.upper() for operations in here for method in operations}))
    text = f"this path knows {known}; GET /openapi.json describes all paths"
    fault = ServiceError(
        Code.UNSUPPORTED, text, field="method", expected=known, status=_WRONG_METHOD
    )
    answer = failure(fault, request.url.path)
    answer.headers["allow"] = known  # RFC 9110, 15.5.6: it must be there.
    return answer


def _fault_of(error: Exception) -> ServiceError:
    match error:
        case ServiceError():
            return error
        case HTTPException(status_code=404):
            return ServiceError(
                Code.NOT_FOUND, "no such path; GET /openapi.json lists those there are"
            )
        case HTTPException(status_code=status, detail=detail):
            return ServiceError(Code.BAD_MESSAGE, str(detail), status=status)
        case RequestValidationError():
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            return ServiceError.wrong_field(field, first["msg"])
        case _:  # Any exception may come.
            # Starlette raises the error again once this is sent, so the operator sees all of it.
            return ServiceError(
                Code.INTERNAL, "the server failed on this request; its log says where"
            )

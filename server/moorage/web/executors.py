"""Endpoints of the executor service: their documents, and the execution of a policy."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.web.bodies import BodyReader, described, query_of, read_document, succeeded, who_of
from moorage.web.services import WebServices

__all__ = ["executor_routes"]

_DOCUMENT = "An executor document: `executor_id`, and whatever else you want to keep with it."


def executor_routes(services: WebServices, bodies: BodyReader) -> APIRouter:
    """Return the router of these endpoints; arguments as `service_routes`."""
    router = APIRouter(tags=["executors"])
    _documents(router, services, bodies)

    @router.post(
        "/executor/{executor}/execute_policy",
        summary="Execute a policy",
        openapi_extra=described(
            "`policy_rule_uri`, `input_data`, `parameters`, and `settings` or nothing."
        ),
    )
    async def execute(executor: str, request: Request) -> Response:
        """Evaluate a policy of this server on the input given; answer what it returned."""
        body = await read_document(request, bodies)
        return succeeded(await services.execute(executor, body, who_of(request)))

    @router.post("/executor/{executor}/create-infra", summary="Not needed here")
    @router.delete("/executor/{executor}/remove-infra", summary="Not needed here")
    async def infrastructure(executor: str) -> Response:
        """Refuse: executors of this server run in its own sandbox."""
        reason = f"the executor {executor[:100]} runs in this server's own sandbox and needs none"
        raise ServiceError(Code.UNSUPPORTED, reason)

    return router


def _documents(router: APIRouter, services: WebServices, bodies: BodyReader) -> None:
    @router.post(
        "/executor",
        summary="Register an executor",
        status_code=201,
        openapi_extra=described(_DOCUMENT),
    )
    async def create(request: Request) -> Response:
        """Store a new executor document and answer it."""
        return succeeded(await services.executors.create(await read_document(request, bodies)), 201)

    @router.post(
        "/executor/query",
        summary="Find executors",
        openapi_extra=described('A Mongo-style filter, bare or as `{"query": filter}`.'),
    )
    async def query(request: Request) -> Response:
        """Answer the list of matching documents; `{}` matches all."""
        return succeeded(
            await services.executors.query(query_of(await read_document(request, bodies)))
        )

    @router.get("/executor/{executor}", summary="Read an executor")
    async def read(executor: str) -> Response:
        """Answer the document."""
        return succeeded(await services.executors.get(executor))

    @router.put(
        "/executor/{executor}", summary="Change an executor", openapi_extra=described(_DOCUMENT)
    )
    async def update(executor: str, request: Request) -> Response:
        """Take a whole document, or `$set` and `$unset`; answer the new one."""
        change = await read_document(request, bodies)
        return succeeded(await services.executors.update(executor, change))

    @router.delete("/executor/{executor}", summary="Remove an executor")
    async def delete(executor: str) -> Response:
        """Answer the document that was removed."""
        return succeeded(await services.executors.delete(executor))

"""Endpoints of the executor service: executor documents, and the execution of a policy."""

from starlette.requests import Request
from starlette.responses import Response

from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject, JsonValue
from moorage.web.bodies import BodyReader, caller_of, find, read_document, success, who_of
from moorage.web.changes import find_former, note_change
from moorage.web.router import HttpRouter
from moorage.web.schemas import (
    DocumentChange,
    ExecutionRequest,
    ExecutorDocument,
    MongoQuery,
    operation,
)
from moorage.web.services import WebServices


def executor_routes(services: WebServices, bodies: BodyReader) -> HttpRouter:
    """Return the router of these endpoints; arguments as `service_routes`."""
    router = HttpRouter("executors")
    _documents(router, services, bodies)

    @router.post(
        "/executor/{executor}/execute_policy",
        "Execute a policy",
        operation(JsonValue, ExecutionRequest),
    )
    async def execute(executor: str, request: Request) -> Response:
        """Evaluate a policy of this server on the given input, and return the result."""
        body = await read_document(request, bodies)
        return success(await services.execute(executor, body, who_of(request)))

    @router.post("/executor/{executor}/create-infra", "Not needed here", operation(JsonObject))
    @router.delete("/executor/{executor}/remove-infra", "Not needed here", operation(JsonObject))
    async def infrastructure(executor: str) -> Response:
        """Refuse the request: executors of this server run in its own sandbox."""
        reason = f"the executor {executor[:100]} runs in this server's own sandbox and needs none"
        raise ServiceError(Code.UNSUPPORTED, reason)

    return router


def _documents(router: HttpRouter, services: WebServices, bodies: BodyReader) -> None:
    one = operation(ExecutorDocument)

    @router.post("/executor", "Register an executor", operation(ExecutorDocument, ExecutorDocument))
    async def create(request: Request) -> Response:
        """Store a new executor document, which is the caller's, and answer it."""
        document = await read_document(request, bodies)
        created = await services.executors.create(document, who_of(request))
        return success(await note_change(request, None, created))

    @router.post("/executor/query", "Find executors", operation(list[ExecutorDocument], MongoQuery))
    async def query(request: Request) -> Response:
        """Return the list of matching documents; `{}` matches all."""
        return success(await find(request, bodies, services.executors.query))

    @router.get("/executor/{executor}", "Read an executor", one)
    async def read(executor: str) -> Response:
        """Return the executor document."""
        return success(await services.executors.get(executor))

    @router.put(
        "/executor/{executor}", "Change an executor", operation(ExecutorDocument, DocumentChange)
    )
    async def update(executor: str, request: Request) -> Response:
        """Change the named fields, as for clusters. For the owner and operators."""
        change = await read_document(request, bodies)
        await services.ownership.check_executor(caller_of(request), executor)
        before = await find_former(services.executors.get(executor))
        after = await services.executors.update(executor, change)
        return success(await note_change(request, before, after))

    @router.delete("/executor/{executor}", "Remove an executor", one)
    async def delete(executor: str, request: Request) -> Response:
        """Answer the document that was removed."""
        await services.ownership.check_executor(caller_of(request), executor)
        removed = await services.executors.delete(executor)
        return success(await note_change(request, removed, None))

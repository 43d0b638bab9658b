"""Endpoints of quotas: the operations `quotas`, `set_quota` and `remove_quota`, over HTTP."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonMapping
from moorage.records.replies import QuotaPage, QuotaState
from moorage.records.requests import QuotaChange
from moorage.web.bodies import BodyReader, caller_of, read_document
from moorage.web.notes import remote_of
from moorage.web.router import HttpRouter
from moorage.web.schemas import operation
from moorage.web.services import WebServices

_NO_CHANGE: Final[JsonMapping] = {}
_OF_THE_PATH: Final = frozenset({"op", "id", "strict", "tenant", "project"})
"""Fields of `set_quota` that a body does not say."""


def quota_routes(services: WebServices, bodies: BodyReader) -> HttpRouter:
    """Return the router of these endpoints; arguments as `service_routes`."""
    router = HttpRouter("quotas")

    async def answer_change(
        request: Request, name: str, change: JsonMapping = _NO_CHANGE, **fields: object
    ) -> Response:
        given = {key: value for key, value in fields.items() if value is not None}
        said = {**change, **given}
        origin = caller_of(request), remote_of(request.scope)
        status, answer = await services.operate({**said, "op": name}, *origin)
        return Response(answer, status, media_type="application/json")

    @router.get("/quotas", "List quotas", operation(QuotaPage))
    async def list_quotas(
        request: Request, tenant: str | None = None, after: str = "", limit: int = 100
    ) -> Response:
        """Return one page of quotas and their use: the caller's own; operators get all."""
        filters = {"tenant": tenant} if tenant is not None else {}
        return await answer_change(request, "quotas", filters=filters, after=after, limit=limit)

    @router.put("/quotas/{tenant}", "Set a quota", operation(QuotaState, QuotaChange))
    async def set_quota(tenant: str, request: Request, project: str | None = None) -> Response:
        """Set the quota of a tenant or, with `?project=`, of one of its projects."""
        change = await read_document(request, bodies)
        for name in change.keys() & _OF_THE_PATH:
            known = ", ".join(QuotaChange.__struct_fields__)
            raise ServiceError.wrong_field(name, f"one of {known}")
        return await answer_change(request, "set_quota", change, tenant=tenant, project=project)

    @router.delete("/quotas/{tenant}", "Remove a quota", operation(QuotaState))
    async def remove_quota(tenant: str, request: Request, project: str | None = None) -> Response:
        """Remove the quota of a tenant, or with `?project=` of one of its projects."""
        return await answer_change(request, "remove_quota", tenant=tenant, project=project)

    return router

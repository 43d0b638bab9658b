"""Endpoints of publishing: aliases and what they mean, canaries, and calls of `management`."""

from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moorage.protocol.faults import ServiceError
from moorage.protocol.registry import CanaryStart, Document
from moorage.web.bodies import BodyReader, described, read_document, succeeded, who_of
from moorage.web.services import WebServices

__all__ = ["alias_routes"]

_CANARY_FIELDS: Final = {
    "policy_rule_uri": "the URI of a registered version",
    "percent": "a number above 0, up to 100",
    "by": "`request` or `tenant`",
    "seed": "a whole number",
}
_VERSION = "`policy_rule_uri`: a registered version of the alias's policy."


def alias_routes(services: WebServices, bodies: BodyReader) -> APIRouter:
    """Return the router of these endpoints; arguments as `service_routes`."""
    router = APIRouter(tags=["publishing"])
    _looking(router, services)
    _changing(router, services, bodies)
    return router


def _looking(router: APIRouter, services: WebServices) -> None:
    @router.get("/policy-alias", summary="List aliases")
    async def list_aliases() -> Response:
        """Answer every alias with the version it means, who activated it and when."""
        return succeeded(services.aliases.list())

    @router.get("/policy-alias/{alias}", summary="Read an alias")
    async def show_alias(alias: str) -> Response:
        """Answer the alias with its history. A bare policy name means its `stable`."""
        return succeeded(services.aliases.show(alias))

    @router.get("/policy-alias/{alias}/canary", summary="How does the candidate do?")
    async def canary_report(alias: str, request: Request) -> Response:
        """Answer the outcomes of the active version and of the canary, since it was started."""
        return succeeded(services.aliases.canary_report(alias, who_of(request)))

    @router.get("/policy-alias/{alias}/shadow", summary="How does the candidate differ?")
    async def shadow_report(alias: str, request: Request) -> Response:
        """Answer what the shadow would have done, compared with what the active version did.

        All of it goes to the alias's owner; of others' requests, everybody else gets figures.
        """
        return succeeded(services.aliases.shadow_report(alias, who_of(request)))

    @router.get("/policy/{uri}/logs", summary="What did it print?")
    async def logs(uri: str, request: Request) -> Response:
        """Answer what a version printed and logged lately, at requests of the caller's tenant."""
        return succeeded(await services.publications.logs(uri, who_of(request)))


def _changing(router: APIRouter, services: WebServices, bodies: BodyReader) -> None:
    @router.post(
        "/policy-alias/{alias}/activate",
        summary="Activate a version",
        openapi_extra=described(_VERSION),
    )
    async def activate(alias: str, request: Request) -> Response:
        """Let the alias mean this version from now on; requests under way are not disturbed."""
        uri = text_of(await read_document(request, bodies), "policy_rule_uri")
        return succeeded(await services.aliases.activate(alias, uri, who_of(request)))

    @router.post("/policy-alias/{alias}/rollback", summary="Activate the former version")
    async def roll_back(alias: str, request: Request) -> Response:
        """Let the alias mean what it meant before."""
        return succeeded(await services.aliases.roll_back(alias, who_of(request)))

    @router.post(
        "/policy-alias/{alias}/canary",
        summary="Start a canary",
        openapi_extra=described(
            f"{_VERSION} `percent` of the requests that it gets; `by`: `request` or `tenant`;"
            " `seed`, a number that makes it another draw."
        ),
    )
    async def start_canary(alias: str, request: Request) -> Response:
        """Send a share of the requests to a candidate; the same request always goes one way."""
        body = await read_document(request, bodies)
        text_of(body, "policy_rule_uri")
        start = canary_start(body)
        return succeeded(await services.aliases.start_canary(alias, start, who_of(request)))

    @router.delete("/policy-alias/{alias}/canary", summary="Stop a canary")
    async def stop_canary(alias: str, request: Request) -> Response:
        """Send all requests to the active version again."""
        return succeeded(await services.aliases.stop_canary(alias, who_of(request)))

    @router.post(
        "/policy-alias/{alias}/shadow", summary="Start a shadow", openapi_extra=described(_VERSION)
    )
    async def start_shadow(alias: str, request: Request) -> Response:
        """Ask a candidate what the active version is asked; nobody sees its answers."""
        uri = text_of(await read_document(request, bodies), "policy_rule_uri")
        return succeeded(await services.aliases.start_shadow(alias, uri, who_of(request)))

    @router.delete("/policy-alias/{alias}/shadow", summary="Stop a shadow")
    async def stop_shadow(alias: str, request: Request) -> Response:
        """Ask the candidate no more; its report is forgotten."""
        return succeeded(await services.aliases.stop_shadow(alias, who_of(request)))

    @router.delete("/policy-alias/{alias}", summary="Remove an alias")
    async def delete_alias(alias: str, request: Request) -> Response:
        """Answer the alias that was removed, by its owner; the versions stay."""
        return succeeded(await services.aliases.delete(alias, who_of(request)))

    @router.post(
        "/policy/{uri}/manage",
        summary="Manage a policy",
        openapi_extra=described("`action`, a text, and `data`, an object, both for the policy."),
    )
    async def manage(uri: str, request: Request) -> Response:
        """Call the policy's `management(action, data)` and answer what it returned."""
        body = await read_document(request, bodies)
        action, data = text_of(body, "action"), body.get("data")
        data = {} if data is None else data
        if not isinstance(data, dict):
            raise ServiceError.wrong_field("data", "an object")
        return succeeded(await services.publications.manage(uri, who_of(request), action, data))


def text_of(body: Document, field: str) -> str:
    """Return a text of a body, or refuse it."""
    value = body.get(field)
    if not isinstance(value, str) or not value:
        raise ServiceError.wrong_field(field, "a text")
    return value


def canary_start(body: Document) -> CanaryStart:
    """Return what starts a canary, or refuse the field that is wrong."""
    for field in body.keys() - _CANARY_FIELDS.keys():
        raise ServiceError.wrong_field(field, f"one of {', '.join(_CANARY_FIELDS)}")
    try:
        return msgspec.convert(body, type=CanaryStart)
    except msgspec.ValidationError as error:
        # It says the field at its end, as `percent` where it is missing and else as `$.percent`.
        field = next((name for name in _CANARY_FIELDS if f"{name}`" in str(error)), "body")
        expected = _CANARY_FIELDS.get(field, "an object")
        raise ServiceError.wrong_field(field, expected) from error

"""The endpoints of aliases: canaries, shadows, logs, and calls of `management`."""

import asyncio
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from moorage.model import Tenant
from moorage.protocol.faults import ServiceError
from moorage.protocol.registry import Activation, CanaryStart, Document
from moorage.records.json_values import JsonValue
from moorage.records.policies import AliasDocument, CanaryOutcomes, PolicyOutput, ShadowComparison
from moorage.web.bodies import BodyReader, caller_of, read_as, read_document, success, who_of
from moorage.web.changes import note_change
from moorage.web.router import HttpRouter
from moorage.web.schemas import ManagementCall, VersionChoice, operation
from moorage.web.services import WebServices

_ALIAS: Final = operation(AliasDocument)
_CHOICE: Final = operation(AliasDocument, VersionChoice)


def alias_routes(services: WebServices, bodies: BodyReader) -> HttpRouter:
    """Return the router of the alias endpoints; the arguments are those of `service_routes`."""
    router = HttpRouter("publishing")
    _looking(router, services)
    _changing(router, services, bodies)
    _changing_beside(router, services, bodies)
    return router


def _looking(router: HttpRouter, services: WebServices) -> None:
    @router.get("/policy-alias", "List aliases", operation(list[AliasDocument]))
    async def list_aliases() -> Response:
        """Return every alias with its active version, who activated it and when."""
        return success(services.aliases.list())

    @router.get("/policy-alias/{alias}", "Read an alias", _ALIAS)
    async def show_alias(alias: str) -> Response:
        """Return an alias with its history. A bare policy name means its alias `stable`."""
        return success(services.aliases.show(alias))

    @router.get(
        "/policy-alias/{alias}/canary", "Outcomes of both versions", operation(CanaryOutcomes)
    )
    async def canary_report(alias: str, request: Request) -> Response:
        """Return the outcomes of the active version and of the canary, since the canary's start."""
        return success(services.aliases.canary_report(alias, who_of(request)))

    @router.get(
        "/policy-alias/{alias}/shadow",
        "Differences of the candidate",
        operation(ShadowComparison),
    )
    async def shadow_report(alias: str, request: Request) -> Response:
        """Return the comparison of the shadow with the active version.

        Only the alias's owner gets the whole comparison; other tenants get figures instead of
        single requests.
        """
        return success(services.aliases.shadow_report(alias, who_of(request)))

    @router.get("/policy/{uri}/logs", "Output of a version", operation(PolicyOutput))
    async def logs(uri: str, request: Request) -> Response:
        """Return a version's recent output and log lines for requests of the caller's tenant."""
        return success(await services.publications.logs(uri, who_of(request)))


def _changing(router: HttpRouter, services: WebServices, bodies: BodyReader) -> None:
    owner = partial(_owner, services)

    @router.post(
        "/policy-alias/{alias}/activate", "Activate a version", operation(AliasDocument, Activation)
    )
    async def activate(alias: str, request: Request) -> Response:
        """Make the alias point at a version; requests under way finish with the old version.

        A version that fails as the alias's shadow is refused, unless `force` is set.
        """
        choice = read_as(await read_document(request, bodies), Activation)
        uri, (who, before) = choice.policy_rule_uri, await owner(request, alias)
        after = await services.aliases.activate(alias, uri, who, force=choice.force)
        return await _answer_change(request, before, after)

    @router.post("/policy-alias/{alias}/rollback", "Activate the former version", _ALIAS)
    async def roll_back(alias: str, request: Request) -> Response:
        """Restore the former version of the alias."""
        who, before = await owner(request, alias)
        return await _answer_change(request, before, await services.aliases.roll_back(alias, who))

    @router.post(
        "/policy-alias/{alias}/canary", "Start a canary", operation(AliasDocument, CanaryStart)
    )
    async def start_canary(alias: str, request: Request) -> Response:
        """Send a share of the requests to a candidate; equal keys always get the same version."""
        start = read_as(await read_document(request, bodies), CanaryStart)
        who, before = await owner(request, alias)
        after = await services.aliases.start_canary(alias, start, who)
        return await _answer_change(request, before, after)

    @router.delete("/policy-alias/{alias}/canary", "Stop a canary", _ALIAS)
    async def stop_canary(alias: str, request: Request) -> Response:
        """Send all requests to the active version again."""
        who, before = await owner(request, alias)
        return await _answer_change(request, before, await services.aliases.stop_canary(alias, who))


def _changing_beside(router: HttpRouter, services: WebServices, bodies: BodyReader) -> None:
    shadows = asyncio.Lock()  # The owner of a shadow is checked and changed at once.

    @router.post("/policy-alias/{alias}/shadow", "Start a shadow", _CHOICE)
    async def start_shadow(alias: str, request: Request) -> Response:
        """Run a candidate beside the active version; no client sees its answers."""
        choice = read_as(await read_document(request, bodies), VersionChoice)
        async with shadows:
            services.ownership.check_shadow(caller_of(request), alias)
            uri, before = choice.policy_rule_uri, _alias_document(services, alias)
            after = await services.aliases.start_shadow(alias, uri, who_of(request))
        return await _answer_change(request, before, after)

    @router.delete("/policy-alias/{alias}/shadow", "Stop a shadow", _ALIAS)
    async def stop_shadow(alias: str, request: Request) -> Response:
        """Stop evaluating the candidate, and delete its report."""
        async with shadows:
            services.ownership.check_shadow(caller_of(request), alias)
            before = _alias_document(services, alias)
            after = await services.aliases.stop_shadow(alias, who_of(request))
        return await _answer_change(request, before, after)

    @router.delete("/policy-alias/{alias}", "Remove an alias", _ALIAS)
    async def delete_alias(alias: str, request: Request) -> Response:
        """Delete an alias and return it; its versions stay. Only the alias's owner may do so."""
        await _owner(services, request, alias)
        removed = await services.aliases.delete(alias)
        await note_change(request, _state(removed), None)
        return success(removed)

    @router.post("/policy/{uri}/manage", "Manage a policy", operation(JsonValue, ManagementCall))
    async def manage(uri: str, request: Request) -> Response:
        """Call the policy's `management(action, data)` and return its result."""
        call = read_as(await read_document(request, bodies), ManagementCall)
        who, data = who_of(request), call.data or {}
        return success(await services.publications.manage(uri, who, call.action, data))


async def _owner(
    services: WebServices, request: Request, alias: str
) -> tuple[Tenant, Document | None]:
    """Check that the caller may change an alias; return the caller's tenant and the alias."""
    caller = caller_of(request)
    await services.ownership.check_alias(caller, alias)
    return caller.tenant, _alias_document(services, alias)


def _alias_document(services: WebServices, alias: str) -> Document | None:
    """Return the present state of an alias; None if the alias does not exist."""
    try:
        return _state(services.aliases.show(alias))
    except ServiceError:
        return None


def _state(alias: Document) -> Document:
    """Return the fields of an alias for the audit log, without its history."""
    state = {"version": alias["policy_rule_uri"]}
    return state | {each: alias[each] for each in ("canary", "shadow") if alias[each]}


async def _answer_change(request: Request, before: Document | None, after: Document) -> Response:
    """Return the answer with a changed alias; record the change for the audit log."""
    await note_change(request, before, _state(after))
    return success(after)

"""The endpoints of named tokens, for administrators."""

from starlette.requests import Request
from starlette.responses import Response

from moorage.records.tokens import CreatedToken, NewToken, TokenState
from moorage.web.bodies import UNCHANGED, BodyReader, caller_of, read_as, read_document, success
from moorage.web.notes import remote_of
from moorage.web.router import HttpRouter
from moorage.web.schemas import operation
from moorage.web.services import WebServices


def token_routes(services: WebServices, bodies: BodyReader) -> HttpRouter:
    """Return the router of the token endpoints; the arguments are those of `service_routes`."""
    router = HttpRouter("tokens")

    @router.get("/tokens", "List named tokens", operation(list[TokenState]))
    async def list_tokens() -> Response:
        """Return all named tokens without their secrets: expired and revoked ones, too."""
        return success(services.named_tokens.list())

    @router.post("/tokens", "Create a token", operation(CreatedToken, NewToken, statuses=(201,)))
    async def create_token(request: Request) -> Response:
        """Create a token, which is valid at once; no later answer has its secret.

        The first token closes an open server: every caller then needs a token.
        """
        new = read_as(await read_document(request, bodies), NewToken)
        made = await services.named_tokens.create(new, caller_of(request), remote_of(request.scope))
        return success(made, 201)

    @router.delete("/tokens/{name}", "Revoke a token", operation(TokenState))
    async def revoke_token(name: str, request: Request) -> Response:
        """Refuse a token from now on, and end its sessions."""
        by = caller_of(request), remote_of(request.scope)
        was, is_new = await services.named_tokens.revoke(name, *by)
        setattr(request.state, UNCHANGED, not is_new)
        return success(was)

    return router

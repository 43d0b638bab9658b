"""The server's part of signing in with OpenID Connect, for HTTP and the WebSocket."""

from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import field
from starlette.responses import Response

from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.protocol.registry import Document
from moorage.web.bodies import success
from moorage.web.router import HttpRouter
from moorage.web.schemas import WebType, operation

CALLBACK: Final = "/console/sign-in/callback"
"""The path to which the issuer sends browsers back."""


class SignIn(WebType):
    """The issuer at which a client signs in, and the audience of the token to request.

    `client_id` is empty if the operator offers no sign-in.
    """

    issuer: str
    client_id: str = field(name="client_id")
    audience: str
    scopes: str


def sign_in_routes(sign_in: Document) -> HttpRouter:
    """Return the router of the sign-in endpoint, which needs no token."""
    router = HttpRouter("about")

    @router.get("/sign-in", "How to sign in", operation(SignIn))
    async def show() -> Response:
        """Return the issuer and the parameters for a sign-in, for `moorage login`."""
        return success(sign_in)

    return router


async def wait_for_issuer(
    pending: Callable[[str | None], Awaitable[bool] | None], token: str | None
) -> None:
    """Wait for the signing keys of a token's issuer, if they are not known yet.

    Raises:
        ServiceError: `unavailable`: The issuer does not answer, or stored tokens cannot be read.
    """
    waiting = pending(token)
    if waiting is not None and not await waiting:
        raise ServiceError(
            Code.UNAVAILABLE,
            "the token cannot be verified now, since its issuer, or the database with the tokens, "
            "does not answer; try again in a moment",
        )

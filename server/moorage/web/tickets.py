"""Tickets with which pages open a WebSocket: see `protocol.credentials`."""

from msgspec import field
from starlette.requests import Request
from starlette.responses import Response

from moorage.protocol.credentials import SUBPROTOCOL, TICKET_PREFIX, token_of
from moorage.protocol.logins import Tickets
from moorage.web.bodies import success
from moorage.web.console import login_of
from moorage.web.router import HttpRouter
from moorage.web.schemas import WebType, operation
from moorage.web.services import Console


class SocketTicket(WebType):
    """A ticket, which opens one WebSocket until `expires_at`.

    `protocols`: what the page passes as the second argument of `new WebSocket(url, protocols)`.
    """

    ticket: str
    protocols: list[str]
    expires_at: float = field(name="expires_at")


def ticket_routes(tickets: Tickets, console: Console | None) -> HttpRouter:
    """Return the endpoint, which needs a token.

    Args:
        tickets: Issues them.
        console: Knows who is logged in to it; None: no one.
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

"""The opening handshake: the HTTP side of the port, before a connection is a WebSocket.

The gateway consults `Doorman` for every request. Requests from pages of other sites are refused.
`/healthz` needs no token; every other request must be an opening handshake with a valid token.
"""

import http
import secrets
from collections.abc import Awaitable, Callable, Sequence

from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from moorage.gateway.connection import GatewayConnection
from moorage.gateway.deliver import AgentDoor
from moorage.gateway.session import Counts
from moorage.gateway.settings import GatewaySettings
from moorage.model import SessionId
from moorage.protocol.agent_socket import AGENT_PATH
from moorage.protocol.codes import SESSION_HEADER
from moorage.protocol.credentials import SUBPROTOCOL, console_cookies, read_subprotocols, token_of
from moorage.protocol.logins import Logins, Tickets
from moorage.protocol.peers import Peers, most_of_one
from moorage.protocol.proxies import FORWARDED_FOR
from moorage.records.rights import Caller, Right


class Doorman:
    """Answers the HTTP requests of the port.

    Args:
        settings: The limits.
        authenticate: Given the bearer token (None: the request has none), returns the caller, or
            None to refuse the request.
        counts: The counters of refusals.
        sessions: The connections that have a session.
        logins: The logins to the console; None: there is no console.
        on_stranger: Called with the address of each client that shows no valid token, and with the
            token, if there is one.
        pending: Given the bearer token, returns None if `authenticate` can judge the token at once.
            Otherwise returns an awaitable; its result: whether the token can be judged now.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        authenticate: Callable[[str | None], Caller | None],
        counts: Counts,
        sessions: Peers[GatewayConnection],
        tickets: Tickets,
        logins: Logins | None = None,
        on_stranger: Callable[[str, str | None], None] = lambda *_: None,
        pending: Callable[[str | None], Awaitable[bool] | None] = lambda _: None,
    ) -> None:
        self.draining = False
        self.origins = settings.origins
        self.agents: AgentDoor | None = None
        self._settings = settings
        self._authenticate = authenticate
        self._counts = counts
        self._sessions = sessions
        self._logins = logins
        self._tickets = tickets
        self._on_stranger = on_stranger
        self._pending = pending

    def request(
        self, connection: ServerConnection, request: Request
    ) -> Response | Awaitable[Response | None] | None:
        """Answer a request over HTTP, or return None to let the handshake go on."""
        if not isinstance(connection, GatewayConnection):
            raise TypeError("expected a GatewayConnection, as the gateway's server makes it")
        forwarded = request.headers.get_all(FORWARDED_FOR)
        client = self._settings.proxies.client_of(connection.address, forwarded)
        if client is not None:
            connection.address = connection.remote = client
        if request.method != "GET":
            answer = connection.respond(
                http.HTTPStatus.METHOD_NOT_ALLOWED, "This port takes GET requests only.\n"
            )
            answer.headers["Allow"] = "GET"
            return answer
        if len(request.headers.get_all("Host")) != 1:  # RFC 9112, 3.2.
            return connection.respond(http.HTTPStatus.BAD_REQUEST, "Send one `Host`.\n")
        rows = [(name.lower(), value) for name, value in request.headers.raw_items()]
        foreign = self.origins.refusal(request.path, rows, connection.local_address[0])
        if foreign is not None:
            self._counts.refused_foreign_total += 1
            return connection.respond(http.HTTPStatus.FORBIDDEN, f"{foreign.advice}.\n")
        if request.path.partition("?")[0] == "/healthz":
            if self.draining:
                return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "stopping\n")
            return connection.respond(http.HTTPStatus.OK, "ok\n")
        bearer, readable = self._bearer(request)
        # A proxy with one name for both ports adds `/ws` in front.
        if request.path.endswith(AGENT_PATH) and self.agents is not None:
            return self._let_agent_in(connection, self.agents, bearer if readable else None)
        waiting = self._pending(bearer) if readable else None
        if waiting is not None:
            return self._let_in_later(connection, request, bearer, waiting)
        return self._let_in(connection, request, bearer, readable=readable)

    async def _let_agent_in(
        self, connection: GatewayConnection, agents: AgentDoor, bearer: str | None
    ) -> Response | None:
        admitted = await agents.admits(bearer)
        if admitted is None:
            return self._unverifiable(connection)
        connection.is_agent, connection.bearer = admitted, bearer
        return None if admitted else self._refuse_unauthorized(connection, bearer)

    async def _let_in_later(
        self,
        connection: GatewayConnection,
        request: Request,
        bearer: str | None,
        waiting: Awaitable[bool],
    ) -> Response | None:
        """Decide about a token once it can be verified, such as with new keys of its issuer."""
        if await waiting:
            return self._let_in(connection, request, bearer, readable=True)
        return self._unverifiable(connection)

    def _let_in(
        self, connection: GatewayConnection, request: Request, bearer: str | None, *, readable: bool
    ) -> Response | None:
        """Store the caller and return None, or return the refusal of the handshake."""
        caller = self._authenticate(bearer) if readable else None
        if caller is None and bearer is None and readable:
            caller = self._find_login(connection, request)
        if caller is None:
            return self._refuse_unauthorized(connection, bearer)
        if not caller.may(Right.READ):
            self._counts.refused_unauthorized_total += 1
            return connection.respond(http.HTTPStatus.FORBIDDEN, caller.refusal(Right.READ) + "\n")
        if (full := self._full(connection.address)) is not None:
            self._counts.refused_full_total += 1
            text = f"{full} are taken; try again later.\n"
            answer = connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, text)
            answer.headers["Retry-After"] = "1"
            return answer
        connection.caller, connection.bearer = caller, bearer
        return None

    def _refuse_unauthorized(self, connection: GatewayConnection, bearer: str | None) -> Response:
        self._counts.refused_unauthorized_total += 1
        self._on_stranger(connection.address, bearer)
        answer = connection.respond(
            http.HTTPStatus.UNAUTHORIZED, "Send a valid token: `Authorization: Bearer <token>`.\n"
        )
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    def _unverifiable(self, connection: GatewayConnection) -> Response:
        text = "The token cannot be verified now; try again later.\n"
        answer = connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, text)
        answer.headers["Retry-After"] = "5"
        return answer

    def _bearer(self, request: Request) -> tuple[str | None, bool]:
        """Return the token in a header or a subprotocol, and whether the credential is valid."""
        bearer, readable = token_of(request.headers.get_all("Authorization"))
        offered = read_subprotocols(request.headers.get_all("Sec-WebSocket-Protocol"))
        if bearer is None and offered is not None:
            return self._read_credential(*offered)
        return bearer, readable

    def _read_credential(self, kind: str, secret: str) -> tuple[str | None, bool]:
        """Return the token of a credential in a subprotocol, and whether it is valid."""
        if kind == "bearer":
            return secret, True
        ticket = self._tickets.redeem(secret)
        return (None, False) if ticket is None else (ticket.token, True)

    def _find_login(self, connection: GatewayConnection, request: Request) -> Caller | None:
        """Return the caller whose console cookie a page sends.

        A browser sends the page's origin, which was checked before. A client without `Origin` is no
        web page, and needs a token.
        """
        if self._logins is None or not request.headers.get_all("Origin"):
            return None
        cookies = console_cookies(request.headers.get_all("Cookie"))
        login = self._logins.find(cookies)
        if login is None:
            return None
        connection.cookies = cookies
        return login.caller

    def _full(self, address: str) -> str | None:
        most = self._settings.sessions_max
        if len(self._sessions) >= most:
            return f"All {most} sessions"
        if self._sessions.count(address) >= most_of_one(most):
            return f"All {most_of_one(most)} sessions that one address may have"
        return None

    def subprotocol(
        self, _: ServerConnection, offered: Sequence[Subprotocol]
    ) -> Subprotocol | None:
        """Choose the subprotocol without a secret, if the client offers it."""
        return next((each for each in offered if each == SUBPROTOCOL), None)

    def response(
        self, connection: ServerConnection, _: Request, response: Response
    ) -> Response | None:
        """Send the client the id of its session."""
        switching = response.status_code == http.HTTPStatus.SWITCHING_PROTOCOLS
        if isinstance(connection, GatewayConnection) and switching:
            connection.session_id = SessionId(secrets.token_hex(16))
            response.headers[SESSION_HEADER] = connection.session_id
        return None

"""Checks a request before its endpoint: its origin, its size, and its tenant's share of the time.

`web.server` puts these checks around the application.
"""

from collections.abc import Callable, Sequence
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moorage.model import Code, Tenant
from moorage.protocol.credentials import token_of
from moorage.protocol.faults import ServiceError
from moorage.protocol.loop_shares import LoopShares
from moorage.protocol.origins import Origins
from moorage.protocol.proxies import FORWARDED_FOR, Proxies
from moorage.records.rights import Caller
from moorage.web.bodies import failure
from moorage.web.connections import HEALTH, Connections
from moorage.web.services import StandbyReads
from moorage.web.sign_in import CALLBACK

REQUEST_SECONDS: Final = 0.001
"""Assumed seconds of event loop time per request; each tenant gets a fair share of this time."""
_LENGTHS: Final = frozenset({"content-length", "transfer-encoding"})


_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_POSTED: Final = ("/query", "/aggregate", "/websocket-ticket")
"""Ends of paths whose POST changes nothing: it only reads documents."""
_OF_THE_WRITER: Final = frozenset(
    {
        "/api/tasks/{task_id}",
        "/policy/{uri}/logs",
        "/policy-alias/{alias}/canary",
        "/policy-alias/{alias}/shadow",
    }
)
"""Paths that only the writing server can answer."""


class RequestChecks:
    """Refuses requests that must not reach an endpoint, and names the client to those that may.

    Args:
        origins: The host names and the pages' origins that are accepted.
        connections: The connections of the port.
        authenticate: Given a bearer token, returns the caller, or None if it is not valid.
        proxies: The proxies that may name another client than themselves.

    Attributes:
        websocket_port: Port of the WebSocket; 0 if it is unknown.
    """

    def __init__(
        self,
        app: ASGIApp,
        origins: Origins,
        connections: Connections,
        authenticate: Callable[[str | None], Caller | None],
        proxies: Proxies = Proxies(),  # noqa: B008  # It is immutable.
    ) -> None:
        self._app = app
        self._proxies = proxies
        self.origins = origins
        self.websocket_port = 0
        self._connections = connections
        self._authenticate = authenticate
        self._shares = LoopShares()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request or refuse it; set `nosniff`, so that browsers do not guess types."""

        async def plainly(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("x-content-type-options", "nosniff")
            await send(message)

        await self._serve(scope, receive, plainly)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        peer = scope["client"][0]
        forwarded = [value for name, value in headers if name == FORWARDED_FOR]
        if (client := self._proxies.client_of(peer, forwarded)) is not None:
            scope["client"] = (client, 0)
        payer = self._payer(scope, headers)
        if (turn := self._shares.turn(payer)) is not None:
            await turn
        self._shares.spend(payer, REQUEST_SECONDS)
        if scope["path"] == CALLBACK and ("sec-fetch-mode", "navigate") in headers:
            # The issuer's page sends the browser here; `state` proves that the sign-in began here.
            headers = [each for each in headers if each[0] != "sec-fetch-site"]
        target = scope["raw_path"].decode("latin-1")
        foreign = self.origins.refusal(target, headers, (scope["server"] or ("",))[0])
        if foreign is not None:
            fault = ServiceError(Code.FORBIDDEN, foreign.advice, field=foreign.header)
            await failure(fault, scope["path"])(scope, receive, send)
        elif ("upgrade", "websocket") in ((name, value.lower()) for name, value in headers):
            await _last(self._elsewhere(), scope["path"], 426)(scope, receive, send)
        elif _LENGTHS.issubset(name for name, _ in headers):
            # Two proxies may each obey another one of the two headers (RFC 9112, 6.1).
            fault = ServiceError.wrong_field(
                "content-length", "either Content-Length or Transfer-Encoding"
            )
            await _last(fault, scope["path"])(scope, receive, send)
        elif scope["path"] not in HEALTH and self._connections.is_crowded(peer):
            fault = ServiceError(
                Code.BUSY, "too many requests are under way here, or from your address; ask later"
            )
            await _last(fault, scope["path"], 503)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _payer(self, scope: Scope, headers: Sequence[tuple[str, str]]) -> Tenant:
        """Return who pays for a request: the token's tenant, or without one the client's address.

        Health checks have a separate share.
        """
        token, readable = token_of([value for name, value in headers if name == "authorization"])
        caller = self._authenticate(token) if token is not None and readable else None
        if caller is not None:
            return caller.tenant
        what = "health" if scope["path"] in HEALTH else "address"
        return Tenant(f"{what} {scope['client'][0]}")  # No tenant's name has a space.

    def _elsewhere(self) -> ServiceError:
        """Return the refusal of a WebSocket handshake at the HTTP port; it names the right port."""
        at = f"port {self.websocket_port}" if self.websocket_port else "another port"
        reason = f"this port speaks HTTP; connect the WebSocket to {at}"
        return ServiceError(Code.UNSUPPORTED, reason, field="upgrade", expected=at)


class HeadAsGet:
    """Answers HEAD for every path with GET, for load balancers and monitors."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on as GET, and return only the head of its answer."""

        async def head(message: Message) -> None:
            await send({**message, "body": b""} if "body" in message else message)

        if scope["type"] == "http" and scope["method"] == "HEAD":
            await self._app({**scope, "method": "GET"}, receive, head)
        else:
            await self._app(scope, receive, send)


def _last(fault: ServiceError, path: str, status: int = 0) -> Response:
    """Return the response for a failure after which the connection closes."""
    answer = failure(fault, path)
    answer.status_code = status or answer.status_code
    answer.headers["connection"] = "close"
    return answer


def is_read(method: str, path: str) -> bool:
    """Return whether a request only reads documents, so that a standby can answer it.

    Args:
        method: The method of the request.
        path: Template of its route, such as `/policy/{uri}`.
    """
    return path.endswith(_POSTED) if method not in _READING else path not in _OF_THE_WRITER


class Dated:
    """Adds to each answer of a standby the headers that say how old its data is."""

    def __init__(self, app: ASGIApp, reads: StandbyReads) -> None:
        self._app = app
        self._reads = reads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, and add the age headers to its answer."""
        headers = self._reads.headers()  # The answer may also reflect later facts.

        async def send_with_age(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        await self._app(scope, receive, send_with_age)

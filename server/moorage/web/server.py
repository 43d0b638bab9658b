"""Serves HTTP with uvicorn, inside the daemon's event loop.

The daemon starts the server after its services, and closes it before them. The daemon itself
handles signals and logging.
"""

import asyncio
import contextlib
import hmac
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moorage.model import Code
from moorage.protocol.credentials import token_of
from moorage.protocol.faults import ServiceError
from moorage.protocol.origins import Origins
from moorage.protocol.proxies import Proxies
from moorage.web.app import create_app
from moorage.web.bodies import failure
from moorage.web.checks import RequestChecks
from moorage.web.connections import CONNECTIONS_MAX, Connections, HttpConnection
from moorage.web.services import StandbyServices, WebServices

KEEP_ALIVE_SECONDS: Final = 65
"""Seconds for which an idle connection stays open. Clients reuse connections for less time, so that
no request meets a closing one."""
START_SECONDS_MAX: Final = 30.0
DRAIN_SECONDS: Final = 10
CLOSE_SECONDS_MAX: Final = 5.0
"""Longest wait for the last answers when the server closes, in seconds."""
BACKLOG: Final = 2048


class WebServer:
    """Serves HTTP. Use it once: `start`, then `close`.

    Args:
        services: The services behind the endpoints, or those of a standby.
        drain_seconds: How long requests may continue after `close`; then they are answered 503
            `shutting_down`.
        origins: The host names and the pages' origins that are accepted.
        connections_max: Maximum open connections; beyond it, an idle connection is closed.
        trusts: Returns whether answers may leave; if not, the answer is `shutting_down`.
        proxies: The proxies that may name another client than themselves.
    """

    def __init__(
        self,
        services: WebServices | StandbyServices,
        drain_seconds: int = DRAIN_SECONDS,
        origins: Origins = Origins(),  # noqa: B008  # It is immutable.
        *,
        connections_max: int = CONNECTIONS_MAX,
        trusts: Callable[[], bool] = lambda: True,
        proxies: Proxies = Proxies(),  # noqa: B008  # It is immutable.
    ) -> None:
        self._connections = connections = Connections(connections_max)
        self._app = _Drained(create_app(services), trusts)
        self._checks = RequestChecks(
            self._app, origins, connections, services.authenticate, proxies
        )
        self._server = _Server(_config(self._checks, connections, drain_seconds))
        self._serving: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen on an address, and serve requests.

        Args:
            host: Address or name to bind.
            port: Port to bind; 0 takes a free one.
            tls: Certificate of the server; None: no TLS.

        Returns:
            The port that was bound.

        Raises:
            OSError: The address cannot be bound.
        """
        self._server.config.load()
        self._server.config.ssl = tls
        listener = await _bind(host, port)
        bound: int = listener.getsockname()[1]
        self._checks.origins = replace(self._checks.origins, pages_port=bound)
        self._serving = asyncio.create_task(self._server.serve([listener]), name="web")
        ready = asyncio.create_task(self._server.ready.wait())
        try:
            async with asyncio.timeout(START_SECONDS_MAX):
                await asyncio.wait({self._serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._serving.done():
            self._serving.result()  # Raises the reason if the server did not start.
        return bound

    @contextlib.asynccontextmanager
    async def serve_itself(self, bearer: str) -> AsyncIterator[str]:
        """Serve requests with the server's own token on loopback, without TLS; yield the URL."""
        config = _config(_OnlyFor(self._checks, bearer), self._connections, DRAIN_SECONDS)
        config.load()
        server, listener = _Server(config), await _bind("127.0.0.1", 0)
        serving = asyncio.create_task(server.serve([listener]), name="web itself")
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving

    def change(self, services: WebServices | StandbyServices) -> None:
        """Answer requests with other services from now on."""
        self._app.app = create_app(services)

    def name_websocket_port(self, port: int) -> None:
        """Set the WebSocket port, for refusals of WebSocket handshakes."""
        self._checks.websocket_port = port

    async def close(self) -> None:
        """Accept no more requests, finish open ones in limited time, and stop; may be repeated."""
        if self._serving is None:
            return
        self._server.should_exit = True
        await self._serving
        last = set(self._server.server_state.tasks)
        if last:  # uvicorn cancelled these: they answer 503 and end.
            await asyncio.wait(last, timeout=CLOSE_SECONDS_MAX)


class _Server(uvicorn.Server):
    """A uvicorn server for a running event loop: reports when it is ready, handles no signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: ASGIApp, connections: Connections, drain_seconds: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=partial(HttpConnection, connections),  # type: ignore[arg-type]  # Any factory will do.
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # `web.checks` reads them by the rule of both ports.
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=drain_seconds,
    )


class _OnlyFor:
    """Passes on requests with the given token, and refuses all others."""

    def __init__(self, app: ASGIApp, bearer: str) -> None:
        self._app = app
        self._bearer = bearer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shown, _ = token_of(Headers(scope=scope).getlist("authorization"))
        if hmac.compare_digest((shown or "").encode(), self._bearer.encode()):
            await self._app(scope, receive, send)
        else:
            fault = ServiceError(Code.UNAUTHORIZED, "only the server itself may connect here")
            await failure(fault, scope["path"])(scope, receive, send)


class _Drained:
    """Answers requests that are cancelled when the server closes, without logging tracebacks.

    This application also replaces answers that must not be sent.
    """

    def __init__(self, app: ASGIApp, trusts: Callable[[], bool]) -> None:
        self.app = app
        self._trusts = trusts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = refused = False

        async def refuse() -> None:
            fault = ServiceError(Code.SHUTTING_DOWN, "the server is stopping; ask again later")
            await failure(fault, scope["path"])(scope, receive, send)

        async def send_and_watch(message: Message) -> None:
            nonlocal begun, refused
            if not begun and not self._trusts():
                refused = True
                await refuse()
            begun = True
            if not refused:
                await send(message)

        try:
            await self.app(scope, receive, send_and_watch)
        except asyncio.CancelledError:
            # uvicorn cancels the request at the end of the server, or when the client has left.
            if not begun:
                await refuse()


async def _bind(host: str, port: int) -> socket.socket:
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)  # noqa: FBT003  # The socket module's own signature.
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener

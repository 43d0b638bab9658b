"""The two ports of a server, WebSocket and HTTP, and who may connect; open on a standby, too.

`daemon.start` makes the ports; their handlers change when the server becomes the leader.
"""

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from errno import EADDRINUSE, ENOSPC
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import structlog
from prometheus_client.metrics_core import Metric

from moorage.config.settings import Config
from moorage.daemon import descriptors
from moorage.daemon.access.audit_log import AuditLog
from moorage.daemon.access.console_logins import ConsoleLogins
from moorage.daemon.access.socket_tickets import SocketTickets
from moorage.daemon.access.tls import ServerTls
from moorage.daemon.access.token_store import TokenStore
from moorage.daemon.access.tokens import IssuerTokens, Tokens
from moorage.daemon.door_record import DoorRecord, find_network, write_doors
from moorage.daemon.observability.gauges import entrance_metrics
from moorage.daemon.tasks import Tasks
from moorage.daemon.trust import Trust
from moorage.extras import install_command
from moorage.gateway.deliver import AgentDoor, Deliver
from moorage.gateway.server import Gateway
from moorage.gateway.settings import GatewaySettings
from moorage.model import Code, SessionId
from moorage.protocol.faults import ServiceError
from moorage.protocol.origins import Origins, authority_of, is_loopback
from moorage.protocol.proxies import read_proxies
from moorage.storage.base import Seat, Storage
from moorage.web.server import WebServer
from moorage.web.services import SignInFlow, StandbyServices, WebServices

log = structlog.get_logger("moored")
_REMEDIES: Final = {
    EADDRINUSE: "stop the program that listens there",
    ENOSPC: "free disk space",
}
"""How to fix a system error without changing a setting."""
_ALL: frozenset[str] = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  # Nothing is bound.


class Doors:
    """The WebSocket and HTTP ports.

    Args:
        tls: Certificate of the server; None: no TLS.
        trusts: Returns whether this server may still send answers over HTTP.

    Attributes:
        port: The port of the WebSocket; 0 before it is open.
        http_port: The port of HTTP.
    """

    def __init__(
        self, config: Config, gateway: Gateway, tls: ServerTls | None, trusts: Callable[[], bool]
    ) -> None:
        self.port = self.http_port = 0
        self._config = config
        self._gateway = gateway
        self._tls = tls
        self._trusts = trusts
        self._web: WebServer | None = None
        self._standby: StandbyServices | None = None
        self._remove_record: Callable[[], None] = lambda: None

    async def open(
        self,
        services: WebServices | StandbyServices,
        deliver: Deliver,
        agents: AgentDoor,
        goes_on: Callable[[SessionId], bool] = lambda _: False,
    ) -> None:
        """Listen; if the ports are open already, route requests to these parts from now on.

        Args:
            services: The services behind HTTP.
            deliver: The receiver of the WebSocket's messages.
            agents: The receiver of connections from agents of machines.
            goes_on: Returns whether a session stays open; see `Gateway.change`.

        Raises:
            OSError: The server cannot listen on an address.
        """
        if isinstance(services, StandbyServices):
            self._standby = services
        if self._web is not None:
            self._web.change(services)
            self._gateway.change(deliver, agents, goes_on)
            return
        config, context = self._config, None if self._tls is None else self._tls.context
        limits = descriptors.connection_limits()
        self._web = web = WebServer(
            services,
            origins=origin_names(config),
            connections_max=limits.web,
            trusts=self._trusts,
            proxies=read_proxies(config.trusted_proxies),
        )
        with naming("set http_port (MOORAGE_HTTP_PORT, --http-port) to another port (0: any)"):
            self.http_port = await web.start(config.http_host, config.http_port, context)
        with naming("set port (MOORAGE_PORT, --port) to another port (0: any)"):
            self.port = await self._gateway.start(
                deliver, config.host, config.port, self.http_port, context, agents
            )
        web.name_websocket_port(self.port)
        self._record()

    def _record(self) -> None:
        config = self._config
        websocket, http = (config.host, self.port), (config.http_host, self.http_port)
        try:
            record = DoorRecord(websocket, http, find_network())
            self._remove_record = write_doors(config.data_dir, record)
        except OSError as error:
            reason = f"`moored doctor` does not find this server: {error}"
            log.warning("doors_not_recorded", finding=reason)

    def give_way(self) -> None:
        """Redirect HTTP callers to the leader, if this server can be a standby."""
        if self._standby is not None:
            self.show(self._standby)

    def show(self, services: WebServices | StandbyServices) -> None:
        """Route HTTP requests to these services from now on, if the port is open."""
        if self._web is not None:
            self._web.change(services)

    def serve_itself(self, bearer: str) -> AbstractAsyncContextManager[str]:
        """Serve HTTP without TLS, only for callers with the server's own token; yield the URL."""
        assert self._web is not None  # The port is open.
        return self._web.serve_itself(bearer)

    async def close(self) -> None:
        """Close both ports, the WebSocket first. Closing again does nothing."""
        await self._gateway.close()
        if self._web is not None:
            await self._web.close()
        remove, self._remove_record = self._remove_record, lambda: None
        remove()

    def seat(self) -> Seat:
        """Return the addresses of this server, as other servers name them to clients."""
        config, s = self._config, "" if self._config.tls_cert is None else "s"
        ws = config.advertise_url or f"ws{s}://{_reachable(config.host, self.port)}"
        shown = urlsplit(ws).hostname or ""
        host = shown if config.advertise_url else config.http_host
        process = f"{socket.gethostname()} {os.getpid()} {config.rollout}"
        return Seat(process.rstrip(), ws, f"http{s}://{_reachable(host, self.http_port)}")


@dataclass(frozen=True, slots=True)
class Entrance:
    """The ports of a server, and the parts that decide who may connect."""

    audit: AuditLog
    tokens: Tokens
    logins: ConsoleLogins | None
    browsers: SignInFlow | None
    tickets: SocketTickets
    gateway: Gateway
    doors: Doors
    issuer: IssuerTokens | None
    tls: ServerTls | None

    def metrics(self) -> Iterable[Metric]:
        """Yield the metrics of logins and certificates, of a leader and of a standby."""
        ends = None if self.tls is None else (self.tls.expires_at, self.tls.lifetime)
        failing = None if self.issuer is None else self.issuer.failing
        return entrance_metrics(self.audit.failed_logins, ends, failing)


def make_entrance(
    config: Config, storage: Storage, tasks: Tasks, trust: Trust, stack: AsyncExitStack
) -> Entrance:
    """Make the ports and the parts that decide who may connect; the ports are still closed."""
    audit = AuditLog(config.data_dir, config.audit_days, config.audit_mib_max, storage.audit())
    stack.callback(audit.close)
    named_tokens = TokenStore(storage.tokens())
    stack.callback(named_tokens.close)
    settings = GatewaySettings(
        sessions_max=config.sessions_max,
        connections_max=descriptors.connection_limits().gateway,
        message_bytes_max=config.message_bytes_max,
        deflate=config.deflate,
        resume_seconds=config.session_resume_seconds,
        origins=origin_names(config),
        proxies=read_proxies(config.trusted_proxies),
    )
    if settings.sessions_max > settings.connections_max:
        log.warning("sessions", finding=descriptors.too_few(config.sessions_max))
    issuer, browsers = _issuer(config, tasks)
    tokens = Tokens(config.tokens, config.operators, named_tokens, issuer)
    if not (tokens.required or (is_loopback(config.host) and is_loopback(config.http_host))):
        raise ServiceError(
            Code.UNAVAILABLE,
            "there are no tokens, but other machines can reach this server: create one with "
            "`moored token create`",
        )
    logins = None
    if config.console:
        lasts = config.console_login_seconds
        logins = ConsoleLogins(storage.logins(), tokens.caller, lasts, tokens.expires_at)
        stack.callback(logins.close)
    tickets = SocketTickets(tokens.caller)
    gateway = Gateway(
        settings,
        tokens.caller,
        tickets,
        logins,
        partial(note_stranger, audit, tokens, "websocket"),
        tokens.pending,
    )
    gateway.trusts = trust.holds
    tls = _tls(config)
    if tls is not None:
        tasks.spawn(tls.follow())
    doors = Doors(config, gateway, tls, trust.holds)
    return Entrance(audit, tokens, logins, browsers, tickets, gateway, doors, issuer, tls)


def note_stranger(
    audit: AuditLog, tokens: Tokens, door: str, remote: str, bearer: str | None
) -> None:
    """Note a failed login at a door in the audit log, with what is wrong with its token."""
    audit.note_failed_login(remote, door, tokens.why_refused(bearer))


def _issuer(config: Config, tasks: Tasks) -> tuple[IssuerTokens | None, SignInFlow | None]:
    if not config.oidc_issuer:
        return None, None
    try:
        from moorage.daemon.access import oidc, oidc_keys, oidc_sign_in  # noqa: PLC0415  # They need an extra.
    except ModuleNotFoundError as error:
        way = f"{install_command('oidc')}, or remove the setting oidc_issuer"
        raise ServiceError(
            Code.UNAVAILABLE, f"the setting oidc_issuer needs the module {error.name}: {way}"
        ) from error
    claims = oidc.ClaimSettings(
        config.oidc_issuer,
        config.oidc_audience,
        config.oidc_tenant_claim,
        config.oidc_role_claim,
        config.oidc_roles,
    )
    keys = oidc_keys.IssuerKeys(config.oidc_issuer)
    tasks.spawn(keys.follow())
    browsers = oidc_sign_in.BrowserSignIn(keys, sign_in(config)) if config.oidc_client_id else None
    return oidc.OidcTokens(claims, keys), browsers


def sign_in(config: Config) -> dict[str, str]:
    """Return the values that clients need to sign in; empty without a configured client id."""
    return {
        "issuer": config.oidc_issuer,
        "client_id": config.oidc_client_id,
        "audience": config.oidc_audience,
        "scopes": config.oidc_scopes,
    }


def _tls(config: Config) -> ServerTls | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    with naming("correct tls_cert, tls_key or tls_client_ca"):
        return ServerTls(config.tls_cert, config.tls_key, config.tls_client_ca)


def _reachable(host: str, port: int) -> str:
    """Return host and port for URLs that other machines use: the machine's name for a wildcard."""
    return authority_of(socket.gethostname() if host in _ALL else host, port)


@contextmanager
def naming(advice: str) -> Iterator[None]:
    """Append `advice`, the setting to change, to the message of a system error."""
    try:
        yield
    except OSError as error:
        if first := _REMEDIES.get(error.errno or 0):
            advice = f"{first}, or {advice}"
        raise OSError(error.errno, f"{error.strerror or error}: {advice}") from error


def origin_names(config: Config) -> Origins:
    """Return the host names and origins for which the ports answer."""
    hosts = (config.host, config.http_host, *config.allowed_hosts)
    return Origins(hosts, config.allowed_origins)

"""The WebSocket server: owns the sessions, delivers each answer to its session, stops cleanly.

The daemon makes one `Gateway`, starts it, answers through `tell` and closes it. The gateway runs on
the current event loop; all of its methods are called from that loop.
"""

import asyncio
import functools
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from typing import Final

from websockets.asyncio.server import Server, ServerConnection, serve

from moorage.core.turns.effects import Address
from moorage.gateway.connection import GatewayConnection
from moorage.gateway.deliver import AgentDoor, Deliver
from moorage.gateway.handshake import Doorman
from moorage.gateway.received import Received
from moorage.gateway.session import Counts, Session
from moorage.gateway.settings import GatewaySettings
from moorage.model import Code, SessionId
from moorage.protocol.agent_socket import AgentSocket
from moorage.protocol.codes import Close
from moorage.protocol.fair_semaphore import FairSemaphore
from moorage.protocol.logins import Logins, Tickets
from moorage.protocol.loop_shares import LoopShares
from moorage.protocol.messages import Resume
from moorage.protocol.peers import Peers, most_of_one
from moorage.protocol.replies import failure
from moorage.records.rights import Caller

_LOGIN_LOOK_SECONDS: Final = 60.0
"""Seconds between two checks of a page's login: a login may end before its expiry."""


@dataclass(slots=True, kw_only=True)
class GatewayStats(Counts):
    """The figures of the gateway, with its counters.

    Args:
        connections: TCP connections, those without a session included.
        sessions: Open sessions.
        in_flight: Messages whose replies are not yet written.
        parked: Messages that wait in the queue.
    """

    connections: int
    sessions: int
    in_flight: int
    parked: int


class Gateway:
    """The WebSocket server of the daemon.

    Args:
        settings: The limits.
        authenticate: Given the bearer token of a handshake (None: it has none), returns the caller,
            or None to refuse the handshake with 401.
        logins: The logins to the console; None: there is no console.
        on_stranger: The same as the `on_stranger` of `Doorman`.
        pending: The same as the `pending` of `Doorman`.

    Attributes:
        port: The port that was bound; 0 before `start`.
        trusts: Returns whether this server leads; if not, `tell` closes the session instead.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        authenticate: Callable[[str | None], Caller | None],
        tickets: Tickets,
        logins: Logins | None = None,
        on_stranger: Callable[[str, str | None], None] = lambda *_: None,
        pending: Callable[[str | None], Awaitable[bool] | None] = lambda _: None,
    ) -> None:
        self.port = 0
        self.trusts: Callable[[], bool] = lambda: True
        self._settings = settings
        self._authenticate = authenticate
        self._logins = logins
        self._deliver: Deliver  # Set by `start`.
        self._counts = Counts()
        self._turns = FairSemaphore(rests=True)
        self._shares = LoopShares()
        self._received = Received()
        self._connections: set[GatewayConnection] = set()
        self._opening: Peers[GatewayConnection] = Peers()
        self._open: Peers[GatewayConnection] = Peers()
        self._sessions: dict[SessionId, Session] = {}
        self._resumable: Peers[Session] = Peers()
        """The sessions that lost their connection and may be resumed."""
        self._dropping: set[asyncio.Task[None]] = set()
        self._looks: dict[SessionId, asyncio.TimerHandle] = {}
        self._doorman = Doorman(
            settings, authenticate, self._counts, self._open, tickets, logins, on_stranger, pending
        )
        self._server: Server | None = None
        self._draining = False

    async def start(
        self,
        deliver: Deliver,
        host: str,
        port: int,
        pages_port: int = 0,
        tls: ssl.SSLContext | None = None,
        agents: AgentDoor | None = None,
    ) -> int:
        """Listen for connections, and serve them.

        Args:
            deliver: Handles the requests.
            host: Address or name to bind to.
            port: Port, 0 for a free one.
            pages_port: Port of the server's own pages, which may connect.
            tls: Certificate of the server; None: no TLS.
            agents: Serves the agents of machines; None: agents are refused.

        Returns:
            The port that was bound.

        Raises:
            OSError: The address cannot be bound.
        """
        self._deliver = deliver
        settings = self._settings
        self._doorman.agents = agents
        self._doorman.origins = replace(settings.origins, pages_port=pages_port)
        self._server = await serve(
            self._handle,
            host,
            port,
            ssl=tls,
            backlog=settings.handshakes_max,
            compression="deflate" if settings.deflate else None,
            select_subprotocol=self._doorman.subprotocol,
            process_request=self._doorman.request,
            process_response=self._doorman.response,
            server_header=None,
            open_timeout=settings.open_seconds_max,
            ping_interval=settings.ping_interval_seconds,
            ping_timeout=settings.ping_timeout_seconds,
            close_timeout=settings.close_seconds_max,
            max_size=settings.message_bytes_max,
            max_queue=settings.frames_queued_max,
            write_limit=settings.write_buffer_bytes_max,
            create_connection=functools.partial(  # type: ignore[arg-type]  # Any factory will do.
                GatewayConnection,
                registry=self._connections,
                received=self._received,
                shares=self._shares,
                opening=self._opening,
                opening_max=settings.handshakes_max,
                connections_max=settings.connections_max,
            ),
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self.port

    def change(
        self,
        deliver: Deliver,
        agents: AgentDoor | None,
        goes_on: Callable[[SessionId], bool] = lambda _: False,
    ) -> None:
        """Send requests to another handler from now on, and close open sessions (1012).

        Args:
            deliver: The new handler.
            agents: Serves the agents of machines.
            goes_on: Returns whether a session misses nothing, so that it may stay open.
        """
        while (lost := self._resumable.oldest()) is not None:
            self._end(lost)
        for session in self._sessions.values():
            if goes_on(session.id):
                session.deliver = deliver
                deliver.open_session(session.id, session.caller)
            else:
                self._drop(session, Close.RESTART, "another server leads from now on")
        self._deliver, self._doorman.agents = deliver, agents

    async def drain(self, *, patient: bool = True) -> None:
        """Accept no new sessions and requests, and send all replies that are due.

        Later messages are answered `shutting_down`. The call waits at most `drain_seconds_max`, or
        not at all if `patient` is False. A second call does nothing.
        """
        if self._server is None or self._draining:
            return
        self._draining = self._doorman.draining = True
        self._server.close(close_connections=False)
        while (lost := self._resumable.oldest()) is not None:
            self._end(lost)
        for session in self._sessions.values():
            session.draining = True
        self._turns.close()
        waiting = [session.idle() for session in self._sessions.values() if patient]
        if waiting:
            await asyncio.wait(waiting, timeout=self._settings.drain_seconds_max)

    async def close(self, *, patient: bool = True) -> None:
        """Stop: send all due replies, then close all sessions with 1012.

        After `drain`, this call takes at most twice `close_seconds_max`. A second call does
        nothing.
        """
        await self.drain(patient=patient)
        server, self._server = self._server, None
        if server is None:
            return
        for session in self._sessions.values():
            self._drop(session, Close.RESTART, "the server is stopping")
        if self._dropping:
            await asyncio.wait(self._dropping, timeout=2 * self._settings.close_seconds_max)
        for session in self._sessions.values():
            session.abandon()
        for connection in tuple(self._connections):  # Those that never became sessions.
            connection.transport.abort()
        await server.wait_closed()

    def tell(self, to: Address, reply: bytes) -> None:
        """Answer a message, once per message; a session that is gone gets no answer.

        Args:
            to: The address that came with the message.
            reply: JSON text, as made by `protocol.replies`.

        Raises:
            AssertionError: The message has been answered, or never existed.
        """
        session = self._sessions.get(to.session)
        if session is None:
            return
        if self.trusts():
            session.tell(to.number, reply)
        else:
            self._drop(session, Close.RESTART, "another server leads")

    def park(self, to: Address) -> None:
        """Mark a message as waiting in the queue; it no longer counts as in flight.

        Otherwise a session with `inflight_max` waiting requests could not even cancel one of them.
        """
        session = self._sessions.get(to.session)
        if session is not None:
            session.park(to.number)

    def unanswered(self, to: Address) -> list[str | int | None]:
        """Return the ids of a session's unanswered messages, except the message at `to`."""
        session = self._sessions.get(to.session)
        return [] if session is None else session.unanswered(to.number)

    def push(self, session: SessionId, frame: bytes) -> None:
        """Send news to a session, if it still exists.

        Args:
            session: The id of the session.
            frame: JSON text, as made by `protocol.replies.event`.
        """
        found = self._sessions.get(session)
        if found is not None and self.trusts():
            found.push(frame)

    def reads_on(self, session: SessionId) -> bool:
        """Return whether a session's client has read all its news."""
        found = self._sessions.get(session)
        return found is not None and found.reads_on

    def origin(self, session: SessionId) -> tuple[Caller | None, str]:
        """Return the caller of a session and its address; None and "" without the session."""
        found = self._sessions.get(session)
        return (None, "") if found is None else (found.caller, found.connection.remote)

    def expel(self) -> None:
        """Close (4401) all sessions whose token or login has ended or belongs to another caller."""
        for session in tuple(self._sessions.values()):
            self._expel_stranger(session)

    def _expel_stranger(self, session: Session) -> None:
        """Close a session whose token or login has ended; plan the next check of a login."""
        connection = session.connection
        if not connection.cookies or self._logins is None:
            if self._authenticate(connection.bearer) != session.caller:
                self._drop(session, Close.UNAUTHORIZED, "the token is no longer valid")
            return
        login = self._logins.find(connection.cookies)
        if login is None or login.caller != session.caller:
            self._drop(session, Close.UNAUTHORIZED, "the login has ended; log in again")
            return
        pause = min(max(login.expires_at - time.time(), 0.0), _LOGIN_LOOK_SECONDS)
        self._forget_login(session)
        loop = asyncio.get_running_loop()
        self._looks[session.id] = loop.call_later(pause, self._expel_stranger, session)

    def _forget_login(self, session: Session) -> None:
        if (timer := self._looks.pop(session.id, None)) is not None:
            timer.cancel()

    def stats(self) -> GatewayStats:
        """Return the figures of the gateway."""
        return GatewayStats(
            **asdict(self._counts),
            connections=len(self._connections),
            sessions=len(self._open),
            in_flight=sum(session.in_flight for session in self._sessions.values()),
            parked=sum(session.parked for session in self._sessions.values()),
        )

    @property
    def listening(self) -> bool:
        """Whether clients may connect: from `start` to `close`."""
        return self._server is not None and not self._draining

    async def _handle(self, connection: ServerConnection) -> None:
        """Run one session from its connection to its end.

        The library closes the connection afterwards.
        """
        if isinstance(connection, GatewayConnection) and connection.is_agent:
            await self._handle_agent(connection)
            return
        if not isinstance(connection, GatewayConnection) or connection.caller is None:
            raise TypeError("expected a connection with a caller")
        session = Session(
            connection,
            connection.caller,
            self._deliver,
            self._settings,
            self._counts,
            self._turns,
            self._shares,
            self._drop,
        )
        session.draining = self._draining
        self._counts.sessions_total += 1
        self._sessions[session.id] = session
        self._opening.remove(connection)
        self._open.add(connection, connection.address)
        self._deliver.open_session(session.id, session.caller)
        self._expel_stranger(session)  # Tokens may have changed since the handshake began.
        try:
            while (message := await session.serve()) is not None:
                session = self._resume(session, message)
        finally:
            self._open.remove(connection)
            if session.connection is connection:  # Otherwise another session has the connection.
                self._keep_or_end(session)

    async def _handle_agent(self, connection: GatewayConnection) -> None:
        door, secret = self._doorman.agents, connection.bearer
        assert door is not None
        assert secret is not None
        self._opening.remove(connection)
        try:
            await door.serve(secret, connection.address, AgentSocket(connection))
        except Exception as error:  # noqa: BLE001  # A defect; the daemon ends the process.
            self._deliver.fail(error)

    def _resume(self, session: Session, message: Resume) -> Session:
        """Return the session that continues over the connection of `session`."""
        found = self._sessions.get(SessionId(message.session))
        if found is None or found is session or not found.is_for(session.caller):
            reason = (
                "session: no session of yours has this id, or it has ended; repeat open requests."
            )
            session.tell(1, failure(Code.NOT_FOUND, reason, field="session", id=message.id))
            return session
        self._resumable.remove(found)
        if found.expiry_timer is not None:
            found.expiry_timer.cancel()
            found.expiry_timer = None
        if not found.gone:
            self._close(found.connection, Close.RESUMED, "another connection resumed the session")
        found.resume(session, message)
        self._end(session)
        self._expel_stranger(found)  # Checked again when the login of this connection ends.
        return found

    def _keep_or_end(self, session: Session) -> None:
        """End a resumable session after `resume_seconds`, any other session now."""
        if not (session.gone and session.lasts) or self._draining:
            self._end(session)
            return
        address, most = session.connection.address, self._settings.sessions_max
        self._resumable.add(session, address)
        loop = asyncio.get_running_loop()
        session.expiry_timer = loop.call_later(self._settings.resume_seconds, self._end, session)
        surplus = None
        if self._resumable.count(address) > most_of_one(most):
            surplus = self._resumable.oldest(address)
        elif len(self._resumable) > most:
            surplus = self._resumable.oldest()
        if surplus is not None:
            self._end(surplus)

    def _end(self, session: Session) -> None:
        session.lasts = False
        self._forget_login(session)
        if session.expiry_timer is not None:
            session.expiry_timer.cancel()
        self._resumable.remove(session)
        del self._sessions[session.id]
        self._deliver.drop_session(session.id, session.caller)

    def _drop(self, session: Session, code: int, reason: str) -> None:
        session.lasts = False
        if session.expiry_timer is None:
            self._close(session.connection, code, reason)
        else:  # The session has no connection.
            self._end(session)

    def _close(self, connection: GatewayConnection, code: int, reason: str) -> None:
        closing = connection.drop(code, reason, self._settings.close_seconds_max)
        task = asyncio.get_running_loop().create_task(closing)
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

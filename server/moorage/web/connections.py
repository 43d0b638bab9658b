"""Limits the connections of the HTTP port: in number, per address, and in time.

uvicorn makes an `HttpConnection` for each connection; `web.checks` asks `Connections` whether there
are too many requests. Without these limits, silent connections, or heads that arrive byte by byte,
would block the port for all clients.

A connection is *busy* from the head of a request to the last byte of its answer, else *idle*. When
there are too many connections, the one that has been idle for longest is closed. At most the limit
minus `RESERVED_MAX` connections may be busy. So when a health check opens a connection, there is
always an idle connection to close instead, and the health check is answered.
"""

import asyncio
from typing import Any, Final, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from moorage.protocol.peers import Peers, most_of_one

CONNECTIONS_MAX: Final = 2_048
"""Maximum open connections, at most three quarters of them from one address. Beyond either limit,
an idle connection is closed.

The maximum is lower if the system lets this process open few files."""
RESERVED_MAX: Final = 64
"""Connections that are reserved for health checks; at most a quarter of all.

If all other connections, or all others of one address, are busy, further requests get 503."""
HEAD_SECONDS_MAX: Final = 10.0
"""Longest time to receive a request's head, or the rest of a body after its answer.

The time begins with the first byte, or with the connection; after it, the connection is closed."""
UNREAD_SECONDS_MAX: Final = 30.0
"""Maximum seconds for which a client may leave its answer unread; then the connection is cut."""
HEALTH: Final = frozenset({"/healthz", "/readyz"})
"""Paths of health checks, which are answered even if all other connections are busy."""

LEFT: Final = "moorage.left"
"""Key in a request's scope of the functions to call if its client disconnects."""

_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Connections:
    """Counts all connections of a port, and closes idle ones.

    Args:
        most: The largest number of connections.
    """

    def __init__(self, most: int = CONNECTIONS_MAX) -> None:
        self._most, self._most_of_one = most, most_of_one(most)
        self._reserved = min(RESERVED_MAX, most // 4)
        self._idle: Peers[HttpConnection] = Peers()
        self._busy: Peers[HttpConnection] = Peers()

    def note(self, connection: "HttpConnection", *, busy: bool) -> None:
        """Record whether a connection is busy; close an idle connection if there are too many."""
        address = connection.address
        now, before = (self._busy, self._idle) if busy else (self._idle, self._busy)
        before.remove(connection)
        now.add(connection, address)
        if self._idle.count(address) + self._busy.count(address) > self._most_of_one:
            self._close(self._idle.oldest(address))
        elif len(self._idle) + len(self._busy) > self._most:
            self._close(self._idle.oldest())

    def _close(self, connection: "HttpConnection | None") -> None:
        if connection is not None:
            self.forget(connection)
            connection.transport.close()

    def forget(self, connection: "HttpConnection") -> None:
        """Remove a closed connection."""
        self._idle.remove(connection)
        self._busy.remove(connection)

    def is_crowded(self, address: str) -> bool:
        """Return whether too many requests are open, of all addresses or of the given one."""
        ours = self._busy.count(address)
        many, too_many = len(self._busy), self._most - self._reserved
        return many > too_many or ours > self._most_of_one - self._reserved


class HttpConnection(H11Protocol):
    """One connection of the HTTP port, with time limits.

    Args:
        more: The arguments that uvicorn gives its protocols.
    """

    def __init__(self, connections: Connections, **more: Any) -> None:
        super().__init__(**more)
        self.address = ""
        self._connections = connections
        self._has_answered = False
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # As uvicorn has it.
        """Count the new connection, and wait for a request."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._note_state()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove this connection from the count."""
        super().connection_lost(exc)
        for leave in cast("dict[str, Any]", self.scope or {}).pop(LEFT, ()):
            leave()
        self._connections.forget(self)
        self._unwatch()

    def data_received(self, data: bytes) -> None:
        """Process received data, and start or end the time limit of a request's head."""
        super().data_received(data)
        self._note_state()

    def on_response_complete(self) -> None:
        """Wait for the connection's next request."""
        self._has_answered = True
        super().on_response_complete()
        self._note_state()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing about an upgrade: its refusal names the WebSocket port for the client."""

    def pause_writing(self) -> None:
        """Pause sending the answer; close the connection if the client does not read in time."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_SECONDS_MAX, self.transport.abort)

    def resume_writing(self) -> None:
        """Continue sending the answer, and end its time limit: the client reads again."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
            self._note_state()

    def _note_state(self) -> None:
        """Record whether this connection is busy; start or end the time limit for a head."""
        if self.transport.is_closing():
            return
        busy = self.conn.our_state in {h11.SEND_RESPONSE, h11.SEND_BODY} or self.flow.write_paused
        self._connections.note(self, busy=busy)
        # Between two requests, no limit of this class applies; uvicorn closes idle connections.
        between = self._has_answered and self.conn.their_state is h11.IDLE and not self._has_begun
        if busy or between:
            if self._head is not None:
                self._head.cancel()
                self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS_MAX, self._too_slow)

    @property
    def _has_begun(self) -> bool:
        """Whether a part of an incomplete request has arrived."""
        return bool(self.conn.trailing_data[0])

    def _too_slow(self) -> None:
        if self.conn.our_state is h11.IDLE and self._has_begun:
            self.transport.write(_SLOW)
        self.transport.close()

    def _unwatch(self) -> None:
        for timer in (self._head, self._unread):
            if timer is not None:
                timer.cancel()

"""The WebSocket library behind a thin adapter: one connection, written to without waiting.

The library's `send` waits for the client inside the call, and its automatic pongs do not wait at
all. `Session` wants the opposite of both: writes that return at once, word of when the client
stops reading, and no reading from a client that does not read.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode, Frame
from websockets.protocol import Event, State

from moorage.gateway.received import PART_BYTES_MIN, Received
from moorage.model import SessionId
from moorage.protocol.codes import Close
from moorage.protocol.peers import Peers, most_of_one
from moorage.records.rights import Caller

_GOODBYES: Final = frozenset({Close.NORMAL, Close.GOING_AWAY, CloseCode.NO_STATUS_RCVD})
"""How clients close that are done; browsers name no code."""


class GatewayConnection(ServerConnection):
    """One TCP connection, from its first byte to its last.

    Attributes:
        registry: All connections of the gateway; it enters and leaves by itself.
        opening: Those of them that have no session yet; the gateway takes it out when it has one.
        address: Where it comes from.
        session_id, caller, bearer, cookies: Set when the opening handshake lets it in: the caller,
            and the token, or the console's cookies, that said so.
        is_agent: Whether an agent's token or key let it in.
        on_writable: Called with False when the client has stopped reading, True when it reads
            again.
        on_lost: Called once, when the connection is gone.

    """

    def __init__(
        self,
        *args: Any,
        registry: set["GatewayConnection"],
        received: Received,
        opening: Peers["GatewayConnection"],
        opening_max: int,
        connections_max: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.registry = registry
        self.received = received
        self._queued_bytes = 0
        """Of a large message that waits to be taken; nothing is read behind it meanwhile."""
        self._taken_bytes = 0
        self._noted_bytes = 0
        self._held_back = False
        self.opening = opening
        self.opening_max = opening_max
        self.address = ""
        self.connections_max = connections_max
        self.session_id = SessionId("")
        self.caller: Caller | None = None
        self.bearer: str | None = None
        self.cookies: list[str] = []
        self.is_agent = False
        self.on_writable: Callable[[bool], None] = _ignore
        self.on_lost: Callable[[], None] = _nothing

    @property
    def open(self) -> bool:
        """Whether a write can still reach the client."""
        return self.protocol.state is State.OPEN and not self.transport.is_closing()

    def write(self, texts: Iterable[bytes]) -> None:
        """Send text messages without waiting; look at `paused` before the next.

        Does nothing when the connection is closing: its client is not listening any more.
        """
        if self.open:
            # What the library's own `broadcast` does, but with one call to the system for all.
            for text in texts:
                self.protocol.send_text(text)
            self.transport.write(b"".join(self.protocol.data_to_send()))

    @property
    def said_goodbye(self) -> bool:
        """Whether the client closed because it was done, and not for some trouble."""
        frame = self.protocol.close_rcvd
        return frame is not None and frame.code in _GOODBYES

    def let_go(self) -> None:
        """Tell its session nothing more."""
        self.on_writable, self.on_lost = _ignore, _nothing

    async def drop(self, code: int, reason: str, seconds: float) -> None:
        """Close, and cut the connection when that takes longer than `seconds`.

        The library bounds the closing handshake, but not the wait for a full write buffer
        before it, which is just where a client that does not read leaves us.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.close(code, reason)
        if self.protocol.state is not State.CLOSED:
            self.transport.abort()
        await self.wait_closed()

    async def keepalive(self) -> None:
        """Ping the client, and close where no pong comes in time, though the socket is read.

        The library closes where none was read, also where none can be: a pong of a client that has
        more under way than it may stands in the socket, behind its further messages.
        """
        assert self.ping_interval is not None
        assert self.ping_timeout is not None
        with contextlib.suppress(ConnectionClosed):  # No other task awaits this one.
            while True:
                await asyncio.sleep(self.ping_interval)
                pong = asyncio.ensure_future(await self.ping())
                while not pong.done():
                    unread = self._unread
                    await asyncio.wait([pong], timeout=self.ping_timeout)
                    unread = unread or self._unread
                    if not pong.done() and not unread:
                        async with self.send_context():
                            self.protocol.fail(Close.DEFECT, "keepalive ping timeout")

    @property
    def _unread(self) -> bool:
        """Whether the socket is not read at the moment, so that what came says nothing."""
        return self.recv_messages.paused or self._held_back or self._taken_bytes > 0

    # What asyncio tells a protocol ---------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Enter the registry, and cut the oldest that has no session where there are too many."""
        super().connection_made(transport)
        self.recv_messages.resume = self._read_on
        self.address = (self.transport.get_extra_info("peername") or ("",))[0]
        self.registry.add(self)
        self.opening.add(self, self.address)
        surplus = None
        if self.opening.count(self.address) > most_of_one(self.opening_max):
            surplus = self.opening.oldest(self.address)
        elif len(self.opening) > self.opening_max or len(self.registry) > self.connections_max:
            surplus = self.opening.oldest()
        if surplus is not None:
            self.opening.remove(surplus)
            surplus.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the registry."""
        super().connection_lost(exc)
        self.registry.discard(self)
        self.opening.remove(self)
        self._note(0)
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Count the received bytes of a message, and check the sum of all messages."""
        super().data_received(data)
        coming = len(self.protocol.reader.buffer) + (self.protocol.current_size or 0)
        self._note(coming + self._queued_bytes + self._taken_bytes)

    def process_event(self, event: Event) -> None:
        """Read no further while a large message waits to be taken."""
        super().process_event(event)
        if not isinstance(event, Frame) or len(event.data) < PART_BYTES_MIN:
            return
        self._queued_bytes += len(event.data)
        if not self.recv_messages.paused:
            self.recv_messages.paused = True
            self.recv_messages.pause()

    @contextlib.contextmanager
    def taking(self, count: int) -> Iterator[None]:
        """Read no further while a large message that was received waits for its turn."""
        self._queued_bytes, self._taken_bytes = 0, count
        self._read_no_more()
        try:
            yield
        finally:
            self._taken_bytes = 0
            self._note(len(self.protocol.reader.buffer) + self._queued_bytes)
            if not self.recv_messages.paused:
                self._read_on()

    def hold_back(self) -> None:
        """Stop reading this connection: see `Received`."""
        self._held_back = True
        self._read_no_more()

    def go_on(self) -> None:
        """Read on: see `Received`."""
        self._held_back = False
        if not self.recv_messages.paused:
            self._read_on()

    def _note(self, count: int) -> None:
        count = 0 if count < PART_BYTES_MIN else count
        if count != self._noted_bytes and self.caller is not None:
            self._noted_bytes = count
            self.received.note(self, self.caller.tenant, count)

    def pause_writing(self) -> None:
        """Read no more from a client that does not read.

        Pongs are written as pings arrive. Without this, a client that sends pings and reads
        nothing would grow the write buffer for as long as it liked.
        """
        super().pause_writing()
        self.transport.pause_reading()
        self.on_writable(False)  # noqa: FBT003  # The callback's one argument is its meaning.

    def resume_writing(self) -> None:
        """Read again, unless the receive queue is full."""
        super().resume_writing()
        if not self.recv_messages.paused:
            self._read_on()
        self.on_writable(True)  # noqa: FBT003  # As above.

    def _read_no_more(self) -> None:
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def _read_on(self) -> None:
        if not (self.transport.is_closing() or self.paused or self._held_back or self._taken_bytes):
            self.transport.resume_reading()


def _ignore(_: bool) -> None:  # The shape of `on_writable`.
    """Stand in before a session exists."""


def _nothing() -> None:
    """Stand in before a session exists."""

"""A thin adapter of the WebSocket library: one connection, whose writes never wait.

The library's `send` waits for the client, and its automatic pongs do not wait at all. `Session`
needs the opposite of both: writes return at once, the session learns when the client stops reading,
and the server reads nothing from such a client.
"""

import asyncio
import contextlib
import select
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import SEND_EOF, Event, State

from moorage.gateway.received import PART_BYTES_MIN, Received
from moorage.model import SessionId
from moorage.protocol.codes import Close
from moorage.protocol.loop_shares import READ_SECONDS_MAX, LoopShares
from moorage.protocol.peers import Peers, most_of_one
from moorage.protocol.proxies import remote_text
from moorage.records.rights import Caller

PIECE_BYTES: Final = 2 * 1024
"""Bytes of frames that are processed at once: a millisecond of work if all frames are empty. One
read of the socket returns up to a quarter of a mebibyte."""
AT_ONCE_MAX: Final = 8
"""Maximum messages of a piece that `process_event` handles at once, within the share of the tenant.
The reader's task handles further messages, in turn with other connections."""
_LEFT: Final = getattr(select, "POLLRDHUP", select.POLLHUP)
_GOODBYES: Final = frozenset({Close.NORMAL, Close.GOING_AWAY, CloseCode.NO_STATUS_RCVD})
"""Close codes of a normal end; `NO_STATUS_RCVD`: a browser closed without a code."""


class GatewayConnection(ServerConnection):
    """One TCP connection, from its first byte to its last.

    Attributes:
        registry: All connections of the gateway; each adds and removes itself.
        opening: Connections without a session; the gateway removes them when they get one.
        address: The client's address; from its handshake on, the one that a trusted proxy names.
        remote: The same with the port, if the server knows the port.
        session_id, caller, bearer, cookies: Set by a successful opening handshake. `bearer` is
            the token, and `cookies` the console's cookies, that identified the caller.
        is_agent: Whether the gateway accepted the connection for an agent's token or key.
        on_text: Called with a text message in one frame while the session's reader waits for one;
            it returns whether it handled the message.
        on_writable: Called with False when the client has stopped reading, True when it reads
            again.
        on_lost: Called once, when the connection is gone.
    """

    def __init__(
        self,
        *args: Any,
        registry: set["GatewayConnection"],
        received: Received,
        shares: LoopShares,
        opening: Peers["GatewayConnection"],
        opening_max: int,
        connections_max: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.registry = registry
        self.received = received
        self._shares = shares
        self._unread = memoryview(b"")
        """Received bytes that wait for their tenant's next turn."""
        self._turn: asyncio.Future[None] | None = None
        self._eof = self._lost = False
        """Whether the client ended its side, or the connection was lost, while messages were
        unread."""
        self._large: Frame | None = None
        """The last large message. The library holds this message until the next frame comes."""
        self._queued_bytes = 0
        """Bytes of a large message that waits to be taken; until then nothing after it is read."""
        self._taken_bytes = 0
        self._noted_bytes = 0
        self._held_back = False
        self.opening = opening
        self.opening_max = opening_max
        self.address = self.remote = ""
        self.connections_max = connections_max
        self.session_id = SessionId("")
        self.caller: Caller | None = None
        self.bearer: str | None = None
        self.cookies: list[str] = []
        self.is_agent = False
        self._began = 0.0
        """Time at which the reading of this piece began, by `perf_counter`."""
        self._at_once = 0
        """Number of messages of this piece that may still be handled as they are read."""
        self.on_text: Callable[[bytes], bool] = _leave_to_reader
        self.on_writable: Callable[[bool], None] = _ignore
        self.on_lost: Callable[[], None] = _nothing

    @property
    def open(self) -> bool:
        """Whether a write can still reach the client."""
        return self.protocol.state is State.OPEN and not self.transport.is_closing()

    def write(self, texts: Iterable[bytes]) -> None:
        """Send text messages without waiting; check `paused` before the next ones.

        Does nothing when the connection is closing: the client no longer reads.
        """
        if self.open:
            # Like the library's `broadcast`, but with one system call for all texts.
            for text in texts:
                self.protocol.send_text(text)
            self.transport.write(b"".join(self.protocol.data_to_send()))

    @property
    def said_goodbye(self) -> bool:
        """Whether the client closed normally, not because of an error."""
        frame = self.protocol.close_rcvd
        return frame is not None and frame.code in _GOODBYES

    @property
    def has_left(self) -> bool:
        """Return whether the client has left; a paused socket does not report that by itself."""
        if not self.open:
            return True
        look = select.poll()
        look.register(self.transport.get_extra_info("socket").fileno(), _LEFT)
        return bool(look.poll(0))

    def let_go(self) -> None:
        """Detach the session: call none of its methods from now on."""
        self.on_text, self.on_writable, self.on_lost = _leave_to_reader, _ignore, _nothing

    async def drop(self, code: int, reason: str, seconds: float) -> None:
        """Close the connection; cut it if the close takes longer than `seconds`.

        The library limits the time of the closing handshake, but not of the wait before it while
        the write buffer is full because the client does not read.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.close(code, reason)
        self._unread = memoryview(b"")
        if self.protocol.state is not State.CLOSED:
            self.transport.abort()
        await self.wait_closed()

    async def keepalive(self) -> None:
        """Ping the client; close if no pong comes in time, although the server reads the socket.

        The library's own keepalive also closes while the server does not read the socket: if a
        client exceeds its limits, its pong waits there, unread, behind its further messages.
        """
        assert self.ping_interval is not None
        assert self.ping_timeout is not None
        with contextlib.suppress(ConnectionClosed):  # No other task awaits this one.
            while True:
                await asyncio.sleep(self.ping_interval)
                pong = asyncio.ensure_future(await self.ping())
                while not pong.done():
                    silent = self._silent
                    await asyncio.wait([pong], timeout=self.ping_timeout)
                    silent = silent or self._silent
                    if not pong.done() and not silent:
                        async with self.send_context():
                            self.protocol.fail(Close.DEFECT, "keepalive ping timeout")

    @property
    def _silent(self) -> bool:
        """Whether the socket is paused, so that silence does not mean a dead client."""
        return (
            self.recv_messages.paused
            or self._held_back
            or self._taken_bytes > 0
            or self._turn is not None
        )

    # Callbacks of asyncio ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection; beyond the limit, cut the oldest one without a session."""
        super().connection_made(transport)
        self.recv_messages.resume = self._read_on
        peer = self.transport.get_extra_info("peername") or ("", 0)
        self.address, self.remote = peer[0], remote_text(peer[0], peer[1])
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

    def eof_received(self) -> None:
        """Read the remaining received bytes, then handle the end of the stream."""
        if self._turn is None:
            super().eof_received()
        self._eof = self._turn is not None

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the registry once all received bytes are read; after an error, leave at once."""
        if self._turn is not None and exc is None and self._unread:
            self._lost = True
            return
        self._unread = memoryview(b"")
        super().connection_lost(exc)
        self.registry.discard(self)
        self.opening.remove(self)
        self._note(0)
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Read received bytes, unless earlier ones still wait for a turn."""
        self._unread = memoryview(bytes(self._unread) + data if self._unread else data)
        if self._turn is None:
            self._read_pieces()

    def _read_pieces(self) -> None:
        """Read received bytes, as many as its tenant's share of this turn of the loop allows."""
        while self._unread:
            if self.caller is not None:
                self._turn = self._shares.turn(self.caller.tenant)
            if self._turn is not None:
                self._read_no_more()
                self._turn.add_done_callback(self._next_turn)
                return
            self._read_piece()

    def _read_piece(self) -> None:
        self._began = time.perf_counter()
        self._at_once = 0 if self._eof or self._lost else AT_ONCE_MAX
        piece, rest = self._unread[:PIECE_BYTES], self._unread[PIECE_BYTES:]
        self._unread = rest or memoryview(b"")  # An empty view would keep the whole buffer.
        super().data_received(bytes(piece))
        coming = len(self.protocol.reader.buffer) + (self.protocol.current_size or 0)
        self._note(coming + len(self._unread) + self._queued_bytes + self._taken_bytes)
        if self.caller is not None:
            self._shares.spend(self.caller.tenant, time.perf_counter() - self._began)

    def _next_turn(self, _: asyncio.Future[None]) -> None:
        self._turn = None
        if self._unread:
            self._read_piece()
        self._read_pieces()
        if self._turn is not None:
            return
        if self._eof:
            super().eof_received()
        if self._lost:
            self.connection_lost(None)
        elif not self.recv_messages.paused:
            self._read_on()

    def send_data(self) -> None:
        """Send the protocol's own answers, such as thousands of pongs, in a single write."""
        pieces = self.protocol.data_to_send()
        if self.transport.is_closing():
            return
        if answers := b"".join(pieces):
            self.transport.write(answers)
        if SEND_EOF in pieces and self.transport.can_write_eof():
            with contextlib.suppress(OSError, RuntimeError):  # uvloop raises if the socket is gone.
                self.transport.write_eof()
        elif SEND_EOF in pieces:  # TLS cannot close only one direction.
            self.transport.close()

    def process_event(self, event: Event) -> None:
        """Hand a message to the session whose reader waits for one, or queue it for the reader.

        Stop reading while a large message waits to be taken.
        """
        if isinstance(event, Frame) and event.opcode is Opcode.TEXT and event.fin and self._at_once:
            reader = self.recv_messages.frames.get_waiter
            if reader is not None and not reader.done() and self.on_text(bytes(event.data)):
                spent = time.perf_counter() - self._began
                self._at_once = self._at_once - 1 if spent < READ_SECONDS_MAX else 0
                return
        super().process_event(event)
        if not isinstance(event, Frame) or len(event.data) < PART_BYTES_MIN:
            return
        self._queued_bytes += len(event.data)
        self._large = event
        if not self.recv_messages.paused:
            self.recv_messages.paused = True
            self.recv_messages.pause()

    @contextlib.contextmanager
    def taking(self, count: int) -> Iterator[None]:
        """Stop reading while a received large message waits for its turn."""
        self._queued_bytes, self._taken_bytes = 0, count
        if self._large is not None and not self.recv_messages.frames:  # Else the next message.
            self._large.data, self._large = b"", None
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
        """Continue to read this connection: see `Received`."""
        self._held_back = False
        if not self.recv_messages.paused:
            self._read_on()

    def _note(self, count: int) -> None:
        count = 0 if count < PART_BYTES_MIN else count
        if count != self._noted_bytes and self.caller is not None:
            self._noted_bytes = count
            self.received.note(self, self.caller.tenant, count)

    def pause_writing(self) -> None:
        """Stop reading from a client that does not read its answers.

        Pongs are written as pings arrive. Without this, a client that sends pings and reads nothing
        would grow the write buffer without bound.
        """
        super().pause_writing()
        self.transport.pause_reading()
        self.on_writable(False)  # noqa: FBT003  # The callback's one argument is its meaning.

    def resume_writing(self) -> None:
        """Continue to read, unless the receive queue is full."""
        super().resume_writing()
        if not self.recv_messages.paused:
            self._read_on()
        self.on_writable(True)  # noqa: FBT003  # As above.

    def _read_no_more(self) -> None:
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def _read_on(self) -> None:
        if not (
            self.transport.is_closing()
            or self.paused
            or self._held_back
            or self._taken_bytes
            or self._turn is not None
        ):
            self.transport.resume_reading()


def _leave_to_reader(_: bytes) -> bool:
    """Handle no message: there is no session yet."""
    return False


def _ignore(_: bool) -> None:  # Has the type of `on_writable`.
    """Do nothing: there is no session yet."""


def _nothing() -> None:
    """Do nothing: there is no session yet."""

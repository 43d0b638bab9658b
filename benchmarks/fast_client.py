"""A WebSocket client that uses little CPU time, to leave it to the server under test.

`overload` and `floods` load a server with it.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from moorage.lab.errors import CommandError

SHORT_HEAD: Final = 2
TWO_BYTES_MORE, EIGHT_BYTES_MORE = 126, 127
_LENGTH_BYTES: Final = {TWO_BYTES_MORE: 2, EIGHT_BYTES_MORE: 8}
WHOLE_TEXT: Final = 0x81
WHOLE_PING, WHOLE_PONG = 0x89, 0x8A


class _Error(msgspec.Struct):
    code: str = ""
    reason: str = ""


class _Lease(msgspec.Struct):
    id: str
    token: str = ""


class FastReply(msgspec.Struct):
    """The fields of a reply that load generators read."""

    success: bool = True
    id: str | int = ""
    lease: _Lease | None = None
    error: _Error | None = None
    event: str = ""


_read: Final = msgspec.json.Decoder(FastReply).decode


def ignore(*_: object) -> None:
    """Ignore a reply."""


def pack(message: dict[str, Any] | str, opcode: Opcode = Opcode.TEXT) -> bytes:
    """Return the frame of a message, which can be sent repeatedly."""
    text = message.encode() if isinstance(message, str) else msgspec.json.encode(message)
    return Frame(opcode, text).serialize(mask=True)


class FastClient(asyncio.Protocol):
    """Sends and receives messages over one WebSocket connection.

    Args:
        on_reply: Called with each reply.
        token: Bearer token; "" for none.
        ponged: Called with each pong.

    Attributes:
        open: A future that is done after the handshake.
        lost: Set once the connection is gone.
        writable: Cleared while the socket's buffer is full.
    """

    def __init__(
        self,
        url: str,
        on_reply: Callable[["FastClient", FastReply], None],
        token: str = "",
        ponged: Callable[[], None] = ignore,
    ) -> None:
        self._handshake: ClientProtocol | None = ClientProtocol(parse_uri(url))
        self._on_reply = on_reply
        self._token = token
        self._ponged = ponged
        self._unread = b""
        self.open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport: Any) -> None:
        """Send the handshake."""
        self.transport = transport
        assert self._handshake is not None
        request = self._handshake.connect()
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        self._handshake.send_request(request)
        self.send(b"".join(self._handshake.data_to_send()))

    def connection_lost(self, exc: Exception | None) -> None:
        """Record that the connection is lost."""
        if not self.open.done():
            self.open.set_exception(exc or CommandError("the daemon closed the connection"))
        self.lost.set()
        self.writable.set()

    async def close(self) -> None:
        """Close the connection, before the event loop ends."""
        self.transport.abort()
        await self.lost.wait()

    def pause_writing(self) -> None:
        """Stop sending, since the socket's buffer is full."""
        self.writable.clear()

    def resume_writing(self) -> None:
        """Send again, since the socket's buffer has room."""
        self.writable.set()

    def send(self, data: bytes) -> None:
        """Send frames; after the loss of the connection, do nothing."""
        if not self.lost.is_set():
            self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and call `on_reply` with each reply."""
        if self._handshake is not None:
            self._handshake.receive_data(data)
            if not self._handshake.events_received():
                return
            refused = self._handshake.handshake_exc
            self._handshake = None
            if refused is None:
                self.open.set_result(None)
            else:
                self.open.set_exception(CommandError(str(refused)))
            return
        data, at = self._unread + data, 0
        # A server's frames are not masked, and Moorage's frames are whole (RFC 6455, 5.2).
        while len(data) - at >= SHORT_HEAD:
            start, length = at + SHORT_HEAD, data[at + 1]
            if more := _LENGTH_BYTES.get(length, 0):
                start, length = start + more, int.from_bytes(data[start : start + more])
            if len(data) < max(start, start + length):
                break
            if data[at] == WHOLE_TEXT:
                self._on_reply(self, _read(data[start : start + length]))
            elif data[at] == WHOLE_PING:
                self.send(Frame(Opcode.PONG, data[start : start + length]).serialize(mask=True))
            elif data[at] == WHOLE_PONG:
                self._ponged()
            at = start + length
        self._unread = data[at:]


async def connect(
    url: str,
    on_reply: Callable[[FastClient, FastReply], None],
    token: str = "",
    ponged: Callable[[], None] = ignore,
) -> FastClient:
    """Return an open connection.

    Raises:
        CommandError, OSError: The connection was refused.
    """
    address = parse_uri(url)
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(
        lambda: FastClient(url, on_reply, token, ponged), address.host, address.port
    )
    await client.open
    return client

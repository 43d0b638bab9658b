"""Sends and receives frames between an agent and its server; both sides use this module."""

from contextlib import suppress
from typing import Final

from websockets.asyncio.connection import Connection
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request
from websockets.protocol import State

AGENT_PATH: Final = "/agent"
"""URL path at which agents connect, on the port of the WebSocket."""
FRAME_BYTES_MAX: Final = 8 << 20
"""At most this many bytes in one frame; the largest frames have a command's output, or a machine
with very many devices."""
_NO_REQUEST: Final = Request("", Headers())
"""Stands for an answered request; without a request, the library would expect a handshake."""


class AgentSocket:
    """The WebSocket between an agent and its server, after the opening handshake."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        connection.protocol.max_message_size = FRAME_BYTES_MAX

    @property
    def own_address(self) -> str:
        """The local address of this connection."""
        return str(self._connection.local_address[0])

    def rely_on_beats(self) -> None:
        """Free the memory of handshake and pings: a server has thousands of connections."""
        connection = self._connection
        connection.request, connection.response = _NO_REQUEST, None
        if connection.keepalive_task is not None:
            connection.keepalive_task.cancel()
            connection.keepalive_task = None

    async def send(self, frame: bytes) -> None:
        """Send a frame; do nothing if the connection is lost."""
        with suppress(ConnectionClosed):
            await self._connection.send(frame)

    def answer(self, frame: bytes) -> None:
        """Send a small frame without waiting; stop reading a peer that reads no answers."""
        if self._connection.protocol.state is State.OPEN:
            self._connection.protocol.send_binary(frame)
            self._connection.send_data()

    async def receive(self) -> bytes | None:
        """Return the next frame; None if the connection is lost."""
        try:
            return await self._connection.recv(decode=False)
        except ConnectionClosed:
            return None

    def abort(self) -> None:
        """End the connection at once."""
        self._connection.transport.abort()

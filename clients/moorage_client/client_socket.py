"""The WebSocket of `Connection`, which counts what it hears; imported late, as it is slow to."""

from websockets.asyncio.client import ClientConnection

__all__ = ["ClientSocket"]


class ClientSocket(ClientConnection):
    """Also counts the bytes of a message that is still under way."""

    bytes_heard = 0

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        self.bytes_heard += len(data)
        super().data_received(data)

"""The WebSocket of `Connection`, which counts received bytes. Imported late: the import is slow."""

from websockets.asyncio.client import ClientConnection


class ClientSocket(ClientConnection):
    """A WebSocket that also counts the bytes of an incomplete message."""

    bytes_heard = 0

    def data_received(self, data: bytes) -> None:
        """Count and process received bytes."""
        self.bytes_heard += len(data)
        super().data_received(data)

"""A TCP proxy that cuts connections without a goodbye, as a broken network does."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

RESET = struct.pack("ii", 1, 0)


class CutProxy:
    """Passes bytes on, until `cut`; new connections pass on again."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._begin(self._accept)

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Reset both sides of every connection."""
        with self._lock:
            ends, self._ends = self._ends, []
        for end in ends:
            # The reset leaves with `shutdown`, also while the other thread reads.
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Cut all, and whatever comes until the end of the block."""
        self._is_closed = True
        self.cut()
        try:
            yield
        finally:
            self._is_closed = False

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # Wakes `accept`.
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(30)

    def _begin(self, what, *arguments) -> None:
        thread = threading.Thread(target=what, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # It is closed.
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                with self._lock:
                    if self._is_closed:
                        client.close()
                        server.close()
                        continue
                    self._ends += [client, server]
                self._begin(self._pass_on, client, server)
                self._begin(self._pass_on, server, client)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # It is cut.
            while piece := source.recv(65_536):
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def cut_proxy(port: int) -> Iterator[CutProxy]:
    proxy = CutProxy(port)
    try:
        yield proxy
    finally:
        proxy.stop()

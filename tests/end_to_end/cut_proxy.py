"""A TCP proxy that cuts connections without a goodbye, as a broken network does."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial
from socketserver import BaseRequestHandler, ThreadingTCPServer

RESET = struct.pack("ii", 1, 0)


class CutProxy(ThreadingTCPServer):
    """Passes bytes on until `cut`; new connections are passed on again."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.target = port
        self.url = f"ws://127.0.0.1:{self.server_address[1]}"
        self.ends: list[socket.socket] = []
        self.is_closed = False
        self.passes = threading.Event()
        """While this event is not set, the proxy passes no bytes on, like a partitioned network."""
        self.passes.set()

    def verify_request(self, request: object, client_address: object) -> bool:
        """Return whether a connection is passed on; called before its handler begins."""
        return not self.is_closed

    def cut(self) -> None:
        """Reset both sides of every connection."""
        ends, self.ends = self.ends, []
        for end in ends:
            # `shutdown` sends the reset, also while the other thread reads.
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Cut all connections, also new connections, until the end of the block."""
        self.is_closed = True
        self.cut()
        try:
            yield
        finally:
            self.is_closed = False


class _Passing(BaseRequestHandler):
    server: CutProxy

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.target)) as there:
            self.server.ends += [self.request, there]
            if self.server.is_closed:
                self.server.cut()
            ways = (there, self.request), (self.request, there)
            first, second = (partial(_pass_on, self.server.passes, *way) for way in ways)
            back = threading.Thread(target=first, daemon=True)
            back.start()
            second()
            back.join()


def _pass_on(passes: threading.Event, source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):  # The connection was cut.
        while piece := source.recv(65_536):
            passes.wait()
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def cut_proxy(port: int) -> Iterator[CutProxy]:
    with CutProxy(port) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield proxy
        finally:
            proxy.passes.set()
            proxy.cut()
            proxy.shutdown()

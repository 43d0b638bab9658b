"""Small HTTP servers with answers prepared by a test."""

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any] | None


class Handler(BaseHTTPRequestHandler):
    server: "Site"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = self.server.answer(self, body)
        if answer is None:
            self.close_connection = True
            return
        status, document = answer
        text = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815  # The names http.server looks for.

    def log_message(self, *arguments: object) -> None:
        """Write no log."""


class Served:
    """A server that answers on a separate thread until it is closed."""

    daemon_threads = True

    def serve(self) -> None:
        self.serving = threading.Thread(target=self.serve_forever, args=(0.02,))
        self.serving.start()

    def server_close(self) -> None:
        self.shutdown()
        self.serving.join()
        super().server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log no errors of clients that leave or that distrust the certificate."""


class Site(Served, ThreadingHTTPServer):
    """A server over HTTP, with TLS if the test gives a context."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.shown: list[str | None] = []
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.serve()

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> Answer:
        """Return a status and a document or bytes; None cuts the connection."""
        self.shown.append(request.headers.get("Authorization"))
        return 200, {"success": True, "data": []}

"""A real browser, and sites for it to show: Debian's Chromium, driven by Playwright."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.chromium import running_chromium

FLAGS = (
    *("--disable-quic", "--disable-sync", "--disable-component-update"),
    # Chromium's own protection of local servers is off: other browsers lack it, and we test ours.
    "--disable-features=LocalNetworkAccessChecks,LocalNetworkAccessChecksWebSockets",
)


@pytest.fixture(scope="module")
def chromium() -> Iterator:
    with running_chromium(FLAGS) as browser:
        yield browser


@pytest.fixture
def page(chromium) -> Iterator:
    context = chromium.new_context()
    yield context.new_page()
    context.close()


class _Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>site</title>")

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture(scope="module")
def site_port() -> Iterator[int]:
    """The port of a web server with an empty page, under all names of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()

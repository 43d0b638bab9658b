"""A real browser, and sites for it to show: Debian's Chromium, driven by Playwright."""

import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    "--host-resolver-rules=MAP *.example 127.0.0.1",
    # Its own protection of local servers, which other browsers do not have: ours is under test.
    "--disable-features=LocalNetworkAccessChecks,LocalNetworkAccessChecksWebSockets",
]


@pytest.fixture(scope="module")
def chromium() -> Iterator:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not here; on Debian: apt-get install chromium")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright, which drives chromium, is not installed"
    )
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


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

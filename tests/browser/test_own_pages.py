"""Pages of one's own site, in a real browser: they show who they are as a subprotocol."""

import base64
import time
from collections.abc import Iterator

import httpx
import pytest

from moorage.testing.daemon_process import Running, daemon

pytestmark = pytest.mark.heavy  # A browser.

TOKEN = "s3cret~?"  # noqa: S105  # Of a daemon that lives for one test.
KNOWN = {"Authorization": f"Bearer {TOKEN}"}
SOCKET = """([url, protocols]) => new Promise(done => {
    const socket = new WebSocket(url, protocols);
    socket.onopen = () => socket.send(JSON.stringify({op: "fleet"}));
    socket.onmessage = event => {
        done([JSON.parse(event.data).success, socket.protocol]);
        socket.close();
    };
    socket.onerror = () => done("refused");
})"""


@pytest.fixture(scope="module")
def served(site_port: int) -> Iterator[Running]:
    """A server with tokens that lets pages of one site in."""
    environment = {
        "MOORAGE_TOKENS": f"ann:{TOKEN}",
        "MOORAGE_ALLOWED_ORIGINS": f"http://ours.example:{site_port}",
    }
    with daemon(environment=environment) as running:
        yield running


def bearer(token: str) -> list[str]:
    shown = base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")
    return ["moorage", f"moorage.bearer.{shown}"]


def ticket(running: Running) -> dict:
    """Return what the page's own server gets for it."""
    answer = httpx.post(f"{running.http}/websocket-ticket", headers=KNOWN).raise_for_status()
    return answer.json()["data"]


def test_a_page_that_knows_the_token_is_let_in(page, served, site_port):
    page.goto(f"http://ours.example:{site_port}/")
    assert page.evaluate(SOCKET, [served.ws, bearer(TOKEN)]) == [True, "moorage"]
    for wrong in ([], ["moorage"], bearer("wrong"), bearer(TOKEN)[1:]):
        assert page.evaluate(SOCKET, [served.ws, wrong]) == "refused"


def test_a_ticket_lets_a_page_in_once(page, served, site_port):
    page.goto(f"http://ours.example:{site_port}/")
    issued = ticket(served)
    assert TOKEN not in str(issued)
    assert page.evaluate(SOCKET, [served.ws, issued["protocols"]]) == [True, "moorage"]
    assert page.evaluate(SOCKET, [served.ws, issued["protocols"]]) == "refused"


def test_a_ticket_lasts_for_ten_seconds(page, served, site_port):
    page.goto(f"http://ours.example:{site_port}/")
    before = time.time()
    issued = ticket(served)
    assert issued["expires_at"] <= time.time() + 10
    assert issued["expires_at"] >= before + 10
    time.sleep(max(0, issued["expires_at"] - time.time()) + 0.1)  # That it is over is under test.
    assert page.evaluate(SOCKET, [served.ws, issued["protocols"]]) == "refused"


def test_a_page_of_another_site_is_not_let_in_with_either(page, served, site_port):
    page.goto(f"http://evil.example:{site_port}/")
    assert page.evaluate(SOCKET, [served.ws, bearer(TOKEN)]) == "refused"
    assert page.evaluate(SOCKET, [served.ws, ticket(served)["protocols"]]) == "refused"

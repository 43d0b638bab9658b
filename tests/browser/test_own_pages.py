"""Pages of an allowed site, in a real browser, authenticate by a subprotocol of the WebSocket."""

import base64
from collections.abc import Iterator

import httpx
import pytest

from moorage.testing.daemon_process import Running, daemon
from tests.clients.test_typescript import client_folder

__all__ = ["client_folder"]

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

CONNECT = """async ([url, credential]) => {
    const { MoorageClient } = await import("/dist/client.js");
    const client = await MoorageClient.connect(url, credential).catch(no => no);
    if (client instanceof Error) return client.message;
    const answer = await client.ask("fleet", {});
    client.close();
    return answer.data;
}"""


@pytest.fixture(scope="module")
def server(site_port: int) -> Iterator[Running]:
    """A server with tokens that admits pages of one site."""
    ours = f"http://ours.example:{site_port}"
    environment = {"MOORAGE_TOKENS": f"ann:{TOKEN}", "MOORAGE_ALLOWED_ORIGINS": ours}
    with daemon(environment=environment) as running:
        yield running


def bearer(token: str) -> list[str]:
    shown = base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")
    return ["moorage", f"moorage.bearer.{shown}"]


def ticket(running: Running) -> dict:
    """Return a ticket, as the page's own web server would request it for the page."""
    answer = httpx.post(f"{running.http}/websocket-ticket", headers=KNOWN).raise_for_status()
    return answer.json()["data"]


def test_a_page_that_knows_the_token_may_connect(page, server, site_port):
    page.goto(f"http://ours.example:{site_port}/")
    assert page.evaluate(SOCKET, [server.ws, bearer(TOKEN)]) == [True, "moorage"]
    for wrong in ([], ["moorage"], bearer("wrong"), bearer(TOKEN)[1:]):
        assert page.evaluate(SOCKET, [server.ws, wrong]) == "refused"
    page.goto(f"http://evil.example:{site_port}/")
    for known in (bearer(TOKEN), ticket(server)["protocols"]):
        assert page.evaluate(SOCKET, [server.ws, known]) == "refused"


def test_a_ticket_connects_a_page_once(page, server, site_port):
    page.goto(f"http://ours.example:{site_port}/")
    issued = ticket(server)
    assert TOKEN not in str(issued)
    assert page.evaluate(SOCKET, [server.ws, issued["protocols"]]) == [True, "moorage"]
    assert page.evaluate(SOCKET, [server.ws, issued["protocols"]]) == "refused"


def test_the_typescript_client_connects_a_page_or_reports_the_reason(
    page, server, site_port, client_folder
):
    def record_page(route):
        name = route.request.url.rpartition("/")[2]
        route.fulfill(path=client_folder / "dist" / name, content_type="text/javascript")

    page.route("**/dist/*", record_page)
    page.goto(f"http://ours.example:{site_port}/")
    once = {"ticket": ticket(server)["ticket"]}
    for credential in ({"token": TOKEN}, once):
        assert page.evaluate(CONNECT, [server.ws, credential]) == {"clusters": [], "next": None}
    origin = f"http://ours.example:{site_port} in the setting allowed_origins"
    for wrong, said in (
        (once, f"is the ticket unused and not older than ten seconds, and is {origin}?"),
        ({"token": "wrong"}, f"is the token right, and is {origin}?"),
        (None, f"give connect() {{ token }} or {{ ticket }}, or name {origin}"),
    ):
        refused = page.evaluate(CONNECT, [server.ws, wrong])
        assert refused == f"{server.ws} does not let this page in: {said}"

"""Requests from foreign pages, for foreign hosts or with two lengths reach no endpoint."""

import asyncio

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from moorage.protocol.origins import Origins
from moorage.protocol.proxies import read_proxies
from moorage.records.rights import Caller, Role
from moorage.web.checks import RequestChecks
from moorage.web.connections import Connections
from moorage.web.server import WebServer
from tests.forwarding import forwarded_clients

PATIENCE_SECONDS = 60


async def send_raw(port: int, request: str) -> tuple[int, str]:
    """Send raw bytes, and return the status and the complete answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode())
    async with asyncio.timeout(PATIENCE_SECONDS):
        answer = await reader.read()
    writer.close()
    return int(answer.split()[1]), answer.decode()


CLOSE = "Connection: close\r\n"


@pytest.mark.parametrize("tokens", [{None: "local"}, {"key": "ann"}], ids=["open", "tokens"])
class TestPages:
    """The checks run with and without tokens: a page may know a token."""

    @pytest.mark.parametrize(
        ("headers", "field"),
        [
            ({"Host": "evil.example"}, "host"),
            ({"Origin": "https://evil.example"}, "origin"),
            ({"Sec-Fetch-Site": "cross-site"}, "sec-fetch-site"),
        ],
    )
    async def test_foreign_sites_are_refused_on_every_path(self, client, headers, field):
        headers = {"Authorization": "Bearer key", "Content-Type": "text/plain"} | headers
        for method, path in (
            *(("GET", path) for path in ("/healthz", "/metrics", "/policy", "/nothing/here")),
            *(("POST", "/clusters"), ("POST", "/allocate"), ("OPTIONS", "/clusters")),
        ):
            answer = await client.request(method, path, headers=headers, content=b"{}")
            assert answer.status_code == 403, (method, path)
            body = answer.json()
            details = body.get("details", body["error"])
            assert (details["code"], details["field"]) == ("forbidden", field), (method, path)
            assert not any(name.startswith("access-control") for name in answer.headers)

    async def test_programs_and_our_own_pages_are_answered(self, client, site, tokens):
        token = {"Authorization": "Bearer key"} if "key" in tokens else {}
        for headers in (
            {},
            {"Host": "localhost"},
            {"Host": "localhost:1234"},  # Through a tunnel.
            {"Origin": f"http://127.0.0.1:{site.port}", "Sec-Fetch-Site": "same-origin"},
            {"Origin": f"http://localhost:{site.port}"},
            {"Host": "localhost:1234", "Origin": "http://localhost:1234"},
            {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
        ):
            answer = await client.get("/policy", headers=token | headers)
            assert answer.status_code == 200, headers

    async def test_a_request_to_upgrade_does_not_bypass_the_checks(self, client):
        upgrade = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Origin": "https://evil.example",
        }
        assert (await client.get("/", headers=upgrade)).status_code == 403


async def test_a_websocket_is_sent_to_the_right_port_and_nothing_is_logged(site, caplog):
    server = WebServer(site.house)
    port = await server.start("127.0.0.1", 0)
    server.name_websocket_port(8765)
    with pytest.raises(InvalidStatus) as caught:
        await connect(f"ws://127.0.0.1:{port}")
    answer = caught.value.response
    assert (answer.status_code, answer.headers["Connection"]) == (426, "close")
    assert b"connect the WebSocket to port 8765" in answer.body
    assert "WebSocket" not in caplog.text, "uvicorn must log no complaint"
    await server.close()


HOST = "Host: localhost\r\n"


@pytest.mark.parametrize(
    ("line", "headers", "status"),
    [
        ("/healthz HTTP/1.0", "", 200),  # Old programs send no host.
        ("/healthz HTTP/1.1", "", 400),
        ("/healthz HTTP/1.1", HOST + HOST, 400),
        ("http://evil.example/healthz HTTP/1.1", HOST, 403),
        ("http://localhost/healthz HTTP/1.1", HOST, 404),
        ("/policy HTTP/1.1", HOST + "Authorization: Bearer a\r\nAuthorization: Bearer b\r\n", 401),
        *((f"/{path}/ HTTP/1.1", HOST, 404) for path in ("clusters", "policy", "healthz")),
    ],
)
async def test_unusual_requests_are_answered_and_not_redirected(site, line, headers, status):
    found, answer = await send_raw(site.port, f"GET {line}\r\n{headers}{CLOSE}\r\n")
    assert found == status
    assert "location:" not in answer.lower()


async def test_names_and_origins_of_the_server_can_be_added_by_settings(site):
    origins = Origins(("moored.lan",), ("https://console.example",))
    server = WebServer(site.house, origins=origins)
    port = await server.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        for headers, status in (
            ({"Host": "moored.lan"}, 200),
            ({"Host": "other.lan"}, 403),
            ({"Origin": "https://console.example", "Sec-Fetch-Site": "cross-site"}, 200),
            ({"Origin": "http://console.example"}, 403),
        ):
            assert (await client.get("/policy", headers=headers)).status_code == status
    await server.close()


async def test_a_server_on_all_addresses_accepts_each_address_as_its_name(site):
    server = WebServer(site.house)
    port = await server.start("0.0.0.0", 0)  # noqa: S104  # The test needs this address.
    ask = f"GET /readyz HTTP/1.1\r\nHost: {{}}\r\n{CLOSE}\r\n"
    for host, status in ((f"127.0.0.1:{port}", 200), ("10.1.2.3", 403), ("evil.example", 403)):
        assert (await send_raw(port, ask.format(host)))[0] == status
    await server.close()


async def test_a_body_with_two_lengths_is_refused(site):
    lengths = "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n"
    head = f"POST /clusters/query HTTP/1.1\r\nHost: localhost\r\n{lengths}\r\n"
    status, answer = await send_raw(site.port, head + "2\r\n{}\r\n0\r\n\r\n")
    assert status == 400
    assert "either Content-Length or Transfer-Encoding" in answer
    assert answer.count("HTTP/1.1 ") == 1  # The rest is not read as a second request.


async def test_answers_forbid_content_sniffing(site):
    paths = ("/healthz", "/policy", "/clusters/none", "/none", "/openapi.json", "/")
    others = ({"authorization": "Bearer no"}, {"host": "evil.example"})
    asks = [*((path, {}) for path in paths), *(("/policy", headers) for headers in others)]
    answers = [await site.client.get(path, headers=headers) for path, headers in asks]
    assert {each.status_code for each in answers} >= {200, 401, 403, 404}
    found = [each.headers.get_list("x-content-type-options") for each in answers]
    assert found == [["nosniff"]] * len(answers)


class TestTurns:
    """A tenant's requests have a limited share of each turn of the event loop."""

    @staticmethod
    def scope(path: str, token: str | None) -> dict:
        headers = [(b"host", b"localhost")]
        if token is not None:
            headers.append((b"authorization", f"Bearer {token}".encode()))
        return {
            "type": "http",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }

    @pytest.mark.parametrize(
        ("flood", "other"),
        [
            (("/policy", "key"), ("/policy", "another")),
            (("/policy", None), ("/policy", "another")),
            (("/policy", "wrong"), ("/policy", "another")),
            (("/console/session", None), ("/policy", "key")),
            (("/nothing/here", "key"), ("/healthz", None)),
            (("/policy", None), ("/healthz", None)),
            (("/healthz", None), ("/metrics", "key")),
        ],
    )
    async def test_a_flood_of_requests_does_not_delay_another_tenant(self, flood, other):
        passed = []

        async def app(scope, receive, send):
            passed.append(scope["path"] if scope is not last else "last")

        async def nothing(*_):
            """Accept a message of the HTTP server, and drop it."""

        tenants = {"key": "ann", "another": "bob"}

        def authenticate(token):
            return Caller(tenants[token], Role.CLIENT) if token in tenants else None

        checks = RequestChecks(app, Origins(), Connections(), authenticate)
        last = self.scope(*other)
        scopes = [*(self.scope(*flood) for _ in range(50)), last]
        await asyncio.gather(*(checks(scope, nothing, nothing) for scope in scopes))
        assert len(passed) == 51
        assert passed.index("last") <= 3


@pytest.mark.parametrize("tokens", [{"key": "ann"}])
@forwarded_clients
async def test_the_audit_log_has_the_client_that_a_trusted_proxy_names(
    site, trusted, forwarded, client
):
    server = WebServer(site.house, proxies=read_proxies(trusted))
    url = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}"
    document = {"id": "c", "nodes": {"count": 0, "nodeData": []}}
    headers = {"X-Forwarded-For": forwarded}
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as http:
        assert (await http.get("/policy")).status_code == 401
        shown = {"Authorization": "Bearer key"}
        answer = await http.post("/clusters", json=document, headers=shown)
        assert answer.status_code == 201, answer.text
    await server.close()
    login, change = site.house.noted
    assert login == (client, "http")
    assert change.remote.partition(":")[0] == client

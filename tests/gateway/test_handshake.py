"""Tests of accepted handshakes, and of answers of the socket port to plain HTTP."""

import base64

import pytest
from websockets.exceptions import InvalidStatus

from moorage.daemon.access.socket_tickets import SocketTickets
from moorage.model import Tenant
from moorage.protocol.origins import Origins
from moorage.protocol.proxies import read_proxies
from moorage.records.rights import Caller, Role
from tests.forwarding import forwarded_clients


async def refusal(port, **options):
    with pytest.raises(InvalidStatus) as caught:
        await port.client(**options)
    return caught.value.response


@pytest.mark.parametrize("path", ["/healthz", "/healthz?verbose"])
async def test_the_path_of_health_needs_no_token(port, path):
    answer = await port.http(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\nok\n")


@pytest.mark.parametrize("method", ["POST", "HEAD", "DELETE", "OPTIONS"])
async def test_the_socket_port_allows_no_method_but_get(port, method):
    request = f"{method} /healthz HTTP/1.1\r\nHost: localhost\r\n".encode()
    answer = await port.http(request + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert b"\r\nAllow: GET\r\n" in answer
    assert port.harbour.ever == []


async def test_a_browser_is_told_that_the_socket_port_has_no_web_page(port):
    for target, status in (("/", 426), ("http://localhost/", 426), ("http://evil.example/", 403)):
        answer = await port.http(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize("path", ["/", "/v1/allocate?x=1", "/healthzz"])
async def test_every_path_except_that_of_health_opens_the_socket(port, path):
    client = await port.client(path, subprotocols=["graphql-ws"])
    assert client.socket.subprotocol is None, "other subprotocols are ignored"
    assert await client.answers()


@pytest.mark.parametrize("headers", [["Bearer wrong"], [""], ["Bearer token-a", "Bearer token-b"]])
async def test_a_client_without_a_valid_token_is_refused(port, headers):
    shown = [("Authorization", each) for each in headers]
    response = await refusal(port, additional_headers=shown)
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert b"Authorization: Bearer <token>" in response.body
    assert port.gateway.stats().refused_unauthorized_total == 1
    assert port.harbour.ever == []


@pytest.mark.parametrize("origin", ["https://evil.example", "null"])
async def test_a_page_of_another_site_cannot_connect(port, origin):
    response = await refusal(port, origin=origin, additional_headers={"Authorization": "Bearer x"})
    assert response.status_code == 403
    assert f"Origin: a page of '{origin}' may not send" in response.body.decode()
    assert port.gateway.stats().refused_foreign_total == 1


async def test_pages_of_the_server_and_of_configured_sites_can_connect(open_port):
    port = await open_port(origins=Origins(("moored",), ("https://ours.example",)), pages_port=8080)
    for origin in (
        "http://localhost:8080",
        "http://[::1]:8080",
        "http://moored:8080",
        f"http://127.0.0.1:{port.number}",
        "https://ours.example",
    ):
        assert await (await port.client(origin=origin)).answers()


@pytest.mark.parametrize("path", ["/healthz", "/"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Host: evil.example", 403),
        ("Host: localhost\r\nOrigin: https://evil.example", 403),
        ("Host: localhost\r\nSec-Fetch-Site: cross-site", 403),
        ("Host: localhost\r\nHost: evil.example", 400),
        ("Accept: */*", 400),
    ],
)
async def test_plain_http_requests_to_the_socket_port_are_checked(port, path, headers, status):
    answer = await port.http(f"GET {path} HTTP/1.1\r\n{headers}\r\n\r\n".encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize("header", ["Content-Length: 5", "Transfer-Encoding: chunked"])
async def test_a_handshake_with_a_body_is_cut_off(port, header):
    ask = f"GET /healthz HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n"
    assert await port.http(ask.encode()) == b""


def bearer(token):
    """Return the subprotocols in which a page sends a token."""
    shown = base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")
    return ["moorage", f"moorage.bearer.{shown}"]


def owner_of(token):
    """Return the tenant of a token."""
    return Caller(Tenant("a"), Role.CLIENT) if token in {"token-a", "ü?>"} else None


@pytest.mark.parametrize("token", ["token-a", "ü?>"])
async def test_a_page_sends_its_token_as_a_subprotocol(open_port, token):
    port = await open_port(owner_of)
    client = await port.client(subprotocols=bearer(token))
    assert client.socket.subprotocol == "moorage", "the reply must not contain the secret"
    assert await client.answers()
    assert [*port.harbour.sessions.values()] == [Tenant("a")]


@pytest.mark.parametrize(
    "offered",
    [
        bearer("wrong"),
        ["moorage", "moorage.bearer."],
        ["moorage", "moorage.bearer.*"],
        ["moorage", "moorage.ticket."],
        ["moorage", "moorage.ticket.guessed"],
        [*bearer("token-a"), *bearer("token-a")[1:]],
        ["moorage"],
    ],
)
async def test_a_page_without_a_valid_token_is_refused(open_port, offered):
    port = await open_port(owner_of, tickets=SocketTickets(owner_of))
    assert (await refusal(port, subprotocols=offered)).status_code == 401
    assert port.harbour.ever == []


async def test_a_ticket_opens_one_socket(open_port):
    tickets = SocketTickets(owner_of)
    port = await open_port(owner_of, tickets=tickets)
    offered = ["moorage", f"moorage.ticket.{tickets.issue('token-a')[0]}"]
    assert await (await port.client(subprotocols=offered)).answers()
    assert (await refusal(port, subprotocols=offered)).status_code == 401
    tickets = SocketTickets(lambda _: Caller(Tenant("local"), Role.ADMIN))
    port = await open_port(tickets=tickets)  # A server without tokens.
    offered = ["moorage", "moorage.ticket.guessed"]
    assert (await refusal(port, subprotocols=offered)).status_code == 401


@forwarded_clients
async def test_the_address_of_a_client_is_the_one_that_a_trusted_proxy_names(
    open_port, trusted, forwarded, client
):
    strangers = []
    port = await open_port(
        owner_of,
        on_stranger=lambda address, _: strangers.append(address),
        proxies=read_proxies(trusted),
    )
    headers = {"X-Forwarded-For": forwarded}
    assert (await refusal(port, additional_headers=headers)).status_code == 401
    assert strangers == [client]
    found = await port.client(additional_headers={**headers, "Authorization": "Bearer token-a"})
    assert await found.answers()
    _, remote = port.gateway.origin(found.session)
    assert remote.partition(":")[0] == client


async def test_clients_behind_a_trusted_proxy_have_separate_shares_of_the_sessions(open_port):
    port = await open_port(sessions_max=4, proxies=read_proxies(["127.0.0.1"]))

    def from_client(number):
        return {"additional_headers": {"X-Forwarded-For": f"192.0.2.{number}"}}

    for _ in range(3):
        assert await (await port.client(**from_client(1))).answers()
    assert (await refusal(port, **from_client(1))).status_code == 503
    assert await (await port.client(**from_client(2))).answers()

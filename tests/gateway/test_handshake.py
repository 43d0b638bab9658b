"""Who is let in, and what the port answers over plain HTTP."""

import base64

import pytest
from websockets.exceptions import InvalidStatus

from moorage.daemon.access.socket_tickets import SocketTickets
from moorage.model import Tenant
from moorage.protocol.origins import Origins
from moorage.records.rights import Caller, Role


async def refused(port, **options):
    with pytest.raises(InvalidStatus) as caught:
        await port.client(**options)
    return caught.value.response


@pytest.mark.parametrize("path", ["/healthz", "/healthz?verbose"])
async def test_health_is_told_to_anybody(port, path):
    answer = await port.http(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\nok\n")


@pytest.mark.parametrize("method", ["POST", "HEAD", "DELETE", "OPTIONS"])
async def test_other_methods_are_not_allowed(port, method):
    request = f"{method} /healthz HTTP/1.1\r\nHost: localhost\r\n".encode()
    answer = await port.http(request + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert b"\r\nAllow: GET\r\n" in answer
    assert port.harbour.ever == []


async def test_a_browser_is_told_that_this_is_no_web_page(port):
    answer = await port.http(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 426 ")


@pytest.mark.parametrize("path", ["/", "/v1/allocate?x=1", "/healthzz"])
async def test_any_other_path_is_the_socket(port, path):
    client = await port.client(path)
    await client.ask(1)
    assert await client.data() == {"n": 1}


@pytest.mark.parametrize(
    "header",
    ["Bearer wrong", "Bearer", "Bearer ", "Basic dG9rZW4tYQ==", "token-a", "Bearer token-a x", ""],
)
async def test_without_a_valid_token_no_client_gets_in(port, header):
    response = await refused(port, additional_headers={"Authorization": header})
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert b"Authorization: Bearer <token>" in response.body
    assert port.gateway.stats().refused_unauthorized_total == 1
    assert port.harbour.ever == []


async def test_two_tokens_are_one_too_many(port):
    headers = [("Authorization", "Bearer token-a"), ("Authorization", "Bearer token-b")]
    assert (await refused(port, additional_headers=headers)).status_code == 401


async def test_the_scheme_may_be_written_in_any_case(port):
    client = await port.client(additional_headers={"Authorization": "bEARER token-b"})
    await client.ask(1)
    await client.reply()
    assert port.harbour.seen[0][1] == "b"


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://localhost.evil.example", "http://localhost:8081", "null"],
)
async def test_a_page_of_another_site_cannot_connect(port, origin):
    response = await refused(port, origin=origin, additional_headers={"Authorization": "Bearer x"})
    assert response.status_code == 403
    assert f"Origin: a page of '{origin}' may not ask" in response.body.decode()
    assert port.gateway.stats().refused_foreign_total == 1


async def test_our_own_pages_and_named_ones_can(open_port):
    port = await open_port(origins=Origins(("moored",), ("https://ours.example",)), pages_port=8080)
    for origin in (
        "http://localhost:8080",
        "http://[::1]:8080",
        "http://moored:8080",
        f"http://127.0.0.1:{port.number}",
        "https://ours.example",
    ):
        client = await port.client(origin=origin)
        await client.ask(1)
        assert await client.data() == {"n": 1}


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
async def test_plain_requests_are_looked_at_too(port, path, headers, status):
    answer = await port.http(f"GET {path} HTTP/1.1\r\n{headers}\r\n\r\n".encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize("header", ["Content-Length: 5", "Transfer-Encoding: chunked"])
async def test_a_request_with_a_body_is_cut(port, header):
    ask = f"GET /healthz HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n"
    assert await port.http(ask.encode()) == b""


async def test_the_host_of_the_target_counts(port):
    ask = "GET http://{}/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = await port.http(ask.format("evil.example").encode())
    assert answer.startswith(b"HTTP/1.1 403 ")
    answer = await port.http(ask.format("localhost").encode())
    assert answer.startswith(b"HTTP/1.1 426 ")


def bearer(token):
    """Return the subprotocols with which a page shows a token."""
    shown = base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")
    return ["moorage", f"moorage.bearer.{shown}"]


def known(token):
    """Return whose a token is."""
    return Caller(Tenant("a"), Role.CLIENT) if token in {"token-a", "ü?>"} else None


@pytest.mark.parametrize("token", ["token-a", "ü?>"])
async def test_a_page_shows_its_token_as_a_subprotocol(open_port, token):
    port = await open_port(known)
    client = await port.client(subprotocols=bearer(token))
    assert client.socket.subprotocol == "moorage", "the secret is not sent back"
    await client.ask(1)
    assert await client.data() == {"n": 1}
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
async def test_a_page_without_a_valid_one_stays_out(open_port, offered):
    port = await open_port(known, tickets=SocketTickets(known))
    assert (await refused(port, subprotocols=offered)).status_code == 401
    assert port.harbour.ever == []


async def test_a_ticket_opens_one_socket(open_port):
    tickets = SocketTickets(known)
    port = await open_port(known, tickets=tickets)
    offered = ["moorage", f"moorage.ticket.{tickets.issue('token-a')[0]}"]
    client = await port.client(subprotocols=offered)
    await client.ask(1)
    assert await client.data() == {"n": 1}
    assert (await refused(port, subprotocols=offered)).status_code == 401


async def test_a_wrong_ticket_is_refused_where_no_token_is_needed(open_port):
    port = await open_port(tickets=SocketTickets(lambda _: Caller(Tenant("local"), Role.ADMIN)))
    offered = ["moorage", "moorage.ticket.guessed"]
    assert (await refused(port, subprotocols=offered)).status_code == 401


async def test_other_subprotocols_are_left_alone(port):
    client = await port.client(subprotocols=["graphql-ws"])
    assert client.socket.subprotocol is None
    await client.ask(1)
    assert await client.data() == {"n": 1}

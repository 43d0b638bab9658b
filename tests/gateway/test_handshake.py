"""Who is let in, and what the port answers over plain HTTP."""

import pytest
from websockets.exceptions import InvalidStatus


async def refused(port, **options):
    with pytest.raises(InvalidStatus) as caught:
        await port.client(**options)
    return caught.value.response


@pytest.mark.parametrize("path", ["/healthz", "/healthz?verbose"])
async def test_health_is_told_to_anybody(port, path):
    answer = await port.http(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\nok\n")


@pytest.mark.parametrize("method", ["POST", "HEAD", "DELETE", "OPTIONS"])
async def test_other_methods_are_not_allowed(port, method):
    request = f"{method} /healthz HTTP/1.1\r\nHost: x\r\n".encode()
    answer = await port.http(request + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert b"\r\nAllow: GET\r\n" in answer
    assert port.harbour.ever == []


async def test_a_browser_is_told_that_this_is_no_web_page(port):
    answer = await port.http(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
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
async def test_without_a_valid_token_nobody_gets_in(port, header):
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
    ["https://evil.example", "http://localhost.evil.example", "http://127.0.0.1.x", "null"],
)
async def test_a_page_of_another_site_cannot_connect(port, origin):
    assert (await refused(port, origin=origin)).status_code == 403


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:8080", "http://127.0.0.1:8080", "https://[::1]", "https://ours.example"],
)
async def test_a_page_of_this_machine_or_a_named_one_can(open_port, origin):
    port = await open_port(origins=("https://ours.example",))
    client = await port.client(origin=origin)
    await client.ask(1)
    assert await client.data() == {"n": 1}

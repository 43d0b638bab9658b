"""Tests of connections from several addresses that send nothing, too little or too slowly."""

import asyncio
import contextlib
import re
import resource
import socket
from pathlib import Path

import httpx
import pytest

from moorage.protocol.peers import most_of_one
from moorage.web import connections
from moorage.web.server import WebServer

PATIENCE_SECONDS = 30
MOST = 256
"""Maximum connections of the server in these tests: an eighth of the default."""


@pytest.fixture
def connections_max():
    return MOST


@pytest.fixture(autouse=True)
def _enough_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Clients:
    """Clients of one address each, which send and read only when a test orders it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: list[socket.socket] = []

    async def connect(self, count: int = 1, sends: bytes = b"", address: str = "127.0.0.1"):
        found = []
        for _ in range(count):
            each = socket.socket()
            each.setblocking(False)  # noqa: FBT003  # The socket module's own signature.
            each.bind((address, 0))
            loop = asyncio.get_running_loop()
            await loop.sock_connect(each, ("127.0.0.1", self._port))
            if sends:
                await loop.sock_sendall(each, sends)
            found.append(each)
        self._open += found
        return found

    async def rest(self, client: socket.socket) -> bytes:
        """Return the bytes that a client receives until the server closes the connection."""
        answer = b""
        # The kernel may report the cut as an error.
        async with asyncio.timeout(PATIENCE_SECONDS):
            with contextlib.suppress(ConnectionError):
                while chunk := await asyncio.get_running_loop().sock_recv(client, 65_536):
                    answer += chunk
        return answer

    def close(self) -> None:
        for each in self._open:
            each.close()


@pytest.fixture
async def clients(site):
    found = Clients(site.port)
    yield found
    found.close()


def files() -> int:
    """Return how many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def answers(site, path="/policy", address="127.0.0.1") -> int:
    """Return the status of a request over a new connection."""
    transport = httpx.AsyncHTTPTransport(local_address=address)
    base = f"http://127.0.0.1:{site.port}"
    async with httpx.AsyncClient(base_url=base, transport=transport, timeout=20) as client:
        return (await client.get(path)).status_code


@pytest.mark.parametrize(
    "sends", [b"", b"GET / HT", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"]
)
async def test_idle_connections_do_not_lock_clients_out(site, clients, sends):
    await clients.connect(MOST + 20, sends)
    for address in ("127.0.0.1", "127.0.0.2"):
        for path in ("/healthz", "/readyz", "/policy"):
            assert await answers(site, path, address) == 200


ASK = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
BODY = b"POST /policy HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"


async def test_the_oldest_idle_connection_is_closed_first(site, clients):
    first, second = await clients.connect(2)
    await clients.connect(most_of_one(MOST) - 1)
    assert await clients.rest(first) == b""
    await asyncio.get_running_loop().sock_sendall(second, ASK)
    assert b" 200 " in await clients.rest(second)


async def test_the_last_descriptors_are_reserved_for_the_server(site):
    """A new client then takes the place of an idle connection."""
    server = WebServer(site.house, connections_max=60)
    clients = Clients(await server.start("127.0.0.1", 0))
    before = files()
    await clients.connect(100)
    (client,) = await clients.connect(1, ASK)
    assert b" 200 " in await clients.rest(client)
    assert files() <= before + 101 + 60
    clients.close()
    await server.close()


async def test_one_address_leaves_room_for_connections_of_other_addresses(site, clients):
    (other,) = await clients.connect(address="127.0.0.2")
    await clients.connect(MOST + 50)
    await asyncio.get_running_loop().sock_sendall(other, ASK)
    assert b" 200 " in await clients.rest(other)


async def test_bodies_that_never_arrive_do_not_block_the_path_of_health(site, clients):
    """All places for busy connections are taken: later requests are refused, health is answered."""
    for address in ("127.0.0.1", "127.0.0.2"):
        await clients.connect(most_of_one(MOST) + 10, BODY, address)
    for address in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
        assert await answers(site, "/healthz", address) == 200
        assert await answers(site, "/policy", address) == 503


async def test_one_busy_address_leaves_room_for_requests_of_other_addresses(site, clients):
    await clients.connect(MOST + 20, BODY)
    assert await answers(site) == 503
    assert await answers(site, address="127.0.0.2") == 200


@pytest.mark.heavy  # It waits for a deadline to pass.
async def test_a_client_with_an_incomplete_head_is_cut_off_but_an_idle_client_is_not(site, clients):
    """The head is sent byte by byte, after a request, or after the rest of a body."""
    loop = asyncio.get_running_loop()
    full = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    left = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
    began = loop.time()
    silent, partial, after, body, rests = [
        (await clients.connect(1, sends))[0] for sends in (b"", b"GET", full + b"GET", left, full)
    ]

    async def trickle(client):
        for _ in range(1_000):
            await asyncio.sleep(0.5)  # A slow client is under test.
            await loop.sock_sendall(client, b"x")

    dripping = [asyncio.create_task(trickle(each)) for each in (partial, after, body)]
    ends = await asyncio.gather(*(clients.rest(each) for each in (silent, partial, after, body)))
    for each in dripping:
        each.cancel()
    await asyncio.gather(*dripping, return_exceptions=True)
    assert loop.time() - began >= connections.HEAD_SECONDS_MAX
    statuses = [re.findall(rb"HTTP/1.1 (\d+)", end) for end in ends]
    # A client that still sends may not see the last answer.
    assert [each[:1] for each in statuses[::3]] == [[], [b"404"]]
    assert statuses[1] in ([b"408"], [])
    assert statuses[2][:1] == [b"200"]
    await asyncio.sleep(1)  # Clients may pause for longer than that.
    await loop.sock_sendall(rests, ASK)
    assert (await clients.rest(rests)).count(b"HTTP/1.1 200") == 2

"""Twenty clients that ask for much and read nothing, and one beside them that asks for little."""

import asyncio
import socket
import time
from urllib.parse import urlsplit

import pytest
from served import Server, cluster
from websockets.asyncio.client import connect

from moorage.benchmarks.daemon_process import Running, daemon

pytestmark = [pytest.mark.heavy, pytest.mark.quiet]

READERS = 20
DELAY_SECONDS_MAX = 0.1
ROUND_SECONDS = 3
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def get(path: str, times: int = 1) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * times


def operation(name: str, times: int = 100) -> bytes:
    text = f'{{"op": "{name}"}}'.encode()
    return UPGRADE + (bytes([0x81, 0x80 | len(text)]) + bytes(4) + text) * times


ASKED = {
    "clusters": b"POST /clusters/query HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
    "cluster": get("/clusters/large", 50),
    "openapi": get("/openapi.json", 100),
    "metrics": get("/metrics", 100),
    "fleet": operation("fleet"),
    "leases": operation("leases"),
}


@pytest.fixture(scope="module")
def fleet():
    with daemon() as running:
        server = Server(running)
        server.register(*(cluster(f"c{n}", nodes=1_200, gpus=8) for n in range(5)))
        server.register(cluster("large", nodes=6_000, gpus=8))
        yield running
        server.close()


async def slow(running: Running, asks: bytes) -> socket.socket:
    """Return a client that has asked and never reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.setblocking(False)  # noqa: FBT003  # The socket module's own signature.
    loop = asyncio.get_running_loop()
    url = urlsplit(running.ws if asks.startswith(UPGRADE) else running.http)
    await loop.sock_connect(client, (url.hostname, url.port))
    await loop.sock_sendall(client, asks)
    return client


async def delays(running: Running, asks: bytes) -> tuple[float, float]:
    """Return the longest that a request took without slow readers, and beside them."""
    url = urlsplit(running.http)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    async with connect(running.ws) as session:

        async def longest(seconds: float) -> float:
            worst, end = 0.0, time.monotonic() + seconds
            while time.monotonic() < end:
                began = time.monotonic()
                writer.write(get("/healthz"))
                await reader.readuntil(b"}")
                worst, began = max(worst, time.monotonic() - began), time.monotonic()
                await session.send('{"op": "status", "lease": "none"}')
                await session.recv()
                worst = max(worst, time.monotonic() - began)
            return worst

        await longest(0.2)
        alone = await longest(ROUND_SECONDS)
        beside = asyncio.create_task(longest(ROUND_SECONDS))
        readers = await asyncio.gather(*(slow(running, asks) for _ in range(READERS)))
        worst = await beside
        for each in readers:
            each.close()
    writer.close()
    return alone, worst


@pytest.mark.parametrize("asked", ASKED)
async def test_slow_readers_delay_no_other(fleet, asked):
    """The best of three rounds counts: a machine that others use delays everybody."""
    rounds = []
    for _ in range(3):
        alone, beside = await delays(fleet, ASKED[asked])
        rounds.append(beside - alone)
        if rounds[-1] <= DELAY_SECONDS_MAX:
            break
    print(f"{asked}: {[round(each * 1_000) for each in rounds]} ms later")
    assert min(rounds) <= DELAY_SECONDS_MAX

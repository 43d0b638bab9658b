"""Twenty clients request large answers and read none; another client sends small requests."""

import asyncio
import socket
import time
from urllib.parse import urlsplit

import pytest
from served import cluster, serving
from websockets.asyncio.client import connect

from moorage.testing.daemon_process import Running

pytestmark = pytest.mark.heavy

READERS = 20
CPU_SECONDS_MAX = 0.25
CALM_ROUND_TRIPS = 100
"""After this number of small requests without other work, the slow readers' buffers are full."""
CALM_CPU_SECONDS_MAX = 0.005
ROUND_SECONDS_MAX = 120
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def get(path: str, times: int = 1) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * times


def operation(name: str, times: int = 100) -> bytes:
    text = f'{{"op": "{name}"}}'.encode()
    return UPGRADE + (bytes([0x81, 0x80 | len(text)]) + bytes(4) + text) * times


REQUESTS = {
    "clusters": b"POST /clusters/query HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
    "cluster": get("/clusters/large", 50),
    "openapi": get("/openapi.json", 100),
    "metrics": get("/metrics", 40),
    "fleet": operation("fleet"),
}


@pytest.fixture(scope="module")
def fleet():
    with serving() as server:
        server.register(*(cluster(f"c{n}", nodes=1_200, gpus=8) for n in range(5)))
        server.register(cluster("large", nodes=6_000, gpus=8))
        yield server.running


async def slow(running: Running, sent: bytes) -> socket.socket:
    """Return a client that has sent requests and never reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.setblocking(False)  # noqa: FBT003  # The socket module's own signature.
    loop = asyncio.get_running_loop()
    url = urlsplit(running.ws if sent.startswith(UPGRADE) else running.http)
    await loop.sock_connect(client, (url.hostname, url.port))
    await loop.sock_sendall(client, sent)
    return client


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process: CPUCLOCK_SCHED of its CPU clock."""
    return time.clock_gettime(~pid << 3 | 2)


async def worst_beside_slow_readers(running: Running, sent: bytes) -> float:
    """Return the most CPU seconds that the daemon used before it answered a small request.

    This CPU time shows how long the request waited, without the work of other programs.
    """
    url = urlsplit(running.http)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    readers = await asyncio.gather(*(slow(running, sent) for _ in range(READERS)))
    worst = calm = 0.0
    async with asyncio.timeout(ROUND_SECONDS_MAX), connect(running.ws) as session:
        while calm < CALM_ROUND_TRIPS:
            began = cpu_seconds(running.pid)
            writer.write(get("/healthz"))
            await reader.readuntil(b"}")
            between = cpu_seconds(running.pid)
            await session.send('{"op": "status", "lease": "none"}')
            await session.recv()
            took = max(between - began, cpu_seconds(running.pid) - between)
            worst = max(worst, took)
            calm = calm + 1 if took < CALM_CPU_SECONDS_MAX else 0
    for each in readers:
        each.close()
    writer.close()
    return worst


@pytest.mark.parametrize("kind", REQUESTS)
async def test_clients_that_read_slowly_delay_no_other_client(fleet, kind):
    worst = await worst_beside_slow_readers(fleet, REQUESTS[kind])
    print(f"{kind}: {worst * 1_000:.0f} ms of CPU before an answer")
    assert worst <= CPU_SECONDS_MAX

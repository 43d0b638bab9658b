"""Bursts at a policy that takes long: how soon they are served, and what others feel of them."""

import asyncio
import json
import statistics
import time

import pytest
from served import Server, ask_message, cluster, policy
from websockets.asyncio.client import connect

from moorage.benchmarks.daemon_process import daemon

pytestmark = [pytest.mark.heavy, pytest.mark.quiet]

SLOW, QUICK = "slow:1-x", "quick:1-x"
SLEEPS = "import time\ntime.sleep(0.5)\nreturn {'n': 1}"


@pytest.fixture(scope="module")
def url():
    with daemon() as running:
        server = Server(running)
        server.register(cluster("east"))
        for name, body in ((SLOW, SLEEPS), (QUICK, "return {'n': 2}")):
            server.http.post("/policy", json=policy(body, name)).raise_for_status()
        yield running.ws
        server.close()


async def burst(url: str, requests: int) -> float:
    """Return how long so many requests take that are sent at once over one socket."""
    async with connect(url, compression=None) as socket:
        began = time.monotonic()
        for number in range(requests):
            await socket.send(json.dumps(ask_message(SLOW, id=number)))
        replies = [json.loads(await socket.recv()) for _ in range(requests)]
        assert all(reply["success"] for reply in replies)
        return time.monotonic() - began


async def quick(url: str, requests: int) -> float:
    """Return what a request for the quick policy takes at the median."""
    taken = []
    async with connect(url, compression=None) as socket:
        for _ in range(requests):
            began = time.monotonic()
            await socket.send(json.dumps(ask_message(QUICK)))
            await socket.recv()
            taken.append(time.monotonic() - began)
            await asyncio.sleep(0.005)  # A client that thinks; the median is of its requests.
    return statistics.median(taken)


@pytest.mark.parametrize(("requests", "seconds"), [(8, 1.2), (40, 6.0)])
async def test_a_burst_is_not_served_one_by_one(url, requests, seconds):
    assert await burst(url, requests) < seconds


async def test_another_policy_feels_little_of_it(url):
    await quick(url, 20)
    alone = await quick(url, 200)
    bursting = asyncio.create_task(burst(url, 40))
    beside = await quick(url, 200)
    await bursting
    assert beside < 3 * alone

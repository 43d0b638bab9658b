"""Throughput with more requests than the server can decide: a part of the benchmark `queue`.

Clients first send each request after an answer, which shows the peak rate. Then they send requests
at ten times that rate, without waiting for answers. Each granted lease is released at once, over a
separate connection. Another client renews its own lease meanwhile.

The clock stops while the server's loop waits for a core. Otherwise other programs on the machine
would change the ratio of the two loads, which run one after the other.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import httpx
import uvloop

from benchmarks.fast_client import FastClient, FastReply, connect, ignore, pack
from benchmarks.processes import read_schedule
from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import Running, daemon
from moorage_policies import catalog

NODES: Final = 1_000
GPUS_EACH: Final = 8
CONNECTIONS: Final = 32
WINDOW: Final = 8
"""Number of requests under way per connection while the peak is measured."""
FACTOR: Final = 10
SECONDS: Final = 5.0
WARM_SECONDS: Final = 1.0
"""Seconds for which each load runs before it is measured."""
TICK_SECONDS: Final = 0.005
RENEW_SECONDS: Final = 0.02
POLICY: Final = "best_fit"
FRAMES: Final = 4_096
"""Number of requests that are encoded in advance for each connection, and sent repeatedly."""


class _Load:
    """Counts the outcomes of requests, and releases granted leases."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self.sent = self.granted = self.busy = self.others = 0
        self.holder: FastClient
        self.again: Callable[[FastClient], None] = ignore
        self.asks = [pack(self.ask(f"a{number}")) for number in range(FRAMES)]

    def ask(self, identity: str) -> dict[str, Any]:
        return {
            "adhoc": True,
            "policy_rule_uri": self._uri,
            "inputs": {},
            "id": identity,
            "resources": {"gpus": 1},
            "lease": {"ttl_seconds": 600},
        }

    def take_reply(self, client: FastClient, reply: FastReply) -> None:
        if not str(reply.id).startswith("a"):
            return
        if reply.lease is not None:
            self.granted += 1
            lease = reply.lease
            self.holder.send(pack({"op": "release", "lease": lease.id, "token": lease.token}))
        # The fleet may be full while releases are unread.
        elif reply.error is not None and reply.error.code in {"busy", "no_capacity"}:
            self.busy += 1
        else:
            self.others += 1
        self.again(client)


def overload() -> dict[str, Any]:
    """Measure grants per second at the peak and at ten times that load, and times of renewals."""
    with daemon() as running:
        return uvloop.run(_overload(running))


async def _overload(running: Running) -> dict[str, Any]:
    uri = await prepare(running)
    load, clock = _Load(uri), partial(_clock, running.pid)
    load.holder = await connect(running.ws, ignore)
    clients = [await connect(running.ws, load.take_reply) for _ in range(CONNECTIONS)]
    # Measure the peak: send as fast as answers come.
    number = 0

    def ask(client: FastClient) -> None:
        nonlocal number
        number += 1
        client.send(load.asks[number % FRAMES])

    load.again = ask
    for client in clients * WINDOW:
        ask(client)
    peak = (await _count(load, clock))["granted"]
    load.again = ignore
    await asyncio.sleep(WARM_SECONDS)
    renewals: list[float] = []
    renewing = asyncio.create_task(_renew(running.ws, load, renewals))
    await asyncio.sleep(WARM_SECONDS)
    calm = max(renewals, default=float("inf"))
    renewals.clear()
    offering = asyncio.create_task(_offer(clients, load, peak * FACTOR, clock))
    counted = await _count(load, clock)
    offering.cancel()
    renewing.cancel()
    ended, _ = await asyncio.wait([offering, renewing])
    for each in ended:
        if not each.cancelled():
            each.result()  # Raises the error of the load.
    for client in (load.holder, *clients):
        await client.close()
    return {
        "peak_grants_per_second": peak,
        "overload_asks_to_peak": counted["sent"] / peak,
        "overload_grants_to_peak": counted["granted"] / peak,
        "overload_busy_to_asks": counted["busy"] / max(counted["sent"], 1),
        "overload_renewals": len(renewals),
        "overload_renewal_max_seconds": max(renewals, default=float("inf")),
        "calm_renewal_max_seconds": calm,
        "overload_others": counted["others"],
    }


def _clock(pid: int) -> float:
    """Return the seconds on a clock that stops while the server's loop waits for a core."""
    return time.perf_counter() - read_schedule(pid)[1]


async def _count(load: _Load, clock: Callable[[], float]) -> dict[str, float]:
    """Return how many requests per second of `clock` had each outcome."""
    names = ("sent", "granted", "busy", "others")
    await asyncio.sleep(WARM_SECONDS)
    began, before = clock(), {name: getattr(load, name) for name in names}
    await asyncio.sleep(SECONDS)
    seconds = clock() - began
    return {name: (getattr(load, name) - before[name]) / seconds for name in names}


async def _offer(
    clients: list[FastClient], load: _Load, per_second: float, clock: Callable[[], float]
) -> None:
    """Send requests at a fixed rate. If a socket is full, its requests are dropped."""
    started, due, number = clock(), 0.0, 0
    while True:
        await asyncio.sleep(TICK_SECONDS)
        now = clock() - started  # Linux counts a wait at its end, so this may go back.
        many = max(0, int((now * per_second - due) / len(clients)))
        due += many * len(clients)
        for client in clients:
            if client.writable.is_set():
                start = number % (FRAMES // 2)
                client.send(b"".join(load.asks[start : start + many]))
                load.sent += many
        number += many


async def _renew(url: str, load: _Load, taken: list[float]) -> None:
    replies: asyncio.Queue[FastReply] = asyncio.Queue()
    client = await connect(url, lambda _, reply: replies.put_nowait(reply))
    try:
        client.send(pack(load.ask("mine")))
        granted = await replies.get()
        if (lease := granted.lease) is None:
            raise CommandError(f"the request of the renewed lease was refused: {granted}")
        renewal = pack({"op": "renew", "lease": lease.id, "token": lease.token, "id": "n"})
        while True:
            started = time.perf_counter()
            client.send(renewal)
            reply = await replies.get()
            if not reply.success:
                raise CommandError(f"a renewal was refused: {reply}")
            taken.append(time.perf_counter() - started)
            await asyncio.sleep(RENEW_SECONDS)
    finally:
        await client.close()


async def prepare(running: Running) -> str:
    """Register a fleet and a policy; return the policy's URI."""
    nodes = [{"id": f"n{n}", "gpus": {"count": GPUS_EACH}} for n in range(NODES)]
    cluster = {"id": "c", "nodes": {"count": NODES, "nodeData": nodes}}
    document = catalog.document(POLICY)
    async with httpx.AsyncClient(base_url=running.http, timeout=60, trust_env=False) as http:
        (await http.post("/clusters", json=cluster)).raise_for_status()
        (await http.post("/policy", json=document)).raise_for_status()
    return str(document["policy_rule_uri"])

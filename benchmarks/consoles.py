"""`consoles`: how fifty open consoles slow a grant, for each view, and how quick the map is.

A server takes alternating blocks of requests, without and with consoles. A simulated console sends
the same messages as a browser, at the intervals of `console/static/views`. The result is the share
of a core that the server spends on consoles; other programs on the machine do not change it. If
this machine has a browser, the browser draws the map, and its frames are timed.
"""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import msgspec
import uvloop
from websockets.asyncio.client import ClientConnection, connect

from moorage.bench.load import drive
from moorage.bench.processor_time import processor_time_of
from moorage.testing.daemon_process import Running, daemon
from moorage_policies import catalog

CONSOLES: Final = 50
PERCENT_MAX: Final = 10.0
BLOCKS: Final = 4
"""Number of blocks with consoles, and as many without, for each view."""
BLOCK_SECONDS: Final = 10.0
REQUESTS: Final = 200
"""Requests of a batch: all are granted and then released before the time is read again."""
CLUSTERS: Final = 10
NODES: Final = 125
GPUS: Final = 8
HELD: Final = 4_000
WAITERS: Final = 300
POLICY: Final = "first_fit"
VIEWS: Final = ("fleet", "overview", "queue", "leases")
WAITED_FOR: Final = "queued"
"""A cluster that all waiters want, so that they do not disturb the grants."""
TTL_SECONDS: Final = 36_000


def consoles(progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure the cost of consoles, and the map.

    Args:
        progress: Called with a line for each step.
    """
    figures: dict[str, Any] = {"consoles": CONSOLES, "percent_max": PERCENT_MAX}
    with tempfile.TemporaryDirectory(prefix="moorage-") as folder, ExitStack() as stack:
        running = stack.enter_context(daemon(Path(folder) / "data"))
        server = prepare(running)
        server.block()  # Warm up.
        for view in VIEWS:
            taken: dict[bool, list[_Block]] = {False: [], True: []}
            for is_open in (False, True, True, False) * (BLOCKS // 2):
                with open_consoles(running, view) if is_open else contextlib.nullcontext():
                    taken[is_open].append(server.block())
            one = statistics.median(each.cpu / each.grants for each in taken[False])
            beside = [(each.cpu - one * each.grants) / each.seconds for each in taken[True]]
            figures |= {
                f"{view}_core_percent": 100 * statistics.median(beside),
                f"{view}_core_percent_most": 100 * max(beside),
                f"{view}_grants_per_second": sum(each.grants for each in taken[True])
                / sum(each.seconds for each in taken[True]),
                f"{view}_cpu_microseconds_of_a_grant": 1e6 * one,
            }
            progress(f"{view}: {100 * statistics.median(beside):.1f} % of a core")
        if path := shutil.which("chromium"):
            from benchmarks.console_map import map_figures  # noqa: PLC0415  # It needs Playwright.

            figures |= map_figures(running, path, server.request, progress)
    return {**figures, "load_of_the_machine": os.getloadavg()[0]}


class _Block(NamedTuple):
    """The server's processor time in a measured block, the grants, and the duration in seconds."""

    cpu: float
    grants: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Server:
    """Measures blocks of grants at a server with leases and waiters."""

    running: Running
    request: str

    def block(self) -> _Block:
        """Request and release leases at full load for `BLOCK_SECONDS`."""
        began, before, count = time.monotonic(), processor_time_of(self.running.pid), 0
        while time.monotonic() - began < BLOCK_SECONDS:
            granted = self.drive([self.request] * REQUESTS)
            self.drive(map(release, granted))
            count += REQUESTS
        cpu = processor_time_of(self.running.pid).since(before).own
        return _Block(cpu, count, time.monotonic() - began)

    def drive(self, messages: Any) -> list[bytes]:
        """Send messages at full load; return the replies, which must all report success."""
        load = uvloop.run(drive(self.running.ws, [*messages], connections=4, window=8))
        assert all(b'"success":true' in each for each in load.replies), load.replies[0][:500]
        return list(load.replies)


def prepare(running: Running) -> _Server:
    """Register a fleet, publish a policy, and create leases and waiters."""
    with httpx.Client(base_url=running.http, timeout=60, trust_env=False) as http:
        for number in range(CLUSTERS):
            http.post("/clusters", json=cluster(f"c{number}", NODES)).raise_for_status()
        http.post("/clusters", json=cluster(WAITED_FOR, 4)).raise_for_status()
        answer = http.post("/policy", json=catalog.document(POLICY)).raise_for_status()
    uri = answer.json()["data"]["policy_rule_uri"]
    server = _Server(running, ask_message(uri, clusters=[f"c{n}" for n in range(CLUSTERS)]))
    server.drive([server.request] * HELD)
    server.drive([ask_message(uri, clusters=[WAITED_FOR])])
    waits = (
        ask_message(
            uri, {"gpus": GPUS, "nodes": 4, "cpu_milli": 1 + n % 12}, n, clusters=[WAITED_FOR]
        )
        for n in range(WAITERS)
    )
    threading.Thread(target=_wait_in_line, args=(running.ws, [*waits]), daemon=True).start()
    while _waiting(running) < WAITERS:
        time.sleep(0.1)  # The queue has no event to wait for.
    return server


def _wait_in_line(url: str, messages: list[str]) -> None:
    """Send requests that must wait, and leave their socket open."""

    async def wait() -> None:
        async with connect(url, proxy=None, max_queue=None) as socket:
            for each in messages:
                await socket.send(each)
            await asyncio.Event().wait()

    asyncio.run(wait())


def _waiting(running: Running) -> int:
    answer = httpx.get(f"{running.http}/history?minutes=1&step=1", trust_env=False)
    waiting: int = answer.json()["data"]["now"]["waiting"]
    return waiting


def cluster(name: str, nodes: int) -> dict[str, Any]:
    """Return the document of a cluster."""
    devices = [{"modelName": "A100", "memory": 81_920}] * GPUS
    node = {"vcpus": {"count": 96}, "memory": 1_000_000, "gpus": {"count": GPUS, "gpus": devices}}
    rows = [{"id": f"{name}-{n:03}", "rack": f"{name}-r{n // 8}", **node} for n in range(nodes)]
    return {"id": name, "nodes": {"nodeData": rows}}


def ask_message(
    uri: str, resources: dict[str, Any] | None = None, number: int = 0, **more: Any
) -> str:
    """Return a message that requests a lease; a request with `resources` may wait."""
    lease = {"ttl_seconds": TTL_SECONDS} | ({"wait_seconds": TTL_SECONDS} if resources else {})
    wanted = {"adhoc": True, "policy_rule_uri": uri, "inputs": {}, "id": number, **more}
    return json.dumps(wanted | {"resources": resources or {"gpus": 1}, "lease": lease})


def release(reply: bytes) -> str:
    """Return the message that releases the lease of a reply."""
    lease = msgspec.json.decode(reply)["lease"]
    return json.dumps({"op": "release", "lease": lease["id"], "token": lease["token"]})


@contextmanager
def open_consoles(running: Running, view: str) -> Iterator[None]:
    """Show a view in several consoles while the block runs, in a separate thread."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    shown = _Shown(running, view)

    def show() -> None:
        loop.run_until_complete(shown.all(ready.set))

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    ready.wait(60)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(shown.stop)
        thread.join(60)
        loop.close()


class _Shown:
    """Simulates fifty consoles that show the same view."""

    def __init__(self, running: Running, view: str) -> None:
        self._running = running
        self._view = view
        self._tasks: list[asyncio.Task[None]] = []

    def stop(self) -> None:
        for each in self._tasks:
            each.cancel()

    async def all(self, ready: Callable[[], None]) -> None:
        """Show the view until `stop`; call `ready` when all consoles are connected."""
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=self._running.http, timeout=60, trust_env=False)
            )
            for number in range(CONSOLES):
                page = connect(self._running.ws, proxy=None, max_size=None, compression=None)
                socket = await stack.enter_async_context(page)
                if self._view in {"fleet", "leases"}:
                    await socket.send('{"op": "watch", "topics": ["map"], "id": "m"}')
                if self._view == "fleet":
                    await socket.send('{"op": "watch", "topics": ["shapes"], "id": "s"}')
                page_of = _Page(socket, http, self._view, number / CONSOLES)
                self._tasks += map(asyncio.create_task, (page_of.read(), page_of.ask()))
            ready()
            await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(slots=True)
class _Page:
    """Simulates one console that shows a view."""

    socket: ClientConnection
    http: httpx.AsyncClient
    view: str
    phase: float
    rows: tuple[str, ...] = ()
    news: bool = False

    async def read(self) -> None:
        """Read all messages; store the ids of waiting requests, and whether the map changed."""
        async for message in self.socket:
            if '"waiting":[' in (text := str(message)):
                waiting = msgspec.json.decode(text)["data"]["waiting"]
                self.rows = tuple(each["request"] for each in waiting[:12])
            self.news = self.news or '"topic":"map"' in text

    async def ask(self) -> None:
        """Send the view's requests, each at its own interval."""
        async for second in self._seconds():
            await {
                "fleet": self._fleet,
                "overview": self._overview,
                "queue": self._queue,
                "leases": self._leases,
            }[self.view](second)

    async def _seconds(self) -> AsyncIterator[int]:
        await asyncio.sleep(self.phase)
        first = int(self.phase * 60)  # As if the console had been open for a while.
        for second in itertools.count(first):
            yield second
            await asyncio.sleep(1)  # The timers of a page drift, too.

    async def _send(self, **message: Any) -> None:
        await self.socket.send(json.dumps({**message, "id": "p"}))

    async def _why(self) -> None:
        for each in self.rows:
            await self._send(op="why", request=each)

    async def _fleet(self, second: int) -> None:
        if second % 10 == 0:
            await self._send(op="reservations", limit=100)

    async def _overview(self, second: int) -> None:
        if second % 30 == 0:
            now = (await self.http.get("/history?step=5")).json()["data"]["now"]
            self.rows = tuple(each["request"] for each in now["oldest"])
            await self.http.get("/metrics")
        if second % 60 == 0:
            await self._why()
            await self._send(op="leases", sort="expires_at", limit=5)
            await self._send(op="decisions", filters={"state": "refused"}, limit=3)

    async def _queue(self, second: int) -> None:
        if second % 10 == 0 or not self.rows:
            await self._send(op="queue", limit=100)
        if second % 30 == 0:
            await self._why()

    async def _leases(self, second: int) -> None:
        if second % 10 == 0 or (self.news and second % 5 == 0):
            self.news = False
            await self._send(op="leases", filters={}, sort="expires_at", limit=100)
        if second % 60 == 0:
            await self._send(op="leases", filters={}, sort="node_ends", limit=500)
            await self.http.get("/history?minutes=1&step=1")

"""Workloads while an API server restarts, breaks off or refuses: nothing lost, nothing twice."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
import yaml
from aiohttp import web
from kubernetes_objects import dra_node
from kubernetes_plane import Plane

from moorage.backends.base import BackendError, Order, Phase
from moorage.backends.kubernetes.backend import KubernetesBackend
from moorage.backends.kubernetes.following import ClusterSource
from moorage.backends.remote_specs import PodResourceSpec
from moorage.model import ClusterId, NodeId, Share

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.heavy,
    # A connection that an API server's end met in its handshake may be closed by its collection.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NODES = 6
WORKERS = 8
FAULTS = 20
SEEN_SECONDS_MAX = 120
SPEC = PodResourceSpec(image="registry.example/none:1", stop_seconds=0)


class Gate:
    """An HTTP server before the API server: it refuses, loses answers, or cuts what is open."""

    def __init__(self, plane: Plane, folder: Path) -> None:
        self.kubeconfig = folder / "kubeconfig"
        self.refuses, self.loses = 0.0, 0.0
        self.draws = random.Random(14)
        self.faults = Counter[str]()
        self._plane = plane
        self._open: set[asyncio.BaseTransport] = set()

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession(
            self._plane.url, connector=aiohttp.TCPConnector(ssl=False), auto_decompress=False
        )
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        config = yaml.safe_load(self._plane.kubeconfig().read_text())
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{port}"}
        self.kubeconfig.write_text(yaml.safe_dump(config))
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cut()
        await self._runner.cleanup()
        await self._client.close()

    def cut(self) -> None:
        """Break off everything that is under way: watches, too."""
        self.faults["cut"] += 1
        for each in tuple(self._open):
            each.abort()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if self.draws.random() < self.refuses:
            status = self.draws.choice((429, 500, 503))
            self.faults[str(status)] += 1
            return web.json_response({"code": status, "reason": "Fault"}, status=status)
        headers = {
            name: request.headers[name]
            for name in ("Authorization", "Content-Type", "Accept")
            if name in request.headers
        }
        own = request.transport
        self._open.add(own)
        try:
            async with self._client.request(
                request.method, request.path_qs, data=await request.read(), headers=headers
            ) as answer:
                if request.method != "GET" and self.draws.random() < self.loses:
                    self.faults["lost"] += 1
                    own.abort()  # It was done, and no answer comes.
                response = web.StreamResponse(status=answer.status)
                response.content_type = "application/json"
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                return response
        except (aiohttp.ClientError, ConnectionError):  # The API server is down; or it was cut.
            own.abort()
            return web.Response()
        finally:
            self._open.discard(own)


class Load:
    """Workloads that start and end all the time, each on a device of its own."""

    def __init__(self, plane: Plane, backend: KubernetesBackend) -> None:
        self._plane, self._backend = plane, backend
        self.started = 0
        self.twice = set[str]()
        self.going = True
        self._more = asyncio.Event()

    async def more(self, count: int) -> None:
        """Wait until so many more have started."""
        enough = self.started + count
        async with asyncio.timeout(SEEN_SECONDS_MAX):
            while self.started < enough:
                self._more.clear()
                await self._more.wait()

    async def work(self, number: int) -> None:
        """Start and end one after the other, on one device of one node."""
        node, gpu = f"n{number % NODES}", f"GPU-n{number % NODES}-{number // NODES}"
        share = Share(ClusterId("c1"), NodeId(node), (gpu,))
        fencing = 0
        while self.going:
            fencing += 1
            order = Order(f"w{number}-{fencing}", SPEC, (share,), {}, 90, fencing=fencing)
            ready = await self._backend.start(order)
            assert ready.phase is Phase.READY
            (claim,) = [x for x in await self._all("ResourceClaim") if is_of(x, order.id)]
            (given,) = claim["status"]["allocation"]["devices"]["results"]
            assert f"GPU-{given['pool']}-{given['device'].removeprefix('gpu-')}" == gpu
            self.started += 1
            self._more.set()
            await self.stopped(order.id)

    async def stopped(self, name: str) -> None:
        """Stop, as the daemon does: until it has succeeded."""
        while True:
            try:
                await self._backend.stop(name)
            except BackendError:
                await asyncio.sleep(0.2)  # As the daemon pauses.
            else:
                return

    async def watch(self) -> None:
        """Look all the time whether anything runs twice."""
        while self.going:
            names = Counter(
                each["metadata"]["annotations"]["moorage.dev/workload"]
                for each in await self._all("Pod")
            )
            self.twice |= {name for name, count in names.items() if count > 1}
            await asyncio.sleep(0.05)  # The API server says nothing to this loop.

    async def _all(self, kind: str) -> list[dict[str, Any]]:
        while True:
            with contextlib.suppress(Exception):  # It is down just now.
                return await asyncio.to_thread(self._plane.all, kind)
            await asyncio.sleep(0.1)  # As above.


def is_of(thing: dict[str, Any], workload: str) -> bool:
    return thing["metadata"]["annotations"]["moorage.dev/workload"] == workload


@pytest.fixture
async def gate(fresh_plane: Plane, tmp_path: Path) -> AsyncIterator[Gate]:
    for number in range(NODES):
        fresh_plane.create(*dra_node(f"n{number}"))
    async with Gate(fresh_plane, tmp_path) as made:
        yield made


async def first_of(*tasks: Awaitable[None]) -> None:
    """Wait for the first to end; a worker only ends by its error."""
    done, _ = await asyncio.wait(
        [asyncio.ensure_future(each) for each in tasks], return_when=asyncio.FIRST_COMPLETED
    )
    for each in done:
        each.result()


async def under_load(
    plane: Plane, gate: Gate, folder: Path, faults: Callable[[Load], Awaitable[None]]
) -> Load:
    backend = KubernetesBackend(folder, [ClusterSource("c1", kubeconfig=gate.kubeconfig)])
    load = Load(plane, backend)
    try:
        tasks = [asyncio.create_task(load.work(number)) for number in range(WORKERS)]
        tasks.append(asyncio.create_task(load.watch()))
        await first_of(faults(load), *tasks)
        gate.refuses = gate.loses = 0
        load.going = False
        await asyncio.gather(*tasks)
        assert [each.id for each in await backend.discover()] == []
    finally:
        load.going = False
        await backend.close()
    left = [*await asyncio.to_thread(plane.all, "Pod"), *plane.all("ResourceClaim")]
    assert [each["metadata"]["name"] for each in left] == []
    assert load.twice == set()
    return load


async def test_cut_watches_lose_nothing(fresh_plane, gate, tmp_path):
    async def faults(load: Load) -> None:
        for _ in range(FAULTS):
            await load.more(2)
            gate.cut()

    load = await under_load(fresh_plane, gate, tmp_path, faults)
    print(f"{FAULTS} cuts, {load.started} workloads, none lost or twice")


async def test_refusals_and_lost_answers_lose_nothing(fresh_plane, gate, tmp_path):
    async def faults(load: Load) -> None:
        gate.refuses, gate.loses = 0.15, 0.1
        await load.more(5 * WORKERS)

    load = await under_load(fresh_plane, gate, tmp_path, faults)
    assert {"429", "500", "503", "lost"} <= gate.faults.keys()
    print(f"{dict(gate.faults)}, {load.started} workloads, none lost or twice")


async def test_restarts_of_the_api_server_lose_nothing(fresh_plane, gate, tmp_path):
    async def faults(load: Load) -> None:
        for _ in range(4):
            await load.more(WORKERS)
            await asyncio.to_thread(fresh_plane.kill, "kube-apiserver")
            await asyncio.to_thread(fresh_plane.start, "kube-apiserver")

    load = await under_load(fresh_plane, gate, tmp_path, faults)
    print(f"4 restarts, {load.started} workloads, none lost or twice")

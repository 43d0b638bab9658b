"""An API server restarts, cuts connections or refuses: no pod is lost or created twice."""

import asyncio
import contextlib
import json
import random
import time
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
from kubernetes_wire import Wire

from moorage.backends.base import BackendError, Order, Phase, WorkloadReport
from moorage.backends.kubernetes import connection, watching
from moorage.backends.kubernetes.backend import KubernetesBackend
from moorage.backends.kubernetes.following import ClusterSource
from moorage.backends.kubernetes.specs import PodResourceSpec
from moorage.model import ClusterId, NodeId, Share

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.heavy,
    # If the API server ends during a handshake, garbage collection may close the connection.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NODES = 6
WORKERS = 8
FAULTS = 8
RESTARTS = 2
SEEN_SECONDS_MAX = 120
CLOSE_SECONDS_MAX = 30
SPEC = PodResourceSpec(image="registry.example/none:1", stop_seconds=0)


class Gate:
    """An HTTP proxy before the API server that refuses requests, loses answers or cuts connections.

    It takes one token, as many proxies do that log users in.
    """

    def __init__(self, plane: Plane, folder: Path) -> None:
        self.kubeconfig = folder / "kubeconfig"
        self.login = folder / "login"
        self.token = "token-0"  # noqa: S105  # A test's value.
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
        self.log_in_with({"tokenFile": str(self.login)})
        self.login.write_text(self.token)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cut()
        await self._runner.cleanup()
        await self._client.close()

    def log_in_with(self, user: dict[str, Any]) -> None:
        """Write a user's credentials into the kubeconfig."""
        config = yaml.safe_load(self.kubeconfig.read_text())
        config["users"][0]["user"] = user
        self.kubeconfig.write_text(yaml.safe_dump(config))

    def cut(self) -> None:
        """Cut all open connections, watches included."""
        self.faults["cut"] += 1
        for each in tuple(self._open):
            each.abort()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            self.faults["401"] += 1
            return web.json_response({"code": 401, "reason": "Unauthorized"}, status=401)
        if self.draws.random() < self.refuses:
            status = self.draws.choice((429, 500, 503))
            self.faults[str(status)] += 1
            return web.json_response({"code": status, "reason": "Fault"}, status=status)
        headers = {
            name: request.headers[name]
            for name in ("Content-Type", "Accept")
            if name in request.headers
        }
        headers["Authorization"] = f"Bearer {self._plane.token()}"
        own = request.transport
        self._open.add(own)
        try:
            async with self._client.request(
                request.method, request.path_qs, data=await request.read(), headers=headers
            ) as answer:
                if request.method != "GET" and self.draws.random() < self.loses:
                    self.faults["lost"] += 1
                    own.abort()  # The call was carried out, but its answer is lost.
                response = web.StreamResponse(status=answer.status)
                response.content_type = "application/json"
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    self.faults["410"] += b'"code":410' in piece
                    await response.write(piece)
                return response
        except (aiohttp.ClientError, ConnectionError):  # It is down, or was cut.
            own.abort()
            return web.Response()
        finally:
            self._open.discard(own)


class Load:
    """Workloads that start and end all the time, each on its own device."""

    def __init__(self, plane: Plane, backend: KubernetesBackend) -> None:
        self.backend = backend
        self._plane = plane
        self.started = 0
        self.twice = set[str]()
        self.going = True
        self._more = asyncio.Event()

    async def more(self, count: int) -> None:
        """Wait until the load has started `count` more workloads."""
        enough = self.started + count
        async with asyncio.timeout(SEEN_SECONDS_MAX):
            while self.started < enough:
                self._more.clear()
                await self._more.wait()

    async def work(self, number: int) -> None:
        """Start and end workloads, one after the other, on one device of one node."""
        node, gpu = f"n{number % NODES}", f"GPU-n{number % NODES}-{number // NODES}"
        share = Share(ClusterId("c1"), NodeId(node), (gpu,))
        fencing = 0
        while self.going:
            fencing += 1
            order = Order(f"w{number}-{fencing}", SPEC, (share,), {}, 90, fencing=fencing)
            ready = await self.backend.start(order)
            assert ready.phase is Phase.READY
            (claim,) = [x for x in await self.all("ResourceClaim") if is_of(x, order.id)]
            (given,) = claim["status"]["allocation"]["devices"]["results"]
            assert f"GPU-{given['pool']}-{given['device'].removeprefix('gpu-')}" == gpu
            self.started += 1
            self._more.set()
            await self.stopped(order.id)

    async def stopped(self, name: str) -> None:
        """Try to stop a workload until a stop succeeds, as the daemon does."""
        while True:
            try:
                await self.backend.stop(name)
            except BackendError:
                await asyncio.sleep(0.2)  # The daemon pauses, too.
            else:
                return

    async def watch(self) -> None:
        """Look repeatedly for workloads that have two pods."""
        while self.going:
            names = Counter(
                each["metadata"]["annotations"]["moorage.dev/workload"]
                for each in await self.all("Pod")
            )
            self.twice |= {name for name, count in names.items() if count > 1}
            await asyncio.sleep(0.05)  # This loop gets no events of the API server.

    async def all(self, kind: str) -> list[dict[str, Any]]:
        while True:
            with contextlib.suppress(Exception):  # The API server is down.
                return await asyncio.to_thread(self._plane.all, kind)
            await asyncio.sleep(0.1)  # As above.


def is_of(document: dict[str, Any], workload: str) -> bool:
    return document["metadata"]["annotations"]["moorage.dev/workload"] == workload


@pytest.fixture
def nodes(fresh_plane: Plane) -> Plane:
    for number in range(NODES):
        fresh_plane.create(*dra_node(f"n{number}"))
    return fresh_plane


@pytest.fixture
async def gate(nodes: Plane, tmp_path: Path) -> AsyncIterator[Gate]:
    async with Gate(nodes, tmp_path) as made:
        yield made


async def first_of(*tasks: Awaitable[None]) -> None:
    """Wait until one of the tasks ends, and raise its error if it has one."""
    done, _ = await asyncio.wait(
        [asyncio.ensure_future(each) for each in tasks], return_when=asyncio.FIRST_COMPLETED
    )
    for each in done:
        each.result()


async def under_load(
    plane: Plane, kubeconfig: Path, folder: Path, faults: Callable[[Load], Awaitable[None]]
) -> Load:
    backend = KubernetesBackend(folder, [ClusterSource("c1", kubeconfig=kubeconfig)])
    load = Load(plane, backend)
    try:
        tasks = [asyncio.create_task(load.work(number)) for number in range(WORKERS)]
        tasks.append(asyncio.create_task(load.watch()))
        await first_of(faults(load), *tasks)
        load.going = False
        done, late = await asyncio.wait(tasks, timeout=SEEN_SECONDS_MAX)
        for each in late:
            each.print_stack()
        assert not late, "a workload neither started nor ended"
        for each in done:
            each.result()
        async with asyncio.timeout(SEEN_SECONDS_MAX):
            assert [each.id for each in await backend.discover()] == []
    finally:
        load.going = False
        async with asyncio.timeout(CLOSE_SECONDS_MAX):
            await backend.close()
    left = [*await asyncio.to_thread(plane.all, "Pod"), *plane.all("ResourceClaim")]
    assert [each["metadata"]["name"] for each in left] == []
    assert load.twice == set()
    return load


async def test_broken_watches_lose_no_pod(fresh_plane, gate, tmp_path):
    async def faults(load: Load) -> None:
        for _ in range(FAULTS):
            await load.more(2)
            gate.cut()

    load = await under_load(fresh_plane, gate.kubeconfig, tmp_path, faults)
    print(f"{FAULTS} cuts, {load.started} workloads, none lost or twice")


async def test_refusals_and_lost_answers_lose_no_pod(fresh_plane, gate, tmp_path):
    async def faults(load: Load) -> None:
        gate.refuses, gate.loses = 0.15, 0.1
        await load.more(3 * WORKERS)
        gate.refuses = gate.loses = 0

    load = await under_load(fresh_plane, gate.kubeconfig, tmp_path, faults)
    assert {"429", "500", "503", "lost"} <= gate.faults.keys()
    print(f"{dict(gate.faults)}, {load.started} workloads, none lost or twice")


async def test_restarts_of_the_api_server_lose_no_pod(fresh_plane, gate, tmp_path):
    """A restarted API server knows no old versions: it answers old watches with 410.

    Its controllers lose their leases and start again, as in a real control plane. Controllers
    that kept running might never remove claims that ended meanwhile.
    """

    async def faults(load: Load) -> None:
        for _ in range(RESTARTS):
            await load.more(WORKERS)
            await asyncio.to_thread(fresh_plane.kill, "kube-apiserver")
            await asyncio.to_thread(fresh_plane.start, "kube-apiserver")
            for name in ("kube-controller-manager", "kube-scheduler"):
                await asyncio.to_thread(fresh_plane.kill, name)
                await asyncio.to_thread(fresh_plane.start, name)

    load = await under_load(fresh_plane, gate.kubeconfig, tmp_path, faults)
    assert gate.faults["410"] > 0
    said = f"{RESTARTS} restarts, {gate.faults['410']} watches answered 410"
    print(f"{said}, {load.started} workloads, none lost or twice")


@pytest.mark.parametrize("way", ["tokenFile", "exec"])
async def test_expired_credentials_lose_no_pod(fresh_plane, gate, tmp_path, way):
    """An allocation after the credentials expire succeeds, too."""
    version = "client.authentication.k8s.io/v1"
    if way == "exec":
        plugin = {"apiVersion": version, "command": "cat", "args": [str(gate.login)]}
        gate.log_in_with({"exec": plugin})

    def write_login() -> None:
        status = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": gate.token}}
        draft = gate.login.with_suffix(".draft")
        draft.write_text(json.dumps(status) if way == "exec" else gate.token)
        draft.replace(gate.login)

    if way == "exec":
        write_login()

    async def faults(load: Load) -> None:
        for number in range(1, 4):
            await load.more(WORKERS)
            gate.login.unlink()
            gate.token = f"token-{number}"
            await asyncio.sleep(gate.draws.uniform(0, 1))
            write_login()

    load = await under_load(fresh_plane, gate.kubeconfig, tmp_path, faults)
    assert gate.faults["401"] > 0
    print(f"3 logins, {gate.faults['401']} refusals, {load.started} workloads, none lost or twice")


async def test_a_slow_etcd_loses_no_pod(fresh_plane, gate, tmp_path):
    async def faults(load: Load) -> None:
        for _ in range(3):
            await load.more(2)
            fresh_plane.pause("etcd")
            await asyncio.sleep(gate.draws.uniform(0.5, 4))
            fresh_plane.resume("etcd")

    load = await under_load(fresh_plane, gate.kubeconfig, tmp_path, faults)
    print(f"3 pauses of etcd, {load.started} workloads, none lost or twice")


async def test_after_a_partition_all_changes_are_applied(nodes, tmp_path, monkeypatch):
    """The network drops all packets of the connections, and resets neither end."""
    monkeypatch.setattr(watching, "WATCH_SECONDS", 4)
    monkeypatch.setattr(watching, "WATCH_SILENCE_SECONDS_MAX", 10.0)
    monkeypatch.setattr(connection, "CALL_SECONDS_MAX", 10.0)
    wire = Wire(nodes, tmp_path)
    await wire.mend()
    failed, loop = asyncio.Event(), asyncio.get_running_loop()

    def hear(report: WorkloadReport) -> None:
        if report.id == "steady" and report.phase is Phase.FAILED:
            loop.call_soon_threadsafe(failed.set)

    async def faults(load: Load) -> None:
        load.backend.listen(hear)
        share = Share(ClusterId("c1"), NodeId("n0"), ("GPU-n0-3",))
        await load.backend.start(Order("steady", SPEC, (share,), {}, 90))
        await load.more(WORKERS)
        wire.lose()
        (pod,) = [x for x in await load.all("Pod") if is_of(x, "steady")]
        await asyncio.to_thread(nodes.delete, "Pod", pod["metadata"]["name"])
        await asyncio.sleep(3)  # The length of the partition is part of the test.
        wire.find()
        found_at = time.monotonic()
        async with asyncio.timeout(SEEN_SECONDS_MAX):
            await failed.wait()
        print(f"heard {time.monotonic() - found_at:.0f} s after the partition")
        await load.stopped("steady")
        await load.more(WORKERS)

    load = await under_load(nodes, wire.kubeconfig, tmp_path, faults)
    print(f"1 partition, {load.started} workloads, none lost or twice")
    await wire.cut()

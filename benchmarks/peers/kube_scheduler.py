"""kube-scheduler: a pod is created, and a watch says where it was bound; etcd syncs."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx

from benchmarks.peers.servers import folder, version_of
from benchmarks.peers.session import CPU_MILLI, MEMORY_MIB, UNDER_WAY, Booking, Nodes, Peer
from moorage.bench.kubernetes_rate import node_of, pod_of
from moorage.bench.scheduler_plane import SchedulerPlane, programs
from moorage.lab.errors import CommandError

_PODS: Final = "/api/v1/namespaces/default/pods"
_NOW: Final = {"gracePeriodSeconds": "0"}


class _Session:
    def __init__(self, pids: list[int], client: httpx.AsyncClient) -> None:
        self.pids = pids
        self._client = client
        self._numbers = itertools.count()
        self._bound: dict[str, asyncio.Future[str]] = {}
        self._refused: dict[str, asyncio.Event] = {}

    async def place(self) -> Booking | None:
        name = f"pod-{next(self._numbers)}"
        refused = self._expect(name)
        await self._create(name)
        no = asyncio.ensure_future(refused.wait())
        bound = self._bound[name]
        await asyncio.wait((no, bound), return_when=asyncio.FIRST_COMPLETED)
        no.cancel()
        if bound.done():
            return Booking(name, bound.result())
        await self.release(Booking(name))
        return None

    async def release(self, booking: Booking) -> None:
        answer = await self._client.delete(f"{_PODS}/{booking.handle}", params=_NOW)
        answer.raise_for_status()

    async def wait(self, parked: asyncio.Event) -> Booking:
        name = f"pod-{next(self._numbers)}"
        refused = self._expect(name)
        await self._create(name)
        await refused.wait()
        parked.set()
        return Booking(name, await self._bound[name])

    def _expect(self, name: str) -> asyncio.Event:
        self._bound[name] = asyncio.get_running_loop().create_future()
        self._refused[name] = asyncio.Event()
        return self._refused[name]

    async def _create(self, name: str) -> None:
        answer = await self._client.post(_PODS, json=pod_of(name))
        if answer.is_error:
            raise CommandError(f"no pod: {answer.text[:500]}")

    async def watch(self, watching: asyncio.Event) -> None:
        """Follow the pods; a watch that the server ends, as it may, begins with all of them."""
        query = {"watch": "true"}
        while True:
            async with self._client.stream("GET", _PODS, params=query, timeout=None) as stream:
                watching.set()
                async for line in stream.aiter_lines():
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        break
                    self._see(event["object"])

    def _see(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        node = pod["spec"].get("nodeName")
        if node and not self._bound[name].done():
            self._bound[name].set_result(node)
        for each in pod["status"].get("conditions", ()):
            if (each["type"], each["status"]) == ("PodScheduled", "False"):
                self._refused[name].set()


@contextlib.asynccontextmanager
async def _run(nodes: Nodes) -> AsyncIterator[_Session]:
    with folder() as home, SchedulerPlane.run(home, synced=True) as plane:
        await asyncio.to_thread(plane.create, "/api/v1/nodes", map(node_of, nodes))
        limits = httpx.Limits(max_connections=UNDER_WAY + 2, max_keepalive_connections=None)
        with plane.scheduler():
            async with httpx.AsyncClient(**plane.client_options(), limits=limits) as client:
                session = _Session(plane.pids, client)
                watching = asyncio.Event()
                watch = asyncio.ensure_future(session.watch(watching))
                await watching.wait()
                await session.place()  # Until it has started.
                await session.release(Booking("pod-0"))
                yield session
                watch.cancel()
                await asyncio.wait([watch])


def _version() -> str | None:
    try:
        return version_of(programs()["kube-scheduler"])
    except CommandError:
        return None


PEER: Final = Peer(
    name="kube-scheduler",
    group="schedulers",
    title="kube-scheduler",
    decides=f"node, by {CPU_MILLI // 1000} CPU, {MEMORY_MIB // 1024} GiB and a GPU",
    stores="yes, synced",
    install="make kubernetes-tools",
    version=_version,
    run=_run,
)

"""kube-scheduler: a pod is created, and a watch says where it was bound; etcd syncs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from benchmarks.peers.kubernetes_objects import ObjectSession, client_of, has_condition
from benchmarks.peers.servers import folder, version_of
from benchmarks.peers.session import CPU_MILLI, MEMORY_MIB, Nodes, Peer
from moorage.bench.kubernetes_rate import node_of, pod_of
from moorage.bench.scheduler_plane import SchedulerPlane, programs
from moorage.lab.errors import CommandError
from moorage.records.json_values import JsonObject


class _Session(ObjectSession):
    path = "/api/v1/namespaces/default/pods"

    def body(self, name: str) -> JsonObject:
        return pod_of(name)

    def place_of(self, found: JsonObject) -> str | None:
        node: str | None = found["spec"].get("nodeName")
        return node

    def is_refused(self, found: JsonObject) -> bool:
        return has_condition(found, "PodScheduled", "False")


@contextlib.asynccontextmanager
async def _run(nodes: Nodes) -> AsyncIterator[_Session]:
    with folder() as home, SchedulerPlane.run(home, synced=True) as plane:
        await asyncio.to_thread(plane.create, "/api/v1/nodes", map(node_of, nodes))
        with plane.scheduler():
            async with client_of(plane) as client:
                session = _Session(plane.pids, client)
                async with session.following():
                    yield session


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

"""The peer kube-scheduler: a client creates a pod and watches for its node; etcd syncs to disk."""

import contextlib
from collections.abc import AsyncIterator
from typing import Final

from benchmarks.peers.servers import folder, version_of
from benchmarks.peers.session import Peer
from moorage.bench.kubernetes_objects import ObjectSession
from moorage.bench.kubernetes_rate import pod_session
from moorage.bench.placements import CPU_MILLI, MEMORY_MIB, Nodes
from moorage.bench.scheduler_plane import programs
from moorage.lab.errors import CommandError


@contextlib.asynccontextmanager
async def _run(nodes: Nodes) -> AsyncIterator[ObjectSession]:
    with folder() as home:
        async with pod_session(home, nodes) as session:
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

"""`moored bench kubernetes`: durable grants per second, beside kube-scheduler's pods per second.

Moorage and kube-scheduler place the same demand (one whole GPU) on the same nodes, one after the
other on this machine, for the same number of clients, and sync what they store. A second figure
favours the scheduler: all pods exist before it starts, and etcd does not sync.
"""

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from moorage.bench import replay
from moorage.bench.kubernetes_objects import ObjectSession, client_of, has_condition
from moorage.bench.load import LoadResult, drive
from moorage.bench.placements import (
    CONNECTIONS,
    CPU_MILLI,
    MEMORY_MIB,
    WINDOW,
    Extent,
    Nodes,
    check_size,
    closed_loop,
    while_serving,
)
from moorage.bench.scheduler_plane import SchedulerPlane
from moorage.lab import trace
from moorage.lab.event_loop import run_until_sigterm
from moorage.records.json_values import JsonObject
from moorage.testing.daemon_process import daemon

EDGE: Final = 0.1
"""Fraction of the events that `per_second` omits at each end of a run: rates are lower there."""
PODS: Final = "/api/v1/namespaces/default/pods"


def rates(machines: Nodes) -> JsonObject:
    """Measure the grants and the pods per second, and compare them.

    Raises:
        CommandError: A program of Kubernetes is missing, or the fleet has too few GPUs.
    """
    check_size(machines)
    extent = Extent.of(machines)
    bound, pods = run_until_sigterm(_measure_scheduler(machines, extent))
    ready = _measure_ready(machines, extent.requests)
    load = _measure_grants(machines, extent)
    granted = sum(1 for reply in load.replies if b'"lease":' in reply)
    grants = granted / load.seconds
    return {
        "nodes": len(machines),
        "pods": extent.requests,
        "pods_bound": bound,
        "pods_per_second": pods,
        "ready_pods_per_second": ready,
        "grants": granted,
        "connections": CONNECTIONS,
        "window": WINDOW,
        "grants_per_second": grants,
        "grants_to_pods": grants / pods,
        "grants_to_ready_pods": grants / ready,
    }


def _measure_grants(machines: Nodes, extent: Extent) -> LoadResult:
    pod = trace.TracePod("pod", CPU_MILLI, MEMORY_MIB, 1, 1000)
    with daemon() as running:
        uri = replay.prepare(running, trace.cluster_document(machines), "fgd", [pod])
        message = replay.ask(uri, pod)
        run_until_sigterm(drive(running.ws, [message] * extent.singles))  # To warm up.
        return run_until_sigterm(
            drive(running.ws, [message] * extent.requests, connections=CONNECTIONS, window=WINDOW)
        )


async def _measure_scheduler(machines: Nodes, extent: Extent) -> tuple[int, float]:
    """Return the number of pods that the scheduler bound in the closed loop, and their rate."""
    with tempfile.TemporaryDirectory(prefix="moorage-") as folder:
        async with (
            pod_session(Path(folder), machines) as session,
            while_serving(session.pids),
        ):
            await closed_loop(session.place, extent.singles)  # To warm up.
            placed, seconds = await closed_loop(session.place, extent.requests)
    return len(placed), len(placed) / seconds


class _PodSession(ObjectSession):
    path = PODS

    def body(self, name: str) -> JsonObject:
        return pod_of(name)

    def place_of(self, found: JsonObject) -> str | None:
        node: str | None = found["spec"].get("nodeName")
        return node

    def is_refused(self, found: JsonObject) -> bool:
        return has_condition(found, "PodScheduled", "False")


@contextlib.asynccontextmanager
async def pod_session(folder: Path, nodes: Nodes) -> AsyncIterator[ObjectSession]:
    """Run kube-scheduler over nodes, with an etcd that syncs, until the block ends."""
    with SchedulerPlane.run(folder, synced=True) as plane:
        await asyncio.to_thread(plane.create, "/api/v1/nodes", map(node_of, nodes))
        with plane.scheduler():
            async with client_of(plane) as client:
                session = _PodSession(plane.pids, client)
                async with session.following():
                    yield session


def _measure_ready(machines: Nodes, count: int) -> float:
    """Return how many pods per second the scheduler binds if all pods exist before it starts."""
    with (
        tempfile.TemporaryDirectory(prefix="moorage-") as folder,
        SchedulerPlane.run(Path(folder)) as plane,
    ):
        plane.create("/api/v1/nodes", map(node_of, machines))
        plane.create(PODS, (pod_of(f"pod-{number}") for number in range(count)))
        with plane.scheduler():
            plane.until_bound(count)
        times = sorted(
            datetime.fromisoformat(condition["lastTransitionTime"]).timestamp()
            for pod in plane.pods()
            for condition in pod["status"].get("conditions", ())
            if (condition["type"], condition["status"]) == ("PodScheduled", "True")
        )
    return per_second(times)


def per_second(times: Sequence[float]) -> float:
    """Return events per second, from times in full seconds, without `EDGE` at each end.

    The events of one second are spread evenly over it, since the times are rounded.
    """
    spread = [
        second + (number + 0.5) / len(group)
        for second, group in ((s, list(g)) for s, g in itertools.groupby(times))
        for number in range(len(group))
    ]
    first, last = int(EDGE * len(spread)), int((1 - EDGE) * len(spread)) - 1
    return (last - first) / (spread[last] - spread[first])


def node_of(node: trace.TraceNode) -> JsonObject:
    """Return a Kubernetes node with the resources of a trace's node."""
    sizes = {"cpu": f"{node.cpu_milli}m", "memory": f"{node.memory_mib}Mi", "pods": "1000"}
    sizes |= {"nvidia.com/gpu": str(node.gpus)} if node.gpus else {}
    labels = {"kubernetes.io/hostname": node.name}
    labels |= {"nvidia.com/gpu.product": node.model} if node.model else {}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": labels},
        "status": {"capacity": sizes, "allocatable": sizes},
    }


def pod_of(name: str) -> JsonObject:
    """Return a pod that needs one whole GPU."""
    sizes = {"cpu": f"{CPU_MILLI}m", "memory": f"{MEMORY_MIB}Mi", "nvidia.com/gpu": "1"}
    resources = {"requests": sizes, "limits": sizes}
    container = {"name": "main", "image": "registry.example/none:1", "resources": resources}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }

"""`moored bench kubernetes`: durable grants per second, beside kube-scheduler's pods per second.

Both place the same demand, one whole GPU, on the same nodes, one after the other on this machine.
The scheduler has it easier: its pods are there before it starts, their creation is not counted, and
etcd does not sync. A grant goes through socket, jailed `fgd` and synced ledger.
"""

import itertools
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from moorage.bench import replay
from moorage.bench.load import LoadResult, drive
from moorage.bench.scheduler_plane import SchedulerPlane
from moorage.lab import trace
from moorage.lab.errors import CommandError
from moorage.lab.event_loop import run_until_sigterm
from moorage.records.json_values import JsonObject
from moorage.testing.daemon_process import daemon

PODS: Final = 5_000
PODS_MIN: Final = 20
CONNECTIONS: Final = 8
WINDOW: Final = 8
EDGE: Final = 0.1
"""Of the pods that were bound first, and last: they are left out, as start and end are slower."""
_CPU_MILLI: Final = 1_000
_MEMORY_MIB: Final = 1_024


def rates(machines: Sequence[trace.TraceNode]) -> JsonObject:
    """Measure both.

    Raises:
        CommandError: There is no Kubernetes to be run here, or too few GPUs.
    """
    count = min(PODS, sum(node.gpus for node in machines))
    if count < PODS_MIN:
        raise CommandError(f"--nodes: expected nodes with {PODS_MIN} GPUs or more in all")
    wanted = [
        trace.TracePod(f"pod-{number}", _CPU_MILLI, _MEMORY_MIB, 1, 1000) for number in range(count)
    ]
    scheduled = _measure_scheduler(machines, count)
    load = _measure_grants(machines, wanted)
    granted = sum(1 for reply in load.replies if b'"lease":' in reply)
    grants = granted / load.seconds
    return {
        "nodes": len(machines),
        "pods": count,
        "pods_bound": scheduled["bound"],
        "pods_per_second": scheduled["per_second"],
        "grants": granted,
        "connections": CONNECTIONS,
        "window": WINDOW,
        "grants_per_second": grants,
        "grants_to_pods": grants / scheduled["per_second"],
    }


def _measure_grants(
    machines: Sequence[trace.TraceNode], wanted: Sequence[trace.TracePod]
) -> LoadResult:
    with daemon() as running:
        uri = replay.prepare(running, trace.cluster_document(machines), "fgd", wanted)
        messages = [replay.ask(uri, pod) for pod in wanted]
        return run_until_sigterm(
            drive(running.ws, messages, connections=CONNECTIONS, window=WINDOW)
        )


def _measure_scheduler(machines: Sequence[trace.TraceNode], count: int) -> dict[str, float]:
    """Return the number of pods that the scheduler bound, and their rate per second."""
    with (
        tempfile.TemporaryDirectory(prefix="moorage-") as folder,
        SchedulerPlane.run(Path(folder)) as plane,
    ):
        plane.create("/api/v1/nodes", map(node_of, machines))
        plane.create(
            "/api/v1/namespaces/default/pods", (pod_of(f"pod-{number}") for number in range(count))
        )
        with plane.scheduler():
            plane.until_bound(count)
        times = sorted(
            datetime.fromisoformat(condition["lastTransitionTime"]).timestamp()
            for pod in plane.pods()
            for condition in pod["status"].get("conditions", ())
            if (condition["type"], condition["status"]) == ("PodScheduled", "True")
        )
    return {"bound": len(times), "per_second": per_second(times)}


def per_second(times: Sequence[float]) -> float:
    """Return the rate of events at these times, of full seconds, without the first and last.

    An event of a second lies anywhere in it, so those of one second are spread over it.
    """
    spread = [
        second + (number + 0.5) / len(group)
        for second, group in ((s, list(g)) for s, g in itertools.groupby(times))
        for number in range(len(group))
    ]
    first, last = int(EDGE * len(spread)), int((1 - EDGE) * len(spread)) - 1
    return (last - first) / (spread[last] - spread[first])


def node_of(node: trace.TraceNode) -> JsonObject:
    """Return a node of Kubernetes with what one of a trace has."""
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
    sizes = {"cpu": f"{_CPU_MILLI}m", "memory": f"{_MEMORY_MIB}Mi", "nvidia.com/gpu": "1"}
    resources = {"requests": sizes, "limits": sizes}
    container = {"name": "main", "image": "registry.example/none:1", "resources": resources}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }

"""The peer Kueue: the client creates a Workload and watches for its admission; etcd syncs to disk.

It runs the minimal manager of Kueue's own performance tests, which has the scheduler and the
controllers of queues, but no webhooks. The quota of one ClusterQueue is the whole fleet.
"""

import asyncio
import contextlib
import mmap
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import httpx

from benchmarks.peers.servers import POLL_SECONDS, READY_SECONDS_MAX, folder, program
from benchmarks.peers.session import Peer
from moorage.bench.kubernetes_objects import ObjectSession, client_of, has_condition
from moorage.bench.kubernetes_rate import node_of, pod_of
from moorage.bench.placements import Nodes
from moorage.bench.scheduler_plane import SchedulerPlane, find_program, programs
from moorage.lab.errors import CommandError
from moorage.records.json_values import JsonObject
from moorage.testing.daemon_process import tail

GROUP: Final = "kueue.x-k8s.io"
API: Final = f"/apis/{GROUP}/v1beta2"
QUEUE: Final = "main"
_CRDS: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class _Session(ObjectSession):
    path = f"{API}/namespaces/default/workloads"

    def body(self, name: str) -> JsonObject:
        return workload_of(name)

    def place_of(self, found: JsonObject) -> str | None:
        return "" if has_condition(found, "Admitted", "True") else None

    def is_refused(self, found: JsonObject) -> bool:
        return has_condition(found, "QuotaReserved", "False")


def workload_of(name: str) -> JsonObject:
    """Return a Workload of one pod that needs one whole GPU."""
    pods = {"name": "main", "count": 1, "template": {"spec": pod_of(name)["spec"]}}
    return {
        "apiVersion": f"{GROUP}/v1beta2",
        "kind": "Workload",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"queueName": QUEUE, "podSets": [pods]},
    }


def queues_of(nodes: Nodes) -> list[tuple[str, JsonObject]]:
    """Return the Kubernetes objects of a queue for all nodes, each after its API path."""
    amounts = {
        "cpu": f"{sum(node.cpu_milli for node in nodes)}m",
        "memory": f"{sum(node.memory_mib for node in nodes)}Mi",
        "nvidia.com/gpu": str(sum(node.gpus for node in nodes)),
    }
    quotas = [{"name": name, "nominalQuota": amount} for name, amount in amounts.items()]
    flavors = [{"name": QUEUE, "resources": quotas}]
    group = {"coveredResources": list(amounts), "flavors": flavors}
    named = {"apiVersion": f"{GROUP}/v1beta2", "metadata": {"name": QUEUE}}
    return [
        (f"{API}/resourceflavors", {**named, "kind": "ResourceFlavor", "spec": {}}),
        (
            f"{API}/clusterqueues",
            {
                **named,
                "kind": "ClusterQueue",
                "spec": {"namespaceSelector": {}, "resourceGroups": [group]},
            },
        ),
        (
            f"{API}/namespaces/default/localqueues",
            {**named, "kind": "LocalQueue", "spec": {"clusterQueue": QUEUE}},
        ),
    ]


@contextlib.asynccontextmanager
async def _run(nodes: Nodes) -> AsyncIterator[_Session]:
    kueue = find_program("kueue")
    assert kueue is not None
    with folder() as home, SchedulerPlane.run(home, synced=True) as plane:
        await asyncio.to_thread(plane.create, "/api/v1/nodes", map(node_of, nodes))
        async with client_of(plane) as client:
            for definition in _definitions(kueue):
                await _define(client, definition)
            log = home / "kueue.log"
            command = [kueue, f"--kubeconfig={home / 'kubeconfig'}"]
            async with program(command, None, log) as pid:
                for path, thing in queues_of(nodes):
                    (await client.post(path, json=thing)).raise_for_status()
                try:
                    await _until(client, f"{API}/clusterqueues/{QUEUE}", "Active")
                    await _until(client, f"{API}/namespaces/default/localqueues/{QUEUE}", "Active")
                except TimeoutError:
                    raise CommandError(f"Kueue admits nothing:\n{tail(log)}") from None
                session = _Session([*plane.pids, pid], client)
                async with session.following():
                    yield session


def _definitions(kueue: str) -> list[bytes]:
    """Return the custom resource definitions that the manager needs, as YAML."""
    return [each.read_bytes() for each in sorted(Path(kueue).with_name("crds").glob("*.yaml"))]


async def _define(client: httpx.AsyncClient, definition: bytes) -> None:
    """Create a custom resource definition, and wait until it is established."""
    answer = await client.post(
        _CRDS, content=definition, headers={"Content-Type": "application/yaml"}
    )
    if answer.is_error:
        raise CommandError(f"the API server refused a definition of Kueue: {answer.text[:500]}")
    await _until(client, f"{_CRDS}/{answer.json()['metadata']['name']}", "Established")


async def _until(client: httpx.AsyncClient, path: str, condition: str) -> None:
    async with asyncio.timeout(READY_SECONDS_MAX):
        while not has_condition((await client.get(path)).json(), condition, "True"):  # noqa: ASYNC110  # No event.
            await asyncio.sleep(POLL_SECONDS)


def _version() -> str | None:
    """Return Kueue's version, which is read from the manager's file, as no option prints it."""
    path = find_program("kueue")
    try:
        programs()
    except CommandError:
        return None
    if path is None or not Path(path).with_name("crds").exists():
        return None
    with (
        Path(path).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        found = re.search(rb"sigs\.k8s\.io/kueue\tv(\d+(?:\.\d+)+)", text)
        return found[1].decode() if found else None


PEER: Final = Peer(
    name="kueue",
    group="schedulers",
    title="Kueue",
    decides="a quota of CPUs, memory and GPUs; no node",
    stores="yes, synced",
    install="make kubernetes-tools kueue",
    version=_version,
    run=_run,
)

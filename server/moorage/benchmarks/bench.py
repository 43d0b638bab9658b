"""`moored bench`: what it costs, as ratios to a baseline taken in the same run.

`grants`: durable grants per second through socket, jailed `fgd` and ledger, against a bare echo on
the same socket stack with the same client; and the processor time of each. `startup`: time to the
first answer with a million facts in the ledger's history, against an empty ledger. `first_lease`:
`moored demo` from start to first lease, against starting the interpreter with the same imports.
`candidates`: a filter with ten hits among ten thousand clusters, against one with ten hits among a
hundred. `fleet`: a million GPUs in ten thousand documents, against ten thousand in a hundred.
`slots`: a checkout from a slot pool of ten thousand instances, against one of a hundred. `queue`:
events beside ten thousand waiters, against ten. `resources`: acquiring a warm process or container,
against starting one. `sandbox`: an evaluation in the jail, against the same call in-process.
`kubernetes`: grants, beside pods of kube-scheduler on the same nodes. `waiting`: how long jobs of a
trace wait, by order of the queue. `kills` times nothing: it counts what goes wrong where the daemon
is killed again and again.
"""

import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import uvloop

from moorage.benchmarks import replay
from moorage.benchmarks.backend_costs import engines
from moorage.benchmarks.churn import churn
from moorage.benchmarks.daemon_process import Running, child, daemon
from moorage.benchmarks.fleet import fleet
from moorage.benchmarks.kills import kills
from moorage.benchmarks.kubernetes_rate import rates
from moorage.benchmarks.load import LoadResult, drive
from moorage.benchmarks.placement import placement
from moorage.benchmarks.policy_costs import policies as packed_by_policies
from moorage.benchmarks.processor_time import ProcessorTime, spent
from moorage.benchmarks.queue_costs import queue
from moorage.benchmarks.sandbox_costs import sandbox
from moorage.benchmarks.slot_costs import slots
from moorage.benchmarks.waiting import waiting
from moorage.benchmarks.workflow import workflow
from moorage.catalog.opening import open_catalog
from moorage.catalog.values import Document
from moorage.core.checkpoint import condense
from moorage.core.facts import ClusterSet, Ended, Fact, Granted
from moorage.core.state import State, apply
from moorage.lab import trace
from moorage.lab.errors import CommandError
from moorage.ledger.sqlite import SqliteLedger
from moorage.model import (
    Cluster,
    ClusterId,
    Gpu,
    Lease,
    LeaseTerms,
    Node,
    NodeId,
    PolicyRef,
    RequestId,
    Share,
    Tenant,
)
from moorage_policies import catalog as shipped

REQUESTS: Final = 6_000
"""Requests of one throughput run: below the point where the openb fleet starts to say no."""
ROUND_TRIPS: Final = 1_000
"""Requests of one latency run, one after the other."""
CONNECTIONS: Final = 8
WINDOW: Final = 8
HISTORY_FACTS: Final = 1_000_000
CHECKPOINT_FACTS: Final = 20_000
"""As the daemon's own default: the tail to replay is as long as it can get."""
BATCH_FACTS: Final = 5_000
HELD_LEASES: Final = 1_000
STARTS: Final = 3
"""Starts of each kind; the quickest counts, since noise only ever adds."""
CLUSTERS_FEW: Final = 100
CLUSTERS_MANY: Final = 10_000
HITS: Final = 10
"""Clusters that every filter of `candidates` finds, however many there are."""
FILTERS: Final = 300
"""Filters of one kind that are timed, one after the other."""

Figures = dict[str, Any]


def grants(nodes: Path | None = None, pods: Path | None = None) -> Figures:
    """Measure durable grants per second, their latency and their processor time, against an echo.

    Processor time is of each grant, for the server and for its cells; of the echo, of each message.

    Args:
        nodes: Node file of a trace; a made-up fleet of openb's shape where none is given.
        pods: Request file of a trace; made-up requests where none is given.

    """
    machines, wanted = _trace(nodes, pods)
    order = trace.arrivals(wanted, trace.capacity_milli(machines), 1.0, 42)[:REQUESTS]
    latency_order, order = order[:ROUND_TRIPS], order[ROUND_TRIPS:]
    with tempfile.TemporaryDirectory(prefix="moorage-") as folder:
        command = [sys.executable, "-P", "-m", "moorage.benchmarks.echo"]
        with child(command, Path(folder) / "echo.log") as (echo, ready), daemon() as running:
            document = trace.cluster_document(machines)
            uri = replay.prepare(running, document, "fgd", wanted)
            single = [replay.ask(uri, pod) for pod in latency_order]
            many = [replay.ask(uri, pod) for pod in order]
            echo_one, echo_many, echo_cpu = _both(ready["ws"], echo.pid, single, many)
            real_one, real_many, cpu = _both(running.ws, running.pid, single, many)
    granted = [_granted(load) for load in (real_one, real_many)]
    per_second = granted[1] / real_many.seconds
    echo_each, server_each = 1e6 * echo_cpu.own / len(many), 1e6 * cpu.own / granted[1]
    cells_each = 1e6 * cpu.others / granted[1]
    return {
        "nodes": len(machines),
        "requests": len(single) + len(many),
        "granted": sum(granted),
        "connections": CONNECTIONS,
        "window": WINDOW,
        "echo_per_second": echo_many.per_second,
        "grants_per_second": per_second,
        "grants_to_echo": per_second / echo_many.per_second,
        "echo_round_trip_p50_seconds": echo_one.quantile(0.5),
        "grant_p50_to_echo_p50": real_one.quantile(0.5) / echo_one.quantile(0.5),
        "grant_p99_to_echo_p50": real_one.quantile(0.99) / echo_one.quantile(0.5),
        "grant_p99_to_echo_p99": real_one.quantile(0.99) / echo_one.quantile(0.99),
        "echo_cpu_microseconds": echo_each,
        "server_cpu_microseconds": server_each,
        "cells_cpu_microseconds": cells_each,
        "cpu_to_echo": (server_each + cells_each) / echo_each if echo_each else None,
    }


def policies(nodes: Path | None = None, pods: Path | None = None) -> Figures:
    """Measure what a jailed decision of the shipped policies costs; arguments as for `grants`."""
    return packed_by_policies(*_trace(nodes, pods))


def kubernetes(nodes: Path | None = None) -> Figures:
    """Measure grants beside kube-scheduler's pods; nodes as for `grants`."""
    return rates(trace.read_nodes(nodes) if nodes else made_up_nodes())


def _trace(
    nodes: Path | None, pods: Path | None
) -> tuple[list[trace.TraceNode], list[trace.TracePod]]:
    machines = trace.read_nodes(nodes) if nodes else made_up_nodes()
    return machines, trace.read_pods(pods) if pods else made_up_pods()


def _both(
    url: str, pid: int, single: Sequence[str], many: Sequence[str]
) -> tuple[LoadResult, LoadResult, ProcessorTime]:
    """Run the same messages one by one, then the others over several connections.

    Returns:
        Both results, and the processor time that the program took for the others.

    """

    async def play() -> tuple[LoadResult, LoadResult, ProcessorTime]:
        one, before = await drive(url, single), spent(pid)
        others = await drive(url, many, connections=CONNECTIONS, window=WINDOW)
        return one, others, spent(pid).since(before)

    return uvloop.run(play())


def _granted(load: LoadResult) -> int:
    return sum(1 for reply in load.replies if b'"lease":' in reply)


def startup() -> Figures:
    """Measure the start with a million facts in the history, against an empty ledger."""
    with tempfile.TemporaryDirectory(prefix="moorage-") as folder:
        empty, full = Path(folder) / "empty", Path(folder) / "full"
        full.mkdir()
        tail = asyncio.run(_write_history(full / "ledger.db"))
        empties, fulls = [], []
        for _ in range(STARTS):
            empties.append(_start_seconds(empty))
            # A clean stop writes a checkpoint; the copy keeps the tail at its longest.
            fulls.append(_start_seconds(_copy(full, Path(folder) / "copy")))
    return {
        "facts": HISTORY_FACTS,
        "facts_after_checkpoint": tail,
        "empty_seconds": min(empties),
        "full_seconds": min(fulls),
        "full_to_empty": min(fulls) / min(empties),
    }


def _start_seconds(data: Path) -> float:
    started = time.perf_counter()
    with daemon(data):
        return time.perf_counter() - started


def _copy(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.lock"))


async def _write_history(path: Path) -> int:
    """Write the history of a busy server: leases come and go, a thousand at a time are held.

    Returns:
        Facts after the last checkpoint.

    """
    ledger = SqliteLedger(path)
    await ledger.open()
    state, life = State(), _life()
    checkpointed = written = 0
    while written < HISTORY_FACTS:
        facts = list(islice(life, BATCH_FACTS))
        for fact in facts:
            apply(state, fact)
        written = await ledger.append(facts, float(written))
        if written % CHECKPOINT_FACTS == 0 and written < HISTORY_FACTS:
            checkpointed = written
            await ledger.checkpoint(written, list(condense(state)))
    await ledger.close()
    return written - checkpointed


def _life() -> Iterator[Fact]:
    gpus = tuple(Gpu(str(number)) for number in range(8))
    rows = tuple(Node(NodeId(f"n{row:03d}"), 128_000, 1_048_576, gpus) for row in range(125))
    yield ClusterSet(Cluster(ClusterId("history"), rows))
    for number in count():
        if number >= HELD_LEASES:  # Every device is held: the oldest lets go.
            yield Ended(_lease(number - HELD_LEASES).id, float(number), "released")
        yield Granted(_lease(number))


def _lease(number: int) -> Lease:
    device = number % HELD_LEASES
    return Lease(
        id=RequestId(f"{number:016x}"),
        tenant=Tenant("bench"),
        token_digest=f"token-{number}",
        policy=PolicyRef("fgd:1.0-stable", "0" * 64),
        placement=(Share(ClusterId("history"), NodeId(f"n{device // 8:03d}"), (str(device % 8),)),),
        fencing=number + 1,
        granted_at=float(number),
        expires_at=number + 4e9,
        terms=LeaseTerms(ttl_seconds=4e9),
    )


def first_lease() -> Figures:
    """Measure `moored demo` up to its first lease, against an interpreter with its imports."""
    base, first = [], []
    for _ in range(STARTS):
        started = time.perf_counter()
        imports = "import moorage.daemon.start, moorage_client"
        subprocess.run([sys.executable, "-P", "-c", imports], check=True)  # noqa: S603  # Ours.
        base.append(time.perf_counter() - started)
        command = [sys.executable, "-P", "-m", "moorage", "demo", "--json"]
        output = subprocess.run(command, check=True, capture_output=True).stdout  # noqa: S603  # Ours.
        first.append(msgspec.json.decode(output)["first_lease_seconds"])
    return {
        "imports_seconds": min(base),
        "first_lease_seconds": min(first),
        "first_lease_to_imports": min(first) / min(base),
    }


def candidates() -> Figures:
    """Measure filters with the same number of hits over many clusters, against a few.

    Over HTTP by the cluster documents, by their metrics too, and each right after a change of
    metrics; and the whole of an ask over a WebSocket.
    """
    with tempfile.TemporaryDirectory(prefix="moorage-") as folder:
        few = _filter_seconds(Path(folder) / "few", CLUSTERS_FEW)
        many = _filter_seconds(Path(folder) / "many", CLUSTERS_MANY)
    figures: Figures = {"few": CLUSTERS_FEW, "many": CLUSTERS_MANY, "hits": HITS}
    for name, seconds in few.items():
        figures |= {f"{name}_few_seconds": seconds, f"{name}_many_seconds": many[name]}
        figures[f"{name}_many_to_few"] = many[name] / seconds
    return figures


def _filter_seconds(data: Path, clusters: int) -> dict[str, float]:
    """Return the median seconds of a filter over so many clusters, by kind."""
    data.mkdir()
    asyncio.run(_write_clusters(data, clusters))
    documents: Document = {
        "logicalOperator": "AND",
        "conditions": [
            {"variable": "gpus.count", "operator": ">=", "value": 4},
            {"variable": "tags", "operator": "IN", "value": ["wanted"]},
            {"variable": "regionId", "operator": "LIKE", "value": "eu-*"},
        ],
    }
    metrics = {"variable": "cluster.gpu.totalFreeMem", "operator": ">", "value": 1000}
    plain = {"matchType": "cluster", "filter": {"clusterQuery": documents}}
    both = {
        "matchType": "cluster",
        "filter": {"clusterQuery": documents, "clusterMetricsQuery": metrics},
    }
    ask = {"adhoc": True, "policy_rule_uri": "first_fit:1.0-stable", "inputs": {}, "filter": both}
    ask["resources"] = {"gpus": 1}
    with (
        daemon(data) as running,
        httpx.Client(base_url=running.http, timeout=60, trust_env=False) as http,
    ):
        http.post("/policy", json=shipped.document("first_fit")).raise_for_status()
        return {
            "filter": _filters(http, plain),
            "filter_with_metrics": _filters(http, both),
            "filter_after_change": _filters(http, both, changing=True),
            "ask": _asks(running, msgspec.json.encode(ask).decode()),
        }


def _filters(http: httpx.Client, body: Document, *, changing: bool = False) -> float:
    taken: list[float] = []
    for number in range(FILTERS):
        if changing:
            http.post("/cluster", json=_metrics(number % CLUSTERS_FEW)).raise_for_status()
        started = time.perf_counter()
        answer = http.post("/api/filter-data", json=body)
        taken.append(time.perf_counter() - started)
        found = len(answer.raise_for_status().json()["data"])
        if found != HITS:
            raise CommandError(f"a filter found {found} clusters where there are {HITS}")
    return sorted(taken)[FILTERS // 2]


def _asks(running: Running, message: str) -> float:
    load = uvloop.run(drive(running.ws, [message] * FILTERS))
    if not all(b'"cluster_id":' in reply for reply in load.replies):
        raise CommandError(f"an ask with a filter was refused: {load.replies[0][:300]!r}")
    return load.quantile(0.5)


async def _write_clusters(data: Path, clusters: int) -> None:
    """Fill the catalog of a daemon that is not started yet."""
    catalog = await open_catalog(data / "catalog.db")
    for start in range(0, clusters, CLUSTERS_FEW):
        numbers = range(start, min(start + CLUSTERS_FEW, clusters))
        await asyncio.gather(*(catalog.clusters.create(_cluster(each)) for each in numbers))
        await asyncio.gather(*(catalog.metrics.put(_metrics(each)) for each in numbers))
    await catalog.close()


def _cluster(number: int) -> Document:
    """Return one cluster of many; the first ones are those that are looked for."""
    node = {"gpus": {"count": 8, "memory": 655_360, "modelNames": ["A100"]}, "memory": 1_048_576}
    rows = [{"id": f"n{row}", "vcpus": {"count": 128}, **node} for row in range(4)]
    return {
        "id": f"cluster-{number:05d}",
        "regionId": f"eu-{number % 7}",
        "tags": ["gpu", "wanted" if number < HITS else f"team-{number % 50}"],
        "nodes": {"nodeData": rows},
        "reputation": number % 100,
    }


def _metrics(number: int) -> Document:
    node = {"gpu": {"totalFreeMem": 50_000 + number}, "vcpu": {"load5m": number % 90}}
    rows = [{"id": f"n{row}", **node} for row in range(4)]
    return {"clusterId": f"cluster-{number:05d}", "nodes": rows}


BENCHMARKS: Final[dict[str, Callable[..., Figures]]] = {
    "grants": grants,
    "startup": startup,
    "first_lease": first_lease,
    "candidates": candidates,
    "workflow": workflow,
    "fleet": fleet,
    "slots": slots,
    "queue": queue,
    "engines": engines,
    "rules": policies,
    "sandbox": sandbox,
}

ON_REQUEST: Final[dict[str, Callable[..., Figures]]] = {
    "placement": placement,
    "churn": churn,
    "waiting": waiting,
    "kills": kills,
    "kubernetes": kubernetes,
}
"""They need a trace, other programs or many minutes, so they run only where they are named."""


def made_up_nodes() -> list[trace.TraceNode]:
    """Return 1,213 nodes of the openb fleet's shape: GPUs per node as there, models by size."""
    shapes = [
        (617, 8, 96_000, 393_216, "G2"),
        (54, 4, 64_000, 262_144, "V100M32"),
        (518, 2, 64_000, 262_144, "T4"),
        (24, 1, 32_000, 131_072, "P100"),
    ]
    return [
        trace.TraceNode(f"made-up-{gpus}-{number:04d}", cpu, memory, gpus, model)
        for count, gpus, cpu, memory, model in shapes
        for number in range(count)
    ]


def made_up_pods() -> list[trace.TracePod]:
    """Return 8,152 requests with about openb's mix of whole, shared, CPU-only and 8-GPU ones."""
    shapes = [
        (3_911, 1, 1_000, 8_000, 30_720),
        (1_100, 1, 810, 6_000, 16_384),
        (1_978, 1, 460, 6_000, 12_288),
        (1_088, 0, 0, 8_000, 30_720),
        (75, 8, 1_000, 64_000, 262_144),
    ]
    return [
        trace.TracePod(f"made-up-{kind}-{number:04d}", cpu, memory, gpus, milli)
        for kind, (count, gpus, milli, cpu, memory) in enumerate(shapes)
        for number in range(count)
    ]

"""`moored bench`: Moorage's speed on this machine, as ratios to a baseline of the same run.

`grants`: durable grants per second through socket, the jailed policy `fgd` and the ledger, compared
with a bare echo on the same socket stack, and the processor time of both. `sandbox`: an evaluation
in the jail, compared with the same call in this process. `kubernetes`: grants, compared with pods
that kube-scheduler places on the same nodes.

Benchmarks for developers of Moorage are in `benchmarks/` of the source tree.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from moorage.bench import replay
from moorage.bench.kubernetes_rate import rates
from moorage.bench.load import LoadResult, drive
from moorage.bench.processor_time import ProcessorTime, processor_time_of
from moorage.bench.sandbox_costs import sandbox
from moorage.lab import trace
from moorage.lab.event_loop import run_until_sigterm
from moorage.records.json_values import JsonObject
from moorage.testing.daemon_process import child, daemon

REQUESTS: Final = 6_000
"""Maximum number of requests: the openb fleet has room for this number."""
ROUND_TRIPS: Final = 1_000
"""Number of requests at the start that are sent one after the other, to measure the latency."""
CONNECTIONS: Final = 8
WINDOW: Final = 8

Figures = JsonObject


def grants(nodes: Path | None = None, pods: Path | None = None) -> Figures:
    """Measure durable grants per second, their latency and their processor time, against an echo.

    Processor time is per grant for the server and for its cells, and per message for the echo.

    Args:
        nodes: Node file of a trace; None: a generated fleet of openb's shape.
        pods: Request file of a trace; None: generated requests.
    """
    machines, wanted = read_trace(nodes, pods)
    order = trace.arrivals(wanted, trace.capacity_milli(machines), 1.0, 42)[:REQUESTS]
    latency_order, order = order[:ROUND_TRIPS], order[ROUND_TRIPS:]
    with tempfile.TemporaryDirectory(prefix="moorage-") as folder:
        command = [sys.executable, "-P", "-m", "moorage.bench.echo"]
        with child(command, Path(folder) / "echo.log") as (echo, ready), daemon() as running:
            document = trace.cluster_document(machines)
            uri = replay.prepare(running, document, "fgd", wanted)
            single = [replay.ask(uri, pod) for pod in latency_order]
            many = [replay.ask(uri, pod) for pod in order]
            echo_one, echo_many, echo_cpu = _both(ready["ws"], echo.pid, single, many)
            real_one, real_many, cpu = _both(running.ws, running.pid, single, many)
    granted = [
        sum(b'"lease":' in reply for reply in load.replies) for load in (real_one, real_many)
    ]
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


def kubernetes(nodes: Path | None = None) -> Figures:
    """Measure grants and kube-scheduler's pods on the same nodes; `nodes` is as for `grants`."""
    return rates(trace.read_nodes(nodes) if nodes else make_nodes())


def read_trace(
    nodes: Path | None, pods: Path | None
) -> tuple[list[trace.TraceNode], list[trace.TracePod]]:
    """Return nodes and requests of a trace; for None, generate them in openb's shape."""
    machines = trace.read_nodes(nodes) if nodes else make_nodes()
    return machines, trace.read_pods(pods) if pods else make_pods()


def _both(
    url: str, pid: int, single: Sequence[str], many: Sequence[str]
) -> tuple[LoadResult, LoadResult, ProcessorTime]:
    """Send `single` one by one, `many` over several connections; measure the CPU time of `many`."""

    async def play() -> tuple[LoadResult, LoadResult, ProcessorTime]:
        one, before = await drive(url, single), processor_time_of(pid)
        others = await drive(url, many, connections=CONNECTIONS, window=WINDOW)
        return one, others, processor_time_of(pid).since(before)

    return run_until_sigterm(play())


BENCHMARKS: Final[dict[str, Callable[..., Figures]]] = {
    "grants": grants,
    "sandbox": sandbox,
    "kubernetes": kubernetes,
}
ON_REQUEST: Final = frozenset({"kubernetes"})
"""Benchmarks that run only if named, since they need other programs."""


def make_nodes() -> list[trace.TraceNode]:
    """Return 1,213 nodes with about the GPU models and GPUs per node of the openb fleet."""
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


def make_pods() -> list[trace.TracePod]:
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

"""`observation`: how much metrics and the audit log slow a grant.

One server takes alternating blocks of the same requests: with both, and without both. Traces are
off, which is the default.
"""

import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import uvloop

from benchmarks.unobserved import WITH, WITHOUT
from moorage.bench import replay
from moorage.bench.grants import make_nodes, make_pods
from moorage.bench.load import LoadResult, drive
from moorage.bench.processor_time import processor_time_of
from moorage.daemon.access.audit_log import GATHER_SECONDS_MAX
from moorage.lab import trace
from moorage.testing.daemon_process import Running, child, serve_variables

BLOCKS: Final = 100
"""Number of measured blocks with observation, and as many without; all take four minutes."""
REQUESTS: Final = 1_000
"""Number of requests in each block; all are granted, and their leases are then released."""
CONNECTIONS: Final = 4
WINDOW: Final = 8
PERCENT_MAX: Final = 3.0
SETTLE_SECONDS: Final = 1.5 * GATHER_SECONDS_MAX
"""Seconds of wait after a block, so that its last audit entries are measured with the block."""
_MEDIAN_ERROR: Final = 1.253 / 1.349
"""Standard error of a median of n values, as a multiple of their quartile distance / sqrt(n)."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """The measured blocks of one kind, and the signal that switches to this kind."""

    switch: signal.Signals
    seconds: list[float] = field(default_factory=list[float])
    """Processor time of the server for a grant and its release, in seconds, for each block."""
    per_second: list[float] = field(default_factory=list[float])


def observation(
    blocks: int = BLOCKS, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure CPU time and rate of grants, with and without metrics and audit log.

    Args:
        blocks: Number of blocks of each kind.
        progress: Called with a line for each step.
    """
    with_both, without = _Kind(WITH), _Kind(WITHOUT)
    with tempfile.TemporaryDirectory(prefix="moorage-") as name:
        folder = Path(name)
        ports = ("--port", "0", "--http-port", "0", "--data", str(folder / "data"))
        program = (sys.executable, "-m", "benchmarks.unobserved", "serve", *ports)
        log = folder / "stderr.log"
        with child(program, log, serve_variables()) as (process, ready):
            running = Running(ready["ws"], ready["http"], process.pid, log)
            document = trace.cluster_document(make_nodes())
            policy = replay.prepare(running, document, "first_fit", make_pods())
            for number in range(blocks + 1):  # The first block warms up.
                for each in (with_both, without) if number % 2 else (without, with_both):
                    _play(running, policy, each)
                if number % 10 == 0:
                    progress(f"{number} of {blocks} blocks")
            metrics = httpx.get(f"{running.http}/metrics").text
            assert "moorage_asks_total 0.0" not in metrics
    pairs = zip(with_both.seconds[1:], without.seconds[1:], strict=True)
    cpu = [100 * (one / other - 1) for one, other in pairs]
    rates = zip(with_both.per_second[1:], without.per_second[1:], strict=True)
    low, _, high = statistics.quantiles(cpu, n=4)
    return {
        "blocks": blocks,
        "grants": 2 * blocks * REQUESTS,
        "cpu_microseconds": 1e6 * statistics.median(with_both.seconds[1:]),
        "cpu_microseconds_without": 1e6 * statistics.median(without.seconds[1:]),
        "cpu_percent_more": statistics.median(cpu),
        "cpu_percent_more_error": _MEDIAN_ERROR * (high - low) / math.sqrt(blocks),
        "cpu_percent_more_quickest": 100 * (_quickest(with_both) / _quickest(without) - 1),
        "rate_percent_less": statistics.median(100 * (other / one - 1) for one, other in rates),
        "percent_max": PERCENT_MAX,
        "load_of_the_machine": os.getloadavg()[0],
    }


def _quickest(kind: _Kind) -> float:
    """Return the mean of the quickest fifth of the blocks, since other programs only add time."""
    ranked = sorted(kind.seconds[1:])
    return statistics.mean(ranked[: max(1, len(ranked) // 5)])


def _play(running: Running, policy: str, kind: _Kind) -> None:
    """Request and release a block of leases."""
    os.kill(running.pid, kind.switch)
    request = {
        "adhoc": True,
        "policy_rule_uri": policy,
        "inputs": {},
        "resources": {"gpus": 1},
        "lease": {"ttl_seconds": 600},
    }
    message = msgspec.json.encode(request).decode()
    before = processor_time_of(running.pid)
    granted = _drive(running, [message] * REQUESTS)
    leases = [msgspec.json.decode(each)["lease"] for each in granted.replies]
    releases = [
        msgspec.json.encode({"op": "release", "lease": each["id"], "token": each["token"]}).decode()
        for each in leases
    ]
    _drive(running, releases)
    time.sleep(SETTLE_SECONDS)  # A thread of the server writes the audit log later.
    kind.seconds.append(processor_time_of(running.pid).since(before).own / REQUESTS)
    kind.per_second.append(granted.per_second)


def _drive(running: Running, messages: Sequence[str]) -> LoadResult:
    load = drive(running.ws, messages, connections=CONNECTIONS, window=WINDOW)
    return uvloop.run(load)

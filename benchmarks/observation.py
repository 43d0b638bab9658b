"""`observation`: how much metrics and the audit log slow a grant.

Two servers take the same requests in turn, block by block: one as it is, one without both. Traces
are switched off in each, as they are by default.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import uvloop

from moorage.bench import replay
from moorage.bench.grants import make_nodes, make_pods
from moorage.bench.load import LoadResult, drive
from moorage.bench.processor_time import processor_time_of
from moorage.lab import trace
from moorage.testing.daemon_process import Running, child, serve_variables

BLOCKS: Final = 40
"""Of each server."""
REQUESTS: Final = 500
"""Of each block; all of them are granted, and released afterwards."""
CONNECTIONS: Final = 4
WINDOW: Final = 8
PERCENT_MAX: Final = 3.0

_OURS: Final = (sys.executable, "-m", "moorage")
_BARE: Final = (sys.executable, "-m", "benchmarks.unobserved")


@dataclass(frozen=True, slots=True)
class _Server:
    """A server, and the duration of each measured block of leases."""

    running: Running
    policy: str
    seconds: list[float] = field(default_factory=list[float])
    """Of its processor, for each grant and release."""
    per_second: list[float] = field(default_factory=list[float])


def observation(
    blocks: int = BLOCKS, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure CPU time and rate of grants, with and without metrics and audit log.

    Args:
        blocks: Of requests that each server takes.
        progress: Gets a line for each step.
    """
    with ExitStack() as stack:
        ours = stack.enter_context(_serving(_OURS))
        bare = stack.enter_context(_serving(_BARE, MOORAGE_AUDIT_DAYS="0"))
        for number in range(blocks + 1):  # The first one warms up.
            for each in (ours, bare) if number % 2 else (bare, ours):
                _play(each)
            if number % 10 == 0:
                progress(f"{number} of {blocks} blocks")
        metrics = httpx.get(f"{ours.running.http}/metrics").text
        assert "moorage_asks_total 0.0" not in metrics
    cpu = [a / b - 1 for a, b in zip(ours.seconds[1:], bare.seconds[1:], strict=True)]
    rate = [b / a - 1 for a, b in zip(ours.per_second[1:], bare.per_second[1:], strict=True)]
    return {
        "blocks": blocks,
        "grants": blocks * REQUESTS,
        "cpu_microseconds": 1e6 * statistics.median(ours.seconds[1:]),
        "cpu_microseconds_without": 1e6 * statistics.median(bare.seconds[1:]),
        "cpu_percent_more": 100 * statistics.median(cpu),
        "cpu_percent_more_quickest": 100 * (_quickest(ours) / _quickest(bare) - 1),
        "cpu_percent_more_quarter": 100 * statistics.quantiles(cpu, n=4)[0],
        "cpu_percent_more_three_quarters": 100 * statistics.quantiles(cpu, n=4)[2],
        "rate_percent_less": 100 * statistics.median(rate),
        "percent_max": PERCENT_MAX,
        "load_of_the_machine": os.getloadavg()[0],
    }


def _quickest(server: _Server) -> float:
    """Return the mean of the quickest fifth of the blocks, since other programs only add time."""
    ranked = sorted(server.seconds[1:])
    return statistics.mean(ranked[: max(1, len(ranked) // 5)])


@contextmanager
def _serving(program: Sequence[str], **variables: str) -> Iterator[_Server]:
    with tempfile.TemporaryDirectory(prefix="moorage-") as name:
        folder = Path(name)
        ports = ("--port", "0", "--http-port", "0", "--data", str(folder / "data"))
        environment = {**serve_variables(), **variables}
        log = folder / "stderr.log"
        with child([*program, "serve", *ports], log, environment) as (process, ready):
            running = Running(ready["ws"], ready["http"], process.pid, log)
            machines = make_nodes()
            document = trace.cluster_document(machines)
            yield _Server(running, replay.prepare(running, document, "first_fit", make_pods()))


def _play(server: _Server) -> None:
    """Request and release a block of leases."""
    request = {
        "adhoc": True,
        "policy_rule_uri": server.policy,
        "inputs": {},
        "resources": {"gpus": 1},
        "lease": {"ttl_seconds": 600},
    }
    message = msgspec.json.encode(request).decode()
    before = processor_time_of(server.running.pid)
    granted = _drive(server, [message] * REQUESTS)
    leases = [msgspec.json.decode(each)["lease"] for each in granted.replies]
    releases = [
        msgspec.json.encode({"op": "release", "lease": each["id"], "token": each["token"]}).decode()
        for each in leases
    ]
    _drive(server, releases)
    server.seconds.append(processor_time_of(server.running.pid).since(before).own / REQUESTS)
    server.per_second.append(granted.per_second)


def _drive(server: _Server, messages: Sequence[str]) -> LoadResult:
    load = drive(server.running.ws, messages, connections=CONNECTIONS, window=WINDOW)
    return uvloop.run(load)

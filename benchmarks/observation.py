"""`observation`: how much processor time metrics and the audit log cost a grant.

One server takes short alternating blocks of the same requests: with both, and without both. As in
`moored bench grants`, a grant takes the time of the server and its cells. Traces are off, which is
the default.
"""

import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
from websockets.sync.client import ClientConnection, connect

from benchmarks.unobserved import AUDIT_THREAD, WITH, WITHOUT
from moorage.bench import replay
from moorage.bench.grants import make_nodes, make_pods
from moorage.bench.processor_time import processor_time_of
from moorage.lab import trace
from moorage.testing.daemon_process import Running, child, serve_variables

BLOCKS: Final = 500
"""Number of measured blocks with observation, and as many without; all take a minute and a half."""
WARM_BLOCKS: Final = 10
REQUESTS: Final = 100
"""Number of requests in each block; all are granted, and their leases are then released."""
CONNECTIONS: Final = 4
PERCENT_MAX: Final = 3.0
SETTLE_SECONDS: Final = 0.003
"""Seconds of wait before and after a block, so that its last replies are measured with it."""
_MEDIAN_ERROR: Final = 1.253 / 1.349
"""Standard error of a median of n values, as a multiple of their quartile distance / sqrt(n)."""


@dataclass(frozen=True, slots=True)
class _Cost:
    """Microseconds of the server, without the audit log's thread, per grant or per release.

    Both lists have a value for each pair of blocks.
    """

    observed: list[float] = field(default_factory=list[float])
    plain: list[float] = field(default_factory=list[float])

    def add(self, kind: signal.Signals, seconds: float) -> None:
        (self.observed if kind == WITH else self.plain).append(1e6 * seconds / REQUESTS)

    def more(self) -> tuple[float, float]:
        """Return the cost of observation, and its standard error."""
        pairs = zip(self.observed[WARM_BLOCKS:], self.plain[WARM_BLOCKS:], strict=True)
        costs = [one - other for one, other in pairs]
        low, middle, high = statistics.quantiles(costs, n=4)
        return middle, _MEDIAN_ERROR * (high - low) / math.sqrt(len(costs))

    def without(self) -> float:
        return statistics.median(self.plain[WARM_BLOCKS:])


def observation(
    blocks: int = BLOCKS, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure the processor time of grants and releases, with and without metrics and audit log.

    Args:
        blocks: Number of blocks of each kind.
        progress: Called with a line for each step.
    """
    grant, release = _Cost(), _Cost()
    with tempfile.TemporaryDirectory(prefix="moorage-") as name, ExitStack() as stack:
        ports = ("--port", "0", "--http-port", "0", "--data", str(Path(name) / "data"))
        program = (sys.executable, "-m", "benchmarks.unobserved", "serve", *ports)
        log = Path(name) / "stderr.log"
        process, ready = stack.enter_context(child(program, log, serve_variables()))
        running = Running(ready["ws"], ready["http"], process.pid, log)
        nodes, pods = make_nodes(), make_pods()
        policy = replay.prepare(running, trace.cluster_document(nodes), "fgd", pods)
        order = trace.arrivals(pods, trace.capacity_milli(nodes), 0.5, 42)
        asks = [replay.ask(policy, pod) for pod in order]
        sockets = [
            stack.enter_context(connect(running.ws, compression=None)) for _ in range(CONNECTIONS)
        ]
        cells, written = processor_time_of(running.pid).others, _audit_seconds(running.pid)
        for number in range(WARM_BLOCKS + blocks):
            first = number * REQUESTS % (len(asks) - REQUESTS)
            for kind in random.sample((WITH, WITHOUT), 2):
                os.kill(running.pid, kind)
                leases = _measured(running, sockets, grant, kind, asks[first : first + REQUESTS])
                _measured(running, sockets, release, kind, [_release(each) for each in leases])
            if number % 50 == 0:
                progress(f"{number} of {WARM_BLOCKS + blocks} blocks")
        granted = REQUESTS * (WARM_BLOCKS + blocks)
        cells = 1e6 * (processor_time_of(running.pid).others - cells) / (2 * granted)
        time.sleep(1.0)  # The last entries are written.
        written = 1e6 * (_audit_seconds(running.pid) - written) / (2 * granted)
        assert "moorage_asks_total 0.0" not in httpx.get(f"{running.http}/metrics").text
    return _report(grant, release, cells, written) | {"blocks": blocks}


def _report(grant: _Cost, release: _Cost, cells: float, written: float) -> dict[str, Any]:
    """Return the figures; the audit log's thread takes `written` microseconds for an entry."""
    (grant_more, grant_error), (release_more, release_error) = grant.more(), release.more()
    grant_more, release_more = grant_more + written, release_more + written
    server, both = grant.without(), grant.without() + release.without()
    return {
        "grant_microseconds": server + cells,
        "grant_microseconds_more": grant_more,
        "grant_percent_more": 100 * grant_more / (server + cells),
        "grant_percent_more_error": 100 * grant_error / (server + cells),
        "percent_max": PERCENT_MAX,
        "release_microseconds": release.without(),
        "release_microseconds_more": release_more,
        "grant_and_release_percent_more": 100 * (grant_more + release_more) / (both + cells),
        "grant_and_release_percent_more_error": 100
        * math.hypot(grant_error, release_error)
        / (both + cells),
        "server_only_percent_more": 100 * (grant_more + release_more) / both,
        "audit_thread_microseconds": written,
        "cells_microseconds": cells,
        "load_of_the_machine": os.getloadavg()[0],
    }


def _measured(
    running: Running,
    sockets: Sequence[ClientConnection],
    cost: _Cost,
    kind: signal.Signals,
    messages: Sequence[str],
) -> list[dict[str, Any]]:
    """Exchange a block of messages, add its processor time, and return the leases."""
    time.sleep(SETTLE_SECONDS)  # The former block ends.
    before = _seconds(running.pid)
    for number, message in enumerate(messages):
        sockets[number % CONNECTIONS].send(message)
    replies = [sockets[number % CONNECTIONS].recv() for number in range(len(messages))]
    time.sleep(SETTLE_SECONDS)  # The last replies leave.
    cost.add(kind, _seconds(running.pid) - before)
    return [msgspec.json.decode(each)["lease"] for each in replies]


def _release(lease: dict[str, Any]) -> str:
    message = {"op": "release", "lease": lease["id"], "token": lease["token"]}
    return msgspec.json.encode(message).decode()


def _seconds(pid: int) -> float:
    """Return the processor time of a server without its audit log's thread, in seconds."""
    return processor_time_of(pid).own - _audit_seconds(pid)


def _audit_seconds(pid: int) -> float:
    """Return the processor time of the thread that writes a server's audit log, in seconds."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text() == f"{AUDIT_THREAD}\n":
            return int((task / "schedstat").read_text().split()[0]) / 1e9
    raise RuntimeError("the server has no audit thread")

"""`moored bench sandbox`: the cost of the jail, against the same calls in this process.

One run measures all figures, with jailed calls and calls in this process alternately. The latencies
are measured on one core: a wake-up on another core takes tens of microseconds on a virtual machine,
for reasons outside the jail. `bare_*` and `any_core_bare_*` are the latencies of an echo over the
same kind of socket; the rest of a latency is Moorage's own.

The cost of two calls of an injected client depends on the documents that the cell already has
(`sandbox.host.cell_sync`), so each case is measured on a cell of its own, in a fleet of `CLUSTERS`
clusters:

* `known`: the same two clusters, which the cell has read before and which have not changed;
* `changed`: two clusters that have both changed since the cell's last request;
* `in_order`: first reads (no cluster is read twice), in the fleet's order;
* `in_random_order`: first reads of clusters drawn at random; the cell starts without
  documents, and receives them after the answers to earlier calls;
* `lone`: first reads of clusters outside the fleet, whose documents are never sent in advance: each
  call is a round trip, so two calls take at least twice as long as a bare echo.

`asked` is the fraction of the calls that went to the host; `asking_p50` is the median of the
evaluations with such a call.
"""

import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from moorage.bench.measured_sandbox import Figures, MeasuredSandbox, microseconds
from moorage.bench.sandbox_hogs import hogs
from moorage.core.turns.events import Proposed
from moorage.lab.errors import CommandError
from moorage.lab.event_loop import run_until_sigterm
from moorage.records.json_values import JsonMapping, JsonObject
from moorage.sandbox.host.sandbox import Limits

FLEETS: Final = (10, 1_000, 10_000)
"""Numbers of nodes of the fleets, ten nodes per cluster."""
PASSES: Final = 3
"""Number of passes over the fleets, since a disturbance of the machine lasts only seconds."""
BLOCKS: Final = 8
"""Blocks of evaluations per figure; the quietest block counts, since noise only adds time."""
EVALUATIONS: Final = 500
"""Number of evaluations in a block, each with the same call in this process after it."""
STUCK: Final = 15
"""Number of evaluations that never return, one after the other."""
STUCK_SECONDS: Final = 0.1
"""Seconds that each stuck evaluation may run."""
CLUSTERS: Final = 4_000
"""Number of clusters that are read: the number that the host sends to a cell in advance."""
CALLS: Final = ("known", "changed", "in_order", "in_random_order", "lone")
ASKING_MIN: Final = 20
"""Least number of evaluations with a call to the host, for a median over a block."""
FIRST_READS: Final = {"in_order", "in_random_order"}
_ECHO: Final = """
import os, sys
while data := os.read(int(sys.argv[1]), 65536):
    os.write(int(sys.argv[1]), data)
"""
_FRAME_BYTES: Final = 128
"""Approximate bytes of an evaluation and its answer on the channel."""


def sandbox() -> Figures:
    """Measure evaluations in the jail against the same ones in this process."""
    with one_core():
        figures = run_until_sigterm(_latencies())
        figures |= run_until_sigterm(hogs())
    figures |= run_until_sigterm(_two_cores())
    return figures | run_until_sigterm(_measure_stuck())


@contextmanager
def one_core() -> Iterator[None]:
    """Run this process and its new child processes on one core until the block ends."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# What is measured ------------------------------------------------------------------------------


async def _latencies() -> Figures:
    figures: Figures = {"bare_p50_microseconds": microseconds(await _bare())}
    taken: dict[int, list[tuple[float, float]]] = {nodes: [] for nodes in FLEETS}
    for _ in range(PASSES):
        for nodes in FLEETS:
            async with MeasuredSandbox(nodes) as played:
                taken[nodes].append(await _quietest(partial_of(played, JsonObject)))
    extras: dict[int, float] = {}
    for nodes in FLEETS:
        jailed, in_process = min(taken[nodes], key=_extra)
        extras[nodes] = jailed - in_process
        figures |= {
            f"jailed_p50_microseconds_{nodes}_nodes": microseconds(jailed),
            f"in_process_p50_microseconds_{nodes}_nodes": microseconds(in_process),
            f"extra_p50_microseconds_{nodes}_nodes": microseconds(extras[nodes]),
        }
    figures[f"extra_{FLEETS[-1]}_to_{FLEETS[0]}_nodes"] = extras[FLEETS[-1]] / extras[FLEETS[0]]
    for case in CALLS:
        passes = [await _two_calls(case) for _ in range(PASSES)]
        figures |= min(passes, key=lambda each: each[f"two_calls_{case}_add_p50_microseconds"])
    return figures


async def _two_calls(case: str) -> Figures:
    """Measure how much two calls of an injected client add to an evaluation."""
    async with MeasuredSandbox(CLUSTERS, nodes_per_cluster=1) as played:
        extra = _extra(await _quietest(partial_of(played, JsonObject)))
        pairs = _pairs(case, played.clusters)
        if case in {"known", "changed"}:
            await played.ask({"read": pairs[0]})
        blocks = [
            await _calls_block(
                played, pairs[start : start + EVALUATIONS], changed=case == "changed"
            )
            for start in range(0, len(pairs), EVALUATIONS)
        ]
    quietest = min(blocks, key=lambda block: statistics.median(block.added)).added
    asking = min(
        (statistics.median(b.asking) for b in blocks if len(b.asking) >= ASKING_MIN), default=None
    )
    name = f"two_calls_{case}"
    figures = {
        f"{name}_add_p50_microseconds": microseconds(statistics.median(quietest) - extra),
        f"{name}_to_extra": statistics.median(quietest) / extra - 1,
        f"{name}_asked": sum(block.calls for block in blocks) / (2 * EVALUATIONS * len(blocks)),
    }
    if asking is not None and case in FIRST_READS:
        figures[f"{name}_asking_p50_to_extra"] = asking / extra - 1
    return figures


@dataclass(frozen=True, slots=True)
class _Block:
    """The seconds that jailed evaluations take longer than the same ones in this process."""

    added: list[float]
    asking: list[float]
    """The members of `added` whose evaluations had a call that reached the host."""
    calls: int
    """Number of calls that reached the host."""


async def _calls_block(
    played: MeasuredSandbox, pairs: Sequence[Sequence[str]], *, changed: bool
) -> _Block:
    added: list[float] = []
    asking: list[float] = []
    before = played.calls
    for pair in pairs:
        inputs = {"read": pair}
        calls = played.calls
        if changed:
            played.change(pair)
        jailed = await played.ask(inputs)
        added.append(jailed - played.in_process(inputs))
        if played.calls > calls:
            asking.append(added[-1])
    return _Block(added, asking, played.calls - before)


def _pairs(case: str, clusters: Sequence[str]) -> list[Sequence[str]]:
    """Return the two clusters that each evaluation reads."""
    count = len(clusters) // 2
    if case in {"known", "changed"}:
        return [(clusters[0], clusters[-1])] * count
    ids = [f"lone-{each}" for each in clusters] if case == "lone" else list(clusters)
    if case != "in_order":
        random.Random(1).shuffle(ids)  # noqa: S311  # The same order in each run.
    return [ids[2 * number : 2 * number + 2] for number in range(count)]


async def _two_cores() -> Figures:
    """Measure the echo and the jail without binding child processes to this process's core."""
    bare = await _bare()
    async with MeasuredSandbox(FLEETS[0]) as played:
        jailed, in_process = await _quietest(partial_of(played, JsonObject))
    return {
        "any_core_bare_p50_microseconds": microseconds(bare),
        "any_core_extra_p50_microseconds": microseconds(jailed - in_process),
    }


async def _measure_stuck() -> Figures:
    """Measure the time from the deadline of a stuck evaluation to the policy's next answer."""
    # A single policy would be stuck so often that its circuit would open.
    limits = replace(Limits(), evaluation_seconds=STUCK_SECONDS, circuit_overruns=0)
    late: list[float] = []
    async with MeasuredSandbox(FLEETS[0], limits=limits) as played:
        for _ in range(STUCK):
            await played.ask({})
            started = time.perf_counter()
            stuck = played.begin({"stuck": True})
            behind = played.begin({})
            await stuck
            outcome, _ = await behind
            if not isinstance(outcome, Proposed):
                raise CommandError(f"the evaluation after a stuck one failed: {outcome}")
            late.append(time.perf_counter() - started - STUCK_SECONDS)
    return {
        "stuck_to_answer_p50_milliseconds": 1e3 * statistics.median(late),
        "stuck_to_answer_max_milliseconds": 1e3 * max(late),
    }


# How it is measured ----------------------------------------------------------------------------


def partial_of(
    played: MeasuredSandbox, inputs: Callable[[], JsonMapping]
) -> tuple[Callable[[], Awaitable[float]], Callable[[], float]]:
    """Return the jailed call and the same call in this process, each measuring its own time."""
    return (lambda: played.ask(inputs())), (lambda: played.in_process(inputs()))


async def _quietest(
    pair: tuple[Callable[[], Awaitable[float]], Callable[[], float]],
) -> tuple[float, float]:
    """Return the medians of both calls in the block where they differ least, in seconds."""
    jailed, in_process = pair
    blocks: list[tuple[float, float]] = []
    for _ in range(BLOCKS):
        taken = [(await jailed(), in_process()) for _ in range(EVALUATIONS)]
        blocks.append(
            (statistics.median(j for j, _ in taken), statistics.median(p for _, p in taken))
        )
    return min(blocks, key=_extra)


def _extra(medians: tuple[float, float]) -> float:
    jailed, in_process = medians
    return jailed - in_process


async def _bare() -> float:
    """Return the median round trip of an echo in the quietest block, in seconds."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-I", "-S", "-c", _ECHO, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))  # noqa: ASYNC220, S603  # Nothing else runs; ours.
    ours.settimeout(0)
    echo = _Echo()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_unix_connection(lambda: echo, sock=ours)
    blocks: list[float] = []
    for _ in range(BLOCKS):
        taken: list[float] = []
        for _ in range(EVALUATIONS):
            started = time.perf_counter()
            echo.finished = loop.create_future()
            transport.write(bytes(_FRAME_BYTES))
            taken.append(await echo.finished - started)
        blocks.append(statistics.median(taken))
    transport.close()
    process.kill()
    process.wait()
    return min(blocks)


class _Echo(asyncio.Protocol):
    finished: asyncio.Future[float]

    def data_received(self, data: bytes) -> None:
        if len(data) != _FRAME_BYTES:
            raise CommandError("the echo did not return the sent bytes")
        self.finished.set_result(time.perf_counter())

"""Measures what policies that never return cost other policies.

The latency of another policy, the bystander, is measured three times: alone, beside policies that
never return (hogs), and beside the same number of plain processes at idle priority in the same
Linux session (burners). Burners show what Linux itself costs: it first shares a core between
sessions. If another session uses the core too, the burners use up time of the bystander's session,
and the figures with hogs and with burners grow alike.
"""

import asyncio
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from moorage.bench.measured_sandbox import Figures, MeasuredSandbox, microseconds, quantile
from moorage.lab.errors import CommandError

NODES: Final = 10
HOGS: Final = 4
ROUNDS: Final = 3
WATCHED_SECONDS: Final = 2.0
"""Seconds of each measurement of the bystander, alone, beside hogs or beside burners."""
KNOWN_SECONDS_MAX: Final = 30.0
"""Seconds until the circuit breakers of all hogs must be open, after repeated overruns."""
PACE_SECONDS: Final = 0.001
"""Seconds between two evaluations of the bystander."""
_BURNER: Final = """
import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print(flush=True)
while True:
    pass
"""


async def hogs() -> Figures:
    """Measure a bystander's evaluations alone, and beside tenants that use all processor time."""
    taken: dict[str, list[float]] = {"alone": [], "burners": [], "hogs": []}
    async with MeasuredSandbox(NODES) as played:
        async with _hogs(played):
            await _await_open_circuits(played)
        for _ in range(ROUNDS):
            taken["alone"].append(await _bystander(played))
            await _beside(_burners, played, taken["burners"])
            await _beside(_hogs, played, taken["hogs"])
    alone, burners, beside = (min(taken[name]) for name in taken)
    return {
        "bystander_p99_microseconds": microseconds(alone),
        "bystander_with_idle_burners_p99_microseconds": microseconds(burners),
        "bystander_with_hogs_p99_microseconds": microseconds(beside),
        "with_idle_burners_to_alone_p99": burners / alone,
        "with_hogs_to_alone_p99": beside / alone,
    }


async def _await_open_circuits(played: MeasuredSandbox) -> None:
    """Wait until the circuit breakers of all hogs are open."""
    end = time.perf_counter() + KNOWN_SECONDS_MAX
    while played.report().circuits_open < HOGS:
        if time.perf_counter() > end:
            raise CommandError(f"not all circuit breakers were open within {KNOWN_SECONDS_MAX:g} s")
        await asyncio.sleep(PACE_SECONDS)  # The sandbox sends no event for a circuit.


async def _beside(
    who: Callable[[MeasuredSandbox], AbstractAsyncContextManager[None]],
    played: MeasuredSandbox,
    taken: list[float],
) -> None:
    async with who(played):
        taken.append(await _bystander(played))


async def _bystander(played: MeasuredSandbox) -> float:
    """Return the p99 of the bystander's evaluations over a period, in seconds."""
    taken: list[float] = []
    end = time.perf_counter() + WATCHED_SECONDS
    while time.perf_counter() < end:
        taken.append(await played.ask({}))
        await asyncio.sleep(PACE_SECONDS)
    return quantile(taken, 0.99)


@asynccontextmanager
async def _hogs(played: MeasuredSandbox) -> AsyncIterator[None]:
    stop = asyncio.Event()
    running = [asyncio.ensure_future(_hog(played, number, stop)) for number in range(HOGS)]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*running)


async def _hog(played: MeasuredSandbox, number: int, stop: asyncio.Event) -> None:
    while not stop.is_set():
        await played.begin({"stuck": True}, f"hog-{number}")
        await asyncio.sleep(PACE_SECONDS)


@asynccontextmanager
async def _burners(_: MeasuredSandbox) -> AsyncIterator[None]:
    command = [sys.executable, "-I", "-S", "-c", _BURNER]
    burning = [await asyncio.create_subprocess_exec(*command, stdout=PIPE) for _ in range(HOGS)]
    try:
        for process in burning:
            assert process.stdout is not None  # Standard output is a pipe.
            await process.stdout.readline()
        yield
    finally:
        for process in burning:
            process.kill()
            await process.wait()

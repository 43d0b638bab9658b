"""`engines`: the time that a warm resource saves, and a check that nothing is left behind.

The resource engine runs as a library on this machine. It acquires a process with a reset command
and, if a container engine answers, a container, which each release restarts. Each is acquired warm
and cold, and both are timed. `benchmarks.warm_costs` measures the same through a daemon.
"""

import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.processes import marked_processes
from benchmarks.warm_costs import warm_leases
from moorage.backends.base import BackendError
from moorage.backends.local.backend import LocalBackend
from moorage.backends.specs import BaseResourceSpec, ContainerResourceSpec, ProcessResourceSpec
from moorage.lab.errors import CommandError
from moorage.resources.resource_engine import ResourceEngine
from moorage.resources.runners import LocalRunner

CYCLES: Final = 1_000
"""How many times a warm process is acquired and released."""
CONTAINER_CYCLES: Final = 200
STARTS: Final = 10
"""Number of resources whose starts are timed, one after the other."""
IMAGE: Final = "docker.io/library/busybox:stable"
"""Image of the container, which is pulled if it is missing."""

Figures = dict[str, Any]


def engines() -> Figures:
    """Measure warm acquires of a process, a container and a lease, compared with cold ones.

    Raises:
        CommandError: A process, a file descriptor or a slot was left behind.
    """
    command = ["sleep", "100000"]
    process = ProcessResourceSpec(command=command, cpu_count=1, reset_command=["true"])
    figures = {f"process_{name}": each for name, each in cycles(process, CYCLES).items()}
    container = ContainerResourceSpec(image=IMAGE, command=command, stop_seconds=0)
    try:
        costs = cycles(container, CONTAINER_CYCLES)
    except BackendError as error:
        figures["container"] = f"not measured: {error}"
    else:
        figures |= {f"container_{name}": each for name, each in costs.items()}
    return figures | {f"daemon_{name}": each for name, each in warm_leases().items()}


def cycles(spec: BaseResourceSpec, times: int, starts: int = STARTS) -> Figures:
    """Acquire `starts` cold resources; then acquire and release one warm resource `times` times.

    Returns:
        Median seconds of a cold acquire, a warm acquire, and a warm one with its release; their
        ratio; and the leftovers, which are none.

    Raises:
        BackendError: The resource cannot be started here.
        CommandError: A process, a file descriptor or a slot was left behind.
    """
    with tempfile.TemporaryDirectory(prefix="moorage-") as folder:
        open_before = _open_files()
        cold, warm, both = asyncio.run(_play(spec, times, starts, Path(folder)))
        processes = [pid for pid, _ in marked_processes(folder)]
        left = {"processes": len(processes), "descriptors": _open_files() - open_before}
    if any(left.values()):
        raise CommandError(f"after {times} cycles there are leftovers: {left}")
    return {
        "cycles": times,
        "cold_seconds": cold,
        "warm_seconds": warm,
        "warm_with_release_seconds": both,
        "cold_to_warm": cold / warm,
        "left_behind": sum(left.values()),
    }


async def _play(
    spec: BaseResourceSpec, times: int, starts: int, folder: Path
) -> tuple[float, float, float]:
    local = LocalBackend(folder, outlive=False)
    engine = ResourceEngine({"local": LocalRunner(local)})
    try:
        cold = []
        for number in range(starts):
            started = time.perf_counter()
            await engine.acquire(f"cold-{number}", spec)
            cold.append(time.perf_counter() - started)
            await engine.end(f"cold-{number}")
        warm, both = [], []
        await engine.start(spec)
        for number in range(times):
            started = time.perf_counter()
            await engine.acquire(f"warm-{number}", spec)
            warm.append(time.perf_counter() - started)
            await engine.release(f"warm-{number}")
            both.append(time.perf_counter() - started)
        ((_, counts),) = (await engine.monitor()).items()
        if counts != {"total": 1, "free": 1, "acquired": 0}:
            raise CommandError(
                f"after {times} cycles, the one resource should be free, but it is not: {counts}"
            )
        await engine.close()
        if isinstance(spec, ProcessResourceSpec):
            # Every slot of this machine's processors must be free again.
            everything = replace(spec, cpu_count=float(len(os.sched_getaffinity(0))))
            await engine.acquire("everything", everything)
    finally:
        await engine.close()
        found = await local.discover()
        await local.close()
    if found:
        ids = [each.id for each in found]
        raise CommandError(f"after {times} cycles, these resources still run: {ids}")
    return statistics.median(cold), statistics.median(warm), statistics.median(both)


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))

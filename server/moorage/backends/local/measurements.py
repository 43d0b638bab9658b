"""Measures this machine for a metrics document, and finds GPUs that foreign processes use.

An agent sends the metrics and these GPUs to its server. The fields are those of
docs/reference/allocation-server.md, "Metrics documents"; sizes are MiB.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from moorage.backends.local.gpus import instances, nvml_here

_MIB: Final = 1 << 20
_SHOWN_MAX: Final = 3
"""Maximum foreign processes on one GPU that a message names."""
Groups = dict[str, dict[str, float]]


class Measurement(NamedTuple):
    """The metrics of this machine.

    Args:
        groups: Metrics by group: `memory`, `vcpu`, `storage`, and with GPUs `gpu`.
        gpus: Metrics of each GPU, with its index as `gpu_id`.
        busy: The reason why a GPU or MIG instance cannot be used now, by UUID.
    """

    groups: Groups
    gpus: list[dict[str, float]]
    busy: dict[str, str]


def measure(folder: Path, held: Collection[str]) -> Measurement:
    """Measure this machine. Blocks.

    Args:
        folder: A folder on the disk to measure.
        held: UUIDs, in lower case, of devices of this backend's workloads, whose processes are not
            foreign.
    """
    groups = {"memory": _memory(), "vcpu": _load(), "storage": _disk(folder)}
    nvml = nvml_here()
    if nvml is None:
        return Measurement(groups, [], {})
    try:
        rows, busy = _gpus(nvml, held)
    finally:
        nvml.nvmlShutdown()
    return Measurement(groups | ({"gpu": _totals(rows)} if rows else {}), rows, busy)


def _memory() -> dict[str, float]:
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    found = {name: int(kib) / 1024 for name, kib in re.findall(r"(\w+): +(\d+) kB", text)}
    total, free = found["MemTotal"], found["MemAvailable"]
    return {
        "freeMem": free,
        "usedMem": total - free,
        "averageUtil": round(100 * (total - free) / total, 2),
        "usedSwap": found["SwapTotal"] - found["SwapFree"],
        "freeSwap": found["SwapFree"],
    }


def _load() -> dict[str, float]:
    loads = os.getloadavg()
    running = Path("/proc/loadavg").read_text(encoding="ascii").split()[3]
    threads, all_threads = running.split("/")
    named = dict(zip(("load1m", "load5m", "load15m"), loads, strict=True))
    return {**named, "runningThreads": int(threads), "totalThreads": int(all_threads)}


def _disk(folder: Path) -> dict[str, float]:
    usage = shutil.disk_usage(folder)
    return {"freeMem": usage.free // _MIB, "usedMem": usage.used // _MIB}


def _gpus(nvml: ModuleType, held: Collection[str]) -> tuple[list[dict[str, float]], dict[str, str]]:
    rows: list[dict[str, float]] = []
    busy: dict[str, str] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):  # A GPU that fell off the bus has no UUID for `busy`.
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            rows.append({"gpu_id": index, **_gpu(nvml, handle)})
            parts = [instance for _, _, instance in instances(nvml, handle)]
            for each in parts or [handle]:
                uuid = str(nvml.nvmlDeviceGetUUID(each))
                users = list(nvml.nvmlDeviceGetComputeRunningProcesses(each))
                if users and uuid.lower() not in held:
                    busy[uuid] = _describe(users)
    return rows, busy


def _gpu(nvml: ModuleType, handle: object) -> dict[str, float]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    row: dict[str, float] = {
        "usedMem": memory.used // _MIB,
        "freeMem": memory.free // _MIB,
        "totalMem": memory.total // _MIB,
        "memUtilization": round(100 * memory.used / memory.total, 2) if memory.total else 0,
    }
    looks: dict[str, Callable[[], float]] = {
        "cudaUtilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "powerUtilization": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    }
    for name, look in looks.items():
        with suppress(nvml.NVMLError):  # Not available on divided GPUs.
            row[name] = float(look())
    return row


def _describe(users: list[Any]) -> str:
    named = []
    for each in users[:_SHOWN_MAX]:
        name = "a program"
        with suppress(OSError):  # It has ended, or is in another container.
            name = Path(f"/proc/{each.pid}/comm").read_text(errors="replace").strip()
        size = f", {each.usedGpuMemory // _MIB} MiB" if each.usedGpuMemory else ""
        named.append(f"{name} (process {each.pid}{size})")
    more = f" and {len(users) - _SHOWN_MAX} more" if len(users) > _SHOWN_MAX else ""
    return f"in use by {', '.join(named)}{more}, which no lease started"


def _totals(rows: list[dict[str, float]]) -> dict[str, float]:
    def total(name: str) -> float:
        return sum(row.get(name, 0) for row in rows)

    averages = {
        f"avg{name[0].upper()}{name[1:]}": round(total(name) / len(rows), 2)
        for name in ("memUtilization", "cudaUtilization", "powerUtilization", "temperature")
    }
    sizes = {"totalUsedMem": "usedMem", "totalFreeMem": "freeMem", "totalMem": "totalMem"}
    return {"count": len(rows), **{name: total(each) for name, each in sizes.items()}, **averages}

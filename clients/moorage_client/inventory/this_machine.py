"""Reads this machine as a cluster of one node: CPUs, memory, and NVIDIA GPUs.

In a container, sizes are those of the container (`control_groups`). GPUs are read through NVML
(`pip install 'moorage[nvml]'`); MIG instances are devices of their own, and NVLink joins devices
into groups.
"""

import os
import platform
import re
from pathlib import Path
from typing import Final

from moorage_client.inventory.control_groups import cpu_limit, memory_limit
from moorage_client.inventory.documents import (
    MIB,
    Inventory,
    cluster_document,
    machine_key,
    node_document,
)
from moorage_client.inventory.nvml import devices_here

_MEMINFO: Final = Path("/proc/meminfo")
_MACHINE_ID: Final = Path("/etc/machine-id")


def machine_inventory(source: str, cluster_id: str) -> Inventory:
    """Return this machine as a cluster document.

    Args:
        source: The source's name in errors and notes.
        cluster_id: Id of the cluster; empty: this machine's name.

    Raises:
        InventoryError: This machine has NVIDIA GPUs, but they cannot be read.
    """
    host = platform.node() or "localhost"
    devices, driver, note = devices_here(source)
    system = platform.system().lower()
    labels = {"kubernetes.io/arch": platform.machine(), "kubernetes.io/os": system}
    node = node_document(
        host,
        cpu_milli=cpu_milli(),
        memory_mib=memory_mib(),
        devices=devices,
        swap_mib=_meminfo("SwapTotal") // MIB,
        labels=labels | ({"nvidia.com/driver": driver} if driver else {}),
        machine_id=machine_key(_first_line(_MACHINE_ID)),
    )
    found = cluster_document(
        cluster_id or host, [node], tag="machine", description="A single machine"
    )
    return Inventory((found,), (note,) if note else ())


def cpu_milli() -> int:
    """Return the CPU that this process may use, in thousandths of a core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    milli = (cores or 1) * 1000
    limit = cpu_limit()
    return milli if limit is None else min(milli, limit.amount)


def memory_mib() -> int:
    """Return the memory that this process may use, in MiB."""
    total = _meminfo("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    return (total if limit is None else min(total, limit.amount)) // MIB


def _meminfo(name: str) -> int:
    """Return a value of /proc/meminfo in bytes; 0 if the file has no such line."""
    try:
        text = _MEMINFO.read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return ""

"""Reads figures of this machine's processes from Linux."""

import os
from collections.abc import Iterator
from pathlib import Path

from moorage.backends.local.marks import environments


def read_schedule(pid: int) -> tuple[float, float]:
    """Return the seconds that a process's main thread ran, and that it waited for a core."""
    ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9


def memory_mib(pid: int) -> float:
    """Return the resident memory of a process, in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024 / 1024


def marked_processes(mark: str) -> Iterator[tuple[int, list[bytes]]]:
    """Yield pid and environment of each process whose environment contains a text."""
    return ((pid, own) for pid, own in environments() if any(mark.encode() in each for each in own))

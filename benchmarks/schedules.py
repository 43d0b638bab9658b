"""Reads from Linux how a process was scheduled."""

from pathlib import Path


def read_schedule(pid: int) -> tuple[float, float]:
    """Return for how many seconds the main thread of a process ran, and waited for a core."""
    ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9

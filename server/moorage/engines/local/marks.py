"""Processes of this machine that are found by a variable in their environment, and killed.

A variable is inherited: what hides in a session of its own, or outlives its parent, has it too.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path


def all_pids() -> Iterator[int]:
    """Yield the pids of all processes."""
    return (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())


def kill_marked(mark: str) -> None:
    """Kill every process of this user that has a variable of this value.

    Args:
        mark: `NAME=value`.

    """
    wanted = mark.encode()
    for pid in all_pids():
        with contextlib.suppress(OSError):  # It has ended, or is somebody else's.
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)

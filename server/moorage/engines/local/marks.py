"""Processes of this machine that are found by a variable in their environment, and killed.

A variable is inherited: what hides in a session of its own, or outlives its parent, has it too.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from moorage.engines.base import EngineError

KILL_SECONDS_MAX: Final = 10.0
LOOK_SECONDS: Final = 0.01
WORKLOAD: Final = "MOORAGE_WORKLOAD"
"""Of all that belongs to a workload."""
EXECUTION: Final = "MOORAGE_EXECUTION"
"""Of all that one command, run beside or inside of a workload, has started."""


def all_pids() -> Iterator[int]:
    """Yield the pids of all processes."""
    return (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())


def kill_marked(mark: str, *also: str) -> None:
    """Kill every process of this user that has a variable of this value; return when none is left.

    Args:
        mark: `NAME=value`.
        also: Names of variables that it must have beside that.

    Raises:
        EngineError: Some are still there after `KILL_SECONDS_MAX`: the kernel has them.

    """

    def kill() -> str:
        pids = list(_marked(mark.encode(), [f"{name}=".encode() for name in also]))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return ", ".join(map(str, pids))

    until_gone(kill)


def until_gone(kill: Callable[[], str]) -> None:
    """Kill until nothing is left.

    Args:
        kill: Kills what there is and returns what that was; empty: nothing.

    Raises:
        EngineError: Something is still there after `KILL_SECONDS_MAX`: the kernel has it.

    """
    deadline = time.monotonic() + KILL_SECONDS_MAX
    while left := kill():
        if time.monotonic() > deadline:
            raise EngineError(f"killed {KILL_SECONDS_MAX:g} s ago and still there: {left}")
        time.sleep(LOOK_SECONDS)  # They are nobody's children here, so nobody is told.


def _marked(mark: bytes, also: Sequence[bytes]) -> Iterator[int]:
    for pid in all_pids():
        with contextlib.suppress(OSError):  # It has ended, or is somebody else's.
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            named = all(any(each.startswith(name) for each in variables) for name in also)
            if mark in variables and named:
                yield pid

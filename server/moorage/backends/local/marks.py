"""Finds and kills processes of this machine by a marker variable in their environment.

Child processes inherit the variable, even in a session of their own or after their parent's end.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

from moorage.backends.base import BackendError

KILL_SECONDS_MAX: Final = 10.0
LOOK_SECONDS: Final = 0.01
WORKLOAD: Final = "MOORAGE_WORKLOAD"
"""The variable that marks all processes of a workload."""
SUPERVISOR: Final = "MOORAGE_SUPERVISOR"
"""The variable that marks the supervisor of a workload, and none of its child processes."""
EXECUTION: Final = "MOORAGE_EXECUTION"
"""The variable that marks all processes of one command that runs beside or in a workload."""


def all_pids() -> Iterator[int]:
    """Yield the pids of all processes."""
    return (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())


def kill_by_mark(mark: str, *also: str) -> None:
    """Kill this user's processes with a marker variable; return when none is left.

    Args:
        mark: The variable, as `NAME=value`.
        also: Names of further variables that a process must have.

    Raises:
        BackendError: Processes are still alive after `KILL_SECONDS_MAX`, blocked in the kernel.
    """
    wanted = [f"{name}=".encode() for name in also]

    def kill() -> str:
        found = [
            pid
            for pid, variables in environments()
            if mark.encode() in variables
            and all(any(each.startswith(name) for each in variables) for name in wanted)
        ]
        return _kill(found)

    kill_until_none(kill)


def kill_workload(value: str) -> None:
    """Kill all processes of a workload: those with its marker, and its supervisor's descendants.

    A supervisor is killed last: only through it can its orphaned descendants be found.

    Raises:
        BackendError: Processes are still alive after `KILL_SECONDS_MAX`, blocked in the kernel.
    """
    mark, above = f"{WORKLOAD}={value}".encode(), f"{SUPERVISOR}={value}".encode()

    def kill() -> str:
        found, supervisors = set[int](), set[int]()
        for pid, variables in environments():
            if mark in variables:
                found.add(pid)
            elif above in variables:
                supervisors.add(pid)
        found.update(below(supervisors))
        return _kill(found or supervisors)

    kill_until_none(kill)


def below(pids: Collection[int]) -> list[int]:
    """Return the pids of all running descendants of these processes."""
    children: dict[int, list[int]] = {}
    for each in all_pids() if pids else ():
        with contextlib.suppress(OSError):
            state, parent = _stat(each)
            if state != "Z":
                children.setdefault(parent, []).append(each)
    found: list[int] = []
    todo = list(pids)
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def marks_below(root: str) -> set[str]:
    """Return the values of all workload and supervisor markers that begin with `root`."""
    starts = tuple(f"{name}={root}".encode() for name in (WORKLOAD, SUPERVISOR))
    return {
        os.fsdecode(each.partition(b"=")[2])
        for _, variables in environments()
        for each in variables
        if each.startswith(starts)
    }


def kill_until_none(kill: Callable[[], str]) -> None:
    """Repeat `kill` until it finds no process.

    Args:
        kill: Kills all processes that it finds, and returns a text that lists them; or "".

    Raises:
        BackendError: Processes are still alive after `KILL_SECONDS_MAX`, blocked in the kernel.
    """
    deadline = time.monotonic() + KILL_SECONDS_MAX
    while left := kill():
        if time.monotonic() > deadline:
            raise BackendError(f"processes still run {KILL_SECONDS_MAX:g} s after SIGKILL: {left}")
        time.sleep(LOOK_SECONDS)  # Polls: only a child's end sends a signal.


def _kill(pids: Collection[int]) -> str:
    """Kill processes; return those that this user was allowed to kill."""
    killed = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return ", ".join(map(str, killed))


def environments() -> Iterator[tuple[int, list[bytes]]]:
    """Yield pid and environment of each process that this user may inspect."""
    for pid in all_pids():
        with contextlib.suppress(OSError):  # The process has ended, or belongs to another user.
            yield pid, Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def _stat(pid: int) -> tuple[str, int]:
    """Return a process's state and its parent."""
    state, parent = (
        Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
    )
    return state, int(parent)

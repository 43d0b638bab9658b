"""Sets the share of the processor that a cell gets, for `channel` and `processes`."""

import contextlib
import os
from typing import Final

ASIDE_NICENESS: Final = 10
"""Niceness of cells for background work: a tenth of the weight of other cells."""


def demote(pid: int) -> bool:
    """Let a process run only when no other process wants to; return whether that worked."""
    try:
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        try:
            os.setpriority(os.PRIO_PROCESS, pid, 19)
        except OSError:
            return False
    return True


def restore(pid: int, niceness: int) -> bool:
    """Undo a demotion; return whether that worked: only privileged hosts may do it."""
    try:
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
    except OSError:
        return False
    return True


def step_aside(pid: int) -> None:
    """Give a process a tenth of the time that others get on a busy core."""
    with contextlib.suppress(OSError):  # The process may have ended already.
        os.setpriority(os.PRIO_PROCESS, pid, ASIDE_NICENESS)

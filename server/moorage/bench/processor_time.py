"""Measures the processor time of a program and its child processes, from Linux's counters.

Processor time varies less than rates on a machine that other users share. `bench` reads it
before and after a load.
"""

import contextlib
from pathlib import Path
from typing import NamedTuple

_PROCESSES = Path("/proc")


class ProcessorTime(NamedTuple):
    """Seconds that processors have worked for a program.

    Args:
        own: Seconds of the program's own process.
        others: Seconds of its child processes and their descendants, if they still run.
    """

    own: float
    others: float

    def since(self, before: "ProcessorTime") -> "ProcessorTime":
        """Return the difference from an earlier reading."""
        return ProcessorTime(self.own - before.own, self.others - before.others)


def processor_time_of(pid: int) -> ProcessorTime:
    """Return the processor time of a running program; zeros if there is no `/proc`."""
    others = [_seconds(each) for each in _under(pid)]
    return ProcessorTime(_seconds(pid), sum(others))


def _seconds(pid: int) -> float:
    """Return the seconds of the running threads, from `schedstat`: `stat` counts 10 ms steps."""
    nanoseconds = 0
    for schedule in (_PROCESSES / f"{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # The thread has ended meanwhile.
            nanoseconds += int(schedule.read_text().split()[0])
    return nanoseconds / 1e9


def _under(pid: int) -> list[int]:
    """Return all child processes of a process, and their descendants."""
    found: list[int] = []
    for children in (_PROCESSES / f"{pid}/task").glob("*/children"):
        try:
            started = [int(each) for each in children.read_text().split()]
        except OSError:  # A thread that has ended.
            continue
        found += started
        for each in started:
            found += _under(each)
    return found

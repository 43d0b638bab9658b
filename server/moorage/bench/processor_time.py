"""Processor time of a program and of the processes that it started, as Linux counts it.

Steadier than rates on a machine that others use, too. `bench` takes it around a load.
"""

import os
from pathlib import Path
from typing import NamedTuple

_PROCESSES = Path("/proc")


class ProcessorTime(NamedTuple):
    """Seconds that processors worked for a program so far.

    Args:
        own: For its own process.
        others: For the processes under it that live.

    """

    own: float
    others: float

    def since(self, before: "ProcessorTime") -> "ProcessorTime":
        """Return what was added since."""
        return ProcessorTime(self.own - before.own, self.others - before.others)


def spent(pid: int) -> ProcessorTime:
    """Return the processor time of a running program; nothing where there is no `/proc`."""
    others = [_seconds(each) for each in _under(pid)]
    return ProcessorTime(_seconds(pid), sum(others))


def _seconds(pid: int) -> float:
    try:
        fields = (_PROCESSES / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # It has ended, or this is no Linux.
        return 0.0
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def _under(pid: int) -> list[int]:
    """Return the processes that a process started, and those that these did."""
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

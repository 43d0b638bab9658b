"""The process of a cell, on this machine or on a worker, for `channel`."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from typing import Protocol

from moorage.sandbox.host import priority
from moorage.sandbox.wire.orders import WHERE_SIGNAL


class CellProcess(Protocol):
    """A new process, and the channel to it."""

    pid: int
    worker: str
    """The worker that the process runs on; empty: this machine."""

    @property
    def in_touch(self) -> bool:
        """Whether the last message has reached the process's machine."""

    async def join(self, cell: asyncio.Protocol) -> None:
        """Connect the channel to the object that handles it."""

    def kill(self) -> None:
        """Kill the process and release its descriptors."""

    def ask_where(self) -> None:
        """Make the cell write to the channel, as text, which line of its policy it executes."""

    def cpu_seconds(self) -> float:
        """Return the CPU time that the process has used on this machine."""

    def demote(self) -> bool:
        """Let the process run only when no other wants to run; return whether that worked."""

    def restore(self, niceness: int) -> bool:
        """Undo a demotion; return whether that worked."""

    def step_aside(self) -> None:
        """Give the process a tenth of the time that others get on a busy core."""


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that another process has used; 0 if it is gone."""
    try:
        # The kernel's name for "CPU clock of that process" (see clock_getcpuclockid(3)).
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


class LocalProcess:
    """The process of a cell on this machine.

    Args:
        channel: The host's end of the cell's channel.
        pidfd: The descriptor of the process; this class closes it.
    """

    worker = ""
    in_touch = True

    def __init__(self, channel: socket.socket, pidfd: int, pid: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._channel: socket.socket | None = channel

    async def join(self, cell: asyncio.Protocol) -> None:
        channel, self._channel = self._channel, None
        assert channel is not None  # `join` is called once.
        channel.settimeout(0)
        await asyncio.get_running_loop().create_unix_connection(lambda: cell, sock=channel)

    def kill(self) -> None:
        """Kill by pidfd, since another process may already have the process id."""
        with contextlib.suppress(ProcessLookupError):  # The process is dead already.
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
        if self._channel is not None:
            self._channel.close()

    def ask_where(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # It has just died: there is no traceback.
            signal.pidfd_send_signal(self._pidfd, WHERE_SIGNAL)

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)

    def demote(self) -> bool:
        return priority.demote(self.pid)

    def restore(self, niceness: int) -> bool:
        """Undo a demotion; return whether that worked: only privileged hosts may do it."""
        return priority.restore(self.pid, niceness)

    def step_aside(self) -> None:
        priority.step_aside(self.pid)

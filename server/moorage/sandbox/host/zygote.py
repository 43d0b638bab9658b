"""The host's end of the zygote: starts it, orders cells, and gets reports of their ends.

`pool` uses this module. The zygote is exec'd, not forked, with an empty environment, so it shares
nothing with the server but one SEQPACKET socket.
"""

import asyncio
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

import moorage
from moorage.sandbox.host.contract import JailError, Mode
from moorage.sandbox.host.processes import LocalProcess
from moorage.sandbox.wire.limits import Limits
from moorage.sandbox.wire.orders import ORDER, REPORT

START_SECONDS_MAX: Final = 30.0
"""Longest start of a zygote, in seconds: numpy alone takes 0.1 s, a cold disk much longer."""
SPAWN_SECONDS_MAX: Final = 10.0
"""Longest time from a spawn order to its report."""
STOP_SECONDS_MAX: Final = 2.0
"""Longest time from closing the socket to the zygote's end; then it is killed."""

_ENVIRONMENT: Final = {
    # numpy must start no threads: the zygote forks, and a cell may have none.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "LC_CTYPE": "C.UTF-8",
}
ISOLATED: Final = ("-P", "-s", "-S")
"""Options of Python with the effect of `-I`, which also ignores environment variables; that is not
needed, since the zygote gets only `_ENVIRONMENT`."""
_PROGRAM: Final = (
    "import gc, json, sys; gc.disable(); sys.path[:0] = json.loads(sys.argv[1])['path']; "
    "from moorage.sandbox.cell import zygote; zygote.main()"
)


@dataclass(frozen=True, slots=True)
class Death:
    """How a cell ended.

    Args:
        cause: The cause of death, as a text.
        innocent: Whether something else than the policy caused the death.
        held_mib: The most memory that the cell held, beyond the memory that it started with.
    """

    cause: str
    innocent: bool = False
    held_mib: int = 0


ORPHANED: Final = Death("its parent process, the zygote, died", innocent=True)
WORKER_LOST: Final = Death("its machine was lost", innocent=True)
UNKNOWN: Final = Death("it ended", innocent=True)
"""The death of a cell for an unknown cause, so no request can be blamed."""
_FROM_OUTSIDE: Final = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
)
"""Signals that no cell can have sent, even to itself: the filter allows no signals."""
_SPENT_MS_PER_SECOND: Final = 800
"""A killed cell counts as out of CPU time if it used these milliseconds for each second of its
limit. They are less than 1000, since the kernel counts the limit in ticks."""


class SpawnError(Exception):
    """A cell could not be forked."""


class Zygote:
    """One running zygote.

    Args:
        limits: Memory and CPU of the cells.
        mode: `unsafe` omits the jail.
        ended: Called with the process id of every ended cell, and its death.
        lost: Called when the zygote died without being closed; all its cells die with it.
    """

    def __init__(
        self,
        limits: Limits,
        mode: Mode,
        ended: Callable[[int, Death], None],
        lost: Callable[[], None],
    ) -> None:
        self._limits = limits
        self._mode = mode
        self._ended = ended
        self._lost = lost
        self._orders: dict[int, asyncio.Future[LocalProcess]] = {}
        self._number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Start the process from the calling thread, and wait until it accepts orders.

        The zygote dies with the thread that started it: this must be the thread that runs the
        loop for as long as the server lives.

        Raises:
            JailError: The zygote did not start.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(0)
        settings = {
            "path": [str(Path(moorage.__file__).parents[1]), *_site_packages()],
            "control": theirs.fileno(),
            "host": os.getpid(),
            "unsafe": self._mode == "unsafe",
            "memory_mib": self._limits.memory_mib,
            "cpu_seconds": self._limits.cpu_seconds_per_cell_max,
        }
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220, S603  # Forks in this thread, see above; our own program.
                [sys.executable, *ISOLATED, "-c", _PROGRAM, json.dumps(settings)],
                env=_ENVIRONMENT | self._hashing(),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # The zygote gets no session of its own: Linux first divides the processor among
                # sessions (autogroups, sched(7)), so a low priority only counts within a session.
                process_group=0,
                cwd="/",
            )
        self._control = ours
        self._ready = loop.create_future()
        loop.add_reader(ours.fileno(), self._readable)
        try:
            await asyncio.wait_for(self._ready, START_SECONDS_MAX)
        except (TimeoutError, SpawnError) as error:
            await self.close()
            raise JailError(
                "zygote",
                "the process that cells are forked from did not start "
                f"({type(error).__name__}: {error}); its own message is on stderr",
            ) from error

    def _hashing(self) -> dict[str, str]:
        seed = self._limits.hash_seed
        return {} if seed is None else {"PYTHONHASHSEED": str(seed)}

    async def spawn(self) -> LocalProcess:
        """Order one cell from the zygote.

        Raises:
            SpawnError: The zygote could not fork, is gone or did not answer.
        """
        if self._control is None:
            raise SpawnError("the zygote is not running")
        self._number += 1
        number = self._number
        future: asyncio.Future[LocalProcess] = asyncio.get_running_loop().create_future()
        self._orders[number] = future
        try:
            self._control.send(ORDER.pack(number))
            return await asyncio.wait_for(asyncio.shield(future), SPAWN_SECONDS_MAX)
        except (OSError, TimeoutError, asyncio.CancelledError) as error:
            if future.done() and future.exception() is None:
                future.result().kill()  # The process arrived while the order was given up.
            if isinstance(error, asyncio.CancelledError):
                raise
            raise SpawnError(f"the zygote did not answer a spawn order: {error}") from error
        finally:
            self._orders.pop(number, None)

    def ended(self) -> bool:
        """Return whether the zygote accepts no more orders."""
        self._readable()
        return self._control is None

    async def close(self) -> None:
        """End the zygote and all cells, within a limited time."""
        self._detach(SpawnError("the sandbox is closing"))
        process, self._process = self._process, None
        if process is None:
            return
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        pidfd = os.pidfd_open(process.pid)
        loop.add_reader(pidfd, ended.set)
        try:
            await asyncio.wait_for(ended.wait(), STOP_SECONDS_MAX)
        except TimeoutError:
            process.send_signal(signal.SIGKILL)
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            process.wait()

    def _detach(self, error: SpawnError) -> None:
        control, self._control = self._control, None
        if control is not None:
            asyncio.get_running_loop().remove_reader(control.fileno())
            control.close()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        for future in self._orders.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # The caller may have given up.
        self._orders.clear()

    def _readable(self) -> None:
        while self._control is not None:
            try:
                data, fds, _, _ = socket.recv_fds(
                    self._control, REPORT.size, 2, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if len(data) != REPORT.size:
                self._detach(SpawnError("the zygote ended"))
                self._lost()
                return
            self._report(data, fds)

    def _report(self, data: bytes, fds: list[int]) -> None:
        kind, order, pid, status, held_kib, cpu_ms = REPORT.unpack(data)
        future = self._orders.get(order)
        if kind == b"Z" and self._ready is not None and not self._ready.done():
            self._ready.set_result(None)
        elif kind == b"R":
            spawned = LocalProcess(socket.socket(fileno=fds[0]), fds[1], pid)
            if future is None or future.done():
                spawned.kill()
            else:
                future.set_result(spawned)
        elif kind == b"E" and future is not None and not future.done():
            future.set_exception(SpawnError(f"fork failed: {os.strerror(pid)}"))
        elif kind == b"X":
            spent = cpu_ms >= self._limits.cpu_seconds_per_cell_max * _SPENT_MS_PER_SECOND
            self._ended(pid, death_of(status, held_kib >> 10, spent=spent))


def death_of(status: int, held_mib: int, *, spent: bool) -> Death:
    """Return the cause of death behind a wait status.

    Args:
        status: The wait status that the zygote collected.
        held_mib: The most memory that the cell held; see `Death`.
        spent: Whether the cell had used up its CPU time, at which the kernel kills it.
    """
    if not os.WIFSIGNALED(status):
        return Death(f"it exited with status {os.WEXITSTATUS(status)}", held_mib=held_mib)
    number = os.WTERMSIG(status)
    if number == signal.SIGSYS:
        return Death("SIGSYS: it made a system call that no policy needs")
    names = {int(member): member.name for member in signal.Signals}
    cause = f"killed by {names.get(number, f'signal {number}')}"
    if number == signal.SIGKILL and spent:
        return Death(f"{cause}: it had used up its CPU time")
    return Death(cause, number in _FROM_OUTSIDE, held_mib)


def _site_packages() -> list[str]:
    """Return the folders of this server's own numpy and msgspec."""
    found = [str(Path(inspect.getfile(module)).parents[1]) for module in (np, msgspec)]
    return list(dict.fromkeys(found))

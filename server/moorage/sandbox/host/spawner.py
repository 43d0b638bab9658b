"""Makes cells ahead of need with a zygote, and reports how cells end.

`pool` uses this module. A cell leaves here jailed and empty; this module does not know its later
use.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final, Protocol

from moorage.sandbox.cell import self_test
from moorage.sandbox.host.channel import Cell
from moorage.sandbox.host.contract import JailError, Mode
from moorage.sandbox.host.processes import CellProcess
from moorage.sandbox.host.zygote import (
    ORPHANED,
    START_SECONDS_MAX,
    UNKNOWN,
    Death,
    SpawnError,
    Zygote,
)
from moorage.sandbox.wire import frames
from moorage.sandbox.wire.limits import Limits

END_REPORT_SECONDS_MAX: Final = 2.0
"""Seconds that failed work waits for the zygote's report of why its cell died; on a machine without
free memory, the report is late."""
PAUSE_SECONDS_MIN: Final = 0.1
"""Pause before a second zygote in a row; it doubles before each further zygote, since a zygote that
cannot run costs a core half a second each time."""
PAUSE_SECONDS_MAX: Final = 5.0
PATIENCE_SECONDS: Final = 1.0
"""If the pause before a new zygote has more seconds, requests for a cell are refused at once."""
STABLE_SECONDS: Final = 60.0
"""If two zygotes die more than these seconds apart, the second counts as the first in a row."""
JAIL_SECONDS_MAX: Final = 10.0
"""Time limit from a fork to its confirmed jail, and for one attack of the self-test."""
UNHEARD_MAX: Final = 1024
"""Maximum stored reports of dead cells whose channel is still open; one more drops the oldest."""
REFILL_SECONDS: Final = 0.02
"""Pause after a spare is taken; making the next one costs a core some milliseconds."""
_SECCOMP_FILTER: Final = "Seccomp:\t2"


class Source(Protocol):
    """A source of cells: the zygote of this machine, or a worker with a zygote."""

    async def spawn(self) -> CellProcess:
        """Fork a cell, or raise `SpawnError`."""

    def ended(self) -> bool:
        """Return whether this source takes no more orders."""

    async def close(self) -> None:
        """End all cells of this source."""


class Spawner:
    """Makes jailed cells without a policy, and reports how they end.

    Args:
        limits: All limits of the sandbox.
        mode: `jail`, or `unsafe` without the jail.
        make: Wraps a spawned process as a cell of the pool.
        restarted: Called when a dead zygote was replaced.
        counters: Counts `spawns` and `zygote_restarts`.

    Attributes:
        layers: The layers that the latest cell reported.
        living: Every cell that was not destroyed, by process id.
        orphaned: The cause of death of cells that die with their zygote.
        spawning: Cells that policies wait for.
    """

    def __init__(
        self,
        limits: Limits,
        mode: Mode,
        make: "Callable[[CellProcess, Spawner], Cell]",
        restarted: Callable[[], None],
        counters: Counter[str],
    ) -> None:
        self.layers: dict[str, str] = {}
        self.living: dict[int, Cell] = {}
        self.orphaned = ORPHANED
        self.spawning = 0
        self._limits = limits
        self._mode: Mode = mode
        self._make = make
        self._restarted = restarted
        self._counters = counters
        self._zygote: Source | None = None
        self._up = asyncio.Event()
        self._spares: list[Cell] = []
        self._ready: dict[Cell, asyncio.Future[None]] = {}
        self._probes: dict[Cell, asyncio.Future[str]] = {}
        self._end_reports: dict[int, tuple[Callable[[Death], None], asyncio.TimerHandle]] = {}
        self._unheard: dict[int, Death] = {}
        self._lost_at = -STABLE_SECONDS
        self._losses = 0
        self._retry_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    # Life ----------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """Whether there is a zygote to fork cells from."""
        return self._up.is_set()

    async def start(self) -> None:
        """Start the zygote.

        Raises:
            JailError: The zygote did not start.
        """
        self._zygote = zygote = Zygote(
            self._limits, self._mode, self._note_end, self._replace_zygote
        )
        await zygote.start()
        self._up.set()

    async def close(self) -> None:
        """Kill every cell and the zygote, in limited time."""
        self._closing = True
        self._up.set()
        for task in list(self._tasks):
            task.cancel()
        for pid in list(self._end_reports):
            self._report_end(pid, UNKNOWN)
        for cell in list(self.living.values()):
            self.destroy(cell)
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._zygote is not None:
            await self._zygote.close()

    def run(self, coroutine: Coroutine[object, object, None]) -> None:
        """Run a task; closing the sandbox cancels it."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _replace_zygote(self) -> None:
        """Start another zygote, since all cells died with it; wait first if that happens often."""
        self._up.clear()
        if self._closing:
            return
        for pid in list(self._end_reports):
            self._report_end(pid, self.orphaned)
        now = time.monotonic()
        self._losses = self._losses + 1 if now - self._lost_at < STABLE_SECONDS else 1
        self._lost_at = now
        pause = 0.0
        if self._losses > 1:
            doublings = min(self._losses - 2, 10)  # Beyond the longest pause, without overflow.
            pause = min(PAUSE_SECONDS_MIN * 2.0**doublings, PAUSE_SECONDS_MAX)
        self._retry_at = now + pause
        self._counters["zygote_restarts"] += 1
        self.run(self._restart(pause))

    async def _restart(self, wait_seconds: float) -> None:
        old, self._zygote = self._zygote, None
        if old is not None:
            await old.close()
        await asyncio.sleep(wait_seconds)
        try:
            await self.start()
        except JailError:
            self._replace_zygote()
            return
        self._restarted()

    # Births --------------------------------------------------------------------------------

    def spare(self) -> Cell | None:
        """Return a jailed, empty cell that is ready now, if there is one."""
        while self._spares:
            cell = self._spares.pop()
            if cell.alive:
                return cell
        return None

    def refill_soon(self) -> None:
        """Make new cells after a pause, so that the cell just taken can answer first."""

        def refill() -> None:
            if not self._closing:
                self.run(self.refill())

        asyncio.get_running_loop().call_later(REFILL_SECONDS, refill)

    async def refill(self) -> None:
        """Make some spare cells, so that a replacement does not wait for a fork."""
        while len(self._spares) < self._limits.spares and not self._closing:
            try:
                cell = await self.blank()
            except (SpawnError, JailError):
                return  # The next request for a cell gets the error.
            self._spares.append(cell)

    async def blank(self) -> Cell:
        """Return a new cell that has confirmed its jail and has no policy.

        Raises:
            SpawnError: The cell could not be started, or died before it was jailed.
            JailError: A layer of its jail is missing.
        """
        zygote = await self._running()
        try:
            return await self._spawn_cell(zygote)
        except SpawnError:
            if self._closing or not zygote.ended():
                raise
        # The cell died with its zygote; the next cell may live.
        return await self._spawn_cell(await self._running())

    async def _running(self) -> Source:
        if self._closing:
            raise SpawnError("the sandbox is not running")
        wait = self._retry_at - time.monotonic()
        if not self.up and wait > PATIENCE_SECONDS:
            raise SpawnError(
                f"the process that cells are forked from died {self._losses} times in a row and is"
                f" started again in {wait:.1f} s"
            )
        try:
            async with asyncio.timeout(START_SECONDS_MAX):
                await self._up.wait()
        except TimeoutError as error:
            raise SpawnError("the zygote does not run") from error
        if self._zygote is None or self._closing:
            raise SpawnError("the sandbox is not running")
        return self._zygote

    async def _spawn_cell(self, zygote: Source) -> Cell:
        process = await zygote.spawn()
        if self._closing:
            process.kill()
            raise SpawnError("the sandbox is closing")
        cell = self._make(process, self)
        self.living[cell.pid] = cell
        loop = asyncio.get_running_loop()
        ready = self._ready[cell] = loop.create_future()
        try:
            await process.join(cell)
            async with asyncio.timeout(JAIL_SECONDS_MAX):
                await ready
        except (OSError, TimeoutError) as error:
            self.destroy(cell)
            raise SpawnError(f"a cell did not confirm its jail: {error}") from error
        except BaseException:
            self.destroy(cell)
            raise
        finally:
            self._ready.pop(cell, None)
        self._counters["spawns"] += 1
        return cell

    def note_jail(self, cell: Cell, frame: frames.CellJailed) -> None:
        """Handle the report of a new cell about its jail."""
        ready = self._ready.get(cell)
        if ready is None or ready.done():
            return
        if frame.error:
            reason = f"{frame.error}. Run `moored doctor`; --sandbox unsafe needs no jail"
            ready.set_exception(JailError(frame.failed_layer, reason))
            return
        self.layers = frame.layers
        ready.set_result(None)

    # Self-test -----------------------------------------------------------------------------

    async def attack(self, name: str) -> str:
        """Order a new cell to try one attack; return the outcome."""
        cell = await self.blank()
        future = self._probes[cell] = asyncio.get_running_loop().create_future()
        try:
            cell.probe(name)
            async with asyncio.timeout(JAIL_SECONDS_MAX):
                outcome: str = await future
        except TimeoutError as error:
            reason = f"the self-test attack had no outcome within {JAIL_SECONDS_MAX:g} s"
            raise JailError(name, reason) from error
        finally:
            self._probes.pop(cell, None)
            self.destroy(cell)
        return outcome

    def note_probe(self, cell: Cell, outcome: str) -> None:
        """Handle the report of a cell that survived its attack."""
        future = self._probes.get(cell)
        if future is not None and not future.done():
            future.set_result(outcome)

    async def filter_from_outside(self) -> bool:
        """Return whether a new cell runs under a seccomp filter, according to the kernel."""
        cell = await self.blank()
        try:
            # procfs answers from memory; there is no disk to wait for.
            status = Path(f"/proc/{cell.pid}/status").read_text(encoding="utf-8")  # noqa: ASYNC240  # See above.
        except OSError:
            return False
        finally:
            self.destroy(cell)
        return _SECCOMP_FILTER in status and "NoNewPrivs:\t1" in status

    # Deaths --------------------------------------------------------------------------------

    def destroy(self, cell: Cell) -> None:
        """Kill a cell and forget it; a second call does nothing."""
        cell.destroy()
        self.living.pop(cell.pid, None)
        self._unheard.pop(cell.pid, None)
        if cell in self._spares:
            self._spares.remove(cell)

    def call_at_end(self, cell: Cell, tell: Callable[[Death], None]) -> None:
        """Call `tell` once the zygote has reported why a cell ended, or with `UNKNOWN`."""
        pid = cell.pid
        death = self._unheard.pop(pid, None)
        self.destroy(cell)
        if death is not None:
            tell(death)
            return
        if not self.up:
            tell(self.orphaned)
            return
        timer = asyncio.get_running_loop().call_later(
            END_REPORT_SECONDS_MAX, self._report_end, pid, UNKNOWN
        )
        self._end_reports[pid] = (tell, timer)

    def handle_closed_channel(self, cell: Cell) -> bool:
        """Handle the end of a cell that never had work; False if the cell had work."""
        ready = self._ready.get(cell)
        if ready is not None and not ready.done():
            ready.set_exception(SpawnError("it died before it was jailed"))
            return True
        probe = self._probes.pop(cell, None)
        if probe is not None:

            def tell(death: Death) -> None:
                if not probe.done():
                    probe.set_result(f"killed: {death.cause}")

            self.call_at_end(cell, tell)
        return probe is not None

    def _note_end(self, pid: int, death: Death) -> None:
        """Handle the zygote's report of how a cell ended."""
        if pid in self._end_reports:
            self._report_end(pid, death)
        elif pid in self.living:
            self._unheard[pid] = death
            if len(self._unheard) > UNHEARD_MAX:
                del self._unheard[next(iter(self._unheard))]

    def _report_end(self, pid: int, death: Death) -> None:
        end_report = self._end_reports.pop(pid, None)
        if end_report is not None:
            tell, timer = end_report
            timer.cancel()
            tell(death)


async def attack_self(spawner: Spawner) -> dict[str, str]:
    """Order new cells to attack their jail; return how each attack was stopped.

    Raises:
        JailError: An attack succeeded, or the kernel reports no filter.
    """
    probes: dict[str, str] = {}
    if not await spawner.filter_from_outside():
        raise JailError(
            "seccomp",
            "the kernel does not confirm a filter on a cell (/proc/PID/status); nothing is "
            "served. Run `moored doctor`, or accept the risk with --sandbox unsafe",
        )
    names = (*self_test.REFUSED, *self_test.DEADLY)
    for name in names:
        outcome = await spawner.attack(name)
        expected = "refused" if name in self_test.REFUSED else "killed"
        # A kernel without the system call refuses it with ENOSYS, which is as good.
        if not outcome.startswith((expected, "refused")) or outcome.startswith("BREACH"):
            raise JailError(
                name,
                f"the self-test attack was not stopped ({outcome}). Nothing is served: run "
                "`moored doctor`, use a kernel with seccomp filters, or accept the risk with "
                "--sandbox unsafe",
            )
        probes[name] = outcome
    return probes

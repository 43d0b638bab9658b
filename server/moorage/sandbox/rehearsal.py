"""Trials of a policy in the cell that looks at it; `host.Sandbox.check` calls this."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from moorage.core.words import Refusal
from moorage.model import Code
from moorage.sandbox.channel import Cell
from moorage.sandbox.contract import Outcome, PolicyCode, PolicyFault, Trial
from moorage.sandbox.work import crashed, work_of


class Turns:
    """Lets some policies be looked at at one time, and some more wait for it.

    Args:
        at_once_max: How many are looked at.
        waiting_max: How many wait; one more is refused.

    """

    def __init__(self, at_once_max: int, waiting_max: int) -> None:
        self._free = asyncio.Semaphore(at_once_max)
        self._waiting_max = waiting_max
        self._waiting = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn and hold it.

        Raises:
            PolicyFault: Too many wait already (BUSY).

        """
        if self._waiting >= self._waiting_max:
            reason = f"{self._waiting_max} policies wait to be checked; try again in a moment"
            raise PolicyFault(Refusal(Code.BUSY, reason))
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._free.release()


async def tried(
    cell: Cell, code: PolicyCode, trials: Sequence[Trial], watch_soon: Callable[[], None]
) -> Sequence[Outcome]:
    """Make trials in a loaded cell, one after the other.

    Args:
        cell: Holds the policy and nobody else's work.
        code: The policy.
        trials: What to try.
        watch_soon: Has the clock of the cell looked at.

    Returns:
        What became of each; after one that the cell did not outlive, the others have its refusal.

    """
    outcomes: list[Outcome] = []
    for trial in trials:
        if not cell.alive:
            lost = Outcome(refusal=crashed("it ended once it was loaded", code.ref))
            outcomes.append(outcomes[-1] if outcomes else lost)
            continue
        work = work_of(trial, code)
        work.future = asyncio.get_running_loop().create_future()
        refusal = cell.put(work)
        if refusal is None:
            cell.flush()
            watch_soon()
            try:
                outcomes.append(Outcome(await work.future))
                continue
            except PolicyFault as fault:
                refusal = fault.refusal
        outcomes.append(Outcome(refusal=refusal))
    return outcomes

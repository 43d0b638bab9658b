"""Keeps the orders of each workload in line: `WorkloadControl` is the only caller."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from moorage.daemon.tasks import Tasks


class OrderChains:
    """Runs one order at a time for each workload, in the order they were given.

    An order waits for all that were given before it, not only for the last one: a cancelled order
    ends at once, also where those before it still run.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._chains: dict[str, dict[asyncio.Task[None], bool]] = {}

    def __contains__(self, name: str) -> bool:
        """Return whether a workload has an order that is not carried out."""
        return name in self._chains

    def add(self, name: str, work: Callable[[], Awaitable[None]], *, revocable: bool) -> None:
        """Queue an order behind all earlier ones of its workload.

        Args:
            name: Of the workload.
            work: Carries it out.
            revocable: Whether `revoke` cancels it.
        """
        chain = self._chains.setdefault(name, {})
        task = self._tasks.spawn(_run_after(tuple(chain), work))
        chain[task] = revocable
        task.add_done_callback(partial(self._remove, name))

    def revoke(self, name: str) -> None:
        """Cancel the orders of a workload that a stop makes pointless."""
        for task, revocable in self._chains.get(name, {}).items():
            if revocable:
                task.cancel()

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel all orders; return their tasks."""
        tasks = [task for chain in self._chains.values() for task in chain]
        for task in tasks:
            task.cancel()
        return tasks

    def _remove(self, name: str, task: asyncio.Task[None]) -> None:
        chain = self._chains[name]
        del chain[task]
        if not chain:
            del self._chains[name]


async def _run_after(
    earlier: tuple[asyncio.Task[None], ...], work: Callable[[], Awaitable[None]]
) -> None:
    if earlier:
        await asyncio.wait(earlier)
    await work()

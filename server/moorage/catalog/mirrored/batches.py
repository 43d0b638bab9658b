"""Combines the requests of many callers into few bulk requests to an external service.

`catalog.mirrored.clusters` and `catalog.mirrored.policies` send their requests through `Batches`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from moorage.model import Code
from moorage.protocol.faults import ServiceError


@dataclass(slots=True)
class _Batch:
    keys: set[str] = field(default_factory=set[str])
    task: "asyncio.Task[None] | None" = None


class Batches:
    """Combines the keys that many callers request into bulk requests, one at a time.

    Args:
        ask: Sends one request for all given keys.
    """

    def __init__(self, ask: Callable[[frozenset[str]], Awaitable[None]]) -> None:
        self._ask = ask
        self._current: _Batch | None = None
        self._next: _Batch | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is running or waiting."""
        return self._current is None and self._next is None

    async def join(self, keys: Iterable[str]) -> None:
        """Wait for a bulk request that includes these keys; raise its error.

        Raises:
            ServiceError: The error of the request, or `shutting_down`.
        """
        wanted = set(keys)
        batch = self._current
        if batch is None or not wanted <= batch.keys:
            if self._next is None:
                self._next = _Batch()
                self._next.task = asyncio.create_task(self._run(self._next, self._current))
                self._next.task.add_done_callback(_look)
            batch = self._next
            batch.keys |= wanted
        assert batch.task is not None
        try:
            # A cancelled caller must not cancel the others' request.
            await asyncio.shield(batch.task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling() or not batch.task.cancelled():
                raise
            text = "The server is stopping; connect again in a moment."
            raise ServiceError(Code.SHUTTING_DOWN, text) from None

    async def _run(self, batch: _Batch, before: _Batch | None) -> None:
        if before is not None and before.task is not None:
            await asyncio.wait([before.task])
        self._next, self._current = None, batch
        try:
            await self._ask(frozenset(batch.keys))
        finally:
            if self._current is batch:
                self._current = None

    async def close(self) -> None:
        """Cancel running requests."""
        batches = (self._next, self._current)
        tasks = [batch.task for batch in batches if batch is not None and batch.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _look(task: "asyncio.Task[None]") -> None:
    """Read the task's exception, so that asyncio does not log it as never retrieved."""
    if not task.cancelled():
        task.exception()

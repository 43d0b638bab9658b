"""The daemon's background tasks; the first one that fails stops the daemon."""

import asyncio
from collections.abc import Coroutine
from typing import Final

CLOSE_SECONDS_MAX: Final = 3.0
"""Maximum seconds that `close` waits for cancelled tasks: a backend may be in a call."""


class Tasks:
    """Runs background tasks; the first one that fails stops the daemon."""

    def __init__(self) -> None:
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task until it ends or until `close`."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._forget)
        return task

    def fail(self, error: BaseException) -> None:
        """Stop the daemon with this error, unless another error came first."""
        if not self.broken.done():
            self.broken.set_exception(error)

    async def close(self) -> None:
        """Cancel all tasks, and wait for a bounded time until they have ended."""
        self.broken.cancel()
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CLOSE_SECONDS_MAX)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

"""Runs an event loop on a separate thread, where the caller's code cannot delay it.

The blocking client runs on such a thread; the async client renews its leases on one, so that a
block that computes for a minute without `await` does not lose its lease.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Final, TypeVar

T = TypeVar("T")

STOP_SECONDS_MAX: Final = 10.0
"""Seconds that `stop` waits for the thread, which cannot keep the process alive."""


class LoopThread:
    """Runs an event loop on a daemon thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[object, object, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop; cancelling the returned future cancels the coroutine.

        Raises:
            RuntimeError: The loop has been stopped.
        """
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine on the loop, and wait for the result.

        Ctrl-C while waiting cancels the coroutine. The coroutine must limit its own time.
        """
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel running coroutines and end the thread. A second stop does nothing."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_SECONDS_MAX)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            self._loop.close()

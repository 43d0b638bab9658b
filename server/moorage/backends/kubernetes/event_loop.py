"""Runs an event loop in its own thread, since a backend's connections outlive callers' loops."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Final, TypeVar

from moorage.backends.completion import finish

CLOSING_ROUNDS: Final = 10

_T = TypeVar("_T")


class EventLoopThread:
    """Runs coroutines for callers in any thread; the first call starts the event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, work: Coroutine[object, object, _T]) -> _T:
        """Run `work` to its end; if the caller is cancelled, cancel `work` and wait for its end."""
        done: concurrent.futures.Future[_T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[_T]] = []
        loop = self._running()

        def begin() -> None:
            tasks.append(loop.create_task(work))
            tasks[0].add_done_callback(lambda task: _copy(task, done))

        loop.call_soon_threadsafe(begin)
        outcome = asyncio.wrap_future(done)
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            if not outcome.done():
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())  # noqa: PLW0108  # There may be none yet.
            with contextlib.suppress(Exception):  # No caller is left for the error.
                await finish(outcome)
            raise

    def close(self) -> None:
        """Cancel the thread's tasks and end the thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name=self._name, daemon=True
                )
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        for _ in range(CLOSING_ROUNDS):  # Closed connections report their end in later rounds.
            loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()


def _copy(task: "asyncio.Task[_T]", done: "concurrent.futures.Future[_T]") -> None:
    if done.cancelled():
        return
    if task.cancelled():
        done.cancel()
        done.set_running_or_notify_cancel()
    elif (error := task.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())

"""`client.lease(…)`: holds a lease while a block runs, with and without an event loop.

The guards are classes, not generators: the interpreter finishes an unfinished generator only at its
own end, when no thread is left that could release a lease.
"""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

from moorage_client.errors import MoorageError
from moorage_client.holding import HeldLease, Keeping


class LeaseGuard:
    """Requests a lease at the start of a block, renews it during the block, and releases it after.

    A guard cancels the block as `asyncio.timeout` does: if other code cancels the task at the same
    time, `CancelledError` is raised instead of `LeaseLost`.

    Args:
        acquire: Requests the lease.
        keep: Starts to renew the lease; calls back on another thread when the lease is lost.
        release: Releases the lease; raises `LeaseLost` if the lease had ended already.
        cancel_when_lost: Whether the block is cancelled when the lease is lost.
    """

    def __init__(
        self,
        acquire: Callable[[], Awaitable[HeldLease]],
        keep: Callable[[HeldLease, Callable[[], None]], Keeping],
        release: Callable[[HeldLease], Awaitable[None]],
        *,
        cancel_when_lost: bool,
    ) -> None:
        self._acquire = acquire
        self._keep = keep
        self._release = release
        self._cancel_when_lost = cancel_when_lost
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._inside = False
        self._interrupted = False

    async def __aenter__(self) -> HeldLease:
        if self._task is not None:
            raise RuntimeError("a lease guard serves one block; call `client.lease` again")
        self._task = asyncio.current_task()
        if self._task is None:
            raise RuntimeError("`async with client.lease(…)` needs a task to run in")
        self._cancelling = self._task.cancelling()
        self._held = await self._acquire()
        self._inside = True
        loop = asyncio.get_running_loop()
        self._keeping = self._keep(self._held, lambda: _call_soon(loop, self._interrupt))
        return self._held

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inside = False
        self._keeping.cancel()
        ours = self._interrupted and self._undo_cancel() and kind is asyncio.CancelledError
        try:
            self._held.check()
            await self._release(self._held)
        except MoorageError as problem:
            if error is None or ours:
                raise
            error.add_note(f"meanwhile: {problem}")

    def _interrupt(self) -> None:
        if self._inside and self._cancel_when_lost and self._task is not None:
            self._interrupted = True
            self._task.cancel(f"lease {self._held.id} is lost")

    def _undo_cancel(self) -> bool:
        """Undo the guard's cancellation of the task; return whether no other code cancelled it."""
        return self._task is not None and self._task.uncancel() <= self._cancelling


class BlockingGuard:
    """Holds a lease as `LeaseGuard` does, for a block on a thread, which cannot be interrupted.

    Args:
        acquire: Requests the lease.
        keep: Starts to renew the lease.
        release: Releases the lease; raises `LeaseLost` if the lease had ended already.
    """

    def __init__(
        self,
        acquire: Callable[[], HeldLease],
        keep: Callable[[HeldLease], Keeping],
        release: Callable[[HeldLease], None],
    ) -> None:
        self._acquire = acquire
        self._keep = keep
        self._release = release
        self._entered = False

    def __enter__(self) -> HeldLease:
        if self._entered:
            raise RuntimeError("a lease guard serves one block; call `client.lease` again")
        self._entered = True
        self._held = self._acquire()
        self._keeping = self._keep(self._held)
        return self._held

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._keeping.cancel()
        try:
            self._held.check()
            self._release(self._held)
        except MoorageError as problem:
            if error is None:
                raise
            error.add_note(f"meanwhile: {problem}")


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    # If the event loop is closed, no block is left to interrupt.
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)

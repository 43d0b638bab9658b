"""Waits for work that must finish even if its caller is cancelled.

Backends and the store use it. With `asyncio.shield`, a cancelled caller continues before the work
has ended, and asyncio reports a later error of the work as never retrieved.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

_T = TypeVar("_T")


async def finish(work: Awaitable[_T]) -> _T:
    """Await `work` to its end, even if the caller is cancelled; then raise that cancellation.

    Raises:
        CancelledError: The caller was cancelled; its cause is the error of the work, if any.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    raise cancelled from (None if task.cancelled() else task.exception())


def stop_bound(error: BaseException) -> float | None:
    """Return the `stop_seconds_max` that `task.cancel` passed with a cancellation, or None."""
    bound = error.args[0] if isinstance(error, asyncio.CancelledError) and error.args else None
    return float(bound) if isinstance(bound, int | float) else None

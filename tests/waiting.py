"""Waiting for a state of another process, thread or server that is not reported."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

SECONDS_MAX = 90.0
"""Nothing here takes so long; a bound for what would hang."""


def until(condition: Callable[[], Any], seconds: float = SECONDS_MAX) -> Any:
    """Return the first true answer of a function."""
    give_up_at = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < give_up_at, "this has not come about"
        time.sleep(0.01)  # There is no event to wait for.
    return answer


async def async_until(condition: Callable[[], Any], seconds: float = SECONDS_MAX) -> Any:
    """Return the first true answer of a function, or of a coroutine function."""
    async with asyncio.timeout(seconds):
        while True:
            answer = condition()
            if inspect.isawaitable(answer):
                answer = await answer
            if answer:
                return answer
            await asyncio.sleep(0.01)  # As above.

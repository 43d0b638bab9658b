"""Waits for a state of another process, thread or server that sends no event about it."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

SECONDS_MAX = 90.0
"""Longest wait in seconds, after which the awaited state counts as one that never comes."""


def until(condition: Callable[[], Any], seconds: float = SECONDS_MAX) -> Any:
    """Call a function until it returns a true value; return this value."""
    give_up_at = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < give_up_at, "the awaited state did not come"
        time.sleep(0.01)  # There is no event to wait for.
    return answer


async def async_until(condition: Callable[[], Any], seconds: float = SECONDS_MAX) -> Any:
    """Call a function or coroutine function until its result is true; return the result."""
    async with asyncio.timeout(seconds):
        while True:
            answer = condition()
            if inspect.isawaitable(answer):
                answer = await answer
            if answer:
                return answer
            await asyncio.sleep(0.01)  # As above.

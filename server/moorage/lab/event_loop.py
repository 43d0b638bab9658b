"""Runs a coroutine that SIGTERM cancels, for `offline`, `moored bench` and `moored replay`."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import TypeVar

import uvloop

T = TypeVar("T")


def run_until_sigterm(main: Coroutine[object, object, T]) -> T:
    """Run a coroutine. SIGTERM cancels it, so that it cleans up.

    A handler of the module `signal` would raise an error in the running callback. If that is a
    transport's callback, asyncio would log the error and go on.

    Raises:
        SystemExit: SIGTERM arrived.
    """
    stopped = False

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            nonlocal stopped
            stopped = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        return await main

    before = signal.getsignal(signal.SIGTERM)
    try:
        return uvloop.run(run())
    except asyncio.CancelledError:
        if stopped:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)  # The loop has set the default handler.

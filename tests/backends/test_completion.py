"""`finish` completes its work even if the caller is cancelled."""

import asyncio
import gc

import pytest

from moorage.backends.completion import finish


async def test_a_cancelled_caller_waits_until_its_work_is_finished():
    go_on, done = asyncio.Event(), []

    async def work() -> None:
        await go_on.wait()
        done.append("whole")

    caller = asyncio.ensure_future(finish(work()))
    for _ in range(3):  # Repeated cancellations change nothing.
        await asyncio.sleep(0)
        caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done == ["whole"]


async def test_results_and_errors_of_the_work_are_passed_on():
    async def fail() -> None:
        raise OSError("no")

    assert await finish(asyncio.sleep(0, "yes")) == "yes"
    with pytest.raises(OSError, match="no"):
        await finish(fail())


async def test_an_error_of_cancelled_work_becomes_the_cause_of_the_cancellation():
    loop, errors, go_on = asyncio.get_running_loop(), [], asyncio.Event()
    loop.set_exception_handler(lambda _, context: errors.append(context["message"]))

    async def fail() -> None:
        await go_on.wait()
        raise OSError("too late")

    caller = asyncio.ensure_future(finish(fail()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await caller
    assert isinstance(cancelled.value.__cause__, OSError)
    del cancelled, caller
    gc.collect()
    await asyncio.sleep(0)
    assert errors == []

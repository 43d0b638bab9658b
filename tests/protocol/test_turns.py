"""Large messages: one at a time, tenants in turn."""

import asyncio
import itertools

import pytest

from moorage.protocol.turns import Turns


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tenants_take_turns_and_one_goes_on_at_a_time():
    turns, order, at_once = Turns(rests=False), [], 0

    async def read(tenant: str, number: int) -> None:
        nonlocal at_once
        async with turns.turn(tenant):
            at_once += 1
            assert at_once == 1
            await asyncio.sleep(0)
            order.append((tenant, number))
            at_once -= 1

    many = [asyncio.create_task(read("a", number)) for number in range(100)]
    await asyncio.sleep(0)
    await asyncio.gather(read("b", 0), read("b", 1), *many)
    assert sorted(order.index(("b", number)) for number in range(2)) <= [3, 5]
    assert [each for each in order if each[0] == "a"] == [("a", n) for n in range(100)]


async def test_after_each_the_loop_is_free_for_as_long_as_it_took():
    turns, seen = Turns(), []
    loop = asyncio.get_running_loop()

    async def read() -> None:
        async with turns.turn("a"):
            start = loop.time()
            await asyncio.sleep(0.02)  # Work that others wait for.
            seen.append((start, loop.time()))

    await asyncio.gather(read(), read(), read())
    for (start, end), (following, _) in itertools.pairwise(seen):
        assert following - end >= (end - start) * 0.9


async def test_who_is_cancelled_passes_the_turn_on():
    turns, done = Turns(rests=False), []

    async def read(name: str) -> None:
        async with turns.turn(name):
            await asyncio.sleep(0)
            done.append(name)

    first, second, third = (asyncio.create_task(read(name)) for name in "abc")
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(first, third)
    with pytest.raises(asyncio.CancelledError):
        await second
    await read("d")
    assert done == ["a", "c", "d"]


async def test_no_turn_waits_once_it_is_closed():
    turns, end = Turns(), asyncio.Event()

    async def read() -> str:
        async with turns.turn("a"):
            await end.wait()
            return "read"

    tasks = [asyncio.create_task(read()) for _ in range(3)]
    await settle()
    turns.close()
    end.set()
    assert await asyncio.gather(*tasks, read()) == ["read"] * 4

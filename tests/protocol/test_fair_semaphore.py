"""With a fair semaphore, few callers hold a turn, and no tenant's flood delays another tenant."""

import asyncio
import itertools

import pytest

from moorage.model import Code
from moorage.protocol.fair_semaphore import FairSemaphore
from moorage.protocol.faults import ServiceError

AT_ONCE, WAITING = 3, 6


@pytest.fixture
def semaphore():
    return FairSemaphore(AT_ONCE, WAITING)


class Visits:
    """Tenants that take turns, and the outcome of each."""

    def __init__(self, semaphore):
        self.semaphore = semaphore
        self.inside = []
        self.ends = {}
        self.tasks = {}

    async def come(self, *names):
        """Start a caller for each name; its first letter is the tenant."""
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._visit(name))
        await self.settle()

    async def _visit(self, name):
        async with self.semaphore.turn(name[0]):
            self.inside.append(name)
            try:
                await self.ends[name].wait()
            finally:
                self.inside.remove(name)

    async def leave(self, *names):
        for name in names:
            self.ends[name].set()
            await self.settle()

    async def settle(self):
        for _ in range(5):
            await asyncio.sleep(0)

    def busy(self):
        """Return the tenants of callers that were refused because too many wait."""
        done = [name for name, task in self.tasks.items() if task.done() and task.exception()]
        for name in done:
            error = self.tasks[name].exception()
            assert isinstance(error, ServiceError)
            assert error.code is Code.BUSY
        return done


@pytest.fixture
async def visits(semaphore):
    visits = Visits(semaphore)
    yield visits
    for task in visits.tasks.values():
        task.cancel()
    await asyncio.gather(*visits.tasks.values(), return_exceptions=True)


async def test_a_tenant_with_many_waiters_leaves_a_turn_for_another_tenant(visits):
    await visits.come("a1", "a2", "a3", "a4")
    assert visits.inside == ["a1", "a2"]
    await visits.come("b1")
    assert visits.inside == ["a1", "a2", "b1"]
    await visits.leave("a1")
    assert visits.inside == ["a2", "b1", "a3"], "in the order in which they came"


async def test_the_tenant_that_holds_the_fewest_turns_is_next_and_equal_tenants_take_turns(visits):
    await visits.come("a1", "a2", "b1", "a3", "a4", "b2", "c1", "d1", "c2")
    assert visits.inside == ["a1", "a2", "b1"]
    came = []
    for name in ("a1", "a2", "b1", "c1", "b2", "d1"):
        await visits.leave(name)
        came.append(visits.inside[-1])
    assert came == ["c1", "a3", "b2", "d1", "c2", "a4"]


async def test_a_full_queue_drops_the_latest_waiter_of_the_tenant_with_most_waiters(visits):
    flood = [f"a{number}" for number in range(2 + WAITING)]
    await visits.come(*flood)
    assert visits.busy() == []
    await visits.come("a9")
    assert visits.busy() == ["a9"]
    await visits.come("b1", "b2")
    assert visits.inside == ["a0", "a1", "b1"]
    assert visits.busy() == [flood[-1], "a9"]
    await visits.come("b3", "b4", "b5")
    assert visits.busy() == [*flood[-3:], "a9", "b5"], "b may have no more waiters than a"


async def test_a_cancelled_waiter_is_forgotten(visits, semaphore):
    await visits.come("a1", "a2", "b1", "b2", "c1")
    visits.tasks["b2"].cancel()
    await visits.leave("a1")
    assert visits.inside == ["a2", "b1", "c1"]
    # Cancelled at the moment when its turn comes.
    await visits.come("d1")
    visits.ends["a2"].set()
    await asyncio.sleep(0)
    visits.tasks["d1"].cancel()
    await visits.settle()
    await visits.leave("b1", "c1")
    await visits.come("e1", "e2", "f1")
    assert visits.inside == ["e1", "e2", "f1"], "no turn is lost"
    await visits.leave("e1", "e2", "f1")
    assert not semaphore._waiting
    assert not semaphore._held


async def test_a_caller_gets_a_turn_while_all_waiters_before_it_are_cancelled(visits, semaphore):
    """A server that stops releases turns before the waiters notice their cancellation."""
    flood = [f"a{number}" for number in range(2 + WAITING)]
    await visits.come(*flood)
    for name in flood:
        visits.tasks[name].cancel()
    # These callers come after the cancellations, before the cancelled tasks have run.
    await visits.come("b1", "c1")
    await asyncio.gather(*(visits.tasks[name] for name in flood), return_exceptions=True)
    assert all(visits.tasks[name].cancelled() for name in flood)
    assert visits.inside == ["b1", "c1"]
    await visits.leave("b1", "c1")
    assert not semaphore._waiting
    assert not semaphore._held
    assert semaphore._free == AT_ONCE


async def test_a_semaphore_with_one_turn_grants_the_turn():
    semaphore = FairSemaphore(1, 1)
    async with semaphore.turn("a"):
        pass
    async with semaphore.turn("a"):
        pass


async def test_tenants_take_turns_on_the_loop_and_one_runs_at_a_time():
    turns, order, at_once = FairSemaphore(), [], 0

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


async def test_after_each_turn_of_a_tenant_the_loop_is_free_for_as_long_as_the_turn_took():
    turns, seen = FairSemaphore(rests=True), []
    loop = asyncio.get_running_loop()

    async def read() -> None:
        async with turns.turn("a"):
            start = loop.time()
            await asyncio.sleep(0.02)  # Work while others wait.
            seen.append((start, loop.time()))

    await asyncio.gather(read(), read(), read())
    for (start, end), (following, _) in itertools.pairwise(seen):
        assert following - end >= (end - start) * 0.9


async def test_after_close_of_the_semaphore_no_caller_waits_for_a_turn():
    turns, end = FairSemaphore(rests=True), asyncio.Event()

    async def read() -> str:
        async with turns.turn("a"):
            await end.wait()
            return "read"

    tasks = [asyncio.create_task(read()) for _ in range(3)]
    await asyncio.sleep(0)
    turns.close()
    end.set()
    assert await asyncio.gather(*tasks, read()) == ["read"] * 4

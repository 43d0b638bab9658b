"""Tests of the pool of resources: its counts, and the order in which it serves waiters."""

import asyncio
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage_client.workflow import (
    ResourceError,
    ResourcePool,
    ResourceRequirements,
    ResourceTimeline,
    WorkflowError,
)
from moorage_client.workflow.timeline import SNAPSHOTS_MAX
from moorage_client.workflow.waiting import OVERTAKEN_MAX, Account, Ticket

gpu = ResourceRequirements.gpu


def ticket(*amounts: tuple[int, int]) -> Ticket:
    return Ticket(amounts, None, lambda: None)


@pytest.mark.parametrize(
    "amount", [-1, math.nan, math.inf, True, "1", None, 1e-7, 4e-7, 9e-7, 5e-324]
)
def test_an_infinite_or_negative_or_too_small_amount_is_refused(amount):
    with pytest.raises(ValueError, match=r"resources\['gpu'\] is .*; expected"):
        ResourceRequirements({"gpu": amount})
    for make in (ResourceRequirements.gpu, ResourceRequirements.cpu, ResourceRequirements.memory):
        with pytest.raises(ResourceError):
            make(amount)
    with pytest.raises(ResourceError, match=r"capacities\['gpu'\] is"):
        ResourcePool({"gpu": amount})


def test_cpu_means_cpu_slots_in_a_pool_that_has_cpu_slots():
    pool = ResourcePool({"cpu_slots": 2})
    assert pool.try_acquire(ResourceRequirements.cpu(2))
    assert pool.allocated == {"cpu_slots": 2}
    assert not pool.can_satisfy(ResourceRequirements({"cpu": 1, "cpu_slots": 2}))
    assert ResourceRequirements.cpu(1).fits({"cpu_slots": 1})
    assert not ResourceRequirements({"cpu": 3, "cpu_slots": 3}).fits({"cpu_slots": 4})
    assert not ResourcePool({"cpu": 1, "cpu_slots": 9}).can_satisfy(ResourceRequirements.cpu(2))


def test_ten_tenths_are_one_and_a_millionth_is_an_amount():
    pool = ResourcePool({"gpu": 1})
    for _ in range(10):
        assert pool.try_acquire(gpu(0.1))
    assert not pool.try_acquire(gpu(0.1))
    for _ in range(10):
        pool.release(gpu(0.1))
    assert str(pool.available) == "{'gpu': 1}"
    pool, need = ResourcePool({"gpu": 1e-6}), gpu(1e-6)
    assert pool.try_acquire(need)
    assert not pool.try_acquire(need)
    assert pool.try_acquire(gpu(0))
    assert not need.fits({"gpu": 0.1 + 0.2 - 0.3})  # A rounding error is no amount.


@pytest.mark.parametrize("released", [gpu(2), gpu(9), ResourceRequirements({"licence": 1})])
def test_releasing_more_than_is_held_is_an_error_and_changes_nothing(released):
    pool = ResourcePool({"gpu": 4})
    pool.acquire(gpu(1))
    with pytest.raises(ResourceError, match="release what was acquired, once"):
        pool.release(released)
    assert pool.allocated == {"gpu": 1}
    assert len(pool.timeline) == 1


@pytest.mark.parametrize("wrong", [{"gpu": 1}, "gpu", None])
def test_only_requirement_objects_are_accepted(wrong):
    pool = ResourcePool({"gpu": 1})
    for call in (pool.try_acquire, pool.acquire, pool.release, pool.can_satisfy):
        with pytest.raises(ResourceError, match="expected a ResourceRequirements"):
            call(wrong)


def test_a_wait_for_resources_may_be_infinite():
    pool = ResourcePool({"gpu": 1})
    pool.acquire(gpu(1))
    release = threading.Timer(0.05, pool.release, [gpu(1)])
    release.start()
    assert pool.acquire(gpu(1), math.inf)
    release.join()


def test_empty_requirements_are_always_granted_and_recorded():
    pool = ResourcePool({"gpu": 1})
    pool.acquire(gpu(1))
    assert pool.try_acquire(ResourceRequirements())
    assert pool.acquire(gpu(0))
    pool.release(ResourceRequirements())
    assert [each.event for each in pool.timeline.snapshots] == [*["acquire"] * 3, "release"]


async def test_a_block_holds_a_requirement():
    pool = ResourcePool({"gpu": 1})
    with pool.holding(gpu(1)) as held:
        assert held.available == {"gpu": 0}
        with pytest.raises(TimeoutError, match=r"within 0\.01 s"), pool.holding(gpu(1), 0.01):
            pass
        with pytest.raises(TimeoutError):
            async with pool.holding(gpu(1), 0.01):
                pass
    async with pool.holding(gpu(1)):
        assert pool.available == {"gpu": 0}
    assert pool.available == {"gpu": 1}


async def test_coroutines_wait_in_order():
    pool, order = ResourcePool({"gpu": 1}), []
    pool.acquire(gpu(1))

    async def one(number):
        async with pool.holding(gpu(1)):
            order.append(number)

    waiting = [asyncio.create_task(one(number)) for number in range(20)]
    await asyncio.sleep(0)
    pool.release(gpu(1))
    await asyncio.gather(*waiting)
    assert order == list(range(20))


async def test_after_the_cancellation_of_a_waiter_the_next_waiters_are_served():
    pool = ResourcePool({"gpu": 2})
    pool.acquire(gpu(1))
    large = asyncio.create_task(pool.acquire_async(gpu(2)))
    await asyncio.sleep(0)
    for _ in range(OVERTAKEN_MAX):
        assert pool.try_acquire(gpu(1))
        pool.release(gpu(1))
    small = asyncio.create_task(pool.acquire_async(gpu(1)))
    await asyncio.sleep(0)
    assert not pool.try_acquire(gpu(1)), "free slots are reserved for the large waiter"
    large.cancel()
    assert await small
    assert pool.allocated == {"gpu": 2}


async def test_a_waiter_that_is_cancelled_while_it_is_served_gives_its_resources_back():
    pool = ResourcePool({"gpu": 1})
    pool.acquire(gpu(1))
    waiter = asyncio.create_task(pool.acquire_async(gpu(1)))
    await asyncio.sleep(0)
    pool.release(gpu(1))  # The waiter is served; its coroutine has not resumed yet.
    assert pool.available == {"gpu": 0}
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert pool.available == {"gpu": 1}


def test_threads_share_a_pool():
    pool, most = ResourcePool({"gpu": 4, "cpu": 3}), []

    def work(seed):
        chance = random.Random(seed)
        for _ in range(100):
            need = ResourceRequirements({"gpu": chance.randint(0, 4), "cpu": chance.randint(0, 3)})
            if chance.random() < 0.8:
                assert pool.acquire(need)
            elif not pool.acquire(need, timeout=0.0001):
                continue
            most.append(pool.allocated["gpu"])
            pool.release(need)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert max(most) <= 4
    assert pool.available == {"gpu": 4, "cpu": 3}
    for snapshot in pool.timeline.snapshots:
        for name, capacity in pool.capacities.items():
            assert 0 <= snapshot.allocated[name] <= capacity
            assert snapshot.allocated[name] + snapshot.available[name] == capacity


def test_a_large_waiter_gets_a_reservation_after_enough_overtakes():
    account = Account([4])
    assert account.take(((0, 1),))
    large = ticket((0, 4))
    account.wait(large)
    overtakers = 0
    while account.take(((0, 1),)):
        overtakers += 1
        account.give_back(((0, 1),))
    assert overtakers == OVERTAKEN_MAX
    assert account.give_back(((0, 1),)) == [large]


def test_the_pool_never_holds_up_requests_that_delay_no_waiter():
    account = Account([4, 4])
    assert account.take(((0, 1),))
    large = ticket((0, 4), (1, 1))
    account.wait(large)
    for _ in range(3):
        assert account.take(((1, 1),))
    assert large.overtaken == 0
    large.overtaken = OVERTAKEN_MAX
    assert not account.take(((1, 1),)), "the rest of the second resource is reserved for it"
    assert account.take(())


requests = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=60
)


@given(requests, st.randoms(use_true_random=False))
def test_under_random_calls_the_pool_loses_no_amount_and_serves_all_waiters(story, chance):
    """Amounts stay between zero and the capacity, and waiters are served after releases."""
    account = Account([6, 6, 6])
    held, waiting = [], []
    for resource, count, also in story:
        amounts = ((resource, count), ((resource + 1) % 3, also)) if also else ((resource, count),)
        if not account.take(amounts):
            place = ticket(*amounts)
            account.wait(place)
            waiting.append(place)
        else:
            held.append(amounts)
        if held and chance.random() < 0.5:
            served = account.give_back(held.pop(chance.randrange(len(held))))
            held += [each.amounts for each in served]
            waiting = [each for each in waiting if each not in served]
        used = [sum(n for each in held for r, n in each if r == number) for number in range(3)]
        assert [6 - free for free in account.free] == used
        assert all(each.overtaken <= OVERTAKEN_MAX for each in waiting)
        assert len(account) == len(waiting)
    while held:
        held += [each.amounts for each in account.give_back(held.pop())]
    assert (account.free, len(account)) == ([6, 6, 6], 0)


def test_a_timeline_drops_its_oldest_snapshots_and_keeps_its_peaks():
    timeline = ResourceTimeline(snapshots_max=10)
    for used in (1, 4, *[2] * 50):
        timeline.record({"gpu": used}, {"gpu": 4 - used}, event="acquired")
    assert len(timeline.snapshots) == 10
    assert timeline.peak_utilization() == {"gpu": 1.0}
    assert timeline.peak_allocated() == {"gpu": 4}


def test_a_pool_may_store_every_snapshot():
    pool = ResourcePool({"gpu": 1}, snapshots_max=None)
    for _ in range(SNAPSHOTS_MAX // 2 + 1):
        pool.acquire(gpu(1))
        pool.release(gpu(1))
    assert (len(pool.timeline.snapshots), pool.timeline.dropped) == (SNAPSHOTS_MAX + 2, 0)


def test_dropped_snapshots_are_logged_once(caplog):
    pool = ResourcePool({"gpu": 2}, snapshots_max=3)
    pool.acquire(gpu(2))
    pool.acquire(gpu(0))
    pool.release(gpu(1))
    assert not caplog.records
    pool.release(gpu(1))
    pool.release(gpu(0))
    assert (len(pool.timeline.snapshots), pool.timeline.dropped) == (3, 2)
    assert pool.timeline.peak_allocated() == {"gpu": 2}
    assert ["snapshots_max" in each.getMessage() for each in caplog.records] == [True]
    for wrong in (0, -1, 1.5, "many", True):
        with pytest.raises(WorkflowError, match="snapshots_max"):
            ResourcePool({}, snapshots_max=wrong)

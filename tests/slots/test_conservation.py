"""The laws of the flat pool under random operations, by one thread or by many.

Free and checked-out slots add up to an instance's total; no slot is handed out twice; a failed call
changes nothing. The model is a plain dict of each instance's slots.
"""

import contextlib
import random
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from benchmarks.slot_costs import churn
from moorage.slots import InvalidCheckin, ResourcePool, ResourceUnavailable, SlotsError

TYPES = ("cpus", "gpus", "mig")
HAS = {"cpus": [1, 2, 2.5], "gpus": [1, 0.3, 4], "mig": [1, 1]}
SPECIFICATION = {
    "resources": {
        kind: [{"id": str(n), "slots": slots} for n, slots in enumerate(listed)]
        for kind, listed in HAS.items()
    }
}
for _number in (0, 1):
    SPECIFICATION["resources"]["mig"][_number]["part_of"] = {"type": "gpus", "id": "2"}

MEMBER = st.fixed_dictionaries(
    {"type": st.sampled_from(TYPES), "slots": st.sampled_from([0.1, 0.3, 0.5, 1, 2, 3])}
)


class Pool(RuleBasedStateMachine):
    """Random checkouts and checkins of all kinds, compared with a simple model of the pool."""

    allocations = Bundle("allocations")

    def __init__(self) -> None:
        super().__init__()
        self.pool = ResourcePool(SPECIFICATION)
        self.held = []

    @rule(target=allocations, request=st.lists(MEMBER, max_size=4))
    def checkout(self, request):
        before = self.pool.getstate()
        possible = self.pool.accommodates(request)
        try:
            taken = self.pool.checkout(request)
        except ResourceUnavailable:
            assert self.pool.getstate() == before
            assert self.held or not possible
            return None
        assert possible
        wanted = [(member["type"], member["slots"]) for member in request]
        given = [(kind, row["slots"]) for kind, rows in taken.items() for row in rows]
        assert sorted(given) == sorted(wanted)
        self.held.append(taken)
        return taken

    @rule(allocation=consumes(allocations))
    def checkin(self, allocation):
        if allocation is None:
            return
        self.pool.checkin(allocation)
        self.held = [each for each in self.held if each is not allocation]
        before = self.pool.getstate()
        if allocation:  # An empty allocation can be checked in repeatedly.
            with pytest.raises(InvalidCheckin):
                self.pool.checkin(allocation)
        assert self.pool.getstate() == before

    @rule(allocation=allocations, kind=st.sampled_from(TYPES))
    def checkin_too_much(self, allocation, kind):
        if allocation is None:
            return
        before = self.pool.getstate()
        more = {**allocation, kind: [*allocation.get(kind, []), {"id": "0", "slots": 0.7}]}
        with pytest.raises(SlotsError):
            self.pool.checkin(more)
        assert self.pool.getstate() == before

    @invariant()
    def free_and_held_are_all_there_is(self):
        out = {(kind, n): 0 for kind, listed in HAS.items() for n in range(len(listed))}
        for each in self.held:
            for kind, rows in each.items():
                for row in rows:
                    out[kind, int(row["id"])] += round(row["slots"] * 10)
        for kind, rows in self.pool.resources.items():
            for number, row in enumerate(rows):
                total = round(HAS[kind][number] * 10)
                assert round(row["slots"] * 10) + out[kind, number] == total
                assert row["slots"] >= 0

    @invariant()
    def a_whole_and_its_parts_are_never_both_in_use(self):
        rows = self.pool.resources
        parts = [row["slots"] for row in rows["mig"]]
        assert rows["gpus"][2]["slots"] == 4 or parts == [1, 1]

    @invariant()
    def what_is_said_to_be_available_is(self):
        for kind in TYPES:
            before = self.pool.getstate()
            best = max((r["slots"] for r in before["resources"][kind]), default=0)
            most = sum(row["slots"] for row in before["resources"][kind])
            assert self.pool.slots_available(kind) <= most + 1e-9
            with pytest.raises(ResourceUnavailable):
                self.pool.checkout([{"type": kind, "slots": best + 1}])


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30)


def work_through(pool: ResourcePool, seed: int, operations: int, owners: dict) -> int:
    """Check out and in at random; return how many checkouts were granted."""
    draw = random.Random(seed)
    held: list = []
    granted = 0
    for _ in range(operations):
        if held and draw.random() < 0.5:
            taken = held.pop(draw.randrange(len(held)))
            for row in taken["gpus"]:
                assert owners.pop(row["id"]) == seed
            pool.checkin(taken)
            continue
        request = [{"type": "gpus"}] * draw.randint(1, 3) + [
            {"type": "cpus", "slots": draw.choice([0.1, 0.5, 1])}
        ]
        with contextlib.suppress(ResourceUnavailable):
            taken = pool.checkout(request)
            for row in taken["gpus"]:
                # Whole GPUs have one owner. A second owner would find the first one's name here.
                assert owners.setdefault(row["id"], seed) == seed
            held.append(taken)
            granted += 1
    for taken in held:
        for row in taken["gpus"]:
            assert owners.pop(row["id"]) == seed
        pool.checkin(taken)
    return granted


def test_threads_share_a_pool_without_their_own_lock():
    pool = ResourcePool({"resources": {"gpus": 8, "cpus": [{"id": "a", "slots": 6.4}]}})
    idle = pool.getstate()
    owners: dict = {}
    granted: list[int] = []
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        start.wait(30)
        try:
            granted.append(work_through(pool, seed, 400, owners))
        except BaseException as error:  # noqa: BLE001  # Shown by the assertion below.
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert failures == []
    assert sum(granted) > 0  # The number depends on the threads' timing.
    assert pool.getstate() == idle


@pytest.mark.parametrize(
    "operations",
    [20_000, pytest.param(1_000_000, marks=pytest.mark.heavy, id="a million")],
)
def test_random_operations_conserve_slots_exactly(operations):
    """`churn` raises an error unless every instance has exactly its original slots."""
    assert churn(operations, seed=42) > operations // 4

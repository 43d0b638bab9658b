"""Tests of best fit, and of transactions that return exactly the slots that they took."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.slots import (
    AllocationTransaction,
    Allocator,
    InvalidRequest,
    InvalidSpecification,
    Inventory,
    ResourcePool,
    ResourceUnavailable,
    SlotsError,
    UnknownResourceType,
)


def inventory(*slots) -> Inventory:
    return Inventory({"gpus": [{"id": str(n), "slots": each} for n, each in enumerate(slots)]})


def plainly(slots: list, wanted) -> int | None:
    """Return the position of the first sufficient instance in a stable sort, as documented."""
    order = sorted(range(len(slots)), key=lambda position: slots[position])
    return next((position for position in order if slots[position] >= wanted), None)


@given(
    st.lists(st.integers(0, 6), max_size=8), st.lists(st.integers(1, 6), min_size=1, max_size=12)
)
def test_best_fit_takes_the_instance_with_the_fewest_free_slots_that_are_enough(slots, requests):
    here = inventory(*slots)
    for wanted in requests:
        expected = plainly(slots, wanted)
        if expected is None:
            with pytest.raises(ResourceUnavailable, match=f"gpus .requested {wanted}, available"):
                Allocator().acquire(here, "gpus", wanted)
            continue
        taken = Allocator().acquire(here, "gpus", wanted)
        assert taken == {"id": str(expected), "slots": wanted}
        slots[expected] -= wanted
        assert [row["slots"] for row in here.resources["gpus"]] == slots
        assert here.slots_available("gpus") == sum(slots)


def test_a_successful_transaction_keeps_its_slots():
    here = inventory(2)
    with AllocationTransaction(here) as transaction:
        taken = Allocator().acquire(here, "gpus", 1)
        transaction.record("gpus", taken["id"], taken["slots"])
    assert here.slots_available("gpus") == 1
    for _ in range(2):  # A second rollback does nothing.
        transaction.rollback()
        assert here.slots_available("gpus") == 2
    assert transaction.deltas == []
    for name in "09":  # Slots that were not taken cannot be returned.
        transaction = AllocationTransaction(here)
        transaction.record("gpus", name, 1)
        with pytest.raises(ValueError, match=name):
            transaction.rollback()
    assert here.slots_available("gpus") == 2


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_transaction_returns_its_slots_and_raises_the_error(error):
    here = inventory(2, 0.5)
    before = here.resources

    def fail() -> None:
        with AllocationTransaction(here) as transaction:
            for slots in (0.5, 1, 0.25):
                taken = Allocator().acquire(here, "gpus", slots)
                transaction.record("gpus", taken["id"], taken["slots"])
            raise error

    with pytest.raises(error):
        fail()
    assert here.resources == before


def test_only_a_positive_number_of_slots_of_a_known_type_can_be_acquired():
    for slots in (0, -1, None, "1", float("nan"), True):
        with pytest.raises(InvalidRequest, match="above 0"):
            Allocator().acquire(inventory(2), "gpus", slots)
    with pytest.raises(UnknownResourceType, match="the pool has gpus"):
        Allocator().acquire(inventory(2), "apples", 1)


class WorstFit(Allocator):
    """Takes from the instance with the most free slots; documents allow a subclass to do so."""

    def acquire(self, inventory, rtype, slots):
        for instance in sorted(inventory.resources[rtype], key=lambda each: -each["slots"]):
            if slots <= instance["slots"]:
                acquired = copy.deepcopy(instance)
                acquired["slots"] = slots
                instance["slots"] -= slots
                return acquired
        raise ResourceUnavailable(rtype)


def two() -> dict:
    return {"gpus": [{"id": "a", "slots": 2}, {"id": "b", "slots": 4}]}


def test_a_custom_allocator_takes_slots_of_an_inventory():
    inventory = Inventory(two())

    def take_nine():
        with AllocationTransaction(inventory) as transaction:
            for _ in range(9):
                found = WorstFit().acquire(inventory, "gpus", 1)
                transaction.record("gpus", found["id"], found["slots"])

    with pytest.raises(ResourceUnavailable):
        take_nine()
    assert inventory.resources == two()
    assert WorstFit().acquire(inventory, "gpus", 3) == {"id": "b", "slots": 3}
    assert inventory.slots_available("gpus") == 3
    assert Allocator().acquire(inventory, "gpus", 1) == {"id": "b", "slots": 1}


def test_a_custom_allocator_takes_slots_of_a_pool():
    pool = ResourcePool({"resources": two()})
    pool.allocator = WorstFit()
    taken = pool.checkout([{"type": "gpus", "slots": 2}, {"type": "gpus", "slots": 2}])
    assert taken == {"gpus": [{"id": "b", "slots": 2}, {"id": "a", "slots": 2}]}
    before = pool.getstate()
    with pytest.raises(ResourceUnavailable):
        pool.checkout([{"type": "gpus"}, {"type": "gpus", "slots": 2}])
    assert pool.getstate() == before
    assert pool.accommodates([{"type": "gpus", "slots": 4}, {"type": "gpus", "slots": 2}])
    pool.checkin(taken)
    assert pool.getstate() == ResourcePool({"resources": two()}).getstate()
    copied = copy.deepcopy(pool)
    assert copied.checkout([{"type": "gpus"}])["gpus"][0]["id"] == "b"


BOOKINGS = {
    "says only": (lambda inventory, row: row, SlotsError),
    "takes more": (lambda inventory, row: take(inventory, 2) and row, SlotsError),
    "enlarges": (lambda inventory, row: take(inventory, -7) and row, SlotsError),
    "adds": (lambda inventory, row: add(inventory), SlotsError),
    "returns nothing": (lambda inventory, row: take(inventory, 1) and None, SlotsError),
    "fails": (lambda inventory, row: take(inventory, 1) and {}["gpus"], KeyError),
}


def take(inventory, slots):
    inventory.resources["gpus"][0]["slots"] -= slots
    return True


def add(inventory):
    inventory.resources = {"gpus": [{"id": "c", "slots": 9}]}
    return {"id": "c", "slots": 1}


@pytest.mark.parametrize(("book", "error"), BOOKINGS.values(), ids=BOOKINGS)
def test_an_allocator_that_books_wrongly_is_an_error_and_changes_nothing(book, error):
    class Wrong(Allocator):
        def acquire(self, inventory, rtype, slots):
            return book(inventory, {"id": "a", "slots": slots})

    pool = ResourcePool({"resources": two()})
    pool.allocator = Wrong()
    before = pool.getstate()
    with pytest.raises(error):
        pool.checkout([{"type": "gpus"}])
    assert pool.getstate() == before


def test_an_inventory_has_the_slots_that_are_assigned_to_its_resources():
    inventory = Inventory(two())
    inventory.resources["gpus"][0]["slots"] = 5
    inventory.resources["fpgas"] = [{"id": "f", "slots": 1}]
    assert (inventory.slots_available("gpus"), inventory.slots_available("fpgas")) == (9, 1)
    inventory.resources = {"cpus": 3}
    assert inventory.types == ["cpus"]
    for wrong in ({"cpus": [{"slots": 3}]}, {"gpus": [{"id": "0", "slots": -1}]}):
        with pytest.raises(InvalidSpecification):
            inventory.resources = wrong
    with pytest.raises(InvalidSpecification):
        inventory.resources["cpus"][0]["slots"] = -1
    assert inventory.resources == {"cpus": [{"id": str(n), "slots": 1} for n in range(3)]}

"""Best fit, and transactions that give back exactly what they took."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.slots import (
    AllocationTransaction,
    Allocator,
    InvalidRequest,
    Inventory,
    ResourceUnavailable,
    UnknownResourceType,
)


def inventory(*slots) -> Inventory:
    return Inventory({"gpus": [{"id": str(n), "slots": each} for n, each in enumerate(slots)]})


def plainly(slots: list, wanted) -> int | None:
    """Return the position that the documents' own words choose: a stable sort, the first enough."""
    order = sorted(range(len(slots)), key=lambda position: slots[position])
    return next((position for position in order if slots[position] >= wanted), None)


@given(
    st.lists(st.integers(0, 6), max_size=8), st.lists(st.integers(1, 6), min_size=1, max_size=12)
)
def test_the_best_fit_is_that_of_the_documents(slots, requests):
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


def test_a_transaction_that_ends_well_keeps_what_it_took():
    here = inventory(2)
    with AllocationTransaction(here) as transaction:
        taken = Allocator().acquire(here, "gpus", 1)
        transaction.record("gpus", taken["id"], taken["slots"])
    assert here.slots_available("gpus") == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_transaction_that_fails_gives_everything_back_and_lets_the_error_go_on(error):
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


def test_a_rollback_happens_once():
    here = inventory(2)
    transaction = AllocationTransaction(here)
    transaction.record("gpus", Allocator().acquire(here, "gpus", 1)["id"], 1)
    transaction.rollback()
    transaction.rollback()
    assert here.slots_available("gpus") == 2
    assert transaction.deltas == []


def test_what_was_never_taken_cannot_be_rolled_back():
    here = inventory(2)
    for name, slots in (("0", 1), ("9", 1)):
        transaction = AllocationTransaction(here)
        transaction.record("gpus", name, slots)
        with pytest.raises(ValueError, match=name):
            transaction.rollback()
    assert here.slots_available("gpus") == 2


@pytest.mark.parametrize("slots", [0, -1, None, "1", float("nan"), True])
def test_only_a_positive_number_of_slots_can_be_acquired(slots):
    with pytest.raises(InvalidRequest, match="above 0"):
        Allocator().acquire(inventory(2), "gpus", slots)


def test_an_unknown_type_is_an_error_of_its_own():
    with pytest.raises(UnknownResourceType, match="the pool has gpus"):
        Allocator().acquire(inventory(2), "apples", 1)

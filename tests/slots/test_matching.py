"""A matching gives each request a different candidate if that is possible."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.slots.nodes import matched


@given(
    st.dictionaries(st.sampled_from("abc"), st.lists(st.sampled_from("1234"), unique=True)),
    st.lists(st.sampled_from("abc"), max_size=4),
)
def test_matching_succeeds_exactly_if_an_assignment_exists(choices, wishes):
    found = matched(wishes, lambda wish: choices.get(wish, []))
    ways = permutations("1234", len(wishes))
    fits = [
        way
        for way in ways
        if all(each in choices.get(wish, []) for wish, each in zip(wishes, way, strict=True))
    ]
    assert (found is not None) == bool(fits)
    if found is not None:
        assert tuple(found) in fits


@pytest.mark.parametrize("length", [2, 3, 500])
def test_all_assignments_may_move_so_that_the_last_request_fits(length):
    """Each request but the last accepts two candidates; the last request accepts only "0"."""
    choices = {n: [str(n), str(n + 1)] for n in range(length)} | {length: ["0"]}
    assert matched(range(length + 1), choices.__getitem__) == [
        *(str(n + 1) for n in range(length)),
        "0",
    ]

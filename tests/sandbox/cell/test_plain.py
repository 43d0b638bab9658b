"""The fast check that a policy's value is plain JSON agrees with the slow check."""

import enum
import math

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moorage.sandbox.cell.plain import DEPTH_MAX, NotPlainError, to_plain, to_plain_and_packed


class Named(enum.StrEnum):
    ONE = "one"


class Text(str):
    __slots__ = ()


def outcome(make, value):
    try:
        return make(value)
    except (NotPlainError, UnicodeEncodeError) as error:
        return type(error), str(error)


def careful(value):
    plain = to_plain(value)
    return plain, msgspec.json.encode(plain)


KEYS = st.one_of(st.text(max_size=3), st.integers(0, 9), st.booleans())
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=2),
    st.sampled_from([Named.ONE, Text("t"), np.int64(3), np.float64(0.5), np.arange(2), {1}, 1j]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=6,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
@example({"cluster_id": "c", "node_id": "n", "gpus": ["0", "1"], "gpu_milli": 1000})
@example({"x": math.nan})
@example({"x": "\ud800"})
@example({"x": 1.0, "y": -0.0, "z": 10**300})
def test_the_fast_check_of_plain_values_agrees_with_the_full_one(value):
    quick, slow = outcome(to_plain_and_packed, value), outcome(careful, value)
    assert quick == slow
    assert repr(quick) == repr(slow)  # 1, 1.0 and True are equal, but not the same answer.


def test_the_fast_and_the_full_check_of_plain_values_limit_the_depth():
    value = {}
    for _ in range(DEPTH_MAX + 2):
        value = {"x": value}
    with pytest.raises(NotPlainError, match="nested deeper"):
        to_plain_and_packed(value)

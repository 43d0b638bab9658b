"""Tests of the encoding of documents, and of the values that cannot be stored."""

import pytest

from moorage.catalog.documents.encoding import snapshot
from moorage.model import Code
from moorage.protocol.faults import ServiceError


def test_a_snapshot_shares_no_objects_with_the_original():
    given = {"a": [1, {"b": (2,)}]}
    _, stored = snapshot(given)
    given["a"][1]["b"] = 3
    assert stored == {"a": [1, {"b": [2]}]}


@pytest.mark.parametrize("value", [object(), "\ud800", {1: object()}])
def test_values_that_are_not_json_are_refused(value):
    with pytest.raises(ServiceError) as caught:
        snapshot({"a": value})
    assert caught.value.code is Code.BAD_MESSAGE

"""`$set` and `$unset`, and what can be stored at all."""

import copy

import pytest

from moorage.catalog.documents.encoding import apply_change, snapshot
from moorage.model import Code
from moorage.protocol.faults import ServiceError

OLD = {"id": "c", "a": {"b": {"c": 1}, "list": [{"x": 1}, {"x": 2}]}, "tags": ["t"]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"id": "c", "new": 1}, {"id": "c", "new": 1}),
        ({"$set": {"status": "live"}}, {**OLD, "status": "live"}),
        ({"$set": {"p.q.r": 5}}, {**OLD, "p": {"q": {"r": 5}}}),
        ({"$unset": {"a": "", "tags": ""}}, {"id": "c"}),
        ({"$unset": ["a.b.nothing", "tags"]}, {"id": "c", "a": OLD["a"]}),
        ({"$set": {"n": 1}, "$unset": {"a": 1, "tags": 1}}, {"id": "c", "n": 1}),
    ],
)
def test_changes(change, expected):
    before = copy.deepcopy(OLD)
    assert apply_change(OLD, change) == expected
    assert before == OLD


def test_paths_reach_into_lists():
    changed = apply_change(OLD, {"$set": {"a.list.1.x": 9}})
    assert changed["a"]["list"] == [{"x": 1}, {"x": 9}]
    emptied = apply_change(OLD, {"$unset": {"a.list.0": "", "a.list.1.x": ""}})
    assert emptied["a"]["list"] == [None, {}]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ([], "body"),
        ({"$inc": {"a": 1}}, "$inc"),
        ({"$set": {"a": 1}, "plain": 2}, "plain"),
        ({"$set": 3}, "$set"),
        ({"$unset": "a"}, "$unset"),
        ({"$set": {"a..b": 1}}, "$set.a..b"),
        ({"$set": {"": 1}}, "$set."),
        ({"$set": {"a.$where": 1}}, "$set.a.$where"),
        ({"$set": {"a.list.2.x": 1}}, "$set.a.list.2.x"),
        ({"$set": {"a.list.²": 1}}, "$set.a.list.²"),
        ({"$set": {"a.list." + "9" * 5000: 1}}, "$set.a.list." + "9" * 5000),
        ({"$set": {"id.x": 1}}, "$set.id.x"),
        ({"$unset": [3]}, "$unset.3"),
        ({"$set": {".".join("a" * 33): 1}}, "$set." + ".".join("a" * 33)),
    ],
)
def test_wrong_changes_are_named(change, field):
    with pytest.raises(ServiceError) as caught:
        apply_change(OLD, change)
    assert (caught.value.code, caught.value.field) == (Code.BAD_MESSAGE, field)


def test_a_snapshot_shares_nothing_with_what_was_given():
    given = {"a": [1, {"b": (2,)}]}
    _, kept = snapshot(given)
    given["a"][1]["b"] = 3
    assert kept == {"a": [1, {"b": [2]}]}


@pytest.mark.parametrize("value", [object(), "\ud800", {1: object()}])
def test_what_is_no_json_is_refused(value):
    with pytest.raises(ServiceError) as caught:
        snapshot({"a": value})
    assert caught.value.code is Code.BAD_MESSAGE

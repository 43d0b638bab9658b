"""Tests of the changes that PUT requests make to stored documents."""

import copy

import pytest

from moorage.catalog.documents.updates import apply_change
from moorage.model import Code
from moorage.protocol.faults import ServiceError

OLD = {"id": "c", "a": {"b": {"c": 1}, "list": [{"x": 1}, {"x": 2}]}, "tags": ["t"]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"id": "c", "new": 1}, {**OLD, "new": 1}),
        ({}, OLD),
        ({"tags": ["new"], "a.b.c": 2}, {**OLD, "tags": ["new"], "a": {**OLD["a"], "b": {"c": 2}}}),
        ({"config.urlMap.x": "y"}, {**OLD, "config": {"urlMap": {"x": "y"}}}),
        ({"$set": {"n": 1}, "plain": 2}, {**OLD, "n": 1, "plain": 2}),
        ({"$push": {"tags": "u", "new": 1}}, {**OLD, "tags": ["t", "u"], "new": [1]}),
        ({"$push": {"tags": {"$each": ["u", "v"]}}}, {**OLD, "tags": ["t", "u", "v"]}),
        ({"$push": {"tags": {"a": 1}}}, {**OLD, "tags": ["t", {"a": 1}]}),
        ({"$inc": {"n": 2, "a.b.c": -3}}, {**OLD, "n": 2, "a": {**OLD["a"], "b": {"c": -2}}}),
        ({"$set": {"status": "live"}}, {**OLD, "status": "live"}),
        ({"$set": {"p.q.r": 5}}, {**OLD, "p": {"q": {"r": 5}}}),
        ({"$unset": {"a": "", "tags": ""}}, {"id": "c"}),
        ({"$unset": ["a.b.nothing", "tags"]}, {"id": "c", "a": OLD["a"]}),
        ({"$set": {"n": 1}, "$unset": {"a": 1, "tags": 1}}, {"id": "c", "n": 1}),
    ],
)
def test_update_operators_change_a_copy_of_the_document(change, expected):
    before = copy.deepcopy(OLD)
    assert apply_change(OLD, change) == expected
    assert before == OLD


def test_paths_of_update_operators_reach_into_lists():
    changed = apply_change(OLD, {"$set": {"a.list.1.x": 9}})
    assert changed["a"]["list"] == [{"x": 1}, {"x": 9}]
    emptied = apply_change(OLD, {"$unset": {"a.list.0": "", "a.list.1.x": ""}})
    assert emptied["a"]["list"] == [None, {}]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ([], "body"),
        ({"$rename": {"a": "b"}}, "$rename"),
        ({"$inc": {"a": 1}}, "$inc.a"),
        ({"$inc": {"n": "1"}}, "$inc.n"),
        ({"$inc": {"n": True}}, "$inc.n"),
        ({"$inc": 1}, "$inc"),
        ({"$push": {"a": 1}}, "$push.a"),
        ({"$push": {"tags": {"$each": 1}}}, "$push.tags.$each"),
        ({"a..b": 1}, "a..b"),
        ({"": 1}, ""),
        ({f"x.{n}": n for n in range(1001)}, "body"),
        ({"$unset": [f"x{n}" for n in range(1001)]}, "body"),
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
def test_the_error_names_the_field_of_a_wrong_change(change, field):
    with pytest.raises(ServiceError) as caught:
        apply_change(OLD, change)
    assert (caught.value.code, caught.value.field) == (Code.BAD_MESSAGE, field)

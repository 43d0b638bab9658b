"""Mongo-style filters: the documented operators with Mongo's meaning, and nothing else."""

import pytest

from moorage.catalog.filters import CONDITIONS_MAX, DEPTH_MAX, VALUES_MAX, compile_filter
from moorage.model import Code
from moorage.protocol.faults import ServiceError

CLUSTER = {
    "id": "c1",
    "status": "live",
    "tags": ["gpu", "eu"],
    "reputation": 80,
    "spot": True,
    "owner": None,
    "gpus": {"count": 4, "memory": 96},
    "nodes": {
        "nodeData": [
            {"id": "n0", "gpus": {"count": 1, "modelNames": ["L4"]}},
            {"id": "n1", "gpus": {"count": 3, "modelNames": ["A100", "L4"]}},
        ]
    },
    "storage": {"disks.free": 7},
}

MATCHING = [
    {},
    {"id": "c1"},
    {"id": "c1", "status": "live"},
    {"tags": "eu"},
    {"tags": ["gpu", "eu"]},
    {"tags": {"$in": ["us", "eu"]}},
    {"gpus": {"memory": 96, "count": 4}},
    {"gpus.count": 4},
    {"gpus.count": "4"},
    {"gpus.count": {"$gt": 3, "$lte": 4}},
    {"gpus.count": {"$gte": "4"}},
    {"reputation": {"$in": ["80"]}},
    {"nodes.nodeData.gpus.count": {"$gt": 2}},
    {"nodes.nodeData.gpus.modelNames": "A100"},
    {"nodes.nodeData.1.id": "n1"},
    {"nodes.nodeData.id": {"$nin": ["n7"]}},
    {"status": {"$ne": "down"}},
    {"status": {"$gte": "live"}},
    {"missing": {"$exists": False}},
    {"owner": {"$exists": True}},
    {"owner": None},
    {"missing": None},
    {"missing": {"$ne": 3}},
    {"spot": True},
    {"storage.disks.free": 7},
    {"$or": [{"id": "x"}, {"status": "live"}]},
    {"$and": [{"id": "c1"}, {"gpus.count": {"$not": {"$lt": 4}}}]},
    {"missing": {"$not": {"$gt": 3}}},
]
OTHERS = [
    {"id": "c2"},
    {"id": "c1", "status": "down"},
    {"tags": ["eu", "gpu"]},
    {"tags": {"$nin": ["eu"]}},
    {"gpus.count": {"$gt": 4}},
    {"gpus.count": {"$in": []}},
    {"gpus.count": "four"},
    {"gpus": {"count": 4}},
    {"nodes.nodeData.0.id": "n1"},
    {"spot": 1},
    {"reputation": True},
    {"status": {"$gt": 0}},
    {"missing": {"$gt": 3}},
    {"missing": {"$exists": True}},
    {"id": None},
    {"$or": [{"id": "x"}, {"id": "y"}]},
    {"gpus.count": {"$not": {"$eq": 4}}},
]


@pytest.mark.parametrize("query", MATCHING, ids=str)
def test_matching(query):
    assert compile_filter(query)(CLUSTER)


@pytest.mark.parametrize("query", OTHERS, ids=str)
def test_not_matching(query):
    assert not compile_filter(query)(CLUSTER)


@pytest.mark.parametrize(
    ("query", "path"),
    [
        ({"$where": "sleep(1000)"}, "$where"),
        ({"$nor": [{}]}, "$nor"),
        ({"$and": [{"id": 1}, {"$function": {}}]}, "$and[1].$function"),
        ({"id": {"$regex": ".*"}}, "id.$regex"),
        ({"id": {"$not": {"$where": "1"}}}, "id.$not.$where"),
        ({"id": {"$eq": 1, "plain": 2}}, "id.plain"),
    ],
)
def test_other_operators_are_refused_by_name_and_path(query, path):
    with pytest.raises(ServiceError) as caught:
        compile_filter(query)
    assert (caught.value.code, caught.value.field) == (Code.UNSUPPORTED, path)
    assert caught.value.expected.startswith("one of $")


@pytest.mark.parametrize(
    ("query", "path"),
    [
        (None, "query"),
        ([], "query"),
        ({"$and": []}, "$and"),
        ({"$or": [1]}, "$or[0]"),
        ({"id": {"$in": "c1"}}, "id.$in"),
        ({"id": {"$gt": None}}, "id.$gt"),
        ({"id": {"$not": 3}}, "id.$not"),
        ({"id": {"$in": list(range(VALUES_MAX + 1))}}, "id.$in"),
        ({".".join("a" * 33): 1}, ".".join("a" * 33)),
    ],
)
def test_malformed_conditions_are_named(query, path):
    with pytest.raises(ServiceError) as caught:
        compile_filter(query)
    assert (caught.value.code, caught.value.field) == (Code.BAD_MESSAGE, path)


def test_size_and_depth_are_bounded():
    deep = {"id": 1}
    inner = {"$eq": 1}
    for _ in range(DEPTH_MAX + 1):
        deep = {"$and": [deep]}
        inner = {"$not": inner}
    wide = {"$or": [{"id": 1}] * (CONDITIONS_MAX + 1)}
    for query in (deep, wide, {"id": inner}):
        with pytest.raises(ServiceError) as caught:
            compile_filter(query)
        assert caught.value.code is Code.TOO_LARGE


def test_as_much_as_is_allowed_is_served():
    deep = {"id": "c1"}
    for _ in range(DEPTH_MAX):
        deep = {"$and": [deep]}
    assert compile_filter(deep)(CLUSTER)
    assert compile_filter({"$or": [{"id": "c1"}] * CONDITIONS_MAX})(CLUSTER)

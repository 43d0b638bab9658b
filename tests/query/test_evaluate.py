"""Tests of conditions on one document, in the documented forms and in Mongo's forms."""

import pytest

from moorage.query import evaluate, parse_condition, parse_mongo, restrict
from moorage.query.conditions import EVERYTHING

CLUSTER = {
    "id": "c1",
    "status": "live",
    "tags": ["gpu", "eu"],
    "reputation": 80,
    "spot": True,
    "owner": None,
    "zip": "0420",
    "big": 2**53 + 1,
    "gpus": {"count": 4, "memory": 96},
    "nodes": {
        "nodeData": [
            {"id": "n0", "gpus": {"count": 1, "modelNames": ["L4"]}},
            {"id": "n1", "gpus": {"count": 3, "modelNames": ["A100", "L4"]}},
        ]
    },
    "storage": {"disks.free": 7},
    "matrix": [[1, 2], [3]],
}

MONGO_MATCHING = [
    {},
    {"id": "c1"},
    {"id": "c1", "status": "live"},
    {"tags": "eu"},
    {"tags": ["gpu", "eu"]},
    {"tags": {"$in": ["us", "eu"]}},
    {"tags": {"$in": [["gpu", "eu"]]}},
    {"gpus": {"memory": 96, "count": 4}},
    {"gpus.count": 4},
    {"gpus.count": 4.0},
    {"gpus.count": "4"},
    {"gpus.count": " 4.0 "},
    {"gpus.count": {"$gt": 3, "$lte": 4}},
    {"gpus.count": {"$gte": "4"}},
    {"reputation": {"$in": ["80"]}},
    {"nodes.nodeData.gpus.count": {"$gt": 2}},
    {"nodes.nodeData.gpus.modelNames": "A100"},
    {"nodes.nodeData.1.id": "n1"},
    {"tags.1": "eu"},
    {"matrix": [3]},
    {"matrix.0": 2},
    {"matrix": {"$in": [[1], [1, 2]]}},
    {"nodes.nodeData.id": {"$nin": ["n7"]}},
    {"status": {"$ne": "down"}},
    {"status": {"$gte": "live"}},
    {"missing": {"$exists": False}},
    {"owner": {"$exists": True}},
    {"owner": {"$exists": 1}},
    {"owner": None},
    {"missing": None},
    {"missing": {"$ne": 3}},
    {"spot": True},
    {"big": 2**53 + 1},
    {"big": {"$gt": 2**53}},
    {"storage.disks.free": 7},
    {"$or": [{"id": "x"}, {"status": "live"}]},
    {"$nor": [{"id": "x"}, {"status": "down"}]},
    {"$and": [{"id": "c1"}, {"gpus.count": {"$not": {"$lt": 4}}}]},
    {"missing": {"$not": {"$gt": 3}}},
    {"status": {"$regex": "^l.v"}},
    {"status": {"$regex": "LIVE", "$options": "i"}},
    {"tags": {"$regex": "u$"}},
]
MONGO_OTHERS = [
    {"id": "c2"},
    {"id": "c1", "status": "down"},
    {"tags": ["eu", "gpu"]},
    {"tags": {"$nin": ["eu"]}},
    {"gpus.count": {"$gt": 4}},
    {"gpus.count": {"$in": []}},
    {"gpus.count": "four"},
    {"gpus.count": "4_0"},
    {"gpus": {"count": 4}},
    {"gpus": {"count": True, "memory": 96}},
    {"nodes.nodeData.0.id": "n1"},
    {"tags.7": "eu"},
    {"matrix": 3},
    {"matrix": [1]},
    {"matrix.0": [1]},
    {"spot": 1},
    {"reputation": True},
    {"zip": 420},
    {"big": float(2**53)},
    {"status": {"$gt": 0}},
    {"missing": {"$gt": 3}},
    {"missing": {"$exists": True}},
    {"owner": {"$exists": 0}},
    {"id": None},
    {"$or": [{"id": "x"}, {"id": "y"}]},
    {"$nor": [{"id": "x"}, {"status": "live"}]},
    {"gpus.count": {"$not": {"$eq": 4}}},
    {"gpus.count": {"$regex": "4"}},
    {"status": {"$regex": "LIVE"}},
]


@pytest.mark.parametrize("query", MONGO_MATCHING, ids=str)
def test_mongo_filters_match_documents(query):
    assert evaluate(parse_mongo(query), CLUSTER) is True


@pytest.mark.parametrize("query", MONGO_OTHERS, ids=str)
def test_mongo_filters_reject_other_documents(query):
    assert evaluate(parse_mongo(query), CLUSTER) is False


def simple(variable, operator, value):
    return {"variable": variable, "operator": operator, "value": value}


@pytest.mark.parametrize(
    ("variable", "operator", "value", "holds"),
    [
        ("gpus.count", "==", 4, True),
        ("gpus.count", "==", "4", True),
        ("gpus.count", "!=", "4", False),
        ("gpus.count", "IN", ["3", "4"], True),
        ("gpus.count", ">", "3", True),
        ("gpus.count", ">", "4", False),
        ("gpus.count", ">=", 4, True),
        ("gpus.count", "<", "10", True),
        ("gpus.count", "<=", 3.5, False),
        ("zip", "<", "10", True),
        ("zip", "<", 500, False),
        ("tags", "IN", ["eu", "us"], True),
        ("tags", "IN", ["us"], False),
        ("tags", "!=", "eu", False),
        ("missing", "!=", "eu", True),
        ("missing", ">", 0, False),
        ("missing", "==", None, True),
        ("spot", ">", 0, False),
        ("status", "LIKE", "iv", True),
        ("status", "LIKE", "l*e", True),
        ("status", "LIKE", "*", True),
        ("status", "LIKE", "", True),
        ("status", "LIKE", "l.ve", False),
        ("status", "LIKE", "LIVE", False),
        ("status", "LIKE", "e*l", False),
        ("tags", "LIKE", "e*", True),
        ("reputation", "LIKE", "8*", False),
        ("missing", "LIKE", "*", False),
    ],
)
def test_each_documented_operator_matches_as_documented(variable, operator, value, holds):
    assert evaluate(parse_condition(simple(variable, operator, value)), CLUSTER) is holds


@pytest.mark.parametrize(
    ("logic", "truths", "holds"),
    [
        ("AND", [True, True], True),
        ("AND", [True, False], False),
        ("OR", [False, True], True),
        ("OR", [False, False], False),
        ("NOT", [False], True),
        ("NOT", [True], False),
    ],
)
def test_logical_operators_combine_conditions(logic, truths, holds):
    parts = [simple("id", "==", "c1" if truth else "c2") for truth in truths]
    query = {"logicalOperator": logic, "conditions": parts}
    assert evaluate(parse_condition(query), CLUSTER) is holds
    nested = {"logicalOperator": "NOT", "conditions": [query]}
    assert evaluate(parse_condition(nested), CLUSTER) is not holds


METRICS = {
    "clusterId": "c1",
    "cluster": {"vcpu": {"load5m": 2.0}, "gpu": {"totalFreeMem": 50}},
    "nodes": [
        {"id": "n0", "vcpu": {"load_15m": 1.0}, "gpus": [{"freeMem": 10}, {"freeMem": 20}]},
        {"id": "n1", "vcpu": {"load15m": 3.0}, "gpus": [{"freeMem": 30}, {"freeMem": None}]},
        {"id": "n2", "gpus": []},
    ],
}


@pytest.mark.parametrize(
    ("how", "target", "result"),
    [
        ("count", "nodes", 3),
        ("count", "nodes.gpus", 4),
        ("count", "nodes.id", 3),
        ("count", "missing", 0),
        ("sum", "nodes.gpus.freeMem", 60),
        ("avg", "nodes.gpus.freeMem", 20),
        ("min", "nodes.gpus.freeMem", 10),
        ("max", "node.gpus.freeMem", 30),
        ("sum", "missing", 0),
        ("avg", "nodes.vcpu.load_15m", 2),
        ("avg", "nodes.vcpu.load15m", 2),
        ("sum", "nodes.id", 0),
    ],
)
def test_aggregate_conditions_count_and_sum_values_of_lists(how, target, result):
    query = {"aggOperator": how, "target": target, "operator": "==", "value": result}
    assert evaluate(parse_condition(query), METRICS)
    assert evaluate(parse_condition({**query, "value": str(result)}), METRICS)
    assert not evaluate(parse_condition({**query, "value": result + 1}), METRICS)
    assert evaluate(parse_condition({**query, "operator": ">", "value": result - 1}), METRICS)
    assert evaluate(parse_condition({**query, "operator": "IN", "value": [result]}), METRICS)


@pytest.mark.parametrize("how", ["avg", "min", "max"])
@pytest.mark.parametrize(("operator", "holds"), [("==", False), ("<", False), ("!=", True)])
def test_the_average_of_no_values_does_not_exist(how, operator, holds):
    query = {"aggOperator": how, "target": "missing.at", "operator": operator, "value": 0}
    assert evaluate(parse_condition(query), METRICS) is holds


def test_a_value_under_two_spellings_is_summed_once():
    node = {"vcpu": {"load5m": 1, "load_5m": 1}, "disks": {"free": 4}, "disks.free": 4}
    document = {"nodes": [node], "node": [node], "a.b": {"c": 4}, "a.b.c": 4}
    for target, total in (
        ("nodes.vcpu.load5m", 1),
        ("node.vcpu.load_5m", 1),
        ("nodes.disks.free", 4),
        ("a.b.c", 4),
    ):
        query = {"aggOperator": "sum", "target": target, "operator": "==", "value": total}
        assert evaluate(parse_condition(query), document), target


def test_numbers_beyond_the_range_of_floats_cause_no_error():
    document = {"a": [10**400, 1.5], "b": [float("nan"), 2]}
    folded = {"aggOperator": "sum", "target": "a", "operator": ">", "value": 0}
    assert not evaluate(parse_condition(folded), document)
    assert evaluate(
        parse_condition({**folded, "target": "b", "operator": "==", "value": 2}), document
    )
    assert evaluate(parse_condition(simple("a", ">", 1e308)), document)
    assert not evaluate(parse_condition(simple("b", "<", 2)), document)


def test_results_of_another_query_restrict_documents_by_their_id():
    condition = restrict(EVERYTHING, "id", ["c0", "c1"])
    assert evaluate(condition, CLUSTER)
    assert not evaluate(restrict(condition, "id", []), CLUSTER)
    assert not evaluate(condition, {"id": "c2"})

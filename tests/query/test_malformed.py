"""Each of hundreds of wrong queries is refused at the place of its fault.

Most are valid queries with one fault at a known place; the others are written by hand.
"""

import copy
import itertools

import pytest

from moorage.model import Code
from moorage.query import QueryError, limits, parse_filter, parse_mongo, parse_search
from moorage.query.parse import OPERATORS

ABSENT = object()


def leaf(operator="==", value=1):
    return {"variable": "gpus.count", "operator": operator, "value": value}


FOLD = {"aggOperator": "avg", "target": "nodes.gpu.freeMem", "operator": ">", "value": 10}
MONGO = {
    "gpus.count": {"$gte": 1, "$not": {"$in": [3]}},
    "$or": [{"status": "live"}, {"id": {"$regex": "^c", "$options": "i"}}],
}
CLUSTER = {
    "logicalOperator": "AND",
    "conditions": [
        leaf(">", "3"),
        {"logicalOperator": "OR", "conditions": [leaf("IN", [1]), leaf("LIKE", "a*")]},
        {"logicalOperator": "NOT", "conditions": [leaf("!=", None)]},
    ],
}
VALID = [
    {"matchType": "cluster", "filter": {"clusterQuery": CLUSTER, "clusterMetricsQuery": FOLD}},
    {"matchType": "block", "filter": {"clusterQuery": MONGO, "blockQuery": leaf("<=", 2)}},
    {"header": {}, "body": {"values": {"matchType": "policy", "filter": {"policyQuery": leaf()}}}},
]


def spoil(node):
    """Yield each possible fault of an object or list: its place, and the faulty value."""
    if isinstance(node, list):
        return
    if "variable" in node:
        for key in node:
            yield key, ABSENT
        yield "more", 1
        for path in ("", "a..b", ".a", "a.", "$where", "a.$b", 5, None, "a" * 300, "a." * 20 + "a"):
            yield "variable", path
    if "aggOperator" in node:
        for key in node:
            yield key, ABSENT
        for key, wrong in itertools.product(
            ("aggOperator", "operator"), ("median", 5, None, "LIKE")
        ):
            yield key, wrong
        for wrong in ("many", None, True, [], {}, float("nan")):
            yield "value", wrong
        yield "variable", "a"
    if "operator" in node:
        for wrong in ("~", "=", "in", "", 5, None, [], {}):
            yield "operator", wrong
    if node.get("operator") in {">", "<="}:
        for wrong in (None, True, [], {}, float("inf"), "x" * 5000):
            yield "value", wrong
    if node.get("operator") == "IN":
        for wrong in ("a", 1, None, {}):
            yield "value", wrong
    if node.get("operator") == "LIKE":
        for wrong in (5, None, [], {}, "x" * 300):
            yield "value", wrong
    if "logicalOperator" in node:
        for key in node:
            yield key, ABSENT
        for wrong in ("XOR", "and", 5, None):
            yield "logicalOperator", wrong
        for wrong in ([], {}, "x", None, 5):
            yield "conditions", wrong
        yield "value", 3
    if "matchType" in node:
        for wrong in ("exact", "Cluster", "", 5, None, []):
            yield "matchType", wrong
        yield "sort", 1
        yield "filter", []
        yield "filter", ABSENT
        yield "filter", "x"
    if "$gte" in node:
        for operator in ("$where", "$function", "$elemMatch", "plain", "$gte "):
            yield operator, 1
        for wrong in (None, True, [1], {}):
            yield "$gte", wrong
        for wrong in (3, {}, [], None):
            yield "$not", wrong
    if "$in" in node:
        for wrong in ("c1", None, {}, 5):
            yield "$in", wrong
    if "$or" in node:
        for wrong in ([], {}, 5, None):
            yield "$or", wrong
        for operator in ("$where", "$expr", "$text", "$xor"):
            yield operator, 1
    if "$regex" in node:
        for wrong in (5, None, "(", "a" * 300, r"\1"):
            yield "$regex", wrong
        for wrong in ("m", "ii", 5, None):
            yield "$options", wrong


def places(node, at="", keys=()):
    """Yield every object and list in a body: its place, and the keys that lead to it."""
    yield at, keys, node
    pairs = enumerate(node) if isinstance(node, list) else node.items()
    for key, part in pairs:
        if isinstance(part, (dict, list)):
            below = f"{at}[{key}]" if isinstance(node, list) else f"{at}.{key}" if at else key
            yield from places(part, below, (*keys, key))


def mutants():
    for body in VALID:
        for at, keys, node in places(body):
            for key, wrong in spoil(node):
                mutant = copy.deepcopy(body)
                target = mutant
                for step in keys:
                    target = target[step]
                if wrong is ABSENT:
                    del target[key]
                else:
                    target[key] = wrong
                yield mutant, f"{at}.{key}" if at else key
            # Conditions and filters in a list are objects.
            if isinstance(node, list) and isinstance(node[0], dict):
                mutant = copy.deepcopy(body)
                target = mutant
                for step in keys:
                    target = target[step]
                target[0] = 5
                yield mutant, f"{at}[0]"


def refusal(read, *arguments):
    with pytest.raises(QueryError) as caught:
        read(*arguments)
    error = caught.value
    assert error.expected
    assert error.reason
    assert str(error).startswith(f"{error.path}: ")
    assert error.code in {Code.BAD_MESSAGE, Code.UNSUPPORTED, Code.TOO_LARGE}
    assert len(str(error)) < 1000
    return error


MUTANTS = list(mutants())


def test_more_than_two_hundred_malformed_queries_are_tried():
    assert len({(place, str(body)) for body, place in MUTANTS}) > 200


def test_the_queries_of_the_test_are_valid_before_they_are_changed():
    assert [parse_filter(body).match_type for body in VALID] == ["cluster", "block", "policy"]


@pytest.mark.parametrize(("body", "place"), MUTANTS, ids=[place for _, place in MUTANTS])
def test_a_changed_query_is_refused_at_the_place_of_the_change(body, place):
    assert refusal(parse_filter, body).path == place


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (None, "body"),
        ([], "body"),
        ({}, "matchType"),
        ({"matchType": "cluster"}, "filter"),
        ({"filter": {}}, "matchType"),
        ({"filter": {"clusterQuery": {}, "vdagQuery": {}}}, "matchType"),
        ({"matchType": None, "filter": {"clusterQuery": {}}}, "matchType"),
        ({"body": {"matchType": "cluster", "filter": {}}}, "body.values"),
        ({"body": []}, "body"),
        ({"body": {"values": 5}}, "body.values"),
        ({"matchType": "cluster", "filter": {}, "body": {}}, "matchType"),
        ({"matchType": "cluster", "filter": {"blockQuery": leaf()}}, "filter.blockQuery"),
        ({"matchType": "cluster", "filter": {"clusterquery": leaf()}}, "filter.clusterquery"),
        ({"matchType": "cluster", "filter": {"clusterQuery": "x"}}, "filter.clusterQuery"),
        ({"matchType": "cluster", "filter": {"clusterQuery": [leaf()]}}, "filter.clusterQuery"),
        (
            {"matchType": "cluster", "filter": {"clusterQuery": {"operator": "==", "value": 1}}},
            "filter.clusterQuery.variable",
        ),
        (
            {"matchType": "cluster", "filter": {"clusterQuery": {"id": {"$options": "i"}}}},
            "filter.clusterQuery.id.$regex",
        ),
        (
            {"matchType": "vdag", "filter": {"vdagQuery": {"conditions": [leaf()]}}},
            "filter.vdagQuery.logicalOperator",
        ),
        (
            {"matchType": "vdag", "filter": {"vdagQuery": {"a": {1: 2, "$in": []}}}},
            "filter.vdagQuery.a",
        ),
    ],
)
def test_a_malformed_filter_is_refused_at_the_place_of_the_fault(body, place):
    assert refusal(parse_filter, body).path == place


POLICY = "rankingPolicyRule"
RULE = f"{POLICY}.parameters.filterRule"
ANY_BLOCK = {"matchType": "block", "filter": {}}


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({}, "matchType"),
        ({"matchType": "cluster"}, POLICY),
        ({"matchType": "cluster", POLICY: 5}, POLICY),
        ({"matchType": "cluster", POLICY: {"values": 5}}, f"{POLICY}.values"),
        ({"matchType": "cluster", POLICY: {"values": {}, "settings": {}}}, f"{POLICY}.settings"),
        ({"matchType": "cluster", POLICY: {"uri": "a:1-b"}}, f"{POLICY}.uri"),
        ({"matchType": "cluster", POLICY: {"policyRuleURI": 5}}, f"{POLICY}.policyRuleURI"),
        ({"matchType": "cluster", POLICY: {"policyCodePath": "/x"}}, f"{POLICY}.policyCodePath"),
        ({"matchType": "cluster", POLICY: {"settings": []}}, f"{POLICY}.settings"),
        ({"matchType": "cluster", POLICY: {"parameters": []}}, f"{POLICY}.parameters"),
        ({"matchType": "cluster", POLICY: {}}, f"{POLICY}.parameters.like"),
        (
            {"matchType": "cluster", POLICY: {"parameters": {"like": 5}}},
            f"{POLICY}.parameters.like",
        ),
        (
            {"matchType": "cluster", POLICY: {"parameters": {"like": {}}}},
            f"{POLICY}.parameters.like",
        ),
        ({"matchType": "cluster", "filter": {}, POLICY: {}}, "filter"),
        ({POLICY: {"parameters": {"filterRule": {"filter": {}}}}}, f"{RULE}.matchType"),
        ({"matchType": "exact", POLICY: {"parameters": {"filterRule": ANY_BLOCK}}}, "matchType"),
    ],
)
def test_a_malformed_search_is_refused_at_the_place_of_the_fault(body, place):
    assert refusal(parse_search, body).path == place


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({"return": 0}, "return"),
        ({"return": 2.5}, "return"),
        ({"return": "many"}, "return"),
        ({"return": True}, "return"),
        ({"return": limits.RETURN_MAX + 1}, "return"),
        ({"weights": []}, "weights"),
        ({"weights": {}}, "weights"),
        ({"weights": {"memory": 0}}, "weights"),
        ({"weights": {"memory": -1}}, "weights.memory"),
        ({"weights": {"a..b": 1}}, "weights.a..b"),
        ({"weights": {f"a{n}": 1 for n in range(33)}}, "weights.a32"),
        ({"filterRule": []}, "filterRule"),
        ({"filterRule": {"matchType": "exact", "filter": {}}}, "filterRule.matchType"),
        (
            {"filterRule": {"matchType": "cluster", "filter": {"clusterQuery": {"$x": 1}}}},
            "filterRule.filter.clusterQuery.$x",
        ),
    ],
)
@pytest.mark.parametrize("values", [False, True])
def test_malformed_parameters_are_refused_at_the_place_of_the_fault(parameters, place, values):
    rule = {"parameters": {"like": "c1", **parameters}}
    body = {"matchType": "cluster", POLICY: {"values": rule} if values else rule}
    at = f"search.{POLICY}.{'values.' * values}parameters.{place}"
    assert refusal(parse_search, body, "search").path == at


def nest(levels):
    query = leaf()
    for _ in range(levels):
        query = {"logicalOperator": "AND", "conditions": [query]}
    return query


def deep(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


def alternating(levels):
    condition = {"$eq": 1}
    for _ in range(levels):
        condition = {"$not": condition}
    return {"a": condition}


PAST = [
    (nest(limits.DEPTH_MAX + 1), ".conditions[0]" * limits.DEPTH_MAX),
    (alternating(limits.DEPTH_MAX + 1), ".a" + ".$not" * (limits.DEPTH_MAX + 1)),
    (leaf("==", deep(limits.DEPTH_MAX + 1)), ".value" + "[0]" * limits.DEPTH_MAX),
    ({"$or": [{"id": 1}] * limits.CONDITIONS_MAX + [{"id": 1}]}, ".$or"),
    (
        {"$and": [{"$or": [{"id": 1}] * limits.CONDITIONS_MAX}, {"id": 1}]},
        ".$and[1].id",
    ),
    ({f"f{n}": 1 for n in range(limits.PATHS_MAX + 1)}, f".f{limits.PATHS_MAX}"),
    (leaf("IN", [1] * (limits.VALUES_MAX + 1)), ".value"),
    ({"a": {"$in": [1] * limits.VALUES_MAX}, "b": 1}, ".b"),
    (
        {"$or": [{"a": {"$regex": "x"}}] * (limits.EXPRESSIONS_MAX + 1)},
        f".$or[{limits.EXPRESSIONS_MAX}].a.$regex",
    ),
    ({"k" * 10_000: 1}, "." + "k" * limits.PATH_CHARS_MAX + "…"),
]


@pytest.mark.parametrize(("query", "place"), PAST, ids=range(len(PAST)))
def test_a_query_beyond_a_limit_is_refused_with_place_and_limit(query, place):
    body = {"matchType": "cluster", "filter": {"clusterQuery": query}}
    error = refusal(parse_filter, body)
    assert error.path == f"filter.clusterQuery{place}"
    assert error.code is Code.TOO_LARGE
    assert any(character.isdigit() for character in error.expected)


def test_queries_that_reach_the_limits_exactly_are_accepted():
    wide = {"$or": [{f"f{n % limits.PATHS_MAX}": 1} for n in range(limits.CONDITIONS_MAX)]}
    patterns = {"$or": [{"a": {"$regex": "x"}}] * limits.EXPRESSIONS_MAX}
    many = leaf("IN", [1] * limits.VALUES_MAX)
    deepest = (alternating(limits.DEPTH_MAX), leaf("==", deep(limits.DEPTH_MAX)))
    for query in (nest(limits.DEPTH_MAX), *deepest, wide, many, patterns):
        assert parse_filter({"matchType": "cluster", "filter": {"clusterQuery": query}})


def test_errors_name_the_accepted_values():
    for body in ({"matchType": "exact", "filter": {}}, {"filter": {}}):
        # The searchable kinds for which this server stores documents.
        assert refusal(parse_filter, body).expected == "one of cluster, block, policy"
    body = {"matchType": "cluster", "filter": {"clusterQuery": leaf("~")}}
    assert refusal(parse_filter, body).expected == "one of " + ", ".join(OPERATORS)
    alone = refusal(parse_mongo, {"clusterId": "$in"})
    assert (alone.path, '{"$in": …}' in (alone.expected or "")) == ("query.clusterId", True)
    script = refusal(parse_mongo, {"$where": "sleep(1000)"})
    assert (script.code, "run code" in script.reason) == (Code.UNSUPPORTED, True)

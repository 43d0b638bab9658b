"""Tests of the reader of bodies of filters and searches, in each of their forms."""

import pytest

from moorage.query import COMPANIONS, EVERYTHING, parse_condition, parse_filter, parse_search
from moorage.query.limits import RETURN_MAX

GPUS = {"variable": "gpus.count", "operator": ">", "value": "1"}
FREE = {"aggOperator": "sum", "target": "nodes.gpu.totalFreeMem", "operator": ">", "value": 1}
FILTER = {"matchType": "cluster", "filter": {"clusterQuery": GPUS, "clusterMetricsQuery": FREE}}


@pytest.mark.parametrize(
    "body",
    [
        FILTER,
        {"body": {"values": FILTER}},
        {"header": {"templateUri": "x"}, "body": {"values": FILTER}},
    ],
)
def test_a_filter_is_parsed(body):
    read = parse_filter(body)
    assert read.match_type == "cluster"
    assert read.condition == parse_condition(GPUS)
    assert read.companions == {"clusterMetrics": parse_condition(FREE)}


@pytest.mark.parametrize("match_type", COMPANIONS)
def test_every_match_type_has_its_required_queries(match_type):
    kinds = (match_type, *COMPANIONS[match_type])
    queries = {f"{kind}Query": {"kind": kind} for kind in kinds}
    read = parse_filter({"matchType": match_type, "filter": queries})
    assert read.condition == parse_condition({"kind": match_type})
    # Queries are listed in the order of their use, not of the body.
    assert tuple(read.companions) == COMPANIONS[match_type]


@pytest.mark.parametrize(
    ("kinds", "meant"),
    [
        *(((kind,), kind) for kind in COMPANIONS),
        (("clusterMetrics",), "cluster"),
        (("cluster", "clusterMetrics"), "cluster"),
        (("cluster", "block"), "block"),
        (("cluster", "blockMetrics"), "block"),
        (("vdagMetrics",), "vdag"),
    ],
)
def test_the_match_type_follows_from_the_queries(kinds, meant):
    body = {"filter": {f"{kind}Query": {"kind": kind} for kind in kinds}}
    assert parse_filter(body) == parse_filter({"matchType": meant, **body})
    rule = {"parameters": {"filterRule": body, "like": "x"}}
    assert parse_search({"rankingPolicyRule": rule}).match_type == meant


@pytest.mark.parametrize("nothing", [{}, None, {"clusterQuery": {}}, {"clusterMetricsQuery": None}])
def test_an_empty_filter_matches_all_documents(nothing):
    read = parse_filter({"matchType": "cluster", "filter": nothing})
    assert (read.condition, read.companions) == (EVERYTHING, {})


POLICY = {
    "policyRuleURI": "near:1.0-stable",
    "settings": {"depth": 3},
    "parameters": {"filterRule": FILTER, "return": "5", "mine": [1]},
}


@pytest.mark.parametrize(
    "rule", [POLICY, {"values": {**POLICY, "executionMode": "local", "policyCodePath": ""}}]
)
@pytest.mark.parametrize("envelope", [False, True])
def test_a_search_with_a_policy_is_parsed(rule, envelope):
    body = {"matchType": "cluster", "rankingPolicyRule": rule}
    read = parse_search({"header": {}, "body": {"values": body}} if envelope else body)
    assert (read.match_type, read.policy_rule_uri, read.limit) == ("cluster", "near:1.0-stable", 5)
    assert read.filter == parse_filter(FILTER)
    assert (read.settings, read.parameters) == (POLICY["settings"], POLICY["parameters"])


@pytest.mark.parametrize("outer", [{}, {"matchType": "cluster"}, {"matchType": "block"}])
def test_only_documents_of_the_filter_rule_are_ranked(outer):
    rule = {"filterRule": {"matchType": "block", "filter": {}}, "like": "b"}
    read = parse_search({**outer, "rankingPolicyRule": {"parameters": rule}})
    assert (read.match_type, read.filter.match_type) == ("block", "block")


@pytest.mark.parametrize("like", ["c1", {"gpus": {"count": 8}}])
def test_a_similarity_search_is_parsed(like):
    parameters = {"like": like, "weights": {"gpus.count": "2", "tags": 0}}
    read = parse_search({"matchType": "cluster", "rankingPolicyRule": {"parameters": parameters}})
    assert (read.policy_rule_uri, read.filter, read.limit) == ("", None, RETURN_MAX)
    assert (read.like, read.weights) == (like, {"gpus.count": 2.0, "tags": 0.0})


def test_the_fields_like_and_weights_are_not_checked_if_a_policy_ranks():
    rule = {"policyRuleURI": "near:1.0-stable", "parameters": {"like": 5, "weights": "heavy"}}
    read = parse_search({"matchType": "cluster", "rankingPolicyRule": rule})
    assert read.parameters == rule["parameters"]
    assert (read.like, read.weights) == ("", None)

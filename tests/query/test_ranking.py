"""Tests of the built-in ranking by Gower's distance: ties by id, and no NaN."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.query import DEFAULT_WEIGHTS, DocumentIndex, QueryError, nearest


def cluster(count, memory, tags, **more):
    return {"gpus": {"count": count, "memory": memory}, "tags": tags, **more}


CLUSTERS = {
    "a": cluster(8, 100, ["eu", "prod"]),
    "b": cluster(8, 100, ["eu"]),
    "c": cluster(16, 300, ["us"]),
    "d": cluster(0, 100, []),
}


def test_the_distance_equals_a_manual_calculation():
    weights = {"gpus.count": 2, "tags": 1, "memory": 5}
    # Counts have a range of 16; no document has `memory`, so it does not count.
    expected = {"b": (0 + 0.5) / 3, "d": (2 * 8 / 16 + 1) / 3, "c": (2 * 8 / 16 + 1) / 3}
    found = nearest(CLUSTERS, "a", weights)
    assert [each for each, _ in found] == ["b", "c", "d"]
    assert dict(found) == pytest.approx(expected)


def test_a_part_of_a_document_can_be_the_reference():
    found = nearest(CLUSTERS, {"gpus": {"count": 15}})
    assert [each for each, _ in found] == ["c", "a", "b", "d"]
    assert found[0][1] == pytest.approx(1 / 16)


def test_the_range_of_values_for_the_distance_includes_the_reference():
    found = dict(nearest(CLUSTERS, {"gpus": {"count": 32}}))
    assert found == pytest.approx({"c": 0.5, "a": 0.75, "b": 0.75, "d": 1.0})


def test_a_ranking_returns_at_most_k_documents():
    assert [each for each, _ in nearest(CLUSTERS, "a", k=1)] == ["b"]
    assert nearest(CLUSTERS, "a", k=0) == []
    assert len(nearest(CLUSTERS, "a", k=99)) == 3


def test_a_missing_value_counts_as_the_largest_distance():
    documents = {"x": {"memory": 5}, "y": {"tags": ["eu"]}, "z": {"memory": "5"}}
    assert dict(nearest(documents, {"memory": 5})) == {"x": 0.0, "y": 1.0, "z": 1.0}
    assert dict(nearest(documents, {"tags": ["eu"]})) == {"x": 1.0, "y": 0.0, "z": 1.0}


def test_many_numbers_at_a_path_are_compared_by_their_mean():
    documents = {"x": {"n": [1, 3]}, "y": {"n": 2}, "z": {"n": [4]}}
    assert dict(nearest(documents, {"n": 2}, {"n": 1})) == {"x": 0.0, "y": 0.0, "z": 1.0}


def test_without_paths_to_compare_every_distance_is_zero():
    assert nearest(CLUSTERS, {}) == [(each, 0.0) for each in "abcd"]
    assert nearest({}, {"memory": 1}) == []
    assert nearest(CLUSTERS, "a", {"tags": 0.0}) == [(each, 0.0) for each in "bcd"]


def test_an_unknown_reference_is_refused():
    with pytest.raises(QueryError) as caught:
        nearest(CLUSTERS, "nobody")
    assert caught.value.path == "like"
    assert "'nobody'" in caught.value.reason


def test_an_index_and_its_documents_give_equal_rankings():
    index = DocumentIndex()
    for key, document in CLUSTERS.items():
        index.put(key, document)
    assert nearest(index, "b") == nearest(CLUSTERS, "b")
    index.put("c", CLUSTERS["b"])
    assert nearest(index, "b", k=1) == [("c", 0.0)]


NUMBERS = st.sampled_from(
    [0, 1, -1, 0.5, 1e308, -1e308, 5e-324, 10**30, 10**400, float("inf"), float("nan"), True]
)
FIELD = NUMBERS | st.sampled_from(["eu", "us", None, [], ["eu", 1], {"x": 1}, [1e308, 1e308]])
ANY = st.fixed_dictionaries({}, optional={"memory": FIELD, "tags": FIELD, "reputation": FIELD})


@settings(max_examples=200)
@given(st.dictionaries(st.text("abc", max_size=2), ANY, max_size=6), ANY)
def test_every_distance_is_from_0_to_1_and_ties_are_ordered_by_id(documents, like):
    weights = {"memory": 1e308, "tags": 1e308, "reputation": 1e-300}
    for found in (nearest(documents, like), nearest(documents, like, weights)):
        assert sorted(each for each, _ in found) == sorted(documents)
        assert all(0.0 <= distance <= 1.0 and not math.isnan(distance) for _, distance in found)
        assert found == sorted(found, key=lambda pair: (pair[1], pair[0]))


def test_the_default_paths_of_the_ranking_are_paths_of_the_cluster_document():
    document = {
        "regionId": "eu",
        "nodes": {"count": 1, "nodeData": [{"gpus": {"modelNames": ["L4"]}}]},
        "gpus": {"count": 8, "memory": 8},
        "vcpus": {"count": 8},
        "memory": 8,
        "storage": {"size": 8},
        "network": {"txBandwidth": 8, "rxBandwidth": 8},
        "tags": ["eu"],
        "reputation": 8,
    }
    for path in DEFAULT_WEIGHTS:
        assert nearest({"x": {}, "y": document}, document, {path: 1.0}) == [("y", 0.0), ("x", 1.0)]

"""Tests of aggregation pipelines: examples of each stage, places in refusals, and bounds."""

import pytest

from moorage.model import Code
from moorage.query import QueryError, parse_page, parse_pipeline
from moorage.query.limits import DEPTH_MAX, ROWS_MAX, STAGES_MAX

DOCUMENTS = [
    {"clusterId": "a", "site": "eu", "nodes": [{"id": "a0", "free": 5}, {"id": "a1", "free": 1}]},
    {"clusterId": "b", "site": "us", "nodes": [{"id": "b0", "free": 9}]},
    {"clusterId": "c", "site": "eu", "nodes": []},
    {"clusterId": "d", "site": None},
]


def run(*stages):
    return parse_pipeline(list(stages)).run(DOCUMENTS)


def ids(rows):
    return [row["clusterId"] for row in rows]


def test_an_empty_pipeline_changes_nothing():
    assert run() == DOCUMENTS


def test_match_sort_skip_and_limit_are_applied_in_order():
    assert ids(run({"$match": {"site": "eu"}})) == ["a", "c"]
    assert ids(run({"$sort": {"site": -1, "clusterId": -1}})) == ["b", "c", "a", "d"]
    assert ids(run({"$sort": {"site": 1}})) == ["d", "a", "c", "b"]
    assert ids(run({"$skip": 1}, {"$limit": 2})) == ["b", "c"]
    assert run({"$match": {"site": "eu"}}, {"$count": "sites"}) == [{"sites": 2}]
    assert run({"$match": {"site": "nowhere"}}, {"$count": "sites"}) == []


def test_the_stage_unwind_splits_lists_and_group_merges_documents():
    rows = run({"$unwind": "$nodes"}, {"$sort": {"nodes.free": -1}})
    assert [row["nodes"]["id"] for row in rows] == ["b0", "a0", "a1"]
    stored = run({"$unwind": {"path": "$nodes", "preserveNullAndEmptyArrays": True}})
    assert ids(stored) == ["a", "a", "b", "c", "d"]
    grouped = run(
        {
            "$group": {
                "_id": "$site",
                "free": {"$sum": "$nodes.free"},
                "mean": {"$avg": "$nodes.free"},
                "most": {"$max": "$nodes.free"},
                "least": {"$min": "$nodes.free"},
                "first": {"$first": "$clusterId"},
                "last": {"$last": "$clusterId"},
                "all": {"$push": "$clusterId"},
                "sites": {"$addToSet": "$site"},
                "one": {"$sum": 1},
                "count": {"$count": {}},
            }
        }
    )
    assert grouped[0] == {
        "_id": "eu",
        "free": 6,
        "mean": 3.0,
        "most": 5,
        "least": 1,
        "first": "a",
        "last": "c",
        "all": ["a", "c"],
        "sites": ["eu"],
        "one": 2,
        "count": 2,
    }
    assert grouped[2]["mean"] is None
    assert run({"$group": {"_id": None, "n": {"$sum": 1}}}) == [{"_id": None, "n": 4}]
    both = run({"$group": {"_id": {"where": "$site"}, "n": {"$count": {}}}})
    assert both[0] == {"_id": {"where": "eu"}, "n": 2}


def test_the_stage_project_selects_and_computes_fields():
    rows = run({"$project": {"_id": 0, "clusterId": 1, "free": "$nodes.free", "at.site": "$site"}})
    assert rows[0] == {"clusterId": "a", "free": [5, 1], "at": {"site": "eu"}}
    assert rows[3] == {"clusterId": "d"}
    assert DOCUMENTS[0]["nodes"][0] == {"id": "a0", "free": 5}


@pytest.mark.parametrize(
    ("stages", "place", "code"),
    [
        ({}, "pipeline", Code.BAD_MESSAGE),
        ([7], "pipeline[0]", Code.BAD_MESSAGE),
        ([{}], "pipeline[0]", Code.BAD_MESSAGE),
        ([{"$match": {}, "$limit": 1}], "pipeline[0]", Code.BAD_MESSAGE),
        ([{"$lookup": {}}], "pipeline[0].$lookup", Code.UNSUPPORTED),
        ([{"$out": "x"}], "pipeline[0].$out", Code.UNSUPPORTED),
        ([{"$match": {"$where": "1"}}], "pipeline[0].$match.$where", Code.UNSUPPORTED),
        ([{"$match": {}}, {"$limit": 0}], "pipeline[1].$limit", Code.BAD_MESSAGE),
        ([{"$skip": -1}], "pipeline[0].$skip", Code.BAD_MESSAGE),
        ([{"$skip": 1e999}], "pipeline[0].$skip", Code.BAD_MESSAGE),
        ([{"$count": "$x"}], "pipeline[0].$count", Code.BAD_MESSAGE),
        ([{"$unwind": "nodes"}], "pipeline[0].$unwind", Code.BAD_MESSAGE),
        ([{"$unwind": {"path": 7}}], "pipeline[0].$unwind.path", Code.BAD_MESSAGE),
        ([{"$unwind": {"path": "$a", "x": 1}}], "pipeline[0].$unwind.x", Code.BAD_MESSAGE),
        ([{"$group": {}}], "pipeline[0].$group._id", Code.BAD_MESSAGE),
        ([{"$group": {"_id": "$$ROOT"}}], "pipeline[0].$group._id", Code.BAD_MESSAGE),
        ([{"$group": {"_id": {"$add": 1}}}], "pipeline[0].$group._id.$add", Code.UNSUPPORTED),
        ([{"$group": {"_id": 1, "a": 2}}], "pipeline[0].$group.a", Code.BAD_MESSAGE),
        ([{"$group": {"_id": 1, "a": {}}}], "pipeline[0].$group.a", Code.BAD_MESSAGE),
        ([{"$group": {"_id": 1, "a": {"$fn": 1}}}], "pipeline[0].$group.a", Code.BAD_MESSAGE),
        ([{"$group": {"_id": 1, "a.b": {}}}], "pipeline[0].$group.a.b", Code.BAD_MESSAGE),
        ([{"$group": {"_id": [1]}}], "pipeline[0].$group._id", Code.BAD_MESSAGE),
        ([{"$project": {"a": 0}}], "pipeline[0].$project.a", Code.BAD_MESSAGE),
        ([{"$project": {"a": {}}}], "pipeline[0].$project.a", Code.BAD_MESSAGE),
        ([{"$sort": {"a": True}}], "pipeline[0].$sort.a", Code.BAD_MESSAGE),
        ([{"$sort": {"$a": 1}}], "pipeline[0].$sort.$a", Code.BAD_MESSAGE),
        ([{"$match": {}}] * (STAGES_MAX + 1), "pipeline", Code.TOO_LARGE),
    ],
)
def test_a_wrong_stage_is_refused_with_its_place(stages, place, code):
    with pytest.raises(QueryError) as caught:
        parse_pipeline(stages)
    assert (caught.value.path, caught.value.code) == (place, code)


NUMBERS = [{"n": number, "even": number % 2 == 0} for number in range(6)]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (None, [0, 1, 2, 3, 4, 5]),
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"limit": 0}, [0, 1, 2, 3, 4, 5]),
        ({"limit": 2, "skip": 1, "sort": {"n": -1}}, [4, 3]),
        ({"skip": 5}, [5]),
    ],
)
def test_documents_are_sorted_before_the_limit_cuts_them(options, found):
    assert [row["n"] for row in parse_page(options).run(NUMBERS)] == found


@pytest.mark.parametrize(
    ("options", "place", "code"),
    [
        ([], "options", Code.BAD_MESSAGE),
        ({"limit": "few"}, "options.limit", Code.BAD_MESSAGE),
        ({"skip": -1}, "options.skip", Code.BAD_MESSAGE),
        ({"sort": {"n": 2}}, "options.sort.n", Code.BAD_MESSAGE),
        ({"lean": True}, "options.lean", Code.UNSUPPORTED),
    ],
)
def test_wrong_options_of_a_query_are_refused_with_their_place(options, place, code):
    with pytest.raises(QueryError) as caught:
        parse_page(options)
    assert (caught.value.path, caught.value.code) == (place, code)


def test_nesting_and_number_of_documents_are_limited():
    key = "$a"
    for _ in range(DEPTH_MAX + 1):
        key = {"x": key}
    with pytest.raises(QueryError) as caught:
        parse_pipeline([{"$group": {"_id": key}}])
    assert caught.value.code is Code.TOO_LARGE
    wide = {"a": list(range(1000)), "b": list(range(1000))}
    pipeline = parse_pipeline([{"$unwind": "$a"}, {"$unwind": "$b"}])
    with pytest.raises(QueryError) as caught:
        pipeline.run([wide])
    assert (caught.value.path, caught.value.code) == ("pipeline[1]", Code.TOO_LARGE)
    assert str(ROWS_MAX) in caught.value.expected

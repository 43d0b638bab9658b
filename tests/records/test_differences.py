"""Tests of the differences of documents: the changed paths, whatever the documents' size."""

import msgspec
import pytest

from moorage.records.differences import CHARS_MAX, PATHS_MAX, TEXT_MAX, differences


def nodes(*names: str, **more: object) -> dict:
    return {"nodes": {"nodeData": [{"id": name, "gpus": 8, **more} for name in names]}}


@pytest.mark.parametrize(
    ("before", "after", "was", "now"),
    [
        ({"a": 1}, {"a": 1}, {}, {}),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, {"b": 2}, {"b": 3}),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 5]}}, {"a.b.1": 2}, {"a.b.1": 5}),
        ({"a": 1}, {"b": 1}, {"a": 1}, {"b": 1}),
        (None, {"a": [1]}, None, {"a": [1]}),
        ({"a": None}, None, {"a": None}, None),
        ({"a": [1]}, {"a": [1, 2]}, {"a": [1]}, {"a": [1, 2]}),
    ],
)
def test_a_comparison_shows_only_differences(before, after, was, now):
    assert differences(before, after) == (was, now)


def test_members_of_lists_are_matched_by_their_id():
    before, after = nodes("n1", "n2", "n3"), nodes("n3", "n1", "n4")
    gone, come = {"id": "n2", "gpus": 8}, {"id": "n4", "gpus": 8}
    assert differences(before, after) == (
        {"nodes.nodeData.n2": gone},
        {"nodes.nodeData.n4": come},
    )
    after["nodes"]["nodeData"][1]["gpus"] = 4
    was, now = differences(before, after)
    assert (was["nodes.nodeData.n1.gpus"], now["nodes.nodeData.n1.gpus"]) == (8, 4)


def test_a_comparison_finds_the_one_changed_node_of_many():
    names = [f"n{number}" for number in range(2_000)]
    before, after = nodes(*names), nodes(*names)
    after["nodes"]["nodeData"][1_900]["gpus"] = 4
    assert differences(before, after) == (
        {"nodes.nodeData.n1900.gpus": 8},
        {"nodes.nodeData.n1900.gpus": 4},
    )


@pytest.mark.parametrize(
    "document",
    [
        {"code": "x" * 1_000_000},
        {str(number): "x" * 1_000 for number in range(100_000)},
        {"k" * 100_000: 1},
        {"list": list(range(1_000_000))},
        {"deep": [[[[[["x" * 300] * 16] * 16] * 16] * 16] * 16] * 16},
        {"large": 1 << 4_000, "small": -(1 << 70)},
        nodes(*(f"n{number}" for number in range(5_000)), labels={"x" * 500: "y" * 500}),
    ],
)
def test_the_number_of_shown_differences_is_bounded(document):
    for pair in ((None, document), (document, None), ({"a": 1}, document)):
        for side in differences(*pair):
            assert len(msgspec.json.encode(side)) < 2 * CHARS_MAX + PATHS_MAX * 2 * TEXT_MAX


def test_a_comparison_counts_the_differing_fields_that_it_does_not_name():
    before, after = ({str(number): each for number in range(100)} for each in (1, 2))
    was, now = differences(before, after)
    assert len(was) == len(now) == PATHS_MAX + 1
    assert was["…"] == now["…"] == "and more"

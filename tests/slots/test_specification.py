"""Tests of descriptions of pools: the accepted layouts, and the errors of other layouts."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.slots import (
    InvalidSpecification,
    ResourcePool,
    SchemaMissingKeyError,
    read_specification,
)

ONE = {"gpus": [{"id": "0", "slots": 1}]}


def part_of(kind: str) -> list[dict]:
    return [{"id": "0", "part_of": {"type": kind, "id": "0"}}]


@pytest.mark.parametrize(
    "document",
    [
        *({"resources": ONE, "additional_properties": none} for none in ({}, [])),
        {"resources": ONE},
        {"resource_pool": {"resources": ONE, "additional_properties": {}}},
        {"local": ONE},
        {"version": {"major": 1, "minor": 0}, "local": [ONE]},
        {"gpus": 1},
        {"resource_pool": {"gpus": 1}},
        {"resources": {"gpus": 1}},
        {"resources": {"gpus": [{"id": 0}]}},
    ],
)
def test_every_layout_of_a_specification_gives_an_equal_pool(document):
    assert ResourcePool(document).getstate() == {"additional_properties": {}, "resources": ONE}


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"resources": []}, "resources"),
        *(({"resources": {"gpus": n}}, "resources.gpus") for n in ("4", None, -1, True, 10**9)),
        ({"resources": {"gpus": ["0"]}}, r"resources.gpus\[0\]"),
        ({"resources": {"gpus": [{"slots": 1}]}}, r"resources.gpus\[0\].id"),
        ({"resources": {"gpus": [{"id": True}]}}, r"resources.gpus\[0\].id"),
        ({"resources": {"gpus": [{"id": "a"}, {"id": "b", "slots": -1}]}}, r"gpus\[1\].slots"),
        ({"resources": {"gpus": [{"id": "a", "slots": float("nan")}]}}, r"gpus\[0\].slots"),
        ({"resources": {"gpus": [{"id": "a", "slots": "1"}]}}, r"gpus\[0\].slots"),
        ({"resources": {"gpus": [{"id": "a", "slot": 1}]}}, "unknown 'slot'"),
        ({"resources": {"gpus": [{"id": 1}, {"id": "1"}]}}, "'1' occurs twice"),
        *(({"resources": {kind: 1}}, "name of a type") for kind in ("nodes", "", 3)),
        ({"resources": ONE, "extra": 1}, "unknown 'extra'"),
        ({"resources": ONE, "additional_properties": [1]}, "additional_properties"),
        ({"local": [ONE, ONE]}, "local"),
        ({"resource_pool": 3}, "pool"),
        ({"nodes": []}, "NodeResourcePool"),
        ({"resources": {"a": part_of("b")}}, "not listed"),
        ({"resources": {"a": [{"id": "0", "part_of": "b"}]}}, "part_of"),
        ({"resources": {"a": [{"id": "0", "part_of": {"type": "b"}}]}}, "part_of"),
        ({"resources": {"a": part_of("b"), "b": part_of("c"), "c": 1}}, "part of a part"),
    ],
)
def test_a_wrong_description_is_refused_with_its_place(document, place):
    pool = ResourcePool({"cpus": 2})
    before = pool.getstate()
    with pytest.raises(InvalidSpecification, match=place):
        pool.fill(document)
    assert pool.getstate() == before


@pytest.mark.parametrize("document", [{}, {"additional_properties": {}}, {"gpus": "4"}, {"a": [1]}])
def test_a_description_without_known_keys_is_a_schema_missing_key_error(document):
    with pytest.raises(SchemaMissingKeyError, match="'resources' or 'local'"):
        ResourcePool().fill(document)


def test_a_pool_copies_its_description():
    properties = {"a": [1]}
    pool = ResourcePool({"resources": {"gpus": 1}, "additional_properties": properties})
    properties["a"].append(2)
    assert pool.additional_properties == {"a": [1]}


@pytest.mark.parametrize(
    "text",
    ['{"resources":\n\t{"gpus": [{"id": "0"}]}}', "gpus: 1", "local:\n  gpus:\n  - id: '0'\n"],
)
def test_a_file_of_a_description_may_be_yaml_or_json(text):
    assert ResourcePool(read_specification(text)).resources == ONE


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "\x00", "!!python/object:os.system {}"])
def test_a_file_that_is_neither_yaml_nor_json_is_refused(text):
    with pytest.raises(InvalidSpecification):
        read_specification(text)


IDS = st.text(min_size=1, max_size=8) | st.integers(0, 99).map("{:03}".format)
SLOTS = st.integers(0, 10**9) | st.decimals(0, 100, places=3).map(float)
TYPES = st.text(min_size=1, max_size=6).filter(lambda name: name not in {"node", "nodes"})


@given(
    st.dictionaries(
        TYPES, st.lists(st.tuples(IDS, SLOTS), max_size=4, unique_by=lambda row: row[0]), max_size=4
    )
)
def test_any_description_is_the_same_after_yaml_and_json(resources):
    rows = {
        kind: [{"id": name, "slots": slots} for name, slots in listed]
        for kind, listed in resources.items()
    }
    pool = ResourcePool({"resources": rows})
    assert {kind: pool.resources[kind] for kind in rows} == rows
    for form in ("yaml", "json"):
        file = io.StringIO()
        pool.dump(file, form)
        assert ResourcePool(read_specification(file.getvalue())).getstate() == pool.getstate()

"""Tests of the schema language: the values that it accepts, completes and refuses."""

import time
from typing import Any

import pytest

from moorage.policy.schema import MATCHED_CHARS_MAX, VALUES_MAX, Schema, SchemaError, SchemaPattern
from moorage.policy.schema_reader import read_schema
from moorage.query import QueryError, expression

SIZE = {"type": "number", "min": 1, "max": 8}


def pattern(text: str, path: str) -> SchemaPattern:
    try:
        return expression(text, "", path)
    except QueryError as error:
        raise SchemaError(path, error.expected, error.reason) from error


def read(document: Any) -> Schema:
    schema, notes = read_schema(document, "s", pattern)
    assert schema is not None
    assert not notes
    return schema


def refusal(document: Any, value: Any, **more: Any) -> str:
    with pytest.raises(SchemaError) as caught:
        read(document).check(value, "inputs", **more)
    return str(caught.value)


def notes_on(document: Any) -> str:
    _, notes = read_schema(document, "s", pattern)
    return "\n".join(map(str, notes))


@pytest.mark.parametrize("nothing", [None, {}])
def test_an_empty_schema_accepts_any_value(nothing):
    assert read_schema(nothing, "s", pattern) == (None, ())


@pytest.mark.parametrize(
    ("entry", "good", "bad"),
    [
        ({"type": "string"}, ["", "x"], [1, True, [], {}]),
        ({"type": "number"}, [0, -1.5, 10**400], ["1", True, float("nan"), float("inf"), []]),
        ({"type": "boolean"}, [True, False], [0, 1, "true"]),
        ({"type": "array"}, [[], [1]], [{}, "x", 1]),
        ({"type": "object"}, [{}, {"a": 1}], [[], "x", 1]),
        ({"type": "any"}, [1, "x", [], {}, True, None], []),
        ({"type": "string", "pattern": "^a+$"}, ["a", "aa"], ["", "b", "ab"]),
        ({"type": "string", "pattern": "a"}, ["bab"], ["b"]),
        ({"type": "string", "length": 2}, ["ab"], ["a", "abc"]),
        ({"type": "string", "max_length": 2}, ["", "ab"], ["abc"]),
        ({"type": "array", "length": 1}, [[0]], [[], [0, 0]]),
        ({"type": "array", "max_length": 1}, [[], [0]], [[0, 0]]),
        ({"type": "number", "min": 1}, [1, 1.5], [0, 0.999]),
        ({"type": "number", "max": 1}, [1, -5], [1.001]),
        ({"type": "string", "choices": ["a", "b"]}, ["a"], ["c", ""]),
        ({"type": "number", "choices": [1, 2]}, [1, 2.0], [3, True]),
        ({"type": "boolean", "choices": [True]}, [True], [False]),
        ({"type": "any", "choices": [1, "a", True]}, [1, "a", True], [0, False, [], {}]),
        ({"type": "array", "items": SIZE}, [[], [1, 8]], [[0], [1, "x"], [None]]),
        ({"type": "array", "items": [SIZE]}, [[], [1, 8]], [[0]]),
        ({"type": "object", "properties": {"a": SIZE}}, [{}, {"a": 1}, {"b": 0}], [{"a": 9}]),
    ],
)
def test_each_type_and_constraint_of_a_schema_is_enforced(entry, good, bad):
    schema = read({"f": entry})
    for value in good:
        assert schema.check({"f": value}, "v") == {"f": value}
    for value in bad:
        with pytest.raises(SchemaError):
            schema.check({"f": value}, "v")


def test_a_field_may_be_left_out_unless_it_is_required():
    schema = read({"a": {"type": "number"}, "b": {"type": "any"}})
    assert schema.check({}, "v") == {}
    assert schema.check({"a": None, "b": None}, "v") == {"b": None}, "null is a value of any"
    nested = read({"o": {"type": "object", "properties": {"a": {"type": "number"}}}})
    assert nested.check({"o": {"a": None}, "more": None}, "v") == {"o": {}, "more": None}
    needs = {"a": {**SIZE, "required": True, "description": "how many"}}
    assert refusal(needs, {}) == (
        "inputs.a: expected a number from 1 to 8 (how many); it is missing"
    )
    assert refusal(needs, {"a": None}).endswith("it is missing")
    assert read(needs).check({}, "v", known=("a",)) == {}


def test_defaults_fill_missing_fields_on_all_levels():
    inner = {"b": {"type": "number", "default": 2}, "c": {"type": "number"}}
    schema = read(
        {
            "a": {"type": "object", "properties": inner, "default": {"c": 3}},
            "l": {"type": "array", "items": {"type": "object", "properties": inner}},
        }
    )
    assert schema.defaults == {"a": {"c": 3, "b": 2}}
    given = {"l": [{"b": 1}, {}], "more": 1}
    assert schema.check(given, "v") == {
        "a": {"c": 3, "b": 2},
        "l": [{"b": 1}, {"b": 2}],
        "more": 1,
    }
    assert given == {"l": [{"b": 1}, {}], "more": 1}, "the given value is unchanged"
    whole = {"a": {"b": 1}, "l": [{"b": 1}]}
    assert schema.check(whole, "v") is whole, "a complete value is not copied"


def test_a_field_that_another_source_sets_gets_no_default():
    schema = read({"a": {"type": "number", "default": 1}, "b": {"type": "number", "default": 2}})
    assert schema.check({}, "v", known=("a",)) == {"b": 2}
    assert schema.check({"a": None}, "v", known=("a", "b")) == {}


@pytest.mark.parametrize(
    ("document", "value", "said"),
    [
        ({"n": SIZE}, {"n": 9}, "inputs.n: expected a number from 1 to 8; found 9"),
        ({"n": SIZE}, [], "inputs: expected an object; found an empty list"),
        (
            {"n": {"type": "string", "choices": ["a", "b"]}},
            {"n": "c"},
            'inputs.n: expected a text out of "a", "b"; found "c"',
        ),
        (
            {"o": {"type": "object", "properties": {"l": {"type": "array", "items": SIZE}}}},
            {"o": {"l": [1, 0]}},
            "inputs.o.l[1]: expected a number from 1 to 8; found 0",
        ),
        (
            {"t": {"type": "string", "pattern": "^x", "max_length": 3}},
            {"t": "y"},
            'inputs.t: expected a text of at most 3 characters that matches ^x; found "y"',
        ),
        (
            {"t": {"type": "number", "default": 3, "description": "copies"}},
            {"t": "y"},
            'inputs.t: expected a number (copies), by default 3; found "y"',
        ),
    ],
)
def test_the_refusal_of_a_value_names_field_and_expectation_and_value(document, value, said):
    assert refusal(document, value) == said


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "s: expected an object with one entry per field"),
        ({"a": 1}, "s.a: expected an object that describes the field"),
        (
            {"a": {}},
            "s.a.type: expected one of string, number, integer, boolean, array, object, null",
        ),
        ({"a": {"type": "int"}}, 'found "int", which is `integer` here'),
        ({"a": {"type": "colour"}}, "s.a.type: expected one of string, number"),
        ({"a": {"type": []}}, "s.a.type: expected one of"),
        ({"type": "string"}, 's.type: expected object, or array with items that are; found "stri'),
        ({"type": "object", "properties": {}, "oneOf": []}, "s.oneOf: expected a constraint that"),
        ({"a": {"type": "number", "minn": 1}}, "did you mean `min`?"),
        ({"a": {"type": "string", "min": 1}}, "s.a.min: expected no `min` where the type is str"),
        ({"a": {"type": "number", "pattern": "x"}}, "it is for string"),
        ({"a": {"type": "number", "min": "1"}}, "s.a.min: expected a finite number"),
        ({"a": {"type": "number", "max": True}}, "s.a.max: expected a finite number"),
        ({"a": {"type": "number", "min": 2, "max": 1}}, "s.a.min: expected at most `max`, 1"),
        ({"a": {"type": "string", "length": -1}}, "s.a.length: expected a whole number from 0"),
        ({"a": {"type": "string", "max_length": 1.5}}, "s.a.max_length: expected a whole number"),
        (
            {"a": {"type": "string", "length": 3, "max_length": 2}},
            "s.a.length: expected at most `max_length`, 2",
        ),
        ({"a": {"type": "string", "choices": []}}, "s.a.choices: expected a list of 1 to 1000"),
        ({"a": {"type": "string", "choices": ["x", 1]}}, "s.a.choices[1]: expected a text"),
        ({"a": {"type": "number", "choices": [True]}}, "s.a.choices[0]: expected a number"),
        ({"a": {"type": "any", "choices": [[]]}}, "s.a.choices[0]: expected a text, a number"),
        ({"a": {"type": "string", "pattern": "("}}, "s.a.pattern: expected characters"),
        ({"a": {"type": "string", "pattern": ""}}, "s.a.pattern: expected a regular expression"),
        ({"a": {"type": "string", "required": "yes"}}, "s.a.required: expected true or false"),
        ({"a": {"type": "object", "required": [7]}}, "s.a.required: expected true or false, or a"),
        ({"a": {"type": "string", "default": 1}}, "s.a.default: expected a text; found 1"),
        (
            {"a": {"type": "string", "default": "x", "required": True}},
            "s.a.default: expected none where the field is `required`",
        ),
        ({"a": {"type": "string", "description": 1}}, "s.a.description: expected a text"),
        ({"a": {"type": "array", "items": []}}, "s.a.items: expected one entry that describes ev"),
        ({"a": {"type": "array", "items": [SIZE, SIZE]}}, "s.a.items: expected one entry that"),
        ({"a": {"type": "array", "items": [7]}}, "s.a.items[0]: expected an object that describes"),
        ({"a": {"type": "array", "items": {**SIZE, "required": True}}}, "s.a.items.required"),
        ({"a": {"type": "object", "properties": []}}, "s.a.properties: expected an object with"),
        (
            {"a": {"type": "object", "properties": {"b": {"type": "x"}}}},
            "s.a.properties.b.type: expected one of",
        ),
        ({str(n): {"type": "any"} for n in range(501)}, "s.500: expected at most 500 entries"),
        (
            {str(n): {"type": "string", "pattern": "x"} for n in range(33)},
            "s.32.pattern: expected at most 32 patterns",
        ),
    ],
)
def test_unreadable_parts_of_a_schema_are_noted_with_their_place(document, said):
    assert said in notes_on(document)


def test_unreadable_parts_of_a_schema_are_ignored_and_the_readable_parts_are_enforced():
    document = {"a": {"type": "number", "minn": 1, "max": 5}, "b": 7, "c": {"type": "colour"}}
    schema, notes = read_schema(document, "s", pattern)
    assert [note.path for note in notes] == ["s.a.minn", "s.b", "s.c.type"]
    assert schema is not None
    assert schema.check({"a": -3, "b": [], "c": 0}, "v")
    with pytest.raises(SchemaError, match=r"v\.a: expected a number of at most 5"):
        schema.check({"a": 6}, "v")
    assert len(notes_on({str(n): 1 for n in range(100)}).splitlines()) == 21


SETTINGS = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "title": "what an author posts",
    "properties": {
        "gpus": {"type": "integer", "minimum": 1, "maximum": 8, "default": 1},
        "zone": {"type": "string", "enum": ["a", "b", None], "minLength": 1},
        "share": {"type": ["number", "null"], "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "models": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
        "limits": {
            "type": "object",
            "properties": {"cpu": {"type": "number"}},
            "required": ["cpu"],
            "additionalProperties": {"type": "integer"},
        },
        "mode": {"const": "fast"},
        "free": {},
        "sure": True,
    },
    "required": ["zone"],
    "additionalProperties": False,
}


def test_a_json_schema_keeps_its_meaning():
    schema = read(SETTINGS)
    assert schema.check({"zone": "a"}, "v") == {"zone": "a", "gpus": 1}
    whole = {
        "gpus": 8.0, "zone": "b", "share": None, "models": ["x"], "limits": {"cpu": 1, "gpu": 2},
        "mode": "fast", "free": None, "sure": {},
    }  # fmt: skip
    assert schema.check(whole, "v") is whole


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"zone": ...}, 'inputs.zone: expected a text of at least 1 characters out of "a", "b", n'),
        ({"zone": None}, "inputs.zone: expected a text"),
        (
            {"gpus": 1.5},
            "inputs.gpus: expected a whole number from 1 to 8, by default 1; found 1.5",
        ),
        ({"gpus": True}, "found true"),
        ({"gpus": 0}, "found 0"),
        ({"share": 1}, "inputs.share: expected a number or null above 0 below 1; found 1"),
        ({"models": []}, "inputs.models: expected a list of at least 1 elements of at most 2"),
        ({"models": ["x", None]}, "inputs.models[1]: expected a text; found null"),
        ({"limits": {}}, "inputs.limits.cpu: expected a number; it is missing"),
        ({"limits": {"cpu": 1, "x": "y"}}, "inputs.limits.x: expected a whole number"),
        ({"mode": "slow"}, 'inputs.mode: expected a value out of "fast"'),
        ({"color": 1}, "inputs.color: expected no field of this name, only zone, gpus, "),
    ],
)
def test_a_json_schema_is_enforced(change, said):
    value = {name: each for name, each in {"zone": "a", **change}.items() if each is not ...}
    assert said in refusal(SETTINGS, value)


@pytest.mark.parametrize(
    "document",
    [
        {"properties": {"n": {"type": "integer"}}, "required": ["n"]},
        {"required": ["n"], "properties": {"n": {"type": ["integer"]}}},
        {"type": ["object", "null"], "properties": {"n": {"type": "integer", "required": True}}},
        {"type": "array", "items": {"type": "object", "required": ["n"], "properties": {
            "n": {"type": "integer"}}}},
        {"n": {"type": "integer", "required": True}},
    ],
)  # fmt: skip
def test_the_dialect_of_a_schema_is_recognised(document):
    schema = read(document)
    assert schema.required == ("n",)
    assert schema.check({"n": 1}, "v") == {"n": 1}
    with pytest.raises(SchemaError, match=r"v\.n: expected a whole number"):
        schema.check({"n": 1.5}, "v")


def test_fields_may_have_the_names_of_json_schema_keywords():
    entry = {"type": "string"}
    document = {"type": entry, "properties": entry, "required": entry, "items": entry}
    schema = read(document)
    assert set(schema.names) == set(document)
    assert not schema.required


@pytest.mark.parametrize("more", [{}, {"properties": {}}])
def test_a_schema_without_fields_accepts_only_objects(more):
    schema = read({"type": "object", **more})
    assert schema.check({"x": None}, "v") == {"x": None}
    with pytest.raises(SchemaError):
        schema.check([], "v")


@pytest.mark.parametrize("key", ["properties", "items"])
def test_the_depth_of_a_schema_is_limited(key):
    entry: Any = {"type": "any"}
    for _ in range(40):
        inside = {"x": entry} if key == "properties" else entry
        entry = {"type": "object" if key == "properties" else "array", key: inside}
    assert "expected at most 16 levels" in notes_on({"a": entry})


def test_a_check_reads_a_bounded_number_of_values_and_characters():
    numbers = {"l": {"type": "array", "items": {"type": "number"}}}
    assert f"at most {VALUES_MAX} values" in refusal(numbers, {"l": [0] * 10**6})
    texts = {"l": {"type": "array", "items": {"type": "string", "pattern": "(a|b)*c$"}}}
    some = MATCHED_CHARS_MAX // 4000
    assert "expected at most 100000 characters" in refusal(
        texts, {"l": ["a" * 3999 + "c"] * 2 * some}
    )
    assert "of at most 4096 characters" in refusal({"t": texts["l"]["items"]}, {"t": "a" * 5000})


def test_missing_fields_of_a_value_count_in_the_budget_of_a_check():
    """Without this bound, a check could fill many thousand fields of a list of empty objects."""
    fields = {str(number): {"type": "any"} for number in range(400)}
    wide = {"l": {"type": "array", "items": {"type": "object", "properties": fields}}}
    assert read(wide).check({"l": [{}] * 40}, "v")
    said = refusal(wide, {"l": [{}] * 60})
    assert said.startswith("inputs.l[49]: expected at most 20000 values in all")


def test_the_time_of_a_pattern_is_linear_in_its_text():
    """`(a+)+$` takes a backtracking matcher 2^n steps; here, n is 4000."""
    schema = read({"t": {"type": "string", "pattern": "^(a+)+$"}})
    started = time.process_time()
    with pytest.raises(SchemaError):
        schema.check({"t": "a" * 4000 + "b"}, "v")
    assert time.process_time() - started < 10  # Backtracking would never end.


def test_several_objects_share_the_limits_of_one_check():
    schema = read({"l": {"type": "array", "items": {"type": "number"}}})
    half = {"l": [0] * (VALUES_MAX // 2)}
    schema.check_each([half], "output")
    with pytest.raises(SchemaError, match=r"output\[1\]\.l"):
        schema.check_each([half, half], "output")

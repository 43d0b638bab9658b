"""Tests of a policy's own examples: their place, content, and match with an answer."""

import json

import pytest

from moorage.catalog.documents.examples import NO_OUTPUT, read_examples, unlike
from moorage.model import Code
from moorage.protocol.faults import ServiceError

DOCUMENT = {"policy_rule_uri": "a:1-b"}
NODE = {"id": "n", "gpus": {"count": 1}}


def read(*examples, file=None):
    files = {} if file is None else {"examples.json": file}
    metadata = {"examples": list(examples)} if examples else {}
    return read_examples({**DOCUMENT, "metadata": metadata}, files)


def test_a_policy_may_have_no_examples():
    assert read_examples(DOCUMENT, {}) == ()
    assert read_examples({**DOCUMENT, "metadata": {"examples": None}}, {}) == ()


def test_document_and_archive_may_both_have_examples():
    inside = json.dumps([{"input_data": [1], "parameters": {"p": 1}}]).encode()
    first, second = read({"name": "one", "request": {"resources": {"gpus": 2}}}, file=inside)
    assert (first.title, second.title) == ("metadata.examples[0] “one”", "examples.json[0]")
    assert first.request is not None
    assert first.request.demand().gpus == 2
    assert [each.id for each in first.fleet] == ["lab"]
    assert first.output is NO_OUTPUT
    assert (second.request, second.input_data, second.parameters) == (None, [1], {"p": 1})


def test_an_example_of_a_policy_may_have_its_own_fleet_and_metrics():
    fleet = [{"id": "x", "nodes": {"nodeData": [NODE]}}]
    (example,) = read({"request": {}, "fleet": fleet, "metrics": [{"clusterId": "x"}]})
    assert [each.id for each in example.fleet] == ["x"]
    assert set(example.metrics) == {"x"}


@pytest.mark.parametrize(
    ("example", "field"),
    [
        (7, ""),
        ({}, ""),
        ({"request": {}, "input_data": {}}, ""),
        ({"request": {}, "answer": 1}, ".answer"),
        ({"request": {}, "name": 7}, ".name"),
        ({"request": []}, ".request"),
        ({"request": {"inputs": []}}, ".request.inputs"),
        ({"request": {"resources": {"gpus": -1}}}, ".request.resources.gpus"),
        ({"request": {"lease": {}}}, ".request.lease"),
        ({"request": {}, "parameters": {}}, ".parameters"),
        ({"input_data": {}, "settings": []}, ".settings"),
        ({"request": {}, "fleet": []}, ".fleet"),
        ({"request": {}, "fleet": [{"id": ""}]}, ".fleet[0]"),
        ({"request": {}, "fleet": [{"id": "x"}, {"id": "x"}]}, ".fleet"),
        ({"request": {}, "metrics": {}}, ".metrics"),
        ({"request": {}, "metrics": [{}]}, ".metrics[0]"),
    ],
)
def test_a_malformed_example_is_refused_with_its_place(example, field):
    with pytest.raises(ServiceError) as caught:
        read(example)
    error = caught.value
    assert (error.code, error.field) == (Code.BAD_POLICY, f"metadata.examples[0]{field}")
    assert error.expected


@pytest.mark.parametrize("file", [b"[", b"\xff", b"{}", b"[" * 100_000])
def test_an_examples_file_that_is_not_a_list_is_refused(file):
    with pytest.raises(ServiceError, match=r"^examples\.json: expected a list of examples"):
        read(file=file)


def test_number_and_size_of_examples_are_limited():
    with pytest.raises(ServiceError, match=r"metadata.examples\[20\]: expected at most 20"):
        read(*[{"request": {}}] * 21)
    with pytest.raises(ServiceError, match="expected at most 4194304 bytes"):
        read({"input_data": "x" * (5 << 20)})


@pytest.mark.parametrize(
    ("expected", "answer", "different"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, ""),
        ({"gpus": ["0", "1"]}, {"gpus": [0, 1]}, ""),
        ([{"a": 1}], [{"a": 1.0, "b": 1}], ""),
        (None, None, ""),
        ({"a": 1}, {}, "expected output.a to be 1; it is missing"),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "expected output.a.b to be 1; it is 2"),
        ({"a": [1]}, {"a": [1, 2]}, "expected output.a to be [1]; it is [1,2]"),
        ({"a": "0"}, {"a": 0}, 'expected output.a to be "0"; it is 0'),
        (True, 1, "expected output to be true; it is 1"),
        ([[1], [2]], [[1], [3]], "expected output[1][0] to be 2; it is 3"),
    ],
)
def test_an_answer_must_contain_the_expected_output(expected, answer, different):
    assert unlike(expected, answer) == different

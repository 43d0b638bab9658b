"""The README of the query language has each operator, and its examples give their results."""

import json
import re
from pathlib import Path

import pytest

import moorage.query
from moorage.model import Code
from moorage.query import COMPANIONS, evaluate, parse_condition, parse_filter, parse_search
from moorage.query.limits import EXPRESSION_TEXT_CHARS_MAX, SEARCH_CHARS_MAX
from moorage.query.parse import FOLDS, OPERATORS

README = (Path(moorage.query.__file__).parent / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
DOCUMENT = next(json.loads(text) for language, text in BLOCKS if language == "json")
EXAMPLES = [
    line.split("  → ")
    for language, text in BLOCKS
    if language == "query"
    for line in text.splitlines()
]


@pytest.mark.parametrize(("query", "answer"), EXAMPLES)
def test_each_query_of_the_readme_finds_its_result(query, answer):
    assert (
        evaluate(parse_condition(json.loads(query)), DOCUMENT) is {"yes": True, "no": False}[answer]
    )


NAMES = ["AND", "OR", "NOT", "IN", "LIKE", "$in", "$nin", "$exists", "$regex", "$options", "$nor"]


@pytest.mark.parametrize("name", [*OPERATORS, *FOLDS, *NAMES])
def test_the_readme_names_every_operator(name):
    words = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    assert re.search(rf"[` ]{re.escape(name)}[` ]", words)


@pytest.mark.parametrize("name", ["==", "!=", ">", ">=", "<", "IN", "LIKE", "NOT", "$or", "$regex"])
def test_every_operator_has_an_example(name):
    assert any(f'"{name}"' in query for query, _ in EXAMPLES)


@pytest.mark.parametrize(("language", "read"), [("filter", parse_filter), ("search", parse_search)])
def test_the_bodies_in_the_readme_are_accepted_with_and_without_an_envelope(language, read):
    (body,) = (json.loads(text) for block, text in BLOCKS if block == language)
    assert read(body) == read({"header": {}, "body": {"values": body}})
    assert read(body).match_type in COMPANIONS


def test_limits_and_codes_of_queries_are_as_the_readme_says():
    assert f"{EXPRESSION_TEXT_CHARS_MAX:,} characters" in README
    assert f"{SEARCH_CHARS_MAX:,} characters" in README
    for code in (Code.BAD_MESSAGE, Code.UNSUPPORTED, Code.TOO_LARGE):
        assert f"`{code}`" in README

"""The AsyncAPI document and schemas are valid, and agree with what the server accepts."""

import gzip
import json
from pathlib import Path

import pytest
from jsonschema import Draft7Validator, Draft202012Validator, FormatChecker

from moorage.protocol.errors import BadMessage
from moorage.protocol.messages import OPERATIONS, decode
from moorage.protocol.specification import MESSAGES, asyncapi, documents, schemas

# From github.com/asyncapi/spec-json-schemas, Apache-2.0.
META = Path(__file__).with_name("asyncapi-3.0.0.json.gz")


def problems(name, message):
    return list(Draft202012Validator(documents()[name]).iter_errors(message))


def test_the_asyncapi_document_is_valid():
    meta = json.loads(gzip.decompress(META.read_bytes()))
    described = asyncapi("1.0")
    validator = Draft7Validator(meta, format_checker=FormatChecker())
    assert [error.message for error in validator.iter_errors(described)] == []
    assert list(validator.iter_errors({**described, "asyncapi": "2.0.0"}))


def test_every_reference_of_the_asyncapi_document_resolves():
    described = asyncapi("1.0")
    todo, found = [described], 0
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if "$ref" in part:
                here = described
                for name in part["$ref"].removeprefix("#/").split("/"):
                    here = here[name]
                found += 1
            todo.extend(part.values())
        elif isinstance(part, list):
            todo.extend(part)
    assert found > 100


def test_every_message_and_reply_has_a_self_contained_schema():
    for name, schema in documents().items():
        Draft202012Validator.check_schema(schema)
        assert schema["$schema"].endswith("2020-12/schema")
        list(Draft202012Validator(schema).iter_errors({}))  # Fails if a reference does not resolve.
        assert schema["title"] == name
    assert MESSAGES.keys() == {"allocate", "block", *OPERATIONS}
    assert {f"{kind.__name__}Reply" for kind in OPERATIONS.values()} <= documents().keys()


GOOD = {"op": "release", "lease": "l", "token": "t"}
ASKED = {"adhoc": True, "policy_rule_uri": "p:1-x", "inputs": {}}
MESSAGES_TRIED = [
    ("Release", GOOD, True),
    ("Release", {**GOOD, "id": 7}, True),
    ("Release", {**GOOD, "more": 1}, False),
    ("Release", {**GOOD, "token": ""}, False),
    ("Release", {"op": "release", "token": "t"}, False),
    ("Renew", {**GOOD, "op": "renew", "ttl_seconds": 0.5}, False),
    ("Why", {"op": "why", "lease": "l"}, True),
    ("Why", {"op": "why"}, False),
    ("Why", {"op": "why", "lease": "l", "request": "l"}, False),
    ("WatchTopics", {"op": "watch", "topics": []}, False),
    ("AllocationRequest", ASKED, True),
    ("AllocationRequest", {**ASKED, "unknown": 1}, True),
    ("AllocationRequest", {**ASKED, "resources": {"gpus": -1}}, False),
    ("AllocationRequest", {**ASKED, "resources": {"gpu": 1}}, False),
    ("AllocationRequest", {**ASKED, "lease": {"ttl_seconds": "long"}}, False),
]


@pytest.mark.parametrize(("name", "message", "good"), MESSAGES_TRIED)
def test_a_schema_accepts_exactly_the_messages_of_the_server(name, message, good):
    assert (problems(name, message) == []) is good
    if good:
        assert type(decode(json.dumps(message))).__name__ == name
    else:
        with pytest.raises(BadMessage):
            decode(json.dumps(message))


def test_each_field_that_a_client_sends_is_explained():
    known = schemas()
    parts = ("LabelRequirement", "LeaseRequest", "ProvisionRequest", "QuotaAmounts", "Resources")
    for name in (*(kind.__name__ for kind in MESSAGES.values()), *parts):
        assert "Attributes:" not in known[name]["description"]
        for field, schema in known[name]["properties"].items():
            if field not in {"op", "adhoc"}:
                meaning = schema.get("description", "").partition(" Expected: ")[0]
                assert meaning.endswith("."), f"{name}.{field} is not explained"

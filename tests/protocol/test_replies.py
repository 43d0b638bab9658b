"""Tests of replies as the server writes them and as clients read them."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.model import Code
from moorage.protocol.errors import BadMessage, BadReply
from moorage.protocol.replies import (
    ErrorObject,
    Event,
    Reply,
    decode_reply,
    event,
    failure,
    failure_from,
    raw,
    success,
)
from moorage.records.leases import Lease
from moorage.records.reading import read_record

# A lease as its owner sees it.
OWNED = read_record(
    Lease,
    {
        "id": "r-1",
        "state": "ended",
        "tenant": "acme",
        "placement": [
            {
                "cluster_id": "c",
                "node_id": "n",
                "gpus": ["0", "2"],
                "gpu_milli": 500,
                "cpu_milli": 4000,
                "memory_mib": 1024,
            }
        ],
        "granted_at": 100.0,
        "expires_at": 400.0,
        "fencing": 7,
        "ttl_seconds": 300.0,
        "policy_rule_uri": "p:1-a",
        "reason": "expired",
        "token": "secret",
    },
)


def test_a_success_without_further_fields_has_only_success_and_data() -> None:
    assert json.loads(success({"cluster_id": "c"})) == {
        "success": True,
        "data": {"cluster_id": "c"},
    }
    assert json.loads(success(None)) == {"success": True, "data": None}


def test_a_failure_has_a_message_for_people_and_a_code_for_programs() -> None:
    reply = json.loads(
        failure(
            Code.NO_CAPACITY,
            "Nothing is free.",
            id=0,
            field="resources",
            expected="less",
            details={"nodes": 3, "code": "forged", "expected": "forged"},
        )
    )
    assert reply == {
        "success": False,
        "message": "Nothing is free.",
        "error": {
            "code": "no_capacity",
            "reason": "Nothing is free.",
            "field": "resources",
            "expected": "less",
            "nodes": 3,
        },
        "id": 0,
    }


def test_the_error_for_an_unreadable_message_has_its_id() -> None:
    error = BadMessage(Code.BAD_MESSAGE, "x: expected y", "x", "y", "id-1", {"more": [1]})
    reply = json.loads(failure_from(error))
    assert reply["id"] == "id-1"
    assert reply["error"] == {
        "code": "bad_message",
        "reason": "x: expected y",
        "field": "x",
        "expected": "y",
        "more": [1],
    }


UNENCODABLE = [
    math.nan,
    math.inf,
    {"a": [1, {"b": -math.inf}]},
    ("x", math.nan),
    {"s": "\ud800"},
    {(1, 2): 3},
    object(),
    {"a": object()},
]


@pytest.mark.parametrize("data", UNENCODABLE)
def test_a_reply_whose_data_is_not_json_becomes_a_failure_that_names_the_lease(data: Any) -> None:
    lease = OWNED
    reply = json.loads(success(data, id=5, lease=lease))
    assert reply["success"] is False
    assert reply["error"]["code"] == Code.POLICY_BAD_OUTPUT
    assert (reply["id"], reply["lease"]["token"]) == (5, "secret")
    assert json.loads(raw(data))["error"]["code"] == Code.POLICY_BAD_OUTPUT
    assert json.loads(success(1, reasons={"r": data}))["success"] is False


def test_a_reply_with_endlessly_nested_data_becomes_a_failure() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert json.loads(success(endless))["error"]["code"] == Code.POLICY_BAD_OUTPUT


@pytest.mark.parametrize("words", ["\ud800", "x" * 10])
def test_a_refusal_with_any_value_of_a_policy_reaches_the_client(words: str) -> None:
    reply = json.loads(failure(Code.POLICY_ERROR, words, id="i", details={"traceback": words}))
    assert (reply["success"], reply["error"]["code"], reply["id"]) == (False, "policy_error", "i")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_the_data_of_a_reply_arrives_unchanged_or_as_a_failure(data: Any) -> None:
    reply = decode_reply(success(data))
    assert isinstance(reply, Reply)
    if reply.success:
        assert reply.data == data
    else:
        assert reply.error is not None
        assert "data" in reply.error.field


# The client ----------------------------------------------------------------------------------


def test_the_client_reads_replies_of_the_server() -> None:
    reply = decode_reply(
        success(
            [1],
            id="a",
            request="r-1",
            lease=OWNED,
            warnings=["w"],
            reasons={"k": "v"},
        )
    )
    assert isinstance(reply, Reply)
    assert (reply.success, reply.data, reply.id, reply.request) == (True, [1], "a", "r-1")
    assert (reply.warnings, reply.reasons, reply.error) == (("w",), {"k": "v"}, None)
    assert reply.lease is not None
    assert (reply.lease.token, reply.lease.placement[0].gpus) == ("secret", ("0", "2"))


def test_a_client_reads_failures_with_all_their_data() -> None:
    reply = decode_reply(failure(Code.NEVER_FITS, "No.", details={"nodes": {"cpu": 3}}))
    assert isinstance(reply, Reply)
    assert reply.error == ErrorObject(code="never_fits", reason="No.")
    assert reply.details["nodes"] == {"cpu": 3}


def test_a_client_reads_failures_of_servers_without_codes() -> None:
    reply = decode_reply('{"success": false, "message": "\'inputs\'"}')
    assert isinstance(reply, Reply)
    assert reply.error == ErrorObject(code="internal", reason="'inputs'")


def test_a_client_reads_events() -> None:
    assert decode_reply(event("lease", {"id": 1})) == Event("lease", {"id": 1})


@pytest.mark.parametrize(
    "frame", ["", "[]", "{}", '{"success": "yes"}', '{"success": false, "error": {"code": 5}}']
)
def test_a_client_refuses_invalid_replies(frame: str) -> None:
    with pytest.raises(BadReply):
        decode_reply(frame)


@given(st.text() | st.binary())
def test_a_client_refuses_arbitrary_text(frame: str | bytes) -> None:
    with pytest.raises(BadReply):
        decode_reply(frame)

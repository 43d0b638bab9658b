"""Any input gives a message or a single complete error."""

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from moorage.model import Code
from moorage.protocol.errors import BadMessage
from moorage.protocol.messages import (
    OPERATIONS,
    AllocationRequest,
    decode,
    encode,
)
from moorage.records.requests import LeaseRequest, ProvisionRequest, Resources

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(max_size=20)
    | st.sampled_from(["release", "why", "dry_run", "p:1-a", "nvlink"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(["gpus", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)
KEYS = sorted(
    {"adhoc", "op", "input", "mode", "zzz"}
    | set(AllocationRequest.__struct_fields__)
    | {field for kind in OPERATIONS.values() for field in kind.__struct_fields__}
)


def read_or_refuse(frame: str | bytes) -> None:
    """Every input must yield a message or a complete BadMessage."""
    try:
        message = decode(frame)
    except BadMessage as caught:
        error = caught
    else:
        assert decode(encode(message)) == message
        return
    assert isinstance(error.code, Code)
    assert error.reason
    assert error.id is None or isinstance(error.id, str | int)
    assert str(error) == error.reason


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=8))
@example({"op": "status", "lease": ""})
@example({"adhoc": "x", "id": ""})
def test_any_json_object_is_read_as_a_message_or_refused(content: dict[str, Any]) -> None:
    read_or_refuse(json.dumps(content))


@given(
    st.sampled_from([*sorted(OPERATIONS), "adhoc", "input"]),
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6),
)
def test_any_changed_message_is_read_or_refused(kind: str, content: dict[str, Any]) -> None:
    base: dict[str, Any] = {"op": kind, "lease": "l", "token": "t", "request": "r"}
    if kind == "adhoc":
        base = {"adhoc": True, "policy_rule_uri": "p", "inputs": {}, "resources": {}, "lease": {}}
    elif kind == "input":
        base = {"input": {}}
    read_or_refuse(json.dumps({**base, **content}))


@given(st.text() | st.binary() | st.text('{}[]":,0123456789.eE-+adhocntrue\\ '))
def test_any_text_is_read_as_a_message_or_refused(frame: str | bytes) -> None:
    read_or_refuse(frame)


@given(
    st.builds(
        AllocationRequest,
        policy_rule_uri=st.text(
            st.characters(codec="utf-8", exclude_categories=("Cc", "Cf", "Zl", "Zp")),
            min_size=1,
            max_size=40,
        ),
        inputs=st.dictionaries(st.text(st.characters(codec="utf-8")), st.integers(0, 2**63)),
        id=st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=9),
        clusters=st.none() | st.lists(st.sampled_from("abc") | st.integers(0, 9)).map(tuple),
        resources=st.none() | st.builds(Resources, gpus=st.integers(0, 1024)),
        lease=st.none() | st.builds(LeaseRequest, ttl_seconds=st.floats(1, 604_800)),
        provision=st.none() | st.builds(ProvisionRequest, backend=st.just("local")),
        explain=st.booleans(),
    )
)
def test_the_server_reads_messages_of_the_client(message: AllocationRequest) -> None:
    assert decode(encode(message)) == message

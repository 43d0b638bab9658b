"""Documents in answers of external services are found in every kind of envelope."""

import msgspec
import pytest

from moorage.catalog.limits import DOCUMENT_BYTES_MAX
from moorage.catalog.mirrored.envelopes import (
    DEPTH_MAX,
    Denied,
    check_depth,
    document_of,
    documents_of,
    leave_out,
    object_of,
    payload_of,
)
from moorage.catalog.mirrored.http import ServiceReply, WrongAnswer


@pytest.mark.parametrize(
    "body",
    ['[{"id":"a"}]', '{"id":"a"}', '{"success":true,"data":[{"id":"a"}]}', ' [{"id":"a"}] '],
)
def test_a_service_may_send_documents_bare_or_single_or_in_an_envelope(body):
    assert [bytes(raw) for raw in documents_of(ServiceReply(200, body.encode()))] == [b'{"id":"a"}']


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, "null"), (200, "[]"), (404, '{"error":"none"}'), (400, '{"success":false}')],
)
def test_every_form_of_an_empty_answer_is_understood(status, body):
    assert documents_of(ServiceReply(status, body.encode())) == []


def test_the_error_quotes_the_message_of_the_service():
    body = b'{"success":true,"data":[false,"bad operator"]}'
    assert payload_of(ServiceReply(200, body)) == Denied(200, "bad operator")
    with pytest.raises(WrongAnswer, match="failed: bad operator"):
        documents_of(ServiceReply(200, body))
    nested = b'{"error":{"reason":"no such index"}}'
    assert payload_of(ServiceReply(404, nested)) == Denied(404, "no such index")


@pytest.mark.parametrize(
    ("status", "body", "what"),
    [
        (401, "{}", "credentials"),
        (500, "oops", "answered 500"),
        (200, "<html>", "without a JSON document"),
        (200, '{"success":true}', "without `data`"),
        (200, "[1", "an unexpected form of JSON"),
    ],
)
def test_an_answer_in_an_unknown_form_is_an_error(status, body, what):
    with pytest.raises(WrongAnswer, match=what):
        documents_of(ServiceReply(status, body.encode()))


def test_documents_are_objects_of_bounded_size_and_depth():
    assert document_of(b'{"a":1}') == {"a": 1}
    with pytest.raises(WrongAnswer, match="not an object"):
        document_of(b"[]")
    with pytest.raises(WrongAnswer, match="more than"):
        document_of(b" " * (DOCUMENT_BYTES_MAX + 1))
    deep = {}
    for _ in range(DEPTH_MAX - 1):
        deep = {"a": deep}
    check_depth(deep)
    with pytest.raises(WrongAnswer, match=f"more than {DEPTH_MAX} levels"):
        object_of(msgspec.json.encode({"a": deep}), "a block")
    with pytest.raises(WrongAnswer, match="not a block"):
        object_of(b"[]", "a block")


def test_skipped_documents_are_reported_by_id_or_number():
    left_out = {}
    leave_out(left_out, {"id": "x" * 300}, "id", 0, "y" * 400)
    leave_out(left_out, None, "id", 3, "it is not an object")
    assert left_out == {"x" * 253: "y" * 300, "document 3": "it is not an object"}

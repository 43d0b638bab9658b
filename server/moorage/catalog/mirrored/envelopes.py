"""Unwraps and checks the answers of external services.

`catalog.mirrored.services` and `catalog.mirrored.block_metrics` are the callers. All answers are
checked, and one bad document does not affect the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from moorage.catalog.limits import CLUSTERS_MAX, DOCUMENT_BYTES_MAX
from moorage.catalog.mirrored.http import ServiceReply, WrongAnswer, quote_body
from moorage.catalog.values import Document
from moorage.records.json_values import JsonValue

DEPTH_MAX: Final = 64
"""Deepest nesting of objects and lists in one document."""
UNKNOWN: Final = frozenset({400, 404})
"""HTTP statuses for "not found"; each service uses one of them."""

_OK: Final = range(200, 300)
_UNAUTHORIZED: Final = frozenset({401, 403})


@dataclass(frozen=True, slots=True)
class Denied:
    """A refusal of the service, with its message: an unknown name, or a bad query."""

    status: int
    message: str


def payload_of(reply: ServiceReply) -> msgspec.Raw | Denied:
    """Return the content of an answer without its envelope.

    A success is a bare document or list, or `{"success": true, "data"}`. A failure is `{"success":
    false, "message" | "error"}`, `{"error": text}`, or, from the original search service,
    `{"success": true, "data": [false, text]}`.
    """
    if reply.status in _UNAUTHORIZED:
        raise WrongAnswer(f"refuses this server's credentials ({reply.status})")
    if reply.status not in _OK and reply.status not in UNKNOWN:
        raise WrongAnswer(f"answered {reply.status}{quote_body(reply.body)}")
    start = reply.body.lstrip()[:1]
    if start in {b"[", b"n"} and reply.status in _OK:  # JSON of a list or null.
        return msgspec.Raw(reply.body)
    if start != b"{":
        raise WrongAnswer(
            f"answered {reply.status} without a JSON document{quote_body(reply.body)}"
        )
    envelope = decode(reply.body, dict[str, msgspec.Raw])
    if reply.status in UNKNOWN:
        return Denied(reply.status, _message(envelope))
    if "success" in envelope:
        return _unwrap(envelope, reply.status)
    if "error" in envelope and "id" not in envelope:
        return Denied(reply.status, _message(envelope))
    return msgspec.Raw(reply.body)


def _unwrap(envelope: Mapping[str, msgspec.Raw], status: int) -> msgspec.Raw | Denied:
    if bytes(envelope["success"]).strip() != b"true":
        return Denied(status, _message(envelope))
    if "data" not in envelope:
        raise WrongAnswer("answered `success` without `data`")
    data = bytes(envelope["data"])
    if data[:1] == b"[":
        items = decode(data, list[msgspec.Raw])
        if items and bytes(items[0]) == b"false":
            text = decode(bytes(items[1]), JsonValue) if len(items) > 1 else "no reason"
            return Denied(status, str(text)[:500])
    return msgspec.Raw(data)


def documents_of(reply: ServiceReply) -> list[msgspec.Raw]:
    """Return the documents in a query's answer: a list, a single document, or nothing."""
    payload = payload_of(reply)
    if isinstance(payload, Denied):
        if payload.status in UNKNOWN:
            return []  # For "nothing found", some services answer 404, others 400.
        raise WrongAnswer(f"failed: {payload.message}")
    raw = bytes(payload).strip()
    if raw == b"null":
        return []
    return decode(raw, list[msgspec.Raw]) if raw[:1] == b"[" else [msgspec.Raw(raw)]


def _message(envelope: Mapping[str, msgspec.Raw]) -> str:
    for key in ("message", "error", "reason"):
        if key in envelope:
            value = decode(bytes(envelope[key]), JsonValue)
            text = value.get("reason", value) if isinstance(value, dict) else value
            return str(text)[:500]
    return "no reason given"


def decode(raw: bytes, kind: object) -> JsonValue:
    """Return JSON as a value of this kind; raise `WrongAnswer`."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WrongAnswer(f"answered with an unexpected form of JSON ({error})") from error


def object_of(raw: msgspec.Raw | bytes, expected: str) -> Document:
    """Return the only object of an answer; raise `WrongAnswer` if it is not one object."""
    document = decode(bytes(raw), JsonValue)
    if not isinstance(document, dict):
        raise WrongAnswer(f"answered with a value that is not {expected}")
    check_depth(document)
    return document


def check_depth(document: JsonValue) -> None:
    """Raise `WrongAnswer` if a document is nested deeper than `DEPTH_MAX`."""
    level = [document]
    for _ in range(DEPTH_MAX):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise WrongAnswer(f"answered with a document of more than {DEPTH_MAX} levels")


def document_of(content: bytes) -> Document:
    """Decode one document of a list; raise `WrongAnswer` if it is too large or not an object."""
    if len(content) > DOCUMENT_BYTES_MAX:
        raise WrongAnswer(f"a document of more than {DOCUMENT_BYTES_MAX} bytes")
    document = decode(content, JsonValue)
    if not isinstance(document, dict):
        raise WrongAnswer("it is not an object")
    return document


def leave_out(
    left_out: dict[str, str], document: JsonValue, id_field: str, number: int, what: str
) -> None:
    """Record why a document of a list is left out, under its id or else its number."""
    name = document.get(id_field) if isinstance(document, dict) else None
    if len(left_out) < CLUSTERS_MAX:
        left_out[name[:253] if isinstance(name, str) and name else f"document {number}"] = what[
            :300
        ]

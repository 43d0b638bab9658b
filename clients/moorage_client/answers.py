"""Decodes a server's replies: answers and leases, from the JSON of the socket.

The clients and the command line call these functions. Unknown keys are ignored, so that a newer
server can say more; a value of the wrong type is an error that names its key.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec.structs import astuple

from moorage.model import like_dataclasses
from moorage.protocol.replies import ErrorObject, Reply
from moorage.records.json_values import JsonObject, JsonValue
from moorage.records.leases import Lease, Workload
from moorage.records.reading import read_record
from moorage_client.errors import ProtocolViolated, RequestRefused, refusal

__all__ = [
    "Answer",
    "Lease",
    "UnreadableError",
    "Workload",
    "read_answer",
    "read_as",
    "read_flush",
    "read_from",
    "read_lease",
    "read_object",
    "read_refusal",
]

T = TypeVar("T")


class Answer(Reply, frozen=True):
    """The answer to a granted request, or to a request for advice.

    Args:
        data: The policy's return value, as plain JSON values.
        lease: The lease, if one was requested.
        warnings: Sentences about fields that the server ignored or handled in an unexpected way.
        reasons: Why the policy chose this placement, if the request had `explain`.
        request: The server's id of the request, for `why`.
        policy_rule_uri: The version that answered, if the request named an alias.
    """


like_dataclasses(Answer)


class UnreadableError(ValueError):
    """A reply is JSON, but does not match the protocol. The client handles this error itself."""


def read_answer(reply: Reply) -> Answer:
    """Return the answer in a success reply."""
    return Answer(*astuple(reply))


def read_refusal(reply: Reply) -> RequestRefused:
    """Return the error for a failure reply."""
    error = reply.error or ErrorObject()
    known = {"code", "reason", "field", "expected"}
    return refusal(
        error.code,
        error.reason or "the server gave no reason",
        field=error.field,
        expected=error.expected,
        details={name: value for name, value in reply.details.items() if name not in known},
        request=reply.request,
    )


def read_lease(document: JsonValue) -> Lease:
    """Return the lease that a reply or a JSON object describes.

    Raises:
        UnreadableError: The object breaks the protocol.
    """
    try:
        return read_record(Lease, document)
    except (msgspec.ValidationError, RecursionError) as error:
        raise UnreadableError(f"this is not a lease ({error}): {_start(document)}") from error


def read_as(kind: type[T], document: JsonValue) -> T:
    """Decode a document as a type; unknown fields are ignored.

    Raises:
        UnreadableError: The document does not match the type; the error names the field.
    """
    try:
        return read_record(kind, document)
    except (msgspec.ValidationError, RecursionError) as error:
        raise UnreadableError(f"{error}, in {_start(document)}") from error


def _start(document: JsonValue) -> str:
    """Return the beginning of a document, for messages."""
    try:
        return str(document)[:200]
    except (RecursionError, ValueError):  # Too deep, or a number with too many digits.
        return "a value that is too large to be shown"


def read_object(value: JsonValue) -> JsonObject:
    """Return a JSON object.

    Raises:
        UnreadableError: The value is not a JSON object.
    """
    if not isinstance(value, dict):
        raise UnreadableError(f"expected an object, got {_start(value)}")
    return value


def read_flush(value: JsonValue) -> list[str]:
    """Return the ids of the leases that `flush` ends."""
    return read_as(list[str], read_object(value).get("flushed"))


def read_from(url: str, read: Callable[[JsonValue], T], document: JsonValue) -> T:
    """Decode a server's reply with `read`.

    Raises:
        ProtocolViolated: The reply cannot be decoded.
    """
    try:
        return read(document)
    except UnreadableError as error:
        raise ProtocolViolated(
            url, f"the server sent a reply that does not match the protocol: {error}"
        ) from error

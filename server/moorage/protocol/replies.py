"""Writes replies on the server, and reads them in the client.

`daemon` and `web` write replies with `success`, `failure`, `raw` and `event`; the client package
reads with `decode_reply`. Shapes: docs/reference/allocation-server.md, "Requests and
replies" and "Decisions", with `lease`, `warnings`, `reasons`, `request` and `error` in addition to
the fields for existing clients.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Final, TypedDict, Unpack

import msgspec
from msgspec import UNSET, Struct, field

from moorage.model import Code
from moorage.protocol.errors import BadMessage, BadReply
from moorage.records.fields import ESSENTIAL
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.records.leases import Lease
from moorage.records.reading import read_record

MessageId = str | int | None

_encode: Final = msgspec.json.Encoder().encode
_UNENCODABLE: Final = (TypeError, ValueError, RecursionError, OverflowError)


class ErrorObject(Struct, frozen=True):
    """`error` of a failure reply. Codes that this client does not know stay readable."""

    code: str = Code.INTERNAL
    reason: str = ""
    field: str = ""
    expected: str = ""


class Reply(Struct, frozen=True, omit_defaults=True):
    """A reply, success or failure, as the server writes it and a client reads it.

    Args:
        success: Whether the reply is a success.
        data: The policy's return value, or the answer of the operation, if the message succeeded.
        message: One sentence for a person, if the message failed.
        details: `error` of a failure, with further data of the refusal.
        id: The id of the message.
        request: The server's id of the request.
        lease: The lease, if any.
        warnings: Sentences for a person.
        reasons: The reasons for the decision.
        policy_rule_uri: The version that answered, if the request named an alias.
        revision: The number of the last fact that the answer includes; for `min_revision`. Only
            servers with PostgreSQL set it.
        as_of: Of a standby's answer: the last time at which the standby had all facts, in seconds
            since the epoch.
        leader: Of a standby's answer: the address of the leader; empty while there is none.
    """

    success: Annotated[bool, ESSENTIAL]
    data: JsonValue = UNSET
    message: str = ""
    details: JsonObject = field(default_factory=dict, name="error")
    id: MessageId = None
    request: str = ""
    lease: Lease | None = None
    warnings: tuple[str, ...] = ()
    reasons: JsonMapping | None = None
    policy_rule_uri: str = ""
    revision: int = 0
    as_of: float = 0.0
    leader: str = ""

    @property
    def error(self) -> ErrorObject | None:
        """The failure for programs; None: a success. Old servers send only `message`."""
        if self.success:
            return None
        found = msgspec.convert(self.details, ErrorObject)
        return found if found.reason else msgspec.structs.replace(found, reason=self.message)


class Event(Struct, frozen=True):
    """A pushed message; `id` is the `id` of the request whose progress it reports."""

    event: Annotated[str, ESSENTIAL]
    data: JsonValue = None
    topic: str = ""
    id: str | int | None = None


class Shared(TypedDict, total=False):
    """The optional fields of a successful and of a failed `Reply`."""

    id: MessageId
    request: str
    lease: Lease | None
    warnings: tuple[str, ...]
    reasons: JsonMapping | None
    policy_rule_uri: str
    revision: int
    as_of: float
    leader: str


def success(data: JsonValue, **shared: Unpack[Shared]) -> bytes:
    """Write a success reply.

    Args:
        data: The policy's return value, or the answer of the operation.
        **shared: Further fields.

    Returns:
        JSON. If `data` or `reasons` have values that JSON does not have (NaN, infinity, objects),
        the reply is a failure with `policy_bad_output`, which still carries the lease.
    """
    try:
        text = _encode(Reply(success=True, data=data, **shared))
        if b"null" in text:  # NaN and infinity become `null`, silently.
            _check_finite([data, shared.get("reasons")])
    except _UNENCODABLE as error:
        shared |= {"reasons": None, "warnings": ()}
        return failure(
            Code.POLICY_BAD_OUTPUT,
            f"The result cannot be written as JSON: {_sayable(error)}.",
            field="data",
            expected="null, booleans, finite numbers, strings, lists, and objects with string keys",
            **shared,
        )
    return text


def failure(
    code: Code,
    reason: str,
    *,
    field: str = "",
    expected: str = "",
    details: JsonMapping | None = None,
    **shared: Unpack[Shared],
) -> bytes:
    """Write a failure reply, with `message` for people and `error` for programs.

    Args:
        code: The error code, for programs.
        reason: One sentence for a person.
        field: The field that was wrong, or empty.
        expected: The expected value, or empty.
        details: More data for `error`; `code`, `reason`, `field` and `expected` win over it.
        **shared: Further fields; the lease, if it was granted, so that the client can release it.
    """
    error: JsonObject = {**(details or {}), "code": code, "reason": reason}
    for name, value in (("field", field), ("expected", expected)):
        if value:
            error[name] = value
        else:
            error.pop(name, None)
    try:
        return _encode(Reply(success=False, message=reason, details=error, **shared))
    except _UNENCODABLE:
        # Details of a refusal may quote a policy's own text. The refusal must arrive all the same.
        text = _sayable(reason)
        plain = {"code": code, "reason": text}
        return _encode(Reply(success=False, message=text, details=plain, id=shared.get("id")))


def failure_from(error: BadMessage) -> bytes:
    """Write the failure reply to a message that could not be read."""
    return failure(
        error.code,
        error.reason,
        id=error.id,
        field=error.field,
        expected=error.expected,
        details=error.details,
    )


def raw(data: JsonValue) -> bytes:
    """Write the success reply to a block-level request: the result without envelope."""
    try:
        text = _encode(data)
        if b"null" in text:
            _check_finite(data)
    except _UNENCODABLE as error:
        return failure(
            Code.POLICY_BAD_OUTPUT, f"The result cannot be written as JSON: {_sayable(error)}."
        )
    return text


def event(name: str, data: JsonValue, topic: str = "") -> bytes:
    """Write a pushed message: news of a topic for a session that watches it."""
    return _encode({"event": name, **({"topic": topic} if topic else {}), "data": data})


def progress(id: str | int | None, data: JsonValue) -> bytes:  # noqa: A002  # The wire's name.
    """Write a pushed message: the progress of a request with `stream`."""
    named = {} if id is None else {"id": id}
    return _encode({"event": "progress", **named, "data": data})


def _check_finite(value: JsonValue) -> None:
    """Raise ValueError for NaN and infinite floats."""
    todo = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, float):
            if not math.isfinite(part):
                raise ValueError(f"{part} is not a JSON number")
        elif isinstance(part, Mapping):
            todo.extend(part.values())
        elif isinstance(part, list | tuple | set | frozenset):
            todo.extend(part)


def _sayable(text: object) -> str:
    """Return text that any reply can contain, from any text of an exception or a policy."""
    return str(text).encode(errors="replace").decode()[:512]


# The other side -----------------------------------------------------------------------------

_reply: Final = msgspec.json.Decoder(Reply).decode


def decode_reply(frame: str | bytes) -> Reply | Event:
    """Read a reply of the server.

    Args:
        frame: The text of the message. The raw result of a block-level request is no such reply;
            read it as plain JSON.

    Raises:
        BadReply: The text is neither a reply nor an event.
    """
    try:
        try:
            reply = _reply(frame)
        except msgspec.ValidationError:  # News, or a reply of another version's server.
            document = msgspec.json.decode(frame)
            if isinstance(document, dict) and "success" not in document:
                return read_record(Event, document)
            reply = read_record(Reply, document)
        reply.error  # noqa: B018  # Raises if it cannot be read.
    except (ValueError, RecursionError) as error:
        raise BadReply(f"the server sent no valid reply: {error}") from error
    return reply if reply.data is not UNSET else msgspec.structs.replace(reply, data=None)

"""Encodes and decodes JSON documents, and checks their ids, for all of `catalog`."""

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from moorage.catalog.limits import DOCUMENT_BYTES_MAX
from moorage.catalog.values import Document
from moorage.model import ClusterId, Code
from moorage.protocol.faults import ServiceError
from moorage.protocol.large_json import PART_BYTES_MAX, decode_in_parts
from moorage.records.json_values import JsonValue

INDEX_DIGITS_MAX: Final = 9
"""Maximum digits of an index into a list; a longer one is beyond every list."""
PACKABLE: Final = "JSON with whole numbers of at most 64 bits, not nested too deeply"
CLUSTER_ID_CHARS_MAX: Final = 253

# An id becomes part of URLs and file names elsewhere, so it has no character that could change a
# path. And it is not "query", which is a route in place of an id.
_CLUSTER_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]*")
_CLUSTER_ID_EXPECTED: Final = (
    f"1 to {CLUSTER_ID_CHARS_MAX} letters, digits and _ . : @ + -, starting with a letter, digit"
    " or _, other than `query`"
)

_encoder = msgspec.json.Encoder()
_packer = msgspec.msgpack.Encoder()


class WrongField(Exception):  # noqa: N818  # Used only in this package.
    """A value inside a document is wrong; callers add its place with `under`."""

    def __init__(self, path: str, expected: str) -> None:
        super().__init__(f"{path}: expected {expected}")
        self.path = path
        self.expected = expected

    def under(self, prefix: str) -> "WrongField":
        """Return the same error with the place of the surrounding value added."""
        joint = "" if not self.path or self.path.startswith("[") else "."
        return WrongField(prefix + joint + self.path, self.expected)

    def fault(self) -> ServiceError:
        """Return the error as a refusal for the client."""
        return ServiceError.wrong_field(self.path, self.expected)


def cluster_id_of(value: JsonValue, field: str) -> ClusterId:
    """Return a valid cluster id, or refuse it under the name `field`."""
    if (
        isinstance(value, str)
        and len(value) <= CLUSTER_ID_CHARS_MAX
        and value != "query"
        and _CLUSTER_ID.fullmatch(value)
    ):
        return ClusterId(value)
    raise ServiceError.wrong_field(field, _CLUSTER_ID_EXPECTED)


def encode(document: JsonValue) -> bytes:
    """Return a document as JSON; refuse values that JSON or the limits do not allow."""
    try:
        encoded = _encoder.encode(document)
    except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError.
        raise _not_json(error) from error
    if len(encoded) > DOCUMENT_BYTES_MAX:
        raise ServiceError(
            Code.TOO_LARGE,
            f"the document has {len(encoded)} bytes as JSON; at most {DOCUMENT_BYTES_MAX} are"
            " accepted: split it",
            expected=f"at most {DOCUMENT_BYTES_MAX} bytes",
        )
    return encoded


def is_packable(value: JsonValue) -> bool:
    """Return whether a value can be sent to a cell: JSON integers may be too large for msgpack."""
    try:
        _packer.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True


def pack(document: JsonValue) -> bytes:
    """Return a document as msgpack; refuse values that msgpack does not allow."""
    try:
        return _packer.encode(document)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _not_json(error) from error


def snapshot(given: JsonValue) -> tuple[bytes, Document]:
    """Return a document as JSON, and the value that a restart will read from it.

    The memory has this value: no caller has a reference to it, and it equals the stored document.
    """
    if not isinstance(given, dict):
        raise ServiceError.wrong_field("body", "a document (an object)")
    encoded = encode(given)
    try:
        return encoded, decode(encoded)
    except msgspec.DecodeError as error:
        raise _not_json(error) from error


def decode(encoded: bytes) -> Document:
    """Return the document that `encode` wrote; the store's thread decodes large ones.

    Raises:
        msgspec.MsgspecError: The document is damaged.
    """
    if len(encoded) <= PART_BYTES_MAX:
        return msgspec.json.decode(encoded, type=Document)
    return msgspec.convert(decode_in_parts(encoded), Document)


def _not_json(error: Exception) -> ServiceError:
    return ServiceError(
        Code.BAD_MESSAGE,
        f"the document holds a value that cannot be stored: {error}",
        expected="JSON values, whole numbers within 64 bits, Unicode text",
    )


def index_of(part: str, items: Sequence[JsonValue]) -> int | None:
    """Return the list index in one part of a path; None if the part is not a valid index."""
    # Not `isdigit` alone: it accepts digits that `int` refuses; `int` also refuses long texts.
    digits = part.isascii() and part.isdigit() and len(part) <= INDEX_DIGITS_MAX
    return int(part) if digits and int(part) < len(items) else None

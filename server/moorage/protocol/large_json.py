"""Reads and writes JSON of many megabytes, while other threads continue.

The decoder holds the interpreter's lock from the first byte to the last, so a thread alone does not
help: a document of 16 MiB stops the event loop until it is decoded. `web` and `catalog` call this
module in a thread for large values; small values are decoded where they arrive.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

import msgspec

from moorage.records.json_values import JsonObject, JsonValue

PART_BYTES_MAX: Final = 64 * 1024
"""At most this many bytes are decoded in one step, some two milliseconds; larger values are
split."""
LEVELS_MAX: Final = 8
"""Values are split on at most this many levels; each level reads all bytes once more. The nodes of
a cluster document, its largest part, are on the third level."""

VALUES_MAX: Final = 2_000
"""At most this many values are encoded in one step; a text counts one more per 64 characters."""
ROWS_MAX: Final = 64
"""At most this many members of a list are encoded in one step, if the first of them is small."""

_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_elements: Final = msgspec.json.Decoder(list[msgspec.Raw])


def decode_in_parts(encoded: bytes) -> JsonValue:
    """Return the value of a JSON text; other threads run between its parts.

    Finding the ends of the parts takes about a tenth of the time of decoding them; this is the
    longest time that the interpreter's lock is held.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: The errors of
        `msgspec.json.decode`.
    """
    try:
        return _value(memoryview(encoded), LEVELS_MAX)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(encoded)  # Its error names the byte in the whole text.


def _value(encoded: memoryview, levels: int) -> JsonValue:
    if len(encoded) > PART_BYTES_MAX and levels > 0:
        match bytes(encoded[:PART_BYTES_MAX]).lstrip()[:1]:
            case b"{":
                members = _members.decode(encoded).items()
                return {name: _value(memoryview(each), levels - 1) for name, each in members}
            case b"[":
                return [_value(memoryview(each), levels - 1) for each in _elements.decode(encoded)]
            case _:  # A text or number, or no JSON: the decoder below says which.
                pass
    return msgspec.json.decode(encoded)


def is_large(value: JsonValue) -> bool:
    """Return whether a value is too large to be encoded in one step."""
    return _cost(value, VALUES_MAX) > VALUES_MAX


def encode_in_parts(value: JsonValue) -> Iterator[bytes]:
    """Yield the JSON text of a value in parts, each encoded when the caller takes it.

    Args:
        value: A value that `msgspec.json.encode` accepts; it must not change before the last part.
            Large values may only contain lists, tuples, and dicts with texts as keys.
    """
    part = bytearray()
    for piece in _pieces(value):
        part += piece
        if len(part) > PART_BYTES_MAX // 4:
            yield bytes(part)
            part.clear()
    yield bytes(part)


def _pieces(value: JsonValue) -> Iterator[bytes]:
    if isinstance(value, dict) and is_large(value):
        yield b"{"
        yield from _fields(value)
        yield b"}"
    elif isinstance(value, list | tuple) and is_large(value):
        yield b"["
        yield from _rows(value)
        yield b"]"
    else:
        yield msgspec.json.encode(value)


def _fields(value: JsonObject) -> Iterator[bytes]:
    """Yield an object's members without the braces; small members are joined."""
    some: JsonObject = {}
    comma, left = b"", VALUES_MAX
    for name, each in value.items():
        left -= _cost(each, VALUES_MAX)
        if left >= 0:
            some[name] = each
            continue
        if some:
            yield comma + msgspec.json.encode(some)[1:-1]
            comma = b","
            some = {}
        yield comma + msgspec.json.encode(name) + b":"
        yield from _pieces(each)
        comma, left = b",", VALUES_MAX
    if some:
        yield comma + msgspec.json.encode(some)[1:-1]


def _rows(value: Sequence[JsonValue]) -> Iterator[bytes]:
    """Yield a list's members without the brackets; small members are joined."""
    at = 0
    while at < len(value):
        if at:
            yield b","
        cost = _cost(value[at], VALUES_MAX)
        if cost > VALUES_MAX:
            yield from _pieces(value[at])
            at += 1
        else:
            # Rows mostly cost the same: the first row's cost decides how many are encoded at once.
            most = min(ROWS_MAX, max(1, VALUES_MAX // cost))
            yield msgspec.json.encode(value[at : at + most])[1:-1]
            at += most


def _cost(value: JsonValue, budget: int) -> int:
    """Return the number of values in a value, itself included, or a number above `budget`."""
    found = 1
    if isinstance(value, str | bytes):
        return found + len(value) // 64
    if isinstance(value, dict):
        value = chain(value, value.values())
    elif not isinstance(value, list | tuple):
        return found
    for each in value:
        found += _cost(each, budget - found)
        if found > budget:
            break
    return found

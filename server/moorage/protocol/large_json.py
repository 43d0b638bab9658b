"""JSON of many megabytes, decoded without stopping whatever else the process does meanwhile.

The decoder holds the interpreter's lock from the first byte to the last, so a thread alone spares
nobody: a document of 16 MiB stops the event loop for as long as it takes to decode. `web` and
`catalog` call this in a thread for what is large; small values are decoded where they arrive.
"""

from typing import Any, Final

import msgspec

__all__ = ["PART_BYTES_MAX", "decode_in_parts"]

PART_BYTES_MAX: Final = 64 * 1024
"""What is decoded in one go, some two milliseconds; larger values are taken apart."""
LEVELS_MAX: Final = 8
"""How deep values are taken apart, each level being one more look at all bytes. The nodes of a
cluster document, which are most of it, lie on the third."""

_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_elements: Final = msgspec.json.Decoder(list[msgspec.Raw])


def decode_in_parts(encoded: bytes) -> Any:
    """Return the value of a JSON text; other threads get their turn between its parts.

    To find where the parts end takes about a tenth of the time that it takes to decode them: that
    is how long the interpreter's lock is held at most.

    Args:
        encoded: JSON in UTF-8.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: As `msgspec.json.decode`.

    """
    try:
        return _value(memoryview(encoded), LEVELS_MAX)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(encoded)  # Says at which byte of the whole it is wrong.


def _value(encoded: memoryview, levels: int) -> Any:
    if len(encoded) > PART_BYTES_MAX and levels > 0:
        match bytes(encoded[:PART_BYTES_MAX]).lstrip()[:1]:
            case b"{":
                members = _members.decode(encoded).items()
                return {name: _value(memoryview(each), levels - 1) for name, each in members}
            case b"[":
                return [_value(memoryview(each), levels - 1) for each in _elements.decode(encoded)]
            case _:
                pass
    return msgspec.json.decode(encoded)

"""Counts the values of a JSON text, in a few passes in C, before it is decoded.

A mebibyte of `[],` is a third of a million lists, which take a third of a second to build, and
`1e290` takes a hundred times as long to read as `1e280`. So `messages` and the HTTP side refuse
texts by these counts. Counting builds no objects, and copies only some kilobytes at a time.
"""

import re
from collections.abc import Iterator
from itertools import accumulate, chain, islice
from typing import Final

LARGE_BYTES: Final = 32 * 1024
"""Larger texts are read in a turn of a `FairSemaphore`, since each may block the loop for
milliseconds."""
PARTS_MAX: Final = 32_768
"""At most this many arrays, objects and named fields in one message; building them takes 10 ms."""
VALUES_MAX: Final = 131_072
"""At most this many values in one message."""
SLOW_NUMBERS_MAX: Final = 512
"""At most this many numbers in one message that take ten microseconds or more each: with an
exponent from 200 to 399, or with 190 digits in a row."""
_SLOW_DIGITS: Final = b"0" * 190
_PIECE_BYTES: Final = 64 * 1024
_STEPS: Final = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}

_ZEROS: Final = bytes.maketrans(b"123456789", b"000000000")
_EXPONENTS: Final = bytes.maketrans(b"0123456789E]} \t\r\n", b"z122111111e,,,,,,")
"""Maps the digits 1 and 4 to 9 to `1`, 3 to `2`, 0 to `z`, and all that may follow a number to
`,`."""
_SLOW_EXPONENT: Final = re.compile(rb"e2[z12][z12],")
_LONG_EXPONENT: Final = re.compile(rb"ez+2[z12][z12],")


def has_more_parts(encoded: bytes, most: int) -> bool:
    """Return whether there are more arrays, objects and named fields than the bound."""
    return _has_more(encoded, b"[{:", most)


def has_more_values(encoded: bytes, most: int) -> bool:
    """Return whether there are more values than the bound; empty arrays and objects count twice."""
    return _has_more(encoded, b"[{,", most)


def is_deeper(encoded: bytes, levels: int) -> bool:
    """Return whether arrays and objects are nested deeper than the bound.

    Only the first `PARTS_MAX` brackets are checked: a text with more brackets is refused.
    """
    if encoded.count(b"{") + encoded.count(b"[") <= levels:
        return False
    brackets = chain.from_iterable(_outside_texts(encoded, b"[]{}"))
    steps = map(_STEPS.__getitem__, islice(brackets, PARTS_MAX))
    return max(accumulate(steps), default=0) > levels


def has_slow_numbers(encoded: bytes, most: int) -> bool:
    """Return whether more numbers than the bound are slow to read; those in texts count, too."""
    if len(encoded) <= 4 * most:
        return False
    if encoded.translate(_ZEROS).count(_SLOW_DIGITS) > most:
        return True
    short = encoded.translate(_EXPONENTS, b"+-")
    looks = (_SLOW_EXPONENT, short.count(b"e2")), (_LONG_EXPONENT, short.count(b"ez"))
    found = (form.finditer(short) for form, many in looks if many > most)
    return next(islice(chain.from_iterable(found), most, None), None) is not None


def _has_more(encoded: bytes, characters: bytes, most: int) -> bool:
    each = [bytes([one]) for one in characters]
    if len(encoded) <= most or sum(map(encoded.count, each)) <= most:
        return False  # This count includes those in texts.
    found = 0
    for piece in _outside_texts(encoded, characters):
        found += sum(map(piece.count, each))
        if found > most:
            return True
    return False


def _outside_texts(encoded: bytes, wanted: bytes) -> Iterator[bytes]:
    """Yield the given characters that stand outside of JSON strings, in order."""
    dropped = bytes(set(range(256)).difference(b'"' + wanted))
    at, quote = 0, b""
    while at < len(encoded):
        end = at + _PIECE_BYTES
        while encoded[end - 1 : end] == b"\\":  # A backslash belongs to the next character.
            end += 1
        piece, at = encoded[at:end], end
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        piece = (quote + piece.translate(None, dropped)).replace(b'""', b"")
        outside = piece.split(b'"')
        quote = b"" if len(outside) % 2 else b'"'
        yield b"".join(outside[::2])

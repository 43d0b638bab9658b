"""Equality of JSON values, and texts that count as numbers, for this package.

Numbers equal numbers (4 and 4.0), texts equal texts, and true does not equal 1. A text in the query
that reads as a number also equals that number (`"value": "4"`), because the documented samples
write numbers so. A text in a document equals no number.
"""

import math
import re
from collections.abc import Hashable
from enum import Enum
from typing import Final

from moorage.records.json_values import JsonValue

# Python's own float() also reads "nan", "1_000" and digits of other scripts.
_NUMBER: Final = re.compile(
    r" *[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})(e[+-]?[0-9]{1,3})? *", re.IGNORECASE
)


class Mark(Enum):
    """Keys for values that Python would confuse: True with 1, and None with a missing key."""

    TRUE = True
    FALSE = False
    NULL = None


def is_number(value: JsonValue) -> bool:
    """Return whether a value is a number, and not a bool or NaN."""
    if isinstance(value, float):
        return not math.isnan(value)
    return isinstance(value, int) and not isinstance(value, bool)


def number_in(value: JsonValue) -> float | int | None:
    """Return the value of a query as a finite number, also from a text, or None."""
    if isinstance(value, str):
        if not _NUMBER.fullmatch(value):
            return None
        try:
            value = int(value)
        except ValueError:
            value = float(value)
    if not is_number(value):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # An integer too large for a float.
        return None


def key_of(value: JsonValue) -> Hashable:
    """Return a key that is the same for equal scalars; None for objects and lists."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return Mark.TRUE if value else Mark.FALSE
    if value is None:
        return Mark.NULL
    return value if is_number(value) else None


def keys_of(operand: JsonValue) -> set[Hashable]:
    """Return the keys of all scalars equal to a value of a query; none for an object or list."""
    key = key_of(operand)
    if key is None:
        return set()
    number = number_in(operand) if isinstance(operand, str) else None
    return {key} if number is None else {key, number}


def same(value: JsonValue, structure: JsonValue) -> bool:
    """Return whether a value equals an object or list of a query, with all nested values."""
    if isinstance(structure, dict):
        return (
            isinstance(value, dict)
            and value.keys() == structure.keys()
            and all(same(value[name], part) for name, part in structure.items())
        )
    if isinstance(structure, list):
        return (
            isinstance(value, list)
            and len(value) == len(structure)
            and all(same(one, other) for one, other in zip(value, structure, strict=True))
        )
    key = key_of(value)
    return key is not None and key == key_of(structure)

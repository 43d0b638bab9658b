"""Converts the value that a policy returned to plain JSON, or names the part that is not JSON.

The cell calls this module, so that an honest mistake becomes a clear refusal. The host does not
rely on the cell: the host parses the answer as JSON text itself.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from moorage.records.json_values import JsonObject, JsonValue
from moorage.sandbox.wire.limits import ANSWER_BYTES_MAX

DEPTH_MAX: Final = 64
"""Maximum nesting of containers; a value that contains itself exceeds it, too."""
NODES_MAX: Final = 250_000
"""Maximum scalars and containers in one value."""

_SHORT_BYTES: Final = 4096
"""Bytes of JSON up to which a value is checked before it is copied: it is probably plain."""

_encode: Final = msgspec.json.Encoder().encode
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1


class NotPlainError(ValueError):
    """A value cannot be sent as JSON.

    Args:
        reason: The fault of the value, in words.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = ""

    def __str__(self) -> str:
        """Return the reason, with the path of the wrong part."""
        return f"{self.path or 'the value'}: {self.reason}"


def to_plain_and_packed(value: Any) -> tuple[JsonValue, bytes]:
    """Return `to_plain(value)`, which may be `value` itself, and its JSON text.

    A proposal is usually short and plain, so nothing is copied.

    Raises:
        NotPlainError: A part of the value has no JSON form.
        UnicodeEncodeError: A text in the value is not valid Unicode.
    """
    if type(value) is dict:
        try:
            packed: bytes = _encode(value)
            if len(packed) <= _SHORT_BYTES and _is_plain(value):
                return value, packed
        except Exception:  # noqa: BLE001, S110  # Foreign types may raise anything.
            pass
    plain = to_plain(value)
    return plain, _encode(plain)


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether a container is plain already, so that `to_plain` would not change it."""
    if depth >= DEPTH_MAX:
        return False
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                return False
        value = value.values()
    for item in value:
        kind = type(item)
        if kind is list or kind is dict:
            if not _is_plain(item, depth + 1):
                return False
        elif kind is not str and not _is_plain_scalar(item):
            return False
    return True


def _is_plain_scalar(item: object) -> bool:
    if type(item) is int:
        return _INT_MIN <= item <= _INT_MAX
    if type(item) is float:
        return math.isfinite(item)
    return item is None or type(item) is bool


def to_plain(value: Any) -> JsonValue:
    """Return `value` made of dict, list, str, int, float, bool and None only.

    Tuples become lists, numpy scalars and arrays their Python values, whole-number keys text.

    Raises:
        NotPlainError: A part has no JSON form; the message has its path.
    """
    return _convert(value, 0, [NODES_MAX])


def _convert(value: Any, depth: int, budget: list[int]) -> JsonValue:
    kind = type(value)
    if kind is str:
        if len(value) > ANSWER_BYTES_MAX:
            raise NotPlainError(f"a text of {len(value)} characters")
        return value
    if value is None or kind is bool:
        return value
    if kind is int or kind is float:
        return _number(value)
    budget[0] -= 1
    if depth >= DEPTH_MAX:
        raise NotPlainError(f"nested deeper than {DEPTH_MAX}, or contains itself")
    if isinstance(value, dict):
        return _convert_mapping(value, depth, budget)
    if isinstance(value, list | tuple):
        return _convert_items(value, depth, budget)
    return _convert_scalar(value, depth, budget)


def _number(value: float) -> float:
    if isinstance(value, int):
        if _INT_MIN <= value <= _INT_MAX:
            return value
        raise NotPlainError("a whole number that does not fit into 64 bits")
    if math.isfinite(value):
        return value
    raise NotPlainError(f"{value} is not a number that JSON knows")


def _convert_mapping(value: Mapping[object, object], depth: int, budget: list[int]) -> JsonObject:
    plain: JsonObject = {}
    for key, item in value.items():
        if type(key) is not str:
            key = _key(key)
        try:
            plain[key] = _convert(item, depth + 1, budget)
        except NotPlainError as error:
            error.path = f".{key}{error.path}" if len(error.path) < DEPTH_MAX * 4 else error.path
            raise
    _charge(budget, len(plain))
    return plain


def _convert_items(value: Sequence[object], depth: int, budget: list[int]) -> list[JsonValue]:
    _charge(budget, len(value))
    plain: list[JsonValue] = []
    for number, item in enumerate(value):
        try:
            plain.append(_convert(item, depth + 1, budget))
        except NotPlainError as error:
            if len(error.path) < DEPTH_MAX * 4:
                error.path = f"[{number}]{error.path}"
            raise
    return plain


def _convert_scalar(value: Any, depth: int, budget: list[int]) -> JsonValue:
    """Return subclasses of the plain scalars, and numpy's values, as plain scalars."""
    if isinstance(value, np.generic):
        return _convert(value.item(), depth + 1, budget)
    if isinstance(value, np.ndarray):
        _charge(budget, value.size)
        return _convert(value.tolist(), depth + 1, budget)
    if isinstance(value, str):
        return _convert(str.__str__(value), depth + 1, budget)
    if isinstance(value, int):
        return _convert(int.__add__(value, 0), depth + 1, budget)
    if isinstance(value, float):
        return _convert(float.__add__(value, 0.0), depth + 1, budget)
    raise NotPlainError(f"a {type(value).__name__!s} has no JSON form")


def _key(key: object) -> str:
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return str(int(key))
    raise NotPlainError(f"a key of type {type(key).__name__!s}; keys are text")


def _charge(budget: list[int], amount: int) -> None:
    budget[0] -= amount
    if budget[0] < 0:
        raise NotPlainError(f"more than {NODES_MAX} values in one answer")

"""Type checks of JSON values: each function returns the value, or refuses it with its place."""

from collections.abc import Sequence

from moorage.model import Code
from moorage.query.errors import QueryError, missing, too_long, under, wrong
from moorage.query.limits import PATTERN_CHARS_MAX
from moorage.query.values import number_in
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue


def an_object(value: JsonValue, place: str, expected: str = "an object") -> JsonObject:
    """Return the value if it is an object, else refuse it."""
    if not isinstance(value, dict):
        raise wrong(value, expected, place or "body")
    for key in value:
        if not isinstance(key, str):
            raise wrong(key, "texts as keys", place or "body")
    return value


def a_list(
    value: JsonValue, place: str, expected: str, most: int, least: int = 1
) -> Sequence[JsonValue]:
    """Return the value if it is a list of `least` to `most` elements, else refuse it."""
    if not isinstance(value, list) or len(value) < least:
        raise wrong(value, expected, place)
    if len(value) > most:
        raise QueryError(
            place, f"at most {most} elements", f"has {len(value)} elements", Code.TOO_LARGE
        )
    return value


def a_text(value: JsonValue, place: str, expected: str) -> str:
    """Return the value if it is a text within the limit for patterns, else refuse it."""
    if not isinstance(value, str):
        raise wrong(value, expected, place)
    if len(value) > PATTERN_CHARS_MAX:
        raise too_long(PATTERN_CHARS_MAX, place)
    return value


def a_number(value: JsonValue, place: str) -> int | float:
    """Return the value as a number, also from a text, or refuse it."""
    number = number_in(value)
    if number is None:
        raise wrong(value, "a number", place)
    return number


def one_of(value: JsonValue, place: str, names: Sequence[str]) -> str:
    """Return the value if it is one of these names, else refuse it."""
    if not isinstance(value, str) or value not in names:
        raise wrong(value, "one of " + ", ".join(names), place)
    return value


def check_keys(given: JsonMapping, keys: Sequence[str], at: str) -> None:
    """Refuse an object with other keys than these."""
    for key in given:
        if key not in keys:
            raise QueryError(under(at, key), "only " + ", ".join(keys), "is not known here")


def only(given: JsonMapping, keys: Sequence[str], at: str) -> None:
    """Refuse an object that does not have exactly these keys."""
    check_keys(given, keys, at)
    for key in keys:
        if key not in given:
            raise missing(under(at, key), f"{', '.join(keys)} together")

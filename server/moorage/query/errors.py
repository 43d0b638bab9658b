"""Refusals of queries: one exception for this package, with the place of the fault."""

from typing import Final

from moorage.model import Code
from moorage.query.limits import DEPTH_MAX, PATH_CHARS_MAX
from moorage.query.values import number_in
from moorage.records.json_values import JsonValue

SHOWN_CHARS_MAX: Final = 40
"""Maximum characters of a wrong value that an error repeats."""


class QueryError(Exception):
    """A query is invalid; the error has the place.

    Args:
        path: The place inside the query, e.g. `filter.clusterQuery.conditions[2].operator`.
        expected: The value that was expected at the place.
        reason: The value that was found instead, or the reason of the refusal.
        code: `bad_message`; `unsupported`: the query is valid Mongo but refused; `too_large`.
    """

    def __init__(
        self, path: str, expected: str, reason: str, code: Code = Code.BAD_MESSAGE
    ) -> None:
        super().__init__(f"{path}: {reason}; expected {expected}")
        self.path = path
        self.expected = expected
        self.reason = reason
        self.code = code


def missing(path: str, expected: str) -> QueryError:
    """Return the refusal of a query that lacks a key."""
    return QueryError(path, expected, "is missing")


def under(at: str, key: str) -> str:
    """Return the place of a key within the place `at`; the outermost place is empty."""
    if len(key) > PATH_CHARS_MAX:  # A place is for reading, whatever the key is.
        key = f"{key[:PATH_CHARS_MAX]}…"
    return f"{at}.{key}" if at else key


def wrong(value: JsonValue, expected: str, path: str) -> QueryError:
    """Return the refusal of a value; the message shows the value."""
    return QueryError(path, expected, f"is {_show(value)}")


def _show(value: JsonValue) -> str:
    match value:
        case None | True | False:
            return {None: "null", True: "true", False: "false"}[value]
        case str():
            shortened = value[:SHOWN_CHARS_MAX] + "…" * (len(value) > SHOWN_CHARS_MAX)
            return repr(shortened)
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case dict():
            return "an object" if value else "an empty object"
        case _ if number_in(value) is not None:
            return f"{value:.6g}"
        case _:  # NaN, infinity, or too large.
            return "not a finite number"


def too_many(most: int, what: str, path: str) -> QueryError:
    """Return the refusal of a list with too many elements."""
    return QueryError(path, f"at most {most} {what}", "is one too many", Code.TOO_LARGE)


def too_long(most: int, path: str) -> QueryError:
    """Return the refusal of a text that is too long."""
    return QueryError(path, f"at most {most} characters", "is too long", Code.TOO_LARGE)


def too_deep(path: str) -> QueryError:
    """Return the refusal of a query that is nested too deeply."""
    expected = f"at most {DEPTH_MAX} levels"
    return QueryError(path, expected, "is one level too deep", Code.TOO_LARGE)

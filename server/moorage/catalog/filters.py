"""Mongo-style filters on documents: the subset that the documents name, and nothing that runs code.

`compile_filter` turns the filter of a query into a function on documents; the catalog calls it for
the `/query` endpoints and the injected clients. Paths are dotted and reach through arrays.
Numbers given as strings match numeric fields (allocation-server.md, 13).
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from moorage.catalog.documents import PATH_PARTS_MAX
from moorage.model import Code
from moorage.protocol.faults import ServiceError

__all__ = ["CONDITIONS_MAX", "DEPTH_MAX", "OPERATORS", "VALUES_MAX", "compile_filter"]

DEPTH_MAX: Final = 16
"""`$and`, `$or` and `$not` within each other."""
CONDITIONS_MAX: Final = 256
"""Conditions of one filter."""
VALUES_MAX: Final = 10_000
"""Values of one `$in` or `$nin`."""

Predicate = Callable[[Any], bool]

_ORDERED: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
OPERATORS: Final = ("$eq", "$ne", "$in", "$nin", *_ORDERED, "$exists", "$not")
"""Operators on a field."""


def compile_filter(query: Any) -> Predicate:
    """Return the function that says whether a document matches.

    Args:
        query: The filter; an empty object matches everything.

    Raises:
        ServiceError: `bad_message` or `unsupported`, naming the path, or `too_large`.

    """
    return _Compiler().filter(query, "", 0)


@dataclass(slots=True)
class _Compiler:
    conditions: int = 0

    def filter(self, query: Any, at: str, depth: int) -> Predicate:
        if not isinstance(query, dict):
            raise ServiceError.wrong_field(at or "query", "an object of fields and conditions")
        if depth > DEPTH_MAX:
            raise ServiceError(
                Code.TOO_LARGE, f"{at}: at most {DEPTH_MAX} levels of conditions", field=at
            )
        return _all([self._clause(key, value, at, depth) for key, value in query.items()])

    def _clause(self, key: str, value: Any, at: str, depth: int) -> Predicate:
        path = f"{at}.{key}" if at else key
        if key in {"$and", "$or"}:
            if not isinstance(value, list) or not value:
                raise ServiceError.wrong_field(path, "a non-empty list of filters")
            tests = [
                self.filter(part, f"{path}[{number}]", depth + 1)
                for number, part in enumerate(value)
            ]
            return _all(tests) if key == "$and" else _any(tests)
        if key.startswith("$"):
            _refuse(path, key, ("$and", "$or"))
        self._count(path)
        parts = key.split(".")
        if len(parts) > PATH_PARTS_MAX:
            raise ServiceError.wrong_field(path, f"a path of at most {PATH_PARTS_MAX} parts")
        return self._field(parts, value, path, depth)

    def _count(self, path: str) -> None:
        self.conditions += 1
        if self.conditions > CONDITIONS_MAX:
            raise ServiceError(
                Code.TOO_LARGE,
                f"{path}: a filter has at most {CONDITIONS_MAX} conditions;"
                " use $in for a list of values",
                field=path,
            )

    def _field(self, parts: Sequence[str], condition: Any, path: str, depth: int) -> Predicate:
        if not isinstance(condition, dict) or not any(key.startswith("$") for key in condition):
            return _equal(parts, condition)
        if depth > DEPTH_MAX:
            raise ServiceError(
                Code.TOO_LARGE, f"{path}: at most {DEPTH_MAX} levels of conditions", field=path
            )
        tests: list[Predicate] = []
        for name, operand in condition.items():
            here = f"{path}.{name}"
            self._count(here)
            if name == "$not":
                if not isinstance(operand, dict) or not operand:
                    raise ServiceError.wrong_field(here, "an object of operators")
                tests.append(_not(self._field(parts, operand, here, depth + 1)))
            else:
                tests.append(_operator(name, parts, operand, here))
        return _all(tests)


def _refuse(path: str, name: str, accepted: Sequence[str]) -> NoReturn:
    expected = "one of " + ", ".join(accepted)
    raise ServiceError(
        Code.UNSUPPORTED,
        f"{path}: {name} is not accepted here; expected {expected}",
        field=path,
        expected=expected,
    )


def _operator(name: str, parts: Sequence[str], operand: Any, path: str) -> Predicate:
    if name == "$eq":
        return _equal(parts, operand)
    if name == "$ne":
        return _not(_equal(parts, operand))
    if name in {"$in", "$nin"}:
        if not isinstance(operand, list) or len(operand) > VALUES_MAX:
            raise ServiceError.wrong_field(path, f"a list of at most {VALUES_MAX} values")
        member = _member(parts, operand)
        return member if name == "$in" else _not(member)
    if name == "$exists":
        wanted = bool(operand)
        return lambda document: any(True for _ in _found(document, parts)) is wanted
    if name in _ORDERED:
        return _ordered(parts, _ORDERED[name], operand, path)
    _refuse(path, name, OPERATORS)


def _all(tests: Sequence[Predicate]) -> Predicate:
    return tests[0] if len(tests) == 1 else lambda document: all(test(document) for test in tests)


def _any(tests: Sequence[Predicate]) -> Predicate:
    return lambda document: any(test(document) for test in tests)


def _not(test: Predicate) -> Predicate:
    return lambda document: not test(document)


# Values at a path ------------------------------------------------------------------------------


def _found(node: Any, parts: Sequence[str]) -> Iterator[Any]:
    """Yield what lies at a path; arrays on the way are looked into."""
    if not parts:
        yield node
    elif isinstance(node, dict):
        if parts[0] in node:
            yield from _found(node[parts[0]], parts[1:])
        # Some writers flatten nested groups into dotted keys (defect D15): both forms resolve.
        for length in range(2, len(parts) + 1):
            flat = ".".join(parts[:length])
            if flat in node:
                yield from _found(node[flat], parts[length:])
    elif isinstance(node, list):
        if parts[0].isdigit() and int(parts[0]) < len(node):
            yield from _found(node[int(parts[0])], parts[1:])
        for element in node:
            if isinstance(element, dict):
                yield from _found(element, parts)


def _values(document: Any, parts: Sequence[str]) -> Iterator[Any]:
    """Yield what a comparison looks at: the values found, and the elements of arrays found."""
    for value in _found(document, parts):
        yield value
        if isinstance(value, list):
            yield from value


# Comparisons: numbers with numbers, text with text, and text that reads as a number with both ----


def _number_of(value: Any) -> float | int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return None
        return number if math.isfinite(number) else None
    return None


def _key(value: Any) -> tuple[str, Any] | None:
    """Return what equal scalars have in common; None for objects and lists."""
    if value is None or isinstance(value, (bool, str)):
        return type(value).__name__, value
    return ("number", value) if isinstance(value, (int, float)) else None


def _member(parts: Sequence[str], operands: Sequence[Any]) -> Predicate:
    keys: set[tuple[str, Any]] = set()
    structures: list[Any] = []
    for operand in operands:
        key = _key(operand)
        if key is None:
            structures.append(operand)
            continue
        keys.add(key)
        if isinstance(operand, str) and (number := _number_of(operand)) is not None:
            keys.add(("number", number))
    takes_missing = _key(None) in keys

    def test(document: Any) -> bool:
        missing = True
        for value in _values(document, parts):
            missing = False
            key = _key(value)
            if key in keys if key is not None else value in structures:
                return True
        return missing and takes_missing  # As in Mongo, null matches a field that is not there.

    return test


def _equal(parts: Sequence[str], operand: Any) -> Predicate:
    return _member(parts, [operand])


def _ordered(
    parts: Sequence[str], compare: Callable[[Any, Any], bool], operand: Any, path: str
) -> Predicate:
    number = _number_of(operand)
    text = operand if isinstance(operand, str) else None
    if number is None and text is None:
        raise ServiceError.wrong_field(path, "a number or a text")

    def holds(value: Any) -> bool:
        if isinstance(value, str):
            return text is not None and compare(value, text)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return number is not None and compare(value, number)

    return lambda document: any(holds(value) for value in _values(document, parts))

"""Evaluates a condition on a document; the index must give the same results.

`predicate` compiles a condition to closures, once. The index calls it for documents whose values
its columns cannot store. Callers with one or two documents call `evaluate`.
"""

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Final, assert_never

from moorage.query.conditions import (
    AllOf,
    Among,
    AnyOf,
    Condition,
    Exists,
    Leaf,
    Matches,
    Not,
    Ordered,
    OrderName,
)
from moorage.query.paths import reader
from moorage.query.values import Mark, is_number, key_of, keys_of, number_in, same
from moorage.records.json_values import JsonValue

Predicate = Callable[[JsonValue], bool]
_Test = Callable[[Sequence[JsonValue]], bool]

ORDERS: Final[dict[OrderName, Callable[[JsonValue, JsonValue], JsonValue]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


def evaluate(condition: Condition, document: JsonValue) -> bool:
    """Return whether a document meets a condition. Use `predicate` for many documents."""
    return predicate(condition)(document)


def predicate(condition: Condition) -> Predicate:
    """Return a function that checks whether a document meets a condition."""
    match condition:
        case AllOf(parts):
            tests = [predicate(part) for part in parts]
            return lambda document: all(test(document) for test in tests)
        case AnyOf(parts):
            tests = [predicate(part) for part in parts]
            return lambda document: any(test(document) for test in tests)
        case Not(part):
            positive = predicate(part)
            return lambda document: not positive(document)
        case Among() | Ordered() | Matches() | Exists():
            read, holds = reader(condition.of), _test(condition)
            return lambda document: holds(read(document))
        case _:
            assert_never(condition)


def spread(found: Sequence[JsonValue]) -> list[JsonValue]:
    """Return the values to compare: the found values, and the elements of found arrays."""
    values: list[JsonValue] = []
    for value in found:
        values.append(value)
        if isinstance(value, list):
            values += value
    return values


def _test(leaf: Leaf) -> _Test:
    match leaf:
        case Exists():
            return bool
        case Among(values=operands):
            return _among(operands)
        case Ordered(operator=name, operand=operand):
            return _ordering_test(ORDERS[name], operand)
        case Matches(pattern=pattern):
            matches = pattern.matches
            return lambda found: any(
                isinstance(value, str) and matches(value) for value in spread(found)
            )
        case _:
            assert_never(leaf)


def _among(operands: Sequence[JsonValue]) -> _Test:
    keys: set[Hashable] = set().union(*(keys_of(operand) for operand in operands))
    structures = [operand for operand in operands if isinstance(operand, (dict, list))]
    takes_nothing = Mark.NULL in keys

    def holds(found: Sequence[JsonValue]) -> bool:
        if not found:
            return takes_nothing  # As in Mongo, null equals a field that is not there.
        return any(
            key_of(value) in keys or any(same(value, structure) for structure in structures)
            for value in spread(found)
        )

    return holds


def _ordering_test(
    compare: Callable[[JsonValue, JsonValue], JsonValue], operand: float | str
) -> _Test:
    number = number_in(operand)
    text = operand if isinstance(operand, str) else None

    def one(value: JsonValue) -> bool:
        if isinstance(value, str):
            return text is not None and compare(value, text)
        return number is not None and is_number(value) and compare(value, number)

    return lambda found: any(one(value) for value in spread(found))

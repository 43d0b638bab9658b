"""Reads the values at a path of a document, for `evaluate` and the columns of the index.

A path leads into every element of an array, as in Mongo; a number in the path selects one element.
Different spellings match: `load5m` and `load_5m`, `node` and `nodes` at the start, and nested
groups that a writer flattened into dotted keys.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, assert_never

from moorage.query.conditions import Fold, FoldName, Path, Source
from moorage.query.values import is_number
from moorage.records.json_values import JsonObject, JsonValue

Reader = Callable[[JsonValue], list[JsonValue]]

_LOAD: Final = re.compile(r"load_?([0-9]{1,4}m)")
_NODES: Final = ("nodes", "node")


@dataclass(frozen=True, slots=True)
class _Step:
    """One part of a path.

    Args:
        name: The name as given.
        number: The array element that it selects, or -1.
        others: Keys to try if `name` is missing: another spelling, and dotted keys for this part
            and later ones; each with the number of the part that follows.
    """

    name: str
    number: int
    others: tuple[tuple[str, int], ...]


def reader(source: Source) -> Reader:
    """Return a function that finds the values of a path or aggregate in a document."""
    match source:
        case Path():
            steps = _steps(source.text)
            return lambda document: _find(document, steps)
        case Fold():
            return _folder(source.how, reader(source.target))
        case _:
            assert_never(source)


def _steps(text: str) -> tuple[_Step, ...]:
    parts = text.split(".")
    spellings = [_spellings(part, number, len(parts)) for number, part in enumerate(parts)]
    return tuple(
        _Step(
            part,
            int(part) if part.isascii() and part.isdigit() else -1,
            tuple(
                (".".join(names), after)
                for after in range(at + 1, len(parts) + 1)
                for names in product(*spellings[at:after])
            )[1:],
        )
        for at, part in enumerate(parts)
    )


def _spellings(part: str, number: int, parts: int) -> tuple[str, ...]:
    # Only the first and the last part have several spellings, so a path has few.
    if number == 0 and part in _NODES:
        return (part, *(name for name in _NODES if name != part))
    if number == parts - 1 and (load := _LOAD.fullmatch(part)):
        both = (f"load{load[1]}", f"load_{load[1]}")
        return both if part == both[0] else both[::-1]
    return (part,)


def _find(document: JsonValue, steps: Sequence[_Step]) -> list[JsonValue]:
    # Level by level instead of by recursion: a document of many GPUs is read twice as fast.
    levels: list[list[JsonValue]] = [[document], *([] for _ in steps)]
    for at, step in enumerate(steps):
        name, following = step.name, levels[at + 1]
        for node in levels[at]:
            if isinstance(node, list):
                if 0 <= step.number < len(node):
                    following.append(node[step.number])
                elements = node
            else:
                elements = [node]
            for element in elements:
                if isinstance(element, dict):
                    if name in element:
                        following.append(element[name])
                    else:
                        _follow(element, step.others, levels)
    return levels[-1]


def _follow(
    node: JsonObject, keys: Iterable[tuple[str, int]], levels: list[list[JsonValue]]
) -> None:
    # Only the first key found: a value under two spellings must not be added up twice.
    for key, after in keys:
        if key in node:
            levels[after].append(node[key])
            return


def _folder(how: FoldName, read: Reader) -> Reader:
    if how == "count":
        return lambda document: [
            sum(len(value) if isinstance(value, list) else 1 for value in read(document))
        ]
    fold = _FOLDS[how]

    def folded(document: JsonValue) -> list[JsonValue]:
        numbers = [
            number
            for value in read(document)
            for number in (value if isinstance(value, list) else (value,))
            if is_number(number)
        ]
        if not numbers and how != "sum":
            return []
        try:
            result = fold(numbers)
            return [] if math.isnan(result) else [result]
        except OverflowError:  # An integer too large for a float.
            return []

    return folded


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


_FOLDS: Final[dict[FoldName, Callable[[list[float]], float]]] = {
    "avg": _mean,
    "sum": sum,
    "min": min,
    "max": max,
}

"""Conditions: the tree that `parse` makes of a query in any spelling, and all others read.

A leaf tests the values that a source finds in a document and holds if any of them passes. The
negations (`!=`, `$nin`, `$nor`, …) are `Not` around the leaf, as in Mongo: they hold if none does.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from moorage.query.values import number_in
from moorage.records.json_values import JsonValue

__all__ = [
    "EVERYTHING",
    "AllOf",
    "Among",
    "AnyOf",
    "Condition",
    "Exists",
    "Fold",
    "FoldName",
    "Leaf",
    "Matches",
    "Not",
    "OrderName",
    "Ordered",
    "Path",
    "Source",
    "TextPattern",
    "restricted",
    "text_at",
]

FoldName = Literal["count", "avg", "sum", "min", "max"]
OrderName = Literal[">", ">=", "<", "<="]


@dataclass(frozen=True, slots=True)
class Path:
    """A place in documents: names with dots between; arrays on the way are looked into."""

    text: str


@dataclass(frozen=True, slots=True)
class Fold:
    """One number made of all numbers at a path; `count` counts the elements there.

    Nothing there has no average, minimum or maximum; its sum and count are 0.
    """

    how: FoldName
    target: Path


Source = Path | Fold


class TextPattern(Protocol):
    """A text to look for; `LIKE` and `$regex` are its kinds. Its cost is linear in the text."""

    @property
    def needles(self) -> tuple[str, ...]:
        """The texts that every match contains; none if nothing is certain."""

    @property
    def costly(self) -> bool:
        """Whether matching reads a text character by character, in Python."""

    def matches(self, text: str) -> bool:
        """Return whether it occurs in a text."""


@dataclass(frozen=True, slots=True)
class Among:
    """A value equals one of these; null also equals a path at which nothing lies."""

    of: Source
    values: tuple[JsonValue, ...]


@dataclass(frozen=True, slots=True)
class Ordered:
    """A number lies on one side of a number, or a text of a text."""

    of: Source
    operator: OrderName
    operand: int | float | str


@dataclass(frozen=True, slots=True)
class Matches:
    """A text has a pattern in it. `place` is where the query says so."""

    of: Source
    pattern: TextPattern
    place: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Exists:
    """Something lies at the path, if only null."""

    of: Source


@dataclass(frozen=True, slots=True)
class AllOf:
    """Every part holds; without parts it always does."""

    parts: "tuple[Condition, ...]"


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Some part holds."""

    parts: "tuple[Condition, ...]"


@dataclass(frozen=True, slots=True)
class Not:
    """The part does not hold."""

    part: "Condition"


Leaf = Among | Ordered | Matches | Exists
Condition = Leaf | AllOf | AnyOf | Not

EVERYTHING: Final = AllOf(())
"""The condition that every document meets."""


def text_at(condition: Condition, path: str) -> str:
    """Return the one text that a condition wants at a path; "" where it is another condition."""
    if not isinstance(condition, Among) or condition.of != Path(path):
        return ""
    text = condition.values[0] if len(condition.values) == 1 else ""
    # One that reads as a number equals numbers, too.
    return text if isinstance(text, str) and number_in(text) is None else ""


def restricted(condition: Condition, path: str, values: Iterable[str]) -> Condition:
    """Return a condition for the documents that also have one of `values` at `path`.

    This is how the answer of a companion query enters the main one: the `clusterId` of the metrics
    documents found become `id IN […]` of the cluster query.
    """
    return AllOf((Among(Path(path), tuple(values)), condition))

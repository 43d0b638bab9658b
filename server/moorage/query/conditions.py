"""Conditions: the tree that `parse` makes from a query, for all other modules.

A source (a path or an aggregate) finds values in a document. A leaf of the tree tests these values,
and holds if any value passes. The negations (`!=`, `$nin`, `$nor`, …) are `Not` around a leaf, as
in Mongo: they hold if no value passes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from moorage.query.values import number_in
from moorage.records.json_values import JsonValue

FoldName = Literal["count", "avg", "sum", "min", "max"]
OrderName = Literal[">", ">=", "<", "<="]


@dataclass(frozen=True, slots=True)
class Path:
    """A path in documents: names joined by dots; it also leads into elements of arrays."""

    text: str


@dataclass(frozen=True, slots=True)
class Fold:
    """An aggregate of all numbers at a path, such as their sum; `count` counts the elements.

    Without numbers there is no average, minimum or maximum; sum and count are 0.
    """

    how: FoldName
    target: Path


Source = Path | Fold


class TextPattern(Protocol):
    """A pattern for texts: `LIKE` or `$regex`. A match takes time linear in the text."""

    @property
    def needles(self) -> tuple[str, ...]:
        """The texts that every match contains; empty if there are none."""

    @property
    def costly(self) -> bool:
        """Whether a match reads a text character by character in Python, which is slow."""

    def matches(self, text: str) -> bool:
        """Return whether the pattern occurs in a text."""


@dataclass(frozen=True, slots=True)
class Among:
    """Holds if a value equals one of `values`; null also equals a missing value."""

    of: Source
    values: tuple[JsonValue, ...]


@dataclass(frozen=True, slots=True)
class Ordered:
    """Holds if a value is less or greater than the number or text `operand`."""

    of: Source
    operator: OrderName
    operand: int | float | str


@dataclass(frozen=True, slots=True)
class Matches:
    """Holds if a text matches the pattern. `place` is the pattern's place in the query."""

    of: Source
    pattern: TextPattern
    place: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Exists:
    """Holds if the path has a value, even null."""

    of: Source


@dataclass(frozen=True, slots=True)
class AllOf:
    """Holds if all parts hold; also without parts."""

    parts: "tuple[Condition, ...]"


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Holds if at least one part holds."""

    parts: "tuple[Condition, ...]"


@dataclass(frozen=True, slots=True)
class Not:
    """Holds if its part does not hold."""

    part: "Condition"


Leaf = Among | Ordered | Matches | Exists
Condition = Leaf | AllOf | AnyOf | Not

EVERYTHING: Final = AllOf(())
"""The condition that every document meets."""


def text_at(condition: Condition, path: str) -> str:
    """Return the text that a condition requires at a path; "" for any other condition."""
    if not isinstance(condition, Among) or condition.of != Path(path):
        return ""
    text = condition.values[0] if len(condition.values) == 1 else ""
    # A text that reads as a number equals numbers, too.
    return text if isinstance(text, str) and number_in(text) is None else ""


def restrict(condition: Condition, path: str, values: Iterable[str]) -> Condition:
    """Return a condition that also requires one of `values` at `path`.

    The daemon thus adds the result of a companion search to the main query: the `clusterId` of the
    metrics documents that were found become `id IN […]` in the cluster query.
    """
    return AllOf((Among(Path(path), tuple(values)), condition))

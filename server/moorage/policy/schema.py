"""The schema mini-language of PolicyRule documents: what a schema says, and checking values.

A schema is an object with one entry per field:

    {"replicas": {"type": "number", "min": 1, "max": 8, "default": 1, "description": "copies"},
     "zone": {"type": "string", "choices": ["a", "b"], "required": true}}

`type` is one of `string`, `number`, `boolean`, `array`, `object`, `any`. A `string` may have a
`pattern` (which may occur anywhere in it; `^` and `$` are its ends), a `string` or an `array` a
`length` or a `max_length`, a `number` a `min` and a `max`; all but an `array` and an `object` may
have `choices`. `properties` says what is in an `object`, `items` what is in an `array`.

The documents say nothing of fields that are left out. Here a field may be left out unless it is
`required`, and then gets its `default`; `null` counts as left out, except where the type is `any`.
Fields that the schema does not name are let through.

`catalog.documents.schemas` has the schemas of an upload read by `schema_reader`; admission and the
sandbox's host check values with them. Everything is bounded: no value can hold up the loop.

    SchemaError   the place, what is expected there, and what is there instead
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

__all__ = ["Schema", "SchemaError", "SchemaPattern"]

VALUES_MAX: Final = 20_000
"""Values and fields looked at in one check: some milliseconds. More are refused."""
MATCHED_TEXT_CHARS_MAX: Final = 4096
"""Characters of one text that a pattern may read, as in queries."""
MATCHED_CHARS_MAX: Final = 100_000
"""Characters that the patterns of one check may read: some milliseconds."""
PATH_CHARS_MAX: Final = 300
SHOWN_CHARS_MAX: Final = 60

KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "any": (object,),
}
NO_VALUE: Final = object()
_LONG: Final = 1e300


class SchemaError(ValueError):
    """A schema that says nothing sensible, or a value that is not what its schema says.

    Args:
        path: Where, as a dotted path; list elements as `[3]`.
        expected: What was expected there.
        found: What is there instead.

    """

    def __init__(self, path: str, expected: str, found: str) -> None:
        super().__init__(f"{path}: expected {expected}; {found}")
        self.path = path
        self.expected = expected
        self.found = found

    def within(self, place: str) -> "SchemaError":
        """Return the same complaint, seen from further out."""
        return SchemaError(under(place, self.path), self.expected, self.found)


class SchemaPattern(Protocol):
    """A pattern ready to match in time linear in the text; whoever reads schemas brings it."""

    def matches(self, text: str) -> bool:
        """Return whether it occurs in a text."""


@dataclass(slots=True)
class Budget:
    """What one check may still look at."""

    values: int = VALUES_MAX
    characters: int = MATCHED_CHARS_MAX

    def spend(self, values: int, characters: int = 0) -> None:
        self.values -= values
        self.characters -= characters
        if self.values < 0:
            raise SchemaError("", f"at most {VALUES_MAX} values in all", "here are more")
        if self.characters < 0:
            expected = f"at most {MATCHED_CHARS_MAX} characters in all texts with a pattern"
            raise SchemaError("", expected, "here are more")


@dataclass(frozen=True, slots=True)
class FieldSchema:
    """What a schema says of one field."""

    kind: str
    required: bool = False
    default: Any = NO_VALUE
    pattern: SchemaPattern | None = None
    length: int | None = None
    max_length: int | None = None
    minimum: float | None = None
    maximum: float | None = None
    choices: frozenset[tuple[type, Any]] | None = None
    properties: "Schema | None" = None
    items: "FieldSchema | None" = None
    expected: str = ""
    """All of it in words, for the refusal of a value."""

    def check(self, value: Any, budget: Budget) -> Any:
        """Return the value, completed where a default within it was missing.

        Raises:
            SchemaError: Its path starts at this value; whoever knows the place says so.

        """
        budget.spend(1)
        if not isinstance(value, KINDS[self.kind]) or not self._allows(value, budget):
            raise SchemaError("", self.expected, f"found {shown(value)}")
        if self.properties is not None:
            return self.properties.checked(value, budget)
        if self.items is None:
            return value
        given = cast("Sequence[Any]", value)
        elements = list(_each(given, self.items.check, budget))
        unchanged = all(new is old for new, old in zip(elements, given, strict=True))
        return given if unchanged else elements

    def _allows(self, value: Any, budget: Budget) -> bool:
        if self.kind == "number" and not finite(value):
            return False
        if self.choices is not None and comparable(value) not in self.choices:
            return False
        if self.minimum is not None and value < self.minimum:
            return False
        if self.maximum is not None and value > self.maximum:
            return False
        if self.length is not None and len(value) != self.length:
            return False
        if self.max_length is not None and len(value) > self.max_length:
            return False
        if self.pattern is not None:
            if len(value) > MATCHED_TEXT_CHARS_MAX:
                expected = f"{self.expected}, of at most {MATCHED_TEXT_CHARS_MAX} characters"
                raise SchemaError("", expected, f"found {len(value)} characters")
            budget.spend(0, len(value))
            return self.pattern.matches(value)
        return True


@dataclass(frozen=True, slots=True)
class Schema:
    """What is known of the fields of an object. Made by `policy.schema_reader.read_schema`.

    Attributes:
        defaults: What fields get that are left out, by name.

    """

    _entries: Mapping[str, FieldSchema]
    _required: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def names(self) -> Collection[str]:
        """The fields that it says something of."""
        return self._entries.keys()

    @property
    def required(self) -> tuple[str, ...]:
        """The fields that may not be left out."""
        return self._required

    def check(self, value: Any, path: str, *, known: Collection[str] = ()) -> Mapping[str, Any]:
        """Check an object.

        Args:
            value: JSON data.
            path: Its place, with which the places in errors start, e.g. `inputs`.
            known: Fields that have a value where this object will be laid over: they may be left
                out, and get no default here.

        Returns:
            The object itself, or a copy with the defaults of what was left out, and without what
            is null: that is as good as left out, but where `any` value may stand.

        Raises:
            SchemaError: It is not what the schema says.

        """
        try:
            return self.checked(value, Budget(), known)
        except SchemaError as error:
            raise error.within(path) from None

    def check_each(self, values: Sequence[Any], path: str, first: int = 0) -> list[Any]:
        """Check several objects, within the bounds of one check.

        Args:
            values: JSON data.
            path: Their place.
            first: The number of the first one there.

        Returns:
            The objects, or copies, as `check` does.

        Raises:
            SchemaError: As `check`.

        """
        try:
            return list(_each(values, self.checked, Budget(), first))
        except SchemaError as error:
            raise error.within(path) from None

    def checked(self, value: Any, budget: Budget, known: Collection[str] = ()) -> Mapping[str, Any]:
        """As `check`, of a part of a larger value; the path of an error starts at this part."""
        if not isinstance(value, Mapping):
            raise SchemaError("", "an object", f"found {shown(value)}")
        given = cast("Mapping[str, Any]", value)
        budget.spend(len(self._entries))  # Also what is left out is looked for.
        self._demand(given, known)
        changed: dict[str, Any] = {}
        unset: list[str] = []
        name = ""
        try:
            for name, entry in self._entries.items():
                if not self._left_out(name, given):
                    found = given[name]
                    completed = entry.check(found, budget)
                    if completed is not found:
                        changed[name] = completed
                elif name in self.defaults and name not in known:
                    changed[name] = self.defaults[name]
                else:
                    unset.append(name)
        except SchemaError as error:
            raise error.within(name) from None
        if not changed and given.keys().isdisjoint(unset):
            return given
        return {name: each for name, each in given.items() if name not in unset} | changed

    def _demand(self, given: Mapping[str, Any], known: Collection[str]) -> None:
        for name in self._required:
            if name not in known and self._left_out(name, given):
                raise SchemaError(name, self._entries[name].expected, "it is missing")

    def _left_out(self, name: str, given: Mapping[str, Any]) -> bool:
        value = given.get(name)
        return value is None and (self._entries[name].kind != "any" or name not in given)


def _each(
    values: Sequence[Any], check: Callable[[Any, Budget], Any], budget: Budget, first: int = 0
) -> Iterator[Any]:
    """Check the elements of a list and yield them, completed; places are worked out on errors."""
    done = first
    try:
        for each in values:
            yield check(each, budget)
            done += 1
    except SchemaError as error:
        raise error.within(f"[{done}]") from None


# Words -----------------------------------------------------------------------------------------


def finite(value: float) -> bool:
    """Return whether a number is one in JSON; an int may be too large to become a float."""
    return not isinstance(value, bool) and (isinstance(value, int) or math.isfinite(value))


def comparable(value: Any) -> tuple[type, Any]:
    """Return what tells values apart as JSON does: `true` is not 1, and 1 is 1.0."""
    if isinstance(value, list | dict):
        return (list, None)  # No choice is one.
    return (bool if isinstance(value, bool) else object, value)


def under(path: str, name: str) -> str:
    """Return the place of a field, or of an element such as `[3]`, within a place."""
    joint = "." if path and name and not name.startswith("[") else ""
    joined = f"{path}{joint}{name}"
    return joined if len(joined) <= PATH_CHARS_MAX else f"{joined[:PATH_CHARS_MAX]}…"


def cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}…"


def shown(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return f'"{cut(value)}"'
        case int() | float():
            return f"{value:.6g}" if abs(value) < _LONG else "a very large number"
        case Mapping():
            return "an object" if value else "an empty object"
        case Sequence():
            return f"a list of {len(value)}" if value else "an empty list"
        case _:  # A policy may answer with anything.
            return f"a {type(value).__name__}"

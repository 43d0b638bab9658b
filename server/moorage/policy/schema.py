"""The schemas of PolicyRule documents, and checks of values against them.

This module reads the two dialects that authors write. The documented dialect has one entry per
field:

    {"replicas": {"type": "number", "min": 1, "max": 8, "default": 1, "description": "copies"},
     "zone": {"type": "string", "choices": ["a", "b"], "required": true}}

In this dialect a field that is `null` counts as missing, except if its type is `any`. The other
dialect is JSON Schema, `{"type": "object", "properties": …, "required": […]}`, in which `null` is a
value. In both, a required field must be present, and any other missing field gets its `default`.
Fields that are not named are accepted, unless `additionalProperties` forbids it.

`catalog.documents.schemas` reads the schemas of an upload with `schema_reader`; admission and the
sandbox's host check values with them. All work is bounded: no value can block the event loop.

    SchemaError   the place, what is expected there, and what is there instead
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

from moorage.records.json_values import JsonMapping, JsonObject, JsonValue

__all__ = ["Schema", "SchemaError", "SchemaPattern"]

VALUES_MAX: Final = 20_000
"""At most this many values and fields are checked in one call, which takes some milliseconds."""
MATCHED_TEXT_CHARS_MAX: Final = 4096
"""A pattern reads at most this many characters of one text."""
MATCHED_CHARS_MAX: Final = 100_000
"""The patterns of one check read at most this many characters: some milliseconds."""
PATH_CHARS_MAX: Final = 300
SHOWN_CHARS_MAX: Final = 60

KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
    "any": (object,),
}
NO_VALUE: Final = object()
_LONG: Final = 1e300


class SchemaError(ValueError):
    """An invalid schema, or a value that its schema refuses.

    Args:
        path: The place, as a dotted path; list elements as `[3]`.
        expected: The value that was expected at the path.
        found: The value that is at the path instead.
    """

    def __init__(self, path: str, expected: str, found: str) -> None:
        super().__init__(f"{path}: expected {expected}; {found}")
        self.path = path
        self.expected = expected
        self.found = found

    def within(self, place: str) -> "SchemaError":
        """Return the same error with `path` made relative to the enclosing value."""
        return SchemaError(under(place, self.path), self.expected, self.found)


class SchemaPattern(Protocol):
    """A compiled pattern that matches in time linear in the text; the schema reader makes it."""

    def matches(self, text: str) -> bool:
        """Return whether the pattern occurs in a text."""


@dataclass(slots=True)
class Budget:
    """The amount of work that one check may still do."""

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
class Sizes:
    """Limits of the length of a text or a list."""

    exactly: int | None = None
    least: int | None = None
    most: int | None = None

    def allow(self, size: int) -> bool:
        return (
            (self.exactly is None or size == self.exactly)
            and (self.least is None or size >= self.least)
            and (self.most is None or size <= self.most)
        )


@dataclass(frozen=True, slots=True)
class Range:
    """Limits of a number; excluded limits are not allowed values."""

    low: float | None = None
    high: float | None = None
    low_excluded: float | None = None
    high_excluded: float | None = None

    def allow(self, value: float) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.low_excluded is None or value > self.low_excluded)
            and (self.high_excluded is None or value < self.high_excluded)
        )


@dataclass(frozen=True, slots=True)
class FieldSchema:
    """The schema of one field; each constraint applies only to values of its type."""

    kinds: tuple[str, ...] = ("any",)
    default: JsonValue = NO_VALUE
    pattern: SchemaPattern | None = None
    text_sizes: Sizes | None = None
    list_sizes: Sizes | None = None
    range: Range | None = None
    choices: frozenset[tuple[type, JsonValue]] | None = None
    properties: "Schema | None" = None
    items: "FieldSchema | None" = None
    expected: str = "a value"
    """The whole constraint in words, for refusals."""

    def check(self, value: JsonValue, budget: Budget) -> JsonValue:
        """Return the value with defaults filled in for missing parts.

        Raises:
            SchemaError: The value is invalid. The path in the error starts at this value; the
                caller adds the place.
        """
        budget.spend(1)
        if not any(_is_a(value, kind) for kind in self.kinds) or not self._allows(value, budget):
            raise SchemaError("", self.expected, f"found {quote(value)}")
        if self.properties is not None and isinstance(value, dict):
            return self.properties.check_value(value, budget)
        if self.items is None or not isinstance(value, list | tuple):
            return value
        given = cast("Sequence[JsonValue]", value)
        elements = list(_each(given, self.items.check, budget))
        unchanged = all(new is old for new, old in zip(elements, given, strict=True))
        return given if unchanged else elements

    def _allows(self, value: JsonValue, budget: Budget) -> bool:
        if self.choices is not None and comparable(value) not in self.choices:
            return False
        if isinstance(value, str):
            if self.text_sizes is not None and not self.text_sizes.allow(len(value)):
                return False
            return self.pattern is None or self._matches(self.pattern, value, budget)
        if isinstance(value, list | tuple):
            return self.list_sizes is None or self.list_sizes.allow(len(value))
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self.range is None or self.range.allow(value)
        return True

    def _matches(self, pattern: SchemaPattern, value: str, budget: Budget) -> bool:
        if len(value) > MATCHED_TEXT_CHARS_MAX:
            expected = f"{self.expected}, of at most {MATCHED_TEXT_CHARS_MAX} characters"
            raise SchemaError("", expected, f"found {len(value)} characters")
        budget.spend(0, len(value))
        return pattern.matches(value)


def _is_a(value: JsonValue, kind: str) -> bool:
    fits = isinstance(value, KINDS[kind])
    if not fits or kind not in {"number", "integer"}:
        return fits
    return finite(value) and (kind == "number" or isinstance(value, int) or value.is_integer())


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema of an object. Made by `policy.schema_reader.read_schema`.

    Attributes:
        required: The fields that must be present.
        defaults: Values of missing fields, by name.
        null_is_value: Whether null is a value, as in JSON Schema; otherwise null counts as missing.
        others: The schema of other fields; True: any value; False: no other fields.
    """

    _entries: Mapping[str, FieldSchema]
    required: tuple[str, ...] = ()
    defaults: JsonMapping = field(default_factory=JsonObject)
    null_is_value: bool = False
    others: FieldSchema | bool = True

    @property
    def names(self) -> Collection[str]:
        """The names of the fields that the schema describes."""
        return self._entries.keys()

    def takes_nothing(self, known: Collection[str]) -> bool:
        """Return whether an empty object is valid if the fields `known` are added to it."""
        if not self.required and not self.defaults:
            return True
        return all(name in known for name in (*self.required, *self.defaults))

    def check(self, value: JsonValue, path: str, *, known: Collection[str] = ()) -> JsonMapping:
        """Return an object with the defaults of missing fields, or refuse it.

        Args:
            value: JSON data.
            path: The place of the object, a prefix of the places in errors, e.g. `inputs`.
            known: Fields of the object that this object will be merged into: these fields may be
                missing in this object, and get no default.

        Returns:
            The object itself, or a copy with the defaults of missing fields, and without fields
            that are null and thus count as missing.

        Raises:
            SchemaError: The object breaks the schema.
        """
        try:
            return self.check_value(value, Budget(), known)
        except SchemaError as error:
            raise error.within(path) from None

    def check_each(
        self,
        values: Sequence[JsonValue],
        path: str,
        first: int = 0,
        skips: Callable[[JsonValue], bool] = lambda _: False,
    ) -> list[JsonValue]:
        """Check several objects, within the bounds of one check.

        Args:
            values: JSON data.
            path: The place of the list.
            first: The index of the first object in the list.
            skips: Returns whether a value stays as it is, unchecked.

        Returns:
            The objects, or copies, as `check` does.

        Raises:
            SchemaError: An object breaks the schema.
        """

        def check(value: JsonValue, budget: Budget) -> JsonValue:
            return value if skips(value) else self.check_value(value, budget)

        try:
            return list(_each(values, check, Budget(), first))
        except SchemaError as error:
            raise error.within(path) from None

    def check_value(
        self, value: JsonValue, budget: Budget, known: Collection[str] = ()
    ) -> JsonMapping:
        """Check one value as `check` does; the path of an error starts at this value."""
        if not isinstance(value, Mapping):
            raise SchemaError("", "an object", f"found {quote(value)}")
        given = cast("JsonMapping", value)
        budget.spend(len(self._entries))  # Missing fields cost time, too.
        self._demand(given, known)
        changed: JsonObject = {}
        unset: list[str] = []
        name = ""
        try:
            for name, entry in self._entries.items():
                if not self._is_left_out(name, given):
                    found = given[name]
                    completed = entry.check(found, budget)
                    if completed is not found:
                        changed[name] = completed
                elif name in self.defaults and name not in known:
                    changed[name] = self.defaults[name]
                else:
                    unset.append(name)
            for name in () if self.others is True else sorted(given.keys() - self._entries.keys()):
                self._check_other(name, given[name], changed, budget)
        except SchemaError as error:
            raise error.within(name) from None
        if not changed and given.keys().isdisjoint(unset):
            return given
        return {name: each for name, each in given.items() if name not in unset} | changed

    def _check_other(
        self, name: str, found: JsonValue, changed: JsonObject, budget: Budget
    ) -> None:
        if not isinstance(self.others, FieldSchema):
            names = cut(", ".join(self._entries)) or "no field"
            raise SchemaError("", f"no field of this name, only {names}", f"found {quote(found)}")
        completed = self.others.check(found, budget)
        if completed is not found:
            changed[name] = completed

    def _demand(self, given: JsonMapping, known: Collection[str]) -> None:
        for name in self.required:
            if name not in known and self._is_left_out(name, given):
                raise SchemaError(name, self._entries[name].expected, "it is missing")

    def _is_left_out(self, name: str, given: JsonMapping) -> bool:
        if name not in given:
            return True
        is_value = self.null_is_value or "any" in self._entries[name].kinds
        return given[name] is None and not is_value


def _each(
    values: Sequence[JsonValue],
    check: Callable[[JsonValue, Budget], JsonValue],
    budget: Budget,
    first: int = 0,
) -> Iterator[JsonValue]:
    """Check and complete the elements of a list, one by one; compute places only for errors."""
    done = first
    try:
        for each in values:
            yield check(each, budget)
            done += 1
    except SchemaError as error:
        raise error.within(f"[{done}]") from None


# Words -----------------------------------------------------------------------------------------


def finite(value: float) -> bool:
    """Return whether a number can be written in JSON; an int may be too large for a float."""
    return not isinstance(value, bool) and (isinstance(value, int) or math.isfinite(value))


def comparable(value: JsonValue) -> tuple[type, JsonValue]:
    """Return a key that tells values apart as JSON does: `true` is not 1, and 1 is 1.0."""
    if isinstance(value, list | dict):
        return (list, None)  # No choice is a list or an object.
    return (bool if isinstance(value, bool) else object, value)


def under(path: str, name: str) -> str:
    """Return the place of a field, or of an element such as `[3]`, inside a place."""
    joint = "." if path and name and not name.startswith("[") else ""
    joined = f"{path}{joint}{name}"
    return joined if len(joined) <= PATH_CHARS_MAX else f"{joined[:PATH_CHARS_MAX]}…"


def cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}…"


def quote(value: JsonValue) -> str:
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

"""Reads schemas of the mini-language that `policy.schema` describes, or says where they are wrong.

`catalog.documents.schemas` calls `read_schema` when a policy is uploaded. A schema is written by a
user: it is bounded, and every constraint is checked to be one that a value of its type can meet.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Final

from moorage.policy.schema import (
    KINDS,
    NO_VALUE,
    Budget,
    FieldSchema,
    Schema,
    SchemaError,
    SchemaPattern,
    comparable,
    cut,
    finite,
    shown,
    under,
)

__all__ = ["read_schema"]

DEPTH_MAX: Final = 16
"""Objects and arrays within each other that a schema may describe."""
ENTRIES_MAX: Final = 500
"""Entries of one schema, on all levels together."""
PATTERNS_MAX: Final = 32
"""Patterns of one schema; turning one into its table may take milliseconds."""
PATTERN_CHARS_MAX: Final = 256
CHOICES_MAX: Final = 1000

_NOUNS: Final[Mapping[str, str]] = {
    "string": "a text",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "any": "a value",
}
_SIZED: Final = frozenset({"string", "array"})
_PICKED: Final = frozenset({"string", "number", "boolean", "any"})
_WHERE: Final[Mapping[str, Collection[str]]] = {
    "pattern": ("string",),
    "length": _SIZED,
    "max_length": _SIZED,
    "min": ("number",),
    "max": ("number",),
    "choices": _PICKED,
    "properties": ("object",),
    "items": ("array",),
}
"""Which types a constraint is for."""
_KEYS: Final = ("type", "description", "required", "default", *_WHERE)


def read_schema(
    document: Any, path: str, compile_pattern: Callable[[str, str], SchemaPattern]
) -> Schema | None:
    """Return what a schema says, or None for an empty one.

    Args:
        document: The schema as JSON data; None and `{}` say nothing.
        path: Its place, e.g. `policy_input_schema`.
        compile_pattern: Makes a pattern of a text and its place; raises `SchemaError`.

    Raises:
        SchemaError: It is malformed; the path says where, and `expected` what may stand there.

    """
    if document is None or document == {}:
        return None
    return _Reader(compile_pattern).fields(document, path, 1)


class _Reader:
    """One schema on its way from JSON to `FieldSchema`, and what of its bounds is used up."""

    def __init__(self, compile_pattern: Callable[[str, str], SchemaPattern]) -> None:
        self._compile = compile_pattern
        self._entries = 0
        self._patterns = 0

    def fields(self, document: Any, path: str, depth: int) -> Schema:
        if not isinstance(document, dict):
            expected = "an object with one entry per field, e.g. {'size': {'type': 'number'}}"
            raise SchemaError(path, expected, f"found {shown(document)}")
        if isinstance(document.get("type"), str):
            expected = "one entry per field, whose names are yours; this is no JSON Schema"
            raise SchemaError(path, expected, f"it starts with `type`: {shown(document['type'])}")
        if depth > DEPTH_MAX:
            raise SchemaError(path, f"at most {DEPTH_MAX} levels", "this is one more")
        entries = {
            name: self.entry(given, under(path, name), depth) for name, given in document.items()
        }
        return Schema(
            entries,
            tuple(name for name, entry in entries.items() if entry.required),
            {
                name: entry.default
                for name, entry in entries.items()
                if entry.default is not NO_VALUE
            },
        )

    def entry(self, given: Any, path: str, depth: int) -> FieldSchema:
        self._entries += 1
        if self._entries > ENTRIES_MAX:
            raise SchemaError(path, f"at most {ENTRIES_MAX} entries in all", "this is one more")
        if not isinstance(given, dict):
            expected = "an object that describes the field, e.g. {'type': 'number'}"
            raise SchemaError(path, expected, f"found {shown(given)}")
        kind = self._kind(given, path)
        for key in given:
            self._known(key, kind, path)
        entry = FieldSchema(
            kind,
            required=_flag(given, path),
            pattern=self._pattern(given, path),
            length=_count(given, "length", path),
            max_length=_count(given, "max_length", path),
            minimum=_limit(given, "min", path),
            maximum=_limit(given, "max", path),
            choices=_choices(given, kind, path),
            properties=self._properties(given, path, depth),
            items=self._items(given, path, depth),
            expected=_in_words(kind, given, path),
        )
        _consistent(entry, path)
        if "default" not in given:
            return entry
        return _with_default(entry, given["default"], path)

    def _kind(self, given: Mapping[str, Any], path: str) -> str:
        kind = given.get("type", NO_VALUE)
        names = ", ".join(KINDS)
        if kind is NO_VALUE:
            raise SchemaError(under(path, "type"), f"one of {names}", "it is missing")
        if isinstance(kind, str) and kind in KINDS:
            return kind
        hint = _OTHER_NAMES.get(kind, "") if isinstance(kind, str) else ""
        found = f"found {shown(kind)}" + (f", which is {hint} here" if hint else "")
        raise SchemaError(under(path, "type"), f"one of {names}", found)

    def _known(self, key: str, kind: str, path: str) -> None:
        if key not in _KEYS:
            near = get_close_matches(key.lower(), _KEYS, n=1)
            hint = f"did you mean `{near[0]}`?" if near else "nothing else is known"
            raise SchemaError(under(path, key), f"one of {', '.join(_KEYS)}", hint)
        if key in _WHERE and kind not in _WHERE[key]:
            suits = " or ".join(sorted(_WHERE[key]))
            expected = f"no `{key}` where the type is {kind}"
            raise SchemaError(under(path, key), expected, f"it is for {suits}")

    def _pattern(self, given: Mapping[str, Any], path: str) -> SchemaPattern | None:
        if "pattern" not in given:
            return None
        text, path = given["pattern"], under(path, "pattern")
        if not isinstance(text, str) or not 0 < len(text) <= PATTERN_CHARS_MAX:
            expected = f"a regular expression of 1 to {PATTERN_CHARS_MAX} characters"
            raise SchemaError(path, expected, f"found {shown(text)}")
        self._patterns += 1
        if self._patterns > PATTERNS_MAX:
            raise SchemaError(path, f"at most {PATTERNS_MAX} patterns in all", "this is one more")
        return self._compile(text, path)

    def _properties(self, given: Mapping[str, Any], path: str, depth: int) -> Schema | None:
        if "properties" not in given:
            return None
        return self.fields(given["properties"], under(path, "properties"), depth + 1)

    def _items(self, given: Mapping[str, Any], path: str, depth: int) -> FieldSchema | None:
        if "items" not in given:
            return None
        path = under(path, "items")
        if depth >= DEPTH_MAX:
            raise SchemaError(path, f"at most {DEPTH_MAX} levels", "this is one more")
        element = given["items"]
        if isinstance(element, list):  # The documents leave open whether it is a list of one.
            if len(element) != 1:
                expected = "one entry that describes every element, or a list of that one"
                raise SchemaError(path, expected, f"found {shown(element)}")
            element, path = element[0], f"{path}[0]"
        entry = self.entry(element, path, depth + 1)
        if entry.required or entry.default is not NO_VALUE:
            key = "required" if entry.required else "default"
            raise SchemaError(under(path, key), "none here", "elements of a list are never missing")
        return entry


_OTHER_NAMES: Final[Mapping[str, str]] = {
    "str": "`string`",
    "text": "`string`",
    "int": "`number`",
    "integer": "`number`",
    "float": "`number`",
    "bool": "`boolean`",
    "list": "`array`",
    "dict": "`object`",
    "null": "a field that is left out",
}


def _flag(given: Mapping[str, Any], path: str) -> bool:
    value = given.get("required", False)
    if not isinstance(value, bool):
        found = f"found {shown(value)}; each required field says so itself"
        raise SchemaError(under(path, "required"), "true or false", found)
    return value


def _count(given: Mapping[str, Any], key: str, path: str) -> int | None:
    value = given.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SchemaError(under(path, key), "a whole number from 0", f"found {shown(value)}")
    return value if key in given else None


def _limit(given: Mapping[str, Any], key: str, path: str) -> float | None:
    value = given.get(key, 0)
    if not isinstance(value, int | float) or not finite(value):
        raise SchemaError(under(path, key), "a finite number", f"found {shown(value)}")
    return value if key in given else None


def _choices(given: Mapping[str, Any], kind: str, path: str) -> frozenset[tuple[type, Any]] | None:
    if "choices" not in given:
        return None
    listed, path = given["choices"], under(path, "choices")
    if not isinstance(listed, list) or not 0 < len(listed) <= CHOICES_MAX:
        raise SchemaError(path, f"a list of 1 to {CHOICES_MAX} values", f"found {shown(listed)}")
    for number, each in enumerate(listed):
        fits = isinstance(each, KINDS[kind]) and (kind == "boolean" or not isinstance(each, bool))
        if isinstance(each, list | dict) or not (fits or kind == "any"):
            noun = "a text, a number, true or false" if kind == "any" else _NOUNS[kind]
            raise SchemaError(f"{path}[{number}]", noun, f"found {shown(each)}")
    return frozenset(comparable(each) for each in listed)


def _consistent(entry: FieldSchema, path: str) -> None:
    """Refuse constraints that no value can meet."""
    low, high = entry.minimum, entry.maximum
    if low is not None and high is not None and low > high:
        raise SchemaError(under(path, "min"), f"at most `max`, {high:g}", f"found {low:g}")
    length, most = entry.length, entry.max_length
    if length is not None and most is not None and length > most:
        raise SchemaError(under(path, "length"), f"at most `max_length`, {most}", f"found {length}")


def _with_default(entry: FieldSchema, default: Any, path: str) -> FieldSchema:
    path = under(path, "default")
    if entry.required:
        raise SchemaError(path, "none where the field is `required`", "say one of the two")
    # Completed here, so that nobody completes it again on every call.
    try:
        completed = entry.check(default, Budget())
    except SchemaError as error:
        raise error.within(path) from None
    words = f"{entry.expected}, by default {shown(default)}"
    return replace(entry, default=completed, expected=words)


def _in_words(kind: str, given: Mapping[str, Any], path: str) -> str:
    description = given.get("description", "")
    if not isinstance(description, str):
        raise SchemaError(under(path, "description"), "a text", f"found {shown(description)}")
    words = " ".join((_NOUNS[kind], *_constraints(kind, given)))
    return f"{words} ({cut(description)})" if description.strip() else words


def _constraints(kind: str, given: Mapping[str, Any]) -> Iterator[str]:
    unit = "elements" if kind == "array" else "characters"
    match given.get("min"), given.get("max"):
        case (None, None):
            pass
        case (low, None):
            yield f"of at least {low}"
        case (None, high):
            yield f"of at most {high}"
        case (low, high):
            yield f"from {low} to {high}"
    if "length" in given:
        yield f"of exactly {given['length']} {unit}"
    if "max_length" in given:
        yield f"of at most {given['max_length']} {unit}"
    if "pattern" in given:
        yield f"that matches {cut(str(given['pattern']))}"
    if isinstance(listed := given.get("choices"), list):
        yield f"out of {cut(', '.join(map(shown, listed)))}"

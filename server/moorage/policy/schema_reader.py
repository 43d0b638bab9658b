"""Reads schemas in the two dialects that `policy.schema` describes, and reports unreadable parts.

`catalog.documents.schemas` calls `read_schema` when a policy is uploaded. A user writes the schema,
so its size is bounded. The server that Moorage replaces never read schemas, so no schema is
refused. A part that cannot be read, or a constraint that does not suit the field's type, is noted
and not enforced.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Final, TypeVar

from moorage.policy.schema import (
    KINDS,
    NO_VALUE,
    Budget,
    FieldSchema,
    Range,
    Schema,
    SchemaError,
    SchemaPattern,
    Sizes,
    comparable,
    cut,
    finite,
    quote,
    under,
)
from moorage.records.json_values import JsonMapping, JsonValue

T = TypeVar("T")

DEPTH_MAX: Final = 16
"""At most this many nested objects and arrays in a schema."""
ENTRIES_MAX: Final = 500
"""At most this many entries in one schema, over all levels."""
PATTERNS_MAX: Final = 32
"""At most this many patterns in one schema; compiling a pattern may take milliseconds."""
PATTERN_CHARS_MAX: Final = 256
CHOICES_MAX: Final = 1000
NOTES_MAX: Final = 20
"""At most this many errors of one schema are listed; further ones are only counted."""

_NOUNS: Final[Mapping[str, str]] = {
    "string": "a text",
    "number": "a number",
    "integer": "a whole number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
    "any": "a value",
}
_WHERE: Final[Mapping[str, Collection[str]]] = {
    "pattern": ("string",),
    "length": ("array", "string"),
    "max_length": ("array", "string"),
    "minLength": ("string",),
    "maxLength": ("string",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "min": ("integer", "number"),
    "max": ("integer", "number"),
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "exclusiveMaximum": ("integer", "number"),
    "choices": ("any", "boolean", "integer", "null", "number", "string"),
    "properties": ("object",),
    "additionalProperties": ("object",),
    "items": ("array",),
}
"""The types that each constraint applies to."""
_ENFORCED: Final = ("type", "required", "default", "enum", "const", "nullable", *_WHERE)
_NOTES: Final = frozenset(
    ("description", "title", "examples", "example", "format", "deprecated", "readOnly", "writeOnly",
     "$schema", "$id", "$comment", "$defs", "definitions", "id")
)  # fmt: skip
"""Keywords that only inform readers."""
_OTHER_NAMES: Final[Mapping[str, str]] = {
    "str": "`string`",
    "text": "`string`",
    "int": "`integer`",
    "float": "`number`",
    "bool": "`boolean`",
    "list": "`array`",
    "dict": "`object`",
}
_ANY: Final = FieldSchema()


def read_schema(
    document: JsonValue, path: str, compile_pattern: Callable[[str, str], SchemaPattern]
) -> tuple[Schema | None, tuple[SchemaError, ...]]:
    """Return a schema, and the errors of parts that cannot be read and are not enforced.

    Args:
        document: The schema as JSON data; None and `{}`: no constraints.
        path: The place of the schema, e.g. `policy_input_schema`.
        compile_pattern: Makes a pattern of a text and its place; raises `SchemaError`.

    Returns:
        The schema, None if no part of it can be enforced; and a note for each part that cannot:
        `path` has its place, and `expected` the accepted values.
    """
    if document is None or document == {}:
        return None, ()
    reader = _Reader(compile_pattern, json_schema=_is_json_schema(document))
    schema = reader.attempt(lambda: reader.whole(document, path), None)
    return schema, tuple(reader.notes)


def _is_json_schema(document: JsonValue) -> bool:
    """Return whether a document is JSON Schema; in the other dialect each field is an object."""
    if not isinstance(document, dict):
        return False
    properties = document.get("properties")
    return (
        isinstance(document.get("type"), str | list)
        or isinstance(document.get("$schema"), str)
        or isinstance(document.get("required"), list)
        or any(isinstance(document.get(key), list) for key in ("allOf", "anyOf", "oneOf"))
        or (isinstance(properties, dict) and not isinstance(properties.get("type"), str | list))
    )


class _Reader:
    """Reads one schema from JSON to `FieldSchema`, within limits."""

    def __init__(
        self, compile_pattern: Callable[[str, str], SchemaPattern], *, json_schema: bool
    ) -> None:
        self._compile = compile_pattern
        self._json = json_schema
        self._entries = 0
        self._patterns = 0
        self.notes: list[SchemaError] = []

    def attempt(self, read: Callable[[], T], otherwise: T) -> T:
        """Return the result of `read`, or note its error and return `otherwise`."""
        try:
            return read()
        except SchemaError as error:
            self._note(error)
            return otherwise

    def _note(self, error: SchemaError) -> None:
        if len(self.notes) < NOTES_MAX:
            self.notes.append(error)
        elif len(self.notes) == NOTES_MAX:
            path = error.path.partition(".")[0]
            self.notes.append(SchemaError(path, "what is described above", "there is more"))

    def whole(self, document: JsonValue, path: str) -> Schema | None:
        if not self._json:
            return self.fields(document, path, 1)
        entry = self.entry(document, path, 1)
        if entry.kinds == ("array",) and entry.items is not None:
            entry = entry.items  # Each element of a list is checked.
        if entry.properties is not None or entry.kinds == ("any",):
            return entry.properties
        if "object" in entry.kinds:
            return Schema({}, null_is_value=True)
        found = f"found {quote(document.get('type'))}"
        raise SchemaError(under(path, "type"), "object, or array with items that are", found)

    def fields(
        self,
        document: JsonValue,
        path: str,
        depth: int,
        demanded: Collection[str] = (),
        others: FieldSchema | bool = True,  # As `Schema.others`.
    ) -> Schema:
        if not isinstance(document, dict):
            expected = "an object with one entry per field, e.g. {'size': {'type': 'number'}}"
            raise SchemaError(path, expected, f"found {quote(document)}")
        if depth > DEPTH_MAX:
            raise SchemaError(path, f"at most {DEPTH_MAX} levels", "found more")
        entries = dict.fromkeys(demanded, _ANY)
        required = list(demanded)
        for name, given in document.items():
            place = under(path, name)
            entries[name] = self.attempt(partial(self.entry, given, place, depth), _ANY)
            if isinstance(given, dict) and given.get("required") is True:
                required.append(name)
        defaults = {n: each.default for n, each in entries.items() if each.default is not NO_VALUE}
        return Schema(
            entries,
            tuple(name for name in required if name not in defaults),
            defaults,
            null_is_value=self._json,
            others=others,
        )

    def entry(self, given: JsonValue, path: str, depth: int) -> FieldSchema:
        self._entries += 1
        if self._entries > ENTRIES_MAX:
            raise SchemaError(path, f"at most {ENTRIES_MAX} entries in all", "found more")
        if given is True:  # JSON Schema: anything.
            return _ANY
        if not isinstance(given, dict):
            expected = "an object that describes the field, e.g. {'type': 'number'}"
            raise SchemaError(path, expected, f"found {quote(given)}")
        kinds = self._kinds(given, path)
        known = {k: v for k, v in given.items() if self._may_enforce(k, kinds, path)}
        entry = FieldSchema(
            kinds,
            pattern=self._pattern(known, path),
            text_sizes=self._sizes(known, "string", kinds, path),
            list_sizes=self._sizes(known, "array", kinds, path),
            range=self._range(known, path),
            choices=self.attempt(lambda: _choices(known, kinds, path), None),
            properties=self._properties(known, path, depth),
            items=self.attempt(lambda: self._items(known, path, depth), None),
        )
        text = self.attempt(lambda: _in_words(entry, known, path), _NOUNS[kinds[0]])
        entry = replace(entry, expected=text)
        if "default" in known:
            entry = self.attempt(partial(self._with_default, entry, known, path), entry)
        return entry

    def _kinds(self, given: JsonMapping, path: str) -> tuple[str, ...]:
        def read() -> tuple[str, ...]:
            kind = given.get("type", NO_VALUE)
            if kind is NO_VALUE and (self._json or "enum" in given or "choices" in given):
                return ("any",)
            several = kind if isinstance(kind, list) and kind else [kind]
            for each in several:
                if not isinstance(each, str) or each not in KINDS:
                    raise _unknown_kind(each, under(path, "type"))
            return tuple(dict.fromkeys(several))

        kinds: tuple[str, ...] = self.attempt(read, ("any",))
        return (*kinds, "null") if given.get("nullable") is True else kinds

    def _may_enforce(self, key: str, kinds: Collection[str], path: str) -> bool:
        """Return whether to enforce a keyword; record its place if it is not understood."""
        if key in _NOTES or key.startswith("x-"):
            return key == "description"
        if key not in _ENFORCED:
            near = get_close_matches(key, _ENFORCED, n=1)
            hint = f"did you mean `{near[0]}`?" if near else "this is not enforced here"
            self._note(SchemaError(under(path, key), "a constraint that is known here", hint))
            return False
        suits = _WHERE.get(key)
        if suits is None or "any" in kinds or any(kind in suits for kind in kinds):
            return True
        expected = f"no `{key}` where the type is {' or '.join(kinds)}"
        self._note(SchemaError(under(path, key), expected, f"it is for {' or '.join(suits)}"))
        return False

    def _pattern(self, given: JsonMapping, path: str) -> SchemaPattern | None:
        def read() -> SchemaPattern:
            text, place = given["pattern"], under(path, "pattern")
            if not isinstance(text, str) or not 0 < len(text) <= PATTERN_CHARS_MAX:
                expected = f"a regular expression of 1 to {PATTERN_CHARS_MAX} characters"
                raise SchemaError(place, expected, f"found {quote(text)}")
            self._patterns += 1
            if self._patterns > PATTERNS_MAX:
                expected = f"at most {PATTERNS_MAX} patterns in all"
                raise SchemaError(place, expected, "found more")
            return self._compile(text, place)

        return self.attempt(read, None) if "pattern" in given else None

    def _sizes(
        self, given: JsonMapping, kind: str, kinds: Collection[str], path: str
    ) -> Sizes | None:
        if kind not in kinds and "any" not in kinds:
            return None
        least, most = ("minItems", "maxItems") if kind == "array" else ("minLength", "maxLength")

        def count(key: str) -> int | None:
            value = given.get(key, 0)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                place = under(path, key)
                raise SchemaError(place, "a whole number from 0", f"found {quote(value)}")
            return value if key in given else None

        def read() -> Sizes | None:
            exactly, longest = count("length"), count("max_length")
            sizes = Sizes(exactly, count(least), longest if longest is not None else count(most))
            low = sizes.exactly if sizes.exactly is not None else sizes.least
            if low is not None and sizes.most is not None and low > sizes.most:
                name = "length" if exactly is not None else least
                expected = f"at most `{'max_length' if longest is not None else most}`"
                raise SchemaError(under(path, name), f"{expected}, {sizes.most}", f"found {low}")
            return sizes if sizes != Sizes() else None

        return self.attempt(read, None)

    def _range(self, given: JsonMapping, path: str) -> Range | None:
        def limit(*keys: str) -> float | None:
            for key in keys:
                value = given.get(key, NO_VALUE)
                if value is not NO_VALUE:
                    if not isinstance(value, int | float) or not finite(value):
                        found = f"found {quote(value)}"
                        raise SchemaError(under(path, key), "a finite number", found)
                    return value
            return None

        def read() -> Range | None:
            low, high = limit("min", "minimum"), limit("max", "maximum")
            if low is not None and high is not None and low > high:
                names = ("min", "max") if "min" in given else ("minimum", "maximum")
                place = under(path, names[0])
                raise SchemaError(place, f"at most `{names[1]}`, {high:g}", f"found {low:g}")
            found = Range(low, high, limit("exclusiveMinimum"), limit("exclusiveMaximum"))
            return found if found != Range() else None

        return self.attempt(read, None)

    def _properties(self, given: JsonMapping, path: str, depth: int) -> Schema | None:
        demanded: tuple[str, ...] = self.attempt(partial(_required_fields, given, path), ())
        others = given.get("additionalProperties", True)
        if not isinstance(others, bool):
            place = under(path, "additionalProperties")
            others = self.attempt(partial(self.entry, others, place, depth + 1), _ANY)
        if "properties" not in given and not demanded and others is True:
            return None
        properties, place = given.get("properties", {}), under(path, "properties")
        return self.attempt(
            lambda: self.fields(properties, place, depth + 1, demanded, others), None
        )

    def _items(self, given: JsonMapping, path: str, depth: int) -> FieldSchema | None:
        if "items" not in given:
            return None
        path = under(path, "items")
        if depth >= DEPTH_MAX:
            raise SchemaError(path, f"at most {DEPTH_MAX} levels", "found more")
        element = given["items"]
        if isinstance(element, list):  # The documents allow either form.
            if len(element) != 1:
                expected = "one entry that describes every element, or a list of that one"
                raise SchemaError(path, expected, f"found {quote(element)}")
            element, path = element[0], f"{path}[0]"
        entry = self.entry(element, path, depth + 1)
        if isinstance(element, dict) and element.get("required") is True:
            found = "elements of a list are never missing"
            self._note(SchemaError(under(path, "required"), "none here", found))
        return entry

    def _with_default(self, entry: FieldSchema, given: JsonMapping, path: str) -> FieldSchema:
        path = under(path, "default")
        if given["default"] is None and "null" not in entry.kinds and "any" not in entry.kinds:
            return entry  # Authors write null for no default.
        if given.get("required") is True:
            expected = "none where the field is `required`"
            self._note(SchemaError(path, expected, "it fills in what is missing"))
        # The default is completed here, so that no call completes it again.
        try:
            completed = entry.check(given["default"], Budget())
        except SchemaError as error:
            raise error.within(path) from None
        text = f"{entry.expected}, by default {quote(given['default'])}"
        return replace(entry, default=completed, expected=text)


def _unknown_kind(kind: JsonValue, path: str) -> SchemaError:
    names = ", ".join(KINDS)
    if kind is NO_VALUE:
        return SchemaError(path, f"one of {names}", "it is missing")
    hint = _OTHER_NAMES.get(kind, "") if isinstance(kind, str) else ""
    found = f"found {quote(kind)}" + (f", which is {hint} here" if hint else "")
    return SchemaError(path, f"one of {names}", found)


def _required_fields(given: JsonMapping, path: str) -> tuple[str, ...]:
    """Return the required fields of an object in JSON Schema."""
    value = given.get("required", False)
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(dict.fromkeys(value[:ENTRIES_MAX]))
    if not isinstance(value, bool):
        expected = "true or false, or a list of names"
        raise SchemaError(under(path, "required"), expected, f"found {quote(value)}")
    return ()


def _choices(
    given: JsonMapping, kinds: Collection[str], path: str
) -> frozenset[tuple[type, JsonValue]] | None:
    key = next((each for each in ("choices", "enum", "const") if each in given), None)
    if key is None:
        return None
    listed, path = given[key], under(path, key)
    if key == "const":
        listed = [listed]
    if not isinstance(listed, list) or not 0 < len(listed) <= CHOICES_MAX:
        raise SchemaError(path, f"a list of 1 to {CHOICES_MAX} values", f"found {quote(listed)}")
    nouns = " or ".join(_NOUNS[kind] for kind in kinds)
    for number, each in enumerate(listed):
        if isinstance(each, list | dict):
            noun = "a text, a number, true or false" if "any" in kinds else nouns
            raise SchemaError(f"{path}[{number}]", noun, f"found {quote(each)}")
        if key == "choices" and not any(_may_be(each, kind) for kind in kinds):
            raise SchemaError(f"{path}[{number}]", nouns, f"found {quote(each)}")
    return frozenset(comparable(each) for each in listed)


def _may_be(value: JsonValue, kind: str) -> bool:
    fits = isinstance(value, KINDS[kind])
    return fits and (kind in {"boolean", "any"} or not isinstance(value, bool))


def _in_words(entry: FieldSchema, given: JsonMapping, path: str) -> str:
    nouns = " or ".join(_NOUNS[kind] for kind in entry.kinds)
    text = " ".join((nouns, *_constraints(entry, given)))
    description = given.get("description", "")
    if not isinstance(description, str):
        raise SchemaError(under(path, "description"), "a text", f"found {quote(description)}")
    return f"{text} ({cut(description)})" if description.strip() else text


def _constraints(entry: FieldSchema, given: JsonMapping) -> Iterator[str]:
    span = entry.range or Range()
    low, high = span.low, span.high
    if low is not None and high is not None:
        yield f"from {low} to {high}"
        low = high = None
    texts, lists = entry.text_sizes or Sizes(), entry.list_sizes or Sizes()
    bounds = (
        ("of at least {}", low),
        ("of at most {}", high),
        ("above {}", span.low_excluded),
        ("below {}", span.high_excluded),
        ("of exactly {} characters", texts.exactly),
        ("of at least {} characters", texts.least),
        ("of at most {} characters", texts.most),
        ("of exactly {} elements", lists.exactly),
        ("of at least {} elements", lists.least),
        ("of at most {} elements", lists.most),
    )
    yield from (template.format(bound) for template, bound in bounds if bound is not None)
    if entry.pattern is not None:
        yield f"that matches {cut(str(given['pattern']))}"
    if entry.choices is not None:
        listed = given.get("choices", given.get("enum", [given.get("const")]))
        yield f"out of {cut(', '.join(map(quote, listed)))}"

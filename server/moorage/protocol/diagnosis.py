"""Explains why a message could not be read, so that its author can correct it.

`messages` calls `diagnose` if typed decoding failed. The diagnosis reads the message a second time,
so that the fast path needs no explanations.
"""

import difflib
import functools
import heapq
import json
import re
import types
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Annotated, Final, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from moorage.model import Code
from moorage.protocol import json_bounds as bounds
from moorage.protocol.errors import BadMessage
from moorage.records import fields as f
from moorage.records.json_values import JsonObject, JsonValue

QUOTED_CHARS_MAX: Final = 64
"""A failure reply repeats at most this many characters of a client's text."""
IGNORED_MAX: Final = 20
"""At most this many unknown fields get a warning each; further fields are only counted."""
_INTEGERS: Final = "numbers that fit 64 bits"
_PLACE: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<name>.*)`")
_TOO_LONG: Final = re.compile(r"Expected `str` of length <= (\d+)")
_BYTE: Final = re.compile(r"\(byte (\d+)\)")
_STEP: Final = re.compile(r"[^.\[\]]+")
_QUOTED: Final = re.compile(r'"(\w+)"')
_HALF_AT_END: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
"""Characters of an escaped surrogate pair; the parser reports a shorter one as cut off."""
_PAIR_CHARS: Final = 12
_MILLI: Final = 1000
LOOKED_AT_MAX: Final = 10_000
"""At most this many values are searched for one that cannot be packed. If none is found, the error
names the whole field."""
_ABSENT: Final = (None, msgspec.Raw(b"null"), msgspec.Raw(b'""'))


class _Identified(Struct):
    id: f.MessageId = None


_identified: Final = msgspec.json.Decoder(_Identified).decode
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def check_bounds(text: str) -> None:
    """Refuse a message that would take too long to read, before it is read.

    Raises:
        BadMessage: Arrays and objects are nested deeper than `DEPTH_MAX` (`bad_message`); the
            message has more parts than `PARTS_MAX`, more values than `VALUES_MAX`, or more numbers
            that take long to read than `SLOW_NUMBERS_MAX` (`too_large`).
    """
    many = len(text) > min(bounds.PARTS_MAX, 4 * bounds.SLOW_NUMBERS_MAX)
    if not many and text.count("{") + text.count("[") <= f.DEPTH_MAX:
        return
    encoded = text.encode(errors="surrogatepass")
    if bounds.is_deeper(encoded, f.DEPTH_MAX):
        raise _too_deep(text)
    if bounds.has_more_parts(encoded, bounds.PARTS_MAX):
        raise _too_large(text, bounds.PARTS_MAX, "arrays, objects and named fields")
    if bounds.has_more_values(encoded, bounds.VALUES_MAX):
        raise _too_large(text, bounds.VALUES_MAX, "values")
    if bounds.has_slow_numbers(encoded, bounds.SLOW_NUMBERS_MAX):
        what = "numbers that have 190 digits, or an exponent beyond 199"
        raise _too_large(text, bounds.SLOW_NUMBERS_MAX, what)


def check_names(text: str) -> AbstractSet[str]:
    """Refuse a message with a duplicate field: JSON readers differ on which one counts.

    Args:
        text: A JSON object that was read already. Only its own fields are checked, not nested ones.

    Returns:
        The names of the object's fields.

    Raises:
        BadMessage: A field occurs twice.
    """
    raw = _fields(text)
    quotes = 2 * len(raw) + b"".join(raw.values()).count(b'"')
    if text.count('"') == quotes:  # A duplicate name adds two quotes.
        return raw.keys()
    seen: set[str] = set()
    for name in _names(text):
        if name in seen:
            expected = "each field once"
            reason = f"{_short(name)}: the message has this field twice; expected {expected}."
            raise BadMessage(Code.BAD_MESSAGE, reason, name, expected, message_id(text))
        seen.add(name)
    return seen


def _names(text: str) -> list[str]:
    """Return the names of an object's own fields, duplicates included."""
    whole = json.loads(text, object_pairs_hook=list, parse_int=str, parse_float=str)
    return [name for name, _ in whole]


def diagnose(frame: str, kind: type[Struct], error: Exception, also: tuple[str, ...]) -> BadMessage:
    """Return the error for an invalid message.

    Args:
        frame: The message.
        kind: The type to which the message was decoded.
        error: The error of typed decoding.
        also: Required fields that `kind` does not have, named before the fields of `kind`.

    Returns:
        The error to answer with, the first one found.

    Raises:
        BadMessage: The message has a duplicate field, so its meaning is unclear.
    """
    if isinstance(error, msgspec.DecodeError) and not isinstance(error, msgspec.ValidationError):
        return _not_json(frame, error)
    try:
        raw = _fields(frame)
    except msgspec.ValidationError:
        return BadMessage(
            Code.BAD_MESSAGE,
            "The message must be a JSON object, such as "
            '{"adhoc": true, "policy_rule_uri": "name:version-tag", "inputs": {}}.',
            expected="a JSON object",
        )
    except (msgspec.DecodeError, UnicodeError) as unreadable:
        return _not_json(frame, unreadable)
    except RecursionError:
        return _too_deep(frame)
    check_names(frame)
    identity = message_id(frame)
    missing = [*also, *(name for name in required_fields(kind) if raw.get(name) in _ABSENT)]
    if missing:
        return missing_fields(missing, expectations(kind).get(missing[0], ""), identity)
    if isinstance(error, OverflowError | UnicodeError):
        path = _unencodable(msgspec.json.decode(frame))
        return _wrong(path, _INTEGERS if isinstance(error, OverflowError) else "text", identity)
    return _invalid(kind, error, identity, raw)


def warn_of_unknown(
    frame: str | bytes, kind: type[Struct], known: frozenset[str], *, strict: bool
) -> list[str]:
    """Return a warning for each unknown field of a message.

    Raises:
        BadMessage: There is an unknown field, and the message is `strict`. Or the field's name is
            close to `dry_run`, or is `dry_run` in a request for a lease, so that ignoring the field
            would grant a lease by mistake.
    """
    raw = _fields(frame)
    if raw.keys() <= known:
        return []
    unknown = raw.keys() - known
    names, paths = sorted(known), [path for path in expectations(kind) if "." in path]
    trials = [name for name in unknown if "dry_run" in known and _is_nearly_dry_run(name)]
    if not trials and "lease" in raw:
        trials = [
            name
            for name in heapq.nsmallest(IGNORED_MAX, unknown)
            if _is_nearly_dry_run(bytes(raw[name])[:QUOTED_CHARS_MAX].decode(errors="replace"))
            or "dry_run" in _suggest(name, names, paths)
        ]
    for name in heapq.nsmallest(1, trials or (unknown if strict else ())):
        expected = "one of " + ", ".join(names)
        meant = " (did you mean dry_run?)" if trials else _suggest(name, names, paths)
        reason = f"{_short(name)}: unknown field; expected {expected}{meant}"
        raise BadMessage(Code.BAD_MESSAGE, reason, _short(name), expected, message_id(frame))
    warnings = [
        f"{_short(name)}: unknown field, it was ignored{_suggest(name, names, paths)}."
        for name in heapq.nsmallest(IGNORED_MAX, unknown)
    ]
    if len(unknown) > IGNORED_MAX:
        warnings.append(f"{len(unknown) - IGNORED_MAX} more unknown fields were ignored.")
    return warnings


def message_id(frame: str | bytes) -> str | int | None:
    """Return the `id` of a message that may have wrong parts, or None."""
    try:
        return _identified(frame).id
    except (ValueError, RecursionError):
        return None


def no_kind(frame: str, kind: type[Struct], operations: list[str]) -> BadMessage:
    """Return the error for a message that has neither `adhoc` nor `op` nor `input`."""
    error = diagnose(frame, kind, ValueError(), ("adhoc",))
    missing = error.details.get("missing", ())
    if "policy_rule_uri" not in missing:
        return error
    reason = (
        f"{error.reason}. An operation names `op` instead, such as status or release, and a block"
        " `input`."
    )
    details = {**error.details, "known": operations}
    return BadMessage(error.code, reason, error.field, error.expected, error.id, details)


def missing_fields(names: list[str], expected: str, identity: str | int | None) -> BadMessage:
    """Return the error that names all missing fields."""
    return BadMessage(
        Code.MISSING_FIELDS,
        f"Missing required fields: {', '.join(names)}",
        names[0],
        expected,
        identity,
        {"missing": names},
    )


def unknown_op(op: JsonValue, known: list[str], identity: str | int | None) -> BadMessage:
    """Return the error that lists the existing operations."""
    reason = f"op: expected one of {', '.join(known)}{_suggest(op, known)}"
    return BadMessage(
        Code.UNKNOWN_OP, reason, "op", "one of " + ", ".join(known), identity, {"known": known}
    )


@functools.cache
def required_fields(kind: type[Struct]) -> tuple[str, ...]:
    """Return the required fields of this kind of message."""
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.required)


@functools.cache
def expectations(kind: type[Struct]) -> dict[str, str]:
    """Return the expected type of each field, by dotted path, from the descriptions in `fields`."""
    expected: dict[str, str] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        description, nested = _describe(hint)
        if nested is not None:
            expected[name] = description or f"an object with {', '.join(nested.__struct_fields__)}"
            for path, what in expectations(nested).items():
                expected[f"{name}.{path}"] = what
        elif description:
            expected[name] = description
    return expected


def _describe(hint: object) -> tuple[str, type[Struct] | None]:
    """Return the description and the message type that a type hint holds, if any."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return "", hint
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        for note in notes:
            if isinstance(note, Meta) and note.description:
                return note.description, _describe(inner)[1]
        return _describe(inner)
    if get_origin(hint) is tuple:
        return "", _describe(get_args(hint)[0])[1]
    if get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            description, nested = _describe(part)
            if description or nested:
                return description, nested
    return "", None


def _invalid(
    kind: type[Struct], error: Exception, identity: str | int | None, raw: dict[str, msgspec.Raw]
) -> BadMessage:
    """Translate an error of msgspec: name the field of the message and the expected value."""
    place = _PLACE.match(str(error))
    what, path = (place["what"], place["path"] or "") if place else (str(error), "")
    plain = re.sub(r"\[[^\]]*\]", "", path)
    prefix = f"{plain}." if plain else ""
    expected = expectations(kind)
    if unknown := _UNKNOWN.match(what):
        below = [path for path in expected if path.startswith(prefix)]
        known = [name for path in below if "." not in (name := path.removeprefix(prefix))]
        inner = [path for path in below if path.removeprefix(prefix) not in known]
        name = _short(unknown["name"])
        meant = _suggest(name, known, inner) or _suggest(name, [], _elsewhere(kind, name, prefix))
        return BadMessage(
            Code.BAD_MESSAGE,
            f"{prefix}{name}: unknown field; expected one of {', '.join(known)}{meant}",
            prefix + name,
            "one of " + ", ".join(known),
            identity,
        )
    if missing := _MISSING.match(what):
        name = prefix + missing["name"]
        return missing_fields([name], expected.get(name, ""), identity)
    if "out of range" in what:
        return _wrong(plain or "(message)", _INTEGERS, identity)
    ours = "`" in what and not what.startswith(("Expected", "Object"))  # From `__post_init__`.
    if not path:
        return BadMessage(Code.BAD_MESSAGE, what if ours else _short(what), id=identity)
    wanted = what if ours else expected.get(plain) or _short(what)
    if path.endswith("]") and plain in expected and not ours:
        inner = [
            name.removeprefix(f"{plain}.") for name in expected if name.startswith(f"{plain}.")
        ]
        wanted = f"an object with {', '.join(inner)}" if inner else f"an item of {wanted}"
        if too_long := _TOO_LONG.match(what):  # Descriptions of lists have no bound of an item.
            wanted += f", each of at most {too_long[1]} characters"
    given = _value_at(path, raw)
    if "matching regex" in what:
        blank = isinstance(given, str) and not given.strip()
        wanted = expected.get(plain, "a text")
        if blank:
            wanted = f"a name that is not blank, in {wanted}; leave the blank out"
        else:
            wanted += "; no control, zero-width or bidirectional character"
    wanted += _part(plain, given) + _suggest(given, _QUOTED.findall(wanted))
    return _wrong(path.replace("[...]", ""), wanted, identity)


def _elsewhere(kind: type[Struct], name: str, prefix: str) -> list[str]:
    """Return the paths of fields elsewhere in a message whose name is equal or similar."""
    if not prefix:
        return []
    ours = {name, f"{name}s", name.removesuffix("s")}
    others = (path for path in expectations(kind) if not path.startswith(prefix))
    return [path for path in others if path.rpartition(".")[2] in ours]


def _value_at(path: str, raw: dict[str, msgspec.Raw]) -> JsonValue:
    """Return the value at a path such as `a.b[0].c`; None without such a value."""
    name, *steps = _STEP.findall(path) or [""]
    value = msgspec.json.decode(raw[name]) if name in raw else None
    for step in steps:
        if isinstance(value, list) and step.isdigit():
            value = dict(enumerate(value)).get(int(step))
        else:
            value = value.get(step) if isinstance(value, dict) else None
    return value


def _part(path: str, value: JsonValue) -> str:
    """Return the name of the field for fractions, if `path` takes only whole numbers."""
    if not path.endswith(("gpus", "_milli")):
        return ""
    if not isinstance(value, float) or not value > 0 or value.is_integer():
        return ""
    if path.endswith("gpus"):
        share = f"{max(1, round(value * _MILLI))}" if value < 1 else "N"
        return f'; for a share of one GPU give "gpus": 1 and "gpu_milli": {share}'
    if path.endswith("_milli") and value * _MILLI < f.CPU_MILLI_MAX:
        return f"; {value:g} of it is {max(1, round(value * _MILLI))}"
    return ""


def _wrong(field: str, expected: str, identity: str | int | None) -> BadMessage:
    return BadMessage(Code.BAD_MESSAGE, f"{field}: expected {expected}", field, expected, identity)


def _not_json(frame: str, error: Exception) -> BadMessage:
    cause = str(error).removeprefix("JSON is malformed: ")
    position = _BYTE.search(cause)
    if isinstance(error, UnicodeError):
        cause = "it contains characters that are not Unicode text"
    elif not frame.strip():
        cause = "it is empty"
    elif "surrogate" in cause or _HALF_AT_END.search(frame[-_PAIR_CHARS:]):
        cause = "it contains half of a surrogate pair"
    elif position:
        # The parser counts some bytes from 0 and some from 1.
        cause = _BYTE.sub(f"near byte {position[1]}", cause)
        rest = frame.encode(errors="replace")[int(position[1]) :].lstrip(b"-")
        if rest.startswith((b"NaN", b"Infinity")):
            cause += "; NaN and Infinity are not JSON"
    return BadMessage(
        Code.BAD_JSON,
        f"The message is not valid JSON: {_short(cause)}.",
        expected="JSON (RFC 8259)",
    )


def _too_deep(frame: str) -> BadMessage:
    """Return the error, with the message's id if the decoder can skip what is nested too deep."""
    expected = f"at most {f.DEPTH_MAX} arrays and objects within one another"
    reason = f"The message is nested too deep; expected {expected}."
    return BadMessage(Code.BAD_MESSAGE, reason, expected=expected, id=message_id(frame))


def _too_large(frame: str, most: int, of: str) -> BadMessage:
    expected = f"at most {most} {of}"
    reason = f"The message has too many parts; expected {expected}. Send some of them as text."
    return BadMessage(Code.TOO_LARGE, reason, expected=expected, id=message_id(frame))


def _unencodable(raw: JsonObject) -> str:
    """Return the path of the first value that cannot be packed, or of its field."""
    field = next((name for name, value in raw.items() if not _is_packable(value)), "(message)")
    todo: list[tuple[str, JsonValue]] = [(_short(field), raw.get(field))]
    for _ in range(LOOKED_AT_MAX):
        path, value = todo.pop() if todo else ("", None)
        if isinstance(value, dict):
            members = reversed(list(islice(value.items(), LOOKED_AT_MAX)))
            todo.extend((f"{path}.{_short(key)}", part) for key, part in members)
        elif isinstance(value, list):
            items = reversed(list(enumerate(value[:LOOKED_AT_MAX])))
            todo.extend((f"{path}[{number}]", part) for number, part in items)
        elif not _is_packable(value):
            return path
    return _short(field)


def _is_packable(value: JsonValue) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeError):
        return False
    return True


def _suggest(given: JsonValue, known: list[str], paths: Sequence[str] = ()) -> str:
    """Return ` (did you mean x?)` if a known word, or the last part of a path, is similar."""
    if not isinstance(given, str) or len(given) > QUOTED_CHARS_MAX:
        return ""
    given, stem = given.casefold(), given.casefold().rstrip("s")
    inner: dict[str, str] = {}
    for path in paths:
        inner.setdefault(path.rpartition(".")[2], path)
    if given in inner:
        return f" (did you mean {inner[given]}?)"
    # `cpus` means `cpu_milli`, though `gpus` is nearer: authors mostly omit units.
    words = {each.casefold(): inner.get(each, each) for each in (*inner, *known)}
    longer = [name for name in words if len(stem) > 1 and name.startswith(stem)]
    close = longer or difflib.get_close_matches(given, words, n=1)
    return f" (did you mean {words[close[0]]}?)" if close else ""


def _slips(word: str) -> Iterator[str]:
    """Yield patterns that match a word with one typo: a wrong, missing, extra or swapped letter."""
    for at in range(len(word) + 1):
        before, after = word[:at], word[at:]
        yield f"{before}.?{after[1:]}"
        yield f"{before}.{after}"
        yield f"{before}{after[1::-1]}{after[2:]}"


_NEARLY_DRY_RUN: Final = re.compile("|".join(_slips("dryrun")))


def _is_nearly_dry_run(text: str) -> bool:
    """Return whether a text is `dry_run` in other spelling, or with one typo."""
    letters = "".join(filter(str.isalnum, text[:QUOTED_CHARS_MAX].casefold()))
    return bool(_NEARLY_DRY_RUN.fullmatch(letters))


def _short(text: str) -> str:
    return text if len(text) <= QUOTED_CHARS_MAX else text[: QUOTED_CHARS_MAX - 1] + "…"

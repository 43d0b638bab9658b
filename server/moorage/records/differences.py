"""Computes bounded differences of JSON documents: `before` and `after` of the audit log.

`web` calls this module for documents, and the audit log calls it for changes by operators.
"""

from dataclasses import dataclass, field
from typing import Final

from moorage.records.json_values import JsonMapping, JsonObject, JsonValue

PATHS_MAX: Final = 32
"""At most this many changed fields are listed; a mark shows that there are more."""
CHARS_MAX: Final = 8_192
"""At most this many characters of all values on each side; then containers are only counted."""
TEXT_MAX: Final = 200
"""At most this many characters of a text, or of a path."""
ITEMS_MAX: Final = 16
"""An object or list is shown if it has at most this many members; of others, only the number."""
LEVELS_MAX: Final = 6
_MORE: Final = "…"
_INTEGER_MAX: Final = 1 << 63


class _Missing:
    """Marks a field that is missing on one side."""


_MISSING: Final = _Missing()


def differences(
    before: JsonMapping | None, after: JsonMapping | None
) -> tuple[JsonObject | None, JsonObject | None]:
    """Return the old and the new values of the fields that differ, by path.

    Members of lists are matched by their `id` if all have one, otherwise by their index.

    Args:
        before: The old document; None: it did not exist.
        after: The new document; None: it was deleted.
    """
    sides = _Sides()
    known: tuple[JsonValue, JsonValue] = (before or {}, after or {})
    sides.compare("", *known, LEVELS_MAX)
    return (
        None if before is None else sides.before.shown,
        None if after is None else sides.after.shown,
    )


@dataclass(slots=True)
class _Side:
    shown: JsonObject = field(default_factory=dict[str, JsonValue])
    chars_left: int = CHARS_MAX

    def show(self, path: str, value: JsonValue) -> None:
        if value is not _MISSING:
            self.shown[path] = self._brief(value, LEVELS_MAX)

    def _brief(self, value: JsonValue, levels: int) -> JsonValue:
        if isinstance(value, str):
            shown = value if len(value) <= TEXT_MAX else f"{value[:TEXT_MAX]}… ({len(value)})"
            self.chars_left -= len(shown)
            return shown
        if isinstance(value, dict | list | tuple):
            if len(value) > ITEMS_MAX or not levels or self.chars_left <= 0:
                return f"({len(value)} values)" if value else value
            if isinstance(value, dict):
                self.chars_left -= sum(map(len, value))
                return {k[:TEXT_MAX]: self._brief(v, levels - 1) for k, v in value.items()}
            return [self._brief(each, levels - 1) for each in value]
        self.chars_left -= 8
        if isinstance(value, int) and not -_INTEGER_MAX <= value < _INTEGER_MAX:
            return "(a large number)"
        return value


@dataclass(slots=True)
class _Sides:
    before: _Side = field(default_factory=_Side)
    after: _Side = field(default_factory=_Side)
    _paths: int = 0

    def compare(self, path: str, before: JsonValue, after: JsonValue, levels: int) -> None:
        if before is after or before == after:
            return
        if levels and (members := _members(before, after)) is not None:
            old, new = members
            for name in [*old, *(each for each in new if each not in old)]:
                if self._paths > PATHS_MAX:
                    return
                inner = f"{path}.{name}" if path else name
                self.compare(inner, old.get(name, _MISSING), new.get(name, _MISSING), levels - 1)
            return
        self._paths += 1
        if self._paths > PATHS_MAX:
            self.before.shown[_MORE] = self.after.shown[_MORE] = "and more"
            return
        shown = path if len(path) <= TEXT_MAX else path[:TEXT_MAX] + _MORE
        self.before.show(shown, before)
        self.after.show(shown, after)


def _members(before: JsonValue, after: JsonValue) -> tuple[JsonMapping, JsonMapping] | None:
    """Return the members of two values by name; None: show the values as a whole."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before, after
    if not (isinstance(before, list) and isinstance(after, list) and before and after):
        return None
    old, new = _by_id(before), _by_id(after)
    if old is not None and new is not None:
        return old, new
    if len(before) != len(after):
        return None
    return dict(zip(map(str, range(len(before))), before, strict=True)), dict(
        zip(map(str, range(len(after))), after, strict=True)
    )


def _by_id(values: list[JsonValue]) -> JsonMapping | None:
    """Return the members of a list by id; None if a member lacks an id, or ids repeat."""
    found = {each["id"]: each for each in values if isinstance(each, dict) and "id" in each}
    ok = len(found) == len(values) and all(isinstance(name, str) for name in found)
    return found if ok else None

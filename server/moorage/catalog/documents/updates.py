"""Applies the body of a PUT, a Mongo update document, to a stored document.

The embedded catalog calls `apply_change` for all its documents; the result is checked like a new
document.
"""

from collections.abc import Sequence
from typing import Final

from moorage.catalog.documents.encoding import index_of
from moorage.catalog.values import Document
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonMapping, JsonValue

PATH_PARTS_MAX: Final = 32
"""Maximum parts of a dotted path."""
STEPS_MAX: Final = 1000
"""Maximum dotted paths and operations of one change, since each may copy the whole document."""
_OPERATORS: Final = frozenset({"$set", "$unset", "$inc", "$push"})


def apply_change(document: Document, change: JsonValue) -> Document:
    """Return a changed copy of a document, with the semantics that existing clients expect.

    Args:
        document: The present document; it is not changed.
        change: New values of fields, by name or dotted path, directly or under `$set`; other fields
            stay. With `$set`, also `$unset` (dotted paths, as keys or as a list), `$inc` (numbers
            by path) and `$push` (by path a value, or `{"$each": values}`).

    Raises:
        ServiceError: `bad_message` naming the operator or path.
    """
    if not isinstance(change, dict):
        raise ServiceError.wrong_field("body", "an object of fields and their new values")
    plain = {key: value for key, value in change.items() if not key.startswith("$")}
    for key in change.keys() - plain.keys() - _OPERATORS:
        expected = f"fields and their new values, or one of {', '.join(sorted(_OPERATORS))}"
        raise ServiceError.wrong_field(key, expected)
    given = {key: change.get(key, {}) for key in ("$set", "$inc", "$push")}
    for key, each in given.items():
        if not isinstance(each, dict):
            raise ServiceError.wrong_field(key, "an object of dotted paths and values")
    unsetting = change.get("$unset", {})
    if not isinstance(unsetting, (dict, list)):
        raise ServiceError.wrong_field("$unset", "an object or a list of dotted paths")
    dotted = sum("." in path for path in (*plain, *given["$set"]))
    if dotted + len(given["$inc"]) + len(given["$push"]) + len(unsetting) > STEPS_MAX:
        expected = f"at most {STEPS_MAX} dotted paths and operations in one change"
        raise ServiceError.wrong_field("body", expected)
    changed: JsonValue = _all_set(document, plain, "")
    changed = _all_set(changed, given["$set"], "$set")
    for operator, change_of in (("$inc", _increase), ("$push", _push)):
        for path, value in given[operator].items():
            field = f"{operator}.{path}"
            parts = _parts(path, operator)
            new = change_of(_at(changed, parts), value, field)
            changed = _place(changed, parts, new, field)
    for path in unsetting:
        changed = _without(changed, _parts(path, "$unset"))
    result: Document = changed
    return result


def _all_set(document: Document, values: JsonMapping, operator: str) -> Document:
    paths = {path: _parts(path, operator) for path in values}
    changed = {**document, **{path: values[path] for path in paths if len(paths[path]) == 1}}
    for path, parts in paths.items():
        if len(parts) > 1:
            field = f"{operator}.{path}" if operator else path
            changed = _place(changed, parts, values[path], field)
    return changed


def _at(node: JsonValue, parts: Sequence[str]) -> JsonValue:
    """Return the value at a path, or None."""
    for part in parts:
        if isinstance(node, list):
            index = index_of(part, node)
            node = None if index is None else node[index]
        else:
            node = node.get(part) if isinstance(node, dict) else None
    return node


def _increase(old: JsonValue, by: JsonValue, field: str) -> JsonValue:
    for each in (by, 0 if old is None else old):
        if isinstance(each, bool) or not isinstance(each, int | float):
            raise ServiceError.wrong_field(
                field, "a number, for a field that has a number or is missing"
            )
    return by if old is None else old + by


def _push(old: JsonValue, value: JsonValue, field: str) -> JsonValue:
    if old is not None and not isinstance(old, list):
        raise ServiceError.wrong_field(field, "a list to push to, or a missing field")
    several = isinstance(value, dict) and value.keys() == {"$each"}
    new = value["$each"] if several else [value]
    if not isinstance(new, list):
        raise ServiceError.wrong_field(f"{field}.$each", "a list of values")
    return [*(old or ()), *new]


def _parts(path: JsonValue, operator: str) -> list[str]:
    parts = path.split(".") if isinstance(path, str) else []
    if (
        not 0 < len(parts) <= PATH_PARTS_MAX
        or "" in parts
        or any(part.startswith("$") for part in parts)
    ):
        raise ServiceError.wrong_field(
            f"{operator}.{path}" if operator else str(path),
            f"a dotted path of 1 to {PATH_PARTS_MAX} non-empty parts, none starting with $",
        )
    return parts


def _place(node: JsonValue, parts: Sequence[str], value: JsonValue, field: str) -> JsonValue:
    """Return a copy of `node` with `value` at `parts`; create missing objects on the way."""
    if not parts:
        return value
    head, rest = parts[0], parts[1:]
    if isinstance(node, dict):
        return {**node, head: _place(node.get(head, {}), rest, value, field)}
    if isinstance(node, list):
        index = index_of(head, node)
        if index is None:
            raise ServiceError.wrong_field(field, f"an index below {len(node)} in place of {head}")
        return [*node[:index], _place(node[index], rest, value, field), *node[index + 1 :]]
    raise ServiceError.wrong_field(field, f"an object or a list to hold {head}")


def _without(node: JsonValue, parts: Sequence[str]) -> JsonValue:
    """Return a copy of `node` without the value at `parts`; `node` itself if there is none."""
    head, rest = parts[0], parts[1:]
    if isinstance(node, dict) and head in node:
        if not rest:
            return {key: value for key, value in node.items() if key != head}
        return {**node, head: _without(node[head], rest)}
    if isinstance(node, list) and (index := index_of(head, node)) is not None:
        # As in Mongo, an element is set to null, not removed: indices stay.
        inner = _without(node[index], rest) if rest else None
        return [*node[:index], inner, *node[index + 1 :]]
    return node

"""Reading what a server of another version wrote: one lenient decoder for all records.

Clients call it. Unknown fields are ignored, fields that an older server does not know are empty,
and a code that is newer than this client is left out. What is of the wrong kind is an error.
"""

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from moorage.records.fields import ESSENTIAL

__all__ = ["read_record"]

T = TypeVar("T")


def read_record(kind: type[T], document: Any) -> T:
    """Return a document as a record, or whatever else a type can say.

    Raises:
        msgspec.ValidationError: It is something else, or lacks what is essential.

    """
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError:
        described: Any = kind  # Types can be hashed; mypy does not know.
        return msgspec.convert(_completed(document, _described(described)), kind)


@cache
def _described(kind: Hashable) -> inspect.Type:
    return inspect.type_info(kind)


def _completed(document: Any, kind: inspect.Type) -> Any:
    """Return a document with the fields that its kind needs, and without those it refuses."""
    match kind:
        case inspect.Metadata(type=inner):
            return _completed(document, inner)
        case inspect.StructType(fields=fields) if isinstance(document, Mapping):
            return _with_fields(document, fields)
        case inspect.ListType(item_type=inner) | inspect.VarTupleType(item_type=inner) if (
            isinstance(document, list)
        ):
            return [_completed(each, inner) for each in document]
        case inspect.DictType(value_type=inner) if isinstance(document, Mapping):
            return {name: _completed(each, inner) for name, each in document.items()}
        case inspect.UnionType(types=kinds):
            for each in kinds:
                document = _completed(document, each)
        case _:  # A value, which is right or wrong.
            pass
    return document


def _with_fields(document: Mapping[str, Any], fields: tuple[inspect.Field, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields:
        name = field.encode_name
        if name in document:
            value = _completed(document[name], field.type)
            if field.required or not _is_newer(value, field.type):
                found[name] = value
        elif field.required:
            found |= _empty(name, field.type)
    return found


def _is_newer(value: Any, kind: inspect.Type) -> bool:
    """Return whether a value is a code that this version does not know."""
    return (
        isinstance(kind, inspect.EnumType)
        and isinstance(value, str)
        and value not in kind.cls._value2member_map_
    )


def _empty(name: str, kind: inspect.Type) -> dict[str, Any]:
    """Return a field as it is where nothing is said of it; none where it has to be there."""
    match kind:
        case inspect.Metadata(type=inner, extra=extra):
            return {} if extra == ESSENTIAL.extra else _empty(name, inner)
        case inspect.UnionType(includes_none=True):
            return {name: None}
        case inspect.StrType():
            return {name: ""}
        case inspect.BoolType():
            return {name: False}
        case inspect.IntType() | inspect.FloatType():
            return {name: 0}
        case inspect.ListType() | inspect.VarTupleType():
            return {name: []}
        case inspect.DictType():
            return {name: {}}
        case _:  # Of an object, or of one of some words, none is empty.
            return {}

"""A lenient decoder for all records, which reads replies of other versions of the server.

Clients call `read_record`. The function ignores unknown fields, fills in empty values for fields
that an older server lacks, and omits a code that this client does not know. A value of the wrong
type is an error.
"""

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Final, TypeVar

import msgspec
from msgspec import inspect

from moorage.records.fields import ESSENTIAL
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue

T = TypeVar("T")

_EMPTY: Final[Mapping[type[inspect.Type], object]] = {
    inspect.StrType: "",
    inspect.BoolType: False,
    inspect.IntType: 0,
    inspect.FloatType: 0,
    inspect.ListType: (),
    inspect.VarTupleType: (),
    inspect.DictType: {},
}
"""The empty value of each type, used if a field is missing."""


def read_record(kind: type[T], document: JsonValue) -> T:
    """Convert a document to a record, or to any other type.

    Raises:
        msgspec.ValidationError: The document has another type, or lacks an essential field.
    """
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError:
        described: JsonValue = kind  # Types can be hashed; mypy does not know.
        return msgspec.convert(_complete(document, _describe(described)), kind)


@cache
def _describe(kind: Hashable) -> inspect.Type:
    return inspect.type_info(kind)


def _complete(document: JsonValue, kind: inspect.Type) -> JsonValue:
    """Return a document with empty values for missing fields, and without surplus fields."""
    match kind:
        case inspect.Metadata(type=inner):
            return _complete(document, inner)
        case inspect.StructType(fields=fields) if isinstance(document, Mapping):
            return _with_fields(document, fields)
        case inspect.ListType(item_type=inner) | inspect.VarTupleType(item_type=inner) if (
            isinstance(document, list)
        ):
            return [_complete(each, inner) for each in document]
        case inspect.DictType(value_type=inner) if isinstance(document, Mapping):
            return {name: _complete(each, inner) for name, each in document.items()}
        case inspect.UnionType(types=kinds):
            for each in kinds:
                document = _complete(document, each)
        case _:  # A value, which is right or wrong.
            pass
    return document


def _with_fields(document: JsonMapping, fields: tuple[inspect.Field, ...]) -> JsonObject:
    found: JsonObject = {}
    for field in fields:
        name, kind = field.encode_name, field.type
        if name in document:
            found[name] = _complete(document[name], kind)
            codes = list(kind.cls) if isinstance(kind, inspect.EnumType) else [found[name]]
            if not field.required and found[name] not in codes:
                del found[name]  # A code that is newer than this client.
        elif field.required and isinstance(kind, inspect.UnionType) and kind.includes_none:
            found[name] = None
        elif field.required and type(bare := _bare(kind)) in _EMPTY:
            found[name] = _EMPTY[type(bare)]
    return found


def _bare(kind: inspect.Type) -> inspect.Type:
    """Return a type without its annotations; the type of an essential field keeps them."""
    while isinstance(kind, inspect.Metadata) and kind.extra != ESSENTIAL.extra:
        kind = kind.type
    return kind

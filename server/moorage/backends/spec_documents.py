"""Converts specs to and from JSON, and names pools, for the daemon and `ResourceEngine`."""

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from moorage.backends import registry
from moorage.backends.spec_fields import memory_bytes
from moorage.backends.specs import (
    BaseResourceSpec,
    ContainerResourceSpec,
    LocalEnvResourceSpec,
    SpecError,
)
from moorage.records.json_values import JsonMapping, JsonObject

_ALL: Final[list[type[BaseResourceSpec]]] = [*registry.specs(), LocalEnvResourceSpec]
SPECS: Final[Mapping[str, type[BaseResourceSpec]]] = {
    each.category: each
    for each in reversed(_ALL)  # Of two kinds with one category, the first.
}
"""The spec classes by `category`, as JSON names them."""
_NUMBERS: Final[dict[tuple[type, Any], int]] = {}
"""The numbers of values in the keys of pools, by class and value."""
_UNUSED: Final = itertools.count(-1, -1)
"""Negative numbers for the next values of `_NUMBERS`; an `id` is never negative."""


def spec_from_document(
    document: JsonMapping,
    category: str,
    own: Mapping[str, type[BaseResourceSpec]] = MappingProxyType({}),
) -> BaseResourceSpec:
    """Read a spec from JSON.

    Args:
        document: The fields; `category` among them wins over the argument.
        category: The backend's default category, if the document names none.
        own: The backend's own spec classes by category, if they differ from `SPECS`.

    Raises:
        SpecError: A field is wrong; the error names it, and the expected value.
    """
    fields = dict(document)
    category = fields.pop("category", category)
    kind = own.get(str(category)) or SPECS.get(str(category))
    if kind is None:
        raise SpecError("spec.category", f"one of {', '.join(sorted(SPECS))}")
    known = {each.name for each in dataclasses.fields(kind)}
    for name in fields:
        if name not in known:
            listed = ", ".join(sorted(known))
            raise SpecError(f"spec.{name}", f"one of the fields of {category}: {listed}")
    try:
        return kind(**fields)
    except SpecError as error:
        raise SpecError(f"spec.{error.path}", error.expected) from error


def document_from_spec(spec: BaseResourceSpec) -> JsonObject:
    """Return a spec as JSON without default values, so that equal specs have equal documents."""
    return {"category": spec.category, **_fields_off_default(spec)}


def _fields_off_default(part: Any) -> JsonObject:
    """Return the fields of a spec that differ from their defaults."""
    given: JsonObject = {}
    for each in dataclasses.fields(part):
        value, made = getattr(part, each.name), each.default_factory
        if value == (each.default if made is dataclasses.MISSING else made()):
            continue
        if dataclasses.is_dataclass(value):
            value = _fields_off_default(value)
        elif isinstance(value, dict):
            value = {str(name): inner for name, inner in value.items()}
        elif each.name == "mem_limit":
            value = memory_bytes(value)
        given[each.name] = value
    return given


def pool_key(spec: BaseResourceSpec, backend: str) -> str:
    """Return the name of the pool for resources of this spec and backend.

    The key starts with `category:title|backend`, for people, and ends with a digest of every field.
    So specs share a pool if and only if they mean the same, however they are written.
    """
    document = {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)}
    with contextlib.suppress(KeyError, ValueError):  # The spec has no such field, or another value.
        document["mem_limit"] = memory_bytes(document["mem_limit"])
    if isinstance(spec, ContainerResourceSpec):
        document |= {"image": spec.title, "host_ip": spec.host_ip or "127.0.0.1"}
        document["mount"] = {key: way.removesuffix(":rw") for key, way in spec.mount.items()}
    whole = _name(type(spec)) + _text(document)
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return f"{spec.category}:{spec.title}|{backend}|{digest}"


def _text(value: Any) -> str:
    """Return a text that values share if and only if they are equal; 1.0 equals 1."""
    kind = type(value)
    if value is None or kind in {bool, int, float, str, bytes}:
        return repr(int(value) if kind is float and value.is_integer() else value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [_text(getattr(value, each.name)) for each in dataclasses.fields(value)]
    elif isinstance(value, dict):
        parts = sorted(f"{_text(name)}:{_text(each)}" for name, each in value.items())
    elif isinstance(value, set | frozenset):
        parts = sorted(map(_text, value))
    elif isinstance(value, list | tuple):
        parts = [_text(each) for each in value]
    else:
        return f"{_name(kind)}#{_number(value)}"
    return f"{_name(kind)}({','.join(parts)})"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _number(value: Any) -> int:
    """Return a number that only equal values share; each value without a hash gets its own."""
    kind: Any = type(value)
    if kind.__eq__ is not object.__eq__:
        with contextlib.suppress(TypeError):  # The value has no hash.
            return _NUMBERS.setdefault((kind, value), next(_UNUSED))
    return id(value)  # The spec of the pool keeps the value, so no other value gets the id.

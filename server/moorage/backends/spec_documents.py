"""Converts specs to and from JSON, and names pools, for the daemon and `ResourceEngine`."""

import contextlib
import dataclasses
import hashlib
import json
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
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue

_ALL: Final[list[type[BaseResourceSpec]]] = [*registry.specs(), LocalEnvResourceSpec]
SPECS: Final[Mapping[str, type[BaseResourceSpec]]] = {
    each.category: each
    for each in reversed(_ALL)  # Of two kinds with one category, the first.
}
"""The spec classes by `category`, as JSON names them."""


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
    So specs share a pool if and only if they mean the same, however they are written. Values that
    JSON cannot express count by their `repr`.
    """
    document = {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)}
    with contextlib.suppress(KeyError, ValueError):  # The spec has no such field, or another value.
        document["mem_limit"] = memory_bytes(document["mem_limit"])
    if isinstance(spec, ContainerResourceSpec):
        document |= {"image": spec.title, "host_ip": spec.host_ip or "127.0.0.1"}
        document["mount"] = {key: way.removesuffix(":rw") for key, way in spec.mount.items()}
    kind = type(spec)
    text = json.dumps(_level(document), sort_keys=True, default=_plain, separators=(",", ":"))
    whole = f"{kind.__module__}.{kind.__qualname__}{text}"
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return f"{spec.category}:{spec.title}|{backend}|{digest}"


def _level(value: JsonValue) -> JsonValue:
    """Return a value with integral floats replaced by integers: 1.0 becomes 1."""
    if isinstance(value, dict):
        return {name: _level(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_level(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain(value: JsonValue) -> JsonValue:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return repr(value)

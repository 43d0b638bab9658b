"""Descriptions of a pool: parses the documented layouts, and writes descriptions.

A description names instances by type, each with an id and its slots. A description has one of these
forms:

- `{"resources": {type: [{"id", "slots"}]}, "additional_properties": {}}`, also under the key
  `resource_pool`, as in a file;
- the layout of ctest, `{"local": {type: [...]}}`, or `{"local": [{type: [...]}]}` as ctest itself
  writes it;
- in short, `{type: count}`, for ids "0" to "count-1" with one slot each.

An instance may have other keys, which the pool preserves and ignores. `part_of: {"type", "id"}`
makes an instance a part of another one, like a MIG instance of its GPU. A holder of the whole has
all of its parts, so the pool never has the whole and a part checked out together.
"""

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Final, Literal

import yaml

from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.slots.amounts import ONE, SLOTS_MAX, Amount, exact, plain
from moorage.slots.errors import InvalidSpecification, SchemaMissingKeyError

Format = Literal["yaml", "json"]

INSTANCES_MAX: Final = 1_000_000
"""Maximum instances of one type."""

OUTER_KEY: Final = "resource_pool"
_OF_INSTANCES: Final = ("id", "slots", "part_of")
MISSPELT: Final = 0.85
"""Least similarity to a known key at which an extra key counts as a typo, such as `slot`."""
NODE_NAMES: Final = frozenset({"node", "nodes"})
"""Names that cannot be types: requests use them for nodes."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One device, core or other resource with slots.

    Args:
        id: The instance's id, unique within its type.
        slots: The number of slots.
        part_of: Type and id of the instance that contains this one; None: no instance does.
        extra: Other keys of the description, e.g. a UUID.
    """

    id: str
    slots: Amount
    part_of: tuple[str, str] | None = None
    extra: JsonObject = field(default_factory=JsonObject, compare=False)


@dataclass(frozen=True, slots=True)
class Specification:
    """The parsed description of a flat pool.

    Args:
        resources: The instances by type, in the order in which they are listed.
        additional_properties: Other data of the user.
    """

    resources: dict[str, tuple[Instance, ...]]
    additional_properties: JsonObject


def parse_specification(document: JsonValue) -> Specification:
    """Parse the description of a flat pool, in any of the layouts.

    Raises:
        InvalidSpecification: The description is wrong; the message names the place.
    """
    body = unwrap(document)
    if isinstance(body.get("nodes"), list):
        raise InvalidSpecification("nodes: a flat pool has none; NodeResourcePool reads this")
    if "resources" in body:
        found, at = body["resources"], "resources"
    elif "local" in body:
        found, at = _local(body["local"]), "local"
    else:
        found = {key: value for key, value in body.items() if key != "additional_properties"}
        if not found or not all(isinstance(value, int) for value in found.values()):
            raise SchemaMissingKeyError(
                "a pool needs the key 'resources' or 'local', or counts such as {'gpus': 4}; "
                f"found {_list(body)}"
            )
        return Specification(parse_resources(found, "pool"), properties_of(body))
    only_keys(body, {at, "additional_properties", "version"}, "pool")
    return Specification(parse_resources(found, at), properties_of(body))


def unwrap(document: JsonValue) -> JsonMapping:
    """Return a description without its outer key."""
    if isinstance(document, Mapping) and OUTER_KEY in document:
        only_keys(document, {OUTER_KEY}, "the document")
        document = document[OUTER_KEY]
    return _mapping(document, "pool")


def properties_of(body: JsonMapping) -> JsonObject:
    """Return a copy of the additional properties of a pool or node."""
    return dict(_mapping(body.get("additional_properties") or {}, "additional_properties"))


def parse_resources(document: JsonValue, at: str) -> dict[str, tuple[Instance, ...]]:
    """Read instances by type.

    Args:
        document: For each type a list of instances, or their number.
        at: The place of `document`, for messages.

    Raises:
        InvalidSpecification: `document` is wrong; the message names the place.
    """
    resources = {}
    for kind, listed in _mapping(document, at).items():
        if not isinstance(kind, str) or not kind or kind in NODE_NAMES:
            raise InvalidSpecification(f"{at}: {kind!r} cannot be the name of a type")
        place = f"{at}.{kind}"
        if isinstance(listed, int):
            resources[kind] = count_instances(listed, place)
        elif isinstance(listed, list | tuple):
            resources[kind] = tuple(
                _instance(each, f"{place}[{number}]") for number, each in enumerate(listed)
            )
        else:
            raise InvalidSpecification(f"{place}: expected a list of instances, or how many")
        if len(resources[kind]) > INSTANCES_MAX:
            raise InvalidSpecification(f"{place}: at most {INSTANCES_MAX} instances")
        _unique((each.id for each in resources[kind]), place)
    _check_parts(resources, at)
    return resources


def count_instances(count: JsonValue, at: str) -> tuple[Instance, ...]:
    """Return `count` instances with one slot each and the ids "0", "1" and so on."""
    if type(count) is not int or not 0 <= count <= INSTANCES_MAX:
        raise InvalidSpecification(f"{at}: expected a count from 0 to {INSTANCES_MAX}")
    return tuple(Instance(str(number), ONE) for number in range(count))


def documents(instances: Iterable[Instance]) -> list[JsonObject]:
    """Return instances in the form of a description."""
    rows = []
    for each in instances:
        row: JsonObject = {"id": each.id, "slots": plain(each.slots)} | copy.deepcopy(each.extra)
        if each.part_of:
            row["part_of"] = {"type": each.part_of[0], "id": each.part_of[1]}
        rows.append(row)
    return rows


def read_specification(text: str) -> JsonObject:
    """Return the content of a file in YAML or JSON, for `fill` to read.

    Raises:
        InvalidSpecification: The text is neither YAML nor JSON.
    """
    try:  # JSON first: it may contain tabs, which YAML refuses.
        found = json.loads(text)
    except ValueError:
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InvalidSpecification(f"neither YAML nor JSON: {error}") from error
    return dict(_mapping(found, "the file"))


def format_pool(pool: JsonObject, form: Format) -> str:
    """Return a pool's description as the text of a file."""
    document = {OUTER_KEY: pool}
    if form == "json":
        return json.dumps(document, indent=2) + "\n"
    return yaml.safe_dump(document, default_flow_style=False)


def only_keys(document: JsonMapping, allowed: set[str], at: str) -> None:
    """Refuse a description with keys that are not in `allowed`: a typo would have no effect.

    Raises:
        InvalidSpecification: The description has other keys; the message names them.
    """
    if unknown := [key for key in document if key not in allowed]:
        raise InvalidSpecification(
            f"{at}: unknown {_list(unknown)}; there are {_list(sorted(allowed))}"
        )


def _instance(document: JsonValue, at: str) -> Instance:
    row = _mapping(document, at)
    extra = _extra(row, at)
    name = row.get("id")
    if isinstance(name, bool) or not isinstance(name, str | int | float) or name == "":
        raise InvalidSpecification(f"{at}.id: expected a text, found {name!r}")
    slots = exact(row.get("slots", 1))
    if slots is None:
        raise InvalidSpecification(
            f"{at}.slots: expected a number from 0 to {SLOTS_MAX}, found {row['slots']!r}"
        )
    part_of = _part_of(row.get("part_of"), f"{at}.part_of")
    return Instance(str(name), slots, part_of, extra)


def _extra(row: Mapping[JsonValue, JsonValue], at: str) -> JsonObject:
    """Return the additional keys of an instance; refuse typos and values that are not JSON."""
    extra: JsonObject = {key: value for key, value in row.items() if key not in _OF_INSTANCES}
    for key in extra:
        if meant := get_close_matches(str(key), _OF_INSTANCES, 1, MISSPELT):
            raise InvalidSpecification(f"{at}: unknown {key!r}; expected {meant[0]!r}")
    try:
        return dict(json.loads(json.dumps(extra, allow_nan=False))) if extra else extra
    except (TypeError, ValueError, RecursionError) as error:
        listed = _list(sorted(map(str, extra)))
        raise InvalidSpecification(f"{at}: {listed}: expected a JSON value: {error}") from error


def _part_of(document: JsonValue, at: str) -> tuple[str, str] | None:
    if document is None:
        return None
    whole = _mapping(document, at)
    if set(whole) != {"type", "id"}:
        raise InvalidSpecification(f"{at}: expected 'type' and 'id', found {_list(whole)}")
    return str(whole["type"]), str(whole["id"])


def _check_parts(resources: Mapping[str, tuple[Instance, ...]], at: str) -> None:
    """Refuse parts of unknown instances, parts of parts, and capacity that would count twice."""
    known = {(kind, each.id): each for kind, rows in resources.items() for each in rows}
    for (kind, name), each in known.items():
        if each.part_of is None:
            continue
        place, whole = f"{at}.{kind} {name}", known.get(each.part_of)
        if whole is None:
            raise InvalidSpecification(f"{place}: is part of {each.part_of}, which is not listed")
        if whole.part_of is not None:
            raise InvalidSpecification(
                f"{place}: is part of a part; give the whole instance as `part_of`"
            )
        if each.part_of[0] == kind:
            raise InvalidSpecification(
                f"{place}: would be counted twice beside {whole.id}, whose part it is; give the "
                "parts a type of their own, or leave the whole out"
            )


def _local(document: JsonValue) -> JsonValue:
    """Return the resources in ctest's layout, whose files list exactly one machine."""
    return document[0] if isinstance(document, list) and len(document) == 1 else document


def _mapping(document: JsonValue, at: str) -> Mapping[JsonValue, JsonValue]:
    if not isinstance(document, Mapping):
        raise InvalidSpecification(f"{at}: expected an object, found {type(document).__name__}")
    return document


def _unique(ids: Iterable[str], at: str) -> None:
    seen: set[str] = set()
    for each in ids:
        if each in seen:
            raise InvalidSpecification(f"{at}: the id {each!r} occurs twice")
        seen.add(each)


def _list(keys: Iterable[JsonValue]) -> str:
    return ", ".join(repr(key) for key in keys) or "nothing"

"""Makes the pool of this machine from its hardware and the user's configuration.

A hook is a plain function `(config, pool)` that changes the description from which the pool is then
made. The hooks of this module find the CPUs and devices, and apply the configuration.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from moorage.records.json_values import JsonMapping, JsonObject
from moorage.slots.errors import InvalidSpecification
from moorage.slots.pool import ResourcePool, cpus_here
from moorage.slots.specification import count_instances, documents, parse_specification

Hook = Callable[[Any, JsonObject], None]
"""A function that changes `pool`, a description, according to `config`."""


def make_resource_pool(
    config: JsonMapping | object | None = None, hooks: Iterable[Hook] | None = None
) -> ResourcePool:
    """Make the pool of this machine.

    Args:
        config: The configuration: an object with keys, or with attributes of the same names. The
            hooks of this module read these optional ones: `cpu_ids` and `gpu_ids`, ids of devices
            (default: the CPUs of this process, no GPUs); `resource_pool`, a description that
            replaces the detected hardware; `resources`, `{type: count}`; `slots_per`, `{type: slots
            of each instance}`; `oversubscribe`, `{type: factor}`. A type may be in singular or
            plural.
        hooks: Functions of `config` and the description, in order; default `HOOKS`.

    Raises:
        InvalidSpecification: The configuration, or the resulting description, is wrong.
    """
    pool: JsonObject = {"resources": {}, "additional_properties": {}}
    for hook in HOOKS if hooks is None else hooks:
        hook({} if config is None else config, pool)
    return ResourcePool(pool)


def find_devices(config: Any, pool: JsonObject) -> None:
    """Add the CPUs and GPUs by their ids; a GPU divided by MIG is represented by its instances."""
    cpus = _setting(config, "cpu_ids")
    for kind, found in (
        ("cpus", cpus_here() if cpus is None else cpus),
        ("gpus", _setting(config, "gpu_ids") or ()),
    ):
        pool["resources"][kind] = [{"id": str(each), "slots": 1} for each in found]


def replace(config: Any, pool: JsonObject) -> None:
    """Use the description in the configuration instead of the detected hardware."""
    if given := _setting(config, "resource_pool"):
        read = parse_specification(given)
        pool["resources"] = {kind: documents(rows) for kind, rows in read.resources.items()}
        pool["additional_properties"] = read.additional_properties


def resize(config: Any, pool: JsonObject) -> None:
    """Change `pool` by `resources`, `slots_per` and `oversubscribe` of `config`, in this order."""
    resources = pool["resources"]
    for kind, count in _by_type(config, "resources"):
        name = kind if kind in resources or kind.endswith("s") else f"{kind}s"
        resources[name] = documents(count_instances(count, f"resources.{kind}"))
    for kind, slots in _by_type(config, "slots_per"):
        for row in resources[_resource_name(kind, resources)]:
            row["slots"] = slots
    for kind, factor in _by_type(config, "oversubscribe"):
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
            raise InvalidSpecification(f"oversubscribe.{kind}: expected a factor above 0: {factor}")
        for row in resources[_resource_name(kind, resources)]:
            row["slots"] = row.get("slots", 1) * factor


HOOKS: Final[tuple[Hook, ...]] = (find_devices, replace, resize)


def _setting(config: Any, name: str) -> Any:
    """Return an entry of a configuration, from a key or an attribute; None without an entry."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _by_type(config: Any, key: str) -> Iterable[tuple[str, Any]]:
    given = _setting(config, key) or {}
    if not isinstance(given, Mapping):
        raise InvalidSpecification(f"{key}: expected numbers by type, found {given!r}")
    return given.items()


def _resource_name(kind: str, resources: JsonMapping) -> str:
    for name in (kind, f"{kind}s"):
        if name in resources:
            return name
    raise InvalidSpecification(
        f"there is no type {kind!r} in the pool; it has {', '.join(sorted(resources))}"
    )

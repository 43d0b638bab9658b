"""Limits a pod to the resources of its lease, whatever its manifest requests.

`manifests` calls this module with the finished pod. The requests and limits of a container count;
sidecars run beside the containers, other init containers run one after another before them.
"""

import math
from collections.abc import Iterator
from typing import Final

from moorage.backends.base import UnsupportedSpecError
from moorage.backends.spec_fields import NO_DEVICES
from moorage.model import Share
from moorage.protocol.cluster_documents import MIB
from moorage.protocol.kubernetes_nodes import quantity
from moorage.protocol.registry import Document
from moorage.records.json_values import JsonValue

_NO_DEVICES: Final = [{"name": name, "value": text} for name, text in NO_DEVICES.items()]
_KINDS: Final = ("containers", "initContainers", "ephemeralContainers")
_UNITS: Final = {"cpu": 1_000, "memory": 1}
_SIZES: Final = ("limits", "requests")


def hide_devices(spec: Document, with_devices: str) -> None:
    """Hide all devices from all containers of a pod except one.

    Args:
        spec: The pod's `spec`; it is changed in place.
        with_devices: Name of the container that gets the lease's devices; empty: none.

    Raises:
        UnsupportedSpecError: The environment of the named container may name other devices.
    """
    for container in _each(spec, *_KINDS):
        if container["name"] != with_devices:
            container["env"] = [*container.get("env", []), *_NO_DEVICES]
        elif any(
            _may_name_devices(each.get("prefix", "")) for each in container.get("envFrom", [])
        ):
            # A variable from `envFrom` would override the device plugin's.
            reason = "expected a `prefix`, e.g. APP_: without, it might set NVIDIA_VISIBLE_DEVICES"
            raise UnsupportedSpecError(
                f"manifest.spec: container {with_devices}: envFrom: {reason}"
            )


def _may_name_devices(prefix: str) -> bool:
    return any(name.startswith(prefix) for name in NO_DEVICES)


def keep_within(spec: Document, share: Share, main: str) -> None:
    """Limit a pod to its lease's CPU and memory; the main container gets what the others leave.

    Args:
        spec: The pod's `spec`; it is changed in place.
        share: The lease's share of the node. The pod may not request a resource with amount 0, and
            gets no limit for it.
        main: Name of the container that may omit its requests and limits.

    Raises:
        UnsupportedSpecError: The pod requests more, or another container omits its request.
    """
    for name, held in (("cpu", share.cpu_milli), ("memory", share.memory_mib * MIB)):
        before = 0  # Requested by sidecars that run already.
        for container in _each(spec, "initContainers"):
            wanted = _request_or_limit(container, name)
            if container.get("restartPolicy") == "Always":
                before += _request_beside(container, name, held, wanted)
                wanted = 0
            elif wanted is None and held > before:
                wanted = _give(container, name, held - before)
            _check(name, before + (wanted or 0), held)
        own: Document = {}
        for container in _each(spec, "containers"):
            if container["name"] == main:
                own = container
            else:
                before += _request_beside(container, name, held, _request_or_limit(container, name))
        if own and (wanted := _request_or_limit(own, name)) is not None:
            before += wanted
        elif own and held > before:
            _give(own, name, held - before)
        elif own and held:
            _check(name, before + 1, held)  # Nothing is left for the container.
        _check(name, before, held)
        whole = _request_or_limit({"name": "", "resources": spec.get("resources", {})}, name)
        _check(name, whole or 0, held)


def _request_beside(container: Document, name: str, held: int, wanted: int | None) -> int:
    """Return the request of a container beside the main one; refuse it if it has no request."""
    if wanted is None and held:
        reason = f"expected resources.limits.{name}: the containers of a pod share its lease"
        raise UnsupportedSpecError(f"manifest.spec: container {container['name']}: {reason}")
    return wanted or 0


def _check(name: str, wanted: int, held: int) -> None:
    if wanted > held:
        what, field = ("CPU", "cpu_milli") if name == "cpu" else ("bytes of memory", "memory_mib")
        unit = " thousandths of a" if name == "cpu" else ""
        reason = f"expected at most{unit} {what} that the lease holds, {held}, and not {wanted}"
        given = "cpu_count" if name == "cpu" else "mem_limit"
        hint = f"ask for {field} in `resources` of the request"
        raise UnsupportedSpecError(f"{given}, manifest.spec: {reason}: {hint}")


def _request_or_limit(container: Document, name: str) -> int | None:
    """Return the larger of request and limit of a container; None if the container has neither.

    A request without a limit also becomes the limit.
    """
    found, resources = list[int](), container.get("resources", {})
    for kind in _SIZES:
        sizes = resources.get(kind, {})
        names = [
            each
            for each in sizes
            if each == name or (name == "memory" and each.startswith("hugepages-"))
        ]
        if names:
            amount = sum(_read(sizes[each], kind, each) for each in names) * _UNITS[name]
            found.append(math.ceil(round(amount, 3)))  # Rounded: 0.1 cores must give 100 milli.
    if not found:
        return None
    if name in resources.get("requests", {}):
        resources.setdefault("limits", {}).setdefault(name, resources["requests"][name])
    return max(found)


def _read(given: JsonValue, kind: str, name: str) -> float:
    amount = quantity(str(given) if isinstance(given, float) else given)
    if amount is None:
        raise UnsupportedSpecError(f"manifest.spec: resources.{kind}.{name}: expected a quantity")
    return amount


def _give(container: Document, name: str, amount: int) -> int:
    text = f"{amount}m" if name == "cpu" else str(amount)
    resources = container.setdefault("resources", {})
    for kind in _SIZES:
        resources[kind] = {**resources.get(kind, {}), name: text}
    return amount


def _each(spec: Document, *kinds: str) -> Iterator[Document]:
    for kind in kinds:
        yield from spec.get(kind, [])

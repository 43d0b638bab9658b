"""Cluster documents: their checks, their defaults, and the inventory that placement reads.

The embedded catalog calls `read_cluster_document` for every document that it stores. The format is
that of docs/reference/allocation-server.md, "Cluster documents", with a few more optional fields.
Placement can use GPU `linkGroup`, `numa`, `exclusive`, and node `rack`, `zone`, `labels`. The
machine of a node, whatever the node's name, is identified by GPU `uuid` (and `parentUuid` of a MIG
instance) and node `machineId`, `providerId`. `unavailable` of a node or a whole cluster is the
reason why nothing can start there: its leases stay, but it gets no more.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import msgspec

from moorage.catalog.documents.encoding import WrongField, cluster_id_of
from moorage.catalog.limits import GPUS_PER_NODE_MAX, NODES_PER_CLUSTER_MAX
from moorage.catalog.values import Document
from moorage.model import DEVICE, Cluster, ClusterId, Code, DeviceId, Gpu, Node, NodeId
from moorage.protocol.faults import ServiceError
from moorage.records.fields import UNSHOWN
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue

LIVE_STATUSES: Final = frozenset({"live", "active", "ready", "online"})
"""Values of `status`, in any letter case, that allow placements, as does a missing `status`."""
ZONE_LABEL: Final = "topology.kubernetes.io/zone"
"""The label with the zone of a node that has no `zone`."""
AMOUNT_MAX: Final = 10**11
"""Largest number (a count, MiB, milli-CPUs), so that sums over all nodes fit into 64 bits."""
NAME_CHARS_MAX: Final = 253
KINDS_MAX: Final = 4096
"""Maximum device lists in a cache; nodes with equal devices share a list, so few are needed."""

_NAMES: Final = {"machine": "machineId", "provider": "providerId"}
_UUIDS: Final = frozenset({"uuid", "parentUuid"})
_encode: Final = msgspec.json.Encoder().encode
_WHOLE: Final = "a whole number, 0 or more"
_NUMBER: Final = f"a number from 0 to {AMOUNT_MAX}"
_OBJECT: Final = "an object"
_UNSAFE: Final = re.compile(rf"{UNSHOWN}|(?:^|[/\\])\.\.(?:[/\\]|$)")
_SAFE: Final = "a text without control characters, and without `..` as a part of a path"


@dataclass(frozen=True, slots=True)
class CheckedCluster:
    """A checked and completed cluster document, with the part that placement uses."""

    id: ClusterId
    document: Document
    cluster: Cluster
    live: bool


def read_cluster_document(given: JsonValue) -> CheckedCluster:
    """Check a cluster document and fill in the aggregates that it omits.

    Args:
        given: The document as it was posted; it is not changed.

    Raises:
        ServiceError: `bad_message` naming the field, or `too_large`.
    """
    cluster = cluster_model(given)
    try:
        document = _with_aggregates(given)
    except WrongField as wrong:
        raise wrong.fault() from None
    return CheckedCluster(cluster.id, document, cluster, is_live(document))


def check_names(cluster: Cluster) -> None:
    """Refuse names with unsafe characters, since names are shown, logged and joined to paths.

    Stored documents are exempt.

    Raises:
        ServiceError: `bad_message` naming the field.
    """
    seen: dict[int, None] = {}
    for number, node in enumerate(cluster.nodes):
        texts = {"id": node.id, "rack": node.rack, "zone": node.zone, **_identity_fields(node)}
        texts["unavailable"] = node.unavailable
        for name, value in node.labels.items():
            texts |= {f"labels.{name}": value, f"the name of labels.{name}": name}
        if id(node.gpus) not in seen:  # Nodes of one kind share this list.
            seen[id(node.gpus)] = None
            for index, gpu in enumerate(node.gpus):
                at = f"gpus.gpus[{index}]"
                texts |= {f"{at}.id": gpu.id, f"{at}.modelName": gpu.model}
                texts[f"{at}.linkGroup"] = gpu.link_group
        if _UNSAFE.search("/".join(text for device in node.devices for text in device)):
            for index, device in enumerate(node.devices):
                at = f"gpus.gpus[{index}]"
                texts |= {f"{at}.uuid": device.uuid, f"{at}.parentUuid": device.parent}
        for field, text in texts.items():
            if _UNSAFE.search(text):
                raise WrongField(field, _SAFE).under(f"nodes.nodeData[{number}]").fault()


def _identity_fields(node: Node) -> dict[str, str]:
    """Return the values that identify a node's machine, by field."""
    said = (each.partition(" ") for each in node.identity)
    return {_NAMES[what]: name for what, _, name in said if what in _NAMES}


def is_live(document: JsonMapping) -> bool:
    """Return whether the cluster may be a candidate, by its `status`."""
    status = document.get("status")
    return status is None or (isinstance(status, str) and status.lower() in LIVE_STATUSES)


def cluster_model(document: JsonValue) -> Cluster:
    """Return the part of a cluster document that placement uses.

    MB of memory in documents count as MiB, without conversion.

    Raises:
        ServiceError: `bad_message` naming the field, e.g. `nodes.nodeData[3].gpus.count: expected
            a whole number, 0 or more`, or `too_large`.
    """
    if not isinstance(document, dict):
        raise ServiceError.wrong_field("body", "a cluster document (an object)")
    cluster_id = cluster_id_of(document.get("id"), "id")
    try:
        _text(document, "status")
        return Cluster(cluster_id, tuple(_nodes(document)))
    except WrongField as wrong:
        raise wrong.fault() from None


def _nodes(document: Document) -> list[Node]:
    entries = _object(document, "nodes").get("nodeData")
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise WrongField("nodes.nodeData", "a list of nodes")
    if len(entries) > NODES_PER_CLUSTER_MAX:
        raise ServiceError(
            Code.TOO_LARGE,
            f"nodes.nodeData: {len(entries)} nodes; one cluster has at most"
            f" {NODES_PER_CLUSTER_MAX}: split it into several clusters",
            field="nodes.nodeData",
        )
    nodes: list[Node] = []
    seen: set[str] = set()
    why_not = _text(document, "unavailable")
    for number, entry in enumerate(entries):
        try:
            node = _node(entry, why_not)
            _claim(node.id, seen, "node")
        except WrongField as wrong:
            raise wrong.under(f"nodes.nodeData[{number}]") from None
        nodes.append(node)
    return nodes


def _node(entry: JsonValue, why_not: str) -> Node:
    if not isinstance(entry, dict):
        raise WrongField("", _OBJECT)
    cores = _amount(_object(entry, "vcpus"), "count", "vcpus.count")
    gpus, devices = _split_ids(_object(entry, "gpus"))
    said = {what: _text(entry, key).strip(" ").lower() for what, key in _NAMES.items()}
    names = [f"{what} {name}" for what, name in said.items() if name]
    given = _object(entry, "labels")
    labels = {key: _label(value, f"labels.{key}") for key, value in given.items()}
    return Node(
        id=NodeId(_name(entry.get("id"), "id")),
        cpu_milli=round(cores * 1000),
        memory_mib=int(_amount(entry, "memory", "memory")),
        gpus=_gpus(gpus),
        rack=_text(entry, "rack"),
        labels=labels,
        identity=(*names, *_keys(devices)),
        unavailable=why_not or _text(entry, "unavailable"),
        zone=_text(entry, "zone") or labels.get(ZONE_LABEL, ""),
        devices=devices,
    )


def _split_ids(group: JsonMapping) -> tuple[JsonMapping, tuple[DeviceId, ...]]:
    """Return a node's device group without UUIDs, equal for nodes of one kind, and the UUIDs."""
    devices = group.get("gpus")
    listed = devices if isinstance(devices, list) else ()
    if not any(isinstance(each, dict) and not _UUIDS.isdisjoint(each) for each in listed):
        return group, ()
    found: list[DeviceId] = []
    known: set[str] = set()
    whole: set[str] = set()
    alike: list[JsonValue] = []
    for index, device in enumerate(listed):
        if not isinstance(device, dict):
            return group, ()  # `_gpus` reports the place of the error.
        try:
            each = DeviceId(_text(device, "uuid"), _text(device, "parentUuid"))
        except WrongField as wrong:
            raise wrong.under(f"gpus.gpus[{index}]") from None
        uuid, parent = each.uuid.lower(), each.parent.lower()
        if uuid in known or parent in whole:
            expected = "a UUID that no other device of this node, nor a part of one, has"
            raise WrongField(f"gpus.gpus[{index}].uuid", expected)
        whole |= {uuid} - {""} if not parent else set()
        known |= {uuid, parent} - {""}
        found.append(each)
        alike.append({name: value for name, value in device.items() if name not in _UUIDS})
    return {**group, "gpus": alike}, tuple(found) if known else ()


def _keys(devices: Sequence[DeviceId]) -> dict[str, None]:
    """Return identity keys of the machine that has these devices, from their UUIDs."""
    uuids = (uuid.strip().lower() for each in devices for uuid in each)
    return dict.fromkeys(f"{DEVICE}{uuid}" for uuid in uuids if uuid)


def _gpus(group: JsonMapping) -> tuple[Gpu, ...]:
    """Return the devices of a node; nodes of one kind share one list."""
    if not group:
        return ()
    try:
        key = _encode(group)
    except (TypeError, ValueError, OverflowError):  # Not JSON; the place is found below.
        return _read_gpus(group)
    return _kind(key)


@lru_cache(KINDS_MAX)
def _kind(encoded: bytes) -> tuple[Gpu, ...]:
    return _read_gpus(msgspec.json.decode(encoded))


def _read_gpus(group: JsonMapping) -> tuple[Gpu, ...]:
    count = _whole(group, "count", "gpus.count")
    devices = group.get("gpus")
    if devices is not None and not isinstance(devices, list):
        raise WrongField("gpus.gpus", "a list of devices")
    if max(count, len(devices or ())) > GPUS_PER_NODE_MAX:
        raise WrongField("gpus.count", f"at most {GPUS_PER_NODE_MAX} devices on one node")
    if not devices:
        return _gpus_by_count(group, count)
    if count not in {0, len(devices)}:
        raise WrongField("gpus.count", f"{len(devices)}, the number of devices in gpus.gpus")
    gpus: list[Gpu] = []
    seen: set[str] = set()
    for index, device in enumerate(devices):
        try:
            gpu = _gpu(device, index)
            _claim(gpu.id, seen, "device")
        except WrongField as wrong:
            raise wrong.under(f"gpus.gpus[{index}]") from None
        gpus.append(gpu)
    return tuple(gpus)


def _gpus_by_count(group: JsonMapping, count: int) -> tuple[Gpu, ...]:
    """Return the devices of a node that lists none, only their count and the sum of memory."""
    names = group.get("modelNames") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise WrongField("gpus.modelNames", "a list of texts")
    memory = int(_amount(group, "memory", "gpus.memory")) // max(count, 1)
    if len(names) != count:  # One name is for all devices; a wrong number of names is ignored.
        names = names * count if len(names) == 1 else [""] * count
    return tuple(Gpu(str(index), names[index], memory) for index in range(count))


def _gpu(device: JsonValue, index: int) -> Gpu:
    if not isinstance(device, dict):
        raise WrongField("", _OBJECT)
    given = device.get("id", device.get("gpu_id"))
    group = device.get("linkGroup", device.get("nvlinkGroup"))
    numa, exclusive = device.get("numa", -1), device.get("exclusive", False)
    if isinstance(numa, bool) or not isinstance(numa, int) or not -1 <= numa <= AMOUNT_MAX:
        raise WrongField("numa", "the number of a NUMA domain, or -1")
    if not isinstance(exclusive, bool):
        raise WrongField("exclusive", "true or false")
    return Gpu(
        id=str(index) if given is None else _name(given, "id"),
        model=_text(device, "modelName"),
        memory_mib=int(_amount(device, "memory", "memory")),
        link_group="" if group is None else _name(group, "linkGroup"),
        numa=numa,
        exclusive=exclusive,
    )


def _claim(name: str, seen: set[str], what: str) -> None:
    if name in seen:
        raise WrongField("id", f"an id of its own; {name} is another {what}'s")
    seen.add(name)


# Fields ----------------------------------------------------------------------------------------


def _object(holder: JsonMapping, key: str) -> JsonMapping:
    value = holder.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise WrongField(key, _OBJECT)
    return value


def _number(value: JsonValue) -> float | int | None:
    """Return a number within limits, or None. It may be a text, since old databases accept that."""
    if type(value) is int:  # The fast path, for millions of values.
        return value if 0 <= value <= AMOUNT_MAX else None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) and 0 <= value <= AMOUNT_MAX else None


def _amount(holder: JsonMapping, key: str, path: str) -> float | int:
    value = holder.get(key)
    if value is None:
        return 0
    number = _number(value)
    if number is None:
        raise WrongField(path, _NUMBER)
    return number


def _whole(holder: JsonMapping, key: str, path: str) -> int:
    value = holder.get(key)
    if value is None:
        return 0
    number = _number(value)
    if number is None or number != int(number):
        raise WrongField(path, _WHOLE)
    return int(number)


def _text(holder: JsonMapping, key: str) -> str:
    value = holder.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise WrongField(key, "a text")
    return value


def _name(value: JsonValue, path: str) -> str:
    """Return an id or group name; a whole number is also a name, since GPU ids are indices."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and 0 < len(value) <= NAME_CHARS_MAX:
        return value
    raise WrongField(path, f"a text of 1 to {NAME_CHARS_MAX} characters")


def _label(value: JsonValue, path: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise WrongField(path, "a text")


# Aggregates ------------------------------------------------------------------------------------


def _with_aggregates(given: Document) -> Document:
    """Return a copy; add missing totals over `nodes.nodeData`."""
    nodes = _object(given, "nodes")
    entries: Sequence[JsonMapping] = nodes.get("nodeData") or ()
    if not entries:
        return given
    document = {**given}
    if nodes.get("count") is None:
        document["nodes"] = {**nodes, "count": len(entries)}
    for key in ("memory", "swap"):
        if document.get(key) is None:
            _set_total(document, key, [node.get(key) for node in entries])
    for group, keys in _GROUPS.items():
        totals = {**_object(given, group)}
        for key in keys:
            if totals.get(key) is None:
                _set_total(totals, key, [_group_value(node, group, key) for node in entries])
        if totals:
            document[group] = totals
    return document


_GROUPS: Final = {
    "gpus": ("count", "memory"),
    "vcpus": ("count",),
    "storage": ("disks", "size"),
    "network": ("interfaces", "txBandwidth", "rxBandwidth"),
}


def _set_total(totals: JsonObject, key: str, values: Sequence[JsonValue]) -> None:
    numbers = [number for value in values if (number := _number(value)) is not None]
    if numbers:
        totals[key] = sum(numbers)


def _group_value(node: JsonMapping, group: str, key: str) -> JsonValue:
    values = node.get(group)
    if not isinstance(values, dict):
        return None
    if group == "gpus" and values.get(key) is None and isinstance(values.get("gpus"), list):
        devices = values["gpus"]
        return len(devices) if key == "count" else sum(_number(d.get(key)) or 0 for d in devices)
    value = values.get(key)
    return len(value) if isinstance(value, list) else value  # Of lists of disks, the length.

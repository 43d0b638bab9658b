"""Publishes metrics of agents' machines and the server's machine in their clusters' documents.

`roster` calls it; policies, searches and HTTP read these documents.
"""

import itertools
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

import structlog

from moorage.backends.agents.backend import AgentMachine, Place
from moorage.backends.agents.wire import AgentMetrics
from moorage.catalog.documents.metrics import aggregate
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.protocol.registry import Metrics
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue

PUBLISH_SECONDS: Final = 2.0
"""Shortest time between two versions of a cluster's document."""
PUBLISH_SECONDS_A_MACHINE: Final = 0.015
"""Shortest time between two versions, in seconds per machine: 15 seconds for 1,000 machines."""
STALE_SECONDS: Final = 60.0
"""Age at which a measurement is outdated."""
GPUS_MAX: Final = 64
FIELDS_MAX: Final = 32
NUMBER_MAX: Final = 2.0**53
"""Largest measured number; larger numbers are left out, so that sums stay exact."""
SOURCE: Final = "agent"
"""Value of `source` in the node trees that this module makes; it changes no other tree."""
_GROUPS: Final = ("memory", "vcpu", "storage", "gpu")
_OWNERS: Final = frozenset({"prometheus"})
"""Values of `source` of the documents that agents do not change."""

log = structlog.get_logger("moored")

Tree = JsonObject


class AgentMeasurements:
    """Publishes metrics of machines in the documents of their clusters.

    Attributes:
        own: Node and metrics of the server's own machine, and their time in seconds since the
            epoch; None: this machine is not registered.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.own: tuple[Place, AgentMetrics, float] | None = None
        self._metrics = metrics
        self._published: dict[str, list[tuple[Any, ...]]] = {}
        self._next = 0.0
        self._trouble = ""

    async def publish(self, machines: Iterable[AgentMachine]) -> None:
        """Publish the measurements since the last call, unless the last call was too recent."""
        if time.monotonic() < self._next:
            return
        machines = tuple(machines)
        pause = max(PUBLISH_SECONDS, PUBLISH_SECONDS_A_MACHINE * len(machines))
        self._next = time.monotonic() + pause
        now = time.time()
        clusters: dict[str, list[AgentMachine]] = {cluster: [] for cluster in self._published}
        for machine in machines:
            clusters.setdefault(machine.place[0], []).append(machine)
        own = None if self.own is None or await self._has_other(self.own[0]) else self.own
        if own is not None:
            clusters.setdefault(own[0][0], [])
        for cluster, there in clusters.items():  # One after the other: each document is large.
            found = [
                _tree(
                    machine.place[1],
                    *measured,
                    stale=machine.link is None or now - measured[1] > STALE_SECONDS,
                )
                for machine in there
                if (measured := machine.measured) is not None
            ]
            if own is not None and own[0][0] == cluster:
                place, metrics, at = own
                found.append(_tree(place[1], metrics, at, stale=now - at > STALE_SECONDS))
            await self._publish(cluster, found, now)

    async def _publish(self, cluster: str, trees: list[Tree], now: float) -> None:
        marks = sorted((each["id"], each["timestamp"], each["stale"]) for each in trees)
        if marks != self._published.get(cluster, []):
            try:
                await self._put(cluster, trees, now)
            except ServiceError as error:
                self._complain(f"{cluster}: {error}")
                return
        if marks:
            self._published[cluster] = marks
        else:
            self._published.pop(cluster, None)

    async def _has_other(self, place: Place) -> bool:
        """Return whether another source reports the metrics of the server's own machine."""
        try:
            known = await self._metrics.get(place[0])
        except ServiceError:
            return False  # `_put` reports the error.
        nodes = known.get("nodes") or ()
        return any(n.get("id") == place[1] and n.get("source") != SOURCE for n in nodes)

    async def _put(self, cluster: str, trees: list[Tree], now: float) -> None:
        try:
            known = await self._metrics.get(cluster)
        except ServiceError as error:
            if error.code != Code.NOT_FOUND:
                raise
            known = {}
        if known.get("source") in _OWNERS:
            return
        ours = {each["id"] for each in trees}
        others = [
            each
            for each in known.get("nodes") or ()
            if each.get("source") != SOURCE and each.get("id") not in ours
        ]
        nodes = [*others, *trees]
        if not nodes and known:
            await self._metrics.delete(cluster)
        elif nodes:
            fresh = [each for each in nodes if not each.get("stale")]
            totals = aggregate([_measures(each) for each in fresh or nodes])
            document = {"clusterId": cluster, "timestamp": now, "stale": not fresh}
            await self._metrics.put({**document, "cluster": totals, "nodes": nodes})
        self._trouble = ""

    def _complain(self, reason: str) -> None:
        if reason != self._trouble:
            self._trouble = reason
            log.warning("agent_metrics_failed", reason=reason)


def _measures(tree: Tree) -> Tree:
    return {name: value for name, value in tree.items() if name not in {"source", "stale"}}


def _tree(node: str, metrics: AgentMetrics, at: float, *, stale: bool) -> Tree:
    """Return a node of a metrics document, with only the numbers of documented groups."""
    groups: Tree = {
        name: _numbers(metrics.groups[name]) for name in _GROUPS if name in metrics.groups
    }
    gpus = [_numbers(each) for each in metrics.gpus[:GPUS_MAX]]
    whole = {"gpus": [{**each, "gpu_id": int(each.get("gpu_id", 0))} for each in gpus]}
    about = {"id": node, "source": SOURCE, "timestamp": at, "stale": stale}
    return {**about, **groups, **(whole if gpus else {})}


def _numbers(group: Mapping[str, float]) -> dict[str, float]:
    few = itertools.islice(group.items(), FIELDS_MAX)
    return {name[:FIELDS_MAX]: value for name, value in few if abs(value) < NUMBER_MAX}


def without_busy(node: JsonMapping, busy: Mapping[str, str]) -> JsonObject:
    """Return a node's document without the devices that other programs use.

    Args:
        node: The node, as its agent described it on connecting.
        busy: Why these devices cannot be used, by UUID.
    """
    group = node.get("gpus")
    devices = group.get("gpus") if isinstance(group, dict) else None
    if group is None or not isinstance(devices, list) or not all(map(_is_device, devices)):
        return {**node}  # The registry refuses such devices.
    names = {uuid.lower(): reason for uuid, reason in busy.items()}
    used, free = [], []
    for index, device in enumerate(devices):
        reason = names.get(device["uuid"].lower()) if device.get("uuid") else None
        named = {"id": str(index), **device}
        if reason is None:
            free.append(named)
        else:
            used.append({"id": named["id"], "uuid": device["uuid"], "reason": reason[:500]})
    if not used:
        return {**node}
    left = {
        **group,
        "count": len(free),
        "memory": sum(each.get("memory") or 0 for each in free),
        "gpus": free,
    }
    return {**node, "gpus": left, "busy": used}


def _is_device(device: JsonValue) -> bool:
    """Return whether a value has the fields of a device that `without_busy` reads."""
    return (
        isinstance(device, dict)
        and isinstance(device.get("uuid") or "", str)
        and isinstance(device.get("memory") or 0, int | float)
    )


def with_busy(node: JsonMapping, busy: Mapping[str, str]) -> JsonObject:
    """Return the document of the server's own node without the devices that other programs use.

    Only this document describes them, so the node's `busy` stores each device, to put it back
    later.
    """
    whole = _whole(node)
    left = without_busy(whole, busy)
    if "busy" not in left:
        return whole
    devices = {each.get("uuid"): each for each in whole["gpus"]["gpus"]}
    return {**left, "busy": [{**each, "device": devices[each["uuid"]]} for each in left["busy"]]}


def _whole(node: JsonMapping) -> JsonObject:
    """Return the document of a node with the devices that `with_busy` had left out."""
    rest = {name: each for name, each in node.items() if name != "busy"}
    out = [each["device"] for each in node.get("busy") or () if "device" in each]
    group = node.get("gpus")
    if not out or not isinstance(group, dict):
        return rest
    there = {each.get("uuid") for each in group.get("gpus") or ()}
    devices = [*(group.get("gpus") or ()), *(each for each in out if each["uuid"] not in there)]
    devices.sort(key=lambda each: (len(str(each.get("id", ""))), str(each.get("id", ""))))
    memory = sum(each.get("memory", 0) for each in devices)
    return {**rest, "gpus": {**group, "count": len(devices), "memory": memory, "gpus": devices}}

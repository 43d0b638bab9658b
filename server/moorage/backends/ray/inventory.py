"""Makes the cluster document of a Ray cluster: its capacity minus its use by others. No I/O.

A node has Ray's own id, as Ray's node affinity requires it. The id of a GPU is its index, as in
Ray. Use by others is left out: the devices of their workers, the unused devices that their
placement groups reserve, and amounts of processors and memory.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from moorage.model import Demand
from moorage.protocol.cluster_documents import MIB, cluster_document, device, node_document
from moorage.protocol.registry import Document
from moorage.records.json_values import JsonMapping

UNREACHABLE: Final = "unreachable"
"""The `status` of a cluster that does not answer; such a cluster gets no leases."""
RACK_LABEL: Final = "rack"
ZONE_LABEL: Final = "ray.io/availability-zone"
NAME_LABEL: Final = "ray.io/node-name"
_MODEL: Final = re.compile(r"accelerator_type:(.+)")
_WHOLE: Final = 0.9999
"""An amount above this counts as 1: Ray rounds amounts to ten-thousandths."""


def document(cluster_id: str, seen: JsonMapping, *, live: bool = True) -> Document:
    """Return the cluster document of a Ray cluster.

    Args:
        cluster_id: The cluster's id.
        seen: The result of `driver.observation`, with `ours`: ids of this server's actors.
        live: Whether Ray answers; if not, the document makes the cluster get no new leases.
    """
    ours = frozenset(seen["ours"])
    nodes = [_node(each, ours) for each in sorted(seen["nodes"], key=lambda each: str(each["id"]))]
    made = cluster_document(cluster_id, nodes, tag="ray", description="Nodes of a Ray cluster")
    return made if live else made | {"status": UNREACHABLE}


def bundles(demands: Sequence[Demand], seen: JsonMapping) -> list[dict[str, float]]:
    """Return the bundles to request from Ray's autoscaler, so that waiting requests fit.

    Ray takes them as the total that its cluster must be able to hold, so they include the resources
    that are in use now.

    Args:
        demands: The demands of waiting requests.
        seen: The result of `driver.observation`.
    """
    waiting: list[dict[str, float]] = []
    for demand in demands:
        gpus = demand.gpus * demand.gpu_milli / 1000
        bundle = {"GPU": gpus, "CPU": demand.cpu_milli / 1000, "memory": demand.memory_mib * MIB}
        wanted = {name: float(amount) for name, amount in bundle.items() if amount}
        waiting += [wanted or {"CPU": 1.0}] * demand.nodes
    if not waiting:
        return []
    return [taken for node in seen["nodes"] if (taken := _amounts_in_use(node, waiting))] + waiting


def _amounts_in_use(node: JsonMapping, waiting: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the used amounts of a node; all amounts if no waiting request fits into the rest."""
    total = {name: float(node["resources"].get(name, 0)) for name in ("GPU", "CPU", "memory")}
    free = {name: float(node["free"].get(name, 0)) for name in total}
    used = {
        name: total[name] - free[name] for name in total if total[name] - free[name] > 1 - _WHOLE
    }
    if not used or any(
        all(free[name] >= amount for name, amount in bundle.items()) for bundle in waiting
    ):
        return used
    return {name: amount for name, amount in total.items() if amount}


def _node(node: JsonMapping, ours: frozenset[str]) -> Document:
    resources, free = node["resources"], node["free"]
    labels = {str(name): str(value) for name, value in node["labels"].items()}
    if node["name"]:
        labels[NAME_LABEL] = str(node["name"])
    # Reservations of pools for leases count in full, used or not.
    groups = {each["group"] for each in node["leased"]}
    leased = [each["resources"] for each in node["leased"]]
    workers = [each for each in node["workers"] if each["group"] not in groups]
    own = [each["used"] for each in workers if each["actor"] in ours]
    others = [each["used"] for each in workers if each["actor"] not in ours]

    def free_amount(name: str) -> float:
        """Return the amount of a resource that is free or held by this server's leases."""
        total = float(resources.get(name, 0))
        held = sum(sum(used.get(name, {}).values()) for used in own)
        held += sum(float(each.get(name, 0)) for each in leased)
        return min(max(float(free.get(name, 0)) + held, 0.0), total)

    made = node_document(
        str(node["id"]),
        cpu_milli=round(free_amount("CPU") * 1000),
        memory_mib=int(free_amount("memory") / MIB),
        devices=_devices(resources, free_amount("GPU"), own, others),
        rack=labels.get(RACK_LABEL, ""),
        zone=labels.get(ZONE_LABEL, ""),
        labels=labels,
    )
    return made if node["answers"] else made | {"unavailable": "its raylet does not answer"}


def _devices(
    resources: Mapping[str, float],
    offered: float,
    own: Sequence[Mapping[str, Mapping[str, float]]],
    others: Sequence[Mapping[str, Mapping[str, float]]],
) -> list[Document]:
    """Return the devices of a node that no other user holds in part or whole."""
    count = int(resources.get("GPU", 0))
    named = (found[1] for name in resources if (found := _MODEL.fullmatch(name)))
    model = next(named, "")
    foreign = {int(slot) for used in others for slot in used.get("GPU", {})}
    mine = {int(slot) for used in own for slot in used.get("GPU", {})}
    reserved = count - offered - sum(sum(used.get("GPU", {}).values()) for used in others)
    left = [each for each in range(count) if each not in foreign]
    # Ray does not show which devices an unused placement group reserves: assume the last free ones.
    for each in reversed([each for each in left if each not in mine]):
        if reserved < 1 - _WHOLE:
            break
        left.remove(each)
        reserved -= 1
    return [device(model, name=str(each)) for each in left]

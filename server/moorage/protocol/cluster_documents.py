"""Builds cluster documents for readers of inventory: devices, nodes, clusters of nodes.

The client's imports (`moorage_client.inventory`) and the backends that watch a cluster make the
same documents with these functions. Memory is in MiB, also in fields that are documented in MB, as
everywhere in Moorage. The reader of a source converts other units once.
"""

import hmac
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from moorage.protocol.registry import Document
from moorage.records.json_values import JsonMapping

MIB: Final = 1 << 20
"""Bytes of a mebibyte."""

_TOTALS: Final = ("gpus", "vcpus", "memory", "swap", "storage", "network")
"""Sums over the nodes; the server computes the sums that a document lacks."""

_MACHINE_ID_BYTES: Final = 16
_APPLICATION: Final = bytes.fromhex("6f1d4f0c8d5b4b0f9f0c2b7a3e5d8c41")
"""Moorage's application id for `machine_key`, drawn at random once."""


def device(
    model: str,
    memory_mib: int = 0,
    *,
    name: str = "",
    exclusive: bool = False,
    link_group: str = "",
    numa: int = -1,
    uuid: str = "",
    parent_uuid: str = "",
) -> Document:
    """Return a device for `gpus.gpus`; for the arguments see `moorage.model.Gpu`.

    `uuid` distinguishes it from all other devices; `parent_uuid` names the device whose part it is.

    Unknown fields are left out: a device without a name is named by its index.
    """
    known: Document = {"modelName": model, "memory": memory_mib}
    known |= {"id": name} if name else {}
    known |= {"exclusive": True} if exclusive else {}
    known |= {"linkGroup": link_group} if link_group else {}
    known |= {"uuid": uuid} if uuid else {}
    known |= {"parentUuid": parent_uuid} if parent_uuid else {}
    return known | ({"numa": numa} if numa >= 0 else {})


def node_document(
    name: str,
    *,
    cpu_milli: int,
    memory_mib: int,
    devices: Sequence[Document] = (),
    swap_mib: int = 0,
    rack: str = "",
    zone: str = "",
    labels: Mapping[str, str] | None = None,
    machine_id: str = "",
    provider_id: str = "",
) -> Document:
    """Return a machine for `nodes.nodeData`; the sizes are its totals.

    `machine_id`, as `machine_key` makes it, and `provider_id` identify the machine under any name:
    the server registers no machine twice.
    """
    node: Document = {
        "id": name,
        "gpus": gpu_group(devices),
        "vcpus": {"count": cpu_milli / 1000},
        "memory": memory_mib,
        "swap": swap_mib,
    }
    node |= {"machineId": machine_id} if machine_id else {}
    node |= {"providerId": provider_id} if provider_id else {}
    node |= {"rack": rack} if rack else {}
    node |= {"zone": zone} if zone else {}
    return node | ({"labels": dict(labels)} if labels else {})


def gpu_group(devices: Sequence[Document]) -> Document:
    """Return the devices of a node's document."""
    return {
        "count": len(devices),
        "memory": sum(each["memory"] for each in devices),
        "gpus": list(devices),
        "modelNames": list(dict.fromkeys(each["modelName"] for each in devices)),
    }


def machine_key(machine_id: str) -> str:
    """Return a digest that identifies a machine; the machine id itself stays secret.

    The method is that of `sd_id128_get_machine_app_specific`: the machine id cannot be computed
    from the digest.

    Args:
        machine_id: The content of `/etc/machine-id`; for any other text the digest is empty.
    """
    try:
        key = bytes.fromhex(machine_id.replace("-", ""))
    except ValueError:
        return ""
    if len(key) != _MACHINE_ID_BYTES or not any(key):
        return ""
    return hmac.digest(key, _APPLICATION, "sha256")[:_MACHINE_ID_BYTES].hex()


def cluster_document(
    cluster_id: str, nodes: Sequence[Document], *, tag: str, description: str, region: str = ""
) -> Document:
    """Return the body of `POST /clusters` that describes the nodes as one cluster.

    Args:
        cluster_id: The cluster's id; empty: the caller chooses it later.
        nodes: The cluster's machines, as `node_document` makes them.
        tag: The kind of their source.
        description: The kind of their source, for people.
        region: The region of the cluster; empty: unknown.
    """
    region_id = {"regionId": region} if region else {}
    return {
        "id": cluster_id,
        "status": "live",
        **region_id,
        "nodes": {"count": len(nodes), "nodeData": list(nodes)},
        "gpus": {
            "count": sum(node["gpus"]["count"] for node in nodes),
            "memory": sum(node["gpus"]["memory"] for node in nodes),
        },
        "vcpus": {"count": sum(round(node["vcpus"]["count"] * 1000) for node in nodes) / 1000},
        "memory": sum(node["memory"] for node in nodes),
        "swap": sum(node["swap"] for node in nodes),
        "tags": [tag],
        "clusterMetadata": {"name": cluster_id, "description": description},
        "config": {"publicHostname": "localhost"},
    }


def nodes_of(document: JsonMapping) -> list[Document]:
    """Return the machines that a document lists; none if the list is malformed."""
    nodes = document.get("nodes")
    entries = nodes.get("nodeData") if isinstance(nodes, dict) else None
    return list(entries) if isinstance(entries, list) else []


def merge_documents(old: JsonMapping, new: JsonMapping) -> Document:
    """Return the document of a cluster with the nodes of a second document added.

    For a node in both documents, the second document counts; nodes in only one document stay. All
    other fields come from the first document, except for the totals, which the server computes
    again over all nodes.

    Args:
        old: The document that the cluster has.
        new: The document with the nodes to add or replace; neither it nor `old` is changed.
    """
    fresh = {str(node.get("id")): node for node in nodes_of(new)}
    nodes = [fresh.pop(str(node.get("id")), node) for node in nodes_of(old)]
    return _without_totals(old, [*nodes, *fresh.values()])


def without(document: JsonMapping, names: Collection[str]) -> Document:
    """Return a copy of a cluster document, without the named nodes.

    Args:
        document: The document that the cluster has.
        names: The nodes to leave out.
    """
    return _without_totals(
        document, [node for node in nodes_of(document) if node.get("id") not in names]
    )


def _without_totals(document: JsonMapping, nodes: Sequence[Document]) -> Document:
    others = {name: value for name, value in document.items() if name not in _TOTALS}
    group = document.get("nodes")
    rest = {**group} if isinstance(group, dict) else {}
    return {**others, "nodes": {**rest, "count": len(nodes), "nodeData": list(nodes)}}

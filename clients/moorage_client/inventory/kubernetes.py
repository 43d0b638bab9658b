"""Reads the output of `kubectl get nodes -o json` as a cluster document.

`moorage.protocol.kubernetes_nodes` converts each node. Cordoned nodes and nodes that are not ready
are omitted.
"""

from typing import Final

from moorage.protocol.kubernetes_nodes import (
    REGION_LABEL,
    NodeReading,
    WrongNodeError,
    without_copies,
)
from moorage.records.json_values import JsonMapping
from moorage_client.inventory.documents import Document, Inventory, InventoryError, cluster_document

KINDS: Final = frozenset({"List", "NodeList", "Node"})
"""Values of `kind` that this reader knows."""
_NAMED_MAX: Final = 10


def kubernetes_inventory(source: str, document: JsonMapping, cluster_id: str) -> Inventory:
    """Return the nodes of a Kubernetes cluster as one cluster document.

    Args:
        source: The source's name in errors.
        document: A `NodeList`, the `List` that kubectl makes of one, or a single `Node`.
        cluster_id: Id of the cluster, since Kubernetes has none; empty: the caller chooses it.

    Raises:
        InventoryError: The document lists no nodes, or no node that can be imported, or a field
            does not match the documented API.
    """
    single = document.get("kind") == "Node"
    items = [document] if single else document.get("items")
    if not isinstance(items, list):
        raise InventoryError(source, "items", "a list of nodes, as `kubectl get nodes -o json` has")
    nodes, left_out = list[Document](), dict[str, list[str]]()
    for number, item in enumerate(items):
        reading = NodeReading(item)
        try:
            reading.check_kind()
            if why_not := reading.why_not():
                left_out.setdefault(why_not, []).append(reading.name())
            else:
                nodes.append(reading.document())
        except WrongNodeError as wrong:
            prefix = "" if single else f"items[{number}]."
            raise InventoryError(source, prefix + wrong.path, wrong.expected) from None
    nodes, copies = without_copies(nodes)
    notes = [
        f"{source}: left out, since {why}: {', '.join(names[:_NAMED_MAX])}"
        + (f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else "")
        for why, names in left_out.items()
    ]
    if copies:
        notes.append(f"{source}: {copies} nodes share a machine id, which is then ignored")
    if not nodes:  # With --replace, such a document would remove all nodes.
        raise InventoryError(source, "", "; ".join(["at least one node to import", *notes]))
    regions = {node.get("labels", {}).get(REGION_LABEL, "") for node in nodes}
    found = cluster_document(
        cluster_id,
        nodes,
        tag="kubernetes",
        description="Nodes of a Kubernetes cluster",
        region=regions.pop() if len(regions) == 1 else "",
    )
    return Inventory((found,), tuple(notes))

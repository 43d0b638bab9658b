"""The result of all inventory readers, and the merge of documents of one cluster.

`moorage.protocol.cluster_documents` makes the documents, also for the server's backends.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from moorage.protocol.cluster_documents import (
    MIB,
    cluster_document,
    device,
    machine_key,
    merge_documents,
    node_document,
    nodes_of,
)
from moorage.protocol.registry import Document
from moorage_client.errors import MoorageError

__all__ = [
    "MIB",
    "Document",
    "Inventory",
    "InventoryError",
    "cluster_document",
    "combine",
    "device",
    "machine_key",
    "merge_documents",
    "node_document",
    "nodes_of",
]


class InventoryError(MoorageError, ValueError):
    """A source cannot be read as inventory.

    Args:
        source: The file, or the name of the source.
        place: The place in the source, e.g. `items[3].status.capacity.cpu`; empty: no place.
        expected: The expected value, and the remedy.
    """

    def __init__(self, source: str, place: str, expected: str) -> None:
        super().__init__(f"{source}{f', {place}' if place else ''}: expected {expected}")
        self.source = source
        self.place = place
        self.expected = expected


@dataclass(frozen=True, slots=True)
class Inventory:
    """The documents that were read from sources, and notes about them.

    Args:
        documents: One for each cluster; if an `id` is empty, the caller must choose the id.
        notes: Sentences for a person: omitted nodes, devices that could not be read.
    """

    documents: tuple[Document, ...]
    notes: tuple[str, ...] = ()


def combine(found: Iterable[tuple[str, Document]]) -> list[Document]:
    """Return one document per cluster, with the nodes of all its documents.

    Args:
        found: Documents, each with the source that it came from.

    Raises:
        InventoryError: Two documents list the same node.
    """
    by_id: dict[str, Document] = {}
    for source, document in found:
        cluster_id = document["id"]
        known = by_id.get(cluster_id)
        if known is None:
            by_id[cluster_id] = document
            continue
        names = {str(node.get("id")) for node in nodes_of(known)}
        for node in nodes_of(document):
            if str(node.get("id")) in names:
                expected = f"each node of cluster {cluster_id} once, not {node.get('id')} again"
                raise InventoryError(source, "", expected)
        by_id[cluster_id] = merge_documents(known, document)
    return list(by_id.values())

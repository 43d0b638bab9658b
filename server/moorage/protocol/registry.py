"""The documents that `web` serves and `catalog` keeps: one Protocol for both sides.

An operation is declared here, served by its endpoint, and done by the catalog's part that has the
documents. Every refusal is a `protocol.faults.ServiceError`.
"""

from typing import Any, Literal, Protocol

__all__ = ["BlockDocuments", "BlockKind", "Clusters", "Document", "Metrics"]

Document = dict[str, Any]
"""A JSON object. What a catalog returns belongs to the catalog: read it, never write to it."""

BlockKind = Literal["block", "block_metrics"]
"""Documents of blocks, and documents of their metrics."""


class Clusters(Protocol):
    """Cluster documents. Reading one may ask whoever keeps it."""

    async def create(self, document: Document) -> Document:
        """Store a new cluster document.

        Returns:
            The document as stored: every field given, plus the aggregates it omitted.

        Raises:
            ServiceError: `already_exists` (409), `bad_message` naming the field, `too_large`.

        """

    async def get(self, cluster_id: str) -> Document:
        """Return a cluster document, or raise `not_found`."""

    async def update(self, cluster_id: str, change: Document) -> Document:
        """Change a cluster document and return the new one.

        Args:
            cluster_id: Which one.
            change: A whole new document, or a Mongo update document with `$set` and `$unset`
                on dotted paths.

        Raises:
            ServiceError: `not_found`, `bad_message` naming the field, `too_large`.

        """

    async def delete(self, cluster_id: str) -> Document:
        """Delete a cluster document and return it, or raise `not_found`."""

    async def query(self, query: Document) -> list[Document]:
        """Return the cluster documents that match a Mongo filter, by id."""


class Metrics(Protocol):
    """Metrics documents of clusters."""

    async def put(self, document: Document) -> tuple[Document, bool]:
        """Store the metrics of the cluster `document["clusterId"]`, whether it is known or not.

        Returns:
            The document with all spellings of its fields, and whether it is the first one.

        """

    async def get(self, cluster_id: str) -> Document:
        """Return the metrics of a cluster, or raise `not_found`."""

    async def update(self, cluster_id: str, change: Document) -> Document:
        """Change the metrics of a cluster, as `Clusters.update` does; raise `not_found`."""

    async def delete(self, cluster_id: str) -> Document:
        """Delete the metrics of a cluster and return them, or raise `not_found`."""

    async def query(self, query: Document | None = None) -> list[Document]:
        """Return the metrics documents that match a filter, by cluster id; None: all."""

    async def aggregate(self, stages: Any) -> list[Document]:
        """Return what an aggregation pipeline makes of all metrics documents.

        Args:
            stages: As `query.parse_pipeline` reads them.

        Raises:
            ServiceError: `bad_message` or `unsupported` naming the place; `too_large`; `busy`.

        """


class BlockDocuments(Protocol):
    """The documents of blocks and of their metrics; `kind` says which."""

    async def create(self, document: Document) -> Document:
        """Store a new block document.

        Raises:
            ServiceError: `already_exists` (409), `bad_message` naming the field, `too_large`.

        """

    async def put_metrics(self, document: Document) -> tuple[Document, bool]:
        """Store the metrics of the block `document["blockId"]`, whether it is known or not.

        Returns:
            The document, and whether it is the first one.

        """

    async def get(self, kind: BlockKind, block_id: str) -> Document:
        """Return a document, or raise `not_found`."""

    async def update(self, kind: BlockKind, block_id: str, change: Document) -> Document:
        """Change a document, as cluster documents are changed; raise `not_found`."""

    async def delete(self, kind: BlockKind, block_id: str) -> Document:
        """Delete a document and return it, or raise `not_found`."""

    async def query(self, kind: BlockKind, query: Document | None) -> list[Document]:
        """Return the documents that match a filter, by id; None: all."""

"""The interface of the documents that `web` serves and `catalog` stores.

An operation is declared here, served by its endpoint, and implemented by the part of the catalog
that has the documents. Every refusal is a `protocol.faults.ServiceError`.
"""

from collections.abc import Collection
from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct

from moorage.records.json_values import JsonObject, JsonValue

Document = JsonObject
"""A JSON object. Objects that a catalog returns belong to the catalog: read them, never write to
them."""

BlockKind = Literal["block", "block_metrics"]
"""Documents of blocks, and documents of their metrics."""


class DocumentCollection(Protocol):
    """The stored documents of all clusters, or of all executors; a read may ask another service."""

    async def create(self, document: Document) -> Document:
        """Store a new document.

        Returns:
            The stored document: all given fields, and derived values for omitted ones.

        Raises:
            ServiceError: `already_exists` (409), `bad_message` naming the field, `too_large`.
        """

    async def get(self, name: str, /) -> Document:
        """Return a document, or raise `not_found`."""

    async def update(self, name: str, /, change: Document) -> Document:
        """Change a document and return the new one.

        Args:
            name: The id of the cluster.
            change: Fields and their new values, by name or dotted path, also under `$set`;
                `$unset`, `$inc` and `$push` beside them. Other fields stay.

        Raises:
            ServiceError: `not_found`, `bad_message` naming the field, `too_large`.
        """

    async def delete(self, name: str, /) -> Document:
        """Delete a document and return it, or raise `not_found`."""

    async def query(self, query: Document) -> list[Document]:
        """Return the documents that match a Mongo filter, by id."""


class ClusterDocuments(DocumentCollection, Protocol):
    """Documents of clusters; machines can be added one by one."""

    async def create(self, document: Document, owner: str = "") -> Document:
        """Store a new cluster document; the errors are those of `DocumentCollection.create`.

        Args:
            document: A cluster document.
            owner: The tenant that owns the document from then on; empty: all tenants.
        """

    async def add_nodes(
        self, cluster_id: str, document: Document, owner: str = ""
    ) -> tuple[Document, bool]:
        """Add the nodes of a document to a cluster; nodes with the same ids are replaced.

        The document is read and written in one step, so that no machine is lost if several join at
        the same time.

        Args:
            cluster_id: The cluster; it is created from the document if it does not exist.
            document: A cluster document. If the cluster exists, only its nodes count.
            owner: The tenant that owns a new cluster; empty: all tenants.

        Returns:
            The stored document, and whether the cluster is new.

        Raises:
            ServiceError: As in `create` and `update`, except `already_exists` and `not_found`.
        """

    async def remove_nodes(self, cluster_id: str, names: Collection[str]) -> Document:
        """Remove nodes from a cluster; the document is read and written in one step.

        Args:
            cluster_id: The cluster.
            names: The nodes; unknown names are ignored.

        Returns:
            The document as stored.

        Raises:
            ServiceError: The errors of `update`.
        """


class ExecutorDocuments(DocumentCollection, Protocol):
    """The stored documents of executors."""

    async def create(self, document: Document, owner: str = "") -> Document:
        """Store a new executor document of a tenant; errors as in `DocumentCollection.create`."""


class Metrics(Protocol):
    """The stored metrics documents of clusters."""

    async def put(self, document: Document) -> tuple[Document, bool]:
        """Store the metrics of the cluster `document["clusterId"]`, even of an unknown cluster.

        Returns:
            The document with all spellings of its fields, and whether there was no document before.
        """

    async def get(self, cluster_id: str) -> Document:
        """Return the metrics of a cluster, or raise `not_found`."""

    async def update(self, cluster_id: str, change: Document) -> tuple[Document, bool]:
        """Change the metrics of a cluster like `DocumentCollection.update`; create missing metrics.

        Returns:
            The document, and whether there was no document before.
        """

    async def delete(self, cluster_id: str) -> Document:
        """Delete the metrics of a cluster and return them, or raise `not_found`."""

    async def query(self, query: Document | None = None) -> list[Document]:
        """Return the metrics documents that match a filter, by cluster id; None: all."""

    async def aggregate(self, stages: JsonValue) -> list[Document]:
        """Return the result of an aggregation pipeline over all metrics documents.

        Args:
            stages: The stages, in the format of `query.parse_pipeline`.

        Raises:
            ServiceError: `bad_message` or `unsupported` naming the place; `too_large`; `busy`.
        """


class BlockDocuments(Protocol):
    """The documents of blocks, or of their metrics: see `kind`."""

    async def create(self, document: Document, owner: str = "") -> Document:
        """Store a new block document for its owner, a tenant; an empty owner means all tenants.

        Raises:
            ServiceError: `already_exists` (409), `bad_message` naming the field, `too_large`.
        """

    async def put_metrics(self, document: Document) -> tuple[Document, bool]:
        """Store the metrics of the block `document["blockId"]`, even of an unknown block.

        Returns: The document, and whether there was no document before.
        """

    async def get(self, kind: BlockKind, block_id: str) -> Document:
        """Return a document, or raise `not_found`."""

    async def update(
        self, kind: BlockKind, block_id: str, change: Document
    ) -> tuple[Document, bool]:
        """Change a document like the document of a cluster; missing metrics are created.

        Returns: The document, and whether there was no document before.

        Raises:
            ServiceError: `not_found`: the block does not exist; `bad_message`, `too_large`.
        """

    async def delete(self, kind: BlockKind, block_id: str) -> Document:
        """Delete a document and return it, or raise `not_found`."""

    async def query(self, kind: BlockKind, query: Document | None) -> list[Document]:
        """Return the documents that match a filter, by id; None: all."""

    def owner(self, kind: BlockKind, block_id: str) -> str | None:
        """Return the owner of a document; for metrics, the owner of their block if it exists.

        Empty: the owner was not recorded. None: the document does not exist.
        """

    async def aggregate_metrics(self, stages: JsonValue) -> list[Document]:
        """Return the result of a pipeline over all metrics of blocks; see `Metrics.aggregate`."""


class PolicyDocuments(Protocol):
    """The documents of policies, in all their versions."""

    async def get(self, uri: str) -> Document:
        """Return a PolicyRule document, or raise `unknown_policy`."""

    async def history(self, uri: str) -> list[Document]:
        """Return author and time of each change of a policy, even a removed one, oldest first.

        Returns:
            Objects with `at` (seconds since the epoch), `who`, `what` (`registered`, `described`,
            `removed`), `digest`, and `fields`, those that were changed.

        Raises:
            ServiceError: `unknown_policy`; `unsupported` where another service has the policies.
        """

    async def query(self, query: Document | None = None) -> list[Document]:
        """Return the PolicyRule documents that match a filter, by URI; None: all."""


class CanaryStart(Struct, frozen=True, forbid_unknown_fields=True):
    """The body that starts a canary.

    Args:
        policy_rule_uri: The URI of a registered version, the candidate.
        percent: The share of the requests, more than 0 and at most 100.
        by: The basis of the decision: `request` (its idempotency key), or `tenant` (all requests of
            a tenant, or none).
        seed: Part of the decision; another seed chooses other requests.
    """

    policy_rule_uri: Annotated[str, Meta(min_length=1, description="a text")]
    percent: Annotated[float, Meta(gt=0, le=100, description="a number above 0, up to 100")]
    by: Annotated[Literal["request", "tenant"], Meta(description="`request` or `tenant`")] = (
        "request"
    )
    seed: Annotated[int, Meta(description="a whole number")] = 0


class Activation(Struct, frozen=True):
    """The body that activates a version.

    Args:
        policy_rule_uri: The URI of a registered version of the alias's policy.
        force: Whether to activate the version even if it fails as the alias's shadow.
    """

    policy_rule_uri: Annotated[str, Meta(min_length=1, description="a text")]
    force: Annotated[bool, Meta(description="true or false")] = False

"""What the daemon needs of a catalog: one Protocol for all of it, and one for blocks.

The daemon builds an implementation (`embedded.catalog.EmbeddedCatalog`), hands it to the web
services and the sandbox host, and listens to its changes. Methods that may have to ask somebody
are `async`, so that an implementation over remote services fits; the few that the hot path calls
for every request are plain functions that only read memory.

Every refusal is a `protocol.faults.ServiceError`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from moorage.catalog.allowances import Allowance
from moorage.catalog.embedded.aliases import Aliases
from moorage.catalog.embedded.contexts import KeptContexts
from moorage.catalog.values import (
    BlockKind,
    Document,
    DocumentKind,
    PolicyRecord,
    PreparedPolicy,
    SearchAction,
)
from moorage.model import Cluster, ClusterId
from moorage.query import Filter

if TYPE_CHECKING:
    from moorage.catalog.embedded.executors import Executors


class BlockCatalog(Protocol):
    """The documents of blocks and of their metrics."""

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

    async def fetch(self, allowance: Allowance) -> list[str]:
        """Read the metrics anew where an external service keeps them; return warnings.

        What `matching` and `encoding` then find is at most `metrics_fresh_seconds` old.
        """

    async def matching(self, asked: Filter) -> Sequence[str]:
        """Return the blocks that a filter finds by their own documents and metrics, by id."""

    async def alike(
        self, like: str | Mapping[str, Any], weights: Mapping[str, float] | None
    ) -> Sequence[str]:
        """Return all blocks, the most alike first; see `query.nearest`."""

    def known(self, block_id: str) -> bool:
        """Return whether there is such a block."""

    def documents(self, block_ids: Sequence[str]) -> list[Document]:
        """Return blocks with their `metrics`, null where there are none; unknown ids left out.

        Raises:
            ServiceError: `too_large`.

        """


class Catalog(Protocol):
    """What is known of the world outside the core."""

    @property
    def aliases(self) -> Aliases:
        """Names that mean a version of a policy; wherever a URI is asked for, they may stand."""

    @property
    def executors(self) -> "Executors":
        """Names under which other servers have policies executed here."""

    @property
    def contexts(self) -> KeptContexts:
        """What policies remember, on the disk."""

    async def close(self) -> None:
        """Finish what was begun and let go of everything. Later calls are refused."""

    # Clusters ------------------------------------

    async def create_cluster(self, document: Document) -> Document:
        """Store a new cluster document.

        Returns:
            The document as stored: every field given, plus the aggregates it omitted.

        Raises:
            ServiceError: `already_exists` (409), `bad_message` naming the field, `too_large`.

        """

    async def get_cluster(self, cluster_id: str) -> Document:
        """Return a cluster document, or raise `not_found`."""

    async def update_cluster(self, cluster_id: str, change: Document) -> Document:
        """Change a cluster document and return the new one.

        Args:
            cluster_id: Which one.
            change: A whole new document, or a Mongo update document with `$set` and `$unset`
                on dotted paths.

        Raises:
            ServiceError: `not_found`, `bad_message` naming the field, `too_large`.

        """

    async def delete_cluster(self, cluster_id: str) -> Document:
        """Delete a cluster document and return it, or raise `not_found`."""

    async def query_clusters(self, query: Document) -> list[Document]:
        """Return the cluster documents that match a filter, by id (see `catalog.filters`)."""

    # Metrics -------------------------------------------------------------

    async def put_metrics(self, document: Document) -> tuple[Document, bool]:
        """Store the metrics of the cluster `document["clusterId"]`, whether it is known or not.

        Returns:
            The document with all spellings of its fields, and whether it is the first one.

        """

    async def get_metrics(self, cluster_id: str) -> Document:
        """Return the metrics of a cluster, or raise `not_found`."""

    async def update_metrics(self, cluster_id: str, change: Document) -> Document:
        """Change the metrics of a cluster, as `update_cluster` does; raise `not_found`."""

    async def delete_metrics(self, cluster_id: str) -> Document:
        """Delete the metrics of a cluster and return them, or raise `not_found`."""

    async def query_metrics(self, query: Document | None = None) -> list[Document]:
        """Return the metrics documents that match a filter, by cluster id; None: all."""

    async def aggregate_metrics(self, stages: Any) -> list[Document]:
        """Return what an aggregation pipeline makes of all metrics documents.

        Args:
            stages: As `query.parse_pipeline` reads them.

        Raises:
            ServiceError: `bad_message` or `unsupported` naming the place; `too_large`; `busy`.

        """

    # Policies ------------------------------------------------------------

    async def prepare_policy(self, document: Document) -> PreparedPolicy:
        """Read a PolicyRule document and fetch its code; store, compile and run nothing.

        Raises:
            ServiceError: `bad_message` naming the field, `bad_policy` about the code,
                `too_large`, `unavailable` where a URL could not be fetched.

        """

    async def register_policy(self, prepared: PreparedPolicy, who: str = "") -> PolicyRecord:
        """Store a policy. The same one again is answered the same.

        Args:
            prepared: By `prepare_policy`.
            who: The tenant, for the policy's history.

        Raises:
            ServiceError: `already_exists` where the URI has another content; `too_large`.

        """

    async def get_policy(self, uri: str) -> Document:
        """Return a PolicyRule document, or raise `unknown_policy`."""

    async def update_policy(self, uri: str, change: Document, who: str = "") -> Document:
        """Change descriptive fields of a policy, as `update_cluster` does.

        Raises:
            ServiceError: `unknown_policy`; `already_exists` where the change would make another
                policy of it (code, defaults, schemas): that needs a new version.

        """

    async def delete_policy(self, uri: str, who: str = "") -> Document:
        """Delete a policy and return its document, or raise `unknown_policy`."""

    async def policy_history(self, uri: str) -> list[Document]:
        """Return who changed a policy and when, the first change first; also of a removed one.

        Returns:
            Objects with `at` (seconds since the epoch), `who`, `what` (`registered`, `described`,
            `removed`), `digest`, and `fields`, those that were changed.

        Raises:
            ServiceError: `unknown_policy`; `unsupported` where another service has the policies.

        """

    async def query_policies(self, query: Document | None = None) -> list[Document]:
        """Return the PolicyRule documents that match a filter, by URI; None: all."""

    @property
    def blocks(self) -> BlockCatalog:
        """The documents of blocks and of their metrics; always kept here."""

    # What an ask needs: from memory where that is fresh, else from whoever knows ---------------

    async def keep_fresh(self) -> None:
        """Follow the services that the catalog mirrors; runs until cancelled, or has nothing to do.

        Changes are reported from here on.
        """

    @property
    def warnings(self) -> Sequence[str]:
        """What was damaged on the disk and is done without, each a sentence for the log."""

    @property
    def registry_known(self) -> bool:
        """Whether the clusters of the registry are known at all; False until it first answers."""

    def at_hand(self, uri: str, cluster_ids: Sequence[str] | None) -> list[str] | None:
        """Return warnings for an ask if memory holds all it needs, fresh enough, else None.

        Args:
            uri: Its policy.
            cluster_ids: Clusters it names, known or not; None: every live one.

        """

    async def fetch(
        self,
        uri: str,
        cluster_ids: Sequence[str] | None,
        allowance: Allowance,
        *,
        searching: bool = False,
    ) -> list[str]:
        """Bring into memory what `at_hand` missed, in bulk and within a stated time.

        Args:
            uri: The ask's policy; empty: none is wanted.
            cluster_ids: Clusters it names; None: every live one.
            allowance: What the ask may cause. A policy that is not known comes first, then clusters
                that are not known, then metrics; what is known, if old, waits for another ask.
            searching: Its clusters are going to be searched for, which may take requests too.

        Returns:
            Warnings for the ask: what could not be read, and what that left out.

        Raises:
            ServiceError: `unavailable` naming the service, or `unknown_policy`.

        """

    async def search(
        self, action: SearchAction, body: Document, allowance: Allowance
    ) -> list[ClusterId] | None:
        """Let an external search service find clusters; None where there is no such service.

        Args:
            action: What the body is.
            body: As the client sent it, bare or in its envelope.
            allowance: What the ask may cause; a search takes one.

        Raises:
            ServiceError: `unavailable`, or `bad_message` with what the service said.

        """

    # What the embedded search service does, over memory: `fetch` first where that may be old ----

    async def matching(self, asked: Filter) -> list[ClusterId]:
        """Return the clusters that a filter of `matchType` `cluster` finds, live or not, by id.

        Where it also asks for metrics, those are asked first, and a cluster has to meet both.

        Raises:
            ServiceError: `too_large` where a `$regex` would read too much; `busy`.

        """

    async def alike(
        self, like: str | Mapping[str, Any], weights: Mapping[str, float] | None
    ) -> list[ClusterId]:
        """Return all clusters, live or not, the most alike first; see `query.nearest`.

        Args:
            like: The id of a known cluster, or a part of a cluster document.
            weights: By path; None: those of `query.DEFAULT_WEIGHTS`.

        """

    def cluster_documents(self, cluster_ids: Sequence[str]) -> list[Document]:
        """Return cluster documents as stored, in the order asked for, without unknown ones.

        Raises:
            ServiceError: `too_large`.

        """

    # The hot path: memory only, on the event loop ---------------------------------------------

    @property
    def documents_version(self) -> int:
        """Grows with every change of a cluster document or of metrics."""

    def live_ids(self) -> tuple[ClusterId, ...]:
        """Return the ids of the clusters that may be candidates, sorted."""

    def is_live(self, cluster_id: str) -> bool:
        """Return whether there is such a cluster and it may be a candidate."""

    def known(self, cluster_id: str) -> bool:
        """Return whether there is such a cluster, live or not."""

    def packed(self, kind: DocumentKind, cluster_ids: Iterable[str]) -> dict[str, bytes]:
        """Return what `get_cluster` or `get_metrics` would answer, as msgpack, if it is in memory.

        What is left out may not exist, or it is not known whether it is current.
        """

    def document_blobs(self, cluster_ids: Iterable[str]) -> list[tuple[ClusterId, int, bytes]]:
        """Return what policies read of clusters, packed.

        Args:
            cluster_ids: Which ones; unknown ids are left out.

        Returns:
            `(id, version, blob)`, in the order asked for. The blob is msgpack of
            `{"data": document, "cluster_metrics": metrics or None}`; the version grows when
            either changes, and no other content ever has the same version.

        """

    def clusters(self) -> Sequence[Cluster]:
        """Return the placement part of every live cluster, by id."""

    def policy(self, uri: str) -> PolicyRecord | None:
        """Return a registered policy, or None."""

    def policy_uris(self) -> Sequence[str]:
        """Return the URIs of all registered policies, sorted."""

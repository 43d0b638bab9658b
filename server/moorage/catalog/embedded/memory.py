"""The in-memory documents of a catalog, from any source, for the event loop.

Embedded parts add durable documents, mirrored parts add answers of services. The hot path reads
documents with plain functions, so no request waits for a disk or a service. Only this module
reports changes to the listeners.
"""

from collections.abc import Callable, Iterable, Sequence

from moorage.catalog.changes import (
    CatalogChange,
    ClusterDeleted,
    ClusterPut,
    MetricsDeleted,
    MetricsPut,
    PolicyDeleted,
    PolicyPut,
)
from moorage.catalog.documents.clusters import cluster_model
from moorage.catalog.embedded.aliases import Aliases
from moorage.catalog.embedded.records import (
    DocumentEntry,
    PolicyEntry,
    StoredRecords,
    answer_documents,
    blob_of,
    with_metrics,
)
from moorage.catalog.search import DocumentSearch
from moorage.catalog.values import Document, DocumentKind, PolicyRecord
from moorage.model import Cluster, ClusterId


class Memory:
    """Clusters, metrics and policies in memory.

    Args:
        aliases: Names that stand for a version of a policy.
        elsewhere: Parts that mirror a service; their documents may be missing or out of date.
    """

    def __init__(self, aliases: Aliases, elsewhere: frozenset[str] = frozenset()) -> None:
        self.clusters: dict[str, DocumentEntry] = {}
        self.metrics: dict[str, DocumentEntry] = {}
        self.policies: dict[str, PolicyEntry] = {}
        self.index = DocumentSearch(self.clusters, self.metrics)
        self.listeners: list[Callable[[CatalogChange], None]] = []
        """Functions that are called on the event loop with every change, once it is durable."""
        self.version = 0
        """A number that grows with every change of a cluster document or of metrics."""
        self._aliases = aliases
        self._elsewhere = elsewhere
        self._live: set[ClusterId] = set()
        self._live_ids: tuple[ClusterId, ...] | None = None
        self._loaded: dict[str, Cluster] = {}
        self._versions: dict[str, int] = {}
        self._blobs: dict[str, tuple[int, bytes]] = {}

    def take_over(self, loaded: StoredRecords) -> None:
        """Load all records of a store that was just opened."""
        if "clusters" not in self._elsewhere:
            for entry, live, cluster in loaded.clusters:
                self._put_cluster(entry, live=live)
                self._loaded[entry.id] = cluster
        if "metrics" not in self._elsewhere:
            self.metrics.update((entry.id, entry) for entry in loaded.metrics)
        if "policies" not in self._elsewhere:
            self.policies.update((entry.id, entry) for entry in loaded.policies)

    # Changes -------------------------------------------------------------------------------

    def report(self, change: CatalogChange) -> None:
        """Report a change to the listeners."""
        for listener in self.listeners:
            listener(change)

    def keep_cluster(self, entry: DocumentEntry, cluster: Cluster, *, live: bool) -> None:
        """Add or replace a cluster document."""
        self._put_cluster(entry, live=live)
        self.report(ClusterPut(cluster, live))

    def drop_cluster(self, cluster_id: str) -> None:
        """Remove a cluster document, if there is one."""
        entry = self.clusters.pop(cluster_id, None)
        if entry is not None:
            self._live.discard(entry.id)
            self._live_ids = None
            self._touch(cluster_id)
            self._versions.pop(cluster_id, None)
            self.report(ClusterDeleted(entry.id))

    def keep_metrics(self, entry: DocumentEntry) -> None:
        """Add or replace the metrics of a cluster."""
        self.metrics[entry.id] = entry
        self._touch(entry.id)
        self.report(MetricsPut(entry.id))

    def drop_metrics(self, cluster_id: str) -> None:
        """Remove the metrics of a cluster, if there are any."""
        entry = self.metrics.pop(cluster_id, None)
        if entry is not None:
            self._touch(cluster_id)
            self.report(MetricsDeleted(entry.id))

    def keep_policy(self, entry: PolicyEntry) -> None:
        """Add or replace a policy."""
        self.policies[entry.id] = entry
        self.report(PolicyPut(entry.id))

    def drop_policy(self, uri: str) -> None:
        """Remove a policy, if there is one."""
        if self.policies.pop(uri, None) is not None:
            self.report(PolicyDeleted(uri))

    def _put_cluster(self, entry: DocumentEntry, *, live: bool) -> None:
        self.clusters[entry.id] = entry
        if live is not (entry.id in self._live):
            (self._live.add if live else self._live.discard)(entry.id)
            self._live_ids = None
        self._touch(entry.id)

    def _touch(self, cluster_id: str) -> None:
        self.version += 1
        self.index.note_change(cluster_id)
        self._loaded.pop(cluster_id, None)
        self._blobs.pop(cluster_id, None)
        if cluster_id in self.clusters:  # Metrics of unknown clusters do not count.
            self._versions[cluster_id] = self.version

    def forget(self) -> None:
        """Drop all documents at once. Call no method afterwards."""
        held = (self.clusters, self.metrics, self.policies, self._loaded, self._blobs)
        for each in held:
            each.clear()

    # The hot path --------------------------------------------------------------------------

    def live_ids(self) -> tuple[ClusterId, ...]:
        """Return the ids of live clusters, which may be candidates, sorted."""
        if self._live_ids is None:
            self._live_ids = tuple(sorted(self._live))
        return self._live_ids

    def is_live(self, cluster_id: str) -> bool:
        """Return whether the cluster exists and is live, so that it may be a candidate."""
        return cluster_id in self._live

    def knows(self, cluster_id: str) -> bool:
        """Return whether the cluster exists, live or not."""
        return cluster_id in self.clusters

    def owner(self, cluster_id: str) -> str:
        """Return the tenant that registered a cluster; empty if unknown."""
        entry = self.clusters.get(cluster_id)
        return "" if entry is None else entry.owner

    def metrics_owner(self, cluster_id: str) -> str:
        """Return the owner of metrics: their cluster's, else the tenant that sent the metrics."""
        entry = self.clusters.get(cluster_id) or self.metrics.get(cluster_id)
        return "" if entry is None else entry.owner

    def cluster_ids(self) -> frozenset[ClusterId]:
        """Return the ids of all clusters, live or not."""
        return frozenset(entry.id for entry in self.clusters.values())

    def documents(self, cluster_ids: Sequence[str]) -> list[Document]:
        """Return cluster documents as stored, in the given order, without unknown clusters.

        Raises:
            ServiceError: `too_large`.
        """
        return answer_documents(
            [self.clusters[name] for name in cluster_ids if name in self.clusters]
        )

    def measured(self, cluster_ids: Sequence[str]) -> list[Document]:
        """Return the result of `documents`, each document with its `metrics`, `{}` if none."""
        found = [self.clusters[name] for name in cluster_ids if name in self.clusters]
        return with_metrics(found, self.metrics)

    def measured_bytes(self, cluster_ids: Sequence[str]) -> int:
        """Return the approximate length of `measured`'s result as JSON."""
        parts = (part.get(name) for name in cluster_ids for part in (self.clusters, self.metrics))
        return sum(entry.size for entry in parts if entry is not None)

    def models(self) -> Sequence[Cluster]:
        """Return the part of every live cluster that placement uses, by id."""
        loaded, self._loaded = self._loaded, {}  # Reuse the clusters that the start has read.
        return [loaded.get(n) or cluster_model(self.clusters[n].document) for n in self.live_ids()]

    def packed(self, kind: DocumentKind, cluster_ids: Iterable[str]) -> dict[str, bytes]:
        """Return the documents or metrics of clusters as msgpack.

        Documents that do not exist or may be out of date are omitted.
        """
        part, entries = (
            ("clusters", self.clusters) if kind == "cluster" else ("metrics", self.metrics)
        )
        if part in self._elsewhere:
            return {}
        return {name: entries[name].packed for name in cluster_ids if name in entries}

    def blobs(self, cluster_ids: Iterable[str]) -> list[tuple[ClusterId, int, bytes]]:
        """Return the parts of clusters that policies read, packed.

        Args:
            cluster_ids: Ids of the clusters; unknown ids are left out.

        Returns:
            `(id, version, blob)`, in the given order. The blob is msgpack of
            `{"data": document, "cluster_metrics": metrics or None}`; the version grows when
            either changes, and no other content ever has the same version.
        """
        found: list[tuple[ClusterId, int, bytes]] = []
        for cluster_id in cluster_ids:
            entry = self.clusters.get(cluster_id)
            if entry is None:
                continue
            version = self._versions[cluster_id]
            cached = self._blobs.get(cluster_id)
            if cached is None:
                cached = self._blobs[cluster_id] = (version, blob_of(entry, self.metrics))
            found.append((entry.id, *cached))
        return found

    def policy(self, uri: str) -> PolicyRecord | None:
        """Return a registered policy, by URI or by alias, or None."""
        entry = self.policies.get(self._aliases.meaning(uri))
        return entry.record if entry else None

    def policy_uris(self) -> Sequence[str]:
        """Return the URIs of all registered policies, sorted."""
        return sorted(self.policies)

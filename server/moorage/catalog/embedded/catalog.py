"""The catalog in one SQLite file: what `moored` uses where no external service is configured.

Documents are checked, completed and written in the store's thread; the event loop keeps the result
in memory, so that reading and the hot path touch no disk. The file holds documents as they were
given; what the server fills in is worked out again when they are loaded, so it never goes stale.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from moorage.catalog.allowances import Allowance
from moorage.catalog.changes import (
    CatalogChange,
    ClusterDeleted,
    ClusterPut,
    MetricsDeleted,
    MetricsPut,
    PolicyDeleted,
    PolicyPut,
)
from moorage.catalog.documents.clusters import ClusterDocument, cluster_model
from moorage.catalog.documents.encoding import apply_change, decode, snapshot
from moorage.catalog.documents.metrics import read_metrics_document
from moorage.catalog.documents.policies import (
    complete_policy_document,
    differing_fields,
    prepared_policy,
    record_from,
)
from moorage.catalog.documents.sources import CodeSources
from moorage.catalog.embedded.aliases import Aliases
from moorage.catalog.embedded.blocks import BlockDocuments
from moorage.catalog.embedded.contexts import KeptContexts
from moorage.catalog.embedded.executors import Executors
from moorage.catalog.embedded.history import history_of, note
from moorage.catalog.embedded.records import (
    CatalogEntry,
    DocumentEntry,
    PolicyEntry,
    StoredRecords,
    aggregated,
    answered,
    blob_of,
    changed,
    entry_of,
    load,
    not_found,
    refuse_differences,
    stored_files,
    write,
    write_policy,
)
from moorage.catalog.embedded.store import Database, DocumentStore, Kind
from moorage.catalog.filters import compile_filter, parse_filter
from moorage.catalog.machines import Machines
from moorage.catalog.search import DocumentSearch
from moorage.catalog.values import (
    Document,
    DocumentKind,
    PolicyRecord,
    PreparedPolicy,
    SearchAction,
)
from moorage.model import Cluster, ClusterId, Code, PolicyRef
from moorage.protocol.faults import ServiceError
from moorage.query import Filter

__all__ = ["EmbeddedCatalog"]

T = TypeVar("T", bound=CatalogEntry)


class EmbeddedCatalog:
    """A `catalog.ports.Catalog` over one SQLite file. Make one with `await open(path)`.

    Args:
        store: The open file.
        on_change: Called on the event loop with every change, once it is durable.
        sources: Where the code of policies may come from.

    """

    def __init__(
        self, store: DocumentStore, on_change: Callable[[CatalogChange], None], sources: CodeSources
    ) -> None:
        self._store = store
        self._on_change = on_change
        self._sources = sources
        self._clusters: dict[str, DocumentEntry] = {}
        self._metrics: dict[str, DocumentEntry] = {}
        self._search = DocumentSearch(self._clusters, self._metrics)
        self.blocks = BlockDocuments(store)
        self._policies: dict[str, PolicyEntry] = {}
        self.aliases = Aliases(store)
        self.contexts = KeptContexts(store)
        self.executors = Executors(store)
        self._live: set[ClusterId] = set()
        self._machines = Machines()
        self._loaded: dict[str, Cluster] = {}
        self._live_ids: tuple[ClusterId, ...] | None = None
        self._version = 0
        self._versions: dict[str, int] = {}
        self._blobs: dict[str, tuple[int, bytes]] = {}

    @classmethod
    async def open(
        cls,
        path: Path,
        on_change: Callable[[CatalogChange], None],
        code_root: Path | None = None,
        code_hosts: frozenset[str] | None = None,
    ) -> Self:
        """Open or create the file and load what it holds; no change is reported for that.

        Args:
            path: The file; its folder must exist.
            on_change: Called on the event loop with every change, once it is durable.
            code_root: Folder below which the code of policies may be read; None: nowhere.
            code_hosts: Hosts that code may be fetched from; None: all public ones.

        Raises:
            ServiceError: `unavailable`: the file is no catalog, is damaged, or is newer.

        """
        store = await DocumentStore.open(path)
        catalog = cls(store, on_change, CodeSources(code_root, code_hosts))
        try:
            catalog._take_over(await store.run(load))
        except BaseException:
            await store.close()
            raise
        return catalog

    def _take_over(self, loaded: StoredRecords) -> None:
        for entry, live, cluster in loaded.clusters:
            self._keep_cluster(entry, live=live)
            self._loaded[entry.id] = cluster
            self._machines.keep(cluster)
        for entry in loaded.metrics:
            self._metrics[entry.id] = entry
        for policy in loaded.policies:
            self._policies[policy.id] = policy
        self.aliases.take_over(loaded.aliases)
        for kind, entries in loaded.blocks.items():
            self.blocks.take_over(kind, entries)

    async def close(self) -> None:
        """Finish what was begun and close the file."""
        self._search.close()
        await self.blocks.close()
        await self._store.close()

    # Clusters ------------------------------------------------------------------------------

    async def create_cluster(self, document: Document) -> Document:
        """See `Catalog.create_cluster`."""

        def work(database: Database) -> tuple[DocumentEntry, ClusterDocument]:
            encoded, given = snapshot(document)
            read = self._machines.read(database, given)
            if database.has("cluster", read.id):
                raise ServiceError(
                    Code.ALREADY_EXISTS,
                    f"id: the cluster {read.id} exists; change it with PUT /clusters/{read.id}",
                    field="id",
                    expected="an id that no cluster has",
                )
            return write(database, "cluster", read.id, encoded, read.document), read

        return (await self._store.run(work, self._publish_cluster))[0].document

    async def get_cluster(self, cluster_id: str) -> Document:
        """See `Catalog.get_cluster`."""
        return entry_of(self._clusters, cluster_id, "cluster").document

    async def update_cluster(self, cluster_id: str, change: Document) -> Document:
        """See `Catalog.update_cluster`."""

        def work(database: Database) -> tuple[DocumentEntry, ClusterDocument]:
            encoded, given = changed(database, "cluster", cluster_id, change, "id")
            read = self._machines.read(database, given)
            return write(database, "cluster", read.id, encoded, read.document), read

        return (await self._store.run(work, self._publish_cluster))[0].document

    async def delete_cluster(self, cluster_id: str) -> Document:
        """See `Catalog.delete_cluster`."""

        def publish(entry: DocumentEntry) -> None:
            del self._clusters[entry.id]
            self._live.discard(entry.id)
            self._live_ids = None
            self._touch(entry.id)
            self._versions.pop(entry.id)
            self._on_change(ClusterDeleted(entry.id))

        return await self._delete("cluster", cluster_id, self._clusters, publish)

    async def query_clusters(self, query: Document) -> list[Document]:
        """See `Catalog.query_clusters`."""
        found = await self._search.clusters(parse_filter(query))
        return answered([self._clusters[name] for name in found if name in self._clusters])

    def _publish_cluster(self, result: tuple[DocumentEntry, ClusterDocument]) -> None:
        entry, read = result
        self._keep_cluster(entry, live=read.live)
        self._on_change(ClusterPut(read.cluster, read.live))

    def _keep_cluster(self, entry: DocumentEntry, *, live: bool) -> None:
        self._clusters[entry.id] = entry
        if live is not (entry.id in self._live):
            (self._live.add if live else self._live.discard)(entry.id)
            self._live_ids = None
        self._touch(entry.id)

    # Metrics -------------------------------------------------------------------------------

    async def put_metrics(self, document: Document) -> tuple[Document, bool]:
        """See `Catalog.put_metrics`."""

        def work(database: Database) -> tuple[DocumentEntry, bool]:
            encoded, given = snapshot(document)
            cluster_id, read = read_metrics_document(given)
            created = not database.has("metrics", cluster_id)
            return write(database, "metrics", cluster_id, encoded, read), created

        # Observations: the next ones replace them, so they need not outlive a power cut.
        entry, created = await self._store.run(
            work, lambda result: self._publish_metrics(result[0]), durable=False
        )
        return entry.document, created

    async def get_metrics(self, cluster_id: str) -> Document:
        """See `Catalog.get_metrics`."""
        return entry_of(self._metrics, cluster_id, "metrics").document

    async def update_metrics(self, cluster_id: str, change: Document) -> Document:
        """See `Catalog.update_metrics`."""

        def work(database: Database) -> DocumentEntry:
            encoded, given = changed(database, "metrics", cluster_id, change, "clusterId")
            known_id, read = read_metrics_document(given)
            return write(database, "metrics", known_id, encoded, read)

        entry = await self._store.run(work, self._publish_metrics, durable=False)
        return entry.document

    async def delete_metrics(self, cluster_id: str) -> Document:
        """See `Catalog.delete_metrics`."""

        def publish(entry: DocumentEntry) -> None:
            del self._metrics[entry.id]
            self._touch(entry.id)
            self._on_change(MetricsDeleted(entry.id))

        return await self._delete("metrics", cluster_id, self._metrics, publish)

    async def query_metrics(self, query: Document | None = None) -> list[Document]:
        """See `Catalog.query_metrics`."""
        found = await self._search.metrics(parse_filter(query))
        return answered([self._metrics[name] for name in found if name in self._metrics])

    async def aggregate_metrics(self, stages: Any) -> list[Document]:
        """See `Catalog.aggregate_metrics`."""
        taken = [self._metrics[name].document for name in sorted(self._metrics)]
        return await self._search.run(lambda: aggregated(stages, taken))

    def _publish_metrics(self, entry: DocumentEntry) -> None:
        self._metrics[entry.id] = entry
        self._touch(entry.id)
        self._on_change(MetricsPut(entry.id))

    # Policies ------------------------------------------------------------------------------

    async def prepare_policy(self, document: Document) -> PreparedPolicy:
        """See `Catalog.prepare_policy`."""
        complete = complete_policy_document(document)
        code: str = document["code"]  # With the credentials that it may have.
        fetched = await self._sources.fetch(code)
        # Unpacking and reading patterns take a while, and need nothing of the store.
        return await asyncio.to_thread(
            lambda: prepared_policy(complete, self._sources.files(code, fetched))
        )

    async def register_policy(self, prepared: PreparedPolicy, who: str = "") -> PolicyRecord:
        """See `Catalog.register_policy`."""
        record = prepared.record
        uri = record.ref.uri

        def work(database: Database) -> PolicyEntry | None:
            row = database.get("policy", uri)
            if row is not None:
                refuse_differences(
                    uri, differing_fields(decode(row.document), record.document, policy_only=False)
                )
                return None
            note(database, uri, who, "registered", record.ref.digest)
            return write_policy(database, record)

        entry = await self._store.run(work, self._publish_policy)
        return entry.record if entry else entry_of(self._policies, uri, "policy").record

    async def get_policy(self, uri: str) -> Document:
        """See `Catalog.get_policy`."""
        return entry_of(self._policies, self.aliases.meaning(uri), "policy").document

    async def update_policy(self, uri: str, change: Document, who: str = "") -> Document:
        """See `Catalog.update_policy`."""

        def work(database: Database) -> PolicyEntry:
            row = database.get("policy", uri)
            if row is None:
                raise not_found("policy", uri)
            old = decode(row.document)
            kept = {"code": old["code"], "policy_rule_uri": uri, "digest": old["digest"]}
            _, given = snapshot({**kept, **apply_change(old, change)})
            new = complete_policy_document(given)
            differing = differing_fields(old, new, policy_only=True)
            differing += [name for name in ("code", "policy_rule_uri") if new[name] != old[name]]
            refuse_differences(uri, differing)
            ref = PolicyRef(uri, old["digest"])
            fields = differing_fields(old, new, policy_only=False)
            note(database, uri, who, "described", ref.digest, tuple(fields))
            return write_policy(database, record_from(ref, stored_files(row, old), new))

        entry = await self._store.run(work, self._publish_policy)
        return entry.document

    async def delete_policy(self, uri: str, who: str = "") -> Document:
        """See `Catalog.delete_policy`."""

        def publish(entry: PolicyEntry) -> None:
            del self._policies[entry.id]
            self._on_change(PolicyDeleted(entry.id))

        def noted(database: Database) -> None:
            note(database, uri, who, "removed", self._policies[uri].record.ref.digest)

        return await self._delete("policy", uri, self._policies, publish, noted)

    async def policy_history(self, uri: str) -> list[Document]:
        """See `Catalog.policy_history`."""
        return await self._store.run(lambda database: history_of(database, uri))

    async def query_policies(self, query: Document | None = None) -> list[Document]:
        """See `Catalog.query_policies`."""
        matches = compile_filter(query)
        taken = list(self._policies.values())  # As they are now; the thread must not see changes.

        def work() -> list[PolicyEntry]:
            return sorted((p for p in taken if matches(p.document)), key=lambda entry: entry.id)

        return answered(await self._search.run(work))

    def _publish_policy(self, entry: PolicyEntry | None) -> None:
        if entry is not None:
            self._policies[entry.id] = entry
            self._on_change(PolicyPut(entry.id))

    # What an ask needs: all of it is here --------------------------------------------------

    async def keep_fresh(self) -> None:
        """See `Catalog.keep_fresh`."""

    @property
    def warnings(self) -> Sequence[str]:
        """See `Catalog.warnings`."""
        return self._store.warnings

    @property
    def registry_known(self) -> bool:
        """See `Catalog.registry_known`."""
        return True

    def at_hand(self, uri: str, cluster_ids: Sequence[str] | None) -> list[str] | None:
        """See `Catalog.at_hand`."""
        del uri, cluster_ids
        return []

    async def fetch(
        self,
        uri: str,
        cluster_ids: Sequence[str] | None,
        allowance: Allowance,
        *,
        searching: bool = False,
    ) -> list[str]:
        """See `Catalog.fetch`."""
        del uri, cluster_ids, allowance, searching
        return []

    async def search(
        self, action: SearchAction, body: Document, allowance: Allowance
    ) -> list[ClusterId] | None:
        """See `Catalog.search`."""
        del action, body, allowance
        return None

    # The embedded search service -----------------------------------------------------------

    async def matching(self, asked: Filter) -> list[ClusterId]:
        """See `Catalog.matching`."""
        return await self._search.matching(asked)

    async def alike(
        self, like: str | Mapping[str, Any], weights: Mapping[str, float] | None
    ) -> list[ClusterId]:
        """See `Catalog.alike`."""
        return await self._search.alike(like, weights)

    def cluster_documents(self, cluster_ids: Sequence[str]) -> list[Document]:
        """See `Catalog.cluster_documents`."""
        return answered([self._clusters[name] for name in cluster_ids if name in self._clusters])

    # The hot path --------------------------------------------------------------------------

    @property
    def documents_version(self) -> int:
        """See `Catalog.documents_version`."""
        return self._version

    def live_ids(self) -> tuple[ClusterId, ...]:
        """See `Catalog.live_ids`."""
        if self._live_ids is None:
            self._live_ids = tuple(sorted(self._live))
        return self._live_ids

    def is_live(self, cluster_id: str) -> bool:
        """See `Catalog.is_live`."""
        return cluster_id in self._live

    def known(self, cluster_id: str) -> bool:
        """See `Catalog.known`."""
        return cluster_id in self._clusters

    def packed(self, kind: DocumentKind, cluster_ids: Iterable[str]) -> dict[str, bytes]:
        """See `Catalog.packed`."""
        entries = self._clusters if kind == "cluster" else self._metrics
        return {name: entries[name].packed for name in cluster_ids if name in entries}

    def document_blobs(self, cluster_ids: Iterable[str]) -> list[tuple[ClusterId, int, bytes]]:
        """See `Catalog.document_blobs`."""
        found: list[tuple[ClusterId, int, bytes]] = []
        for cluster_id in cluster_ids:
            entry = self._clusters.get(cluster_id)
            if entry is None:
                continue
            version = self._versions[cluster_id]
            cached = self._blobs.get(cluster_id)
            if cached is None:
                cached = self._blobs[cluster_id] = (version, blob_of(entry, self._metrics))
            found.append((entry.id, *cached))
        return found

    def clusters(self) -> Sequence[Cluster]:
        """See `Catalog.clusters`."""
        loaded, self._loaded = self._loaded, {}  # What the start read is not read again.
        return [loaded.get(n) or cluster_model(self._clusters[n].document) for n in self.live_ids()]

    def policy(self, uri: str) -> PolicyRecord | None:
        """See `Catalog.policy`."""
        entry = self._policies.get(self.aliases.meaning(uri))
        return entry.record if entry else None

    def policy_uris(self) -> Sequence[str]:
        """See `Catalog.policy_uris`."""
        return sorted(self._policies)

    def _touch(self, cluster_id: str) -> None:
        self._version += 1
        self._search.changed(cluster_id)
        self._loaded.pop(cluster_id, None)
        self._blobs.pop(cluster_id, None)
        if cluster_id in self._clusters:  # Metrics may be those of a cluster nobody knows.
            self._versions[cluster_id] = self._version

    # All kinds -----------------------------------------------------------------------------

    async def _delete(
        self,
        kind: Kind,
        record_id: str,
        entries: Mapping[str, T],
        publish: Callable[[T], None],
        also: Callable[[Database], None] = lambda _: None,
    ) -> Document:
        gone: list[T] = []

        def work(database: Database) -> None:
            if not database.remove(kind, record_id):
                raise not_found(kind, record_id)
            also(database)

        def publish_gone(_: None) -> None:
            gone.append(entries[record_id])
            publish(gone[0])

        entry_of(entries, record_id, kind)
        await self._store.run(work, publish_gone)
        return gone[0].document

"""Opens a catalog: each part is embedded, or mirrors a configured external service.

`daemon` opens the configured catalog; rehearsals and tests open catalogs without mirrors.
"""

import contextlib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import msgspec

from moorage.catalog.allowances import Allowance
from moorage.catalog.changes import CatalogChange, ClusterDeleted, ClustersListed
from moorage.catalog.documents.sources import CodeSources
from moorage.catalog.embedded.aliases import Aliases
from moorage.catalog.embedded.blocks import EmbeddedBlocks, check_block
from moorage.catalog.embedded.clusters import EmbeddedClusters
from moorage.catalog.embedded.contexts import KeptContexts
from moorage.catalog.embedded.executors import Executors
from moorage.catalog.embedded.following import FollowedRecords, marks_of
from moorage.catalog.embedded.memory import Memory
from moorage.catalog.embedded.metrics import EmbeddedMetrics
from moorage.catalog.embedded.policies import EmbeddedPolicies, prepare_policy
from moorage.catalog.embedded.records import PolicyEntry, load
from moorage.catalog.embedded.store import DocumentStore
from moorage.catalog.machines import Machines
from moorage.catalog.mirrored.block_metrics import BlockMetricsMirror, MirroredBlocks
from moorage.catalog.mirrored.clusters import ClusterMirror, MetricsMirror
from moorage.catalog.mirrored.external import External
from moorage.catalog.mirrored.freshness import MirroredFreshness
from moorage.catalog.mirrored.parts import MirroredClusters, MirroredMetrics, MirroredPolicies
from moorage.catalog.mirrored.policies import PolicyMirror
from moorage.catalog.mirrored.services import (
    ClusterRegistry,
    MetricsService,
    PolicyStore,
    SearchService,
)
from moorage.catalog.ports import Catalog
from moorage.catalog.search import ClusterSearch
from moorage.catalog.values import Document, Examine, PolicyRecord
from moorage.protocol.faults import ServiceError
from moorage.storage.base import RecordStore


async def open_catalog(
    records: RecordStore,
    sources: CodeSources | None = None,
    external: External | None = None,
    *,
    follows: bool = False,
) -> Catalog:
    """Open and load the records, and read an external registry for the first time.

    If the registry does not answer, the catalog opens nevertheless, and refuses allocation requests
    with `unavailable` until the registry answers.

    Args:
        records: The stored records; not open yet, and closed by the catalog.
        sources: The allowed sources of policies' code; None: no files, and all public hosts.
        external: The services to mirror; None: no service.
        follows: Whether another process writes the records; then `Catalog.following` loads changes.

    Raises:
        ServiceError: `unavailable`: the records are not a catalog, are damaged, or are of a newer
        release.
    """
    external, sources = external or External(), sources or CodeSources()
    elsewhere = external.parts()
    async with AsyncExitStack() as stack:
        store = await DocumentStore.open(records)
        stack.push_async_callback(store.close)
        loaded, marks = await store.run(
            lambda database: (load(database), marks_of(database, elsewhere) if follows else None)
        )
        aliases, machines = Aliases(store), Machines()
        aliases.take_over(loaded.aliases)
        for _, _, cluster in loaded.clusters:
            machines.keep(cluster)
        memory = Memory(aliases, elsewhere)
        stack.callback(memory.index.close)
        memory.take_over(loaded)
        blocks = EmbeddedBlocks(store)
        stack.callback(blocks.close)
        for kind, entries in loaded.blocks.items():
            blocks.take_over(kind, entries)
        catalog = Catalog(
            clusters=EmbeddedClusters(store, memory, machines),
            metrics=EmbeddedMetrics(store, memory),
            blocks=blocks,
            policies=EmbeddedPolicies(store, memory, aliases, sources),
            search=ClusterSearch(memory.index),
            freshness=AlwaysFresh(),
            memory=memory,
            aliases=aliases,
            executors=Executors(store),
            contexts=KeptContexts(store),
            warnings=store.warnings,
            closing=stack,
            following=FollowedRecords(store, memory, aliases, blocks, marks) if marks else None,
        )
        if external:
            mirrors = _Mirrors(catalog, external, stack)
            catalog = replace(
                catalog,
                clusters=mirrors.clusters() or catalog.clusters,
                metrics=mirrors.metrics() or catalog.metrics,
                blocks=mirrors.blocks(blocks) or blocks,
                policies=mirrors.policies(sources) or catalog.policies,
                search=mirrors.search() or catalog.search,
                freshness=mirrors.freshness(),
            )
            await mirrors.first_read()
        return replace(catalog, closing=stack.pop_all())


class _Mirrors:
    """The mirrors of the configured services, which are closed with the catalog."""

    def __init__(self, catalog: Catalog, external: External, stack: AsyncExitStack) -> None:
        self._catalog = catalog
        self._memory = catalog.memory
        self._external = external
        self._stack = stack
        self._clusters: ClusterMirror | None = None
        self._metrics: MetricsMirror | None = None
        self._policies: PolicyMirror | None = None
        self._searches = False

    def clusters(self) -> MirroredClusters | None:
        service, memory = self._external.service("clusters"), self._memory
        if service is None:
            return None
        mirror = self._clusters = ClusterMirror(
            ClusterRegistry(service),
            memory,
            refresh_seconds=self._external.cluster_refresh_seconds,
            stale_seconds_max=self._external.stale_seconds_max,
            first_read=lambda: memory.report(ClustersListed(memory.cluster_ids())),
        )
        self._stack.push_async_callback(mirror.close)
        return MirroredClusters(memory, mirror)

    def metrics(self) -> MirroredMetrics | None:
        service = self._external.service("metrics")
        if service is None:
            return None
        mirror = self._metrics = MetricsMirror(
            MetricsService(service),
            self._memory,
            fresh_seconds=self._external.metrics_fresh_seconds,
        )
        self._stack.push_async_callback(mirror.close)

        def forget(change: CatalogChange) -> None:
            if isinstance(change, ClusterDeleted):
                mirror.forget(change.cluster_id)

        self._memory.listeners.append(forget)
        return MirroredMetrics(self._memory, mirror)

    def blocks(self, embedded: EmbeddedBlocks) -> MirroredBlocks | None:
        service = self._external.service("block_metrics")
        if service is None:
            return None
        embedded.keep_metrics({})
        mirror = BlockMetricsMirror(
            service,
            lambda document: check_block("block_metrics", document),
            embedded.keep_metrics,
            fresh_seconds=self._external.metrics_fresh_seconds,
        )
        self._stack.push_async_callback(mirror.close)
        return MirroredBlocks(embedded, mirror)

    def policies(self, sources: CodeSources) -> MirroredPolicies | None:
        service, memory = self._external.service("policies"), self._memory
        if service is None:
            return None

        async def prepare(document: Document) -> PolicyRecord:
            return (await prepare_policy(sources, document)).record

        def keep(record: PolicyRecord) -> None:
            memory.keep_policy(PolicyEntry(record, len(msgspec.json.encode(record.document))))

        mirror = self._policies = PolicyMirror(
            PolicyStore(service),
            prepare=prepare,
            keep=keep,
            drop=memory.drop_policy,
            fresh_seconds=self._external.policy_fresh_seconds,
            stale_seconds_max=self._external.stale_seconds_max,
        )
        self._stack.push_async_callback(mirror.close)
        return MirroredPolicies(memory, mirror, self._catalog.aliases, sources)

    def search(self) -> ClusterSearch | None:
        service = self._external.service("search")
        if service is None:
            return None
        self._searches = True
        self._stack.push_async_callback(service.close)
        return ClusterSearch(self._memory.index, SearchService(service).find)

    def freshness(self) -> MirroredFreshness:
        return MirroredFreshness(
            memory=self._memory,
            aliases=self._catalog.aliases,
            clusters=self._clusters,
            metrics=self._metrics,
            policies=self._policies,
            searches=self._searches,
        )

    async def first_read(self) -> None:
        if self._clusters is not None:
            with contextlib.suppress(ServiceError):  # Requests report the failure.
                await self._clusters.read_soon()


class AlwaysFresh:
    """Implements `catalog.ports.Freshness` for a catalog that mirrors no service."""

    registry_known = True

    async def keep_fresh(self, examine: Examine) -> None:
        del examine

    def at_hand(self, uri: str, cluster_ids: Sequence[str] | None) -> list[str] | None:
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
        del uri, cluster_ids, allowance, searching
        return []

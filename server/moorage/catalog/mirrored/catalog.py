"""The catalog of a site with services of its own: some parts mirror those, others are embedded.

The daemon opens it where the configuration names an external service. Mirrored documents lie in the
same memory as embedded ones, and everything that reads them (the hot path, filters, the cells) is
the embedded catalog's own code; what differs is how they get there (`catalog.mirrored.clusters`),
and that a mirrored part is written to where it is kept, not here.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from moorage.catalog.allowances import Allowance
from moorage.catalog.changes import (
    CatalogChange,
    ClusterDeleted,
    ClusterPut,
    ClustersListed,
    MetricsDeleted,
    PolicyDeleted,
)
from moorage.catalog.documents.encoding import cluster_id_of
from moorage.catalog.documents.policies import is_policy_uri
from moorage.catalog.embedded.catalog import EmbeddedCatalog
from moorage.catalog.embedded.records import DocumentEntry, PolicyEntry, aggregated, not_found
from moorage.catalog.filters import compile_filter
from moorage.catalog.mirrored.clusters import ClusterMirror, MetricsMirror
from moorage.catalog.mirrored.http import Service, without_credentials
from moorage.catalog.mirrored.policies import PolicyMirror
from moorage.catalog.mirrored.services import (
    ClusterFound,
    ClusterRegistry,
    MetricsService,
    PolicyStore,
    SearchService,
)
from moorage.catalog.values import (
    Document,
    DocumentKind,
    PolicyRecord,
    PreparedPolicy,
    SearchAction,
)
from moorage.model import ClusterId, Code
from moorage.protocol.faults import ServiceError

__all__ = ["External", "MixedCatalog"]

EXTERNAL_NAMES: Final = {
    "clusters": "cluster registry",
    "metrics": "cluster metrics service",
    "block_metrics": "block metrics service",
    "search": "search service",
    "policies": "policy store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class External:
    """Which services are external, and how old what they said may be.

    Args:
        clusters: Base URL of the cluster registry; empty: the embedded one.
        metrics: Of the cluster metrics service.
        block_metrics: Of the block metrics service.
        search: Of the search service.
        policies: Of the policy store.
        timeout_seconds: The whole of one question, repetitions included.
        cluster_refresh_seconds: The registry is read this often.
        metrics_fresh_seconds: Metrics older than this are asked for again.
        policy_fresh_seconds: Policies older than this are asked for again.
        stale_seconds_max: How long clusters and policies are served, with a warning, while their
            service does not answer.

    """

    clusters: str = ""
    metrics: str = ""
    block_metrics: str = ""
    search: str = ""
    policies: str = ""
    timeout_seconds: float = 5.0
    cluster_refresh_seconds: float = 30.0
    metrics_fresh_seconds: float = 5.0
    policy_fresh_seconds: float = 30.0
    stale_seconds_max: float = 300.0

    def __bool__(self) -> bool:
        """Return whether any service is external."""
        return any(getattr(self, part) for part in EXTERNAL_NAMES)

    def service(self, part: str) -> Service | None:
        """Return the external service for a part, or None where it is embedded."""
        url: str = getattr(self, part)
        return Service(EXTERNAL_NAMES[part], url, self.timeout_seconds) if url else None


class MixedCatalog(EmbeddedCatalog):
    """A `catalog.ports.Catalog` with external parts. Make one with `await open_mixed(path, …)`."""

    _mirrored_clusters: ClusterMirror | None = None
    _mirrored_metrics: MetricsMirror | None = None
    _mirrored_policies: PolicyMirror | None = None
    _external_search: SearchService | None = None
    _external: External = External()
    _following = False

    @classmethod
    async def open_mixed(
        cls,
        path: Path,
        on_change: Callable[[CatalogChange], None],
        *,
        external: External,
        examine: Callable[[PolicyRecord], Awaitable[str]],
        code_root: Path | None = None,
        code_hosts: frozenset[str] | None = None,
    ) -> Self:
        """Open as `EmbeddedCatalog.open` does, and read the external registry for the first time.

        Where the registry does not answer, the catalog opens all the same: asks are refused with
        `unavailable` until it does. `examine` is as `PolicyMirror` takes it.
        """
        catalog = await cls.open(path, on_change, code_root, code_hosts)
        try:
            await catalog.connect(external, examine)
        except BaseException:
            await catalog.close()
            raise
        return catalog

    async def connect(
        self, external: External, examine: Callable[[PolicyRecord], Awaitable[str]]
    ) -> None:
        """Put mirrors in the place of the parts that are external; once, right after opening."""
        self._external = external
        if service := external.service("search"):
            self._external_search = SearchService(service)
        if service := external.service("policies"):
            self._policies.clear()
            self._mirrored_policies = PolicyMirror(
                PolicyStore(service),
                prepare=self._prepared,
                keep=self._keep_policy,
                drop=self._drop_policy,
                examine=examine,
                fresh_seconds=external.policy_fresh_seconds,
                stale_seconds_max=external.stale_seconds_max,
            )
        if service := external.service("metrics"):
            self._metrics.clear()
            self._mirrored_metrics = MetricsMirror(
                MetricsService(service), self, fresh_seconds=external.metrics_fresh_seconds
            )
        if service := external.service("block_metrics"):
            self.blocks.connect(service, external.metrics_fresh_seconds)
        if service := external.service("clusters"):
            for cluster_id in self.cluster_ids():
                self.drop_cluster(cluster_id)
            self._mirrored_clusters = ClusterMirror(
                ClusterRegistry(service),
                self,
                refresh_seconds=external.cluster_refresh_seconds,
                stale_seconds_max=external.stale_seconds_max,
                first_read=self._first_read,
            )
            with contextlib.suppress(ServiceError):  # Every ask is told so until it answers.
                await self._mirrored_clusters.read_soon()

    async def close(self) -> None:
        """See `Catalog.close`."""
        for part in (self._mirrored_clusters, self._mirrored_metrics, self._mirrored_policies):
            if part is not None:
                await part.close()
        if self._external_search is not None:
            await self._external_search.service.close()
        await super().close()

    # The memory that the mirrors fill -------------------------------------------------------

    def cluster_ids(self) -> frozenset[ClusterId]:
        """See `catalog.mirrored.clusters.ClusterMemory`."""
        return frozenset(entry.id for entry in self._clusters.values())

    def keep_found(self, found: ClusterFound) -> None:
        """See `catalog.mirrored.clusters.ClusterMemory`."""
        self._keep_cluster(found.entry, live=found.live)
        self._report(ClusterPut(found.cluster, found.live))

    def drop_cluster(self, cluster_id: ClusterId) -> None:
        """See `catalog.mirrored.clusters.ClusterMemory`."""
        if self._clusters.pop(cluster_id, None) is not None:
            self._live.discard(cluster_id)
            self._live_ids = None
            self._touch(cluster_id)
            self._versions.pop(cluster_id, None)
            self._report(ClusterDeleted(cluster_id))
            if self._mirrored_metrics is not None:
                self._mirrored_metrics.forget(cluster_id)

    def keep_metrics(self, entry: DocumentEntry) -> None:
        """See `catalog.mirrored.clusters.MetricsMemory`."""
        self._publish_metrics(entry)

    def drop_metrics(self, cluster_id: ClusterId) -> None:
        """See `catalog.mirrored.clusters.MetricsMemory`."""
        if self._metrics.pop(cluster_id, None) is not None:
            self._touch(cluster_id)
            self._report(MetricsDeleted(cluster_id))

    def _keep_policy(self, record: PolicyRecord) -> None:
        self._publish_policy(PolicyEntry(record, len(msgspec.json.encode(record.document))))

    def _drop_policy(self, uri: str) -> None:
        if self._policies.pop(uri, None) is not None:
            self._report(PolicyDeleted(uri))

    def _first_read(self) -> None:
        self._report(ClustersListed(self.cluster_ids()))

    def _report(self, change: CatalogChange) -> None:
        # Before it is followed, nobody has been told what there is, so nothing has changed.
        if self._following:
            self._on_change(change)

    # What an ask needs ----------------------------------------------------------------------

    async def keep_fresh(self) -> None:
        """See `Catalog.keep_fresh`."""
        self._following = True
        async with asyncio.TaskGroup() as group:
            if self._mirrored_clusters is not None:
                group.create_task(self._mirrored_clusters.run())
            if self._mirrored_policies is not None:
                group.create_task(self._mirrored_policies.run())
                group.create_task(self._mirrored_policies.examine())

    @property
    def registry_known(self) -> bool:
        """See `Catalog.registry_known`."""
        mirror = self._mirrored_clusters
        return mirror is None or mirror.read_at is not None

    def at_hand(self, uri: str, cluster_ids: Sequence[str] | None) -> list[str] | None:
        """See `Catalog.at_hand`."""
        uri, warnings = self.aliases.meaning(uri), list[str]()
        wanted = cluster_ids is None or len(cluster_ids) > 0
        if self._mirrored_policies is not None and is_policy_uri(uri):
            found = self._mirrored_policies.at_hand(uri)
            if found is None:
                return None
            warnings += found
        if self._mirrored_clusters is not None and wanted:
            found = self._mirrored_clusters.at_hand(cluster_ids)
            if found is None:
                return None
            warnings += found
        if self._mirrored_metrics is not None and wanted:
            found = self._mirrored_metrics.at_hand(self._measured(cluster_ids))
            if found is None:
                return None
            warnings += found
        return warnings

    async def fetch(
        self,
        uri: str,
        cluster_ids: Sequence[str] | None,
        allowance: Allowance,
        *,
        searching: bool = False,
    ) -> list[str]:
        """See `Catalog.fetch`."""
        uri, warnings = self.aliases.meaning(uri), list[str]()
        policies, clusters = self._mirrored_policies, self._mirrored_clusters
        metrics = self._mirrored_metrics
        wanted = cluster_ids is None or len(cluster_ids) > 0
        # One after the other: what the first refuses, the others need not be asked for.
        if policies is not None and is_policy_uri(uri):
            reserved = 0
            if searching:
                reserved = (self._external_search is not None) + (metrics is not None)
            elif wanted:
                reserved += clusters is not None and clusters.at_hand(cluster_ids) is None
                reserved += metrics is not None and (
                    metrics.at_hand(self._measured(cluster_ids)) is None
                )
            warnings += await policies.fetch(uri, allowance, reserved)
        if clusters is not None and wanted:
            warnings += await clusters.fetch(cluster_ids, allowance)
        if metrics is not None and wanted:
            warnings += await metrics.fetch(self._measured(cluster_ids), allowance)
        return warnings

    def _measured(self, cluster_ids: Sequence[str] | None) -> Sequence[str]:
        """Return the clusters whose metrics an ask needs: those that can be its candidates."""
        if cluster_ids is None:
            return self.live_ids()
        return [name for name in cluster_ids if name in self._live]

    async def search(
        self, action: SearchAction, body: Document, allowance: Allowance
    ) -> list[ClusterId] | None:
        """See `Catalog.search`."""
        if self._external_search is None:
            return None
        spent = allowance.spend()
        assert spent, "a search comes after a policy at most"
        return await self._external_search.find(action, body)

    # Reading what is mirrored ---------------------------------------------------------------

    async def get_cluster(self, cluster_id: str) -> Document:
        """See `Catalog.get_cluster`."""
        if self._mirrored_clusters is not None:
            await self._mirrored_clusters.fetch([cluster_id_of(cluster_id, "id")], Allowance())
        return await super().get_cluster(cluster_id)

    def packed(self, kind: DocumentKind, cluster_ids: Iterable[str]) -> dict[str, bytes]:
        """See `Catalog.packed`. What is mirrored may be older than an answer may be."""
        mirrored = self._mirrored_clusters if kind == "cluster" else self._mirrored_metrics
        return super().packed(kind, cluster_ids) if mirrored is None else {}

    async def query_clusters(self, query: Document) -> list[Document]:
        """See `Catalog.query_clusters`."""
        if self._mirrored_clusters is not None:
            await self._mirrored_clusters.fetch(None, Allowance())
        return await super().query_clusters(query)

    async def get_metrics(self, cluster_id: str) -> Document:
        """See `Catalog.get_metrics`."""
        if self._mirrored_metrics is None:
            return await super().get_metrics(cluster_id)
        name = cluster_id_of(cluster_id, "id")
        if self.known(name):
            await self._mirrored_metrics.require(name)
            return await super().get_metrics(name)
        # Nothing is remembered of clusters that nobody knows: there is no end of their ids.
        read = await self._mirrored_metrics.service.named([name], {})
        if name not in read.found:
            raise not_found("metrics", name)
        return read.found[name][0].document

    async def query_metrics(self, query: Document | None = None) -> list[Document]:
        """See `Catalog.query_metrics`."""
        if self._mirrored_metrics is None:
            return await super().query_metrics(query)
        compile_filter(query or {})  # Nothing that it refuses is passed on.
        return await self._mirrored_metrics.service.matching(query or {})

    async def aggregate_metrics(self, stages: Any) -> list[Document]:
        """See `Catalog.aggregate_metrics`."""
        if self._mirrored_metrics is None:
            return await super().aggregate_metrics(stages)
        documents = await self._mirrored_metrics.service.matching({})
        return await self._search.run(lambda: aggregated(stages, documents))

    async def get_policy(self, uri: str) -> Document:
        """See `Catalog.get_policy`."""
        uri = self.aliases.meaning(uri)
        if is_policy_uri(uri):
            await self.fetch(uri, (), Allowance())
        return await super().get_policy(uri)

    async def query_policies(self, query: Document | None = None) -> list[Document]:
        """See `Catalog.query_policies`."""
        if self._mirrored_policies is None:
            return await super().query_policies(query)
        compile_filter(query or {})
        return await self._mirrored_policies.store.matching(query or {})

    async def _prepared(self, document: Document) -> PolicyRecord:
        return (await self.prepare_policy(document)).record

    # Writing: to the service that keeps it, not to the mirror ---------------------------------

    async def create_cluster(self, document: Document) -> Document:
        """See `Catalog.create_cluster`."""
        self._refuse_mirrored(self._mirrored_clusters, "clusters")
        return await super().create_cluster(document)

    async def update_cluster(self, cluster_id: str, change: Document) -> Document:
        """See `Catalog.update_cluster`."""
        self._refuse_mirrored(self._mirrored_clusters, "clusters")
        return await super().update_cluster(cluster_id, change)

    async def delete_cluster(self, cluster_id: str) -> Document:
        """See `Catalog.delete_cluster`."""
        self._refuse_mirrored(self._mirrored_clusters, "clusters")
        document = await super().delete_cluster(cluster_id)
        if self._mirrored_metrics is not None:
            self._mirrored_metrics.forget(cluster_id)
        return document

    async def put_metrics(self, document: Document) -> tuple[Document, bool]:
        """See `Catalog.put_metrics`."""
        self._refuse_mirrored(self._mirrored_metrics, "metrics")
        return await super().put_metrics(document)

    async def update_metrics(self, cluster_id: str, change: Document) -> Document:
        """See `Catalog.update_metrics`."""
        self._refuse_mirrored(self._mirrored_metrics, "metrics")
        return await super().update_metrics(cluster_id, change)

    async def delete_metrics(self, cluster_id: str) -> Document:
        """See `Catalog.delete_metrics`."""
        self._refuse_mirrored(self._mirrored_metrics, "metrics")
        return await super().delete_metrics(cluster_id)

    async def register_policy(self, prepared: PreparedPolicy, who: str = "") -> PolicyRecord:
        """See `Catalog.register_policy`."""
        self._refuse_mirrored(self._mirrored_policies, "policies")
        return await super().register_policy(prepared, who)

    async def update_policy(self, uri: str, change: Document, who: str = "") -> Document:
        """See `Catalog.update_policy`."""
        self._refuse_mirrored(self._mirrored_policies, "policies")
        return await super().update_policy(uri, change, who)

    async def delete_policy(self, uri: str, who: str = "") -> Document:
        """See `Catalog.delete_policy`."""
        self._refuse_mirrored(self._mirrored_policies, "policies")
        return await super().delete_policy(uri, who)

    async def policy_history(self, uri: str) -> list[Document]:
        """See `Catalog.policy_history`."""
        self._refuse_mirrored(self._mirrored_policies, "policies")
        return await super().policy_history(uri)

    def _refuse_mirrored(self, mirror: object | None, part: str) -> None:
        if mirror is not None:
            url = without_credentials(getattr(self._external, part))
            raise ServiceError(
                Code.UNSUPPORTED,
                f"This server reads its {part} from {url}; change them there.",
                expected=f"a request to {url}",
            )

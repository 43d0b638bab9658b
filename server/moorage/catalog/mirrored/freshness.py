"""Decides whether a request may use copied documents, or must read them again first."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from moorage.catalog.allowances import Allowance
from moorage.catalog.documents.policies import is_policy_uri
from moorage.catalog.embedded.aliases import Aliases
from moorage.catalog.embedded.memory import Memory
from moorage.catalog.mirrored.clusters import ClusterMirror, MetricsMirror
from moorage.catalog.mirrored.policies import PolicyMirror
from moorage.catalog.values import Examine


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredFreshness:
    """Keeps the documents of all mirrors fresh; implements `catalog.ports.Freshness`.

    Args:
        memory: The store of the documents that the mirrors have read.
        aliases: Names that may stand for a policy's URI.
        clusters: Mirror of the registry; None: clusters are embedded.
        metrics: Mirror of the metrics service; None: metrics are embedded.
        policies: Mirror of the policy store; None: policies are embedded.
        searches: Whether an external service carries out searches.
    """

    memory: Memory
    aliases: Aliases
    clusters: ClusterMirror | None
    metrics: MetricsMirror | None
    policies: PolicyMirror | None
    searches: bool

    async def keep_fresh(self, examine: Examine) -> None:
        async with asyncio.TaskGroup() as group:
            if self.clusters is not None:
                group.create_task(self.clusters.run())
            if self.policies is not None:
                group.create_task(self.policies.run())
                group.create_task(self.policies.examine(examine))

    @property
    def registry_known(self) -> bool:
        return self.clusters is None or self.clusters.read_at is not None

    def at_hand(self, uri: str, cluster_ids: Sequence[str] | None) -> list[str] | None:
        uri, warnings = self.aliases.meaning(uri), list[str]()
        wanted = cluster_ids is None or len(cluster_ids) > 0
        if self.policies is not None and is_policy_uri(uri):
            found = self.policies.at_hand(uri)
            if found is None:
                return None
            warnings += found
        if self.clusters is not None and wanted:
            found = self.clusters.at_hand(cluster_ids)
            if found is None:
                return None
            warnings += found
        if self.metrics is not None and wanted:
            found = self.metrics.at_hand(self._ids_to_measure(cluster_ids))
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
        uri, warnings = self.aliases.meaning(uri), list[str]()
        clusters, metrics = self.clusters, self.metrics
        wanted = cluster_ids is None or len(cluster_ids) > 0
        # In sequence: if the first is refused, the others need not be read.
        if self.policies is not None and is_policy_uri(uri):
            reserved = 0
            if searching:
                reserved = self.searches + (metrics is not None)
            elif wanted:
                reserved += clusters is not None and clusters.at_hand(cluster_ids) is None
                reserved += metrics is not None and (
                    metrics.at_hand(self._ids_to_measure(cluster_ids)) is None
                )
            warnings += await self.policies.fetch(uri, allowance, reserved)
        if clusters is not None and wanted:
            warnings += await clusters.fetch(cluster_ids, allowance)
        if metrics is not None and wanted:
            warnings += await metrics.fetch(self._ids_to_measure(cluster_ids), allowance)
        return warnings

    def _ids_to_measure(self, cluster_ids: Sequence[str] | None) -> Sequence[str]:
        """Return the live clusters that a request may use, and whose metrics it needs."""
        if cluster_ids is None:
            return self.memory.live_ids()
        return [name for name in cluster_ids if self.memory.is_live(name)]

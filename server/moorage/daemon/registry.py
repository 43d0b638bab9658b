"""Turns changes of the registry into events of the core, and into news for the cells."""

from collections.abc import Set as AbstractSet
from typing import assert_never

from moorage.catalog.changes import (
    CatalogChange,
    ClusterDeleted,
    ClusterPut,
    ClustersListed,
    MetricsDeleted,
    MetricsPut,
    PolicyDeleted,
    PolicyPut,
)
from moorage.catalog.ports import Catalog
from moorage.catalog.values import PolicyRecord
from moorage.core.state.state import State
from moorage.core.turns.events import ClusterGone, ClusterSeen
from moorage.daemon.inbox import Inbox
from moorage.daemon.news.watchers import Watchers
from moorage.daemon.publishing.vetting import examine
from moorage.model import ClusterId
from moorage.sandbox.host.sandbox import Sandbox


class RegistryChanges:
    """Passes changes of the catalog to the core and the cells.

    Args:
        catalog: The open catalog, to whose changes nothing listens yet.
        sandbox: The sandbox, whose cells keep documents.
        state: The core's state; read only.
        watchers: The clients that get news of policies that fail their own examples.
    """

    def __init__(
        self, catalog: Catalog, sandbox: Sandbox, state: State, inbox: Inbox, watchers: Watchers
    ) -> None:
        self._catalog = catalog
        self._sandbox = sandbox
        self._state = state
        self._inbox = inbox
        self._watchers = watchers

    def reconcile(self) -> None:
        """Update the core before the first request, and pass on changes from then on."""
        live = {cluster.id: cluster for cluster in self._catalog.memory.models()}
        if self._catalog.freshness.registry_known:
            self._all_but(live.keys())
        for cluster in live.values():
            self._inbox.post(ClusterSeen(cluster))
        self._catalog.memory.listeners.insert(0, self._apply_change)

    async def keep_fresh(self) -> None:
        """Refresh the catalog from the services that it mirrors. Runs until cancelled."""
        await self._catalog.freshness.keep_fresh(self._examine)

    def _apply_change(self, change: CatalogChange) -> None:
        match change:
            case ClusterPut(cluster, live):
                self._sandbox.drop_documents(cluster.id)
                self._inbox.post(ClusterSeen(cluster) if live else ClusterGone(cluster.id))
            case ClusterDeleted(cluster_id):
                self._sandbox.drop_documents(cluster_id)
                self._inbox.post(ClusterGone(cluster_id))
            case ClustersListed(cluster_ids):
                self._all_but(cluster_ids)
            case MetricsPut(cluster_id) | MetricsDeleted(cluster_id):
                self._sandbox.drop_documents(cluster_id)
            case PolicyPut():
                pass  # Admission looks policies up again for every ask.
            case PolicyDeleted(uri):
                self._sandbox.forget_contexts(uri)
            case _:
                assert_never(change)

    def _all_but(self, cluster_ids: AbstractSet[ClusterId]) -> None:
        """Remove all clusters that are not in `cluster_ids` from the core."""
        for cluster_id in self._state.clusters.keys() - cluster_ids:
            self._inbox.post(ClusterGone(cluster_id))

    async def _examine(self, record: PolicyRecord) -> str:
        if doubt := await examine(self._sandbox, record):
            self._watchers.warn_of_examples(record.ref, doubt)
        return doubt

"""Keeps the documents of the configured clusters up to date, and reports drift from leases.

`kind` runs it if the setting `kubernetes_clusters` names clusters. An unreachable cluster stays
registered, with the reason in `unavailable`: its leases continue, and it gets no new leases.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import structlog
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from moorage.backends.base import BackendError
from moorage.backends.kubernetes.drift import Drift, drifts
from moorage.backends.kubernetes.errors import KubernetesError
from moorage.backends.kubernetes.following import ClusterFollower, ClusterSource
from moorage.backends.kubernetes.identity import server_name
from moorage.backends.registry import Inventory
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.protocol.registry import Document
from moorage.records.json_values import JsonObject
from moorage.records.rights import SERVER_ITSELF

log = structlog.get_logger("moored")

_UNREAD: Final = "not read yet"


class FollowedClusters:
    """Follows the clusters of the setting `kubernetes_clusters`.

    Args:
        contexts: Contexts of the kubeconfig, by cluster id.
        kubeconfig: Path of the kubeconfig; None: the usual one.
        inventory: Arguments from the daemon: documents, leases, and a function for news of drift.
    """

    def __init__(
        self, contexts: Mapping[str, str], kubeconfig: Path | None, inventory: Inventory
    ) -> None:
        self._sources = [ClusterSource(*each, kubeconfig) for each in contexts.items()]
        self._inventory = inventory
        self._stale = dict.fromkeys(contexts, _UNREAD)
        self._registered: dict[str, bool] = {}
        self._unregistered: JsonObject = {}
        self._drifts: dict[str, dict[Any, Drift]] = {}

    def start(self) -> None:
        """Start to follow the clusters.

        Raises:
            BackendError: This server's name cannot be read.
        """
        try:
            name = server_name(self._inventory.data_dir / "kubernetes")
        except KubernetesError as error:
            raise BackendError(str(error)) from error
        for source in self._sources:
            self._inventory.spawn(self._follow(source, name))
        self._inventory.watch(self.metrics)

    def metrics(self) -> Iterable[Metric]:
        """Yield metrics: which clusters' documents are current, and the drift from leases."""
        fresh = GaugeMetricFamily(
            "moorage_cluster_fresh", "The stored cluster is up to date", labels=["cluster"]
        )
        for name, why in self._stale.items():
            fresh.add_metric([name], float(not why))
        yield fresh
        drift = GaugeMetricFamily(
            "moorage_drift",
            "The differences between leases and the cluster",
            labels=["cluster", "kind"],
        )
        for name, found in self._drifts.items():
            for kind, count in Counter(each.kind for each in found.values()).items():
                drift.add_metric([name, kind], count)
        yield drift

    async def _follow(self, source: ClusterSource, server: str) -> None:
        cluster_id = source.cluster_id
        follower = ClusterFollower(source, server, lambda: self._leased_devices(cluster_id))
        async for view in follower.views():
            # A document that the registry refused is written again with the next view.
            document = view.document or self._unregistered.pop(cluster_id, None)
            try:
                await self._register(cluster_id, document, view.stale)
            except ServiceError as error:
                self._unregistered[cluster_id] = document
                self._note(cluster_id, f"it cannot be registered: {error.reason}")
            if view.machines is not None:
                self._tell_drift(cluster_id, view.machines)

    def _leased_devices(self, cluster_id: str) -> dict[str, set[str]]:
        """Return the ids of a cluster's devices that leases hold, by node."""
        held: dict[str, set[str]] = {}
        for lease in self._inventory.state.leases.values():
            for share in lease.placement:
                if share.cluster_id == cluster_id and share.gpus:
                    held.setdefault(share.node_id, set()).update(share.gpus)
        return held

    async def _register(self, cluster_id: str, document: JsonObject | None, stale: str) -> None:
        if document is not None:
            await self._put(cluster_id, document | {"unavailable": stale})
        elif self._registered.get(cluster_id) != bool(stale):
            # The nodes in the cluster's document stay unchanged.
            await self._put(cluster_id, {"id": cluster_id, "unavailable": stale})
        self._registered[cluster_id] = bool(stale)
        self._note(cluster_id, stale)

    async def _put(self, cluster_id: str, document: JsonObject) -> None:
        """Create or change a cluster's document; fields of other writers stay."""
        clusters = self._inventory.documents
        try:
            await clusters.update(cluster_id, document)
        except ServiceError as error:
            if error.code != Code.NOT_FOUND:
                raise
            await clusters.create(document, SERVER_ITSELF)

    def _note(self, cluster_id: str, stale: str) -> None:
        before, self._stale[cluster_id] = self._stale[cluster_id], stale
        if stale and (not before or before == _UNREAD):
            finding = f"the cluster's document is out of date: {stale}"
            log.warning("cluster_outdated", cluster=cluster_id, finding=finding)
        elif before and not stale:
            finding = "the cluster's document is up to date"
            log.info("cluster_current", cluster=cluster_id, finding=finding)

    def _tell_drift(self, cluster_id: str, machines: Mapping[str, Document]) -> None:
        found = drifts(self._inventory.state.leases.values(), cluster_id, machines)
        now = {(each.lease, each.node, each.kind): each for each in found}
        before = self._drifts.get(cluster_id, {})
        self._drifts[cluster_id] = now
        for over, keys in ((False, now.keys() - before.keys()), (True, before.keys() - now.keys())):
            for key in sorted(keys):
                each = before[key] if over else now[key]
                finding = f"no longer: {each.detail}" if over else each.detail
                (log.info if over else log.warning)(
                    "lease_drifted", lease=each.lease, cluster=cluster_id, finding=finding
                )
                news: JsonObject = {
                    "id": each.lease,
                    "cluster_id": cluster_id,
                    "node_id": each.node,
                }
                news |= {"kind": each.kind, "detail": each.detail, "over": over}
                self._inventory.tell("leases", "drift", news, each.tenant)

"""Clusters that the daemon follows by itself: their documents, and what leases say that is not so.

`start` runs it where the setting `kubernetes_clusters` names any. A cluster that cannot be reached
stays registered and says why nothing can start there: its leases stand, and none is added.
"""

from collections.abc import Iterable
from typing import Any, Final

import structlog
from prometheus_client.metrics_core import Metric

from moorage.backends.base import BackendError
from moorage.catalog.ports import Catalog
from moorage.config.settings import Config
from moorage.core.state.state import State
from moorage.daemon.news.watchers import Watchers
from moorage.daemon.observability.counters import gauges, gauges_of
from moorage.daemon.tasks import Tasks
from moorage.extras import install_command
from moorage.model import Code
from moorage.protocol.faults import ServiceError

log = structlog.get_logger("moored")

_NONE: Final[dict[str, Any]] = {}
_UNREAD: Final = "not read yet"


class FollowedClusters:
    """The clusters that `kubernetes_clusters` names.

    Args:
        catalog: Has their documents.
        state: Has the leases; read only.
        watchers: Are told of drift.

    """

    def __init__(self, catalog: Catalog, state: State, watchers: Watchers) -> None:
        self._catalog = catalog
        self._state = state
        self._watchers = watchers
        self._stale: dict[str, str] = {}
        self._registered: dict[str, bool] = {}
        self._unregistered: dict[str, Any] = {}
        self._drifts: dict[str, dict[Any, Any]] = {}

    def start(self, config: Config, tasks: Tasks) -> None:
        """Follow them from now on.

        Raises:
            BackendError: What that needs is not installed, or cannot be read.

        """
        try:
            from moorage.backends.kubernetes.errors import (  # noqa: PLC0415  # It needs an extra.
                KubernetesError,
            )
            from moorage.backends.kubernetes.following import (  # noqa: PLC0415  # As above.
                ClusterSource,
            )
            from moorage.backends.kubernetes.identity import server_name  # noqa: PLC0415  # As above.
        except ModuleNotFoundError as error:
            way = f"{install_command('kubernetes')}, or leave out kubernetes_clusters"
            raise BackendError(f"following clusters needs {error.name}: {way}") from error
        try:
            name = server_name(config.data_dir / "kubernetes")
        except KubernetesError as error:
            raise BackendError(str(error)) from error
        for cluster_id, context in config.kubernetes_clusters.items():
            self._stale[cluster_id] = _UNREAD
            source = ClusterSource(cluster_id, context, config.kubernetes_config)
            tasks.spawn(self._follow(source, name))

    def metrics(self) -> Iterable[Metric]:
        """Yield which clusters are known as they are, and what leases say that is not so."""
        fresh = ((name, float(not why)) for name, why in self._stale.items())
        yield gauges("moorage_cluster_fresh", "The cluster is known as it is", "cluster", fresh)
        counts: dict[tuple[str, str], float] = {}
        for name, found in self._drifts.items():
            for each in found.values():
                counts[name, each.kind] = counts.get((name, each.kind), 0.0) + 1
        about = "What leases say and the cluster does not"
        yield gauges_of("moorage_drift", about, ["cluster", "kind"], counts.items())

    async def _follow(self, source: Any, server: str) -> None:
        from moorage.backends.kubernetes.following import (  # noqa: PLC0415  # As in `start`.
            ClusterFollower,
        )

        cluster_id = source.cluster_id
        follower = ClusterFollower(source, server, lambda: self._leased(cluster_id))
        async for view in follower.views():
            # What was refused is tried again with the next view.
            document = view.document or self._unregistered.pop(cluster_id, None)
            try:
                await self._register(cluster_id, document, view.stale)
            except ServiceError as error:
                self._unregistered[cluster_id] = document
                self._note(cluster_id, f"it cannot be registered: {error.reason}")
            if view.machines is not None:
                self._tell_drift(cluster_id, view.machines)

    def _leased(self, cluster_id: str) -> dict[str, set[str]]:
        """Return the devices of a cluster that leases hold, by node."""
        held: dict[str, set[str]] = {}
        for lease in self._state.leases.values():
            for share in lease.placement:
                if share.cluster_id == cluster_id and share.gpus:
                    held.setdefault(share.node_id, set()).update(share.gpus)
        return held

    async def _register(self, cluster_id: str, document: Any, stale: str) -> None:
        if document is not None:
            await self._put(cluster_id, document | {"unavailable": stale})
        elif self._registered.get(cluster_id) != bool(stale):
            # Its nodes stay as they were last known.
            await self._put(cluster_id, {"id": cluster_id, "unavailable": stale})
        self._registered[cluster_id] = bool(stale)
        self._note(cluster_id, stale)

    async def _put(self, cluster_id: str, document: Any) -> None:
        """Change a cluster's document: what others have put beside stays."""
        clusters = self._catalog.clusters
        try:
            await clusters.update(cluster_id, document)
        except ServiceError as error:
            if error.code != Code.NOT_FOUND:
                raise
            await clusters.create(document)

    def _note(self, cluster_id: str, stale: str) -> None:
        before, self._stale[cluster_id] = self._stale[cluster_id], stale
        if stale and (not before or before == _UNREAD):
            log.warning("cluster", cluster=cluster_id, finding=f"out of date: {stale}")
        elif before and not stale:
            log.info("cluster", cluster=cluster_id, finding="known as it is")

    def _tell_drift(self, cluster_id: str, machines: Any) -> None:
        from moorage.backends.kubernetes.drift import drifts  # noqa: PLC0415  # As in `start`.

        found = drifts(self._state.leases.values(), cluster_id, machines)
        now = {(each.lease, each.node, each.kind): each for each in found}
        before = self._drifts.get(cluster_id, _NONE)
        self._drifts[cluster_id] = now
        for over, keys in ((False, now.keys() - before.keys()), (True, before.keys() - now.keys())):
            for key in sorted(keys):
                each = before[key] if over else now[key]
                finding = f"no longer: {each.detail}" if over else each.detail
                (log.info if over else log.warning)(
                    "drift", lease=each.lease, cluster=cluster_id, finding=finding
                )
                news = {"id": each.lease, "cluster_id": cluster_id, "node_id": each.node}
                news |= {"kind": each.kind, "detail": each.detail, "over": over}
                self._watchers.tell("leases", "drift", news, each.tenant)

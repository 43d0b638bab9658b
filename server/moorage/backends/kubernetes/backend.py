"""`KubernetesBackend`: runs pods, Jobs and Services in the configured clusters.

All state that must outlive the daemon is at the API servers, in labels and annotations, except the
server's own name (`identity`) and the output of ended pods (`workloads.output`).
"""

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from moorage.backends.base import (
    CommandExecution,
    CommonBackend,
    Log,
    Order,
    Phase,
    Support,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.kubernetes.event_loop import EventLoopThread
from moorage.backends.kubernetes.following import ClusterSource
from moorage.backends.kubernetes.specs import (
    JobResourceSpec,
    PodResourceSpec,
    PodServiceResourceSpec,
)
from moorage.backends.kubernetes.workloads.runs import WorkloadRuns
from moorage.backends.kubernetes.workloads.translation import CATEGORIES, pod_order
from moorage.backends.specs import BaseResourceSpec
from moorage.records.json_values import JsonValue


class KubernetesBackend(CommonBackend):
    """Runs workloads as pods in Kubernetes clusters.

    Args:
        root: Folder for data that must outlive the daemon; a restarted daemon opens it again.
        clusters: The clusters; a workload without a placement goes to the first.
        namespace: Namespace of all objects; `{tenant}` in it stands for the tenant.
    """

    name: Final = "kubernetes"
    _support: Final = Support(
        categories=CATEGORIES,
        default="pod",
        execute=True,
        logs=True,
        gangs=True,
        kinds={each.category: each for each in (PodServiceResourceSpec, JobResourceSpec)},
    )

    def __init__(
        self, root: Path, clusters: Sequence[ClusterSource], namespace: str = "default"
    ) -> None:
        self._namespace = namespace
        self._clusters = frozenset(each.cluster_id for each in clusters)
        self._thread = EventLoopThread("kubernetes")
        self._arguments = (root, clusters, namespace, self._tell)
        self._runs: WorkloadRuns | None = None

    @property
    def support(self) -> Support:
        return replace(self._support, clusters=self._clusters)

    def refuse(self, spec: BaseResourceSpec) -> None:
        wanted = pod_order(spec).namespace
        if wanted and wanted != self._namespace:
            reason = f"expected nothing: this server starts all workloads in {self._namespace}"
            raise UnsupportedSpecError(f"namespace: {reason}")
        if isinstance(spec, PodResourceSpec) and "{tenant}" in self._namespace and wanted:
            raise UnsupportedSpecError("namespace: expected nothing: each tenant has its own")

    async def discover(self) -> Collection[WorkloadReport]:
        return await self._thread.run(self._open().discover())

    async def start(self, order: Order) -> WorkloadReport:
        self.refuse(order.spec)
        return await self._thread.run(self._open().start(order))

    async def stop(self, workload: str, stop_seconds_max: float | None = None) -> None:
        await self._thread.run(self._open().stop(workload, stop_seconds_max))

    async def status(self, workload: str) -> WorkloadReport:
        return await self._thread.run(self._open().status(workload))

    async def probe(self, workload: str) -> WorkloadReport:
        """Return a workload's report; the kubelet probes it continuously. See `Backend.probe`."""
        return await self.status(workload)

    def glance(self, workload: str) -> WorkloadReport | None:
        seen = self._runs.reports.get(workload) if self._runs else None
        return seen if seen is not None and seen.phase is Phase.READY else None

    async def reset(self, workload: str) -> JsonValue:
        """Refuse a reset: only a new container undoes a user's changes."""
        await self.status(workload)
        raise UnsupportedSpecError("a pod cannot be reset; end it and start another")

    async def execute(
        self,
        workload: str,
        command: Sequence[str],
        *,
        timeout_seconds: float | None = None,
        workdir: str | None = None,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> CommandExecution:
        """Run a command in the first pod of a workload; see `Backend.execute`."""
        if user:
            raise UnsupportedSpecError("user: Kubernetes runs commands as the container's own user")
        return await self._thread.run(
            self._open().execute(
                workload, command, timeout_seconds, workdir or "", environment or {}
            )
        )

    async def logs(self, workload: str, offset: int = 0, attempt: int = 0) -> Log:
        """Read the output of the first pod of a workload; see `Backend.logs`."""
        return await self._thread.run(self._open().logs(workload, offset, attempt))

    async def close(self) -> None:
        """Close the connections to the clusters. Pods continue to run."""
        self._listener = None
        runs, self._runs = self._runs, None
        if runs is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._thread.run(runs.close())
        await asyncio.to_thread(self._thread.close)

    def _open(self) -> WorkloadRuns:
        if self._runs is None:
            self._runs = WorkloadRuns(*self._arguments)
        return self._runs

"""Starts and stops workloads in all clusters of a backend, and reports their changes."""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from moorage.backends.base import (
    BackendError,
    BackendUnavailableError,
    CommandExecution,
    Log,
    Order,
    Phase,
    UnknownAttemptError,
    UnknownWorkloadError,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.completion import finish
from moorage.backends.kubernetes.connection import ClusterConnection
from moorage.backends.kubernetes.errors import ConfigurationError, KubernetesError
from moorage.backends.kubernetes.following import ClusterSource
from moorage.backends.kubernetes.identity import server_name
from moorage.backends.kubernetes.workloads.cluster import ClusterWorkloads
from moorage.backends.kubernetes.workloads.commands import execute
from moorage.backends.kubernetes.workloads.manifests import START, start_objects, tenant_namespace
from moorage.backends.kubernetes.workloads.output import PodOutput
from moorage.backends.kubernetes.workloads.states import PodState, Trouble
from moorage.backends.kubernetes.workloads.translation import PodOrder, pod_order

UNSCHEDULABLE_SECONDS_MAX: Final = 5.0
"""Seconds that a pod may be unschedulable, since the node's earlier pods may just be ending."""
SILENCE_SECONDS_MAX: Final = 30.0
"""Seconds that a pod may wait for a missing claim, about which Kubernetes reports nothing."""
SCHEDULER_SECONDS_MAX: Final = 300.0
"""Seconds that the scheduler may report nothing about a complete pod, since it may be busy."""
STOP_SECONDS_MAX: Final = 120.0
"""Longest wait of a stop for its pods' end; then the stop fails, and is tried again."""
UNDO_SECONDS_MAX: Final = 5.0
"""Seconds that a cancelled start waits until its objects are gone; the next stop waits longer."""
LOOK_SECONDS: Final = 1.0
"""Seconds without a change after which deadlines and deleted objects are checked."""


@dataclass(slots=True)
class _Cluster:
    workloads: ClusterWorkloads
    output: PodOutput


class WorkloadRuns:
    """Runs the workloads of one backend, all in one event loop.

    Args:
        root: Folder for data that must outlive the daemon.
        clusters: The clusters; a workload without a placement goes to the first.
        namespace: Namespace of all objects; `{tenant}` in it stands for the tenant.
        tell: Called with a report at every change of a workload.

    Attributes:
        reports: The last report of each workload that starts or runs.
    """

    def __init__(
        self,
        root: Path,
        clusters: Sequence[ClusterSource],
        namespace: str,
        tell: Callable[[WorkloadReport], None],
    ) -> None:
        self.reports: dict[str, WorkloadReport] = {}
        self._root = root
        self._addresses = {each.cluster_id: each for each in clusters}
        self._namespace = namespace
        self._tell = tell
        self._clusters: dict[str, _Cluster] = {}
        self._opening = asyncio.Lock()
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._where: dict[str, str] = {}
        self._running: set[str] = set()
        self._ordered: set[str] = set()
        self._nodes: dict[str, list[str]] = {}
        self._ends: set[asyncio.Task[WorkloadReport]] = set()

    async def close(self) -> None:
        """Close the connections to all clusters. Pods continue to run."""
        for task in self._ends:
            task.cancel()
        for each in self._clusters.values():
            each.output.close()
            await each.workloads.close()

    # Looking -----------------------------------------------------------------------------------

    async def discover(self) -> Collection[WorkloadReport]:
        """Return the workloads in all clusters."""
        found: dict[str, WorkloadReport] = {}
        for cluster_id in self._addresses:
            cluster = (await self._list_cluster(cluster_id)).workloads
            names = cluster.workloads()
            if "{tenant}" not in self._namespace:
                names |= await cluster.jobs(self._namespace)
            for name in names:
                self._where[name] = cluster_id
                seen = cluster.view(name)
                claimed = WorkloadReport(name, Phase.PENDING, detail="it has a claim, and no pod")
                found[name] = seen.report if seen else claimed
        return list(found.values())

    async def status(self, workload: str) -> WorkloadReport:
        """Return the report of a workload now."""
        report = self.reports.get(workload)
        if report is not None and report.phase.over:  # The workload's objects stay until the stop.
            return report
        cluster = await self._cluster_of(workload)
        seen = cluster.workloads.view(workload) if cluster else None
        if seen is None:
            raise UnknownWorkloadError(workload)
        return seen.report

    async def execute(
        self,
        workload: str,
        command: Sequence[str],
        timeout_seconds: float | None,
        workdir: str,
        environment: Mapping[str, str],
    ) -> CommandExecution:
        """Run a command in the first pod of a workload."""
        cluster, pod = await self._first_pod(workload)
        if pod.phase != "Running":
            raise UnknownWorkloadError(workload)
        connection = cluster.workloads.connection
        return await execute(connection, pod, command, timeout_seconds, workdir, environment)

    async def logs(self, workload: str, offset: int, attempt: int) -> Log:
        """Return the output of a workload's first pod, or the stored output of an earlier start."""
        try:
            cluster, pod = await self._first_pod(workload)
        except UnknownWorkloadError:
            return self._output().stored_log(workload, offset, attempt)
        if attempt not in {0, pod.attempt}:
            try:
                return cluster.output.stored_log(workload, offset, attempt)
            except UnknownAttemptError as error:
                raise UnknownAttemptError(workload, (*error.attempts, pod.attempt)) from None
            except UnknownWorkloadError:
                raise UnknownAttemptError(workload, (pod.attempt,)) from None
        try:
            return await cluster.output.read(pod, offset)
        except KubernetesError as error:
            raise BackendError(f"the output of pod {pod.name} cannot be read: {error}") from error

    async def _first_pod(self, workload: str) -> tuple[_Cluster, PodState]:
        cluster = await self._cluster_of(workload)
        pods = cluster.workloads.pods(workload) if cluster else []
        if cluster is None or not pods:
            raise UnknownWorkloadError(workload)
        return cluster, pods[0]

    def _output(self) -> PodOutput:
        """Return a reader of the stored output of ended pods, from the folder of all clusters."""
        for cluster in self._clusters.values():
            return cluster.output
        raise UnknownWorkloadError("")

    async def _cluster_of(self, workload: str) -> _Cluster | None:
        """Return the cluster that has objects of a workload; None if no cluster has any.

        Raises:
            BackendError: A cluster that may have them cannot be read.
        """
        if workload in self._where:
            return await self._list_cluster(self._where[workload])
        for cluster_id in self._addresses:
            cluster = await self._list_cluster(cluster_id)
            if cluster.workloads.has(workload):
                self._where[workload] = cluster_id
                return cluster
        return None

    async def _list_cluster(self, cluster_id: str) -> _Cluster:
        cluster = await self._open_cluster(cluster_id)
        await cluster.workloads.listed()
        return cluster

    async def _open_cluster(self, cluster_id: str) -> _Cluster:
        address = self._addresses.get(cluster_id)
        if address is None:
            known = ", ".join(self._addresses) or "none"
            raise UnsupportedSpecError(
                f"{cluster_id} is not a Kubernetes cluster that this server knows: its setting"
                f" kubernetes_clusters has {known}"
            )
        async with self._opening:
            if cluster_id not in self._clusters:
                try:
                    server = server_name(self._root)
                    connection = await ClusterConnection.open(address.kubeconfig, address.context)
                except KubernetesError as error:
                    reason = f"the Kubernetes cluster {cluster_id} cannot be reached: {error}"
                    unavailable = isinstance(error, ConfigurationError)
                    kind = BackendUnavailableError if unavailable else BackendError
                    raise kind(reason) from error
                workloads = ClusterWorkloads(cluster_id, connection, server, self._report_state)
                output = PodOutput(connection, self._root / "output")
                self._clusters[cluster_id] = _Cluster(workloads, output)
            return self._clusters[cluster_id]

    # Starting ----------------------------------------------------------------------------------

    async def start(self, order: Order) -> WorkloadReport:
        """Start a workload and wait until it is ready."""
        pod = pod_order(order.spec)
        clusters = {share.cluster_id for share in order.placement}
        if len(clusters) > 1:
            raise UnsupportedSpecError(
                "the backend kubernetes starts a workload in one cluster, not in several"
            )
        if not self._addresses:
            raise UnsupportedSpecError(
                "this server follows no Kubernetes cluster: see its setting kubernetes_clusters"
            )
        cluster_id = clusters.pop() if clusters else next(iter(self._addresses))
        trouble: list[str] = []
        cluster = await self._open_cluster(cluster_id)
        self._where[order.id] = cluster_id
        try:
            async with asyncio.timeout(order.timeout_seconds):
                return await self._start(cluster, order, pod, trouble)
        except BaseException as error:
            last = self._last_sign(cluster.workloads, order, trouble)
            if isinstance(error, BackendError):
                self._say(WorkloadReport(order.id, Phase.STARTING, detail=str(error)))
            if order.placement or order.id in self._ordered:
                await self._undone(order.id, gave_up=isinstance(error, asyncio.CancelledError))
            else:  # A new name, and no object was sent: nothing to delete.
                self.reports.pop(order.id, None)
                self._where.pop(order.id, None)
            if isinstance(error, TimeoutError):
                reason = f"it was not ready within {order.timeout_seconds:g} s"
                raise TimeoutError(f"{reason}: {last}") from None
            raise
        finally:
            self._ordered.discard(order.id)

    def _last_sign(self, cluster: ClusterWorkloads, order: Order, trouble: Sequence[str]) -> str:
        """Return a message on why a start took too long, with a command to inspect it."""
        if said := cluster.trouble() or (trouble[-1] if trouble else ""):
            return said
        seen = cluster.view(order.id)
        if seen is None:
            return f"cluster {cluster.cluster_id} has shown none of its pods"
        nodes = [str(share.node_id) for share in order.placement]
        lacks = cluster.missing(order.id, nodes)
        said = f"{seen.report.detail}{': ' if lacks else ''}{lacks}"
        pod = cluster.pods(order.id)[0]
        command = f"kubectl -n {pod.namespace} describe pod -l {START}={pod.start}"
        silence = f"nothing new was heard in the last {cluster.silence(order.id):.0f} s"
        return f"{said}; {silence}: see `{command}`"

    async def _start(
        self, cluster: _Cluster, order: Order, pod: PodOrder, trouble: list[str]
    ) -> WorkloadReport:
        name, known = order.id, cluster.workloads
        async with self._locks[name]:
            if name not in self.reports:
                self._say(
                    WorkloadReport(name, Phase.STARTING, detail=f"ordered at {known.cluster_id}")
                )
            await self._list_patiently(known, trouble)
            self._ordered.add(name)
            pods, gang = known.pods(name), len(order.placement) > 1
            there = _is_whole(pods)
            if order.resumed and (pods or gang) and not there:
                raise BackendError(_lost_pods(pods, [str(x.node_id) for x in order.placement]))
            if not there or pod.port or gang:
                nodes = set() if there else {str(share.node_id) for share in order.placement}
                namespace = pod.namespace or tenant_namespace(self._namespace, order.tenant)
                published = {node: known.published(node) for node in nodes}
                group_api = await known.group_api(trouble) if gang else ""
                objects = start_objects(order, pod, known.server, namespace, published, group_api)
                await known.make(name, objects, there, trouble)
            trouble.clear()  # The API server answers.
        report = await self._ready(cluster, order)
        if report.phase is Phase.READY:
            self._running.add(name)
            self._nodes[name] = [str(share.node_id) for share in order.placement]
            self._say(report)
            self._report_state(name)  # Changes since the last view.
        else:
            report = await self._report_end(cluster, report)
        return report

    async def _list_patiently(self, cluster: ClusterWorkloads, trouble: list[str]) -> None:
        """Wait until a cluster has been read; the caller limits the time."""
        while True:
            try:
                await cluster.listed()
            except BackendError as error:
                trouble.append(str(error))
            else:
                return

    async def _ready(self, cluster: _Cluster, order: Order) -> WorkloadReport:
        """Wait until a workload is ready or has ended, and report its progress.

        Raises:
            BackendError: The workload does not become ready.
        """
        name, known = order.id, cluster.workloads
        nodes = [str(share.node_id) for share in order.placement]
        since: dict[Trouble, float] = {}
        seen_any = False
        while True:
            seen = known.view(name)
            if seen is None and seen_any:
                raise BackendError(f"another client deleted the pods of {name} while it started")
            seen_any = seen_any or seen is not None
            now = time.monotonic()
            trouble = seen.trouble if seen else Trouble.SILENCE
            since = {trouble: since.get(trouble, now)}
            if seen is not None:
                report = seen.report
                if report.phase is Phase.READY:
                    self._check_devices(known, order)
                    return report
                if report.phase.over:
                    return await self._over(cluster, report)
                self._say(report)
                if trouble is Trouble.HOPELESS:
                    raise BackendError(report.detail)
                lasted = now - since[trouble]
                if trouble is Trouble.UNSCHEDULABLE and lasted > UNSCHEDULABLE_SECONDS_MAX:
                    lost = known.missing(name, nodes)
                    raise BackendError(f"{report.detail}{': ' if lost else ''}{lost}")
            if trouble is Trouble.SILENCE:
                self._check_silence(known, name, nodes, now - since[trouble])
            await known.news(name, LOOK_SECONDS)

    def _check_silence(
        self, cluster: ClusterWorkloads, name: str, nodes: Collection[str], lasted: float
    ) -> None:
        """Raise an error if nothing was reported about a workload's pods for too long.

        Raises:
            BackendError: Kubernetes reported nothing for too long.
        """
        if lasted < SILENCE_SECONDS_MAX or cluster.trouble():
            return
        why = cluster.missing(name, nodes)
        if not why and lasted > SCHEDULER_SECONDS_MAX:
            why = "no scheduler answers: see `kubectl describe pod`"
        if why:
            raise BackendError(
                f"Kubernetes reported nothing about {name} for {lasted:.0f} s: {why}"
            )

    async def _over(self, cluster: _Cluster, report: WorkloadReport) -> WorkloadReport:
        """Return the report of an ended workload; raise an error if it was never ready.

        Raises:
            BackendError: The workload was never ready.
        """
        pods = cluster.workloads.pods(report.id)
        failed = report.phase is Phase.FAILED
        if failed and (not all(each.ended for each in pods) or any(each.probed for each in pods)):
            lines = await cluster.output.keep(pods[0]) if pods[0].ended else ()
            said = "; ".join(lines[-3:])
            raise BackendError(f"{report.detail}{': ' if said else ''}{said}")
        return report

    def _check_devices(self, cluster: ClusterWorkloads, order: Order) -> None:
        """Raise an error if a workload's claims have other devices than its lease.

        Raises:
            BackendError: A claim has other devices.
        """
        for share in order.placement:
            published = cluster.published(share.node_id)
            wanted = [published[each] for each in share.gpus if each in published]
            if len(wanted) != len(share.gpus) or not wanted:
                continue  # Devices are only counted, or a claim is gone.
            names = tuple((each["driver"], each["pool"], each["device"]) for each in wanted)
            given = [each.devices for each in cluster.claims(order.id) if each.devices]
            if given and names not in given:
                held = "; ".join(", ".join(map("/".join, each)) for each in given)
                raise BackendError(
                    f"Kubernetes gave {order.id} the devices {held} instead of those of its lease:"
                    " two devices have the same uuid"
                )

    async def _undone(self, workload: str, *, gave_up: bool) -> None:
        """Delete the objects of a failed start, and wait until the objects are gone.

        A failed start waits without a time limit: the devices are not free while a pod may run. A
        cancelled start (`gave_up`) waits at most `UNDO_SECONDS_MAX`: a stop follows, and waits for
        the rest.
        """
        self._running.discard(workload)
        try:
            if not gave_up:
                await self._undo(workload)
        except asyncio.CancelledError:
            gave_up = True
            raise
        finally:
            if gave_up:
                with contextlib.suppress(TimeoutError):
                    await finish(asyncio.wait_for(self._undo(workload), UNDO_SECONDS_MAX))
            self.reports.pop(workload, None)

    async def _undo(self, workload: str) -> None:
        while True:
            with contextlib.suppress(BackendError):
                await self._end(workload)
                return
            await asyncio.sleep(LOOK_SECONDS)

    # Stopping ----------------------------------------------------------------------------------

    async def stop(self, workload: str, stop_seconds_max: float | None = None) -> None:
        """Stop a workload; return when all its parts are gone."""
        self._running.discard(workload)
        cluster = await self._cluster_of(workload)
        if cluster is not None:
            for pod in cluster.workloads.pods(workload)[:1]:
                if pod.ended or pod.phase == "Running":
                    await cluster.output.keep(pod)
        ended = await self._end(workload, stop_seconds_max)
        known = self.reports.pop(workload, None)
        if ended or known is not None:
            self._tell(WorkloadReport(workload, Phase.STOPPED))

    async def _end(self, workload: str, stop_seconds_max: float | None = None) -> bool:
        cluster = await self._cluster_of(workload)
        if cluster is None:
            return False
        known = cluster.workloads
        async with self._locks[workload]:
            ended = await known.end(workload, stop_seconds_max)
            give_up_at = time.monotonic() + STOP_SECONDS_MAX
            while left := known.leftovers(workload):
                if time.monotonic() > give_up_at:
                    names = ", ".join(each.rpartition("/")[2] for each in left)
                    advice = "a pod ends when its kubelet says so, or when its Node is deleted"
                    raise BackendError(f"{names} of {workload} are still ending: {advice}")
                before = time.monotonic()
                await known.news(workload, LOOK_SECONDS)
                if time.monotonic() - before >= LOOK_SECONDS:
                    await known.look_for(workload)
        known.forget(workload)
        self._nodes.pop(workload, None)
        self._where.pop(workload, None)
        self._locks.pop(workload, None)
        return ended

    # News --------------------------------------------------------------------------------------

    def _say(self, report: WorkloadReport) -> None:
        if self.reports.get(report.id) != report:
            self.reports[report.id] = report
            self._tell(report)

    def _report_state(self, workload: str) -> None:
        """Report a changed state of a running workload."""
        cluster = self._clusters.get(self._where.get(workload, ""))
        if workload not in self._running or cluster is None:
            return
        seen = cluster.workloads.view(workload)
        if seen is None or seen.trouble is Trouble.SILENCE:
            detail = "another client deleted its pods at the API server"
            if pods := cluster.workloads.pods(workload):
                detail = _lost_pods(pods, self._nodes.get(workload, ()))
            report = WorkloadReport(workload, Phase.FAILED, detail=detail)
        else:
            report = seen.report
        if report.phase.over:
            self._running.discard(workload)
            task = asyncio.create_task(self._report_end(cluster, report))
            self._ends.add(task)
            task.add_done_callback(self._ends.discard)
        else:
            self._say(report)

    async def _report_end(self, cluster: _Cluster, report: WorkloadReport) -> WorkloadReport:
        """Store the output of an ended workload, and report its end."""
        for pod in cluster.workloads.pods(report.id)[:1]:
            if pod.ended:
                report = replace(report, log_tail=await cluster.output.keep(pod))
        self._say(report)
        return report


def _lost_pods(pods: Sequence[PodState], nodes: Sequence[str]) -> str:
    """Return a sentence about the pods that a gang has lost."""
    missing = [each for each in nodes if each not in {pod.node for pod in pods}]
    where = f" on {', '.join(missing)}" if missing else ""
    size = pods[0].size if pods else len(nodes)
    return f"the pod{where} is gone from the API server; {len(pods)} of {size} pods are left"


def _is_whole(pods: Sequence[PodState]) -> bool:
    return bool(pods) and len(pods) >= pods[0].size

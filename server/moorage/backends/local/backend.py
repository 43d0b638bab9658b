"""`LocalBackend`: runs processes, services and containers on this machine."""

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import structlog

from moorage.backends.base import (
    BackendError,
    CommandExecution,
    CommonBackend,
    FilePiece,
    Log,
    Order,
    RunFiles,
    Support,
    UnknownWorkloadError,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.local import containers, processes
from moorage.backends.local.confinement import Confinement, find
from moorage.backends.local.containers import Containers
from moorage.backends.local.devices import Devices
from moorage.backends.local.measurements import Measurement, measure
from moorage.backends.local.processes import Processes
from moorage.backends.local.run_files import list_files, piece
from moorage.backends.local.workload_store import WorkloadStore
from moorage.backends.local.workloads import LIMITS, LocalWorkloads
from moorage.backends.specs import BaseResourceSpec, ContainerResourceSpec
from moorage.records.json_values import JsonMapping, JsonValue

T = TypeVar("T")

log = structlog.get_logger("moored")


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Convert the operating system's errors about a workload into `BackendError`."""
    try:
        yield
    except (BackendError, TimeoutError):
        raise
    except Exception as error:
        raise BackendError(f"{type(error).__name__}: {error}") from error


@functools.cache
def confinement_of(hidden: Path) -> Confinement:
    """Return a method that hides a folder from workloads, after a process has tested the method."""
    return find(os.fspath(hidden))


class LocalBackend(CommonBackend):
    """Runs processes and services on this machine, and containers if it has a container engine.

    Args:
        root: Folder for data that must outlive the daemon; a restarted daemon opens it again.
        nodes: Ids of nodes that stand for this machine; empty: all.
        gpus: Ids of the GPUs that workloads without a lease may use.
        outlive: Whether workloads continue when this process ends.
        hidden: A folder that workloads may not read; each may read its own folder inside.
    """

    name: Final = "local"
    _support: Final = Support(
        categories=processes.CATEGORIES | containers.CATEGORIES,
        default="process",
        limits=LIMITS,
        execute=True,
        logs=True,
    )

    def __init__(
        self,
        root: Path,
        nodes: Iterable[str] = (),
        gpus: Iterable[str] = (),
        *,
        outlive: bool = True,
        hidden: Path | None = None,
    ) -> None:
        self._root = root
        self._nodes = frozenset(nodes)
        folders, boxes = WorkloadStore(root), WorkloadStore(root.absolute() / "containers")
        self._folders, self._boxes = folders, boxes
        for finding in (*folders.quarantined, *boxes.quarantined):
            log.warning("workload_record_damaged", name=self.name, finding=finding)
        self._devices = Devices(gpus, {**folders.devices(), **boxes.devices()})
        confinement = Confinement() if hidden is None else confinement_of(hidden)
        if hidden is not None and not confinement.way:
            log.warning("workloads_not_confined", name=self.name, finding=confinement.detail)
        self._processes = Processes(
            folders, self._devices, self._tell, confinement, outlive=outlive
        )
        self._containers = Containers(boxes, self._devices, self._tell, hidden, outlive=outlive)

    @property
    def support(self) -> Support:
        return replace(self._support, nodes=self._nodes)

    def refuse(self, spec: BaseResourceSpec) -> None:
        if spec.category not in self.support.categories:
            known = ", ".join(sorted(self.support.categories))
            reason = f"the backend local starts {known}, not {spec.category}"
            raise UnsupportedSpecError(reason)
        if isinstance(spec, ContainerResourceSpec):
            self._containers.refuse(spec)

    async def discover(self) -> Collection[WorkloadReport]:
        with _plain():
            return [*await self._processes.discover(), *await self._containers.discover()]

    async def start(self, order: Order) -> WorkloadReport:
        self.refuse(order.spec)
        if len(order.placement) > 1:
            raise UnsupportedSpecError("the backend local starts on one machine, not on a gang")
        container = isinstance(order.spec, ContainerResourceSpec)
        part = self._containers if container else self._processes
        for share in order.placement if not part.has(order.id) else ():  # Running ones may stay.
            if self._nodes and share.node_id not in self._nodes:
                raise UnsupportedSpecError(
                    f"the backend local starts on {', '.join(sorted(self._nodes))}, not on"
                    f" {share.cluster_id}/{share.node_id}"
                )
        with _plain():
            return await part.start(order)

    async def stop(self, workload: str, stop_seconds_max: float | None = None) -> None:
        with _plain():
            await self._part(workload).stop(workload, stop_seconds_max)

    async def status(self, workload: str) -> WorkloadReport:
        with _plain():
            return await self._part(workload).status(workload)

    async def probe(self, workload: str) -> WorkloadReport:
        with _plain():
            return await self._part(workload).probe(workload)

    def glance(self, workload: str) -> WorkloadReport | None:
        """Return the report of a ready process without waiting; see `Backend.glance`."""
        return self._processes.glance(workload)

    async def control(self, workload: str, limits: JsonMapping) -> None:
        with _plain():
            await self._part(workload).control(workload, limits)

    async def reset(self, workload: str) -> JsonValue:
        with _plain():
            await self._part(workload).reset(workload)

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
        with _plain():
            return await self._part(workload).execute(
                workload,
                command,
                timeout_seconds=timeout_seconds,
                workdir=workdir,
                user=user,
                environment=environment,
            )

    async def logs(self, workload: str, offset: int = 0, attempt: int = 0) -> Log:
        with _plain():
            part = self._containers if self._containers.keeps(workload) else self._processes
            return await part.logs(workload, offset, attempt)

    async def files(self, workload: str, attempt: int = 0) -> RunFiles:
        with _plain():
            return await asyncio.to_thread(self._in_folder, workload, attempt, list_files)

    async def read_file(
        self, workload: str, path: str, offset: int = 0, attempt: int = 0
    ) -> FilePiece:
        with _plain():
            return await asyncio.to_thread(
                self._in_folder, workload, attempt, lambda folder: piece(folder, path, offset)
            )

    def _in_folder(self, workload: str, attempt: int, look: Callable[[int], T]) -> T:
        """Open the working folder of a start, and call `look` with its descriptor. Blocks."""
        store = self._boxes if self._containers.keeps(workload) else self._folders
        folder = store.work(workload, attempt)
        if folder is None:
            raise UnknownWorkloadError(workload)
        try:
            return look(folder)
        finally:
            os.close(folder)

    def measured(self) -> Measurement:
        """Return the metrics of this machine, and the GPUs that foreign processes use. Blocks."""
        return measure(self._root, self._devices.gpus_in_use())

    async def close(self) -> None:
        """Stop watching processes and containers. Workloads continue to run."""
        self._listener = None
        await asyncio.to_thread(self._processes.close)
        await asyncio.to_thread(self._containers.close)

    def _part(self, workload: str) -> LocalWorkloads:
        """Return the part that runs a workload: `Containers` or `Processes`."""
        return self._containers if self._containers.has(workload) else self._processes

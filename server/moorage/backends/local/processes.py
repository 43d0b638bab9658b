"""Runs processes and services, each under a supervisor that outlives the daemon.

`LocalBackend` is the only caller. All data about a workload is in its folder (`workload_store`).
This module starts supervisors, waits for them, and runs readiness checks.
"""

import asyncio
import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

from moorage.backends.base import (
    BackendError,
    CommandExecution,
    Listener,
    Log,
    Order,
    Phase,
    UnknownWorkloadError,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.completion import finish
from moorage.backends.local import (
    commands,
    confinement,
    control_groups,
    marks,
    orders,
    readiness,
    supervisor,
    workload_store,
)
from moorage.backends.local.confinement import Confinement
from moorage.backends.local.deadline import HEARD
from moorage.backends.local.devices import DeviceBinding, Devices
from moorage.backends.local.watcher import Watcher, lives
from moorage.backends.local.workloads import LocalWorkloads
from moorage.backends.specs import ProcessResourceSpec, Readiness, ServiceResourceSpec
from moorage.protocol.origins import authority_of
from moorage.records.json_values import JsonMapping

SUPERVISOR_SECONDS_MAX: Final = 30.0
"""Longest wait until a supervisor reports that the command runs."""
_SUPERVISOR: Final = Path(__file__).with_name("supervisor.py")
CATEGORIES: Final = frozenset({"process", "service", "vllm"})
RESET_SECONDS_MAX: Final = 60.0
"""Longest run of a reset command; if it takes longer, the workload is ended."""
STOP_SPARE_SECONDS: Final = 20.0
"""Extra seconds of a stop, beyond the workload's own, to kill its remaining processes."""
END_PAUSES: Final = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Pauses in seconds between attempts to read the outcome of a workload that has ended."""
_LOST: Final = "its records were lost while it ran; its remaining processes are ended"


class Processes(LocalWorkloads):
    """Runs workloads as processes under supervisors; see `LocalWorkloads`."""

    noun = "process"

    def __init__(
        self,
        folders: workload_store.WorkloadStore,
        devices: Devices,
        tell: Listener,
        confinement: Confinement,
        *,
        outlive: bool,
    ) -> None:
        super().__init__(folders, devices, tell, outlive=outlive)
        self._confinement = confinement
        self._watcher = Watcher()
        self._groups = control_groups.find()
        self._begun: set[str] = set()  # Started or found here, and not stopped.
        self._lost: set[str] = set()  # Found without records.
        self._ends: dict[str, Future[None]] = {}
        self._watched: dict[str, tuple[int, int]] = {}
        self._ready: dict[str, WorkloadReport] = {}

    def has(self, workload: str) -> bool:
        """Return whether a workload was started here as a process, and not stopped."""
        return workload in self._begun or self._store.has(workload)

    async def discover(self) -> Collection[WorkloadReport]:
        """Return the process workloads of this machine, and watch them from now on."""
        return await asyncio.to_thread(self._discover)

    def _discover(self) -> list[WorkloadReport]:
        found = []
        for name in list(self._store.names()):
            workload = self._look(name)
            if workload is not None:
                self._begun.add(name)
                found.append(workload)
        known = {self._mark(each.id) for each in found}
        for mark in marks.marks_below(self._mark("")) - known:
            lost = self._store.name_of(Path(mark))
            if lost is None:  # A shortened name, which no lease has.
                marks.kill_workload(mark)
                continue
            self._begun.add(lost)
            self._lost.add(lost)
            found.append(WorkloadReport(lost, Phase.FAILED, detail=_LOST))
        return found

    async def _bring_up(self, order: Order) -> WorkloadReport:
        spec = orders.process(order.spec)
        if order.id in self._lost:
            await self.stop(order.id, order.stop_seconds_max)
            raise BackendError(_LOST)
        if self._store.forbidden(order.id):  # A crash interrupted its stop.
            await self.stop(order.id, order.stop_seconds_max)
        await finish(asyncio.to_thread(self._begin, order, spec))
        return await self._until_ready(order.id, spec)

    async def stop(self, workload: str, stop_seconds_max: float | None = None) -> None:
        """Stop a process and all its descendants; see `Backend.stop`.

        The supervisor that the workload's files name gets the order to stop the workload. Even if
        the files are wrong, all processes with the workload's marker or in its group, and its
        supervisor's descendants, are killed before the devices are freed.
        """
        order = await asyncio.to_thread(self._store.order, workload)
        if order is None and workload not in self._begun:
            return
        with self._lock:
            self._ready.pop(workload, None)
        pid = None
        if order is not None:
            # Mark the workload first, then read the lock: a supervisor that locks later finds the
            # mark.
            self._store.forbid(workload)
            pid = workload_store.holder(self._store.folder(workload))
        if pid is not None:
            self._watch(workload, pid)
        with self._lock:
            ended, watched = self._ends.get(workload), self._watched.get(workload)
        if watched is not None:
            for number in (signal.SIGTERM, signal.SIGCONT):  # Continue a paused supervisor.
                self._watcher.signal(*watched, number)
        limit = STOP_SPARE_SECONDS + float((order or {}).get("stop_seconds", 0))
        if stop_seconds_max is not None and stop_seconds_max < limit - STOP_SPARE_SECONDS:
            limit = stop_seconds_max  # Do not wait as long as the supervisor does.
        if ended is not None:
            with contextlib.suppress(TimeoutError):  # `_sweep` kills it then.
                async with asyncio.timeout(limit):
                    await asyncio.shield(asyncio.wrap_future(ended))
        await asyncio.to_thread(self._sweep, workload, (order or {}).get("group", ""))
        if ended is not None:  # Report its end before the name becomes free.
            try:
                async with asyncio.timeout(STOP_SPARE_SECONDS):
                    await asyncio.shield(asyncio.wrap_future(ended))
            except TimeoutError:
                reason = f"{workload} is still there {limit:g} s after the signal to stop"
                raise BackendError(reason) from None
        self._devices.give(workload)
        await asyncio.to_thread(self._store.archive, workload)
        self._begun.discard(workload)
        self._lost.discard(workload)
        self._tell(WorkloadReport(workload, Phase.STOPPED))

    async def status(self, workload: str) -> WorkloadReport:
        found = await asyncio.to_thread(self._look, workload)
        if found is None:
            raise UnknownWorkloadError(workload)
        return found

    def glance(self, workload: str) -> WorkloadReport | None:
        """Return the report of a ready process if it and its supervisor run; else None.

        Return None for a service: only a probe of its endpoint shows whether it is ready.
        """
        with self._lock:
            ready, watched = self._ready.get(workload), self._watched.get(workload)
        if ready and ready.endpoint:
            return None
        if not (ready and watched and self._watcher.lives(*watched)):
            return None
        with contextlib.suppress(OSError):  # E.g. no descriptor is left.
            return ready if self._command_lives(workload) else None
        return None

    def _command_lives(self, workload: str) -> bool:
        """Return whether the command's process runs; its supervisor reports ends with a delay."""
        noted = workload_store.read(self._store.folder(workload) / "process.json")
        return noted is not None and lives(noted["pid"])

    def _limit(
        self, workload: str, memory_bytes: int | None, grant: DeviceBinding | None
    ) -> JsonMapping:
        """Set CPUs and memory limit of a process and its descendants; see `LocalWorkloads`."""
        holder = workload_store.holder(self._store.folder(workload))
        pids = list(marks.below(() if holder is None else (holder,)))
        if memory_bytes is not None:
            _bound_all(pids, memory_bytes)
            control_groups.bound(self._order(workload).get("group", ""), memory_bytes)
        for pid in pids:
            _bound(pid, grant.cpus if grant else (), None)
        noted = {} if memory_bytes is None else {"memory_bytes": memory_bytes}
        return noted if grant is None else {**noted, "cpus": grant.cpus, "devices": grant.rows}

    async def reset(self, workload: str) -> None:
        """Run the spec's own reset command; see `Backend.reset`.

        First kill the processes that commands inside the workload left running.
        """
        order = self._order(workload)
        mark = f"{marks.WORKLOAD}={self._mark(workload)}"
        await finish(asyncio.to_thread(marks.kill_by_mark, mark, marks.EXECUTION))
        if group := order.get("group", ""):
            await finish(asyncio.to_thread(control_groups.clear, f"{group}/exec"))
        command = order["reset_command"]
        if not command:
            raise UnsupportedSpecError("a process without a reset_command cannot be reset")
        try:
            done = await self.execute(workload, command, timeout_seconds=RESET_SECONDS_MAX)
        except TimeoutError as error:
            raise BackendError(f"the reset of the workload failed: {error}") from error
        if done.exit_code != 0:
            raise BackendError(
                f"the reset command ended with code {done.exit_code}: {done.output[-500:]}"
            )

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
        """Run a command beside a process, with its variables and limits; see `Backend.execute`."""
        order = self._order(workload)
        if user is not None:
            raise UnsupportedSpecError(
                "a command inside a process workload runs as the user of the process"
            )

        work = str(self._store.folder(workload) / "work")
        gpus = await asyncio.to_thread(self._devices.environment, workload)
        confine = None
        if order["way"]:  # It may signal the workload, and thus all processes.
            confine = partial(
                confinement.confine, order["way"], order["hidden"], work, signals=True
            )
        with control_groups.membership(order.get("group", "")) as membership:
            return await commands.run(
                command,
                folder=os.path.join(order["workdir"] or work, workdir or ""),  # noqa: PTH118  # `workdir` may be relative.
                environment={**order["environment"], **gpus, **(environment or {})},
                begun=lambda pid: _bound(pid, order["cpus"], order["memory_bytes"] or None),
                timeout_seconds=timeout_seconds,
                membership=membership,
                confine=confine,
            )

    async def logs(self, workload: str, offset: int, attempt: int) -> Log:
        """Read the output of a process, even a stopped one; see `Backend.logs`."""
        return await asyncio.to_thread(self._read_stored_log, workload, offset, attempt)

    def close(self) -> None:
        """Stop watching. The processes continue to run."""
        self._watcher.close()

    # Beginning ---------------------------------------------------------------------------------

    def _begin(self, order: Order, spec: ProcessResourceSpec) -> None:
        """Start the command under a supervisor, unless it was started before. Blocks."""
        folder = self._store.folder(order.id)
        with self._alone(order.id):
            self._begun.add(order.id)
            if (
                workload_store.holder(folder) is None
                and not (folder / "process.json").exists()
                and not (folder / "exit.json").exists()
            ):
                if not self._store.has(order.id):  # Else a supervisor may have read the order.
                    folder.mkdir(exist_ok=True, mode=0o700)
                    document = orders.document(
                        order,
                        spec,
                        self._devices.take(order),
                        mark=self._mark(order.id),
                        group=self._groups.of(folder),
                        confinement=self._confinement,
                        owner=None if self._outlive else os.getpid(),
                        heard=os.fspath(self._store.root.absolute() / HEARD),
                    )
                    workload_store.write(folder / "order.json", document)
                self._tell(WorkloadReport(order.id, Phase.STARTING))
                _begin_supervisor(folder)
        pid = workload_store.holder(folder)
        if pid is not None:
            self._watch(order.id, pid)

    async def _until_ready(self, workload: str, spec: ProcessResourceSpec) -> WorkloadReport:
        folder = self._store.folder(workload)
        order = self._order(workload)
        while True:
            seen = await asyncio.to_thread(self._store.look, workload)
            if seen is None:
                raise BackendError(f"{workload} was stopped while it started")
            if seen.phase is Phase.READY:
                return self._note_ready(seen)
            if seen.phase.over:
                if (folder / "ready.json").exists():  # It was ready once, and has ended.
                    return seen
                if not isinstance(spec, ServiceResourceSpec) and seen.exit_code is not None:
                    return seen
                self._tell(seen)
                lines = "; ".join(seen.log_tail[-3:])
                raise BackendError(f"{seen.detail}{': ' if lines else ''}{lines}")
            if not isinstance(spec, ServiceResourceSpec):
                endpoint = ""
                break
            probe = spec.readiness or Readiness()
            if await self._answers(workload, order, probe):
                endpoint = f"http://{authority_of(spec.host, int(order['port']))}"
                break
            await asyncio.sleep(probe.every_seconds)
        workload_store.write(folder / "ready.json", {"endpoint": endpoint})
        ready = WorkloadReport(workload, Phase.READY, endpoint=endpoint)
        with self._lock:
            if workload in self._ends:  # Only before the report of the workload's end.
                self._tell(ready)
        return self._note_ready(ready)

    async def _answers(self, workload: str, order: JsonMapping, probe: Readiness | None) -> bool:
        if probe is None:
            return self._command_lives(workload)
        inside = self._inside(workload)
        return await readiness.answers(probe, order["host"], int(order["port"]), inside)

    # Ending ------------------------------------------------------------------------------------

    def _watch(self, workload: str, pid: int) -> "Future[None]":
        """Watch for the end of a supervisor, and return a future of this end."""
        with self._lock:
            ended = self._ends.get(workload)
            if ended is not None:
                return ended
            ended = self._ends[workload] = Future()
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._note_end(workload)
            return ended
        with self._lock:
            self._watched[workload] = (descriptor, pid)
        self._watcher.watch(descriptor, pid, lambda: self._note_end(workload))
        return ended

    def _note_end(self, workload: str) -> None:
        with self._lock:
            ended = self._ends.pop(workload)
            self._watched.pop(workload, None)
            self._ready.pop(workload, None)
        seen = self._look_at_end(workload)
        if seen is not None and seen.phase in {Phase.SUCCEEDED, Phase.FAILED}:
            self._tell(seen)
        ended.set_result(None)

    def _look_at_end(self, workload: str) -> WorkloadReport | None:
        """Return the report of an ended workload; try a few times, as the outcome may come late."""
        for pause in (*END_PAUSES, None):
            try:
                seen = self._store.look(workload)
            except OSError as error:  # E.g. no descriptor is left.
                if pause is None:
                    return WorkloadReport(workload, Phase.FAILED, detail=f"it ended: {error}")
                time.sleep(pause)  # No event reports free descriptors.
                continue
            if seen is None and workload in self._begun:
                return WorkloadReport(workload, Phase.FAILED, detail=_LOST)
            return seen
        return None

    def _look(self, workload: str) -> WorkloadReport | None:
        """Return the report of a workload, and watch its supervisor from now on."""
        pid = workload_store.holder(self._store.folder(workload))
        if pid is not None:
            self._watch(workload, pid)
        seen = self._store.look(workload)
        if seen is None and workload in self._begun:
            return WorkloadReport(workload, Phase.FAILED, detail=_LOST)
        return self._note_ready(seen) if seen is not None else None

    def _note_ready(self, seen: WorkloadReport) -> WorkloadReport:
        """Store the report of a ready workload for `glance`, until the workload ends."""
        with self._lock:
            if seen.phase is Phase.READY and seen.id in self._ends:
                self._ready[seen.id] = seen
        return seen

    def _tail(self, workload: str) -> tuple[str, ...]:
        return workload_store.tail(self._store.folder(workload))

    def _sweep(self, workload: str, group: str) -> None:
        """Kill the remaining processes of a workload whose supervisor has ended."""
        marks.kill_workload(self._mark(workload))
        for each in {group, self._groups.of(self._store.folder(workload))}:
            control_groups.end(each)

    def _mark(self, workload: str) -> str:
        """Return the marker of a workload; for an empty name, the prefix of all markers."""
        if not workload:
            return os.path.join(self._store.root.absolute(), "running", "")  # noqa: PTH118  # Adds a final slash.
        return os.fspath(self._store.folder(workload).absolute())


def _bound_all(pids: Collection[int], memory_bytes: int) -> None:
    """Limit the memory of all these processes; an error restores their former limits."""
    before: dict[int, tuple[int, int]] = {}
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                before[pid] = resource.prlimit(pid, resource.RLIMIT_DATA)
                supervisor.bound_data(pid, memory_bytes)
    except OSError as error:
        for pid, limits in before.items():
            with contextlib.suppress(OSError):  # It has ended, or is unchanged.
                resource.prlimit(pid, resource.RLIMIT_DATA, limits)
        raise BackendError(str(error)) from error


def _bound(pid: int, cpus: Collection[int], memory_bytes: int | None) -> None:
    """Bind a process's threads to processors, and limit its memory, where given.

    A process that has ended is skipped.
    """
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        if memory_bytes is not None:
            supervisor.bound_data(pid, memory_bytes)
        for thread in Path(f"/proc/{pid}/task").iterdir() if cpus else ():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cpus)


def _begin_supervisor(folder: Path) -> None:
    """Start a supervisor and wait for its report.

    Raises:
        BackendError: The command cannot be run.
    """
    seen, written = os.pipe()
    log_path = os.fspath(folder / "supervisor.log")
    writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", str(_SUPERVISOR), str(folder), "3"],
            {marks.SUPERVISOR: os.fspath(folder.absolute())},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log_path, writing, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
                (os.POSIX_SPAWN_DUP2, written, 3),
            ],
        )
    except OSError as error:
        raise BackendError(f"no supervisor can be started: {error}") from error
    finally:
        os.close(written)
    try:
        poll = select.poll()
        poll.register(seen, select.POLLIN)
        line = os.read(seen, 4096) if poll.poll(SUPERVISOR_SECONDS_MAX * 1000) else b""
    finally:
        os.close(seen)
    report = json.loads(line) if line else {}
    if not line and workload_store.holder(folder) is None:
        report = {"error": "the supervisor of the command reported nothing"}
    if "error" in report:
        raise BackendError(f"the command did not start: {report['error']}")

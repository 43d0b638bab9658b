"""The backend that starts nothing: workloads are entries of a dictionary, with faults on demand.

It ships with the server for rehearsals (`"provision": {"backend": "memory"}`), and replaces other
backends in the tests of the core, the daemon and the resource engine. A `MemoryResourceSpec` sets
the faults; any other spec starts, runs and stops without faults.
"""

import asyncio
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from moorage.backends.base import (
    BackendError,
    CommandExecution,
    CommonBackend,
    Log,
    Order,
    Phase,
    Support,
    UnknownWorkloadError,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.spec_documents import SPECS
from moorage.backends.specs import BaseResourceSpec, MemoryResourceSpec
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue

_LIMITS: Final = frozenset({"cpu_count", "mem_limit"})


@dataclass(slots=True)
class _Entry:
    """A workload in memory, and its faults that have not happened yet."""

    spec: MemoryResourceSpec
    workload: WorkloadReport
    fail_stops: int
    limits: JsonObject = field(default_factory=JsonObject)
    faults: list[threading.Timer] = field(default_factory=list[threading.Timer])


class MemoryBackend(CommonBackend):
    """Keeps workloads in memory. A second backend with the same `machine` finds these workloads.

    Args:
        machine: The workloads by name; they survive this backend, as across a restart.
    """

    name: Final = "memory"
    support: Final = Support(
        categories=frozenset(SPECS), default="memory", limits=_LIMITS, reset=True, gangs=True
    )

    def __init__(self, machine: dict[str, _Entry] | None = None) -> None:
        self._machine = {} if machine is None else machine
        self._lock = threading.Lock()

    def refuse(self, spec: BaseResourceSpec) -> None:
        """Accept every spec; see `Backend.refuse`."""

    async def discover(self) -> Collection[WorkloadReport]:
        with self._lock:
            return [entry.workload for entry in self._machine.values()]

    async def start(self, order: Order) -> WorkloadReport:
        spec = order.spec if isinstance(order.spec, MemoryResourceSpec) else MemoryResourceSpec()
        with self._lock:
            there = self._machine.get(order.id)
        if there is not None:
            return there.workload
        self._tell(WorkloadReport(order.id, Phase.STARTING))
        async with asyncio.timeout(order.timeout_seconds):
            await asyncio.sleep(spec.start_seconds)
        if spec.fail:
            raise BackendError(spec.fail)
        ready = WorkloadReport(order.id, Phase.READY, endpoint=f"memory://{order.id}")
        entry = _Entry(spec, ready, spec.fail_stops)
        with self._lock:
            there = self._machine.setdefault(order.id, entry)
        if there is not entry:  # Of two starts at a time, one counts.
            return there.workload
        if spec.die_seconds is not None:
            code = spec.exit_code
            phase = Phase.FAILED if code else Phase.SUCCEEDED
            detail = f"it ended by itself with {code}"
            died = WorkloadReport(order.id, phase, detail=detail, exit_code=code)
            self._fail_later(spec.die_seconds, entry, died)
        if spec.lose_seconds is not None and order.placement:
            detail = f"its member on node {order.placement[-1].node_id} is gone"
            lost = WorkloadReport(order.id, Phase.FAILED, detail=detail)
            self._fail_later(spec.lose_seconds, entry, lost)
        self._tell(ready)
        return ready

    async def stop(self, workload: str, stop_seconds_max: float | None = None) -> None:
        entry = self._machine.get(workload)
        if entry is None:
            return
        seconds = entry.spec.stop_seconds
        await asyncio.sleep(seconds if stop_seconds_max is None else min(seconds, stop_seconds_max))
        if entry.fail_stops:
            entry.fail_stops -= 1
            raise BackendError(f"{workload} does not stop")
        with self._lock:
            gone = self._machine.pop(workload, None) is entry
        for fault in entry.faults:
            fault.cancel()
        if gone:
            self._tell(replace(entry.workload, phase=Phase.STOPPED, endpoint=""))

    async def status(self, workload: str) -> WorkloadReport:
        return self._entry(workload).workload

    async def probe(self, workload: str) -> WorkloadReport:
        """Return the report of a workload; see `Backend.probe`."""
        return self._entry(workload).workload

    def glance(self, workload: str) -> WorkloadReport | None:
        with self._lock:
            entry = self._machine.get(workload)
        ready = entry is not None and entry.workload.phase is Phase.READY
        return entry.workload if entry is not None and ready else None

    async def control(self, workload: str, limits: JsonMapping) -> None:
        entry = self._entry(workload)
        if unknown := limits.keys() - _LIMITS:
            names = ", ".join(sorted(unknown))
            raise UnsupportedSpecError(f"the backend memory has no limit named {names}")
        entry.limits.update(limits)

    async def reset(self, workload: str) -> JsonValue:
        spec = self._entry(workload).spec
        if not spec.resettable:
            raise UnsupportedSpecError(f"{workload} cannot be reset")
        if spec.fail_reset:
            raise BackendError(spec.fail_reset)
        return None

    async def execute(
        self,
        workload: str,
        command: Sequence[str],  # noqa: ARG002  # The Protocol's.
        *,
        timeout_seconds: float | None = None,  # noqa: ARG002  # The Protocol's.
        workdir: str | None = None,  # noqa: ARG002  # The Protocol's.
        user: str | None = None,  # noqa: ARG002  # The Protocol's.
        environment: Mapping[str, str] | None = None,  # noqa: ARG002  # The Protocol's.
    ) -> CommandExecution:
        """Refuse a command: the workload does not really run."""
        self._entry(workload)
        raise UnsupportedSpecError("the backend memory runs no commands")

    async def logs(self, workload: str, offset: int = 0, attempt: int = 0) -> Log:  # noqa: ARG002  # The Protocol's.
        """Refuse to read output: a workload that does not really run has none."""
        self._entry(workload)
        raise UnsupportedSpecError("the backend memory keeps no output")

    async def close(self) -> None:
        """Do nothing: this backend opens nothing."""
        self._listener = None

    def _entry(self, workload: str) -> _Entry:
        with self._lock:
            entry = self._machine.get(workload)
        if entry is None:
            raise UnknownWorkloadError(workload)
        return entry

    def _fail_later(self, seconds: float, entry: _Entry, end: WorkloadReport) -> None:
        fault = threading.Timer(seconds, self._end, (entry, end))
        fault.daemon = True
        entry.faults.append(fault)
        fault.start()

    def _end(self, entry: _Entry, end: WorkloadReport) -> None:
        with self._lock:
            if self._machine.get(end.id) is not entry or entry.workload.phase.over:
                return
            entry.workload = end
        self._tell(end)

"""The common base of the workloads on this machine: processes and containers.

`LocalBackend` gives each workload to `Processes` or `Containers`, which start and stop it. This
base class has their common parts: cancelled starts, limits, and locks.
"""

import abc
import asyncio
import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Final

from moorage.backends.base import (
    BackendError,
    CommandExecution,
    Listener,
    Log,
    Order,
    Phase,
    UnknownAttemptError,
    UnknownWorkloadError,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.completion import finish
from moorage.backends.local import readiness, workload_store
from moorage.backends.local.devices import DeviceBinding, Devices
from moorage.backends.spec_fields import memory_bytes
from moorage.backends.specs import Readiness
from moorage.records.json_values import JsonMapping, JsonObject

LIMITS: Final = frozenset({"cpu_count", "mem_limit"})
"""The limits that `control` can change."""
_LINES_SHOWN: Final = 3
"""Lines of output in the message about a start that took too long."""


class LocalWorkloads(abc.ABC):
    """Starts workloads and changes their limits: the base of `Processes` and `Containers`.

    Args:
        tell: The listener of the backend.
        outlive: Whether workloads continue when this process ends.
    """

    noun: ClassVar[str]
    """Name of this kind of workload in messages, such as "process"."""

    def __init__(
        self,
        folders: workload_store.WorkloadStore,
        devices: Devices,
        tell: Listener,
        *,
        outlive: bool,
    ) -> None:
        self._store = folders
        self._devices = devices
        self._tell = tell
        self._outlive = outlive
        self._lock = threading.Lock()
        self._beginning: dict[str, threading.Lock] = {}

    async def start(self, order: Order) -> WorkloadReport:
        fencing = order.environment.get("MOORAGE_FENCING", "")
        try:
            if fencing:  # Only starts for leases are repeated.
                await asyncio.to_thread(self._not_again, order, fencing)
            async with asyncio.timeout(order.timeout_seconds):
                return await self._bring_up(order)
        except BaseException as error:
            tail = ""
            with contextlib.suppress(BackendError):
                lines = await finish(asyncio.to_thread(self._tail, order.id))
                tail = "; ".join(lines[-_LINES_SHOWN:])
            late = isinstance(error, TimeoutError)
            reason = str(error)
            if late:
                reason = f"it was not ready within {order.timeout_seconds:g} s"
                reason += f"{': ' if tail else ''}{tail}"
            if fencing and (late or isinstance(error, BackendError)):
                await finish(asyncio.to_thread(self._store.fail, order.id, fencing, reason))
            await finish(self.stop(order.id, order.undo_seconds(error)))
            if late:
                raise TimeoutError(reason) from None
            raise

    async def control(self, workload: str, limits: JsonMapping) -> None:
        order = self._order(workload)
        if unknown := limits.keys() - LIMITS:
            names = ", ".join(sorted(unknown))
            raise UnsupportedSpecError(f"a {self.noun} has no limit named {names}")
        grant = size = before = None
        try:
            if "mem_limit" in limits:
                size = memory_bytes(limits["mem_limit"])
        except ValueError as error:
            raise UnsupportedSpecError(f"mem_limit: {error}") from error
        try:
            if "cpu_count" in limits:
                before = self._devices.cpu_count(workload)
                grant = self._devices.resize(workload, float(limits["cpu_count"]))
        except UnsupportedSpecError:
            raise  # Also a ValueError, but with a better message.
        except (ValueError, TypeError) as error:
            reason = f"cpu_count: expected a number above 0, not {limits['cpu_count']!r}"
            raise UnsupportedSpecError(reason) from error
        try:
            noted = await finish(asyncio.to_thread(self._limit, workload, size, grant))
        except BackendError:
            if grant is not None:  # Undo: change all limits or none.
                again = self._devices.resize(workload, before)
                noted = self._limit(workload, None, again) if again.cpus else {}
                self._note(workload, order, noted)
            raise
        self._note(workload, order, noted)

    def _note(self, workload: str, order: JsonMapping, noted: JsonMapping) -> None:
        """Store changed fields of a workload's order."""
        if noted:
            workload_store.write(self._store.folder(workload) / "order.json", {**order, **noted})

    @abc.abstractmethod
    async def discover(self) -> Collection[WorkloadReport]:
        """Return the workloads of this machine, and watch them from now on."""

    @abc.abstractmethod
    async def stop(self, workload: str, stop_seconds_max: float | None = None) -> None:
        """Stop a workload; see `Backend.stop`."""

    @abc.abstractmethod
    async def status(self, workload: str) -> WorkloadReport:
        """Return the report of a workload; see `Backend.status`."""

    async def probe(self, workload: str) -> WorkloadReport:
        seen = await self.status(workload)
        order = self._order(workload)
        if seen.phase is not Phase.READY:
            return seen
        given = order.get("probe")
        probe = None if given is None else Readiness(**given)
        if await readiness.still(lambda: self._answers(workload, order, probe), probe):
            return seen
        detail = "it runs, but no longer answers"
        return replace(seen, phase=Phase.STARTING, endpoint="", detail=detail)

    @abc.abstractmethod
    async def reset(self, workload: str) -> None:
        """Restore a used workload to its initial state; see `Backend.reset`."""

    @abc.abstractmethod
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
        """Run a command in a workload; see `Backend.execute`."""

    @abc.abstractmethod
    async def logs(self, workload: str, offset: int, attempt: int) -> Log:
        """Read the output of a workload, even a stopped one; see `Backend.logs`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop watching. Workloads continue to run."""

    # For subclasses ----------------------------------------------------------------------------

    @abc.abstractmethod
    async def _bring_up(self, order: Order) -> WorkloadReport:
        """Start a workload, unless an earlier call started it, and wait until it is ready."""

    @abc.abstractmethod
    async def _answers(self, workload: str, order: JsonMapping, probe: Readiness | None) -> bool:
        """Return whether a running workload is ready, by its readiness check if it has one."""

    def _inside(self, workload: str) -> readiness.RunCommand:
        """Return a function that runs the command of a probe inside a workload."""

        async def run(command: Sequence[str], seconds: float) -> int:
            return (await self.execute(workload, command, timeout_seconds=seconds)).exit_code

        return run

    @abc.abstractmethod
    def _tail(self, workload: str) -> tuple[str, ...]:
        """Return the last lines that a workload wrote. Blocks."""

    @abc.abstractmethod
    def _limit(
        self, workload: str, memory_bytes: int | None, grant: DeviceBinding | None
    ) -> JsonMapping:
        """Change the limits that are given; return the fields to store in the order. Blocks."""

    def _read_stored_log(self, workload: str, offset: int, attempt: int) -> Log:
        """Read a workload's output from its stored file. Blocks.

        Raises:
            UnknownWorkloadError: No output of the workload is stored.
        """
        log = self._store.log(workload, offset, attempt)
        if log is None:
            attempts = self._store.attempts(workload)
            raise (
                UnknownAttemptError(workload, attempts)
                if attempts
                else UnknownWorkloadError(workload)
            )
        return log

    def _order(self, workload: str) -> JsonObject:
        order = self._store.order(workload)
        if order is None:
            raise UnknownWorkloadError(workload)
        return order

    def _not_again(self, order: Order, fencing: str) -> None:
        """Refuse an order whose start failed before a crash of the daemon. Blocks."""
        failed = self._store.failure(order.id, order.attempt, fencing)
        if failed is not None:
            self._tell(failed)
            raise BackendError(failed.detail)

    @contextlib.contextmanager
    def _alone(self, workload: str) -> Iterator[None]:
        """Lock a workload, so that one caller at a time starts it. Blocks."""
        with self._lock:
            beginning = self._beginning.setdefault(workload, threading.Lock())
        with beginning:
            yield
        with self._lock:
            self._beginning.pop(workload, None)

"""Gates: a node with a gate waits until a person, or a program, approves it.

A gate is not part of a graph. The caller gives it to an executor, `gates={"deploy":
ApprovalGate()}`, and any thread may resolve it. A node waits at its gate after its predecessors
have ended. A task may also call a gate's `wait_sync` itself.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from moorage_client.workflow.callbacks import ExecutionCallbacks
from moorage_client.workflow.errors import GateRejected, GateTimeout, WorkflowError
from moorage_client.workflow.growth import Result, Task
from moorage_client.workflow.requirements import finite
from moorage_client.workflow.running import RunningNode, current_node
from moorage_client.workflow.tracing import EventType, ExecutionTrace


class GateStatus(StrEnum):
    """The status of a gate."""

    PENDING = "pending"
    WAITING = "waiting"
    """A node waits at the gate."""
    APPROVED = "approved"
    REJECTED = "rejected"
    TIMED_OUT = "timed_out"


_OPEN: Final = (GateStatus.PENDING, GateStatus.WAITING)


class ApprovalGate:
    """The gate of one node, which waits until the gate is resolved. Threads may share a gate.

    Args:
        timeout: Seconds after which a waiting node fails; None: the node waits without limit.
        auto_approve: Whether the gate is approved from the start.

    Raises:
        WorkflowError: The timeout is not a number of seconds.
    """

    def __init__(self, timeout: float | None = None, auto_approve: bool = False) -> None:
        seconds = finite(0 if timeout is None else timeout)
        if seconds is None or not 0 <= seconds <= threading.TIMEOUT_MAX:
            raise WorkflowError(f"the timeout of a gate is {timeout!r}; expected seconds")
        self.timeout = timeout
        self.reason = ""
        self._lock = threading.Lock()
        self._status = GateStatus.APPROVED if auto_approve else GateStatus.PENDING
        self._waiters: dict[Callable[[], object], None] = {}

    @property
    def status(self) -> GateStatus:
        """The current status."""
        return self._status

    def approve(self) -> None:
        """Approve the gate, so that its node runs. Does nothing if the gate is resolved already."""
        self._resolve(GateStatus.APPROVED, "")

    def reject(self, reason: str = "") -> None:
        """Reject the gate, so that its node fails. Does nothing if the gate is resolved already."""
        self._resolve(GateStatus.REJECTED, reason)

    def reset(self) -> None:
        """Make the gate wait for approval again, for another run."""
        with self._lock:
            self._status, self.reason = GateStatus.PENDING, ""

    def wait_sync(self) -> None:
        """Wait until the gate is resolved.

        Raises:
            GateRejected: The gate was rejected.
            GateTimeout: The gate was not resolved in time.
        """
        woken = threading.Event()
        if self.enter(woken.set):
            try:
                woken.wait(self.timeout)
            finally:
                self.leave(woken.set, stopped=False)
        self.check("the gate")

    async def wait_async(self) -> None:
        """Wait on an event loop until the gate is resolved; see `wait_sync`."""
        await self.entered(lambda: None, lambda: False)
        self.check("the gate")

    async def entered(self, waits: Callable[[], object], stopped: Callable[[], bool]) -> None:
        """Wait until the gate is resolved, times out, or the wait is cancelled. For executors.

        Args:
            waits: Called before the wait.
            stopped: Returns whether the node was stopped; called after the wait.
        """
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        if self.enter(wake):
            try:
                waits()
                async with asyncio.timeout(self.timeout):
                    await woken.wait()
            except TimeoutError:
                pass
            finally:
                self.leave(wake, stopped=stopped())

    def check(self, what: str) -> None:
        """Raise an error unless the gate was approved.

        Raises:
            GateRejected: The gate was rejected.
            GateTimeout: The gate was not resolved in time.
        """
        if self._status is GateStatus.REJECTED:
            raise GateRejected(f"{what} was rejected" + (self.reason and f": {self.reason}"))
        if self._status is not GateStatus.APPROVED:
            raise GateTimeout(f"{what} was not approved within {self.timeout} s")

    def enter(self, wake: Callable[[], object]) -> bool:
        """Begin to wait at the gate; return False if it is resolved already. For executors."""
        with self._lock:
            if self._status not in _OPEN:
                return False
            self._status = GateStatus.WAITING
            self._waiters[wake] = None
            return True

    def leave(self, wake: Callable[[], object], *, stopped: bool) -> None:
        """Stop waiting: the gate timed out, unless it was resolved or its node was stopped."""
        with self._lock:
            self._waiters.pop(wake, None)
            if self._status is GateStatus.WAITING and not self._waiters:
                self._status = GateStatus.PENDING if stopped else GateStatus.TIMED_OUT

    def _resolve(self, status: GateStatus, reason: str) -> None:
        with self._lock:
            if self._status not in _OPEN:
                return
            self._status, self.reason = status, reason
            waiters = list(self._waiters)
        for wake in waiters:
            wake()


class GateController(dict[str, ApprovalGate]):
    """Gates by name; can be passed to an executor as `gates`.

    Args:
        gates: The gates, by name; `add_gate` adds others.
    """

    def __init__(self, gates: Mapping[str, ApprovalGate] | None = None) -> None:
        super().__init__(gates or {})

    def __missing__(self, name: str) -> ApprovalGate:
        raise KeyError(f"No gate named {name!r}")

    def add_gate(self, name: str, gate: ApprovalGate) -> None:
        """Add a gate, or replace one."""
        self[name] = gate

    def get_gate(self, name: str) -> ApprovalGate | None:
        """Return the gate with this name, or None."""
        return self.get(name)

    def has_gate(self, name: str) -> bool:
        """Return whether a gate with this name exists."""
        return name in self

    def status(self, name: str) -> GateStatus:
        """Return the status of a gate."""
        return self[name].status

    def waiting_gates(self) -> list[str]:
        """Return the names of the gates at which a node waits."""
        return [name for name, gate in self.items() if gate.status is GateStatus.WAITING]

    def approve(self, name: str) -> None:
        """Approve a gate."""
        self[name].approve()

    def reject(self, name: str, reason: str = "") -> None:
        """Reject a gate."""
        self[name].reject(reason)

    def reset_all(self) -> None:
        """Make all gates wait for approval again."""
        for gate in self.values():
            gate.reset()

    def wait_sync(self, name: str) -> None:
        """Wait until a gate is resolved; see `ApprovalGate.wait_sync`."""
        self[name].wait_sync()

    async def wait_async(self, name: str) -> None:
        """Wait until a gate is resolved, on an event loop; see `ApprovalGate.wait_sync`."""
        await self[name].wait_async()


def add_gates(
    tasks: Mapping[str, Task],
    gates: Mapping[str, ApprovalGate],
    callbacks: ExecutionCallbacks,
    trace: Callable[[], ExecutionTrace | None],
    is_async: Callable[[Task], bool],
) -> dict[str, Task]:
    """Return the tasks, changed so that a task with a gate waits for the gate first.

    Args:
        tasks: The tasks, by node.
        gates: The gates, by node.
        callbacks: Functions to call when a node waits, and when its gate is resolved.
        trace: Returns the trace of the run, which gets the same events.
        is_async: Returns whether a task is an async function; its gate is then awaited.
    """
    wrapped = dict(tasks)
    for name, gate in gates.items():
        if name in tasks:
            wrap = _awaiting if is_async(tasks[name]) else _blocking
            wrapped[name] = wrap(tasks[name], name, gate, _Watch(name, callbacks, trace))
    return wrapped


@dataclass(frozen=True, slots=True)
class _Watch:
    """Reports events of one gate to the callbacks and the trace."""

    name: str
    callbacks: ExecutionCallbacks
    trace: Callable[[], ExecutionTrace | None]

    def wait(self) -> None:
        """Report that the gate's node waits."""
        if (trace := self.trace()) is not None:
            trace.add(EventType.NODE_GATE_WAITING, self.name)
        if self.callbacks.on_gate_waiting is not None:
            self.callbacks.on_gate_waiting(self.name)

    def resolve(self, status: str) -> None:
        """Report that the gate was resolved."""
        if (trace := self.trace()) is not None:
            trace.add(EventType.NODE_GATE_RESOLVED, self.name, status=status)
        if self.callbacks.on_gate_resolved is not None:
            self.callbacks.on_gate_resolved(self.name, status)


def _blocking(task: Task, name: str, gate: ApprovalGate, watch: _Watch) -> Task:
    def call() -> Result:
        woken, node = threading.Event(), current_node()
        if gate.enter(woken.set):
            watch.wait()
            node.on_stop(lambda _: woken.set())
            try:
                woken.wait(gate.timeout)
            finally:
                node.on_stop(None)
                gate.leave(woken.set, stopped=node.stopped)
        _pass(name, gate, node, watch)
        return task()

    return call


def _awaiting(task: Task, name: str, gate: ApprovalGate, watch: _Watch) -> Task:
    async def call() -> Result:
        node = current_node()
        await gate.entered(watch.wait, lambda: node.stopped)
        _pass(name, gate, node, watch)
        return await task()

    return call


def _pass(name: str, gate: ApprovalGate, node: RunningNode, watch: _Watch) -> None:
    """Report the outcome of a gate, and raise unless the gate was approved."""
    node.check()
    watch.resolve(str(gate.status))
    gate.check(f"gate {name!r}")

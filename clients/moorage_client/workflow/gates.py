"""Gates: nodes that wait until a person, or a program, approves them.

A gate is no part of a graph: it is given to an executor, `gates={"deploy": ApprovalGate()}`, and
resolved from any thread. A node waits at its gate when all that it waits for has ended.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final

from moorage_client.workflow.callbacks import ExecutionCallbacks
from moorage_client.workflow.errors import GateRejected, GateTimeout, WorkflowError
from moorage_client.workflow.requirements import finite
from moorage_client.workflow.running import RunningNode, current_node


class GateStatus(StrEnum):
    """How a gate stands."""

    PENDING = "pending"
    WAITING = "waiting"
    """A node waits at it."""
    APPROVED = "approved"
    REJECTED = "rejected"
    TIMED_OUT = "timed_out"


_OPEN: Final = (GateStatus.PENDING, GateStatus.WAITING)


class ApprovalGate:
    """What one node waits at. Safe to use from any thread.

    Args:
        timeout: Seconds that a node waits at most; then it fails. None: without end.
        auto_approve: It is approved from the start.

    Raises:
        WorkflowError: The timeout is no number of seconds.

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
        """How it stands."""
        return self._status

    def approve(self) -> None:
        """Let its node run. Nothing changes where it is resolved already."""
        self._resolve(GateStatus.APPROVED, "")

    def reject(self, reason: str = "") -> None:
        """Let its node fail. Nothing changes where it is resolved already."""
        self._resolve(GateStatus.REJECTED, reason)

    def reset(self) -> None:
        """Make it wait for approval again, for another run."""
        with self._lock:
            self._status, self.reason = GateStatus.PENDING, ""

    def enter(self, wake: Callable[[], object]) -> bool:
        """Wait at it; return False where it is resolved already. For executors."""
        with self._lock:
            if self._status not in _OPEN:
                return False
            self._status = GateStatus.WAITING
            self._waiters[wake] = None
            return True

    def leave(self, wake: Callable[[], object], *, stopped: bool) -> None:
        """Wait no more: its time is over, unless it was resolved or the node was stopped."""
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


def gated(
    tasks: Mapping[str, Callable[[], Any]],
    gates: Mapping[str, ApprovalGate],
    callbacks: ExecutionCallbacks,
    is_async: Callable[[Callable[[], Any]], bool],
) -> dict[str, Callable[[], Any]]:
    """Return tasks of which those with a gate wait at it first.

    Args:
        tasks: By node.
        gates: By node.
        callbacks: What to call when a node waits, and when its gate is resolved.
        is_async: Whether a task is an async function: then its gate is awaited.

    """
    wrapped = dict(tasks)
    for name, gate in gates.items():
        if name in tasks:
            wrap = _awaiting if is_async(tasks[name]) else _blocking
            wrapped[name] = wrap(tasks[name], name, gate, callbacks)
    return wrapped


def _blocking(
    task: Callable[[], Any], name: str, gate: ApprovalGate, callbacks: ExecutionCallbacks
) -> Callable[[], Any]:
    def call() -> Any:
        woken, node = threading.Event(), current_node()
        if gate.enter(woken.set):
            _call(callbacks.on_gate_waiting, name)
            node.on_stop(lambda _: woken.set())
            try:
                woken.wait(gate.timeout)
            finally:
                node.on_stop(None)
                gate.leave(woken.set, stopped=node.stopped)
        _pass(name, gate, node, callbacks)
        return task()

    return call


def _awaiting(
    task: Callable[[], Any], name: str, gate: ApprovalGate, callbacks: ExecutionCallbacks
) -> Callable[[], Any]:
    async def call() -> Any:
        loop, woken, node = asyncio.get_running_loop(), asyncio.Event(), current_node()

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        if gate.enter(wake):
            _call(callbacks.on_gate_waiting, name)
            try:
                async with asyncio.timeout(gate.timeout):
                    await woken.wait()
            except TimeoutError:
                pass
            finally:
                gate.leave(wake, stopped=node.stopped)
        _pass(name, gate, node, callbacks)
        return await task()

    return call


def _pass(name: str, gate: ApprovalGate, node: RunningNode, callbacks: ExecutionCallbacks) -> None:
    """Go through a gate.

    Raises:
        GateRejected: It was rejected.
        GateTimeout: It was not resolved in time.

    """
    node.check()
    status = gate.status
    _call(callbacks.on_gate_resolved, name, str(status))
    if status is GateStatus.REJECTED:
        raise GateRejected(f"gate {name!r} was rejected" + (gate.reason and f": {gate.reason}"))
    if status is not GateStatus.APPROVED:
        raise GateTimeout(f"gate {name!r} was not approved within {gate.timeout} s")


def _call(callback: Callable[..., object] | None, *arguments: Any) -> None:
    if callback is not None:
        callback(*arguments)

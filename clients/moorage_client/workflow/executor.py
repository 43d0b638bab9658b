"""The sync executor: runs a graph on its own threads while the caller waits.

A thread that has run a node takes the next one itself, so a chain of short nodes runs on one
thread. Another thread is woken only if there is a second node to run; that thread wakes the next
one. The thread that called `execute` sleeps until a deadline, news from a pool, or the end.
"""

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Final, Unpack

from moorage_client.workflow.base import (
    WORKERS_MIN,
    BaseExecutor,
    Pools,
    RunOptions,
    Settable,
    is_awaitable,
    wait_for,
)
from moorage_client.workflow.callbacks import ExecutionCallbacks
from moorage_client.workflow.errors import TaskTimeout, WorkflowError
from moorage_client.workflow.execution import Execution, Settings
from moorage_client.workflow.gates import add_gates
from moorage_client.workflow.graph import DAG
from moorage_client.workflow.growth import Expander, Task
from moorage_client.workflow.pool import ResourcePool
from moorage_client.workflow.results import ExecutionResult, NodeResult
from moorage_client.workflow.running import RunningNode, enter, leave, stopped_run

_LOOK: Final = "look"
_END: Final = "end"


class ResourceAwareExecutor(BaseExecutor):
    """Runs a graph on threads; a node starts when the pool grants its requirements.

    A task is called without arguments; within it, `current_node()` has its resources. If the task
    returns an awaitable, the awaitable is run to completion.
    """

    def execute(self, tasks: Mapping[str, Task]) -> ExecutionResult:
        """Run every node once and return the results.

        Ctrl-C cancels the run: running tasks get at most `stop_seconds` to end.

        Args:
            tasks: The tasks, by node. A node without a task is SKIPPED, and delays no other node.

        Raises:
            ResourceError: The pool can never satisfy a requirement; nothing was run (ValueError).
            GraphError: A task is for a node that does not exist; nothing was run (ValueError).
            JournalError: The journal belongs to another graph.
        """
        return self._execute(self._settings, tasks)

    def _execute(self, settings: Settings, tasks: Mapping[str, Task]) -> ExecutionResult:
        pools = Pools(self._run_in)
        run = _Run(settings, tasks, self._workers_max, pools)
        self._cancels.append(run.cancel)
        try:
            return run.play()
        finally:
            self._cancels.remove(run.cancel)
            pools.close()


class DAGExecutor(ResourceAwareExecutor):
    """Runs a graph on threads, without a pool.

    Args:
        dag: The graph. All arguments have the same meaning as in `BaseExecutor`.
        max_workers: At most this many tasks run at a time; default: all ready tasks.
        costs: The cost of each node; the costs decide which ready node starts first.
        callbacks: Functions to call when nodes start and end.
        fail_fast: Skip all nodes that depend on a failed node.
        enable_tracing: Record a trace.
        **more: `timeouts`, `retries`, `gates` and so on.
    """

    def __init__(
        self,
        dag: DAG,
        max_workers: int | None = None,
        costs: Mapping[str, float] | None = None,
        callbacks: ExecutionCallbacks | None = None,
        fail_fast: bool = True,
        enable_tracing: bool = False,
        **more: Unpack[RunOptions],
    ) -> None:
        workers = max(1, len(dag)) if max_workers is None else max_workers
        pool = ResourcePool({})
        super().__init__(
            dag,
            pool,
            None,
            costs,
            callbacks,
            fail_fast,
            enable_tracing,
            max_workers=workers,
            **more,
        )

    def execute(
        self,
        tasks: Mapping[str, Task],
        timeout: float | None = None,
        cancel_event: Settable | None = None,
    ) -> ExecutionResult:
        """Run every node once and return the results; errors as in `ResourceAwareExecutor.execute`.

        Args:
            tasks: The tasks, by node. A node without a task is SKIPPED, and delays no other node.
            timeout: The time limit of each attempt at a node, in seconds.
            cancel_event: Once this event is set, no node is started, and nodes that wait are
                CANCELLED; running tasks continue. `cancel()` also stops running tasks.
        """
        return self._execute(self._settings_of(timeout, cancel_event), tasks)


class DynamicExecutor(DAGExecutor):
    """Runs a copy of a graph, which expanders may change during the run.

    Args:
        dag: The graph; see `BaseExecutor`.
        expanders: The expander of each node, by name, also of added nodes. An expander is called
            with the name and the result of the completed node, and returns the nodes to add and
            to remove, or None. If it raises an error, or the change is invalid, the node fails.
        max_workers: At most this many tasks run at a time; default: 32.
        callbacks: Functions to call when nodes start and end, and when the graph has changed.
        fail_fast: Skip all nodes that depend on a failed node.
        enable_tracing: Record a trace.
        **more: `timeouts`, `retries`, `gates` and so on, but no `journal`.
    """

    def __init__(
        self,
        dag: DAG,
        expanders: Mapping[str, Expander] | None = None,
        max_workers: int | None = None,
        callbacks: ExecutionCallbacks | None = None,
        fail_fast: bool = True,
        enable_tracing: bool = False,
        **more: Unpack[RunOptions],
    ) -> None:
        if more.get("journal") is not None:
            raise WorkflowError("a journal does not support a graph that changes while it runs")
        workers = WORKERS_MIN if max_workers is None else max_workers
        super().__init__(dag, workers, None, callbacks, fail_fast, enable_tracing, **more)
        self._settings = replace(self._settings, expanders=dict(expanders or {}))


class _Run:
    """Runs one call of `execute` on threads.

    Everything but the tasks and callbacks happens under `_lock`; `_kick` wakes the thread that
    called `execute`.
    """

    def __init__(
        self, settings: Settings, tasks: Mapping[str, Task], workers_max: int, pools: Pools
    ) -> None:
        self._settings = settings
        self._tasks = tasks
        self._workers_max = workers_max
        self._pools = pools
        self._lock = threading.Lock()
        self._kick = threading.Event()
        self._execution = Execution(settings, tasks, self._kick.set)
        self._tasks = add_gates(
            tasks,
            settings.gates,
            settings.callbacks,
            lambda: self._execution.trace,
            lambda _: False,
        )
        self._crew: set[threading.Thread] = set()
        self._parked: SimpleQueue[str] = SimpleQueue()
        self._idle = 0
        self._busy = 0
        self._waking = False  # A thread was woken and has not looked for a node yet.
        self._handed: deque[RunningNode] = deque()
        self._running: dict[RunningNode, threading.Thread] = {}
        self._pausing: dict[RunningNode, None] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = itertools.count()
        self._defect: BaseException | None = None  # A defect of this module, not of a task.

    def play(self) -> ExecutionResult:
        with self._lock:
            skipped = self._execution.start()
        self._execution.report_skipped_nodes(skipped)
        try:
            try:
                self._wait()
            except BaseException:
                self.cancel()
                self._wait()
                raise
        finally:
            self._dismiss()
        return self._execution.result()

    def _dismiss(self) -> None:
        """End the threads; wait for them if the run is over, so that no thread runs a task."""
        with self._lock:
            crew = list(self._crew)
            for _ in crew:
                self._parked.put(_END)
            over = self._execution.over
        for thread in crew if over else ():
            thread.join()

    def cancel(self) -> None:
        """Start no more nodes, and send running nodes the stop signal."""
        with self._lock:
            if self._execution.cancelled:
                return
            self._execution.cancel()
            running, handed = list(self._running), list(self._handed)
            self._handed.clear()
            for node in self._pausing:
                self._execution.settle(node, None)
            self._pausing.clear()
            for node in running:
                self._at(self._settings.stop_seconds, partial(self._abandon, node))
        for node in running:
            node.stop(stopped_run())
        for node in handed:  # These nodes hold their resources, and have not begun.
            node.stop(stopped_run())
            result = self._perform(node)
            with self._lock:
                skipped = self._execution.settle(node, result)
            self._execution.tell(node, skipped)
        self._kick.set()

    def _wait(self) -> None:
        """Sleep until the run is over, but handle timers and calls of other threads."""
        while True:
            with self._lock:
                now, due = time.monotonic(), []
                while self._timers and self._timers[0][0] <= now:
                    due.append(heapq.heappop(self._timers)[2])
            for act in due:
                act()
            if self._execution.interrupt is not None:
                self.cancel()
            with self._lock:
                if self._defect is not None:
                    raise self._defect
                self._share()
                if self._execution.over and not self._busy:
                    return
                timers = self._timers
                pause = max(0.0, timers[0][0] - time.monotonic()) if timers else None
            self._kick.wait(pause)
            self._kick.clear()

    def _work(self) -> None:
        """Run nodes until the run ends; each thread of the crew executes this."""
        try:
            self._run_nodes()
        except BaseException as defect:  # noqa: BLE001  # `_wait` raises it to the caller.
            self._defect = defect
            self._kick.set()

    def _run_nodes(self) -> None:
        """Run nodes until there is nothing left to run."""
        node = self._first()
        while node is not None:
            result = self._perform(node)
            if node.abandoned:
                return
            with self._lock:
                del self._running[node]
                skipped = self._over(node, result)
                following = self._pick()
            self._execution.tell(node, skipped)
            node = following or self._park()

    def _perform(self, node: RunningNode) -> NodeResult | None:
        error, value = self._execution.open(node), None
        if error is None:
            token = enter(node)
            try:
                tasks = self._tasks if node.name in self._tasks else self._execution.grown
                value = self._pools.call(tasks[node.name], node)
                if is_awaitable(value):
                    value = wait_for(value, node)
            except BaseException as raised:  # noqa: BLE001  # It is the error of the node.
                error = raised
            finally:
                leave(token)
        return self._execution.close(node, value, error)

    def _over(self, node: RunningNode, result: NodeResult | None) -> list[int]:
        """Record a node's end, or start its next attempt after a pause."""
        pause = self._settings.retry_seconds
        if result is not None or not pause or self._execution.cancelled:
            return self._execution.settle(node, result)
        self._execution.release(node)
        self._pausing[node] = None
        self._at(pause, partial(self._retry, node))
        return []

    def _first(self) -> RunningNode | None:
        """Return the first node of a new thread; None: the thread ends."""
        with self._lock:
            self._waking = False
            node = self._pick()
        return node or self._park()

    def _park(self) -> RunningNode | None:
        """Sleep until there is a node to run; None: the run has ended."""
        while True:
            with self._lock:
                node = self._pick()
                if node is not None:
                    return node
                self._busy -= 1
                self._idle += 1
                if not self._busy:
                    self._kick.set()
            if self._parked.get() == _END:
                return None
            with self._lock:
                self._waking = False

    def _pick(self) -> RunningNode | None:
        """Return a node for this thread, and wake a thread for the next node."""
        node = self._handed.popleft() if self._handed else self._execution.next()
        if node is None:
            return None
        self._running[node] = threading.current_thread()
        timeout = self._settings.timeout_of(node.name)
        if timeout is not None:
            self._at(timeout, partial(self._expire, node, timeout))
        if not self._waking:
            self._share()
        return node

    def _share(self) -> None:
        """Wake or start one more thread if there is a node for it."""
        if self._waking or (not self._idle and len(self._crew) >= self._workers_max):
            return
        if not self._handed:
            node = self._execution.next()
            if node is None:
                return
            self._handed.append(node)
        self._waking = True
        self._busy += 1
        if self._idle:
            self._idle -= 1
            self._parked.put(_LOOK)
            return
        thread = threading.Thread(target=self._work, name="moorage-workflow", daemon=True)
        self._crew.add(thread)
        thread.start()

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` after some seconds, on the thread that called `execute`."""
        when = time.monotonic() + seconds
        heapq.heappush(self._timers, (when, next(self._ties), act))
        if self._timers[0][0] == when:
            self._kick.set()

    def _expire(self, node: RunningNode, timeout: float) -> None:
        if node.ended or not node.stop(TaskTimeout(f"{node.name!r} took over {timeout} s")):
            return
        with self._lock:
            self._at(self._settings.stop_seconds, partial(self._abandon, node))

    def _abandon(self, node: RunningNode) -> None:
        """Continue without waiting for a task that does not end; its thread is not used again."""
        result = self._execution.report_abandoned_node(node)
        if result is None:
            return
        with self._lock:
            self._crew.discard(self._running.pop(node))
            self._busy -= 1
            skipped = self._execution.settle(node, result)
        self._execution.tell(node, skipped)

    def _retry(self, node: RunningNode) -> None:
        with self._lock:
            if node not in self._pausing:
                return  # The run was cancelled.
            del self._pausing[node]
            skipped = self._execution.settle(node, None)
        self._execution.report_skipped_nodes(skipped)

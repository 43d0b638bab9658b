"""The async executor: runs a graph on the caller's event loop.

Async functions run on the loop, as asyncio tasks. All other functions are called on threads, since
they may block; if such a function returns an awaitable, the loop awaits it. All other code,
callbacks included, runs on the loop.
"""

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Final, Unpack

from moorage_client.workflow.base import BaseExecutor, Pools, RunOptions, Settable, is_awaitable
from moorage_client.workflow.callbacks import ExecutionCallbacks
from moorage_client.workflow.errors import TaskTimeout
from moorage_client.workflow.execution import Execution, Settings
from moorage_client.workflow.gates import add_gates
from moorage_client.workflow.graph import DAG
from moorage_client.workflow.growth import Result, Task
from moorage_client.workflow.pool import ResourcePool
from moorage_client.workflow.requirements import ResourceRequirements
from moorage_client.workflow.results import ExecutionResult
from moorage_client.workflow.running import RunningNode, enter, leave, stopped_run

STARTED_AT_ONCE_MAX: Final = 64
"""Maximum nodes that start in one iteration of the event loop; others start in later iterations. So
a wide graph does not block the loop, and its short nodes do not all run at the same time."""

_WORKER: Final = "worker"
_ON_LOOP: Final = 0
_ON_THREAD: Final = 1


class AsyncResourceAwareExecutor(BaseExecutor):
    """Runs a graph as `ResourceAwareExecutor` does, on the caller's event loop; for async tasks.

    Tasks are async functions, functions that return an awaitable, or plain functions. A task that
    needs the running loop when it is called must be an async function: all other functions are
    called on threads, so that they cannot stall the loop.
    """

    async def execute(self, tasks: Mapping[str, Task]) -> ExecutionResult:
        """Run every node once and return the results.

        A cancellation of this call cancels the run: running tasks get a stop signal, and at most
        `stop_seconds` to end before the cancellation continues.

        Args:
            tasks: The tasks, by node. A node without a task is SKIPPED, and delays no other node.

        Raises:
            ResourceError: The pool can never satisfy a requirement; nothing was run (ValueError).
            GraphError: A task is for a node that does not exist; nothing was run (ValueError).
            JournalError: The journal belongs to another graph.
        """
        return await self._execute(self._settings, tasks)

    async def _execute(self, settings: Settings, tasks: Mapping[str, Task]) -> ExecutionResult:
        pools = Pools(self._run_in)
        run = _AsyncRun(settings, tasks, self._workers_max, pools)
        self._cancels.append(run.cancel)
        try:
            return await run.play()
        finally:
            self._cancels.remove(run.cancel)
            pools.close()


class AsyncDAGExecutor(AsyncResourceAwareExecutor):
    """Runs a graph as `DAGExecutor` does, on the caller's event loop; for async tasks.

    Args:
        dag: The graph. All arguments have the same meaning as in `DAGExecutor`.
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
        # Coroutines need no thread, so a counted resource limits their number.
        pool = ResourcePool({} if max_workers is None else {_WORKER: max_workers})
        needs = (
            {} if max_workers is None else dict.fromkeys(dag, ResourceRequirements({_WORKER: 1}))
        )
        super().__init__(
            dag,
            pool,
            needs,
            costs,
            callbacks,
            fail_fast,
            enable_tracing,
            max_workers=workers,
            **more,
        )

    async def execute(
        self,
        tasks: Mapping[str, Task],
        timeout: float | None = None,  # noqa: ASYNC109  # Of each node.
        cancel_event: Settable | None = None,
    ) -> ExecutionResult:
        """Run every node once and return the results; see `DAGExecutor.execute`."""
        return await self._execute(self._settings_of(timeout, cancel_event), tasks)


class _AsyncRun:
    """Runs one call of `execute`. All its code runs on the event loop, so it needs no lock."""

    def __init__(
        self, settings: Settings, tasks: Mapping[str, Task], threads_max: int, pools: Pools
    ) -> None:
        self._settings = settings
        tasks = add_gates(
            tasks, settings.gates, settings.callbacks, lambda: self._execution.trace, _is_async
        )
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        kinds = {name: _ON_LOOP if _is_async(task) else _ON_THREAD for name, task in tasks.items()}
        self._kinds = kinds
        self._crew = _Crew(threads_max, partial(_run_on_thread, pools, tasks), self._returned)
        self._execution = Execution(
            settings, tasks, self._wake, kinds, self._has_space, self._stop_on_loop
        )
        self._returns: deque[tuple[RunningNode, Result, BaseException | None]] = deque()
        self._defect: BaseException | None = None  # A defect of this module, not of a task.
        self._taking = False  # `_take_returns` is scheduled on the loop.
        self._turning = False  # `_next_turn` is scheduled on the loop.
        self._cancelling = False  # Any thread may set it; no node starts after that.
        self._over = asyncio.Event()
        self._running: dict[RunningNode, asyncio.TimerHandle | None] = {}
        self._awaiting: dict[RunningNode, asyncio.Task[None]] = {}
        self._pausing: dict[RunningNode, asyncio.TimerHandle] = {}

    async def play(self) -> ExecutionResult:
        self._execution.report_skipped_nodes(self._execution.start())
        self._pump()
        cancelled: asyncio.CancelledError | None = None
        try:
            while not self._over.is_set():
                try:
                    await self._over.wait()
                except asyncio.CancelledError as error:
                    cancelled = error
                    self._cancel()
        finally:
            self._crew.dismiss()
        if self._defect is not None:
            raise self._defect
        result = self._execution.result()
        if cancelled is not None:
            raise cancelled
        return result

    def cancel(self) -> None:
        """Start no more nodes, and send running nodes the stop signal. Any thread may call this."""
        self._cancelling = True
        for node in list(self._running):  # At once: the caller may be a running task.
            node.stop(stopped_run())
        self._soon(self._cancel)

    def _cancel(self) -> None:
        if self._execution.cancelled:
            return
        self._cancelling = True
        self._execution.cancel()
        for node, timer in self._pausing.items():
            timer.cancel()
            self._execution.settle(node, None)
        self._pausing.clear()
        for node in list(self._running):
            self._loop.call_later(self._settings.stop_seconds, self._abandon, node)
            node.stop(stopped_run())
        self._pump()

    def _pump(self) -> None:
        """Start all nodes that can start now, and detect the end of the run."""
        if self._turning:
            return
        try:
            started = 0
            while (node := self._next()) is not None:
                self._start(node)
                started += 1
                if started == STARTED_AT_ONCE_MAX:
                    self._turning = True
                    self._loop.call_soon(self._next_turn)
                    return
        except BaseException as defect:  # Otherwise the caller of `execute` would wait forever.
            self._defect = defect
            self._over.set()
            raise
        if self._execution.over:
            self._over.set()

    def _next(self) -> RunningNode | None:
        if self._cancelling or self._execution.interrupt is not None:
            self._cancel()
        return self._execution.next()

    def _next_turn(self) -> None:
        self._turning = False
        self._pump()

    def _start(self, node: RunningNode) -> None:
        timeout = self._settings.timeout_of(node.name)
        self._running[node] = (
            None if timeout is None else self._loop.call_later(timeout, self._expire, node, timeout)
        )
        error = self._execution.open(node)
        if error is not None:
            # A direct call would recurse into `_pump` for each node that ends at once.
            self._loop.call_soon(self._end, node, None, error)
        elif self._kinds[node.name] == _ON_LOOP:
            self._await(node, self._tasks[node.name]())
        else:
            self._crew.run(node)

    def _await(self, node: RunningNode, value: Awaitable[Result]) -> None:
        """Await the result of a task, in an asyncio task that the node can cancel."""
        # Each node gets its own context, so that nodes do not share context variables.
        task = self._loop.create_task(self._live(node, value), context=self._context.copy())
        task.add_done_callback(partial(self._end_unstarted, node, value))
        self._awaiting[node] = task
        if node.stopped:
            self._stop_awaiting(node)

    async def _live(self, node: RunningNode, value: Awaitable[Result]) -> None:
        enter(node)
        result, error = None, None
        try:
            result = await value
        except BaseException as raised:  # noqa: BLE001  # It is the error of the node.
            error = raised
        # `_end_unstarted` would only end the node in the next iteration of the loop.
        del self._awaiting[node]
        self._end(node, result, error)

    def _end_unstarted(
        self, node: RunningNode, value: Awaitable[Result], task: "asyncio.Task[None]"
    ) -> None:
        """End a node whose asyncio task was cancelled before it began."""
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._defect = defect
            self._over.set()
        if self._awaiting.pop(node, None) is not None:
            if inspect.iscoroutine(value):
                value.close()
            self._end(node, None, asyncio.CancelledError())

    def _end(self, node: RunningNode, value: Result, error: BaseException | None) -> None:
        if self._cancelling:
            self._cancel()
        result = self._execution.close(node, value, error)
        if node.abandoned:
            return
        timer = self._running.pop(node)
        if timer is not None:
            timer.cancel()
        pause = self._settings.retry_seconds
        skipped: list[int] = []
        if result is None and pause and not self._execution.cancelled:
            self._execution.release(node)
            self._pausing[node] = self._loop.call_later(pause, self._retry, node)
        else:
            skipped = self._execution.settle(node, result)
        self._execution.tell(node, skipped)
        self._pump()

    def _retry(self, node: RunningNode) -> None:
        del self._pausing[node]
        self._execution.report_skipped_nodes(self._execution.settle(node, None))
        self._pump()

    def _expire(self, node: RunningNode, timeout: float) -> None:
        if not node.ended and node.stop(TaskTimeout(f"{node.name!r} took over {timeout} s")):
            self._loop.call_later(self._settings.stop_seconds, self._abandon, node)

    def _abandon(self, node: RunningNode) -> None:
        """Continue the run without waiting for a task that does not end."""
        result = self._execution.report_abandoned_node(node)
        if result is None:
            return
        del self._running[node]
        self._crew.abandon(node)
        self._execution.report_skipped_nodes(self._execution.settle(node, result))
        self._pump()

    def _has_space(self, kind: int) -> bool:
        return kind == _ON_LOOP or self._crew.has_space

    def _stop_on_loop(self, node: RunningNode) -> None:
        self._soon(partial(self._stop_awaiting, node))

    def _stop_awaiting(self, node: RunningNode) -> None:
        task = self._awaiting.get(node)
        if task is not None and not task.cancelling():  # Once, so that the task can clean up.
            task.cancel()

    def _wake(self) -> None:
        self._soon(self._pump)

    def _soon(self, act: Callable[[], object]) -> None:
        # The loop may be closed when an abandoned task ends; then no caller waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act)

    def _returned(self, node: RunningNode, value: Result, error: BaseException | None) -> None:
        """Record that a plain function returned; its thread calls this."""
        if node.abandoned:
            self._execution.close(node, None, None)
            return
        self._returns.append((node, value, error))
        if not self._taking:
            self._taking = True
            self._soon(self._take_returns)

    def _take_returns(self) -> None:
        self._taking = False  # First: a return from now on schedules this function again.
        while self._returns:
            node, value, error = self._returns.popleft()
            self._crew.note_return(node)
            if error is None and is_awaitable(value):
                self._execution.free()
                self._await(node, value)
            else:
                self._end(node, value, error)
        self._pump()


class _Crew:
    """Threads that call plain functions; the event loop starts and ends the threads."""

    def __init__(
        self,
        threads_max: int,
        run: Callable[[RunningNode], Result],
        returned: Callable[[RunningNode, Result, BaseException | None], None],
    ) -> None:
        self._threads_max = threads_max
        self._run = run
        self._returned = returned
        self._nodes: SimpleQueue[RunningNode | None] = SimpleQueue()
        self._busy: set[RunningNode] = set()
        self._threads = 0

    @property
    def has_space(self) -> bool:
        """Whether a thread for one more function is available."""
        return len(self._busy) < self._threads_max

    def run(self, node: RunningNode) -> None:
        """Call the task of a node on one of the threads."""
        self._busy.add(node)
        self._nodes.put(node)
        if self._threads < len(self._busy):
            self._threads += 1
            threading.Thread(target=self._work, name="moorage-workflow", daemon=True).start()

    def note_return(self, node: RunningNode) -> None:
        """Record that a function returned."""
        self._busy.discard(node)

    def abandon(self, node: RunningNode) -> None:
        """Stop counting a thread whose function does not return."""
        if node in self._busy:
            self._busy.discard(node)
            self._threads -= 1

    def dismiss(self) -> None:
        """End all threads, each when its function returns."""
        self._nodes.put(None)

    def _work(self) -> None:
        while (node := self._nodes.get()) is not None:
            value, error = None, None
            token = enter(node)
            try:
                value = self._run(node)
            except BaseException as raised:  # noqa: BLE001  # It is the error of the node.
                error = raised
            finally:
                leave(token)
            self._returned(node, value, error)
            if node.abandoned:
                return  # The run no longer counts this thread.
        self._nodes.put(None)  # For the next thread.


def _is_async(task: Task) -> bool:
    """Return whether a call of the task only makes a coroutine, and runs nothing yet."""
    return inspect.iscoroutinefunction(task) or inspect.iscoroutinefunction(
        getattr(task, "__call__", None)  # noqa: B004  # Asks whether `__call__` is async.
    )


def _run_on_thread(pools: Pools, tasks: Mapping[str, Task], node: RunningNode) -> Result:
    return pools.call(tasks[node.name], node)

"""The common part of the sync and the async executor: options, cancellation, calls of tasks."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import BrokenExecutor, Executor
from dataclasses import replace
from typing import Final, Protocol, TypedDict

from moorage_client.workflow.callbacks import ExecutionCallbacks
from moorage_client.workflow.errors import PoolBroken, ResourceError, WorkflowError
from moorage_client.workflow.execution import Settings
from moorage_client.workflow.gates import ApprovalGate
from moorage_client.workflow.grants import Pool
from moorage_client.workflow.graph import DAG
from moorage_client.workflow.growth import Result, Task
from moorage_client.workflow.journal import RunJournal
from moorage_client.workflow.requirements import ResourceRequirements, finite
from moorage_client.workflow.running import RunningNode

STOP_SECONDS: Final = 10.0
"""Default seconds that a task may continue after its stop signal."""
WORKERS_MIN: Final = 32
"""Default limit of a run's threads on machines with few cores; most tasks wait for processes."""
WORKERS_PER_CORE: Final = 4


class Settable(Protocol):
    """An object with `is_set`, such as `threading.Event` or `asyncio.Event`."""

    def is_set(self) -> bool:
        """Return whether the event is set."""


class RunOptions(TypedDict, total=False):
    """The keyword options of executors without a pool: arguments of `BaseExecutor`."""

    timeouts: Mapping[str, float] | float | None
    retries: Mapping[str, int] | int
    retry_seconds: float
    stop_seconds: float
    journal: RunJournal | None
    gates: Mapping[str, ApprovalGate] | None
    run_in: Executor | Callable[[], Executor] | None


class BaseExecutor:
    """Has the options of both executors, and cancels their runs.

    Args:
        dag: The graph of the nodes.
        resource_pool: The resources: a `ResourcePool` or a `LeasedPool`.
        requirements: The resources of each node, by name; a node without an entry needs none.
        costs: The duration of each node, in any unit, 1.0 by default. Among ready nodes, the node
            with the most expensive path to an end starts first.
        callbacks: Functions to call when nodes start and end.
        fail_fast: Skip all nodes that depend on a failed node; if False, they run nevertheless.
        enable_tracing: Record a trace, in `ExecutionResult.trace`.
        max_workers: At most this many tasks run on threads at a time. Default: the number of nodes,
            but at most 32 or, on large machines, four per core.
        timeouts: The time limit of an attempt in seconds: one number, or numbers by name.
        retries: How often a failed or timed-out node is tried again: one number, or numbers by
            name.
        retry_seconds: How long to wait before each further attempt.
        stop_seconds: How long to wait for a task after its stop signal. A task that runs on even
            then is left behind on a daemon thread, and holds its resources until it ends.
        journal: Stores which nodes have completed, so that a later run continues from there.
        gates: Gates of nodes, by name; such a node waits until it is approved. During the wait it
            holds its resources; its `timeouts` include the wait.
        run_in: A `ProcessPoolExecutor` that runs the tasks, for tasks that compute in Python; the
            threads of the executor then only wait. Tasks and their results must be picklable. In
            such a task `current_node()` does not work, but the variables of
            `current_node().environment` are set in its process. A killed process breaks its pool,
            and all tasks in the pool fail. Retries only help if you pass a function that makes a
            pool: a run makes a pool, makes another one if it breaks, and ends both.

    Raises:
        WorkflowError: A number is invalid or out of its range; the message names it.
        ResourceError: A requirement is not a `ResourceRequirements` (a ValueError).
        GraphError: `timeouts` or `retries` name a node that does not exist (a ValueError).
    """

    def __init__(
        self,
        dag: DAG,
        resource_pool: Pool,
        requirements: Mapping[str, ResourceRequirements] | None = None,
        costs: Mapping[str, float] | None = None,
        callbacks: ExecutionCallbacks | None = None,
        fail_fast: bool = True,
        enable_tracing: bool = False,
        *,
        max_workers: int | None = None,
        timeouts: Mapping[str, float] | float | None = None,
        retries: Mapping[str, int] | int = 0,
        retry_seconds: float = 0.0,
        stop_seconds: float = STOP_SECONDS,
        journal: RunJournal | None = None,
        gates: Mapping[str, ApprovalGate] | None = None,
        run_in: Executor | Callable[[], Executor] | None = None,
    ) -> None:
        for name, needs in (requirements or {}).items():
            if not isinstance(needs, ResourceRequirements):
                raise ResourceError(
                    f"requirements[{name!r}] is {needs!r}; expected a ResourceRequirements"
                )
        if max_workers is not None:
            _check_count(max_workers, "max_workers", 1)
        for table, what in ((timeouts, "timeouts"), (retries, "retries"), (gates, "gates")):
            if isinstance(table, Mapping):
                dag.shape.refuse_strangers(table, what)
        for what, each in _by_name(retries, "retries"):
            _check_count(each, what, 0)
        for what, each in (
            *_by_name({} if timeouts is None else timeouts, "timeouts"),
            ("retry_seconds", retry_seconds),
            ("stop_seconds", stop_seconds),
        ):
            _check_seconds(each, what)
        self._settings = Settings(
            dag,
            resource_pool,
            dict(requirements or {}),
            dict(costs or {}),
            callbacks or ExecutionCallbacks(),
            fail_fast,
            enable_tracing,
            timeouts,
            retries,
            retry_seconds,
            stop_seconds,
            journal,
            dict(gates or {}),
        )
        ceiling = max(WORKERS_MIN, WORKERS_PER_CORE * (os.cpu_count() or 1))
        self._workers_max = max_workers or max(1, min(len(dag), ceiling))
        self._run_in = run_in
        self._cancels: list[Callable[[], None]] = []

    def _settings_of(self, timeout: float | None, cancel_event: Settable | None) -> Settings:
        """Return the settings for one call of `execute`."""
        settings = self._settings
        if timeout is not None:
            _check_seconds(timeout, "timeout")
            settings = replace(settings, timeouts=timeout)
        return settings if cancel_event is None else replace(settings, ends=cancel_event.is_set)

    def cancel(self) -> None:
        """Cancel the runs of this executor. Any thread, task or callback may call this.

        Nodes that did not start are CANCELLED; those that run get a stop signal: coroutines are
        cancelled, and other tasks find `current_node().stopped`. A task that returns a result
        despite the signal counts as completed.
        """
        for cancel in list(self._cancels):
            cancel()


def _by_name(given: object, what: str) -> list[tuple[str, object]]:
    """Return each value with its name for messages: `what`, or `what[NODE]` in a mapping."""
    if not isinstance(given, Mapping):
        return [(what, given)]
    return [(f"{what}[{node!r}]", value) for node, value in given.items()]


def _check_count(number: object, what: str, least: int) -> None:
    if type(number) is not int or number < least:
        raise WorkflowError(f"{what} is {number!r}; expected a whole number, {least} or more")


def _check_seconds(seconds: object, what: str) -> None:
    number = finite(seconds)
    if number is None or not 0 <= number <= threading.TIMEOUT_MAX:
        raise WorkflowError(
            f"{what} is {seconds!r}; expected seconds, from 0 to {threading.TIMEOUT_MAX:.0f}"
        )


def is_awaitable(value: object) -> bool:
    """Return whether a task returned an awaitable instead of its value."""
    return hasattr(type(value), "__await__")


class Pools:
    """The threads and processes in which the tasks of one run are called.

    Args:
        run_in: The argument of `BaseExecutor`.
    """

    def __init__(self, run_in: Executor | Callable[[], Executor] | None) -> None:
        self._make = run_in if not isinstance(run_in, Executor) else None
        self._pool = run_in if isinstance(run_in, Executor) else None
        self._lock = threading.Lock()

    def call(self, task: Task, node: RunningNode) -> Result:
        """Call a task on this thread or elsewhere, wait for it, and return its result.

        Raises:
            PoolBroken: No process is left to call the task.
        """
        pool = self._current()
        if pool is None:
            return task()
        try:
            future = pool.submit(_call_elsewhere, task, dict(node.environment), os.getpid())
            node.on_stop(lambda _: future.cancel())
            try:
                return future.result()
            finally:
                node.on_stop(None)
        except BrokenExecutor as error:
            if self._make is None:
                reason = f"the pool of `run_in` is broken, and no retry helps: {error}"
                raise PoolBroken(f"{reason} Give `run_in` a function that makes a pool.") from error
            self._drop(pool)
            raise

    def close(self) -> None:
        """End the threads and processes, without waiting for them."""
        if self._make is not None and self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _current(self) -> Executor | None:
        with self._lock:
            if self._pool is None and self._make is not None:
                self._pool = self._make()
            return self._pool

    def _drop(self, broken: Executor) -> None:
        with self._lock:
            if self._pool is broken:
                self._pool = None
        broken.shutdown(wait=False)


def _call_elsewhere(task: Task, environment: Mapping[str, str], parent: int) -> Result:
    """Run a task on a thread or in a process, and return its awaited result.

    In a process, set the variables of the task while it runs.
    """
    own = {} if os.getpid() == parent else environment
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        value = task()
        return asyncio.run(_wait_for(value)) if is_awaitable(value) else value
    finally:
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text


async def _wait_for(value: Awaitable[Result]) -> Result:
    return await value


def wait_for(value: Awaitable[Result], node: RunningNode) -> Result:
    """Run an awaitable to its end on this thread; cancel it when its node gets a stop signal."""

    async def wait() -> Result:
        loop, waiting = asyncio.get_running_loop(), asyncio.ensure_future(value)

        def stop(_: RunningNode) -> None:
            with contextlib.suppress(RuntimeError):  # The loop closed: there is nothing to stop.
                loop.call_soon_threadsafe(waiting.cancel)

        node.on_stop(stop)
        try:
            return await waiting
        finally:
            node.on_stop(None)

    return asyncio.run(wait())

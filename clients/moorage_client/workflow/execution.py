"""One run of a graph: the common part of the sync and the async executor.

The two executors (shells) differ only in how they run tasks. Both call `next` for a node to run,
`open` before its task, `close` after it, and `settle` at the node's end. Comments in `Execution`
say which methods need the shell's lock; no method waits.
"""

import time
from asyncio import CancelledError
from collections import ChainMap, Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from moorage_client.workflow.callbacks import ExecutionCallbacks
from moorage_client.workflow.errors import (
    GraphError,
    PoolBroken,
    ResourceError,
    TaskStopped,
    TaskTimeout,
)
from moorage_client.workflow.gates import ApprovalGate
from moorage_client.workflow.grants import Claim, Grant, Pool
from moorage_client.workflow.graph import DAG, Shape
from moorage_client.workflow.growth import DynamicModification, Expander, Result, Task
from moorage_client.workflow.journal import RunJournal
from moorage_client.workflow.requirements import ResourceRequirements
from moorage_client.workflow.results import CallbackError, ExecutionResult, NodeResult, NodeStatus
from moorage_client.workflow.running import RunningNode, stopped_run
from moorage_client.workflow.schedule import Schedule
from moorage_client.workflow.tracing import EventType, ExecutionTrace

CALLBACK_ERRORS_MAX: Final = 1000
"""Maximum exceptions of callbacks in a result; later exceptions are dropped."""

_ENDS: Final = {
    NodeStatus.COMPLETED: EventType.NODE_COMPLETED,
    NodeStatus.FAILED: EventType.NODE_FAILED,
    NodeStatus.TIMED_OUT: EventType.NODE_TIMED_OUT,
    NodeStatus.CANCELLED: EventType.NODE_CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run, from the arguments of both executors."""

    dag: DAG
    pool: Pool
    requirements: Mapping[str, ResourceRequirements]
    costs: Mapping[str, float]
    callbacks: ExecutionCallbacks
    fail_fast: bool
    enable_tracing: bool
    timeouts: Mapping[str, float] | float | None
    retries: Mapping[str, int] | int
    retry_seconds: float
    stop_seconds: float
    journal: RunJournal | None
    gates: Mapping[str, ApprovalGate]
    ends: Callable[[], bool] | None = None
    """Returns whether the run must start no more nodes; None: it never must."""
    expanders: Mapping[str, Expander] = field(default_factory=dict)

    def timeout_of(self, name: str) -> float | None:
        """Return the time limit of one attempt at a node, in seconds."""
        each = self.timeouts
        if each is None:
            return None
        return each.get(name) if isinstance(each, Mapping) else each

    def retries_of(self, name: str) -> int:
        """Return the number of retries of a failed node."""
        each = self.retries
        return each.get(name, 0) if isinstance(each, Mapping) else each

    def validate(self) -> None:
        """Check that the total capacity of the pool is enough for each requirement.

        Raises:
            ResourceError: The capacity is too small for a node, which the message names (a
                ValueError).
        """
        for name, needs in self.requirements.items():
            if not self.pool.can_satisfy(needs):
                raise ResourceError(
                    f"Node {name!r} requires {dict(needs.resources)} but pool capacity is "
                    f"{self.pool.capacities}"
                )


class Execution:
    """The state of one run.

    Args:
        settings: The settings of the run.
        tasks: The tasks, by node.
        wake: Makes the shell call `next`. Any thread may call `wake`, which returns at once, and
            takes no lock that a caller of this class holds.
        kinds: The kind of each task, by name, for `space`.
        space: Returns whether the shell can start a task of this kind now.
        on_stop: Called, from any thread, with a node that gets a stop signal.
    """

    def __init__(
        self,
        settings: Settings,
        tasks: Mapping[str, Task],
        wake: Callable[[], None],
        kinds: Mapping[str, int] | None = None,
        space: Callable[[int], bool] | None = None,
        on_stop: Callable[[RunningNode], object] | None = None,
    ) -> None:
        settings.validate()
        self._settings = settings
        self._wake = wake
        self._space = space
        self._on_stop = on_stop
        self.tasks = tasks
        shape = self._shape = settings.dag.shape
        shape.refuse_strangers(tasks, "tasks")
        self._names, self._numbers = list(shape.names), dict(shape.numbers)
        self._removed: set[str] = set()
        self.grown: dict[str, Task] = {}
        """Tasks of the nodes that expanders have added."""
        self._levels = shape.bottom_levels(settings.costs)
        self._needs, self._kinds, groups = _group(settings, shape, kinds or {})
        self._schedule = Schedule(
            shape.following,
            shape.predecessor_counts,
            _ranks(shape, self._levels),
            groups,
            [name in tasks for name in shape.names],
            fail_fast=settings.fail_fast,
        )
        self._attempts: dict[int, int] = {}
        self._results: list[NodeResult | None] = [None] * len(shape.names)
        self._claims: dict[int, Claim] = {}
        self._news: deque[Claim] = deque()
        self._freed = False
        self._grant: Grant | None = None
        self.cancelled = False
        self.interrupt: BaseException | None = None
        """A `KeyboardInterrupt` or `SystemExit` of a callback: the shell then cancels the run."""
        self.callback_errors: list[CallbackError] = []
        self.trace = ExecutionTrace() if settings.enable_tracing else None
        self._started = time.monotonic()
        self._epoch = time.time() - self._started

    # Methods that need the shell's lock ----------------------------------------------------------

    def start(self) -> list[int]:
        """Begin the run; return the skipped nodes, for `report_skipped_nodes`."""
        if self.trace is not None:
            self.trace.add(EventType.EXECUTION_STARTED)
        journal = self._settings.journal
        done = {} if journal is None else journal.begin(self._shape)
        if journal is not None:
            self._settings.pool.resume(journal)
        for name, value in done.items():
            number = self._shape.numbers[name]
            self._schedule.note_restored(number)
            self._results[number] = NodeResult(name, NodeStatus.CACHE_HIT, value)
            self._add(EventType.CACHE_HIT, name)
        return self._skip(self._schedule.start())

    @property
    def over(self) -> bool:
        """Whether every node has ended."""
        return self._schedule.left == 0

    def next(self) -> RunningNode | None:
        """Return a node that holds its resources and can run now; None: wait until `wake`."""
        if self._settings.ends is not None and self._settings.ends():
            self.cancel()
        if self.interrupt is not None and not self.cancelled:
            return None
        if self._freed:
            self._freed = False
            self._schedule.unblock()
        while self._news or self._schedule.waiting:
            if self._news:
                claim = self._news.popleft()
                del self._claims[claim.number]
                self._schedule.note_run(claim.number)
                return self._running(claim.number, claim.grant, claim.error)
            releases = self._settings.pool.releases
            number = self._schedule.pick(self._admit)
            if number is not None:
                return self._running(number, self._grant, None)
            if not self._schedule.blocked:
                return None
            self._stand_in_line()
            if self._news:
                continue
            if self._settings.pool.watch(self.freed, releases):
                return None
            self._schedule.unblock()
        return None

    def settle(self, node: RunningNode, result: NodeResult | None) -> list[int]:
        """Record the end of a node, and release its resources; return the nodes skipped after it.

        The node's successors become ready before its resources are freed, so the best node, which
        may be a successor, gets the resources. The shell calls `tell` afterwards.

        Args:
            node: The node.
            result: The result of `close`; None makes the node ready for another attempt.
        """
        skipped: list[int] = []
        if result is None and not self.cancelled:
            self._schedule.again(node.number)
        else:
            if result is None:
                result = NodeResult(node.name, NodeStatus.CANCELLED, None, stopped_run())
                result.attempts = node.attempt
            if self.cancelled:
                node.growth = None
            elif node.growth is not None:
                result = self._grow(node, node.growth, result, skipped)
            self._results[node.number] = result
            well = result.status is NodeStatus.COMPLETED
            skipped += self._skip(self._schedule.note_end(node.number, well=well))
        self._put_best_in_line()
        self.release(node)
        return skipped

    def _grow(
        self, node: RunningNode, growth: object, result: NodeResult, skipped: list[int]
    ) -> NodeResult:
        """Apply a node's changes of the graph; return its result, FAILED if a change is invalid."""
        first = len(self._names)
        try:
            growth = _modification(growth)
            added = {spec.name: number for number, spec in enumerate(growth.add_nodes, first)}
            numbers = ChainMap(added, self._numbers)
            self._check(growth)
            edges = [
                ([numbers[n] for n in spec.dependencies], [numbers[n] for n in spec.dependents])
                for spec in growth.add_nodes
            ]
            ready = set(self._schedule.grow(0, edges, [*self._names, *added]))
        except Exception as error:  # noqa: BLE001  # Whatever the expander returned.
            node.growth = wrong = GraphError(
                f"the graph cannot change after {node.name!r}: {error}"
            )
            assert node.end is not None
            node.end = EventType.NODE_FAILED, node.end[1], wrong
            return replace(result, status=NodeStatus.FAILED, result=None, error=wrong)
        self._names += added
        self._numbers |= added
        self._results += [None] * len(added)
        self.grown |= {spec.name: spec.task for spec in growth.add_nodes}
        for number, (before, _) in enumerate(edges, first):
            if self._schedule.waits(number) and any(map(self._note_failure, before)):
                skipped += self._skip([number, *self._schedule.drop(number, failed=True)])
            elif number in ready:
                self._schedule.make_ready(number)
        for name in growth.remove_nodes:
            self._removed.add(name)
            skipped += self._skip(self._schedule.drop(numbers[name], failed=False))
        return result

    def _check(self, growth: DynamicModification) -> None:
        """Refuse an invalid change of the graph."""
        added = Counter(spec.name for spec in growth.add_nodes)
        gone = self._removed.union(growth.remove_nodes)
        for name in growth.remove_nodes:
            if name in self._removed or name not in self._numbers:
                raise ValueError(f"there is no node {name!r} to remove")
        for name in added:
            if name in self._numbers or added[name] > 1:
                raise ValueError(f"there is a node {name!r} already")
        for spec in growth.add_nodes:
            for name in [*spec.dependencies, *spec.dependents]:
                if name in gone or not (name in self._numbers or name in added):
                    raise ValueError(f"there is no node {name!r} for {spec.name!r} to wait for")
        waiting = {*growth.remove_nodes, *(n for s in growth.add_nodes for n in s.dependents)}
        for name in waiting - added.keys():
            if not self._schedule.waits(self._numbers[name]):
                raise ValueError(f"node {name!r} has started, or is over")

    def _note_failure(self, number: int) -> bool:
        """Return whether a node has failed and the run therefore skips its successors."""
        result = self._results[number]
        tried = self._names[number] in self.tasks or self._names[number] in self.grown
        return (
            self._settings.fail_fast
            and result is not None
            and tried
            and result.status not in (NodeStatus.COMPLETED, NodeStatus.CACHE_HIT)
        )

    def release(self, node: RunningNode) -> None:
        """Release a node's resources, unless its task still runs; check all blocked nodes again."""
        self._freed = True
        if node.holds and not node.abandoned:
            node.holds, node.released = False, True
            self._give_back(node)
            if self.trace is not None and (grant := node.grant) is not None:
                resources = grant.requirements.resources
                self.trace.add(EventType.RESOURCE_RELEASED, node.name, resources=resources)
        if self.trace is not None and node.end is not None:
            end, duration, error = node.end
            self.trace.add(end, node.name, duration=duration, error=error)
        node.end = None

    def free(self) -> None:
        """Check every blocked node again, since there is space for more tasks."""
        self._freed = True

    def cancel(self) -> None:
        """Start no more nodes. The shell stops the running nodes."""
        if self.cancelled:
            return
        self.cancelled = True
        for number in self._schedule.cancel():
            self._give_up(number)
        for claim in list(self._claims.values()):
            if self._settings.pool.withdraw(claim):
                del self._claims[claim.number]
                self._schedule.note_run(claim.number)
                self._schedule.note_end(claim.number, well=False)
                self._give_up(claim.number)

    def result(self) -> ExecutionResult:
        """End the run and return its result, or raise the interrupt of a callback."""
        self._settings.pool.unwatch(self.freed)
        if self.trace is not None:
            self.trace.add(EventType.EXECUTION_COMPLETED)
            self.trace.close()
        if self.interrupt is not None:
            raise self.interrupt
        results = {each.name: each for each in self._results if each is not None}
        assert len(results) == len(self._names) - len(self._removed), "a node has no result"
        return ExecutionResult.of(
            results,
            total_duration_seconds=time.monotonic() - self._started,
            trace=self.trace,
            resource_timeline=self._settings.pool.timeline,
            callback_errors=self.callback_errors,
        )

    def _admit(self, group: int, number: int) -> bool:
        if self._space is not None and not self._space(self._kinds[group]):
            return False
        needs = self._needs[group]
        if needs is None:
            self._grant = None
            return True
        self._grant = self._settings.pool.take(needs, self._names[number])
        return self._grant is not None

    def _stand_in_line(self) -> None:
        """Queue the best blocked nodes at the pool, as many as it accepts."""
        pool = self._settings.pool
        while len(self._claims) < pool.claims_max:
            number = self._schedule.reserve(self._may_stand_in_line, self._is_larger)
            if number is None:
                return
            claim = self._claims[number] = self._claim(number)
            try:
                pool.claim(claim)
            except Exception as error:  # noqa: BLE001  # The node fails with it.
                claim.error = error
                self._news.append(claim)
        if self._space is not None:  # A better node may have space now.
            groups = list(filter(self._may_stand_in_line, self._schedule.blocked_groups))
            while (better := self._better(groups)) and self._exchange(*better):
                pass

    def _put_best_in_line(self) -> None:
        """Let the best newly ready node take the queue place of a node of lower rank."""
        grown = self._schedule.grown()
        if self.cancelled or not self._claims or not grown:
            return
        groups = list(filter(self._may_stand_in_line, grown))
        while better := self._better(groups):
            number, group, _ = better
            if self._admit(group, number):
                self._schedule.reserve_of(group)
                claim = self._claims[number] = self._claim(number)
                claim.grant = self._grant
                self._news.append(claim)
            elif not self._exchange(*better):
                return

    def _better(self, groups: Iterable[int]) -> tuple[int, int, Claim] | None:
        """Return the best node of some groups, its group, and a waiting claim of a worse node.

        Return None if no waiting claim is of a worse node.
        """
        waiting = [number for number, claim in self._claims.items() if claim.grant is None]
        if not waiting:
            return None
        worst = self._schedule.worst(waiting)
        ahead = self._schedule.ahead_of(worst, groups)
        return (*ahead, self._claims[worst]) if ahead else None

    def _exchange(self, number: int, group: int, waiting: Claim) -> bool:
        """Give the queue place of `waiting` to a node; False if `waiting` is already granted."""
        claim = self._claim(number)
        if not self._settings.pool.exchange(waiting, claim):
            return False
        self._schedule.reserve_of(group)
        self._schedule.make_ready(waiting.number)
        del self._claims[waiting.number]
        self._claims[number] = claim
        return True

    def _claim(self, number: int) -> Claim:
        name, settings = self._names[number], self._settings
        needs, level = settings.requirements[name], self._levels[number]
        return Claim(name, needs, self._note_grant, level, settings.journal, number)

    def _is_larger(self, group: int, than: int) -> bool:
        needs, others = self._needs[group], self._needs[than]
        return (
            needs is not None and others is not None and self._settings.pool.outsized(needs, others)
        )

    def _may_stand_in_line(self, group: int) -> bool:
        has_space = self._space is None or self._space(self._kinds[group])
        return has_space and self._needs[group] is not None

    def _running(self, number: int, grant: Grant | None, refused: Exception | None) -> RunningNode:
        attempt = self._attempts.get(number, 0) + 1
        if attempt > 1 or self._settings.retries:
            self._attempts[number] = attempt
        node = RunningNode(self._names[number], number, attempt, grant, self._on_stop)
        node.refused = refused
        if grant is not None:
            grant.on_lost = node.stop
            if grant.lost is not None:  # The grant was lost before `on_lost` was set.
                node.stop(grant.lost)
        if self.cancelled:  # The node got its grant just before the run was cancelled.
            node.stop(stopped_run())
        return node

    def _give_up(self, number: int) -> None:
        name = self._names[number]
        attempts = self._attempts.get(number, 0)
        self._results[number] = NodeResult(
            name, NodeStatus.CANCELLED, None, stopped_run(), 0.0, attempts
        )
        self._add(EventType.NODE_CANCELLED, name)

    def _skip(self, numbers: list[int]) -> list[int]:
        for number in numbers:
            self._results[number] = NodeResult(self._names[number], NodeStatus.SKIPPED)
        return numbers

    # Methods for any thread, without the lock
    # ------------------------------------------------------

    def freed(self) -> None:
        """Record that a node may fit now; pools and executors with limited threads call this."""
        self._freed = True
        self._wake()

    def _note_grant(self, claim: Claim) -> None:
        self._news.append(claim)
        self._wake()

    # Methods for the thread of a node, without the lock
    # ---------------------------------------------

    def tell(self, node: RunningNode, skipped: Iterable[int]) -> None:
        """Call the callbacks for a node's release, and for the nodes that are skipped after it."""
        if node.released and (grant := node.grant) is not None:
            node.released = False
            if (call := self._settings.callbacks.on_resource_released) is not None:
                resources = dict(grant.requirements.resources)
                self._report("on_resource_released", node.name, call, node.name, resources)
        if (growth := node.growth) is not None:
            node.growth, callbacks = None, self._settings.callbacks
            if isinstance(growth, GraphError):
                self._call("on_failure", callbacks.on_failure, node.name, growth)
            else:
                self._call("on_dynamic_expand", callbacks.on_dynamic_expand, node.name, growth)
        self.report_skipped_nodes(skipped)

    def report_skipped_nodes(self, numbers: Iterable[int]) -> None:
        """Report skipped nodes to trace and callbacks."""
        call = self._settings.callbacks.on_skip
        for number in numbers:
            name = self._names[number]
            self._add(EventType.NODE_SKIPPED, name)
            if call is not None:
                self._report("on_skip", name, call, name)

    def open(self, node: RunningNode) -> BaseException | None:
        """Report the start of a node; return why its task must not be called, or None."""
        node.started = time.monotonic()
        if node.refused is not None:
            return node.refused
        grant, trace, callbacks = node.grant, self.trace, self._settings.callbacks
        if trace is not None:
            trace.add(EventType.NODE_STARTED, node.name)
        if grant is not None:
            resources = grant.requirements.resources
            if trace is not None:
                trace.add(EventType.RESOURCE_ACQUIRED, node.name, resources=resources)
            if (call := callbacks.on_resource_acquired) is not None:
                self._report("on_resource_acquired", node.name, call, node.name, dict(resources))
        if callbacks.on_start is not None and not node.stopped:
            try:
                callbacks.on_start(node.name)
            except BaseException as error:  # noqa: BLE001  # The node fails with it.
                return self._caught(error)
        return node.stopped_by

    def close(
        self, node: RunningNode, value: Result, error: BaseException | None
    ) -> NodeResult | None:
        """Report the end of a node's task.

        Args:
            node: The node whose task ended.
            value: The result of its task.
            error: The exception of its task, or None.

        Returns:
            The node's result, for `settle`; None if the node is tried again.
        """
        if not node.finish():  # The run abandoned the node, so its result is already recorded.
            if node.grant is not None:
                self._give_back(node)
                self.freed()
            return None
        return self._conclude(node, value, error)

    def report_abandoned_node(self, node: RunningNode) -> NodeResult | None:
        """Report a node as ended although its task still runs; return None if the task has ended.

        The node's resources are released when the task ends.
        """
        if not node.abandon():
            return None
        result = self._conclude(node, None, None)
        assert result is not None
        return result

    def _conclude(
        self, node: RunningNode, value: Result, error: BaseException | None
    ) -> NodeResult | None:
        duration = time.monotonic() - node.started
        status, error = _status(node, error)
        if status is NodeStatus.COMPLETED:
            error = self._report_result(node, value)
            status = NodeStatus.COMPLETED if error is None else NodeStatus.FAILED
        again = status is not NodeStatus.COMPLETED and self._try_again(node, status, error)
        if error is not None and not again and self._settings.callbacks.on_failure is not None:
            call = self._settings.callbacks.on_failure
            self._report("on_failure", node.name, call, node.name, error)
        node.end = EventType.NODE_RETRIED if again else _ENDS[status], duration, error
        if again:
            return None
        return NodeResult(
            node.name,
            status,
            value if status is NodeStatus.COMPLETED else None,
            error,
            duration,
            node.attempt,
            node.started + self._epoch,
            node.placement,
        )

    def _report_result(self, node: RunningNode, value: Result) -> BaseException | None:
        """Report the result of a task to callbacks; return the exception of a callback, or None."""
        try:
            if (expand := self._settings.expanders.get(node.name)) is not None:
                node.growth = expand(node.name, value)
            if (call := self._settings.callbacks.on_complete) is not None:
                call(node.name, value)
            if (journal := self._settings.journal) is not None:
                journal.completed(node.name, value)
        except BaseException as error:  # noqa: BLE001  # The node fails with it.
            return self._caught(error)
        return None

    def _try_again(
        self, node: RunningNode, status: NodeStatus, error: BaseException | None
    ) -> bool:
        return (
            status in (NodeStatus.FAILED, NodeStatus.TIMED_OUT)
            and not self.cancelled
            and not node.abandoned
            and not isinstance(error, PoolBroken)
            and node.attempt <= self._settings.retries_of(node.name)
        )

    def _give_back(self, node: RunningNode) -> None:
        pool, journal, name = self._settings.pool, self._settings.journal, node.name
        self._report("release", name, pool.give_back, node.grant, name, self.freed, journal)

    def _report(
        self, callback: str, name: str, call: Callable[..., object], *arguments: object
    ) -> None:
        """Call a callback; store its exception, which does not fail the node."""
        try:
            call(*arguments)
        except BaseException as error:  # noqa: BLE001  # The result of the run lists it.
            self._caught(error)
            if len(self.callback_errors) < CALLBACK_ERRORS_MAX:
                self.callback_errors.append(CallbackError(callback, name, error))

    def _caught(self, error: BaseException) -> BaseException:
        """Return the exception of a callback; Ctrl-C and `sys.exit` also interrupt the run."""
        if isinstance(error, KeyboardInterrupt | SystemExit):
            self.interrupt = error
            self._wake()
        return error

    def _call(
        self, callback: str, call: Callable[..., object] | None, name: str, what: object
    ) -> None:
        if call is not None:
            self._report(callback, name, call, name, what)

    def _add(self, event: EventType, name: str) -> None:
        if self.trace is not None:
            self.trace.add(event, name)


def _modification(returned: object) -> DynamicModification:
    """Return what an expander returned; raise an error if it is not a change of the graph."""
    if not isinstance(returned, DynamicModification):
        raise TypeError(f"expected a DynamicModification or None, found {returned!r}")
    return returned


def _status(
    node: RunningNode, error: BaseException | None
) -> tuple[NodeStatus, BaseException | None]:
    """Return the status of a task, from its exception and its stop signal."""
    why = node.stopped_by
    if isinstance(why, TaskTimeout):
        return NodeStatus.TIMED_OUT, why
    if isinstance(why, TaskStopped):
        if error is None and not node.abandoned:
            return NodeStatus.COMPLETED, None  # The task ended before it saw the stop signal.
        return NodeStatus.CANCELLED, why
    if why is not None:  # The node's lease was lost, so its result may be invalid.
        return NodeStatus.FAILED, why
    if isinstance(error, CancelledError):
        return NodeStatus.CANCELLED, error
    return (NodeStatus.COMPLETED, None) if error is None else (NodeStatus.FAILED, error)


def _ranks(shape: Shape, levels: Sequence[float]) -> list[int]:
    """Number the nodes by priority: the highest bottom level first, then topological order."""
    ranks = [0] * len(shape.names)
    for rank, number in enumerate(sorted(shape.order, key=levels.__getitem__, reverse=True)):
        ranks[number] = rank
    return ranks


def _group(
    settings: Settings, shape: Shape, kinds: Mapping[str, int]
) -> tuple[list[ResourceRequirements | None], list[int], list[int]]:
    """Group the nodes with equal requirements and kind of task.

    Return the requirements by group, the kind by group, and the group by node.
    """
    numbers: dict[tuple[ResourceRequirements | None, int], int] = {}
    groups = [
        numbers.setdefault((settings.requirements.get(name), kinds.get(name, 0)), len(numbers))
        for name in shape.names
    ]
    return [needs for needs, _ in numbers], [kind for _, kind in numbers], groups

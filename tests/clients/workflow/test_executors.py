"""Both executors behave alike on any graph: order, capacity and failure."""

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage_client.workflow import (
    ApprovalGate,
    AsyncDAGExecutor,
    AsyncResourceAwareExecutor,
    DAGExecutor,
    ExecutionCallbacks,
    GateRejected,
    GateStatus,
    GateTimeout,
    GraphError,
    NodeStatus,
    PoolBroken,
    ResourceAwareExecutor,
    ResourcePool,
    ResourceRequirements,
    TaskStopped,
    TaskTimeout,
    WorkflowError,
    current_node,
)
from moorage_client.workflow.async_executor import STARTED_AT_ONCE_MAX
from moorage_client.workflow.schedule import PASSED_MAX
from moorage_client.workflow.waiting import OVERTAKEN_MAX
from tests.clients.workflow.graphs import KINDS, both, execute, gpu, graph, noting, run, statuses

WAIT = 60  # Longest wait in seconds; longer means that a run hangs.


@both
@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ({"max_workers": 0}, "max_workers is 0"),
        ({"max_workers": "2"}, "max_workers is '2'"),
        ({"timeouts": -1}, "timeouts is -1"),
        ({"timeouts": {"a": float("nan")}}, r"timeouts\['a'\] is nan"),
        ({"timeouts": float("inf")}, "timeouts is inf; expected seconds"),
        ({"retries": -1}, "retries is -1"),
        ({"retries": {"a": 1.5}}, r"retries\['a'\] is 1.5"),
        ({"retry_seconds": float("nan")}, "retry_seconds is nan"),
        ({"stop_seconds": None}, "stop_seconds is None"),
        ({"requirements": {"a": {"gpu": 1}}}, r"requirements\['a'\].*ResourceRequirements"),
    ],
)
def test_an_error_names_a_wrong_argument_before_anything_runs(kind, argument, said):
    with pytest.raises(WorkflowError, match=said):
        kind(graph("a"), ResourcePool({"gpu": 1}), **argument)


@both
def test_a_task_or_a_bound_for_an_unknown_node_is_an_error_before_anything_runs(kind):
    ran: list[str] = []
    executor = kind(graph("train", "test"), ResourcePool({}))
    tasks = noting(ran, ["test", "trian"])
    with pytest.raises(ValueError, match="tasks: there is no node 'trian'; did you mean 'train'"):
        execute(executor, tasks)
    assert ran == []
    with pytest.raises(GraphError, match="there is no node 'x'; there are 'train', 'test'"):
        execute(executor, {"x": list})
    for argument in ("timeouts", "retries"):
        with pytest.raises(GraphError, match=f"{argument}: there is no node 'trian'"):
            kind(graph("train"), ResourcePool({}), **{argument: {"trian": 1}})


@both
@pytest.mark.parametrize("task", [None, 5])
def test_a_task_that_cannot_be_called_fails_its_node(kind, task):
    assert isinstance(run(kind, {"a": task})["a"].error, TypeError)


@st.composite
def workflows(draw):
    """Graphs with needs and durations of nodes, and with failing, missing or async tasks."""
    size = draw(st.integers(1, 14))
    pairs = [(a, b) for b in range(size) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=30)) if pairs else []
    some = st.sets(st.integers(0, size - 1).map(str))
    needs = st.dictionaries(st.sampled_from(["gpu", "cpu"]), st.integers(0, 3))
    return (
        graph(*map(str, range(size)), edges=" ".join(f"{a}>{b}" for a, b in edges)),
        {str(n): ResourceRequirements(draw(needs)) for n in range(size) if draw(st.booleans())},
        {str(n): draw(st.integers(0, 9)) for n in range(size)},
        {"fails": draw(some), "missing": draw(some), "async": draw(some)},
        draw(st.booleans()),
    )


class Witness:
    """Tasks that record their observations."""

    def __init__(self, dag, pool, requirements, kinds):
        self.dag, self.pool, self.requirements, self.kinds = dag, pool, requirements, kinds
        self.order: list[str] = []
        self.lock = threading.Lock()
        self.running: dict[str, int] = {"gpu": 0, "cpu": 0}

    def tasks(self):
        return {name: self.task(name) for name in self.dag if name not in self.kinds["missing"]}

    def task(self, name):
        needs = self.requirements.get(name, ResourceRequirements()).resources

        def begin():
            with self.lock:
                self.order.append(name)
                for resource, amount in needs.items():
                    self.running[resource] += amount
                    assert self.running[resource] <= self.pool.capacities[resource]

        def end():
            with self.lock:
                for resource, amount in needs.items():
                    self.running[resource] -= amount
            if name in self.kinds["fails"]:
                raise RuntimeError(name)
            return name

        def plain():
            begin()
            return end()

        async def coroutine():
            begin()
            await asyncio.sleep(0)
            return end()

        return coroutine if name in self.kinds["async"] else plain


@both
def test_a_task_knows_its_node(kind):
    def task():
        node = current_node()
        return (node.name, node.attempt, node.resources, node.placement, dict(node.environment))

    result = execute(kind(graph("a"), ResourcePool({"gpu": 1}), {"a": gpu(1)}), {"a": task})
    assert result["a"].result == ("a", 1, {"gpu": 1}, (), {})
    with pytest.raises(WorkflowError):
        current_node()


@settings(max_examples=80)
@given(workflows())
def test_any_graph_runs_in_order_within_capacity_and_both_executors_agree(workflow):
    dag, requirements, costs, kinds, fail_fast = workflow
    outcomes = []
    for kind in KINDS:
        pool = ResourcePool({"gpu": 3, "cpu": 3})
        witness = Witness(dag, pool, requirements, kinds)
        skipped = []
        callbacks = ExecutionCallbacks(on_skip=skipped.append)
        executor = kind(dag, pool, requirements, costs, callbacks, fail_fast, enable_tracing=True)
        result = execute(executor, witness.tasks())
        assert len(witness.order) == len(set(witness.order)), "a node ran twice"
        assert pool.available == {"gpu": 3, "cpu": 3}
        assert result.callback_errors == []
        at = {name: place for place, name in enumerate(witness.order)}
        for before, after in dag.edges:
            if before in at and after in at:
                assert at[before] < at[after]
        expected = expected_statuses(dag, kinds, fail_fast=fail_fast)
        assert statuses(result) == expected
        assert set(witness.order) == {n for n, s in expected.items() if s != "skipped"}
        assert sorted(skipped) == sorted(n for n, s in expected.items() if s == "skipped")
        for name in dag:
            assert result[name].result == (name if expected[name] == "completed" else None)
        json.loads(result.trace.to_chrome_trace())
        events = sorted(
            (e.event_type, e.node_name or "", e.error or "") for e in result.trace.events
        )
        outcomes.append(events)
    assert outcomes[0] == outcomes[1], "the traces have the same events"


def expected_statuses(dag, kinds, *, fail_fast):
    """Return the expected status of each node, by a second, simpler definition."""
    expected, doomed = {}, set()
    for name in dag.topological_order():
        if name in doomed or name in kinds["missing"]:
            expected[name] = "skipped"
        else:
            expected[name] = "failed" if name in kinds["fails"] else "completed"
        if fail_fast and (expected[name] == "failed" or name in doomed):
            doomed.update(dag.successors(name))
    return expected


@both
def test_a_release_outside_the_executor_wakes_the_executor_which_does_not_poll(kind):
    class Counting(ResourcePool):
        taken = 0

        def take(self, requirements, node_name):
            self.taken += 1
            return super().take(requirements, node_name)

    pool, dag = Counting({"gpu": 2}), graph("a", "b", "c")
    pool.acquire(gpu(2))
    executor = kind(dag, pool, {"a": gpu(2), "b": gpu(1), "c": gpu(2)})
    done = []
    tasks = dict.fromkeys(dag, lambda: 1)
    thread = threading.Thread(target=lambda: done.append(execute(executor, tasks)))
    thread.start()
    while not pool.taken:
        time.sleep(0.001)  # Another thread reaches it, or the test times out.
    time.sleep(0.1)  # Time to settle; polling each millisecond would wake it 100 times.
    before = pool.taken
    time.sleep(0.1)  # See the comment above.
    assert pool.taken == before
    for taker in ("b", None):
        pool.release(gpu(1))
        while taker and not any(each.node_name == taker for each in pool.timeline.snapshots):
            time.sleep(0.001)  # As above.
    thread.join(WAIT)
    assert done[0].succeeded == 3


@both
@settings(max_examples=40)
@given(drawn=st.data())
def test_on_one_gpu_the_nodes_run_in_the_order_of_the_longest_paths(kind, drawn):
    dag, *_ = drawn.draw(workflows())
    costs = {name: drawn.draw(st.integers(1, 9)) for name in dag}
    # Their other requirements differ, and there is enough of them.
    cpus = {name: drawn.draw(st.integers(0, 3)) for name in dag}
    needs = {name: ResourceRequirements({"gpu": 1, "cpu": n}) for name, n in cpus.items()}
    order: list[str] = []
    pool = ResourcePool({"gpu": 1, "cpu": 8})
    result = execute(kind(dag, pool, needs, costs), noting(order, dag))
    assert result.succeeded == len(dag)
    levels = dict(zip(dag.names, dag.bottom_levels(costs), strict=True))
    left = list(dag.topological_order())
    for name in order:
        ready = [each for each in left if not set(dag.predecessors(each)) & set(left)]
        assert levels[name] == max(levels[each] for each in ready)
        left.remove(name)
    assert pool.available == {"gpu": 1, "cpu": 8}


@both
def test_waiting_nodes_do_not_interrupt_a_long_chain(kind):
    chain = [f"chain-{number}" for number in range(3 * PASSED_MAX)]
    edges = " ".join(f"{a}>{b}" for a, b in itertools.pairwise(chain))
    dag = graph("other", *chain, edges=edges)
    needs = {**dict.fromkeys(chain, gpu(1)), "other": ResourceRequirements({"gpu": 1, "cpu": 4})}
    order: list[str] = []
    execute(kind(dag, ResourcePool({"gpu": 1, "cpu": 8}), needs), noting(order, dag))
    assert order == [*chain[:-1], *sorted([chain[-1], "other"], key=order.index)]


@both
def test_a_retried_node_starts_before_nodes_with_a_cheaper_path(kind):
    order: list[str] = []

    def fail_once():
        order.append("a")
        if order.count("a") == 1:
            raise ValueError("once")

    tasks = noting(order, "abd") | {"a": fail_once}
    run(kind, tasks, edges="a>d", costs={"d": 5, "b": 3}, retries=1)
    assert order == ["a", "a", "d", "b"]


@both
def test_a_run_takes_turns_with_other_callers_of_a_shared_pool(kind):
    """The other caller gets the GPU before the run has finished its whole chain."""
    pool, order = ResourcePool({"gpu": 1}), []
    dag, goes_on = graph(*"abcdz", edges="a>b b>c c>d"), threading.Event()
    tasks = noting(order, dag) | {"a": lambda: (order.append("a"), goes_on.wait(WAIT))}
    executor = kind(dag, pool, dict.fromkeys(dag, gpu(1)), {"z": 0.5})
    thread = threading.Thread(target=lambda: execute(executor, tasks), daemon=True)
    thread.start()
    threading.Timer(0.1, goes_on.set).start()
    assert pool.acquire(gpu(1), WAIT)
    order.append("caller")
    pool.release(gpu(1))
    thread.join(WAIT)
    assert order.index("caller") <= 3
    assert [each for each in order if each != "caller"] == ["a", "b", "c", "d", "z"]


@both
def test_a_large_node_does_not_starve_while_small_nodes_start(kind):
    small = [f"small-{number}" for number in range(100)]
    dag = graph("large", *small)
    pool = ResourcePool({"gpu": 2})
    needs = {**dict.fromkeys(small, gpu(1)), "large": gpu(2)}
    costs = {**dict.fromkeys(small, 9.0), "large": 1.0}
    order = []
    first = threading.Event()

    def work(name):
        order.append(name)
        # One GPU stays held until many nodes have used the other one, or the large node has run.
        if name == small[0]:
            first.wait(0.1)
        elif len(order) > 60:
            first.set()

    tasks = {name: (lambda name=name: work(name)) for name in dag}
    execute(kind(dag, pool, needs, costs), tasks)
    assert order.index("large") <= 2 * (PASSED_MAX + OVERTAKEN_MAX)


@both
def test_two_runs_and_a_caller_share_a_pool(kind):
    pool, results = ResourcePool({"gpu": 2}), []
    dag = graph(*map(str, range(60)))
    needs = dict.fromkeys(dag, gpu(1)) | {"7": gpu(2)}

    def run():
        results.append(execute(kind(dag, pool, needs), dict.fromkeys(dag, lambda: 1)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        with pool.holding(gpu(2), WAIT):
            assert pool.available == {"gpu": 0}
    for thread in threads:
        thread.join(WAIT)
    assert [each.succeeded for each in results] == [60, 60]
    assert pool.available == {"gpu": 2}


@both
def test_a_task_that_takes_too_long_gets_a_stop_signal_and_its_followers_are_skipped(kind):
    failed, cleaned = {}, []

    def slow():
        assert current_node().wait_stopped(WAIT)
        current_node().check()

    async def sleeps():
        try:
            await asyncio.sleep(WAIT)
        finally:
            cleaned.append(True)

    tasks = {"slow": slow, "sleeps": sleeps, "after": lambda: 1, "other": lambda: 1}
    callbacks = ExecutionCallbacks(on_failure=failed.__setitem__)
    bounds = {"slow": 0.02, "sleeps": 0.02}
    result = run(kind, tasks, edges="slow>after", gpus=2, callbacks=callbacks, timeouts=bounds)
    ends = ["timed_out", "timed_out", "skipped", "completed"]
    assert statuses(result) == dict(zip(tasks, ends, strict=True))
    assert (result.timed_out, result.skipped, cleaned) == (2, 1, [True])
    assert isinstance(result["slow"].error, TaskTimeout)
    assert failed == {name: result[name].error for name in ("slow", "sleeps")}


@both
def test_a_task_that_does_not_stop_is_left_behind_and_holds_its_resources_until_it_ends(kind):
    let_go, pool, dag = threading.Event(), ResourcePool({"gpu": 2}), graph("stuck", "next", "b")
    needs = dict.fromkeys(dag, gpu(1))
    executor = kind(dag, pool, needs, timeouts={"stuck": 0.01}, stop_seconds=0.02, max_workers=1)
    tasks = {"stuck": lambda: let_go.wait(WAIT), "next": lambda: 1, "b": lambda: 2}
    result = execute(executor, tasks)
    assert [result[name].status for name in dag] == ["timed_out", "completed", "completed"]
    assert pool.available == {"gpu": 1}, "the task still uses its GPU"
    let_go.set()
    assert pool.acquire(gpu(2), WAIT)


@both
def test_a_timed_out_task_of_a_cancelled_run_is_abandoned_once(kind):
    let_go, pool = threading.Event(), ResourcePool({"gpu": 1})

    def block():
        current_node().wait_stopped(WAIT)
        executor.cancel()
        let_go.wait(WAIT)

    executor = kind(graph("a"), pool, {"a": gpu(1)}, timeouts=0.01, stop_seconds=0.05)
    result = execute(executor, {"a": block})
    assert (result["a"].status, result.timed_out) == ("timed_out", 1)
    let_go.set()
    assert pool.acquire(gpu(1), WAIT)


@both
def test_a_node_that_fails_is_tried_again(kind):
    calls, events = [], []

    def flaky():
        calls.append(current_node().attempt)
        if len(calls) < 3:
            raise OSError("the first two attempts fail")
        return "done"

    more = {"retries": {"a": 2, "c": 1}, "retry_seconds": 0.001, "enable_tracing": True}
    callbacks = ExecutionCallbacks(on_failure=lambda name, _: events.append(name))
    tasks = {"a": flaky, "b": lambda: 1, "c": lambda: 1 / 0}
    result = run(kind, tasks, edges="a>b", callbacks=callbacks, **more)
    assert (result["a"].result, result["a"].attempts, calls) == ("done", 3, [1, 2, 3])
    assert (result["c"].status, result["c"].attempts) == ("failed", 2)
    assert (result.succeeded, events) == (2, ["c"])
    kinds = [event.event_type for event in result.trace.events_for_node("a")]
    assert kinds.count("node_retried") == 2
    assert kinds.count("resource_released") == 3


@both
@pytest.mark.parametrize("moment", range(6))
def test_cancellation_of_a_run_at_any_moment_leaks_no_resources(kind, moment):
    """The run stops in a callback, in a task, between nodes, or while nodes wait for the pool."""
    pool, dag = ResourcePool({"gpu": 1}), graph(*"abcd", edges="a>b")
    calls = iter(range(100))

    def maybe(*_):
        if next(calls) == moment:
            executor.cancel()

    names = ("on_resource_acquired", "on_start", "on_complete", "on_resource_released")
    callbacks = ExecutionCallbacks(**dict.fromkeys(names, maybe))
    executor = kind(dag, pool, dict.fromkeys(dag, gpu(1)), callbacks=callbacks)
    result = execute(executor, dict.fromkeys(dag, lambda: current_node().name))
    assert pool.available == {"gpu": 1}
    assert result.cancelled > 0
    assert result.cancelled + result.succeeded == 4
    for each in result.node_results.values():
        assert isinstance(each.error, TaskStopped) is (each.status is NodeStatus.CANCELLED)


@both
@pytest.mark.parametrize(
    ("who", "a"),
    [("on_complete", "completed"), ("on_start", "cancelled"), ("task", "completed")],
)
def test_no_node_starts_after_the_run_is_cancelled(kind, who, a):
    def cancel(*_):
        executor.cancel()

    async def task():
        executor.cancel()

    ran: list[str] = []
    callbacks = ExecutionCallbacks() if who == "task" else ExecutionCallbacks(**{who: cancel})
    executor = kind(graph(*"ab", edges="a>b"), ResourcePool({}), callbacks=callbacks)
    result = execute(executor, noting(ran, "ab") | ({"a": task} if who == "task" else {}))
    assert statuses(result) == {"a": a, "b": "cancelled"}
    assert "b" not in ran


@both
@pytest.mark.parametrize("on_loop", [False, True])
def test_a_task_that_cancels_its_own_run_is_stopped(kind, on_loop):
    def plain():
        executor.cancel()
        current_node().check()

    async def coroutine():
        plain()

    executor = kind(graph("a"), ResourcePool({}))
    result = execute(executor, {"a": coroutine if on_loop else plain})
    assert result["a"].status == "cancelled"


@both
def test_a_cancelled_run_stops_its_tasks_and_does_not_wait_for_a_retry(kind):
    pool, dag = ResourcePool({"gpu": 9}), graph("waits", "sleeps", "retries", "done")

    def waits():
        assert current_node().wait_stopped(WAIT)
        raise RuntimeError("interrupted")

    async def sleeps():
        await asyncio.sleep(WAIT)

    def retries():
        threading.Timer(0.05, executor.cancel).start()
        raise OSError

    more = {"retries": {"retries": 5}, "retry_seconds": WAIT}
    executor = kind(dag, pool, dict.fromkeys(dag, gpu(1)), **more)
    tasks = {"waits": waits, "sleeps": sleeps, "retries": retries, "done": lambda: 1}
    result = execute(executor, tasks)
    assert [result[name].status for name in dag] == [*["cancelled"] * 3, "completed"]
    assert pool.available == {"gpu": 9}


async def test_cancelling_the_awaiting_task_cancels_the_run():
    pool, dag = ResourcePool({"gpu": 1}), graph("a", "b")
    started = asyncio.Event()

    async def task():
        started.set()
        await asyncio.sleep(WAIT)

    executor = AsyncResourceAwareExecutor(dag, pool, dict.fromkeys(dag, gpu(1)))
    run = asyncio.create_task(executor.execute(dict.fromkeys(dag, task)))
    await started.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert pool.available == {"gpu": 1}


async def test_tasks_cancelled_from_outside_before_they_begin_are_cancelled_nodes():
    def cancel_nodes():
        for task in asyncio.all_tasks() - {me}:
            task.cancel()

    async def task():
        ran.append(1)

    me, ran = asyncio.current_task(), []
    soon = asyncio.get_running_loop().call_soon
    callbacks = ExecutionCallbacks(on_start=lambda _: soon(cancel_nodes))
    executor = AsyncResourceAwareExecutor(graph("a"), ResourcePool({}), callbacks=callbacks)
    result = await executor.execute({"a": task})
    assert (result["a"].status, ran) == ("cancelled", [])


@both
@pytest.mark.parametrize("name", ["on_start", "on_complete"])
def test_an_exception_of_on_start_or_on_complete_fails_the_node(kind, name):
    def raises(*_):
        raise LookupError(name)

    ran, callbacks = [], ExecutionCallbacks(**{name: raises})
    tasks = {"a": lambda: ran.append(1), "b": lambda: 1}
    result = run(kind, tasks, edges="a>b", callbacks=callbacks)
    assert statuses(result) == {"a": "failed", "b": "skipped"}
    assert isinstance(result["a"].error, LookupError)
    assert len(ran) == (name == "on_complete")


@both
def test_an_exception_of_any_other_callback_is_reported_and_fails_no_node(kind):
    def raises(*_):
        raise LookupError

    names = ("on_failure", "on_skip", "on_resource_acquired", "on_resource_released")
    callbacks = ExecutionCallbacks(**dict.fromkeys(names, raises))
    tasks = {"a": lambda: 1 / 0, "b": lambda: 1}
    result = run(kind, tasks, edges="a>b", callbacks=callbacks)
    assert statuses(result) == {"a": "failed", "b": "skipped"}
    assert sorted(each.callback for each in result.callback_errors) == sorted(names)


@both
@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.parametrize(
    "name", ["on_start", "on_complete", "on_resource_acquired", "on_resource_released", "on_skip"]
)
def test_any_exception_of_a_callback_releases_all_resources(kind, name, raised):
    def raises(*_):
        raise raised

    pool, dag = ResourcePool({"gpu": 2}), graph("a", "b", "c", "missing")
    callbacks = ExecutionCallbacks(**{name: raises})
    executor = kind(dag, pool, dict.fromkeys(dag, gpu(1)), callbacks=callbacks, retries=1)
    tasks = {"a": lambda: 1, "b": _value, "c": lambda: current_node().wait_stopped(WAIT)}
    if raised is asyncio.CancelledError:
        execute(executor, tasks | {"c": lambda: 3})
    else:
        with pytest.raises(raised):
            execute(executor, tasks)
    assert pool.available == {"gpu": 2}


@both
def test_an_exception_without_text_is_traced(kind):
    class TextlessError(Exception):
        def __str__(self):
            raise ValueError

    def fails():
        raise TextlessError

    result = run(kind, {"a": fails}, enable_tracing=True)
    errors = [event.error for event in result.trace.events_for_node("a") if event.error]
    assert (result.failed, errors) == (1, ["TextlessError: <exception str() failed>"])


async def test_a_blocking_task_does_not_stall_the_loop():
    stop = threading.Event()

    async def beat():
        for _ in range(5):
            await asyncio.sleep(0)
        stop.set()

    executor = AsyncResourceAwareExecutor(graph("a"), ResourcePool({}))
    tasks = {"a": lambda: stop.wait(WAIT)}
    result, _ = await asyncio.gather(executor.execute(tasks), beat())
    assert result["a"].result is True


async def test_a_wide_graph_does_not_block_the_loop_and_its_short_nodes_do_not_all_run_at_once():
    dag = graph(*map(str, range(10 * STARTED_AT_ONCE_MAX)))
    turns, in_flight = 0, []

    async def count_turns():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def look():
        in_flight.append(len(asyncio.all_tasks()))

    counting = asyncio.create_task(count_turns())
    executor = AsyncResourceAwareExecutor(dag, ResourcePool({}))
    result = await executor.execute(dict.fromkeys(dag, look))
    counting.cancel()
    assert result.succeeded == len(dag)
    assert turns >= len(dag) / STARTED_AT_ONCE_MAX
    assert max(in_flight) <= STARTED_AT_ONCE_MAX + 2, "plus this test and the counting task"


async def test_coroutines_that_wait_for_each_other_all_run_at_once():
    dag = graph(*map(str, range(3 * STARTED_AT_ONCE_MAX)))
    here, everybody = 0, asyncio.Event()

    async def meet():
        nonlocal here
        here += 1
        if here == len(dag):
            everybody.set()
        await everybody.wait()

    executor = AsyncResourceAwareExecutor(dag, ResourcePool({}))
    async with asyncio.timeout(WAIT):
        result = await executor.execute(dict.fromkeys(dag, meet))
    assert result.succeeded == len(dag)


@both
def test_an_executor_bounds_its_threads_and_leaves_none_behind(kind):
    before, most = threading.active_count(), []
    names = [str(number) for number in range(50)]

    def work():
        most.append(threading.active_count() - before)
        time.sleep(0.002)  # Others would start meanwhile if there were room.

    execute(kind(graph(*names), ResourcePool({}), max_workers=3), dict.fromkeys(names, work))
    assert max(most) <= 3
    give_up_at = time.monotonic() + WAIT
    while threading.active_count() > before and time.monotonic() < give_up_at:
        time.sleep(0.001)  # Threads end by themselves.
    assert threading.active_count() <= before


DIE_ONCE = """
import os, signal
try:
    open(path, "x").close()
except FileExistsError:
    pass
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def dies_once(folder):
    """Return a task that kills its process at its first call, and that any process can load."""
    return partial(exec, DIE_ONCE, {"path": str(folder / "died")})


def process():
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


@both
def test_a_node_is_not_retried_in_a_pool_with_a_killed_process(kind, tmp_path):
    with process() as processes:
        executor = kind(graph("a"), ResourcePool({}), retries=2, run_in=processes)
        result = execute(executor, {"a": dies_once(tmp_path)})
    assert (result["a"].attempts, result.succeeded) == (1, 0)
    assert isinstance(result["a"].error, PoolBroken)
    assert "Give `run_in` a function that makes a pool" in str(result["a"].error)


@both
def test_retries_help_if_a_function_makes_the_pool_of_processes(kind, tmp_path):
    made = []

    def make():
        made.append(process())
        return made[-1]

    dag, pool = graph("a", "b", edges="a>b"), ResourcePool({"cpu": 1})
    needs = {"b": ResourceRequirements.cpu()}
    executor = kind(dag, pool, needs, retries=2, run_in=make)
    assert made == []
    result = execute(executor, {"a": dies_once(tmp_path), "b": os.getpid})
    assert (result["a"].attempts, result.succeeded, len(made)) == (2, 2, 2)
    assert result["b"].result != os.getpid()
    with pytest.raises(RuntimeError, match="after shutdown"):
        made[-1].submit(os.getpid)


@both
def test_no_caller_hangs_if_a_pool_raises_an_error(kind):
    class NoLine(ResourcePool):
        def claim(self, claim):
            raise OSError("no line")

    class NoGrants(ResourcePool):
        def take(self, requirements, node_name):
            raise OSError("no grants")

    dag = graph("a", "b")
    needs = dict.fromkeys(dag, gpu(1))
    pool = NoLine({"gpu": 1})
    pool.acquire(gpu(1))
    result = execute(kind(dag, pool, needs), dict.fromkeys(dag, lambda: 1))
    assert [str(result[name].error) for name in dag] == ["no line"] * 2
    with pytest.raises(OSError, match="no grants"):
        execute(kind(dag, NoGrants({"gpu": 1}), needs), dict.fromkeys(dag, lambda: 1))


INTERRUPTED = """
import os, signal, time
from moorage_client.workflow import *
def task():
    for _ in range(5):  # Python misses a signal that comes while the caller is just falling asleep.
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        if current_node().wait_stopped(3):
            return
    raise AssertionError("this task got no stop signal")
dag = DAG.builder().add_node("a").add_node("b").add_edge("a", "b").build()
pool = ResourcePool({"gpu": 1})
try:
    ResourceAwareExecutor(dag, pool, {"a": ResourceRequirements.gpu()}).execute(
        {"a": task, "b": lambda: print("b ran")}
    )
except KeyboardInterrupt:
    print("interrupted", pool.available)
"""


def test_ctrl_c_stops_the_run_and_is_raised():
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=True)
    assert done.stdout == "interrupted {'gpu': 1}\n"


def test_a_chrome_trace_has_a_lane_per_node_and_a_counter_per_resource(tmp_path):
    needs = {"a": ResourceRequirements({"gpu": 1.5, "cpu": 1}), "b": gpu(1)}
    pool, dag = ResourcePool({"gpu": 2, "cpu": 1}), graph("a", "b", edges="a>b")
    executor = ResourceAwareExecutor(dag, pool, needs, enable_tracing=True)
    trace = executor.execute({"a": lambda: 1, "b": lambda: 1 / 0}).trace
    trace.to_chrome_json(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    bars = [(e["name"], e["cat"], e["ph"], e["args"]) for e in events if e["ph"] in "BE"]
    assert bars == [
        ("execution", "execution", "B", {}),
        ("a", "node", "B", {}),
        ("a", "node", "E", {"status": "completed"}),
        ("b", "node", "B", {}),
        ("b", "node", "E", {"status": "failed", "error": "ZeroDivisionError: division by zero"}),
        ("execution", "execution", "E", {}),
    ]
    counters = [(e["name"], e["args"]["allocated"]) for e in events if e["ph"] == "C"]
    assert counters[:4] == [("gpu", 1.5), ("cpu", 1), ("gpu", 0), ("cpu", 0)]
    assert counters[4:] == [("gpu", 1), ("gpu", 0)]
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert len(set(lanes.values())) == 3
    times = [e["ts"] for e in events if "ts" in e and e["ph"] != "C"]
    assert times == sorted(times)
    assert "node_completed: 1" in trace.summary()
    assert len(json.loads(trace.to_json())) == len(trace.events)


@both
def test_a_chrome_trace_has_a_mark_for_the_end_of_a_node_that_never_started(kind):
    executor = kind(graph("a", "b", edges="a>b"), ResourcePool({}), enable_tracing=True)
    trace = execute(executor, {"a": executor.cancel, "b": int}).trace
    events = json.loads(trace.to_chrome_trace())["traceEvents"]
    bars = [(e["name"], e["ph"], e["args"]) for e in events if e.get("cat") == "node"]
    assert sorted(bars, key=str) == [
        ("a", "B", {}),
        ("a", "E", {"status": "completed"}),
        ("b", "i", {"status": "cancelled"}),
    ]


without_pool = pytest.mark.parametrize("kind", [DAGExecutor, AsyncDAGExecutor])


async def _value():
    return "value"


@without_pool
class TestWithoutPool:
    def test_an_async_executor_runs_a_graph(self, kind):
        done: list[tuple] = []
        callbacks = ExecutionCallbacks(
            on_start=lambda name: done.append(("start", name)),
            on_complete=lambda name, value: done.append(("complete", name, value)),
        )
        dag = graph("a", "b", "c", "d", edges="a>b a>c b>d c>d")
        executor = kind(dag, callbacks=callbacks, enable_tracing=True)
        result = execute(executor, {"a": lambda: 1, "b": _value, "c": lambda: 3})
        assert (result.succeeded, result.skipped) == (3, 1)
        assert result.results == {"a": 1, "b": "value", "c": 3}
        assert done[:2] == [("start", "a"), ("complete", "a", 1)]
        assert len(done) == 6
        assert result.trace.events_for_node("b")

    def test_all_ready_nodes_run_together(self, kind):
        dag = graph(*map(str, range(100)))
        meeting = threading.Barrier(100)
        result = execute(kind(dag), dict.fromkeys(dag, lambda: meeting.wait(WAIT)))
        assert result.succeeded == 100

    def test_a_single_worker_runs_the_longest_path_first(self, kind):
        order: list[str] = []
        dag = graph("a", "b", "c", "d", edges="a>d")
        costs = {"a": 1, "d": 5, "b": 3, "c": 2}
        execute(kind(dag, 1, costs), noting(order))
        assert order == ["a", "d", "b", "c"]

    def test_max_workers_also_bounds_coroutines(self, kind):
        running, most = [], []

        async def work():
            running.append(1)
            most.append(len(running))
            await asyncio.sleep(0.001)  # Others would run meanwhile if they could.
            running.pop()

        dag = graph(*map(str, range(20)))
        assert execute(kind(dag, 2), dict.fromkeys(dag, work)).succeeded == 20
        assert max(most) <= 2

    def test_the_timeout_limits_each_node(self, kind):
        dag = graph("slow", "after", "quick", edges="slow>after")

        async def slow():
            await asyncio.sleep(WAIT)  # The timeout cancels this.

        tasks = {"slow": slow, "after": lambda: 1, "quick": lambda: 1}
        result = execute(kind(dag), tasks, timeout=0.05)
        assert statuses(result) == {"slow": "timed_out", "after": "skipped", "quick": "completed"}

    @pytest.mark.parametrize("when", ["before", "meanwhile"])
    def test_cancel_event_cancels_nodes_that_have_not_started(self, kind, when):
        event = threading.Event()
        if when == "before":
            event.set()
        dag = graph("a", "b", "c", edges="a>b b>c")
        tasks = {"a": event.set, "b": lambda: 1, "c": lambda: 1}
        result = execute(kind(dag), tasks, cancel_event=event)
        ran = when != "before"
        assert (result.succeeded, result.cancelled) == (ran, 3 - ran)


@pytest.mark.parametrize("kind", [*KINDS, DAGExecutor, AsyncDAGExecutor])
@pytest.mark.parametrize("task", [lambda: "done", _value])
class TestGates:
    @staticmethod
    def run(kind, task, gate, act=None, **more):
        """Run node a, then node b behind a gate; return the result and the calls of callbacks."""
        seen = []

        def waits(name):
            seen.append(("waiting", name))
            if act:
                getattr(gate, act[0])(*act[1:])

        callbacks = ExecutionCallbacks(
            on_gate_waiting=waits,
            on_gate_resolved=lambda name, status: seen.append((status, name)),
        )
        dag = graph("a", "b", edges="a>b")
        pool = () if issubclass(kind, DAGExecutor | AsyncDAGExecutor) else (ResourcePool({}),)
        executor = kind(dag, *pool, callbacks=callbacks, gates={"a": gate}, **more)
        return execute(executor, {"a": task, "b": lambda: 2}), seen

    @pytest.mark.parametrize(
        ("gate", "act", "ends", "error"),
        [
            ({}, ("approve",), "waiting approved", None),
            ({"auto_approve": True}, None, "approved", None),
            ({}, ("reject", "not today"), "waiting rejected", GateRejected),
            ({"timeout": 0.01}, None, "waiting timed_out", GateTimeout),
        ],
    )
    def test_a_gate_is_resolved_once(self, kind, task, gate, act, ends, error):
        gate = ApprovalGate(**gate)
        result, seen = self.run(kind, task, gate, act)
        assert seen == [(each, "a") for each in ends.split()]
        assert gate.status == ends.split()[-1]
        assert (result.succeeded, result.skipped) == ((0, 1) if error else (2, 0))
        if error:
            assert isinstance(result["a"].error, error)
            assert error is GateTimeout or "not today" in str(result["a"].error)
            gate.approve()
            assert gate.status == ends.split()[-1], "the gate is resolved already"
            gate.reset()
            assert gate.status is GateStatus.PENDING

    def test_a_gate_is_traced(self, kind, task):
        result, _ = self.run(kind, task, ApprovalGate(), ("reject", "no"), enable_tracing=True)
        found = [(e.event_type, e.metadata) for e in result.trace.events_for_node("a")]
        kinds = [each for each, _ in found if not each.startswith("resource")]
        assert kinds == ["node_started", "node_gate_waiting", "node_gate_resolved", "node_failed"]
        assert ("node_gate_resolved", {"status": "rejected"}) in found
        events = json.loads(result.trace.to_chrome_trace())["traceEvents"]
        assert [(e["name"], e["cat"], e["args"]) for e in events if e["ph"] == "i"] == [
            ("node_gate_waiting", "gate", {}),
            ("node_gate_resolved", "gate", {"status": "rejected"}),
        ]

    def test_a_stopped_node_stops_waiting_at_its_gate(self, kind, task):
        gate = ApprovalGate()
        result, _ = self.run(kind, task, gate, timeouts={"a": 0.05})
        assert (result.timed_out, gate.status) == (1, GateStatus.PENDING)


def test_invalid_gates_are_refused():
    with pytest.raises(GraphError, match="gates: there is no node 'x'"):
        DAGExecutor(graph("a"), gates={"x": ApprovalGate()})
    for seconds in (-1, float("nan"), "1"):
        with pytest.raises(WorkflowError, match="timeout of a gate"):
            ApprovalGate(seconds)

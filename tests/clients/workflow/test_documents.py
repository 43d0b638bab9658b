"""Every sentence of the document that this implements, under its own words.

The names are the sentences; where the document and what it described disagreed, the decision that
was taken is in the body.
"""

import asyncio
import inspect
import threading
import time

import pytest

from moorage_client import workflow as dagron
from moorage_client.workflow import (
    DAG,
    AsyncResourceAwareExecutor,
    ExecutionCallbacks,
    ExecutionResult,
    ResourceAwareExecutor,
    ResourcePool,
    ResourceRequirements,
    ResourceSnapshot,
    ResourceTimeline,
)

EXECUTORS = [ResourceAwareExecutor, AsyncResourceAwareExecutor]


def execute(executor, tasks) -> ExecutionResult:
    """Run either kind of executor."""
    result = executor.execute(tasks)
    return asyncio.run(result) if inspect.isawaitable(result) else result


def graph(*names: str, edges: str = "") -> DAG:
    builder = DAG.builder()
    for name in names:
        builder.add_node(name)
    for edge in edges.split():
        builder.add_edge(*edge.split(">"))
    return builder.build()


@pytest.fixture
def dag() -> DAG:
    return (
        dagron.DAG.builder()
        .add_node("preprocess")
        .add_node("train_model_a")
        .add_node("train_model_b")
        .add_node("evaluate")
        .add_edge("preprocess", "train_model_a")
        .add_edge("preprocess", "train_model_b")
        .add_edge("train_model_a", "evaluate")
        .add_edge("train_model_b", "evaluate")
        .build()
    )


@pytest.fixture
def pool() -> ResourcePool:
    return dagron.ResourcePool(capacities={"gpu": 2, "cpu": 8, "memory_mb": 16000})


REQUIREMENTS = {
    "preprocess": ResourceRequirements(resources={"cpu": 2, "memory_mb": 2000}),
    "train_model_a": ResourceRequirements(resources={"gpu": 1, "cpu": 4, "memory_mb": 8000}),
    "train_model_b": ResourceRequirements(resources={"gpu": 1, "cpu": 4, "memory_mb": 8000}),
    "evaluate": ResourceRequirements(resources={"cpu": 2, "memory_mb": 4000}),
}


class TestTheResourceSchedulingModule:
    @pytest.mark.parametrize("kind", EXECUTORS)
    def test_nodes_declare_gpu_cpu_memory_or_custom_resources(self, kind):
        pool = ResourcePool({"gpu": 1, "cpu": 1, "memory_mb": 1, "licence": 1})
        needs = ResourceRequirements({"gpu": 1, "cpu": 1, "memory_mb": 1, "licence": 0.5})
        seen = []
        result = execute(
            kind(graph("a"), pool, {"a": needs}), {"a": lambda: seen.append(pool.allocated)}
        )
        assert result.succeeded == 1
        assert seen == [{"gpu": 1, "cpu": 1, "memory_mb": 1, "licence": 0.5}]

    @pytest.mark.parametrize("kind", EXECUTORS)
    def test_a_node_is_only_dispatched_when_the_pool_has_capacity_which_prevents_oversubscription(
        self, kind
    ):
        names = [f"n{number}" for number in range(12)]
        pool = ResourcePool({"gpu": 3})
        running, most = set(), []

        def work(name):
            running.add(name)
            most.append(len(running))
            time.sleep(0.005)  # Long enough for others to start beside it, were there room.
            running.discard(name)

        tasks = {name: (lambda name=name: work(name)) for name in names}
        requirements = dict.fromkeys(names, ResourceRequirements.gpu(1))
        assert execute(kind(graph(*names), pool, requirements), tasks).succeeded == 12
        assert max(most) == 3
        assert pool.timeline.peak_allocated() == {"gpu": 3}

    @pytest.mark.parametrize("kind", EXECUTORS)
    def test_it_enables_scheduling_of_heterogeneous_workloads(self, kind):
        """What needs other things runs beside a node that waits for the only GPU."""
        pool, meeting = ResourcePool({"gpu": 1, "cpu": 2}), threading.Barrier(2)
        needs = {"gpu": ResourceRequirements.gpu(1), "cpu": ResourceRequirements.cpu(2)}
        tasks = {"gpu": lambda: meeting.wait(60), "cpu": lambda: meeting.wait(60)}
        assert execute(kind(graph("gpu", "cpu"), pool, needs), tasks).succeeded == 2


class TestResourceAwareExecutor:
    def test_when_a_node_cannot_be_scheduled_it_blocks_until_resources_are_released(self):
        order = []
        dag = graph("first", "second")
        needs = dict.fromkeys(dag, ResourceRequirements.gpu(1))
        callbacks = ExecutionCallbacks(
            on_resource_acquired=lambda name, _: order.append(("acquired", name)),
            on_resource_released=lambda name, _: order.append(("released", name)),
        )
        executor = ResourceAwareExecutor(dag, ResourcePool({"gpu": 1}), needs, None, callbacks)
        executor.execute(dict.fromkeys(dag, lambda: None))
        assert order == [
            ("acquired", "first"),
            ("released", "first"),
            ("acquired", "second"),
            ("released", "second"),
        ]

    @pytest.mark.parametrize("kind", EXECUTORS)
    def test_dag_the_topology_drives_execution_order(self, kind, dag, pool):
        order = []
        tasks = {name: (lambda name=name: order.append(name)) for name in dag}
        execute(kind(dag, pool, REQUIREMENTS), tasks)
        assert order[0] == "preprocess"
        assert order[-1] == "evaluate"

    @pytest.mark.parametrize("kind", EXECUTORS)
    def test_costs_are_per_node_estimates_for_scheduling_priority(self, kind):
        dag = graph("a", "b", "c", "d", "e", edges="c>e")
        order = []
        tasks = {name: (lambda name=name: order.append(name)) for name in dag}
        costs = {"a": 1.5, "b": 3, "unknown": 9}
        needs = dict.fromkeys(dag, ResourceRequirements.cpu(1))
        execute(kind(dag, ResourcePool({"cpu": 1}), needs, costs), tasks)
        # By bottom level: b 3, c 1 + e 1, a 1.5, then d and e in the order of the graph.
        assert order == ["b", "c", "a", "d", "e"]

    @pytest.mark.parametrize("kind", EXECUTORS)
    def test_callbacks_include_on_resource_acquired_and_on_resource_released(self, kind):
        events = []
        named = ("on_start", "on_complete", "on_resource_acquired", "on_resource_released")
        callbacks = ExecutionCallbacks(
            **{name: (lambda *words, name=name: events.append((name, *words))) for name in named}
        )
        dag, pool = graph("a"), ResourcePool({"gpu": 1})
        needs = {"a": ResourceRequirements.gpu()}
        execute(kind(dag, pool, needs, callbacks=callbacks), {"a": lambda: 7})
        assert events == [
            ("on_resource_acquired", "a", {"gpu": 1}),
            ("on_start", "a"),
            ("on_complete", "a", 7),
            ("on_resource_released", "a", {"gpu": 1}),
        ]

    @pytest.mark.parametrize("kind", EXECUTORS)
    @pytest.mark.parametrize(
        ("fail_fast", "statuses"),
        [
            (True, "failed skipped skipped completed completed"),
            (False, "failed completed completed completed completed"),
        ],
    )
    def test_fail_fast_skips_downstream_nodes_when_any_node_fails(self, kind, fail_fast, statuses):
        """Downstream is what comes after it; independent branches go on."""
        dag = graph("bad", "after", "last", "other", "beside", edges="bad>after after>last")
        pool, skipped = ResourcePool({"gpu": 2}), []
        callbacks = ExecutionCallbacks(on_skip=skipped.append)
        needs = dict.fromkeys(dag, ResourceRequirements.gpu(1))
        executor = kind(dag, pool, needs, None, callbacks, fail_fast)
        result = execute(executor, {**dict.fromkeys(dag, lambda: 1), "bad": lambda: 1 / 0})
        assert [result[name].status for name in dag] == statuses.split()
        assert (result.failed, result.skipped) == (1, 2 if fail_fast else 0)
        assert isinstance(result["bad"].error, ZeroDivisionError)
        assert skipped == (["after", "last"] if fail_fast else [])
        acquired = {each.node_name for each in pool.timeline.snapshots}
        assert ("after" in acquired) is not fail_fast

    @pytest.mark.parametrize("kind", EXECUTORS)
    def test_enable_tracing_records_a_chrome_compatible_execution_trace(self, kind, dag, pool):
        tasks = dict.fromkeys(dag, lambda: 1)
        assert execute(kind(dag, pool, REQUIREMENTS), tasks).trace is None
        traced = execute(kind(dag, pool, REQUIREMENTS, enable_tracing=True), tasks)
        kinds = {event.event_type for event in traced.trace.events}
        assert {"resource_acquired", "resource_released", "node_started"} <= kinds

    @pytest.mark.parametrize("kind", EXECUTORS)
    def test_requirements_that_can_never_be_satisfied_are_refused_before_anything_runs(self, kind):
        """Also those of nodes that the graph does not have."""
        ran = []
        executor = kind(graph("a"), ResourcePool({"gpu": 1}), {"x": ResourceRequirements.gpu(2)})
        with pytest.raises(ValueError, match=r"Node 'x' requires .* pool capacity is"):
            execute(executor, {"a": lambda: ran.append(1)})
        assert ran == []


class TestAsyncResourceAwareExecutor:
    def test_the_same_interface(self):
        sync, other = (inspect.signature(each.__init__) for each in EXECUTORS)
        assert sync == other
        assert list(sync.parameters)[1:8] == [
            *("dag", "resource_pool", "requirements", "costs", "callbacks", "fail_fast"),
            "enable_tracing",
        ]

    async def test_tasks_are_async_callables_or_anything_else_that_can_be_called(self):
        async def coroutine():
            return threading.current_thread().name

        class Callable:
            async def __call__(self):
                return "object"

        dag = graph("async", "lambda", "value", "blocking", "object")
        result = await AsyncResourceAwareExecutor(dag, ResourcePool({})).execute(
            {
                "async": coroutine,
                "lambda": lambda: coroutine(),  # noqa: PLW0108  # As the document has it.
                "value": lambda: "value",
                "blocking": lambda: threading.current_thread().name,
                "object": Callable(),
            }
        )
        here = threading.current_thread().name
        assert [result[name].result for name in ("async", "lambda", "value", "object")] == [
            *(here, here, "value", "object")
        ]
        assert result["blocking"].result != here


class TestResourcePool:
    def test_resources_are_released_after_a_node_completes_or_fails(self):
        pool, dag = ResourcePool({"gpu": 1}), graph("good", "bad")
        needs = dict.fromkeys(dag, ResourceRequirements.gpu(1))
        tasks = {"good": lambda: 1, "bad": lambda: 1 / 0}
        result = ResourceAwareExecutor(dag, pool, needs).execute(tasks)
        assert (result.succeeded, result.failed) == (1, 1)
        assert pool.available == {"gpu": 1}

    def test_can_satisfy_is_about_the_total_capacity_and_ignores_allocation(self, pool):
        pool.acquire(ResourceRequirements.gpu(2))
        assert pool.can_satisfy(ResourceRequirements.gpu(2))
        assert not pool.can_satisfy(ResourceRequirements.gpu(3))
        assert not pool.can_satisfy(ResourceRequirements({"licence": 1}))

    def test_try_acquire_is_true_if_successful_and_false_if_insufficient(self, pool):
        assert pool.try_acquire(ResourceRequirements.gpu(2))
        assert not pool.try_acquire(ResourceRequirements({"cpu": 1, "gpu": 1}))
        assert pool.available["cpu"] == 8

    def test_acquire_blocks_until_they_become_available(self, pool):
        need = ResourceRequirements.gpu(2)
        pool.acquire(need)
        timer = threading.Timer(0.05, pool.release, [need])
        timer.start()
        assert pool.acquire(need)
        timer.join()

    def test_acquire_is_false_on_timeout(self, pool):
        pool.acquire(ResourceRequirements.gpu(2))
        assert not pool.acquire(ResourceRequirements.gpu(1), timeout=0.01)
        pool.release(ResourceRequirements.gpu(2))
        assert pool.acquire(ResourceRequirements.gpu(2), timeout=0)

    def test_a_request_that_never_ends_is_refused_unless_it_has_a_timeout(self, pool):
        with pytest.raises(ValueError, match=r"gpu.*pool capacity"):
            pool.acquire(ResourceRequirements.gpu(3))
        assert not pool.acquire(ResourceRequirements.gpu(3), timeout=60)

    def test_capacities_available_and_allocated_are_copies(self, pool):
        for read in ("capacities", "available", "allocated"):
            getattr(pool, read)["gpu"] = 99
            assert getattr(pool, read)["gpu"] != 99

    def test_the_timeline_has_the_allocation_events(self, pool):
        pool.acquire(ResourceRequirements.gpu(1), node_name="a")
        pool.release(ResourceRequirements.gpu(1), "a")
        events = [(each.event, each.node_name) for each in pool.timeline.snapshots]
        assert events == [("acquire", "a"), ("release", "a")]


class TestResourceRequirements:
    def test_gpu_cpu_and_memory_create_a_requirement(self):
        assert dagron.ResourceRequirements.gpu(1).resources == {"gpu": 1}
        assert dagron.ResourceRequirements.cpu(4).resources == {"cpu": 4}
        assert dagron.ResourceRequirements.memory(4096).resources == {"memory_mb": 4096}
        assert dagron.ResourceRequirements.gpu(n=2).resources == {"gpu": 2}
        assert dagron.ResourceRequirements.cpu(n=3).resources == {"cpu": 3}
        assert ResourceRequirements.gpu() == ResourceRequirements.gpu(count=1)
        assert ResourceRequirements.cpu() == ResourceRequirements.cpu(count=1)
        assert ResourceRequirements().resources == {}

    def test_fits_as_in_the_example(self):
        req = dagron.ResourceRequirements(resources={"gpu": 2, "cpu": 4, "memory_mb": 8000})
        assert req.fits({"gpu": 4, "cpu": 16, "memory_mb": 32000})
        assert not req.fits({"gpu": 1, "cpu": 16, "memory_mb": 32000})
        assert not req.fits({"gpu": 2, "cpu": 4})

    def test_it_is_frozen(self):
        with pytest.raises(AttributeError):
            ResourceRequirements.gpu(1).resources = {}


class TestResourceSnapshotAndTimeline:
    def test_a_snapshot_has_the_documented_properties(self, pool):
        before = time.time()
        pool.acquire(ResourceRequirements.gpu(1))
        (snapshot,) = pool.timeline.snapshots
        assert before - 1 <= snapshot.timestamp <= time.time() + 1
        assert snapshot.allocated == {"gpu": 1, "cpu": 0, "memory_mb": 0}
        assert snapshot.available == {"gpu": 1, "cpu": 8, "memory_mb": 16000}
        assert snapshot.node_name is None
        assert snapshot.event == "acquire"

    def test_record_adds_a_snapshot_manually(self):
        timeline = ResourceTimeline()
        timeline.record(snapshot=ResourceSnapshot(5.0, {"gpu": 1}, {"gpu": 3}, "a", "acquire"))
        timeline.record({"gpu": 0}, {"gpu": 4}, "a", "released")
        first, second = timeline.snapshots
        assert first == ResourceSnapshot(5.0, {"gpu": 1}, {"gpu": 3}, "a", "acquire")
        assert (second.event, second.allocated) == ("release", {"gpu": 0})

    def test_snapshots_are_recorded_with_their_own_times(self, pool):
        pool.acquire(ResourceRequirements.gpu(1))
        for when in (30.0, 10.0, 20.0):
            pool.timeline.record(
                ResourceSnapshot(when, {"gpu": 1}, {"gpu": 1}, str(when), "acquire")
            )
        shown = pool.timeline.snapshots
        assert [each.timestamp for each in shown[:3]] == [10.0, 20.0, 30.0]
        assert [each.node_name for each in shown] == ["10.0", "20.0", "30.0", None]
        assert [each.elapsed for each in shown[:3]] == [0, 10, 20]
        assert shown[3].timestamp > 1e9

    def test_also_where_the_oldest_are_dropped(self):
        timeline = ResourceTimeline(snapshots_max=2)
        for when in (5.0, 7.0, 6.0, 9.0):
            timeline.record(ResourceSnapshot(when, {"gpu": 1}, {}, None, "acquire"))
        assert [(each.timestamp, each.elapsed) for each in timeline.snapshots] == [(6, 1), (9, 4)]

    def test_all_recorded_snapshots_in_chronological_order(self, pool):
        for _ in range(3):
            pool.acquire(ResourceRequirements.gpu(1))
            pool.release(ResourceRequirements.gpu(1))
        times = [each.timestamp for each in pool.timeline.snapshots]
        assert len(times) == 6
        assert times == sorted(times)
        assert pool.timeline.snapshots[0].elapsed == 0

    def test_peak_utilization_is_a_fraction_for_each_resource_across_the_entire_timeline(self):
        pool = ResourcePool({"gpu": 4, "cpu": 16, "memory_mb": 32000})
        pool.acquire(ResourceRequirements({"gpu": 4, "cpu": 12, "memory_mb": 16000}))
        pool.release(ResourceRequirements({"gpu": 1}))
        assert pool.timeline.peak_utilization() == {"gpu": 1.0, "cpu": 0.75, "memory_mb": 0.5}
        assert pool.timeline.peak_allocated() == {"gpu": 4, "cpu": 12, "memory_mb": 16000}

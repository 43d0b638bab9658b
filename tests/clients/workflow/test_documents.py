"""Tests the document that workflows implement; each test is named after one of its sentences.

If the document contradicts the program that it describes, a comment in the test has the decision.
`test_executors.py` tests order, capacity, failure and release on random graphs.
"""

import inspect
import threading
import time

import pytest

from moorage_client.workflow import (
    AsyncResourceAwareExecutor,
    ExecutionCallbacks,
    ResourcePool,
    ResourceRequirements,
    ResourceSnapshot,
    ResourceTimeline,
)
from tests.clients.workflow.graphs import KINDS, both, execute, gpu, graph, noting


@pytest.fixture
def pool() -> ResourcePool:
    return ResourcePool(capacities={"gpu": 2, "cpu": 8, "memory_mb": 16000})


class TestTheResourceSchedulingModule:
    @both
    def test_nodes_declare_gpu_cpu_memory_or_custom_resources(self, kind):
        pool = ResourcePool({"gpu": 1, "cpu": 1, "memory_mb": 1, "licence": 1})
        needs = ResourceRequirements({"gpu": 1, "cpu": 1, "memory_mb": 1, "licence": 0.5})
        seen = []
        result = execute(
            kind(graph("a"), pool, {"a": needs}), {"a": lambda: seen.append(pool.allocated)}
        )
        assert result.succeeded == 1
        assert seen == [{"gpu": 1, "cpu": 1, "memory_mb": 1, "licence": 0.5}]

    @both
    def test_the_executor_schedules_heterogeneous_workloads(self, kind):
        """While a node waits for the only GPU, nodes without need of a GPU run."""
        pool, meeting = ResourcePool({"gpu": 1, "cpu": 2}), threading.Barrier(2)
        needs = {"gpu": gpu(1), "cpu": ResourceRequirements.cpu(2)}
        tasks = dict.fromkeys(needs, lambda: meeting.wait(60))
        assert execute(kind(graph("gpu", "cpu"), pool, needs), tasks).succeeded == 2


class TestResourceAwareExecutor:
    @both
    def test_executors_schedule_nodes_by_the_estimates_in_costs(self, kind):
        dag, order = graph(*"abcde", edges="c>e"), []
        costs = {"a": 1.5, "b": 3, "unknown": 9}
        needs = dict.fromkeys(dag, ResourceRequirements.cpu(1))
        execute(kind(dag, ResourcePool({"cpu": 1}), needs, costs), noting(order, dag))
        # By bottom level: b 3, c 1 + e 1, a 1.5, then d and e in the order of the graph.
        assert order == ["b", "c", "a", "d", "e"]

    @both
    def test_executors_call_on_resource_acquired_and_on_resource_released(self, kind):
        events = []
        named = ("on_start", "on_complete", "on_resource_acquired", "on_resource_released")
        callbacks = ExecutionCallbacks(
            **{name: (lambda *words, name=name: events.append((name, *words))) for name in named}
        )
        dag, pool = graph("a"), ResourcePool({"gpu": 1})
        execute(kind(dag, pool, {"a": gpu()}, callbacks=callbacks), {"a": lambda: 7})
        assert events == [
            ("on_resource_acquired", "a", {"gpu": 1}),
            ("on_start", "a"),
            ("on_complete", "a", 7),
            ("on_resource_released", "a", {"gpu": 1}),
        ]

    @both
    def test_enable_tracing_records_a_chrome_compatible_execution_trace(self, kind, pool):
        dag, needs, tasks = graph("a"), {"a": gpu(1)}, {"a": lambda: 1}
        assert execute(kind(dag, pool, needs), tasks).trace is None
        traced = execute(kind(dag, pool, needs, enable_tracing=True), tasks)
        kinds = {event.event_type for event in traced.trace.events}
        assert {"resource_acquired", "resource_released", "node_started"} <= kinds

    @both
    def test_requirements_that_can_never_be_satisfied_are_refused_before_anything_runs(self, kind):
        """Requirements of nodes that the graph does not have are checked, too."""
        ran = []
        executor = kind(graph("a"), ResourcePool({"gpu": 1}), {"x": gpu(2)})
        with pytest.raises(ValueError, match=r"Node 'x' requires .* pool capacity is"):
            execute(executor, {"a": lambda: ran.append(1)})
        assert ran == []


class TestAsyncResourceAwareExecutor:
    def test_both_executors_have_the_same_interface(self):
        sync, other = (inspect.signature(each.__init__) for each in KINDS)
        assert sync == other
        assert list(sync.parameters)[1:8] == [
            *("dag", "resource_pool", "requirements", "costs", "callbacks", "fail_fast"),
            "enable_tracing",
        ]

    async def test_a_task_may_be_an_async_function_or_any_other_callable(self):
        async def coroutine():
            return threading.current_thread().name

        class Callable:
            async def __call__(self):
                return "object"

        dag = graph("async", "lambda", "value", "blocking", "object")
        result = await AsyncResourceAwareExecutor(dag, ResourcePool({})).execute(
            {
                "async": coroutine,
                "lambda": lambda: coroutine(),  # noqa: PLW0108  # As in the document.
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
    def test_can_satisfy_checks_total_and_try_acquire_free_capacity(self, pool):
        assert pool.try_acquire(gpu(2))
        assert not pool.try_acquire(ResourceRequirements({"cpu": 1, "gpu": 1}))
        assert pool.available["cpu"] == 8
        assert pool.can_satisfy(gpu(2))
        assert not pool.can_satisfy(gpu(3))
        assert not pool.can_satisfy(ResourceRequirements({"licence": 1}))

    def test_acquire_returns_false_on_a_timeout_and_refuses_a_wait_that_would_never_end(self, pool):
        pool.acquire(gpu(2), node_name="a")
        assert not pool.acquire(gpu(1), timeout=0.01)
        pool.release(gpu(2), "a")
        events = [(each.event, each.node_name) for each in pool.timeline.snapshots]
        assert events == [("acquire", "a"), ("release", "a")]
        assert pool.acquire(gpu(2), timeout=0)
        with pytest.raises(ValueError, match=r"gpu.*pool capacity"):
            pool.acquire(gpu(3))
        assert not pool.acquire(gpu(3), timeout=60)

    def test_capacities_and_available_and_allocated_amounts_are_copies(self, pool):
        for read in ("capacities", "available", "allocated"):
            getattr(pool, read)["gpu"] = 99
            assert getattr(pool, read)["gpu"] != 99


def test_requirements_are_made_by_gpu_cpu_and_memory_and_compared_by_fits():
    assert ResourceRequirements.gpu(1).resources == {"gpu": 1}
    assert ResourceRequirements.cpu(4).resources == {"cpu": 4}
    assert ResourceRequirements.memory(4096).resources == {"memory_mb": 4096}
    assert ResourceRequirements.gpu(n=2).resources == {"gpu": 2}
    assert ResourceRequirements.cpu(n=3).resources == {"cpu": 3}
    assert ResourceRequirements.gpu() == ResourceRequirements.gpu(count=1)
    assert ResourceRequirements.cpu() == ResourceRequirements.cpu(count=1)
    assert ResourceRequirements().resources == {}
    req = ResourceRequirements(resources={"gpu": 2, "cpu": 4, "memory_mb": 8000})
    assert req.fits({"gpu": 4, "cpu": 16, "memory_mb": 32000})
    assert not req.fits({"gpu": 1, "cpu": 16, "memory_mb": 32000})
    assert not req.fits({"gpu": 2, "cpu": 4})
    with pytest.raises(AttributeError):
        req.resources = {}


class TestResourceSnapshotAndTimeline:
    def test_a_snapshot_has_the_documented_properties(self, pool):
        before = time.time()
        pool.acquire(gpu(1))
        (snapshot,) = pool.timeline.snapshots
        assert before - 1 <= snapshot.timestamp <= time.time() + 1
        assert snapshot.allocated == {"gpu": 1, "cpu": 0, "memory_mb": 0}
        assert snapshot.available == {"gpu": 1, "cpu": 8, "memory_mb": 16000}
        assert (snapshot.node_name, snapshot.event) == (None, "acquire")

    def test_record_adds_a_snapshot_to_a_timeline_manually(self):
        timeline = ResourceTimeline()
        manual = ResourceSnapshot(5.0, {"gpu": 1}, {"gpu": 3}, "a", "acquire")
        timeline.record(snapshot=manual)
        timeline.record({"gpu": 0}, {"gpu": 4}, "a", "released")
        first, second = timeline.snapshots
        assert first == manual
        assert (second.event, second.allocated) == ("release", {"gpu": 0})

    def test_a_timeline_lists_all_recorded_snapshots_in_chronological_order(self, pool):
        pool.acquire(gpu(1))
        pool.release(gpu(1))
        times = [each.timestamp for each in pool.timeline.snapshots]
        assert times == sorted(times)
        assert pool.timeline.snapshots[0].elapsed == 0
        for when in (30.0, 10.0, 20.0):
            pool.timeline.record(ResourceSnapshot(when, {"gpu": 1}, {"gpu": 1}, "x", "acquire"))
        shown = pool.timeline.snapshots
        assert [each.timestamp for each in shown] == [10.0, 20.0, 30.0, *times]
        assert [each.elapsed for each in shown[:3]] == [0, 10, 20]

    def test_snapshots_stay_in_order_when_the_oldest_are_dropped(self):
        timeline = ResourceTimeline(snapshots_max=2)
        for when in (5.0, 7.0, 6.0, 9.0):
            timeline.record(ResourceSnapshot(when, {"gpu": 1}, {}, None, "acquire"))
        assert [(each.timestamp, each.elapsed) for each in timeline.snapshots] == [(6, 1), (9, 4)]

    def test_peak_utilization_is_a_fraction_for_each_resource_across_the_entire_timeline(self):
        pool = ResourcePool({"gpu": 4, "cpu": 16, "memory_mb": 32000})
        pool.acquire(ResourceRequirements({"gpu": 4, "cpu": 12, "memory_mb": 16000}))
        pool.release(gpu(1))
        assert pool.timeline.peak_utilization() == {"gpu": 1.0, "cpu": 0.75, "memory_mb": 0.5}
        assert pool.timeline.peak_allocated() == {"gpu": 4, "cpu": 12, "memory_mb": 16000}

"""Tests of graphs that change while they run."""

import itertools
import threading
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage_client.workflow import (
    DynamicExecutor,
    DynamicModification,
    DynamicNodeSpec,
    ExecutionCallbacks,
    GraphError,
    NodeStatus,
    WorkflowError,
)
from tests.clients.workflow.graphs import graph, noting, statuses


def adding(*specs, remove=()):
    return lambda _name, _value: DynamicModification(list(specs), remove)


def test_a_node_adds_nodes_before_its_successors():
    dag, order, calls = graph("find", "end", edges="find>end"), [], []

    def expand(name, found):
        assert name == "find"
        tasks = noting(order, found)
        return DynamicModification(
            [DynamicNodeSpec(each, task, ["find"], ["end"]) for each, task in tasks.items()]
        )

    callbacks = ExecutionCallbacks(on_dynamic_expand=lambda *about: calls.append(about))
    executor = DynamicExecutor(dag, {"find": expand}, callbacks=callbacks, enable_tracing=True)
    tasks = {"find": lambda: ["x", "y", "z"], **noting(order, ["end"])}
    for _ in range(2):  # Each run begins with the original graph.
        order.clear()
        result = executor.execute(tasks)
        assert sorted(order[:3]) == ["x", "y", "z"]
        assert order[3:] == ["end"]
        assert statuses(result) == dict.fromkeys(("find", "end", *"xyz"), "completed")
    assert [(name, len(change.add_nodes)) for name, change in calls] == [("find", 3)] * 2
    assert dag.node_count() == 2
    assert len(result.trace.events_for_node("x")) == 2


def test_added_nodes_can_add_nodes_and_depend_on_each_other():
    order = []
    tasks = noting(order, ["one", "two", "three"])
    one = DynamicNodeSpec("one", tasks["one"], ["two"], [])
    two = DynamicNodeSpec("two", tasks["two"], ["root"])
    three = DynamicNodeSpec("three", tasks["three"], ["one", "root"])
    expanders = {"root": adding(one, two), "two": adding(three)}
    result = DynamicExecutor(graph("root"), expanders).execute({"root": list})
    assert result.succeeded == 4
    assert order == ["two", "one", "three"]
    assert DynamicExecutor(graph("a"), {"a": lambda *_: None}).execute({"a": list}).succeeded == 1


def test_no_node_waits_for_a_removed_node():
    dag = graph("a", "b", "c", "d", edges="a>b a>c c>d")
    executor = DynamicExecutor(dag, {"a": adding(remove=["c"])})
    result = executor.execute(dict.fromkeys("abcd", list))
    assert statuses(result) == dict.fromkeys("abd", "completed")


@pytest.mark.parametrize(
    ("specs", "remove", "reason"),
    [
        ([DynamicNodeSpec("b", list)], [], "there is a node 'b' already"),
        ([DynamicNodeSpec("x", list)] * 2, [], "there is a node 'x' already"),
        ([DynamicNodeSpec("x", list, ["y"])], [], "no node 'y' for 'x' to wait for"),
        ([DynamicNodeSpec("x", list, [], ["a"])], [], "'a' has started, or is over"),
        ([DynamicNodeSpec("x", list, ["b"], ["b"])], [], "these nodes form a cycle: "),
        ([5], [], "the graph cannot change after 'a'"),
        ([], 5, "the graph cannot change after 'a'"),
        ([], ["y"], "there is no node 'y' to remove"),
        ([], ["a"], "'a' has started, or is over"),
    ],
)
def test_an_impossible_change_fails_the_node(specs, remove, reason):
    calls = []
    callbacks = ExecutionCallbacks(
        on_failure=lambda *about: calls.append(about), on_dynamic_expand=calls.append
    )
    expanders = {"a": adding(*specs, remove=remove)}
    executor = DynamicExecutor(graph("a", "b", edges="a>b"), expanders, callbacks=callbacks)
    result = executor.execute({"a": list, "b": list})
    assert statuses(result) == {"a": "failed", "b": "skipped"}
    error = result["a"].error
    assert isinstance(error, GraphError)
    assert reason in str(error)
    assert calls == [("a", error)]


def test_an_expander_that_returns_no_modification_fails_its_node():
    result = DynamicExecutor(graph("a"), {"a": lambda *_: 5}).execute({"a": list})
    assert (result.failed, "found 5" in str(result["a"].error)) == (1, True)


def test_a_cycle_of_added_nodes_is_named_in_the_order_of_its_edges():
    specs = [DynamicNodeSpec("x", list, ["z"]), DynamicNodeSpec("y", list, ["x"])]
    expand = adding(*specs, DynamicNodeSpec("z", list, ["y"]))
    error = DynamicExecutor(graph("a"), {"a": expand}).execute({"a": list})["a"].error
    cycle = str(error).partition("cycle: ")[2].split(" -> ")
    assert len(cycle) == 4
    assert set(itertools.pairwise(cycle)) == {("x", "y"), ("y", "z"), ("z", "x")}


def test_an_expander_that_raises_fails_its_node():
    executor = DynamicExecutor(graph("a"), {"a": lambda *_: {}["broken"]})
    assert isinstance(executor.execute({"a": list})["a"].error, KeyError)
    with pytest.raises(WorkflowError, match="a journal does not support"):
        DynamicExecutor(graph("a"), journal=object())


@pytest.mark.parametrize("fail_fast", [True, False])
def test_added_successors_of_a_failed_node_are_skipped_only_with_fail_fast(fail_fast):
    failed = threading.Event()

    def fail():
        raise ValueError("broken")

    def expand(*_):
        failed.wait(60)
        late = DynamicNodeSpec("late", list, ["failing"])
        return DynamicModification([late, DynamicNodeSpec("later", list, ["late"], ["end"])])

    dag = graph("a", "failing", "end", edges="a>end")
    callbacks = ExecutionCallbacks(on_failure=lambda *_: failed.set())
    executor = DynamicExecutor(dag, {"a": expand}, 2, callbacks, fail_fast)
    result = executor.execute({"a": list, "failing": fail, "end": list})
    after = dict.fromkeys(["late", "later", "end"], "skipped" if fail_fast else "completed")
    assert statuses(result) == {"a": "completed", "failing": "failed", **after}


def test_a_cancelled_run_adds_no_nodes():
    expanders, calls = {"a": adding(DynamicNodeSpec("x", list))}, []
    callbacks = ExecutionCallbacks(on_dynamic_expand=lambda *about: calls.append(about))
    executor = DynamicExecutor(graph("a", "b", edges="a>b"), expanders, callbacks=callbacks)
    result = executor.execute({"a": executor.cancel, "b": list})
    assert calls == []
    assert result["b"].status is NodeStatus.CANCELLED
    assert "x" not in result


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_added_nodes_run_once_and_after_their_predecessors(data):
    dag = graph("a", "b", "c", "d", edges="a>b a>c b>d c>d")
    specs, waits_for = {}, {}
    order: list[str] = []
    for parent in "abc":
        specs[parent] = []
        for number in range(data.draw(st.integers(0, 3))):
            name = f"{parent}{number}"
            earlier = [parent, *(each.name for each in specs[parent])]
            before = data.draw(st.lists(st.sampled_from(earlier), unique=True))
            after = data.draw(st.sampled_from([[], ["d"]])) if parent in before else []
            specs[parent].append(DynamicNodeSpec(name, partial(order.append, name), before, after))
            waits_for[name] = before
    expanders = {parent: adding(*each) for parent, each in specs.items()}
    result = DynamicExecutor(dag, expanders).execute(noting(order))
    added = [spec.name for each in specs.values() for spec in each]
    assert sorted(order) == sorted([*"abcd", *added])
    assert result.succeeded == len(order)
    for name, before in waits_for.items():
        assert all(order.index(each) < order.index(name) for each in before)
    for each in specs.values():
        assert all("d" not in s.dependents or order.index(s.name) < order.index("d") for s in each)

"""Tests of graphs: the data of nodes, changes, and the orders of traversal."""

import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage_client.workflow import DAG, GraphError, ResourceAwareExecutor, ResourcePool
from tests.clients.workflow.graphs import graph


def diamond() -> DAG:
    return graph(*"abcde", edges="a>b a>c b>d c>d b>e")


def test_nodes_have_payloads_and_metadata():
    dag = (
        DAG.builder()
        .add_node("fetch", payload={"url": "https://api.example.com"})
        .add_node("parse", metadata={"team": "data-eng"})
        .add_node("store")
        .build()
    )
    assert dag.get_payload("fetch") == {"url": "https://api.example.com"}
    assert dag.get_metadata("parse") == {"team": "data-eng"}
    assert (dag.get_payload("store"), dag.get_metadata("store")) == (None, None)
    dag.set_payload("store", 1)
    dag.set_metadata("store", {"tier": "gold"})
    assert (dag.get_payload("store"), dag.get_metadata("store")) == (1, {"tier": "gold"})
    reads, writes = (dag.get_payload, dag.get_metadata), (dag.set_payload, dag.set_metadata)
    for call, *value in (*zip(reads), *((write, 1) for write in writes)):
        with pytest.raises(GraphError, match="there is no node 'stroe'"):
            call("stroe", *value)


def test_a_graph_can_be_built_node_by_node():
    dag = DAG()
    node = dag.add_node("extract", payload={"source": "api"}, metadata={"tier": "bronze"})
    assert (node, node.name) == ("extract", "extract")
    dag.add_node("transform")
    for _ in range(2):
        dag.add_edge("extract", "transform")
    assert [each.name for each in dag.predecessors("transform")] == ["extract"]
    assert dag.successors("extract") == ["transform"]
    with pytest.raises(GraphError, match="already"):
        dag.add_node("extract")
    for edge, said in (
        (("extract", "load"), "no node 'load'"),
        (("transform", "extract"), r"transform -> extract|extract -> transform"),
        (("extract", "extract"), "extract -> extract"),
    ):
        with pytest.raises(GraphError, match=said):
            dag.add_edge(*edge)
    assert dag.edges == [("extract", "transform")]
    assert dag.topological_order() == ["extract", "transform"]


def test_nodes_are_removed_with_their_edges():
    dag = diamond()
    dag.set_payload("b", 1)
    assert dag.remove_node("b") is None
    assert "b" not in dag
    assert list(dag) == ["a", "c", "d", "e"]
    assert dag.edges == [("a", "c"), ("c", "d")]
    assert dag.predecessors("d") == ["c"]
    dag.add_node("b")
    assert dag.get_payload("b") is None
    with pytest.raises(GraphError, match="no node 'x'"):
        dag.remove_node("x")
    dag.remove_edge("a", "c")
    with pytest.raises(GraphError, match="no edge from 'a' to 'c'"):
        dag.remove_edge("a", "c")
    tasks = dict.fromkeys(dag, lambda: 1)
    assert ResourceAwareExecutor(dag, ResourcePool({})).execute(tasks).succeeded == 5
    builder = DAG.builder().add_node("a").add_node("b").add_edge("a", "b").remove_node("a")
    assert list(builder.build()) == ["b"]
    with pytest.raises(GraphError):
        builder.remove_node("a")


def test_a_run_continues_with_the_graph_that_it_started_with():
    dag = diamond()

    def change() -> None:
        dag.remove_node("d")
        dag.add_node("z")

    tasks = {**dict.fromkeys(dag, lambda: 1), "a": change}
    result = ResourceAwareExecutor(dag, ResourcePool({})).execute(tasks)
    assert sorted(result.node_results) == ["a", "b", "c", "d", "e"]
    assert list(dag) == ["a", "b", "c", "e", "z"]


def test_a_graph_has_a_depth_first_order_and_levels():
    dag = diamond()
    assert dag.topological_sort() == dag.topological_order() == ["a", "b", "c", "e", "d"]
    assert dag.topological_sort_dfs() == ["a", "b", "e", "c", "d"]
    assert [[each.name for each in level] for level in dag.topological_levels()] == [
        ["a"],
        ["b", "c"],
        ["d", "e"],
    ]
    assert DAG().topological_levels() == DAG().topological_sort_dfs() == []


@given(
    st.integers(1, 12).flatmap(
        lambda size: st.tuples(
            st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)), max_size=30),
            st.permutations(range(size)),
        )
    )
)
def test_every_order_respects_every_edge(drawn):
    pairs, places = drawn
    ordered = [sorted(pair, key=places.__getitem__) for pair in pairs if pair[0] != pair[1]]
    names = map(str, range(len(places)))
    dag = graph(*names, edges=" ".join(f"{before}>{after}" for before, after in ordered))
    levels = dag.topological_levels()
    depths = {name: depth for depth, level in enumerate(levels) for name in level}
    for order in (dag.topological_sort(), dag.topological_sort_dfs(), list(depths)):
        assert sorted(order) == sorted(dag)
        assert all(order.index(before) < order.index(after) for before, after in dag.edges)
    for name in dag:
        assert depths[name] == max((depths[each] + 1 for each in dag.predecessors(name)), default=0)


def test_every_order_works_for_a_deep_graph():
    names = [str(number) for number in range(3000)]
    dag = graph(*names, edges=" ".join(f"{a}>{b}" for a, b in itertools.pairwise(names)))
    assert dag.topological_sort_dfs() == names
    assert dag.topological_levels() == [[name] for name in names]
    assert list(pickle.loads(pickle.dumps(dag))) == names  # noqa: S301  # Our own data.


def test_either_all_given_nodes_and_edges_are_added_or_none_of_them():
    dag = DAG()
    assert dag.add_nodes(["a", ("b", 1), ("c", 2, {"team": "x"})]) == ["a", "b", "c"]
    assert (dag.get_payload("b"), dag.get_metadata("c")) == (1, {"team": "x"})
    dag.add_edges([("a", "b"), ("b", "c", 2.5), ("a", "c", 1, "late")])
    assert dag.edges() == dag.edges == [("a", "b"), ("a", "c"), ("b", "c")]
    assert (dag.node_count(), dag.edge_count(), dag.validate()) == (3, 3, True)
    assert dag.get_edge("b", "c") == (2.5, None)
    assert dag.get_edge("a", "c").label == "late"
    assert dag.get_edge("a", "b").weight == 1.0
    dag.add_edge("a", "b", weight=4)
    assert (dag.get_edge("a", "b").weight, dag.edge_count()) == (4, 3)
    for wrong in (["d", "a"], ["d", ""], ["d", 5], ["d", (5, 1)], ["d", ("e", 1, 2, 3)], "d"):
        with pytest.raises(GraphError):
            dag.add_nodes(wrong)
    for edges in (
        [("c", "d"), ("a", "b")],
        [("b", "a")],
        [("a", "c"), ("c", "c")],
        [("a", "b", float("nan"))],
        [("a", "b", "heavy")],
        [("a",)],
    ):
        with pytest.raises(GraphError):
            dag.add_edges(edges)
    for add in (dag.add_node, DAG.builder().add_node):
        with pytest.raises(GraphError, match=r"a node's name is a text .* not 5"):
            add(5)
    assert (dag.node_names(), dag.edge_count()) == (["a", "b", "c"], 3)
    assert dag.get_edge("a", "b").weight == 4


def test_edges_of_a_graph_can_be_read():
    dag = DAG.builder().add_nodes(list("abcd"))
    dag = dag.add_edges([("a", "b"), ("b", "c", 3.0)]).add_edge("a", "d", 2, "x").build()
    assert (dag.has_node("a"), dag.has_node("z")) == (True, False)
    assert (dag.has_edge("a", "b"), dag.has_edge("a", "c"), dag.has_edge("b", "a")) == (1, 0, 0)
    with pytest.raises(GraphError, match="no node 'z'"):
        dag.has_edge("a", "z")
    with pytest.raises(GraphError, match="no edge from 'a' to 'c'"):
        dag.get_edge("a", "c")
    assert dag.get_edge("a", "d") == (2, "x")
    assert (dag.roots(), dag.leaves()) == (["a"], ["c", "d"])
    assert (dag.in_degree("c"), dag.out_degree("a")) == (1, 2)
    assert dag.descendants("a") == ["b", "d", "c"]
    assert dag.ancestors("c") == ["a", "b"]
    assert dag.critical_path() == (["a", "b", "c"], 3)
    assert dag.critical_path({"d": 9}) == (["a", "d"], 10)
    assert DAG().critical_path() == ([], 0.0)
    assert dag.bottom_levels({"c": 2}) == [4, 3, 2, 1]
    with pytest.raises(GraphError, match="costs"):
        dag.bottom_levels({"a": float("nan")})
    dag.remove_node("b")
    assert (dag.node_count(), dag.edge_count()) == (3, 1)

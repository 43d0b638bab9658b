"""Tests of each shipped policy's choices on tiny fleets, and of rules for all policies."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import ask, cluster_data, fleet_with, new_policy, node, take

from moorage.model import Cluster, Demand, Gpu, Node
from moorage.policy import Fleet, FleetView, best_rows, parse_proposal
from moorage_policies import catalog

POLICIES = list(catalog.shipped())


# Characters ------------------------------------------------------------------------------------


def test_first_fit_fills_the_nodes_in_the_order_of_their_names():
    fleet, demand = fleet_with(node("b", gpus=1), node("a", gpus=2), node("c", gpus=1)), Demand(1)
    chosen = []
    for _ in range(4):
        value = ask(new_policy("first_fit"), fleet, demand)
        chosen.append((value["node_id"], value["gpus"]))
        take(fleet, value, demand)
    assert chosen == [("a", ["0"]), ("a", ["1"]), ("b", ["0"]), ("c", ["0"])]


def test_best_fit_fills_the_fullest_node_and_the_fullest_gpu():
    fleet = fleet_with(node("a"), node("b"), node("c"))
    take(fleet, {"cluster_id": "c", "node_id": "b", "gpus": ["1"]}, Demand(1, gpu_milli=300))
    take(fleet, {"cluster_id": "c", "node_id": "b", "gpus": ["2"]}, Demand(1, gpu_milli=600))
    value = ask(new_policy("best_fit"), fleet, Demand(1, gpu_milli=200))
    assert (value["node_id"], value["gpus"]) == ("b", ["2"])
    assert ask(new_policy("best_fit"), fleet, Demand(3))["node_id"] == "a"


def test_best_fit_counts_cpu_too():
    fleet = fleet_with(node("a"), node("b"))
    take(fleet, {"cluster_id": "c", "node_id": "b", "gpus": []}, Demand(cpu_milli=9000))
    assert ask(new_policy("best_fit"), fleet, Demand(1))["node_id"] == "b"


def test_spread_uses_each_node_once_before_it_uses_a_node_again():
    fleet = fleet_with(*(node(name) for name in "abcd"))
    demand, policy = Demand(1, cpu_milli=1000), new_policy("spread")
    seen = []
    for _ in range(8):
        value = ask(policy, fleet, demand)
        seen.append(value["node_id"])
        take(fleet, value, demand)
    assert seen == list("abcdabcd")


def test_spread_takes_the_emptiest_gpu_for_a_share():
    fleet = fleet_with(node("a", gpus=3))
    for gpu, milli in (("0", 200), ("2", 100), ("1", 300)):
        take(fleet, {"cluster_id": "c", "node_id": "a", "gpus": [gpu]}, Demand(1, gpu_milli=milli))
    policy = new_policy("spread")
    assert ask(policy, fleet, Demand(1, gpu_milli=100))["gpus"] == ["2"]
    assert ask(policy, fleet, Demand(2, gpu_milli=100))["gpus"] == ["0", "2"]


@pytest.mark.parametrize(
    ("cpu_weight", "expected"),
    [(0.0, "gpu-rich"), (0.4, "gpu-rich"), (0.5, "cpu-rich"), (1.0, "cpu-rich")],
)
def test_spread_weighs_cpu_against_gpu(cpu_weight, expected):
    fleet = fleet_with(node("cpu-rich"), node("gpu-rich"))
    take(fleet, {"cluster_id": "c", "node_id": "cpu-rich", "gpus": ["0", "1"]}, Demand(2))
    busy = {"cluster_id": "c", "node_id": "gpu-rich", "gpus": []}
    take(fleet, busy, Demand(cpu_milli=40_000))
    value = ask(new_policy("spread"), fleet, Demand(1), parameters={"cpu_weight": cpu_weight})
    assert value["node_id"] == expected


def test_random_reaches_every_node_and_gpu_about_equally_often():
    fleet = fleet_with(node("a", gpus=2), node("b", gpus=2))
    policy, demand = new_policy("random"), Demand(1, gpu_milli=500)
    counts = Counter()
    for seed in range(400):
        value = ask(policy, fleet, demand, seed=seed)
        counts[value["node_id"], *value["gpus"]] += 1
    assert set(counts) == {("a", "0"), ("a", "1"), ("b", "0"), ("b", "1")}
    assert all(60 < count < 140 for count in counts.values())


def test_random_takes_the_free_gpus_with_the_lowest_ids():
    fleet = fleet_with(node("a", gpus=3))
    take(fleet, {"cluster_id": "c", "node_id": "a", "gpus": ["0"]}, Demand(1, gpu_milli=10))
    assert {
        tuple(ask(new_policy("random"), fleet, Demand(1), seed=s)["gpus"]) for s in range(9)
    } == {("1",)}


# Rules for every policy --------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_equal_seeds_give_equal_answers(name):
    def answers():
        fleet, policy, context = fleet_with(*(node(x) for x in "abcdef")), new_policy(name), {}
        for number in range(12):
            demand = Demand(1, gpu_milli=250 * (1 + number % 4), cpu_milli=500)
            value = ask(policy, fleet, demand, seed=number, context=context)
            take(fleet, value, demand)
            yield value

    assert list(answers()) == list(answers())


@pytest.mark.parametrize("name", POLICIES)
def test_shipped_policies_use_only_candidate_nodes_that_are_not_reserved(name):
    fleet = Fleet()
    fleet.install([Cluster(id=c, nodes=(node("1"), node("2"))) for c in ("x", "y")])
    policy = new_policy(name)
    for _ in range(3):
        value = ask(policy, fleet, Demand(1), candidates=["y"], reserved=[("y", "1")])
        assert (value["cluster_id"], value["node_id"]) == ("y", "2")
    assert ask(policy, fleet, Demand(1), candidates=["y"])["cluster_id"] == "y"
    assert "declined" in ask(policy, fleet, Demand(1), candidates=[])


@pytest.mark.parametrize("name", POLICIES)
def test_the_answer_of_a_shipped_policy_has_exactly_the_documented_keys(name):
    value = ask(new_policy(name), fleet_with(node("a")), Demand(2))
    assert value == {"cluster_id": "c", "node_id": "a", "gpus": ["0", "1"]}


@pytest.mark.parametrize("name", POLICIES)
def test_a_proposal_for_a_demand_without_gpus_names_no_gpus(name):
    value = ask(new_policy(name), fleet_with(node("a", gpus=0)), Demand(cpu_milli=2000))
    assert value == {"cluster_id": "c", "node_id": "a", "gpus": []}


@pytest.mark.parametrize("name", POLICIES)
def test_a_gang_gets_different_nodes_in_one_rack(name):
    racks = {"a": "r1", "b": "r2", "c": "r2", "d": "", "e": ""}
    fleet = fleet_with(*(node(name, rack=rack) for name, rack in racks.items()))
    value = ask(new_policy(name), fleet, Demand(2, nodes=2, topology="rack"))
    assert {share["node_id"] for share in value} == {"b", "c"}
    assert [share["gpus"] for share in value] == [["0", "1"]] * 2
    assert len({s["node_id"] for s in ask(new_policy(name), fleet, Demand(1, nodes=5))}) == 5
    too_many = ask(new_policy(name), fleet, Demand(1, nodes=3, topology="rack"))
    assert "3 different nodes" in too_many["declined"]


@pytest.mark.parametrize("name", POLICIES)
def test_a_gang_stays_in_one_cluster_if_one_has_room(name):
    fleet = Fleet()
    sizes = {"x": 2, "y": 3}
    fleet.install(
        [Cluster(id=c, nodes=tuple(node(str(n)) for n in range(size))) for c, size in sizes.items()]
    )
    together = ask(new_policy(name), fleet, Demand(1, nodes=3))
    assert {share["cluster_id"] for share in together} == {"y"}
    assert len(ask(new_policy(name), fleet, Demand(1, nodes=4))) == 4


def test_a_gang_gets_the_best_nodes_and_the_first_of_equal_nodes():
    fleet = fleet_with(*(node(f"n{number:03}") for number in range(200)))
    scores = np.arange(200) * 7 % 5
    rows = best_rows(FleetView(fleet), Demand(1, nodes=70), scores)
    assert rows == sorted(range(200), key=lambda row: (-scores[row], row))[:70]


@pytest.mark.parametrize("name", POLICIES)
def test_gpus_for_a_demand_of_nvlink_come_from_one_group(name):
    fleet = fleet_with(node("a", groups=["x", "y", "y", "x"]))
    assert ask(new_policy(name), fleet, Demand(2, topology="nvlink"))["gpus"] in (
        ["0", "3"],
        ["1", "2"],
    )
    assert "nvlink" in ask(new_policy(name), fleet, Demand(3, topology="nvlink"))["declined"]


@pytest.mark.parametrize("name", POLICIES)
def test_a_request_without_resources_may_give_them_in_inputs(name):
    fleet = fleet_with(node("a", models=["A", "A", "B", "B"]))
    data = {
        "fleet": FleetView(fleet),
        "cluster_data": cluster_data(fleet),
        "seed": 1,
        "inputs": {"gpus": 1, "gpu_milli": 300, "cpu_milli": 2000, "models": ["B"]},
    }
    value = new_policy(name).eval({}, data, {})
    assert value.pop("gpus") in (["2"], ["3"])
    assert value == {
        "cluster_id": "c",
        "node_id": "a",
        "gpu_milli": 300,
        "cpu_milli": 2000,
        "memory_mib": 0,
    }


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    "inputs",
    [
        {},
        None,
        "one gpu",
        {"gpus": 0},
        {"gpus": "1"},
        {"gpus": True},
        {"gpus": -1},
        {"gpus": 1.5},
        {"gpus": 1, "gpu_milli": 1001},
        {"gpus": 1, "nodes": 0},
        {"gpus": 1, "models": "A"},
        {"gpus": 1, "topology": "ring"},
        {"gpus": 1, "topology": []},
    ],
)
def test_a_request_without_resources_is_declined_with_a_remedy(name, inputs):
    fleet = fleet_with(node("a"))
    data = {"fleet": FleetView(fleet), "cluster_data": cluster_data(fleet), "seed": 1}
    data["inputs"] = inputs
    value = new_policy(name).eval({}, data, {})
    assert list(value) == ["declined"]
    assert "`resources`" in value["declined"]


@pytest.mark.parametrize("name", POLICIES)
def test_on_an_empty_fleet_each_policy_declines(name):
    value = ask(new_policy(name), Fleet(), Demand(1, gpu_milli=500, models=("A", "B")))
    assert "1 GPUs of 500 milli of A or B" in value["declined"]


# Any fleet, any demand -------------------------------------------------------------------------

GROUPS = st.sampled_from(["", "x", "y"])
GPUS = st.builds(
    lambda model, group, numa, exclusive: (model, group, numa, exclusive),
    st.sampled_from(["A", "B"]),
    GROUPS,
    st.sampled_from([-1, 0, 1]),
    st.booleans(),
)
NODES = st.tuples(
    st.sampled_from(["c0", "c1"]),
    st.lists(GPUS, max_size=4),
    st.integers(0, 8),
    st.integers(0, 8),
    st.sampled_from(["", "r0", "r1"]),
    st.sampled_from(["", "z0", "z1"]),
)
DEMANDS = st.builds(
    Demand,
    gpus=st.integers(0, 3),
    gpu_milli=st.sampled_from([1, 250, 400, 600, 1000]),
    models=st.sampled_from([(), ("A",), ("A", "B"), ("Z",)]),
    cpu_milli=st.integers(0, 4).map(lambda cores: 1000 * cores),
    memory_mib=st.integers(0, 4).map(lambda gib: 1024 * gib),
    nodes=st.sampled_from([1, 1, 1, 2, 3]),
    topology=st.sampled_from(["", "", "nvlink", "numa", "rack", "zone"]),
)
CANDIDATES = st.sampled_from([None, None, ["c0"], ["c0", "c1"]])


def build(nodes):
    clusters = {"c0": [], "c1": []}
    for number, (cluster, gpus, cores, gib, rack, zone) in enumerate(nodes):
        devices = tuple(
            Gpu(id=str(n), model=m, link_group=g, numa=numa, exclusive=exclusive)
            for n, (m, g, numa, exclusive) in enumerate(gpus)
        )
        node = Node(f"n{number}", 1000 * cores, 1024 * gib, devices, rack, zone=zone)
        clusters[cluster].append(node)
    fleet = Fleet()
    fleet.install([Cluster(id=c, nodes=tuple(members)) for c, members in clusters.items()])
    return fleet


def room_for(view, demand):
    """Return whether the demand fits, only by `feasible` and the rules for gangs."""
    rows = [row for row, fits in enumerate(view.feasible(demand)) if fits]
    if demand.nodes > 1 and demand.topology in {"rack", "zone"}:
        groups = getattr(view, demand.topology)
        places = Counter(
            (int(view.cluster[row]), int(groups[row])) for row in rows if groups[row] >= 0
        )
        return max(places.values(), default=0) >= demand.nodes
    return len(rows) >= demand.nodes


def check(fleet, view, demand, value):
    """Assert that the proposal is sound, and apply it."""
    shares = [ask_message.share() for ask_message in parse_proposal(value, demand)]
    assert len(shares) == demand.nodes
    assert len({(share.cluster_id, share.node_id) for share in shares}) == demand.nodes
    feasible, fitting, places = view.feasible(demand), view.fitting_gpus(demand), set()
    for share in shares:
        row = fleet.row(share.cluster_id, share.node_id)
        columns = [fleet.gpu_ids[row].index(gpu) for gpu in share.gpus]
        together = fleet.zone if demand.topology == "zone" else fleet.rack
        places.add((int(fleet.cluster[row]), int(together[row])))
        assert feasible[row]
        assert len(set(columns)) == demand.gpus
        assert all(fitting[row, column] for column in columns)
        groups = {"nvlink": fleet.gpu_link, "numa": fleet.gpu_numa}.get(demand.topology)
        if groups is not None and demand.gpus > 1:
            (group,) = {int(groups[row, column]) for column in columns}
            assert group >= 0
        fleet.take(share)
    if demand.topology in {"rack", "zone"} and demand.nodes > 1:
        assert len(places) == 1
        assert min(places)[1] >= 0
    return shares


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60)
@given(
    nodes=st.lists(NODES, max_size=6),
    steps=st.lists(st.tuples(DEMANDS, CANDIDATES, st.booleans()), min_size=1, max_size=12),
)
def test_the_policy_proposes_exactly_the_feasible_nodes(name, nodes, steps):
    fleet, policy, held, context = build(nodes), new_policy(name), [], {}
    for number, (demand, candidates, release) in enumerate(steps):
        if release and held:
            for share in held.pop(0):
                fleet.give(share)
        view = FleetView(fleet, demand, candidates)
        data = {"fleet": view, "cluster_data": cluster_data(fleet), "inputs": {}, "seed": number}
        value = policy.eval({}, data, context)
        if room_for(view, demand):
            held.append(check(fleet, view, demand, value))
        else:
            assert list(value) == ["declined"]

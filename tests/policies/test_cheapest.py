"""Tests of the policy `cheapest`: the sources of prices, and ties between equal prices."""

import pytest
from small import ask, fleet_with, new_policy, node, take

from moorage.model import Cluster, Demand

PRICE, TYPE = "moorage.io/gpu-hour-price", "node.kubernetes.io/instance-type"
SPOT = {"karpenter.sh/capacity-type": "spot"}


def choose(nodes, demand=None, policy=None, **parameters):
    demand = demand or Demand(1)
    value = ask(
        policy or new_policy("cheapest"),
        fleet_with(*nodes),
        demand,
        parameters=parameters,
        clusters=[Cluster("c", tuple(nodes))],
    )
    return value.get("node_id")


def test_a_label_overrides_the_table_and_the_instance_type_overrides_the_model():
    nodes = [
        node("model", models=["A100"] * 4),
        node("type", models=["A100"] * 4, labels={TYPE: "p4d"}),
        node("label", models=["A100"] * 4, labels={TYPE: "p4d", PRICE: "2.5"}),
    ]
    assert choose(nodes, prices={"A100": 3, "p4d": 2}) == "type"
    assert choose(nodes, prices={"A100": 1, "p4d": 2}) == "model"
    assert choose(nodes, prices={"A100": 4, "p4d": 3}) == "label"
    assert choose(nodes) == "label"


def test_spot_machines_without_a_price_label_cost_a_part_of_the_table_price():
    nodes = [
        node("a", labels={TYPE: "p4d"}),
        node("b", labels={TYPE: "p5", **SPOT}),
        node("c", labels={PRICE: "9", **SPOT}),
    ]
    prices = {"p4d": 3, "p5": 8}
    assert choose(nodes, prices=prices) == "a"
    assert choose(nodes, prices=prices, spot_factor=0.3) == "b"
    assert choose(nodes[2:], prices=prices, spot_factor=0) == "c"


def test_nodes_of_unknown_price_come_last_and_unreadable_prices_count_as_unknown():
    nodes = [
        node("a", labels={PRICE: "cheap"}),
        node("b", labels={PRICE: "-1"}),
        node("c", labels={PRICE: "nan"}),
        node("d", labels={PRICE: "1000"}),
    ]
    assert choose(nodes) == "d"
    assert choose(nodes[:3]) == "a"


def test_among_equal_prices_the_fullest_node_is_filled():
    nodes = [node("a"), node("b"), node("c", labels={PRICE: "2"})]
    fleet, clusters = fleet_with(*nodes), [Cluster("c", tuple(nodes))]
    take(fleet, {"cluster_id": "c", "node_id": "b", "gpus": ["0"]}, Demand(1))
    parameters = {"prices": {"A": 1}}
    value = ask(new_policy("cheapest"), fleet, Demand(1), parameters=parameters, clusters=clusters)
    assert value["node_id"] == "b"


def test_on_a_node_of_mixed_gpus_the_price_of_the_used_gpu_counts():
    nodes = [node("a", models=["T4", "H100"]), node("b", models=["A100", "A100"])]
    prices = {"T4": 1, "H100": 9, "A100": 4}
    assert choose(nodes, prices=prices) == "a"
    assert choose(nodes, Demand(1, models=("A100", "H100")), prices=prices) == "b"


def test_work_without_gpus_avoids_nodes_with_gpus():
    nodes = [node("a", labels={PRICE: "0.1"}), node("b", gpus=0), node("c", gpus=0)]
    assert choose(nodes, Demand(cpu_milli=1000)) == "b"
    assert choose(nodes[:1], Demand(cpu_milli=1000)) == "a"


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_fleet_without_gpus_is_not_an_error(gpus):
    assert choose([node("a", gpus=0)], Demand(gpus, cpu_milli=1)) == (None if gpus else "a")


def test_a_running_policy_notices_changed_prices():
    nodes, policy = [node("a", models=["T4"]), node("b", models=["L4"])], new_policy("cheapest")
    assert choose(nodes, policy=policy, prices={"T4": 1, "L4": 2}) == "a"
    assert choose(nodes, policy=policy, prices={"T4": 2, "L4": 1}) == "b"
    dearer = [node("a", models=["T4"]), node("b", models=["L4"], labels={PRICE: "5"})]
    assert choose(dearer, policy=policy, prices={"T4": 2, "L4": 1}) == "a"

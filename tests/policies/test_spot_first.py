"""Tests of the policy `spot_first`: the order of capacity types."""

from small import ask, fleet_with, new_policy, node, take

from moorage.model import Cluster, Demand

KIND = "karpenter.sh/capacity-type"


class Site:
    def __init__(self, *kinds, gpus=1):
        labels = [{KIND: kind} if kind else {} for kind in kinds]
        nodes = [node(f"n{n}", gpus=gpus, labels=each) for n, each in enumerate(labels)]
        self.fleet, self.clusters = fleet_with(*nodes), [Cluster("c", tuple(nodes))]
        self.policy = new_policy("spot_first")

    def fill(self, demand=None, **parameters):
        """Place requests until none fits; return the nodes in the order of their use."""
        demand, used = demand or Demand(1), []
        while True:
            value = ask(
                self.policy, self.fleet, demand, parameters=parameters, clusters=self.clusters
            )
            if "declined" in value:
                return used
            take(self.fleet, value, demand)
            used.append(value["node_id"])


def test_spot_comes_before_reserved_on_demand_and_other_types():
    assert Site("on-demand", "odd", "spot", None, "reserved").fill() == [
        "n2",
        "n4",
        "n0",
        "n3",
        "n1",
    ]


def test_the_order_of_the_types_is_a_parameter():
    assert Site("on-demand", "spot", "reserved").fill(order=["reserved", "on-demand"]) == [
        "n2",
        "n0",
        "n1",
    ]


def test_only_named_types_are_used_without_the_parameter_for_other_types():
    assert Site("on-demand", "spot", None).fill(order=["spot"], others=False) == ["n1"]
    assert Site("on-demand").fill(order=[], others=False) == []


def test_within_a_type_one_node_is_filled_before_the_next_node():
    assert Site("spot", "spot", gpus=2).fill() == ["n0", "n0", "n1", "n1"]


def test_a_running_policy_notices_a_changed_order():
    site = Site("spot", "on-demand", gpus=4)
    parameters = [{}, {"order": ["on-demand"]}, {}]
    chosen = [
        ask(site.policy, site.fleet, Demand(1), parameters=each, clusters=site.clusters)["node_id"]
        for each in parameters
    ]
    assert chosen == ["n0", "n1", "n0"]

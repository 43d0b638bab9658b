"""Tests of the policy `gang`: nodes close together or far apart, or no placement at all."""

import pytest
from small import ask, fleet_with, new_policy, node, take

from moorage.model import Cluster, Demand
from moorage.policy import Fleet

SPREAD = {"strategy": "spread"}


def racks(**sizes):
    """Return nodes named `rack-number`, with the given number for each rack."""
    return [node(f"{rack}-{n}", rack=rack) for rack, size in sizes.items() for n in range(size)]


def members(fleet, demand, **parameters):
    value = ask(new_policy("gang"), fleet, demand, parameters=parameters)
    if "declined" in value:
        return []
    return [share["node_id"] for share in (value if demand.nodes > 1 else [value])]


def test_pack_takes_the_rack_with_the_least_room_that_is_enough():
    fleet = fleet_with(*racks(a=4, b=2, c=3))
    assert members(fleet, Demand(1, nodes=2)) == ["b-0", "b-1"]
    assert members(fleet, Demand(1, nodes=3)) == ["c-0", "c-1", "c-2"]


def test_pack_takes_the_fullest_nodes_of_the_rack():
    fleet = fleet_with(*racks(a=3))
    take(fleet, {"cluster_id": "c", "node_id": "a-2", "gpus": ["0"]}, Demand(1))
    assert members(fleet, Demand(1, nodes=2)) == ["a-2", "a-0"]


def test_pack_uses_as_few_racks_as_possible():
    fleet = fleet_with(*racks(a=1, b=3, c=2))
    assert {name[0] for name in members(fleet, Demand(1, nodes=5))} == {"b", "c"}


def test_spread_uses_each_rack_once_before_it_uses_a_rack_again():
    fleet = fleet_with(*racks(a=4, b=2, c=1))
    assert members(fleet, Demand(1, nodes=3), **SPREAD) == ["a-0", "b-0", "c-0"]
    assert members(fleet, Demand(1, nodes=5), **SPREAD) == ["a-0", "b-0", "c-0", "a-1", "b-1"]


def test_spread_takes_the_emptiest_node_of_each_rack_first():
    fleet = fleet_with(*racks(a=2, b=2))
    take(fleet, {"cluster_id": "c", "node_id": "a-0", "gpus": ["0"]}, Demand(1))
    assert set(members(fleet, Demand(1, nodes=2), **SPREAD)) == {"a-1", "b-0"}


@pytest.mark.parametrize("parameters", [{}, SPREAD])
def test_a_gang_stays_in_one_cluster_if_one_has_room(parameters):
    fleet = Fleet()
    fleet.install([Cluster("x", tuple(racks(a=2))), Cluster("y", tuple(racks(b=2, c=1)))])
    for nodes, clusters in ((3, {"y"}), (4, {"x", "y"})):
        value = ask(new_policy("gang"), fleet, Demand(1, nodes=nodes), parameters=parameters)
        assert {share["cluster_id"] for share in value} == clusters


@pytest.mark.parametrize(("parameters", "rack"), [({}, "b"), (SPREAD, "a")])
def test_a_gang_stays_in_one_rack_if_the_request_demands_it(parameters, rack):
    fleet = fleet_with(*racks(a=3, b=2, c=1))
    found = members(fleet, Demand(1, nodes=2, topology="rack"), **parameters)
    assert {name[0] for name in found} == {rack}
    assert members(fleet, Demand(1, nodes=4, topology="rack"), **parameters) == []


def test_each_node_without_a_rack_counts_as_a_rack():
    fleet = fleet_with(node("p"), node("q"), *racks(r=2))
    assert set(members(fleet, Demand(1, nodes=2))) == {"r-0", "r-1"}
    assert set(members(fleet, Demand(1, nodes=3), **SPREAD)) == {"p", "q", "r-0"}


@pytest.mark.parametrize("parameters", [{}, SPREAD])
def test_a_gang_that_does_not_fit_completely_gets_nothing(parameters):
    fleet = fleet_with(*racks(a=2, b=2))
    take(fleet, {"cluster_id": "c", "node_id": "a-0", "gpus": ["0", "1", "2"]}, Demand(3))
    assert len(members(fleet, Demand(2, nodes=3), **parameters)) == 3
    assert members(fleet, Demand(2, nodes=4), **parameters) == []


def test_a_gang_of_one_node_goes_to_the_fullest_or_the_emptiest_node():
    fleet = fleet_with(*racks(a=1, b=1))
    take(fleet, {"cluster_id": "c", "node_id": "b-0", "gpus": ["0"]}, Demand(1))
    assert members(fleet, Demand(1)) == ["b-0"]
    assert members(fleet, Demand(1), **SPREAD) == ["a-0"]

"""The policy `topology` prefers an NVLink group, a NUMA domain, a node, and one rack for gangs."""

from small import ask, fleet_with, new_policy, node, take

from moorage.model import Demand

LINKED = node("linked", groups=["x", "x", "y", "y"])
DOMAINS = node("domains", numa=[0, 0, 1, 1])
PLAIN = node("a-plain")


def test_levels_of_topology_are_preferred_in_order():
    policy = new_policy("topology")
    assert ask(policy, fleet_with(PLAIN, DOMAINS, LINKED), Demand(2))["node_id"] == "linked"
    assert ask(policy, fleet_with(PLAIN, DOMAINS), Demand(2))["node_id"] == "domains"
    assert ask(policy, fleet_with(PLAIN), Demand(2))["node_id"] == "a-plain"


def test_a_request_that_fits_no_group_is_still_placed():
    value = ask(new_policy("topology"), fleet_with(LINKED), Demand(3))
    assert value["gpus"] == ["0", "1", "2"]


def test_gpus_of_two_groups_are_taken_only_if_no_group_has_room():
    fleet, policy = fleet_with(LINKED), new_policy("topology")
    take(fleet, {"cluster_id": "c", "node_id": "linked", "gpus": ["0"]}, Demand(1))
    assert ask(policy, fleet, Demand(2))["gpus"] == ["2", "3"]
    take(fleet, {"cluster_id": "c", "node_id": "linked", "gpus": ["2"]}, Demand(1))
    assert ask(policy, fleet, Demand(2))["gpus"] == ["1", "3"]


def test_within_a_level_of_topology_the_fullest_node_is_chosen():
    fleet = fleet_with(node("a", groups=["x"] * 4), node("b", groups=["x"] * 4))
    take(fleet, {"cluster_id": "c", "node_id": "b", "gpus": ["3"]}, Demand(1))
    assert ask(new_policy("topology"), fleet, Demand(2))["node_id"] == "b"


def test_a_single_gpu_is_taken_from_a_group_that_is_already_split():
    for kind in ({"groups": ["x", "x", "y", "y"]}, {"numa": [0, 0, 1, 1]}):
        fleet, policy = fleet_with(node("n", **kind)), new_policy("topology")
        take(fleet, {"cluster_id": "c", "node_id": "n", "gpus": ["2"]}, Demand(1))
        assert ask(policy, fleet, Demand(1))["gpus"] == ["3"]


def test_a_share_takes_the_fullest_gpu_before_it_takes_a_part_of_a_free_gpu():
    fleet, policy = fleet_with(node("n", groups=["x", "x", "y", "y"])), new_policy("topology")
    for gpu, milli in (("0", 300), ("2", 600)):
        take(fleet, {"cluster_id": "c", "node_id": "n", "gpus": [gpu]}, Demand(1, milli))
    assert ask(policy, fleet, Demand(1, 200))["gpus"] == ["2"]
    assert ask(policy, fleet, Demand(1, 500))["gpus"] == ["0"]


def test_a_gang_prefers_one_rack_and_takes_several_if_no_rack_has_room():
    racks = ["r1", "r2", "r2", ""]
    fleet = fleet_with(*(node(f"n{n}", rack=rack) for n, rack in enumerate(racks)))
    policy = new_policy("topology")
    two = ask(policy, fleet, Demand(1, nodes=2))
    assert {share["node_id"] for share in two} == {"n1", "n2"}
    assert len(ask(policy, fleet, Demand(1, nodes=4))) == 4


def test_a_demanded_topology_is_respected():
    policy = new_policy("topology")
    assert ask(policy, fleet_with(LINKED, DOMAINS), Demand(2, topology="numa"))["node_id"] == (
        "domains"
    )
    assert "nvlink" in ask(policy, fleet_with(DOMAINS), Demand(2, topology="nvlink"))["declined"]
    # The demand for one rack concerns nodes: GPUs are still chosen by preference.
    racked = [node(name, rack="r", groups=["x", "y", "y", "x"]) for name in "ab"]
    shares = ask(policy, fleet_with(*racked), Demand(2, nodes=2, topology="rack"))
    assert [share["gpus"] for share in shares] == [["0", "3"]] * 2

"""Tests of the policy `most_memory`, by GPU memory, or by main memory without GPUs."""

from small import ask, fleet_with, new_policy, node, take

from moorage.model import Cluster, Demand, Gpu, Node
from moorage.policy import Fleet


def test_the_node_with_the_most_free_gpu_memory_is_chosen():
    fleet = fleet_with(node("a", gpus=1, gpu_memory=40_960), node("b", gpus=3, gpu_memory=24_576))
    policy = new_policy("most_memory")
    assert ask(policy, fleet, Demand(1))["node_id"] == "a"
    assert ask(policy, fleet, Demand(2))["node_id"] == "b"


def test_the_policy_compares_free_memory_and_not_total_memory():
    fleet = fleet_with(node("a", gpus=1, gpu_memory=80_000), node("b", gpus=1, gpu_memory=24_000))
    take(fleet, {"cluster_id": "c", "node_id": "a", "gpus": ["0"]}, Demand(1, 800))
    assert ask(new_policy("most_memory"), fleet, Demand(1, 100))["node_id"] == "b"


def test_on_the_chosen_node_the_gpus_with_the_most_free_memory_are_taken():
    gpus = tuple(Gpu(str(n), memory_mib=mib) for n, mib in enumerate([16, 80, 24, 80]))
    fleet = Fleet()
    fleet.install([Cluster("c", (Node("n", 1000, 1, gpus),))])
    policy = new_policy("most_memory")
    assert ask(policy, fleet, Demand(2))["gpus"] == ["1", "3"]
    assert ask(policy, fleet, Demand(3))["gpus"] == ["1", "2", "3"]
    take(fleet, {"cluster_id": "c", "node_id": "n", "gpus": ["1"]}, Demand(1, 900))
    assert ask(policy, fleet, Demand(1, 100))["gpus"] == ["3"]


def test_without_known_gpu_memory_the_node_with_most_main_memory_is_chosen():
    fleet = fleet_with(node("a", memory=1024), node("b", memory=4096), node("c", memory=4096))
    policy = new_policy("most_memory")
    assert ask(policy, fleet, Demand(1))["node_id"] == "b"
    assert ask(policy, fleet, Demand(memory_mib=512))["node_id"] == "b"

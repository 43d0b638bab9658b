"""The built-in policies of blocks score a cluster by its free capacity, or 0 if it does not fit."""

import random

import pytest

from moorage.daemon.blocks.defaults import best, dry_run, nodes_of
from moorage.model import Cluster, ClusterId, Demand, Gpu, Node, NodeId, Share
from moorage.policy import Fleet


def node(name: str, gpus: int = 2, cpu: int = 8000, memory: int = 4096) -> Node:
    devices = tuple(Gpu(str(number), "L4", 24_000) for number in range(gpus))
    return Node(NodeId(name), cpu, memory, devices)


def fleet_of(**clusters: list[Node]) -> Fleet:
    fleet = Fleet()
    fleet.install(Cluster(ClusterId(name), tuple(nodes)) for name, nodes in clusters.items())
    return fleet


def hold(fleet: Fleet, cluster: str, name: str, *gpus: str, **amounts: int) -> None:
    fleet.take(Share(ClusterId(cluster), NodeId(name), gpus, **amounts))


def test_the_default_policy_of_blocks_scores_only_nodes_of_the_cluster():
    fleet = fleet_of(a=[node("a1"), node("a0", gpus=1)], b=[node("b0", gpus=0)], c=[])
    assert nodes_of(fleet, "a") == {"a0": ("0",), "a1": ("0", "1")}
    assert nodes_of(fleet, "b") == {"b0": ()}
    assert nodes_of(fleet, "c") == nodes_of(fleet, "aa") == nodes_of(Fleet(), "a") == {}


def test_without_a_demand_the_emptiest_node_wins_with_its_free_gpus():
    fleet = fleet_of(a=[node("a0"), node("a1")])
    hold(fleet, "a", "a0", "0", cpu_milli=2000)
    assert dry_run(fleet, "a", None) == {
        "score": 1.0,
        "node_info": {"node_id": "a1", "gpus": ["0", "1"]},
    }
    hold(fleet, "a", "a1", "0", cpu_milli=6000)
    assert dry_run(fleet, "a", None) == {
        "score": 0.5,
        "node_info": {"node_id": "a0", "gpus": ["1"]},
    }


def test_only_requested_resources_count():
    fleet = fleet_of(a=[node("a0")])
    hold(fleet, "a", "a0", "0", "1", cpu_milli=2000)
    why = "its node has no free capacity"
    assert dry_run(fleet, "a", None) == {"score": 0.0, "node_info": {}, "error": why}
    full = "its node has no room for the block's `resources` now"
    nowhere = {"score": 0.0, "node_info": {}, "error": full}
    assert dry_run(fleet, "a", Demand(gpus=1)) == nowhere
    info = {"node_id": "a0", "gpus": []}
    assert dry_run(fleet, "a", Demand(cpu_milli=6000)) == {"score": 0.75, "node_info": info}
    assert dry_run(fleet, "a", Demand(cpu_milli=6001)) == nowhere
    assert dry_run(fleet, "a", Demand(memory_mib=1)) == {"score": 1.0, "node_info": info}


def test_a_block_that_needs_a_part_of_a_gpu_gets_the_fullest_gpu_that_fits():
    fleet = fleet_of(a=[node("a0")])
    hold(fleet, "a", "a0", "1", gpu_milli=600)
    found = dry_run(fleet, "a", Demand(gpus=1, gpu_milli=400))
    assert found == {"score": 0.7, "node_info": {"node_id": "a0", "gpus": ["1"]}}


def test_a_cluster_without_nodes_or_outside_the_fleet_gets_no_score():
    for fleet in (Fleet(), fleet_of(a=[], b=[node("b0")])):
        found = dry_run(fleet, "a", Demand(gpus=1))
        assert found == {"score": 0.0, "node_info": {}, "error": "it has no nodes"}
        assert dry_run(fleet, "a", None) == found


@pytest.mark.parametrize("seed", range(50))
def test_the_block_fits_on_each_selected_cluster_and_on_no_refused_cluster(seed):
    dice = random.Random(seed)
    fleet = fleet_of(
        a=[node(f"a{number}", gpus=dice.randrange(4)) for number in range(dice.randrange(5))],
        b=[node("b0", gpus=4)],
    )
    for (cluster, name), ids in zip(fleet.node_ids, fleet.gpu_ids, strict=True):
        taken = dice.sample(ids, dice.randrange(len(ids) + 1))
        hold(fleet, cluster, name, *taken, cpu_milli=dice.choice([0, 4000, 8000]))
    demand = Demand(gpus=dice.randrange(3), cpu_milli=dice.choice([0, 4000]))
    found = dry_run(fleet, "a", demand)
    assert 0 <= found["score"] <= 1
    rows = [row for row, (cluster, _) in enumerate(fleet.node_ids) if cluster == "a"]
    fits = {fleet.node_ids[row][1]: row for row in rows if fleet.feasible(demand)[row]}
    assert bool(found["score"]) == bool(fits)
    if found["score"]:
        row = fits[found["node_info"]["node_id"]]
        gpus = found["node_info"]["gpus"]
        assert len(gpus) == demand.gpus
        assert all(fleet.gpu_free[row][fleet.gpu_ids[row].index(gpu)] == 1000 for gpu in gpus)


def test_the_first_cluster_with_the_highest_score_above_0_is_chosen():
    scores = {"a": 0.2, "b": 0.9, "c": 0.9, "d": 0.0}
    assert best((name, {"score": score}) for name, score in scores.items()) == "b"
    assert best([("d", {"score": 0}), ("e", {"score": 0.0})]) is None
    assert best([]) is None

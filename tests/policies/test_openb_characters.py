"""The character of the shipped policies on a production cluster: each is best at its subject.

The published policies are compared with their published figures in test_openb.
"""

from collections import Counter
from functools import cache
from pathlib import Path
from statistics import mean

import pytest
from small import ask, new_policy

from benchmarks.packing import Site, pack
from moorage.lab.trace import (
    TracePod,
    arrivals,
    capacity_milli,
    cluster_document,
    permute_names,
    read_nodes,
    read_pods,
)
from moorage.model import Demand

DATA = Path(__file__).parents[3] / "shared" / "data" / "openb"
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.trace,
    pytest.mark.skipif(not DATA.is_dir(), reason=f"the production traces are not at {DATA}"),
]
REQUESTS = 1200
"""About a seventh of the trace."""
DECLINED_MAX = 2
"""There is room for all, but where load is spread not for all that want eight GPUs."""
PRICES = {"G2": 2.0, "T4": 0.5, "G3": 3.0, "P100": 1.0, "V100M16": 2.5, "V100M32": 4.0, "A10": 1.5}
MEMORY = {"G2": 24, "T4": 16, "G3": 80, "P100": 16, "V100M16": 16, "V100M32": 32, "A10": 24}


@cache
def nodes():
    return read_nodes(DATA / "nodes.csv")


@cache
def requests():
    pods = read_pods(DATA / "pods_default.csv")
    return arrivals(pods, capacity_milli(nodes()), 1.0, 42)[:REQUESTS]


def openb_document():
    """Return the cluster with what the trace leaves out: racks, NVLink, memory and labels."""
    document = cluster_document(nodes(), names=permute_names(nodes(), 42))
    for number, entry in enumerate(document["nodes"]["nodeData"]):
        entry["rack"] = f"rack-{number % 60:02}"
        entry["labels"] = {"karpenter.sh/capacity-type": "spot"} if number % 3 == 0 else {}
        for index, gpu in enumerate(entry["gpus"]["gpus"]):
            gpu["linkGroup"] = f"link-{index // 4}"
            gpu["memory"] = 1024 * MEMORY[gpu["modelName"]]
    return document


def utilisation(number: int) -> int:
    """Return a node's made-up load in percent: known, and unrelated to what it has."""
    return number * 37 % 101


def place(name, pods=None, parameters=None):
    """Place requests by a policy; return the leases, and the site they are held on."""
    document = openb_document()
    entries = document["nodes"]["nodeData"]
    trees = [
        {
            "id": entry["id"],
            "vcpu": {"load1m": utilisation(number) / 100 * entry["vcpus"]["count"]},
            "gpu": {"avgCudaUtilization": utilisation(number)},
        }
        for number, entry in enumerate(entries)
    ]
    site = Site(document, {"clusterId": "openb", "nodes": trees})
    packing = pack(new_policy(name), site, requests() if pods is None else pods, parameters)
    assert packing.declined <= DECLINED_MAX
    by_id = {entry["id"]: (number, entry) for number, entry in enumerate(entries)}
    shares = [s for lease in site.allocator.state.leases.values() for s in lease.placement]
    return site, [(share, *by_id[share.node_id]) for share in shares]


placed_once = cache(place)
"""For the policies that others are compared with."""


def idle_nodes(site):
    fleet = site.allocator.state.fleet
    return int(((fleet.gpu_free == fleet.gpu_total).all(1) & (fleet.gpu_total.sum(1) > 0)).sum())


def test_gpu_packing_leaves_the_most_machines_idle():
    idle = {name: idle_nodes(placed_once(name)[0]) for name in ("gpu_packing", "random", "spread")}
    assert idle["gpu_packing"] > 1.2 * max(idle["random"], idle["spread"])


def test_gpu_clustering_keeps_kinds_apart():
    def mixed_nodes(name):
        kinds = {}
        for share, number, _ in placed_once(name)[1]:
            if share.gpus:
                whole = share.gpu_milli == 1000
                kinds.setdefault(number, set()).add(len(share.gpus) if whole else "share")
        return sum(len(each) > 1 for each in kinds.values()) / len(kinds)

    assert mixed_nodes("gpu_clustering") < 0.02
    assert mixed_nodes("random") > 0.15


def test_dot_product_fills_nodes_that_are_in_use():
    assert idle_nodes(place("dot_product")[0]) > idle_nodes(placed_once("random")[0])


def test_cheapest_pays_least():
    def mean_price(held):
        return mean(PRICES[e["gpus"]["gpus"][0]["modelName"]] for s, _, e in held if s.gpus)

    cheapest = mean_price(place("cheapest", parameters={"prices": PRICES})[1])
    assert cheapest < 0.5 * mean_price(placed_once("random")[1])
    assert cheapest < 0.8  # The cheapest model's 842 GPUs have room for nearly all of them.


def test_spot_first_holds_nothing_but_spot_while_there_is_any():
    assert {number % 3 for share, number, _ in place("spot_first")[1] if share.gpus} == {0}
    order = {"order": ["on-demand"], "others": False}
    held = place("spot_first", parameters=order)[1]
    assert {number % 3 for _, number, _ in held} == {1, 2}


def test_least_loaded_works_on_the_idlest_machines():
    def mean_utilisation(name):
        return mean(utilisation(number) for share, number, _ in placed_once(name)[1] if share.gpus)

    assert mean_utilisation("least_loaded") < 0.4 * mean_utilisation("spread")


def test_most_memory_gives_the_largest_gpus():
    def memory_given(name):
        held = placed_once(name)[1]
        return mean(MEMORY[e["gpus"]["gpus"][0]["modelName"]] for s, _, e in held if s.gpus)

    assert memory_given("most_memory") > 1.3 * memory_given("random")


def pairs_and_fours():
    """Return requests for two and four GPUs among those for one, which break groups."""
    ones = [pod for pod in requests() if pod.gpus <= 1]
    for number, pod in enumerate(ones):
        yield pod
        if number % 6 == 0:
            yield TracePod(f"several-{number}", 4000, 8192, 2 + number % 12 // 3, 1000)


def test_topology_keeps_gpus_of_one_request_in_one_link_group():
    pods = list(pairs_and_fours())

    def split(name):
        several = [share for share, *_ in place(name, pods)[1] if len(share.gpus) > 1]
        assert len(several) > 150
        return sum(len({int(gpu) // 4 for gpu in share.gpus}) > 1 for share in several)

    assert split("topology") == 0
    assert split("random") > 20


@pytest.mark.parametrize(("strategy", "racks"), [("pack", 1), ("spread", 8)])
def test_gang_takes_one_rack_or_as_many_as_members(strategy, racks):
    site, _ = placed_once("random")
    value = ask(
        new_policy("gang"),
        site.allocator.state.fleet,
        Demand(2, nodes=8),
        parameters={"strategy": strategy},
    )
    by_id = {entry["id"]: entry["rack"] for entry in openb_document()["nodes"]["nodeData"]}
    assert len(value) == 8
    assert len(Counter(by_id[share["node_id"]] for share in value)) == racks


def test_similarity_finds_the_machines_that_are_most_alike():
    kinds = {}
    for node in nodes():
        kinds.setdefault((node.model, node.gpus), node)
    documents = [
        cluster_document([node], names={node.name: f"{model}-{gpus}"})
        | {"id": f"{model}-{gpus}", "vcpus": {"count": node.cpu_milli / 1000}}
        for (model, gpus), node in kinds.items()
        if gpus
    ]
    ranked = new_policy("similarity").eval({"like": "V100M32-8"}, documents, {})
    assert ranked[0]["nodes"]["nodeData"][0]["gpus"]["count"] == 8
    assert ranked[-1]["nodes"]["nodeData"][0]["gpus"]["count"] <= 2

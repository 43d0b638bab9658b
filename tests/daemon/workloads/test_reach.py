"""Tests of the search for candidate nodes on which a backend can start a workload."""

import pytest

from moorage.backends.base import NO_NODE, Support
from moorage.daemon.workloads.reach import out_of_reach, within_reach
from moorage.model import Cluster, ClusterId, Demand, Gpu, Node, NodeId
from moorage.policy import Fleet

SHAPE = {"cpu_milli": 8000, "memory_mib": 1024}


def support(nodes: str = "", clusters: str = "") -> Support:
    names = frozenset(nodes.split()), frozenset(clusters.split())
    return Support(frozenset({"process"}), "process", nodes=names[0], clusters=names[1])


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    for cluster, names in (("lab", "n0 n1"), ("pods", "n2")):
        nodes = tuple(Node(NodeId(name), **SHAPE) for name in names.split())
        fleet.put(Cluster(ClusterId(cluster), nodes))
    return fleet


def test_a_backend_of_one_machine_reaches_only_clusters_with_that_machine(fleet: Fleet) -> None:
    assert within_reach(fleet, support("n0"), None, Demand()) == (("lab",), (("lab", "n1"),))
    assert within_reach(fleet, support(), None, Demand()) == (None, ())
    assert within_reach(fleet, support("elsewhere"), None, Demand()) is None
    assert within_reach(fleet, support("n0"), (ClusterId("pods"),), Demand()) is None
    assert within_reach(fleet, support("n0"), None, Demand(gpus=1)) == (None, ())
    gpus = (Gpu("0", "A100", 40_960),)
    fleet.put(Cluster(ClusterId("gpus"), (Node(NodeId("n3"), **SHAPE, gpus=gpus),)))
    assert within_reach(fleet, support("n0"), None, Demand(gpus=1)) is None
    assert within_reach(fleet, support("n0"), (ClusterId("lab"),), Demand(gpus=1)) is not None


def test_a_backend_of_some_clusters_reaches_no_other_clusters(fleet: Fleet) -> None:
    pods = support(clusters="pods gone")
    assert within_reach(fleet, pods, None, Demand()) == (("pods",), ())
    assert within_reach(fleet, pods, (ClusterId("lab"),), Demand()) is None
    assert within_reach(Fleet(), pods, None, Demand()) == (None, ()), "the core refuses it"


def test_the_refusal_of_a_lease_that_no_backend_reaches_names_the_remedy(fleet: Fleet) -> None:
    supports = {
        "local": support("n9"),
        "kubernetes": support(clusters="pods"),
        "memory": support(),
    }
    no = out_of_reach(fleet, "local", supports, None, Demand())
    assert (no.field, no.details) == ("provision.backend", {"backends": ["kubernetes"]})
    for part in (
        "local only starts workloads on the nodes n9",
        "--here",
        "name the backend kubernetes",
    ):
        assert part in no.reason
    of_agents = Support(frozenset({"process"}), "process", nodes=frozenset({NO_NODE}))
    assert within_reach(fleet, of_agents, None, Demand()) is None
    none_yet = out_of_reach(fleet, "local", supports | {"local": of_agents}, None, Demand())
    for part in ("no machine to start a workload on", "moored agent token", "MOORAGE_LOCAL_HERE"):
        assert part in none_yet.reason
    alone = out_of_reach(fleet, "kubernetes", supports, (ClusterId("lab"),), Demand())
    assert alone.details == {"backends": []}
    assert "only starts workloads on the clusters pods" in alone.reason

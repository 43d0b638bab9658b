"""Tests of the policy `least_loaded`: the use of metrics and leases, and reads of metrics."""

import msgspec
import pytest
from small import ask, fleet_with, new_policy, node, take

from moorage.model import Cluster, Demand
from moorage.policy import Fleet, FleetView
from moorage.sandbox.cell.cluster_data import ClusterData

MEASURED_ALONE = {"promised_weight": 0, "refresh_seconds": 0}


def tree(name, *, cores=None, average=None, gpus=(), **more):
    devices = [{"gpu_id": n, "cudaUtilization": used} for n, used in enumerate(gpus)]
    return {
        "id": name,
        "vcpu": {} if cores is None else {"load1m": cores},
        "gpu": {} if average is None else {"avgCudaUtilization": average},
        "gpus": devices,
        **more,
    }


def metrics_of(*trees):
    return {"c": {"clusterId": "c", "nodes": list(trees)}}


def choose(fleet, demand, metrics, policy=None, **parameters):
    given = MEASURED_ALONE | parameters
    return ask(
        policy or new_policy("least_loaded"), fleet, demand, parameters=given, metrics=metrics
    )


def test_the_node_and_the_gpu_with_the_least_load_are_chosen():
    fleet = fleet_with(node("a"), node("b"))
    metrics = metrics_of(
        tree("a", cores=0, gpus=[90, 80, 70, 90]), tree("b", cores=0, gpus=[90, 20, 60, 10])
    )
    assert choose(fleet, Demand(1), metrics)["gpus"] == ["3"]
    assert choose(fleet, Demand(1), metrics)["node_id"] == "b"
    two = choose(fleet, Demand(2, 500), metrics)
    assert (two["node_id"], two["gpus"]) == ("b", ["1", "3"])


def test_least_loaded_compares_only_gpus_that_fit():
    fleet = fleet_with(node("a"), node("b"))
    metrics = metrics_of(
        tree("a", cores=0, gpus=[0, 90, 90, 90]), tree("b", cores=0, gpus=[50, 50, 50, 50])
    )
    assert choose(fleet, Demand(1), metrics)["node_id"] == "a"
    take(fleet, {"cluster_id": "c", "node_id": "a", "gpus": ["0"]}, Demand(1))
    assert choose(fleet, Demand(1), metrics)["node_id"] == "b"


def test_devices_without_reported_metrics_count_with_the_average_load():
    fleet = fleet_with(node("a"), node("b"))
    metrics = metrics_of(tree("a", cores=0, average=60), tree("b", cores=0, average=50))
    assert choose(fleet, Demand(1), metrics)["node_id"] == "b"


def test_cpu_load_counts_per_core_and_is_weighted():
    fleet = fleet_with(node("a", cpu=10_000), node("b", cpu=100_000))
    metrics = metrics_of(tree("a", cores=9, average=10), tree("b", cores=20, average=50))
    assert choose(fleet, Demand(1), metrics, cpu_weight=0)["node_id"] == "a"
    assert choose(fleet, Demand(1), metrics, cpu_weight=1)["node_id"] == "b"
    assert choose(fleet, Demand(cpu_milli=1), metrics, cpu_weight=0)["node_id"] == "b"


def test_a_node_without_metrics_is_rated_by_its_leases():
    fleet = fleet_with(node("a"), node("b"))
    metrics = metrics_of(tree("b", cores=32, average=50))
    assert choose(fleet, Demand(1), metrics)["node_id"] == "b"
    assert choose(fleet, Demand(1), metrics, unmeasured=0.4)["node_id"] == "a"
    stale = metrics_of(tree("a", cores=0, average=0, stale=True), tree("b", cores=32, average=50))
    assert choose(fleet, Demand(1), stale)["node_id"] == "b"


@pytest.mark.parametrize("nonsense", ["busy", None, True, [1], {"percent": 1}])
def test_non_numeric_metrics_are_ignored(nonsense):
    fleet = fleet_with(node("a"), node("b"))
    metrics = metrics_of(
        tree("a", cores=nonsense, average=nonsense, gpus=[nonsense] * 4),
        tree("b", cores=64, average=99),
    )
    assert choose(fleet, Demand(1), metrics)["node_id"] == "b"


def test_without_metrics_the_policy_spreads_by_leases():
    fleet, policy, seen = (
        fleet_with(*(node(name) for name in "abc")),
        new_policy("least_loaded"),
        [],
    )
    for _ in range(6):
        value = ask(policy, fleet, Demand(1, cpu_milli=1000))
        seen.append(value["node_id"])
        take(fleet, value, Demand(1, cpu_milli=1000))
    assert seen == list("abcabc")


def test_a_burst_of_requests_does_not_all_go_to_the_idle_node():
    nodes = [node(name, gpus=8) for name in "abc"]
    metrics = metrics_of(
        *(tree(name, cores=6, average=10) for name in "bc"), tree("a", cores=0, average=0)
    )
    used = []
    fleet, policy = fleet_with(*nodes), new_policy("least_loaded")
    for _ in range(12):
        value = choose(fleet, Demand(1), metrics, policy, promised_weight=0.5)
        take(fleet, value, Demand(1))
        used.append(value["node_id"])
    assert used[0] == "a"
    assert set(used) == {"a", "b", "c"}
    assert used.count("a") < 8


class Counted:
    """Ten clusters of one node each; tests change their metrics and count the reads."""

    def __init__(self):
        self.used = dict.fromkeys([f"c{n}" for n in range(10)], 50)
        self.fleet, self.fetches = Fleet(), []
        self.fleet.install([Cluster(name, (node("n"),)) for name in self.used])
        self.policy = new_policy("least_loaded")

    def fetch(self, name):
        self.fetches.append(name)
        return msgspec.msgpack.encode(self.entry(name))

    def entry(self, name):
        nodes = [tree("n", cores=0, average=self.used[name])]
        return {"data": {"id": name}, "cluster_metrics": {"clusterId": name, "nodes": nodes}}

    def ask(self, candidates=None, **parameters):
        ids = candidates or self.fleet.cluster_ids
        data = {
            "fleet": FleetView(self.fleet, Demand(1), candidates),
            "cluster_data": ClusterData(ClusterData.keys_of(ids), self.fetch, self.fleet),
            "inputs": {},
        }
        return self.policy.eval(parameters, data, {})["cluster_id"]


def test_all_metrics_are_read_once_and_not_for_each_request():
    site = Counted()
    site.used["c7"] = 10
    assert [site.ask(refresh_seconds=3600) for _ in range(3)] == ["c7"] * 3
    assert site.fetches == list(site.used)


def test_new_metrics_take_effect_after_the_refresh_interval():
    site = Counted()
    site.used["c7"] = 10
    assert site.ask(refresh_seconds=0) == "c7"
    site.used["c3"] = 5
    assert site.ask(refresh_seconds=3600) == "c7"
    assert site.ask(refresh_seconds=0) == "c3"


def test_metrics_of_new_candidates_are_read():
    site = Counted()
    site.used |= {"c7": 10, "c3": 5}
    assert site.ask(["c6", "c7"], refresh_seconds=3600) == "c7"
    assert site.ask(["c2", "c3"], refresh_seconds=3600) == "c3"


def test_a_running_policy_notices_a_changed_inventory():
    site = Counted()
    site.used["c7"] = 10
    assert site.ask(refresh_seconds=3600) == "c7"
    site.fleet.install([Cluster(name, (node("n"),)) for name in list(site.used)[:7]])
    assert site.ask(refresh_seconds=3600) == "c0"

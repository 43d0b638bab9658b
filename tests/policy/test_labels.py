"""Labels of nodes are read once per inventory, for the clusters that a request may use."""

import msgspec
import pytest

from moorage.model import Cluster, Node
from moorage.policy import Fleet, FleetView, NodeLabels, capacity_type
from moorage.sandbox.cell.cluster_data import ClusterData


class Registry:
    """Cluster documents that count their reads."""

    def __init__(self, labels):
        self.labels = labels
        self.fetches = []

    def data(self, fleet, ids):
        return ClusterData(ClusterData.keys_of(ids), self.fetch, fleet)

    def fetch(self, name):
        self.fetches.append(name)
        return msgspec.msgpack.encode(self.entry(name))

    def entry(self, name):
        nodes = [{"id": node, "labels": each} for node, each in self.labels[name].items()]
        return {"data": {"id": name, "nodes": {"nodeData": nodes}}, "cluster_metrics": None}


def install(fleet, labels):
    fleet.install(
        [Cluster(name, tuple(Node(n, 1000, 1) for n in nodes)) for name, nodes in labels.items()]
    )


def colour(labels):
    return labels.get("colour", "")


def test_a_column_of_labels_has_a_value_per_row_and_is_read_once():
    registry = Registry({"x": {"b": {"colour": "red"}, "a": {}}, "y": {"a": {"colour": "blue"}}})
    fleet, labels = Fleet(), NodeLabels()
    install(fleet, registry.labels)
    view = FleetView(fleet)
    first = labels.column(view, registry.data(fleet, ["x", "y"]), colour)
    assert first == ("", "red", "blue")
    assert labels.column(view, registry.data(fleet, ["x", "y"]), colour) is first
    assert registry.fetches == ["x", "y"]


def test_labels_are_read_for_new_candidates_and_a_new_inventory():
    registry = Registry({"x": {"a": {"colour": "red"}}, "y": {"a": {"colour": "blue"}}})
    fleet, labels = Fleet(), NodeLabels()
    install(fleet, registry.labels)
    view = FleetView(fleet)
    assert labels.column(view, registry.data(fleet, ["x"]), colour) == ("red", "")
    assert labels.column(view, registry.data(fleet, ["y"]), colour) == ("red", "blue")
    registry.labels["x"]["a"] = {"colour": "green"}
    assert labels.column(view, registry.data(fleet, ["x"]), colour) == ("red", "blue")
    install(fleet, registry.labels)
    assert labels.column(FleetView(fleet), registry.data(fleet, ["x"]), colour) == ("green", "")


def test_values_of_labels_become_strings():
    seen = []
    registry = Registry({"x": {"a": {"spot": True, "gpus": 8}, "b": None}})
    fleet = Fleet()
    install(fleet, registry.labels)
    NodeLabels().column(FleetView(fleet), registry.data(fleet, ["x"]), seen.append)
    assert seen == [{"spot": "true", "gpus": "8"}, {}]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({}, "on-demand"),
        ({"karpenter.sh/capacity-type": "spot"}, "spot"),
        ({"karpenter.sh/capacity-type": "reserved"}, "reserved"),
        ({"eks.amazonaws.com/capacityType": "ON_DEMAND"}, "on-demand"),
        ({"eks.amazonaws.com/capacityType": "CAPACITY_BLOCK"}, "reserved"),
        ({"cloud.google.com/gke-provisioning": "preemptible"}, "spot"),
        ({"cloud.google.com/gke-spot": "true"}, "spot"),
        ({"cloud.google.com/gke-spot": "false"}, "on-demand"),
        ({"kubernetes.azure.com/scalesetpriority": "regular"}, "on-demand"),
        ({"ray.io/market-type": "spot"}, "spot"),
        ({"karpenter.sh/capacity-type": "borrowed", "ray.io/market-type": "spot"}, "borrowed"),
    ],
)
def test_labels_show_whether_a_machine_is_spot_or_reserved_or_on_demand(labels, expected):
    assert capacity_type(labels) == expected

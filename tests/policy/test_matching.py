"""Demands for labels have Kubernetes' operators, and each check of feasibility agrees."""

import numpy as np
import pytest

from moorage.model import Cluster, ClusterId, Demand, Gpu, Node, NodeId, Requirement, Share
from moorage.policy import Fleet, FleetView, Misfit

LABELS = ({}, {"zone": "a"}, {"zone": "b", "spot": "yes"})


def labelled_cluster(name: str = "c", labels: tuple[dict[str, str], ...] = LABELS) -> Cluster:
    gpus = (Gpu("0", "T4"), Gpu("1", "T4"))
    named = enumerate(labels)
    return Cluster(
        ClusterId(name),
        tuple(Node(NodeId(f"n{n}"), 8_000, 8_192, gpus, labels=each) for n, each in named),
    )


def fleet_of(*clusters: Cluster) -> Fleet:
    fleet = Fleet()
    fleet.install(clusters)
    return fleet


def demand(*where: tuple[str, str, tuple[str, ...]], gpus: int = 1) -> Demand:
    return Demand(gpus=gpus, where=tuple(Requirement(*each) for each in where))  # type: ignore[arg-type]  # Operators as text.


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize(
    ("where", "nodes"),
    [
        ([("zone", "In", ("a", "b"))], [1, 2]),
        ([("zone", "In", ("nowhere",))], []),
        ([("zone", "NotIn", ("a",))], [0, 2]),
        ([("zone", "Exists", ())], [1, 2]),
        ([("zone", "DoesNotExist", ())], [0]),
        ([("unknown", "NotIn", ("a",))], [0, 1, 2]),
        ([("unknown", "Exists", ())], []),
        ([("zone", "Exists", ()), ("spot", "DoesNotExist", ())], [1]),
        ([("moorage/node", "In", ("n2", "n0"))], [0, 2]),
        ([("moorage/cluster", "NotIn", ("c",))], []),
    ],
)
def test_the_operators_of_where_behave_as_in_kubernetes(where, nodes, gpus):
    fleet, wanted = fleet_of(labelled_cluster()), demand(*where, gpus=gpus)
    assert np.flatnonzero(fleet.feasible(wanted)).tolist() == nodes
    assert np.flatnonzero(fleet.copies(wanted)).tolist() == nodes
    assert [row for row in range(len(fleet)) if fleet.has_labels(row, wanted.where)] == nodes
    misfits = fleet.misfits(wanted)
    assert np.flatnonzero(misfits == Misfit.FITS).tolist() == nodes
    assert set(misfits.tolist()) <= {Misfit.FITS, Misfit.LABELS}
    if gpus:
        assert np.flatnonzero(fleet.eligible_gpus(wanted).any(1)).tolist() == nodes


def test_labels_follow_the_inventory():
    fleet, wanted = (
        fleet_of(labelled_cluster("a"), labelled_cluster("c")),
        demand(("zone", "In", ("b",))),
    )
    assert np.flatnonzero(fleet.feasible(wanted)).tolist() == [2, 5]
    fleet.put(labelled_cluster("b", ({"zone": "b"},)))
    assert np.flatnonzero(fleet.feasible(wanted)).tolist() == [2, 3, 6]
    fleet.put(labelled_cluster("b", ({"zone": "a"},)))
    assert np.flatnonzero(fleet.feasible(wanted)).tolist() == [2, 6]
    fleet.remove("a")
    assert np.flatnonzero(fleet.feasible(wanted)).tolist() == [3]


def test_a_simulated_fleet_has_the_same_labels():
    fleet, wanted = fleet_of(labelled_cluster()), demand(("zone", "In", ("b",)), gpus=2)
    other = fleet.imagined()
    other.take(Share(ClusterId("c"), NodeId("n2"), ("0",)))
    assert not other.feasible(wanted).any()
    assert fleet.feasible(wanted).tolist() == [False, False, True]


def test_a_policy_sees_nodes_without_matching_labels_as_full():
    fleet, wanted = fleet_of(labelled_cluster()), demand(("zone", "Exists", ()))
    bits = np.packbits(fleet.matching(wanted.where)).tobytes()
    replica = Fleet()
    replica.restore(fleet.snapshot())
    view = FleetView(replica, Demand(gpus=1), None, [("c", "n1")], bits)
    assert view.feasible().tolist() == [False, False, True]

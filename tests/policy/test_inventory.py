"""Columns of a fleet that change cluster by cluster equal newly built columns."""

from random import Random

import numpy as np
from harbour import inventories, walks
from hypothesis import given
from hypothesis import strategies as st

from moorage.model import Cluster, ClusterId, Gpu, Node, NodeId
from moorage.policy import Fleet
from moorage.policy.inventory import CHANGES_MAX, SPLICES_MAX

COLUMNS = ("cpu_total", "cpu_free", "memory_total", "memory_free", "rack", "zone", "cluster")
GPU_COLUMNS = ("gpu_total", "gpu_free", "gpu_model", "gpu_memory", "gpu_link", "gpu_numa")
NAMES = ("cluster_ids", "node_ids", "gpu_ids", "models")


def same(one: Fleet, other: Fleet) -> bool:
    for name in (*COLUMNS, *GPU_COLUMNS, "gpu_exclusive"):
        ours, theirs = getattr(one, name), getattr(other, name)
        assert ours.shape == theirs.shape, name
        assert ours.dtype == theirs.dtype, name
        assert (ours == theirs).all(), name
    for name in NAMES:
        assert getattr(one, name) == getattr(other, name), name
    for row, (cluster, node) in enumerate(one.node_ids):
        assert one.row(cluster, node) == row
    assert one.row("c0", "nowhere") is None
    return True


def install(clusters) -> Fleet:
    fleet = Fleet()
    fleet.install(clusters)
    return fleet


changes = st.lists(inventories(), min_size=1, max_size=6)


@given(inventories(), changes, st.randoms(use_true_random=False))
def test_a_fleet_changed_cluster_by_cluster_equals_a_new_fleet(before, later, rng):
    clusters = {each.id: each for each in before}
    fleet = install(before)
    for inventory in later:
        for cluster in inventory:
            if rng.random() < 0.3:
                fleet.remove(cluster.id)
                clusters.pop(cluster.id, None)
            else:
                fleet.put(cluster)
                clusters[cluster.id] = cluster
            assert same(fleet, install(clusters.values()))


@given(walks(), changes, st.randoms(use_true_random=False))
def test_a_replica_updated_by_parts_and_rows_equals_the_fleet(walk, later, rng):
    fleet, replica = walk.fleet, Fleet()
    replica.restore(fleet.snapshot())
    answer = fleet.layout, fleet.version
    for inventory in later:
        for cluster in inventory:
            walk.held = [share for share in walk.held if share.cluster_id != cluster.id]
            if rng.random() < 0.3:
                fleet.remove(cluster.id)
            else:
                fleet.put(cluster)
            walk.step()
        for name in fleet.spliced_since(answer[0]):
            part = fleet.part(name)
            copy = None
            if part is not None:
                copy = Fleet()
                copy.restore(part.snapshot())
            replica.splice(name, copy)
        for row in fleet.rows_since(answer[1]):
            replica.set_capacity(row, *fleet.capacity(row))
        answer = fleet.layout, fleet.version
        assert same(fleet, replica)


def one(name: str, nodes: int = 2, gpus: int = 2) -> Cluster:
    devices = tuple(Gpu(str(number), "A100") for number in range(gpus))
    rows = tuple(Node(NodeId(f"n{n}"), 1000, 1000, devices) for n in range(nodes))
    return Cluster(ClusterId(name), rows)


def test_a_change_of_some_rows_keeps_the_leases_of_other_rows():
    fleet = install([one("a"), one("c")])
    row = fleet.row("c", "n1")
    fleet.set_capacity(row, 1, 2, [3, 4])
    fleet.put(one("b", nodes=3))
    assert fleet.row("c", "n1") == row + 3
    assert fleet.capacity(row + 3) == (1, 2, [3, 4])
    fleet.remove("a")
    assert fleet.capacity(fleet.row("c", "n1")) == (1, 2, [3, 4])
    fleet.remove("a")
    assert fleet.part("a") is None
    assert len(fleet) == 5


def test_a_replica_that_missed_a_changed_layout_must_copy_the_whole_fleet():
    fleet = install([one("a"), one("b")])
    version, layout = fleet.version, fleet.layout
    fleet.touch(3)
    assert fleet.changed_since(version) == [3]
    fleet.put(one("a", nodes=5))
    assert fleet.layout == layout + 1
    assert fleet.changed_since(version) is None
    assert fleet.rows_since(version) == [6], "the row has moved"
    assert fleet.spliced_since(layout) == ["a"]
    assert fleet.changed_since(fleet.version) == []
    fleet.touch(0)
    fleet.put(one("a", nodes=5))
    assert fleet.rows_since(version) == [6], "a repeated part is not a change"
    assert fleet.spliced_since(layout) == ["a"]
    fleet.install([one("a")])
    assert fleet.spliced_since(layout) is None
    assert fleet.rows_since(version) is None


def test_the_logs_of_changes_are_bounded():
    fleet = install([one("a"), one("b")])
    layout, version = fleet.layout, fleet.version
    for _ in range(SPLICES_MAX):
        fleet.put(one("a"))
    assert fleet.spliced_since(layout) == ["a"]
    fleet.put(one("b"))
    assert fleet.spliced_since(layout) is None
    assert fleet.spliced_since(fleet.layout - 1) == ["b"]
    for _ in range(CHANGES_MAX):
        fleet.touch(0)
    assert fleet.rows_since(version) is None


def test_a_snapshot_uses_the_smallest_number_types():
    fleet = install([one("a", nodes=100, gpus=8)])
    kind, content = fleet.snapshot()["gpu_free"]
    assert np.dtype(kind).itemsize <= 2
    assert len(content) <= 2 * 100 * 8
    rng = Random(1)
    for row in range(100):
        fleet.set_capacity(
            row, rng.randrange(-5, 10**11), rng.randrange(9), [rng.randrange(1000)] * 8
        )
    copy = Fleet()
    copy.restore(fleet.snapshot())
    assert same(fleet, copy)

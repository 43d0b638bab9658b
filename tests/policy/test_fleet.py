"""All checks of feasibility of a fleet agree, and replicas stay equal to the fleet."""

from itertools import combinations

import numpy as np
import pytest
from harbour import Walk, demands, inventories, walks
from hypothesis import given
from msgspec.structs import replace

from moorage.model import Cluster, ClusterId, Demand, Gpu, Node, NodeId, Share
from moorage.policy import Fleet, FleetView, Misfit
from moorage.policy.fleet import ELIGIBLE_MAX
from moorage.policy.inventory import CHANGES_MAX
from moorage.sandbox.cell.suggestions import suggestion

COLUMNS = (
    "cpu_total",
    "cpu_free",
    "memory_total",
    "memory_free",
    "closed",
    "rack",
    "zone",
    "cluster",
)
GPU_COLUMNS = ("gpu_total", "gpu_free", "gpu_model", "gpu_memory", "gpu_link", "gpu_numa")
ALL_COLUMNS = (*COLUMNS, *GPU_COLUMNS, "gpu_exclusive")


def one(*gpus: Gpu, cpu: int = 8_000, memory: int = 8_192, rack: str = "") -> Cluster:
    return Cluster(ClusterId("c"), (Node(NodeId("n"), cpu, memory, gpus, rack),))


def fleet_of(*clusters: Cluster) -> Fleet:
    fleet = Fleet()
    fleet.install(clusters)
    return fleet


@given(walks(), demands)
def test_a_node_is_feasible_exactly_if_it_has_no_misfit(walk: Walk, demand: Demand) -> None:
    misfits = walk.fleet.misfits(demand)
    assert (walk.fleet.feasible(demand) == (misfits == Misfit.FITS)).all()
    for row in range(len(walk.fleet)):
        here = slice(row, row + 1)
        assert walk.fleet.misfits(demand, here)[0] == misfits[row]
        assert walk.fleet.feasible(demand, np.array([row]))[0] == (misfits[row] == 0)


@given(walks(), demands)
def test_leases_do_not_change_whether_a_demand_can_ever_fit(walk: Walk, demand: Demand) -> None:
    before = walk.fleet.misfits(demand)
    for share in walk.held:
        walk.fleet.give(share)
    empty = walk.fleet.misfits(demand)
    never = before * (before <= Misfit.MEMORY)
    assert (never == empty * (empty <= Misfit.MEMORY)).all()
    assert ((empty == Misfit.FITS) | (empty <= Misfit.MEMORY)).all(), "an empty node is not busy"


@given(walks())
def test_giving_back_a_share_undoes_taking_the_share(walk: Walk) -> None:
    for share in walk.held:
        walk.fleet.give(share)
    for name in ("cpu", "memory", "gpu"):
        free, total = getattr(walk.fleet, f"{name}_free"), getattr(walk.fleet, f"{name}_total")
        assert (free == total).all()


@given(walks())
def test_a_replica_of_the_fleet_equals_the_fleet(walk: Walk) -> None:
    replica = Fleet()
    replica.restore(walk.fleet.snapshot())
    for name in ALL_COLUMNS:
        ours, theirs = getattr(walk.fleet, name), getattr(replica, name)
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert (ours == theirs).all()
    for name in ("cluster_ids", "node_ids", "gpu_ids", "models"):
        assert getattr(walk.fleet, name) == getattr(replica, name)
    for row, (cluster, node) in enumerate(replica.node_ids):
        assert replica.row(cluster, node) == row
    walk.step()
    assert replica.snapshot()["node_ids"] == walk.fleet.snapshot()["node_ids"]


@given(walks())
def test_a_replica_is_updated_by_the_changes_since_its_version(walk: Walk) -> None:
    replica, version = Fleet(), walk.fleet.version
    replica.restore(walk.fleet.snapshot())
    for _ in range(8):
        walk.step()
    changed = walk.fleet.changed_since(version)
    assert changed is not None
    assert len(changed) == len(set(changed))
    for row in changed:
        replica.set_capacity(row, *walk.fleet.capacity(row))
    for name in ("cpu_free", "memory_free", "gpu_free"):
        assert (getattr(replica, name) == getattr(walk.fleet, name)).all()
    assert walk.fleet.changed_since(walk.fleet.version) == []


def test_a_replica_that_missed_too_many_changes_must_copy_the_whole_fleet() -> None:
    fleet = fleet_of(one(Gpu("0")))
    version = fleet.version
    for _ in range(CHANGES_MAX):
        fleet.touch(0)
    assert fleet.changed_since(version) == [0]
    fleet.touch(0)
    assert fleet.changed_since(version) is None
    assert fleet.changed_since(fleet.version - 10) == [0]
    assert len(fleet._changes) <= CHANGES_MAX
    version = fleet.version
    fleet.install([one(Gpu("0"))])
    assert fleet.changed_since(version) is None


@given(walks(), demands)
def test_picked_devices_are_valid_sufficient_and_of_one_group(walk: Walk, demand: Demand) -> None:
    fleet = walk.fleet
    for row in range(len(fleet)):
        columns = fleet.pick_gpus(row, demand)
        fitting = fleet.fitting_gpus(demand)[row]
        groups = {"nvlink": fleet.gpu_link, "numa": fleet.gpu_numa}.get(demand.topology)
        possible = [
            chosen
            for chosen in combinations(np.flatnonzero(fitting).tolist(), demand.gpus)
            if groups is None
            or demand.gpus <= 1
            or (len(set(groups[row, list(chosen)])) == 1 and groups[row, chosen[0]] >= 0)
        ]
        assert (tuple(columns) in possible) if possible else columns == []
        alone = replace(demand, cpu_milli=0, memory_mib=0)
        assert bool(possible) == fleet.feasible(alone)[row]


@given(walks(), demands)
def test_the_misfit_of_a_single_node_equals_its_misfit_among_all_nodes(
    walk: Walk, demand: Demand
) -> None:
    fleet, rows = walk.fleet, range(len(walk.fleet))
    assert [fleet.takes(row, demand) for row in rows] == fleet.feasible(demand).tolist()
    fitting = [np.flatnonzero(row).tolist() for row in fleet.fitting_gpus(demand)]
    assert [fleet.fitting_columns(row, demand) for row in rows] == fitting


def test_shares_go_to_the_fullest_device_and_whole_gpus_to_the_lowest() -> None:
    fleet = fleet_of(one(*(Gpu(str(n)) for n in range(4))))
    fleet.take(Share(ClusterId("c"), NodeId("n"), ("2",), 500))
    fleet.take(Share(ClusterId("c"), NodeId("n"), ("3",), 300))
    assert fleet.pick_gpus(0, Demand(gpus=1, gpu_milli=400)) == [2]
    assert fleet.pick_gpus(0, Demand(gpus=1, gpu_milli=600)) == [3]
    assert fleet.pick_gpus(0, Demand(gpus=2)) == [0, 1]
    assert fleet.pick_gpus(0, Demand(gpus=3)) == []


def test_a_topology_takes_the_smallest_group_that_suffices() -> None:
    groups = ["", "big", "big", "big", "small", "small"]
    fleet = fleet_of(one(*(Gpu(str(n), link_group=g) for n, g in enumerate(groups))))
    assert fleet.pick_gpus(0, Demand(gpus=2, topology="nvlink")) == [4, 5]
    assert fleet.pick_gpus(0, Demand(gpus=3, topology="nvlink")) == [1, 2, 3]
    assert fleet.pick_gpus(0, Demand(gpus=4, topology="nvlink")) == []
    assert fleet.misfits(Demand(gpus=4, topology="nvlink"))[0] == Misfit.TOPOLOGY


@pytest.mark.parametrize(
    ("demand", "misfit"),
    [
        (Demand(gpus=1), Misfit.FITS),
        (Demand(gpus=1, models=("H100",)), Misfit.GPU_MODEL),
        (Demand(gpus=1, gpu_memory_mib=99_000), Misfit.GPU_MEMORY),
        (Demand(gpus=3), Misfit.GPU_COUNT),
        (Demand(gpus=2, gpu_milli=500), Misfit.GPU_COUNT),
        (Demand(gpus=2, topology="numa"), Misfit.TOPOLOGY),
        (Demand(gpus=1, cpu_milli=9_000), Misfit.CPU),
        (Demand(memory_mib=9_000), Misfit.MEMORY),
        (Demand(gpus=2), Misfit.GPUS_BUSY),
        (Demand(cpu_milli=8_000), Misfit.CPU_BUSY),
        (Demand(memory_mib=8_192), Misfit.MEMORY_BUSY),
    ],
)
def test_a_misfit_is_the_first_constraint_that_fails(demand: Demand, misfit: Misfit) -> None:
    fleet = fleet_of(one(Gpu("0", "T4", 16_000, exclusive=True), Gpu("1", "T4", 16_000)))
    fleet.take(Share(ClusterId("c"), NodeId("n"), ("0",), 1000, 1_000, 1_000))
    assert Misfit(int(fleet.misfits(demand)[0])) is misfit


def test_equal_names_of_racks_in_two_clusters_are_two_racks() -> None:
    twins = [Cluster(ClusterId(c), (Node(NodeId("n"), 1, 1, (), "r"),)) for c in ("a", "b")]
    assert len(set(fleet_of(*twins).rack.tolist())) == 2


def test_numa_domains_are_numbered_within_the_node() -> None:
    fleet = fleet_of(one(*(Gpu(str(n), numa=d) for n, d in enumerate([10**9, -5, 3, 3]))))
    assert fleet.gpu_numa[0].tolist() == [1, -1, 0, 0]


def test_shares_on_missing_nodes_or_devices_take_no_capacity() -> None:
    fleet = fleet_of(one(Gpu("0")))
    fleet.take(Share(ClusterId("gone"), NodeId("n"), ("0",)))
    fleet.take(Share(ClusterId("c"), NodeId("n"), ("7",), cpu_milli=500))
    assert fleet.gpu_free.tolist() == [[1000]]
    assert fleet.cpu_free.tolist() == [7_500]


def test_an_unavailable_node_has_no_free_capacity_and_returns_with_its_leases() -> None:
    node = one(Gpu("0"), Gpu("1")).nodes[0]
    shut = Cluster(ClusterId("c"), (replace(node, unavailable="cordoned"),))
    share = Share(ClusterId("c"), NodeId("n"), ("0",), cpu_milli=500)
    fleet = fleet_of(shut)
    for move in (fleet.take, fleet.give, fleet.give):
        move(share)
        assert not fleet.feasible(Demand())[0]
        assert not fleet.feasible(Demand(gpus=1))[0]
        assert Misfit(int(fleet.misfits(Demand(gpus=1))[0])) is Misfit.UNAVAILABLE
        assert Misfit(int(fleet.misfits(Demand(gpus=3))[0])) is Misfit.GPU_COUNT
        assert fleet.pick_gpus(0, Demand(gpus=1)) == []
    fleet.put(one(Gpu("0"), Gpu("1")))
    fleet.take(share)
    assert (fleet.gpu_free.tolist(), fleet.cpu_free.tolist()) == ([[0, 1000]], [7_500])
    replica = Fleet()
    fleet.put(shut)
    replica.restore(fleet.snapshot())
    assert replica.closed.tolist() == [1]
    assert not replica.feasible(Demand())[0]


def test_the_cached_masks_are_bounded_in_number_and_read_only() -> None:
    fleet = fleet_of(one(Gpu("0")))
    for memory in range(ELIGIBLE_MAX + 2):
        mask = fleet.eligible_gpus(Demand(gpus=1, gpu_memory_mib=memory + 1))
    assert len(fleet._eligible) <= ELIGIBLE_MAX
    with pytest.raises(ValueError, match="read-only"):
        mask[0, 0] = True


@given(walks(), demands)
def test_a_view_of_the_fleet_shows_candidates_without_reserved_nodes(
    walk: Walk, demand: Demand
) -> None:
    fleet = walk.fleet
    reserved = fleet.node_ids[:1]
    view = FleetView(fleet, demand, ("c0", "c2", "c9"), reserved)
    expected = fleet.feasible(demand)
    for row, pair in enumerate(fleet.node_ids):
        expected[row] &= pair[0] in {"c0", "c2"} and pair not in reserved
    assert (view.feasible() == expected).all()
    assert len(view) == len(fleet)
    everything = FleetView(fleet)
    assert everything.allowed is None
    assert everything.feasible().all()
    with pytest.raises(ValueError, match="resources"):
        everything.fitting_gpus()


@given(inventories())
def test_a_view_of_the_fleet_is_read_only(clusters: list[Cluster]) -> None:
    fleet = fleet_of(*clusters)
    view = FleetView(fleet)
    for name in ALL_COLUMNS:
        column = getattr(view, name)
        assert not column.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            column[...] = 0
    with pytest.raises(AttributeError):
        _ = view._change_nothing


def test_a_view_follows_the_fleet_and_has_the_misfits_of_the_fleet() -> None:
    fleet = fleet_of(one(Gpu("0")))
    view = FleetView(fleet, Demand(gpus=1))
    version = view.version
    assert view.placement(0) == {"cluster_id": "c", "node_id": "n", "gpus": ["0"]}
    assert view.why_not(0) is Misfit.FITS
    fleet.take(Share(ClusterId("c"), NodeId("n"), ("0",)))
    assert view.changed_since(version) == [0]
    assert view.why_not(0) is Misfit.GPUS_BUSY
    assert view.free_gpu_milli().tolist() == [0]
    assert view.pick_gpus(0) == []


def test_a_policy_cannot_change_the_fleet_by_accident() -> None:
    fleet = fleet_of(one(Gpu("0")))
    view = FleetView(fleet)
    for name in ("cluster_ids", "node_ids", "gpu_ids", "models"):
        assert isinstance(getattr(view, name), tuple), name
    for name in ALL_COLUMNS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(view, name)[...] = 0
    for name in ("give", "install", "restore", "set_capacity", "take", "touch"):
        with pytest.raises(AttributeError, match="cannot change it"):
            getattr(view, name)


@pytest.mark.parametrize("name", ["free_gpu_milli", "changed_since", "cpu_free", "feasible"])
def test_the_error_about_a_misspelt_name_of_the_fleet_suggests_the_right_name(name: str) -> None:
    view = FleetView(fleet_of(one(Gpu("0"))))
    with pytest.raises(AttributeError) as caught:
        getattr(view, name[:-2] + name[-1])
    assert suggestion(caught.value, str(caught.value), "/") == f". Did you mean: {name!r}?"
    assert "take" not in dir(view)

"""Counts of shapes agree with the feasibility code, also if only changed nodes are counted."""

import asyncio
import random
from types import SimpleNamespace

import pytest

from moorage.daemon.news import shape_news
from moorage.daemon.news.shapes import (
    SHAPES_MAX,
    USUAL,
    AskedShapes,
    ShapeCounts,
    size_class,
    size_name,
)
from moorage.model import Cluster, ClusterId, Demand, Gpu, Node, NodeId, Share, Tenant
from moorage.policy import Fleet

ANN, BOB = Tenant("ann"), Tenant("bob")
DEMANDS = [
    Demand(gpus=1),
    Demand(gpus=2, cpu_milli=3_000),
    Demand(gpus=4, topology="nvlink"),
    Demand(gpus=2, topology="numa", models=("A",)),
    Demand(gpus=8, memory_mib=50_000),
    Demand(gpus=1, gpu_milli=300),
    Demand(gpus=3, gpu_milli=450, models=("A", "B")),
    Demand(cpu_milli=5_000),
]


def node(number: int, chance: random.Random) -> Node:
    gpus = tuple(
        Gpu(
            str(n),
            chance.choice("AB"),
            link_group=str(n // 4),
            numa=n % 2,
            exclusive=chance.random() < 0.1,
        )
        for n in range(chance.choice((0, 4, 8)))
    )
    closed = "broken" if chance.random() < 0.1 else ""
    return Node(NodeId(f"n{number:02}"), 32_000, 100_000, gpus, unavailable=closed)


def fleet_of(nodes: list[Node]) -> Fleet:
    fleet = Fleet()
    fleet.install([Cluster(ClusterId("c"), tuple(nodes))])
    return fleet


def take_some(fleet: Fleet, chance: random.Random, times: int = 30) -> None:
    for _ in range(times):
        demand = chance.choice(DEMANDS)
        row = chance.randrange(len(fleet))
        columns = fleet.pick_gpus(row, demand) if demand.gpus else []
        if fleet.feasible(demand, slice(row, row + 1))[0]:
            fleet.take(fleet.share(row, demand, columns))


def one_by_one(fleet: Fleet, demand: Demand, row: int) -> int:
    """Count the copies of a demand by placing them one by one until none fits."""
    tried, count = fleet.imagined(), 0
    while tried.feasible(demand, slice(row, row + 1))[0]:
        tried.take(tried.share(row, demand, tried.pick_gpus(row, demand) if demand.gpus else []))
        count += 1
    return count


@pytest.mark.parametrize("seed", range(6))
def test_the_count_of_a_shape_is_the_number_of_copies_that_can_be_placed(seed):
    chance = random.Random(seed)
    fleet = fleet_of([node(n, chance) for n in range(12)])
    take_some(fleet, chance)
    for demand in DEMANDS:
        copies = fleet.copies(demand).tolist()
        assert [each > 0 for each in copies] == fleet.feasible(demand).tolist()
        placed = [one_by_one(fleet, demand, row) for row in range(len(fleet))]
        if demand.gpus <= 1 or demand.gpu_milli == 1000:
            assert copies == placed
        else:  # For shares of several devices, the fullest devices first is not always best.
            assert all(had <= able for had, able in zip(placed, copies, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_incremental_counts_agree_with_full_counts(seed):
    chance = random.Random(seed)
    fleet = fleet_of([node(n, chance) for n in range(12)])
    known = [ShapeCounts(demand, fleet) for demand in DEMANDS[:-1]]
    for round_ in range(5):
        take_some(fleet, chance, 4)
        if round_ == 3:
            fleet.put(Cluster(ClusterId("b"), (node(0, chance),)))
        for demand, counts in zip(DEMANDS, known, strict=False):
            assert counts.row() == ShapeCounts(demand, fleet).row()


def test_scattered_capacity_would_fit_if_it_were_on_one_node():
    gpus = tuple(Gpu(str(n)) for n in range(8))
    fleet = fleet_of([Node(NodeId(f"n{n}"), 1, 1, gpus) for n in range(4)])
    for n in range(3):
        fleet.take(Share(ClusterId("c"), NodeId(f"n{n}"), tuple("0123")))
    answer = ShapeCounts(Demand(gpus=8), fleet).row()
    stranded = [["c", f"n{n}", 4] for n in range(3)]
    assert (answer.pop("stranded"), answer.pop("stranded_on")) == (12, stranded)
    assert answer == {"fits": 1, "defragmented": 2, "where": [["c", "n3", 1]]}
    fits_all = ShapeCounts(Demand(gpus=4), fleet).row()
    assert (fits_all["fits"], fits_all["defragmented"], fits_all["stranded"]) == (5, 5, 0)


def test_defragmentation_adds_gpus_but_no_cpu():
    gpus = tuple(Gpu(str(n)) for n in range(8))
    fleet = fleet_of([Node(NodeId(f"n{n}"), 8_000, 1, gpus) for n in range(2)])
    demand = Demand(gpus=1, cpu_milli=4_000)
    answer = ShapeCounts(demand, fleet).row()
    assert (answer["fits"], answer["defragmented"], answer["stranded"]) == (4, 4, 12)


def test_a_gang_takes_different_nodes_and_one_rack_if_requested():
    gpus = tuple(Gpu(str(n)) for n in range(8))
    racks = ("a", "a", "b")
    nodes = [Node(NodeId(f"n{n}"), 1, 1, gpus, rack, zone=rack) for n, rack in enumerate(racks)]
    fleet = fleet_of(nodes)
    assert ShapeCounts(Demand(gpus=4, nodes=3), fleet).row()["fits"] == 2
    assert ShapeCounts(Demand(gpus=4, nodes=2, topology="rack"), fleet).row()["fits"] == 2
    assert ShapeCounts(Demand(gpus=4, nodes=2, topology="zone"), fleet).row()["fits"] == 2


def test_the_most_frequent_shapes_come_before_the_default_shapes():
    request = AskedShapes()
    for times, gpus in ((3, 3), (5, 5), (1, 8)):
        for _ in range(times):
            request.note(ANN, Demand(gpus=gpus))
    request.note(BOB, Demand(gpus=7))
    request.note(BOB, Demand(cpu_milli=1))
    most = [(demand.gpus, count) for demand, count in request.most(ANN)]
    assert most == [(5, 5), (3, 3), (8, 1), (1, 0), (2, 0), (4, 0)]
    assert Demand(gpus=7) in [demand for demand, _ in request.most(None)]
    assert [demand for demand, _ in AskedShapes().most(None)] == list(USUAL)


def test_the_number_of_counted_shapes_is_bounded_and_the_most_frequent_stay():
    request = AskedShapes()
    for _ in range(50):
        request.note(ANN, Demand(gpus=5))
    for number in range(20_000):
        request.note(ANN, Demand(gpus=1, cpu_milli=number))
    assert len(request._counts) <= 4_096
    assert len(request.most(ANN)) == SHAPES_MAX
    assert request.most(ANN)[0][0] == Demand(gpus=5)


def test_a_row_of_shapes_names_the_nodes_with_most_stranded_capacity():
    gpus = tuple(Gpu(str(number), "A") for number in range(4))
    names = ("n0", "n1", "n2", "n3", "n4")
    fleet = fleet_of([Node(NodeId(name), 32_000, 100_000, gpus) for name in names])
    for name, taken in (("n0", 1), ("n1", 3), ("n2", 4)):
        ids = tuple(map(str, range(taken)))
        fleet.take(Share(ClusterId("c"), NodeId(name), ids, 1000, 0, 0))
    fleet.take(Share(ClusterId("c"), NodeId("n4"), (), 0, 31_000, 0))
    row = ShapeCounts(Demand(gpus=4, cpu_milli=4_000), fleet).row()
    assert (row["fits"], row["stranded"]) == (1, 8)
    assert row["stranded_on"] == [["c", "n4", 4], ["c", "n0", 3], ["c", "n1", 1]]


def test_sizes_leave_out_all_constraints_but_gpus_and_are_bounded():
    request = AskedShapes()
    for number in range(100):
        request.note(ANN, Demand(gpus=2, gpu_milli=500, cpu_milli=number))
        request.note(BOB, Demand(gpus=8, nodes=4, models=(str(number),)))
    request.note(BOB, Demand(cpu_milli=1))
    names = [size_name(each) for each in request.sizes()]
    assert names[:2] == ["2x500m", "4x8x1000m"]
    assert names[2:] == ["1x1000m", "2x1000m", "4x1000m", "8x1000m"]
    for number in range(1, 100):
        request.note(ANN, Demand(gpus=number, nodes=2))
    assert len(set(map(size_name, request.sizes()))) == SHAPES_MAX


def test_a_caller_cannot_make_ever_more_sizes():
    names = set()
    for number in range(1, 1_001):
        request = AskedShapes()
        for nodes in (1, 2, number):
            request.note(ANN, Demand(gpus=number % 100 + 1, gpu_milli=number, nodes=nodes))
            request.note(ANN, Demand(gpus=number, nodes=nodes))
        names |= set(map(size_name, request.sizes()))
    assert len(names) <= 90
    known = [(6, 1000, 3), (12, 1000, 1), (500, 1000, 500), (3, 700, 2), (1, 1, 1)]
    sizes = [
        size_class(Demand(gpus=gpus, gpu_milli=milli, nodes=nodes)) for gpus, milli, nodes in known
    ]
    assert sizes == [(6, 1000, 2), (8, 1000, 1), (16, 1000, 64), (3, 500, 1), (1, 125, 1)]


async def test_metrics_tell_used_capacity_from_scattered_capacity():
    gpus = tuple(Gpu(str(n)) for n in range(8))
    fleet = fleet_of([Node(NodeId(f"n{n}"), 1, 1, gpus) for n in range(4)])
    for n in range(4):
        fleet.take(Share(ClusterId("c"), NodeId(f"n{n}"), tuple("0123")))
    news = shape_news.ShapeNews(SimpleNamespace(fleet=fleet), None, None, None)

    async def figures() -> dict[tuple[str, ...], float]:
        await news._measure()
        samples = [each for metric in news.metrics() for each in metric.samples]
        return {(each.name[14:], *each.labels.values()): each.value for each in samples}

    found = await figures()
    fits = [found["fits", "8x1000m", what] for what in ("now", "defragmented", "empty")]
    assert fits == [0, 2, 4]
    assert found["utilization_ratio", "8x1000m"] == 0.5
    assert found["fragmentation_ratio", "8x1000m"] == 1.0
    assert found["fragmentation_ratio", "4x1000m"] == 0.0
    assert len(found) == 5 * len(USUAL)
    for n in range(4):
        fleet.give(Share(ClusterId("c"), NodeId(f"n{n}"), tuple("0123")))
    assert (await figures())["utilization_ratio", "8x1000m"] == 0.0


async def test_sizes_are_counted_only_after_a_read_of_the_metrics(monkeypatch):
    monkeypatch.setattr(shape_news, "MEASURE_SECONDS", 0.0)
    news = shape_news.ShapeNews(SimpleNamespace(fleet=fleet_of([])), None, None, None)
    running = asyncio.create_task(news.measure())

    async def let_run() -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    await let_run()
    news.counts.note(ANN, Demand(gpus=3))
    await let_run()
    assert "3x1000m" not in str(list(news.metrics()))
    await let_run()
    assert "3x1000m" in str(list(news.metrics()))
    running.cancel()

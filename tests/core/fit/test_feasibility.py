"""After any changes, `Feasibility` gives the same results with its cache as without."""

from random import Random

import pytest
from by_hand import POLICY, Hand, ask, nodes, place
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from moorage.core.fit import feasibility as judging
from moorage.core.fit.feasibility import Feasibility
from moorage.core.state.facts import ClusterRemoved, ClusterSet, Ended, Granted
from moorage.core.state.state import State, apply
from moorage.model import (
    Cluster,
    ClusterId,
    Code,
    Demand,
    Gpu,
    Lease,
    LeaseTerms,
    Node,
    NodeId,
    RequestId,
    Share,
    Tenant,
)

CANDIDATES = [None, None, (ClusterId("c0"),), (ClusterId("c1"), ClusterId("nowhere"))]
DEMANDS = [
    Demand(gpus=1),
    Demand(gpus=2),
    Demand(gpus=1, gpu_milli=300),
    Demand(gpus=1, models=("T4",)),
    Demand(gpus=1, nodes=2),
    Demand(gpus=1, nodes=2, topology="rack"),
    Demand(gpus=2, topology="nvlink"),
    Demand(cpu_milli=3_000),
]


def cluster(rng: Random, name: str) -> Cluster:
    return Cluster(
        ClusterId(name),
        tuple(
            Node(
                NodeId(f"n{place}"),
                4_000,
                4_096,
                tuple(
                    Gpu(str(g), rng.choice(["T4", "A100"]), link_group=rng.choice(["", "x"]))
                    for g in range(rng.randint(0, 3))
                ),
                rng.choice(["", "r1", "r2"]),
            )
            for place in range(rng.randint(1, 3))
        ),
    )


def lease(rng: Random, state: State, number: int) -> Lease | None:
    demand = rng.choice(DEMANDS)
    rows = state.fleet.feasible(demand).nonzero()[0].tolist()
    if not rows:
        return None
    row = rng.choice(rows)
    share = state.fleet.share(row, demand, state.fleet.pick_gpus(row, demand))
    name = RequestId(f"r{number}")
    terms = LeaseTerms(60.0)
    return Lease(name, Tenant("t"), "", POLICY, (share,), number + 1, 0.0, 60.0, terms)


@pytest.mark.heavy
@given(st.integers(0, 2**32))
def test_cached_results_of_feasibility_equal_results_without_the_cache(seed: int) -> None:
    rng, state = Random(seed), State()
    remembering = Feasibility(state)
    for number in range(40):
        chance = rng.random()
        if chance < 0.5:
            granted = lease(rng, state, number)
            if granted is not None:
                apply(state, Granted(granted))
        elif chance < 0.85 and state.leases:
            apply(state, Ended(rng.choice(list(state.leases)), 1.0, "released"))
        elif chance < 0.97:
            apply(state, ClusterSet(cluster(rng, f"c{rng.randint(0, 1)}")))
        elif state.clusters:
            apply(state, ClusterRemoved(rng.choice(list(state.clusters))))
        for _ in range(4):
            demand, candidates = rng.choice(DEMANDS), rng.choice(CANDIDATES)
            reserved = tuple(state.fleet.node_ids[: rng.choice([0, 0, 1])])
            fits = Feasibility(state).fits(demand, candidates, reserved)
            assert remembering.fits(demand, candidates, reserved) == fits
            if not fits and not reserved:
                refusal = remembering.refusal(demand, candidates)
                assert refusal.code in {Code.NEVER_FITS, Code.NO_CAPACITY}


@given(st.integers(0, 2**32))
def test_counts_of_a_refusal_add_up_and_its_verdict_holds_for_the_empty_fleet(seed: int) -> None:
    rng, state = Random(seed), State()
    for name in ("c0", "c1"):
        apply(state, ClusterSet(cluster(rng, name)))
    for number in range(rng.randint(0, 6)):
        granted = lease(rng, state, number)
        if granted is not None:
            apply(state, Granted(granted))
    feasibility, demand = Feasibility(state), rng.choice(DEMANDS)
    if feasibility.fits(demand, None):
        shown = feasibility.reasons(demand, None)
        assert shown["nodes_fitting"] + sum(shown["misfits"].values()) == shown["nodes"]
        return
    refusal = feasibility.refusal(demand, None)
    assert sum(refusal.details["misfits"].values()) <= refusal.details["nodes"]
    for held in list(state.leases):
        apply(state, Ended(held, 1.0, "released"))
    assert feasibility.fits(demand, None) == (refusal.code is Code.NO_CAPACITY)


def test_nodes_that_fit_now_are_reserved_before_emptier_nodes() -> None:
    state = State()
    busy = Node(NodeId("busy"), 1_000, 4_096, tuple(Gpu(str(n)) for n in range(4)))
    fit = Node(NodeId("fit"), 8_000, 4_096, (Gpu("0"),))
    small = Node(NodeId("small"), 8_000, 4_096)
    apply(state, ClusterSet(Cluster(ClusterId("c"), (busy, fit, small))))
    feasibility = Feasibility(state)
    assert feasibility.reservation(Demand(gpus=1, cpu_milli=500), None) == (("c", "busy"),)
    cpu = Share(ClusterId("c"), NodeId("busy"), (), 1000, 1_000)
    terms = LeaseTerms(60.0)
    held = Lease(RequestId("r"), Tenant("t"), "", POLICY, (cpu,), 1, 0.0, 60.0, terms)
    apply(state, Granted(held))
    assert feasibility.reservation(Demand(gpus=1, cpu_milli=500), None) == (("c", "fit"),)
    assert feasibility.reservation(Demand(gpus=9), None) == ()


def test_nodes_reserved_for_a_gang_in_one_rack_are_of_one_rack() -> None:
    state = State()
    racks = ["r1", "r2", "r1", "r2", ""]
    sizes = [4, 3, 1, 3, 4]
    places = [
        Node(NodeId(f"n{n}"), 8_000, 4_096, tuple(Gpu(str(g)) for g in range(size)), rack)
        for n, (rack, size) in enumerate(zip(racks, sizes, strict=True))
    ]
    apply(state, ClusterSet(Cluster(ClusterId("c"), tuple(places))))
    feasibility = Feasibility(state)
    gang = Demand(gpus=1, nodes=2, topology="rack")
    assert feasibility.reservation(gang, None) == (("c", "n1"), ("c", "n3"))
    assert feasibility.reservation(Demand(gpus=1, nodes=2), None) == (("c", "n0"), ("c", "n4"))
    assert feasibility.reservation(Demand(gpus=1, nodes=3, topology="rack"), None) == ()


def test_the_refusal_of_a_gang_in_one_zone_names_the_largest_zone() -> None:
    gpus = (Gpu("0"),)
    zones = ("z1", "z1", "z1", "z2", "")
    places = [Node(NodeId(f"n{n}"), 8_000, 4_096, gpus, zone=zone) for n, zone in enumerate(zones)]
    hand = Hand.seeing(Cluster(ClusterId("c"), tuple(places)))
    judge = hand.allocator.feasibility
    never = judge.refusal(Demand(gpus=1, nodes=4, topology="zone"), None)
    assert never.code is Code.NEVER_FITS
    assert "the largest zone that could hold it has 3 of 4 nodes" in never.reason
    assert never.details["nodes_together"] == 3
    hand.grant(ask("r", Demand(gpus=1)), place("n000", "0") | {"node_id": "n1"})
    three = Demand(gpus=1, nodes=3, topology="zone")
    assert judge.fits(replace(three, nodes=2), None)
    assert not judge.fits(three, None)
    later = judge.refusal(three, None)
    assert later.code is Code.NO_CAPACITY
    assert "the largest zone that could hold it has 2 of 3 nodes" in later.reason
    assert judge.reservation(three, None) == (("c", "n0"), ("c", "n2"), ("c", "n1"))


def test_the_cache_of_feasibility_is_bounded() -> None:
    state = State()
    apply(state, ClusterSet(nodes(1, 1)))
    feasibility = Feasibility(state)
    for number in range(judging.CLASSES_MAX + 2):
        assert feasibility.fits(Demand(gpus=1, cpu_milli=number % 64_000), None)
    assert len(feasibility._verdicts) <= judging.CLASSES_MAX


@pytest.mark.parametrize(
    ("demand", "binding"),
    [
        (Demand(gpus=9), "gpu_count"),
        (Demand(gpus=1, models=("H100",)), "gpu_model"),
        (Demand(gpus=2), "gpus_busy"),
        (Demand(gpus=1, nodes=3), "nodes"),
        (Demand(gpus=1, nodes=2, topology="rack"), "nodes"),
        (Demand(gpus=1, nodes=2, topology="zone"), "nodes"),
        (Demand(cpu_milli=64_000), "cpu_busy"),
    ],
)
def test_a_refusal_names_the_binding_constraint(demand: Demand, binding: str) -> None:
    hand = Hand.seeing(nodes(1, 2))
    hand.grant(ask("r", Demand(gpus=1, cpu_milli=1)), place("n000", "0"))
    refusal = hand.allocator.feasibility.refusal(demand, None)
    assert refusal.details["binding"] == binding


def test_a_repeated_refusal_has_the_same_counts() -> None:
    """Only changed nodes are counted again; the counts still cover all nodes."""
    draw, state = Random(3), State()
    apply(state, ClusterSet(nodes(40, 4)))
    often = Feasibility(state)
    held: list[Share] = []
    demands = [
        Demand(gpus=4),
        Demand(gpus=2, cpu_milli=1),
        Demand(gpus=5),
        Demand(gpus=4, nodes=41),
    ]
    for _ in range(300):
        if held and draw.random() < 0.5:
            state.fleet.give(held.pop(draw.randrange(len(held))))
        else:
            row = draw.randrange(40)
            gpus = state.fleet.pick_gpus(row, Demand(gpus=draw.randint(1, 4)))
            if gpus:
                held.append(state.fleet.share(row, Demand(gpus=len(gpus)), gpus))
                state.fleet.take(held[-1])
        demand = draw.choice(demands)
        assert often.refusal(demand, None) == Feasibility(state).refusal(demand, None)
        assert often.reasons(demand, None) == Feasibility(state).reasons(demand, None)

"""Kinds of places and their prices agree with slow implementations of their definitions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moorage.model import Cluster, Gpu, Node, Share
from moorage.policy import (
    Fleet,
    FleetView,
    KindCopies,
    RequestKind,
    ScarcityPrices,
    fleet_shares,
    node_sorts,
)

KINDS = st.lists(
    st.builds(
        lambda cores, gpus, milli, models: RequestKind(
            1000 * cores, gpus, milli if gpus == 1 else 1000, 0, models, 0.1
        ),
        st.integers(0, 9),
        st.sampled_from([1, 1, 2, 3]),
        st.sampled_from([1, 300, 500, 1000]),
        st.sampled_from([(), ("A",), ("B", "C")]),
    ),
    max_size=6,
)
STATES = st.lists(
    st.tuples(
        st.integers(-1, 40),
        st.lists(st.sampled_from([-1000, 0, 299, 500, 1000]), min_size=3, max_size=3),
    ),
    min_size=3,
    max_size=3,
)


def fleet_of(models):
    fleet = Fleet()
    nodes = (
        Node(f"n{number:03}", 40_000, 9, tuple(Gpu(str(gpu), model) for gpu in range(3)))
        for number, model in enumerate(models)
    )
    fleet.install([Cluster("c", tuple(nodes))])
    return fleet


def copies_of(kind, model, cpu, gpus):
    if kind.models and model not in kind.models:
        return 0
    if kind.gpus == 1:
        copies = sum(max(free, 0) // kind.gpu_milli for free in gpus)
    else:
        copies = gpus.count(1000) // kind.gpus
    return min(copies, max(cpu, 0) // kind.cpu_milli) if kind.cpu_milli else copies


def prices_of(kinds, view):
    serves, type_of = node_sorts(kinds, view)
    return ScarcityPrices(kinds, KindCopies(kinds, serves), type_of, view)


@given(kinds=KINDS, states=STATES)
def test_prices_follow_their_definition(kinds, states):
    fleet = fleet_of("ABC")
    for row, (cores, gpus) in enumerate(states):
        fleet.set_capacity(row, 1000 * cores, 9, gpus)
    prices = prices_of(kinds, FleetView(fleet))
    assert prices.refresh(FleetView(fleet))
    for kind, price in zip(kinds, prices.prices.tolist(), strict=True):
        room = sum(
            copies_of(kind, model, 1000 * cores, gpus)
            for model, (cores, gpus) in zip("ABC", states, strict=True)
        )
        assert price == 0.1 * kind.milli / (1 + room) ** 2


@given(
    kinds=KINDS,
    moves=st.lists(st.tuples(st.integers(0, 29), st.booleans(), st.sampled_from("012"))),
)
def test_room_updated_from_changed_rows_agrees_with_a_full_count(kinds, moves):
    fleet = fleet_of("ABC" * 10)
    view = FleetView(fleet)
    prices, due = prices_of(kinds, view), []
    for number, (row, takes, gpu) in enumerate(moves):
        share = Share("c", f"n{row:03}", (gpu,), 500, 2000, 0)
        (fleet.take if takes and fleet.gpu_free[row].min() > 0 else fleet.give)(share)
        fleet.set_capacity(row, int(fleet.cpu_free[row]), 9, fleet.gpu_free[row].clip(0, 1000))
        if prices.refresh(FleetView(fleet)):
            due.append(number)
            fresh = prices_of(kinds, view)
            fresh.refresh(FleetView(fleet))
            assert prices.prices.tolist() == fresh.prices.tolist()
    # Thirty nodes: every fifth request.
    assert due == list(range(0, len(moves), 5))


def test_the_value_of_a_copy_of_a_demand_does_not_depend_on_the_size_of_the_fleet():
    kinds, found = [RequestKind(0, 2, weight=0.5)], []
    for nodes in (400, 4000):
        view = FleetView(fleet_of("A" * nodes))
        prices = prices_of(kinds, view)
        prices.refresh(view)
        found.append(prices.prices[0])
    assert found[0] == found[1] == 1000 / (1 + 400 / 2) ** 2


def test_each_kind_of_request_has_its_shares_of_suitable_and_of_fitting_gpus():
    fleet = fleet_of("AAB")
    view = FleetView(fleet)
    kinds = [
        RequestKind(0, 1, models=("A",)),
        RequestKind(41_000, 1),
        RequestKind(0, 4),
        RequestKind(0, 1, models=("D",)),
    ]
    served, fitting = fleet_shares(kinds, *node_sorts(kinds, view), view)
    assert np.allclose(served, [2 / 3, 1, 1, 1 / 9])
    assert np.allclose(fitting, [2 / 3, 0, 0, 0])

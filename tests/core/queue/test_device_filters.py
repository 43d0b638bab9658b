"""Cached device filters agree with the fleet's answer to each demand."""

from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from moorage.core.queue import device_filters
from moorage.core.queue.device_filters import DeviceFilters, device_filter
from moorage.core.state.facts import ClusterSet
from moorage.core.state.state import State, apply
from moorage.core.state.waiters import Shape
from moorage.model import Cluster, ClusterId, Demand, Gpu, Node, NodeId, Requirement

MODELS = ("A100", "T4", "L4")


def cluster(name: str, draw: Random) -> Cluster:
    return Cluster(
        ClusterId(name),
        tuple(
            Node(
                NodeId(f"n{number}"),
                8_000,
                8_192,
                tuple(Gpu(str(n), draw.choice(MODELS)) for n in range(draw.choice((0, 1, 3)))),
                labels={"zone": draw.choice("ab")} if draw.random() < 0.7 else {},
            )
            for number in range(4)
        ),
    )


def shape(draw: Random) -> Shape:
    where = tuple(
        Requirement("zone", operator, draw.choice((("a",), ("b", "c"))))
        for operator in draw.choice(((), ("In",), ("NotIn",)))
    )
    candidates = draw.choice((None, (ClusterId("c"),), (ClusterId("d"), ClusterId("gone"))))
    models = tuple(draw.sample((*MODELS, "none"), draw.randrange(3)))
    return Demand(gpus=1, models=models, where=where), candidates, ()


@pytest.mark.parametrize("seed", range(5))
def test_the_results_of_device_filters_are_computed_once_for_each_node(seed: int) -> None:
    draw, state, used = Random(seed), State(), list[Shape]()
    filters = DeviceFilters(state)
    for name in "cd":
        apply(state, ClusterSet(cluster(name, draw)))
    for _ in range(400):
        match draw.randrange(8):
            case 0 if used:
                filters.drop(device_filter(used.pop(draw.randrange(len(used)))))
            case 1 if draw.random() < 0.2:
                apply(state, ClusterSet(cluster(draw.choice("cd"), draw)))
            case _:
                used.append(shape(draw))
                filters.add(device_filter(used[-1]))
        row = draw.randrange(len(state.fleet))
        is_candidate, accepted = filters.accepted(row)
        for demand, candidates, _ in used:
            number = filters.add(device_filter((demand, candidates, ())))
            filters.drop(device_filter((demand, candidates, ())))
            here = candidates is None or state.fleet.node_ids[row][0] in candidates
            eligible = state.fleet.eligible_gpus(replace(demand, gpu_milli=1000))[row]
            assert is_candidate[number] == here
            assert (accepted[number] == (eligible if here else np.zeros_like(eligible))).all()


def test_unused_device_filters_are_forgotten() -> None:
    state = State()
    filters = DeviceFilters(state)
    apply(state, ClusterSet(cluster("c", Random(0))))
    filters.accepted(0)
    for number in range(device_filters.NEWS_MAX + 10):
        each = device_filter((Demand(gpus=1, models=("T4", str(number))), None, ()))
        filters.add(each)
        filters.drop(each)
    assert len(filters._came) == 10
    assert len(filters.accepted(0)[0]) == 16


def test_a_fleet_without_devices_accepts_no_device_filter() -> None:
    state = State()
    apply(state, ClusterSet(Cluster(ClusterId("c"), (Node(NodeId("n"), 8_000, 8_192),))))
    filters = DeviceFilters(state)
    number = filters.add(device_filter((Demand(models=("T4",)), None, ())))
    is_candidate, accepted = filters.accepted(0)
    assert (bool(is_candidate[number]), accepted[number].tolist()) == (True, [])

"""Tests of the copy of Go's random numbers, and of the order of requests in published runs."""

import pytest

from benchmarks.published_order import GoRandom, read_published_order
from moorage.lab.trace import TraceNode, TracePod

PODS = [TracePod(f"p{number}", 1000, 1024, 1, 500, ()) for number in range(8)]
NODES = [TraceNode(f"n{number}", 64_000, 65_536, 4, "T4") for number in range(5)]


@pytest.mark.parametrize(
    ("seed", "first", "second", "permutation", "shuffled"),
    [  # The output of a program in Go 1.26.
        (1, 5577006791947779410, 8674665223082153551, [3, 7, 0, 1, 6, 2, 4, 5], "9650187243"),
        (42, 3440579354231278675, 608747136543856411, [1, 0, 6, 3, 7, 5, 2, 4], "2310897546"),
        (0, 8717895732742165505, 2259404117704393152, [3, 1, 0, 4, 7, 5, 2, 6], "7851340926"),
        (-5, 1811683815564572222, 4427849682616757295, [1, 6, 5, 7, 0, 4, 3, 2], "7083194265"),
        (1 << 40, 5470237361722394362, 6322525149314491254, [1, 5, 7, 3, 4, 6, 2, 0], "2681395704"),
    ],
)
def test_the_random_generator_gives_the_same_numbers_as_that_of_go(
    seed, first, second, permutation, shuffled
):
    draws = GoRandom(seed)
    assert (draws.int63(), draws.int63()) == (first, second)
    draws.int63()
    for bound in (100, 64, 8152):
        assert 0 <= draws.intn(bound) < bound
    assert draws.permutation(8) == permutation
    items = list("0123456789")
    draws.shuffle(items)
    assert "".join(items) == shuffled


def test_an_order_has_every_request_once_and_then_repeated_requests_up_to_the_limit():
    order, names = read_published_order(PODS, NODES, 4000, arrive=1.5, seed=42)
    assert sorted(pod.name for pod in order[:8]) == [pod.name for pod in PODS]
    assert sum(pod.demand_milli for pod in order) == 6000
    assert order[8:] != PODS[:4]
    assert sorted(names.values()) == [f"{rank:04d}-{names_of(names, rank)}" for rank in range(5)]
    assert read_published_order(PODS[::-1], NODES[::-1], 4000, arrive=1.5, seed=42) == (
        order,
        names,
    )
    assert read_published_order(PODS, NODES, 4000, arrive=1.5, seed=43) != (order, names)


def names_of(names: dict[str, str], rank: int) -> str:
    [name] = [name for name, new in names.items() if new.startswith(f"{rank:04d}-")]
    return name


def test_an_order_that_exceeds_the_limit_loses_requests_at_random():
    order, _ = read_published_order(PODS, NODES, 4000, arrive=0.5, seed=42)
    assert sum(pod.demand_milli for pod in order) == 2000
    assert len({pod.name for pod in order}) == 4


def test_requests_without_gpus_are_not_repeated_to_reach_a_demand():
    pods = [TracePod("p", 1000, 1024, 0, 0, ())]
    assert read_published_order(pods, NODES, 4000, arrive=1.5, seed=42)[0] == pods

"""Tests of the queue's CPU time while the queue grows, and of its behaviour under overload."""

import pytest

from benchmarks import queue_costs
from benchmarks.overload import overload

WAITERS_FEW, WAITERS_MANY = 10, 3_000
NODES_FEW, NODES_MANY = 1_250, 50_000
RATIO_MAX = 10
"""Largest growth of the cost; a loop over all waiters or nodes costs 40 to 300 times as much."""

pytestmark = pytest.mark.heavy


def test_a_queue_of_thousands_costs_little_more_than_a_queue_of_ten() -> None:
    few, many = (queue_costs._Queue(queue_costs.NODES, n) for n in (WAITERS_FEW, WAITERS_MANY))
    for event, times in (("release", 5), ("wait", 9), ("lose", 9)):
        base, grown = (queue_costs._seconds(getattr(each, event), times) for each in (few, many))
        print(f"{event}: {grown / base:.2f}")
        assert grown / base <= RATIO_MAX, event


def test_a_refusal_on_a_large_fleet_costs_little_more_than_on_a_small_one() -> None:
    base, grown = (queue_costs._refusals(nodes) for nodes in (NODES_FEW, NODES_MANY))
    print(f"refusal: {grown / base:.2f}")
    assert grown / base <= RATIO_MAX


def test_an_overloaded_server_grants_requests_or_refuses_them_as_busy() -> None:
    figures = overload()
    print(figures)
    assert figures["overload_grants_to_peak"] > 0.25, "usually 0.8 while other tests run"
    assert figures["overload_others"] == 0
    assert figures["overload_renewals"] > 0

"""Tests of the benchmark of policies, on three nodes: its counts, and its report of failures."""

import asyncio

import pytest

from benchmarks import policy_costs
from benchmarks.packing import openb
from moorage.lab.errors import CommandError
from moorage.lab.trace import TraceNode, TracePod

NODES = [TraceNode(f"n{number}", 8000, 8192, 2, "A") for number in range(3)]
PODS = [
    *(TracePod(f"w{number}", 2000, 1024, 1, 1000) for number in range(4)),
    *(TracePod(f"h{number}", 1000, 1024, 1, 500) for number in range(4)),
]


@pytest.mark.heavy
def test_every_policy_is_measured_while_it_fills_the_fleet():
    figures = policy_costs.policies(NODES, PODS)
    assert figures["fgd_cpu_to_fgd"] == 1
    for name in policy_costs.POLICIES:
        assert figures[f"{name}_allocated_percent"] == 100
        assert figures[f"{name}_cpu_microseconds"] > 0
        assert 0 < figures[f"{name}_p50_microseconds"] <= figures[f"{name}_p99_microseconds"]


def test_a_grant_is_taken_from_the_fleet_and_a_full_fleet_refuses():
    async def place(count):
        jailed, cost = policy_costs.JailedSite("fgd", {}, openb(NODES, 1)), policy_costs.Cost()
        await jailed.sandbox.start()
        try:
            granted = [await jailed.place(number, PODS[0], cost) for number in range(count)]
        finally:
            await jailed.sandbox.close()
        return granted, len(cost.seconds)

    assert asyncio.run(place(8)) == ([True] * 6 + [False] * 2, 6)


def test_a_failing_policy_gives_an_error_and_no_figure():
    with pytest.raises(CommandError, match=r"expected_fill:1\.0-stable failed"):
        asyncio.run(
            policy_costs._cost("expected_fill", {"typical": [7]}, openb(NODES, 1), PODS[:1])
        )

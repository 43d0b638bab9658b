"""Tests that warm resources cost less than cold ones, and that repeated use leaves nothing."""

import pytest

from benchmarks.backend_costs import cycles
from benchmarks.warm_costs import warm_leases
from moorage.backends.specs import ContainerResourceSpec, ProcessResourceSpec

COLD_TO_WARM_MIN = 3
"""Least ratio of cold to warm; most machines reach tens, but a busy machine must pass, too."""

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize(
    ("reset_command", "times"),
    [(None, 5), (["true"], 20)],  # Without a reset command, each release starts the process again.
)
def test_warm_restarts_of_a_process_are_cheap_and_leave_nothing_behind(reset_command, times):
    spec = ProcessResourceSpec(
        command=["sleep", "100000"], cpu_count=1, reset_command=reset_command
    )
    costs = cycles(spec, times, starts=3)  # Raises an error if something is left behind.
    assert costs["cycles"] == times
    assert costs["left_behind"] == 0
    assert costs["cold_to_warm"] >= COLD_TO_WARM_MIN


def test_a_warm_container_costs_little_compared_with_a_cold_one(container_engine, container_image):
    spec = ContainerResourceSpec(image=container_image, command=["sleep", "100000"], stop_seconds=0)
    costs = cycles(spec, 5, starts=3)
    assert costs["cold_to_warm"] >= COLD_TO_WARM_MIN
    assert container_engine.containers(all=True) == []


def test_a_warm_lease_costs_less_than_a_cold_one():
    costs = warm_leases(
        starts=7
    )  # Raises an error if a warm lease caused a start, or a cold one did not.
    assert costs["process_cold_to_warm"] > 1
    assert costs["service_cold_to_warm"] > 1

"""Statistics of a version tell failures for all tenants from failures for one tenant's inputs."""

import pytest

from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Advice
from moorage.daemon.publishing.version_statistics import (
    LATELY_SECONDS,
    TENANTS_MAX,
    TENANTS_SUFFICIENT,
    VersionStatistics,
)
from moorage.model import Code, Tenant

FAULT = Refusal(Code.POLICY_ERROR, "the policy raised")
GOOD = Advice({})


@pytest.fixture
def failures():
    return []


@pytest.fixture
def statistics(failures):
    return VersionStatistics(
        "rule:1-x",
        lambda statistics: failures.append((statistics.consecutive, statistics.fails_all)),
    )


def note(statistics, answer, *tenants, now=5.0):
    for tenant in tenants:
        statistics.note(Tenant(tenant), answer, 0.001, now)


def test_failures_of_the_only_tenant_count_for_all_tenants(statistics, failures):
    note(statistics, GOOD, "")
    note(statistics, FAULT, "", "")
    assert failures == [(1, True), (2, True)]
    assert statistics.failure == (
        "2 requests in a row failed with rule:1-x (2 policy_error), of the only tenant that used it"
        " within the last hour"
    )


def test_only_consecutive_faults_are_reported(statistics):
    note(statistics, Refusal(Code.POLICY_TIMEOUT, "the policy hung"), *["a"] * 3)
    note(statistics, GOOD, "a")
    note(statistics, FAULT, "a", "a")
    assert statistics.failure.startswith(
        "2 requests in a row failed with rule:1-x (2 policy_error), of"
    )
    assert statistics.faults == 5


def test_failures_of_one_tenant_among_several_do_not_count_for_all(statistics):
    note(statistics, GOOD, "b")
    note(statistics, FAULT, *["a"] * 100)
    assert (statistics.consecutive, statistics.fails_all) == (100, False)
    assert "of 1 of the 2 tenants that" in statistics.failure
    note(statistics, FAULT, "b")
    assert statistics.fails_all
    assert "of all 2 tenants that" in statistics.failure
    note(statistics, GOOD, "b")
    note(statistics, FAULT, "a")
    assert (statistics.consecutive, statistics.fails_all) == (1, False)


def test_failures_of_enough_tenants_count_for_all_tenants(statistics):
    note(statistics, GOOD, *[f"t{number}" for number in range(50)])
    note(statistics, FAULT, *[f"t{number}" for number in range(TENANTS_SUFFICIENT - 1)])
    assert not statistics.fails_all
    note(statistics, FAULT, f"t{TENANTS_SUFFICIENT}")
    assert statistics.fails_all


def test_tenants_that_used_a_version_long_ago_are_not_counted(statistics):
    note(statistics, GOOD, "b")
    note(statistics, FAULT, "a", now=5.0 + LATELY_SECONDS)
    assert not statistics.fails_all
    note(statistics, FAULT, "a", now=5.1 + LATELY_SECONDS)
    assert statistics.fails_all


def test_a_refusal_without_fault_of_the_policy_does_not_count(statistics, failures):
    note(statistics, Refusal(Code.BUSY, "it rests"), "b")
    assert failures == []
    note(statistics, FAULT, "a")
    note(statistics, Refusal(Code.BUSY, "it rests"), "a")
    assert failures == [(1, True)]
    report = statistics.report(whole=True)
    assert report["failing_tenants"] == report["tenants"] == 1


def test_the_statistics_of_versions_use_bounded_memory(statistics):
    note(statistics, GOOD, *[f"t{number}" for number in range(TENANTS_MAX + 10)])
    assert statistics.report(whole=True)["tenants"] == TENANTS_MAX

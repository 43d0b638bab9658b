"""Arms: how a version does, and whether it fails for everybody or at one tenant's inputs."""

import pytest

from moorage.core.words import Advice, Refusal
from moorage.daemon.arms import LATELY_SECONDS, TENANTS_MAX, TENANTS_SUFFICIENT, Arm
from moorage.model import Code, Tenant

FAULT = Refusal(Code.POLICY_ERROR, "the rule raised")
GOOD = Advice({})


@pytest.fixture
def failed():
    return []


@pytest.fixture
def arm(failed):
    return Arm("rule:1-x", lambda arm: failed.append((arm.consecutive, arm.fails_all)))


def note(arm, answer, *tenants, now=5.0):
    for tenant in tenants:
        arm.note(Tenant(tenant), answer, 0.001, now)


def test_where_one_tenant_alone_uses_it_its_failures_speak_for_all(arm, failed):
    note(arm, GOOD, "")
    note(arm, FAULT, "", "")
    assert failed == [(1, True), (2, True)]
    assert arm.failure == (
        "2 requests in a row failed with rule:1-x (2 policy_error), of the only tenant that used it"
        " within the last hour"
    )


def test_it_tells_of_the_faults_in_a_row_and_of_no_others(arm):
    note(arm, Refusal(Code.POLICY_TIMEOUT, "the rule hung"), *["a"] * 3)
    note(arm, GOOD, "a")
    note(arm, FAULT, "a", "a")
    assert arm.failure.startswith("2 requests in a row failed with rule:1-x (2 policy_error), of")
    assert arm.faults == 5


def test_one_tenant_among_several_does_not_however_often_it_fails(arm):
    note(arm, GOOD, "b")
    note(arm, FAULT, *["a"] * 100)
    assert (arm.consecutive, arm.fails_all) == (100, False)
    assert "of 1 of the 2 tenants that" in arm.failure
    note(arm, FAULT, "b")
    assert arm.fails_all
    assert "of all 2 tenants that" in arm.failure
    note(arm, GOOD, "b")
    note(arm, FAULT, "a")
    assert (arm.consecutive, arm.fails_all) == (1, False)


def test_enough_tenants_speak_for_many_so_that_seldom_ones_are_not_waited_for(arm):
    note(arm, GOOD, *[f"t{number}" for number in range(50)])
    note(arm, FAULT, *[f"t{number}" for number in range(TENANTS_SUFFICIENT - 1)])
    assert not arm.fails_all
    note(arm, FAULT, f"t{TENANTS_SUFFICIENT}")
    assert arm.fails_all


def test_who_used_it_long_ago_counts_no_more(arm):
    note(arm, GOOD, "b")
    note(arm, FAULT, "a", now=5.0 + LATELY_SECONDS)
    assert not arm.fails_all
    note(arm, FAULT, "a", now=5.1 + LATELY_SECONDS)
    assert arm.fails_all


def test_a_refusal_that_the_rule_is_not_to_blame_for_says_nothing(arm, failed):
    note(arm, Refusal(Code.BUSY, "it rests"), "b")
    assert failed == []
    note(arm, FAULT, "a")
    note(arm, Refusal(Code.BUSY, "it rests"), "a")
    assert failed == [(1, True)]
    assert arm.report()["failing_tenants"] == arm.report()["tenants"] == 1


def test_what_is_remembered_is_bounded(arm):
    note(arm, GOOD, *[f"t{number}" for number in range(TENANTS_MAX + 10)])
    assert arm.report()["tenants"] == TENANTS_MAX

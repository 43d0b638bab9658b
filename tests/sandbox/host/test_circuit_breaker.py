"""The circuit breaker pauses a policy that overruns repeatedly for a tenant, for this tenant."""

from collections import Counter

import pytest

from moorage.model import Code, PolicyRef
from moorage.sandbox.host.circuit_breaker import (
    ANSWERS_PER_OVERRUN,
    FORGIVEN_SECONDS,
    OPEN_SECONDS_MAX,
    OPEN_SECONDS_MIN,
    RUNS_MAX,
    CircuitBreaker,
)
from moorage.sandbox.host.contract import PolicyCode
from moorage.sandbox.host.work import Work
from moorage.sandbox.wire.limits import Limits

LIMIT = 3


def work(tenant="a", uri="loop:1-x", digest="d"):
    return Work("evaluate", PolicyCode(PolicyRef(uri, digest), {}), tenant)


@pytest.fixture
def starts():
    return []


@pytest.fixture
def counters():
    return Counter()


@pytest.fixture
def circuits(starts, counters):
    limits = Limits(circuit_overruns=LIMIT, evaluation_seconds=1.0)
    return CircuitBreaker(limits, counters, starts.append)


def test_repeated_overruns_open_the_breaker_for_longer_each_time(circuits, starts, counters):
    now = 100.0
    for _ in range(LIMIT - 1):
        assert not circuits.overran(work(), now)
    assert circuits.refusal(work(), now) is None
    lengths = []
    for _ in range(8):
        assert circuits.overran(work(), now)
        refusal = circuits.refusal(work(), now)
        lengths.append(round(refusal.details["retry_after_seconds"]))
        now += lengths[-1] - 0.01
        assert circuits.refusal(work(), now) is not None
        now += 0.02
        assert circuits.refusal(work(), now) is None
        assert circuits.open_now(now) == 0
    assert lengths[:4] == [OPEN_SECONDS_MIN * 2**times for times in range(4)]
    assert lengths == sorted(lengths)
    assert lengths[-1] == OPEN_SECONDS_MAX
    assert [rest.seconds for rest in starts] == pytest.approx(lengths)
    assert (counters["circuits_opened"], counters["circuit_refusals"]) == (8, 16)


def test_the_refusal_by_an_open_breaker_gives_the_cause_and_the_retry_time(circuits):
    for _ in range(LIMIT):
        circuits.overran(work(), 5.0)
    refusal = circuits.refusal(work(), 5.25)
    assert refusal.code is Code.BUSY
    assert "loop:1-x is not called for another 0.8 s: 3 of its latest evaluations" in refusal.reason
    assert refusal.details == {
        "policy_rule_uri": "loop:1-x",
        "overruns": LIMIT,
        "retry_after_seconds": 0.8,
    }


def test_an_open_circuit_refuses_no_other_tenant_and_no_other_version(circuits):
    for _ in range(LIMIT):
        circuits.overran(work(), 5.0)
    others = (work("b"), work(uri="loop:2-x"), work(digest="other"))
    assert [circuits.refusal(each, 5.0) for each in others] == [None] * 3
    assert circuits.open_now(5.0) == 1


def test_the_breaker_never_stops_a_caller_that_stands_for_many_tenants(circuits):
    many = work()
    many.proxied = True
    assert not any(circuits.overran(many, 5.0) for _ in range(2 * LIMIT))
    for _ in range(LIMIT):
        circuits.overran(work(), 5.0)
    assert circuits.refusal(many, 5.0) is None
    assert circuits.refusal(work(), 5.0) is not None


@pytest.mark.parametrize("apart", [0.0, 1.0, 20.0])
@pytest.mark.parametrize("answers", [1, 2, 10])
def test_a_policy_that_hangs_at_every_second_request_opens_the_breaker(circuits, apart, answers):
    now = 5.0
    overruns = 1
    while not circuits.overran(work(), now) and overruns < 2 * LIMIT:
        overruns += 1
        for _ in range(answers):
            circuits.note_answer(work())
        now += apart
    assert circuits.refusal(work(), now) is not None
    assert LIMIT <= overruns <= LIMIT + 1
    assert circuits.current(work().code.ref, "a", now).overruns == overruns


def test_rare_hangs_among_many_answers_never_open_the_breaker(circuits):
    for _ in range(100):
        assert not circuits.overran(work(), 5.0)
        for _ in range(ANSWERS_PER_OVERRUN):
            circuits.note_answer(work())


def test_hangs_with_long_pauses_between_them_never_open_the_breaker(circuits):
    now = 5.0
    for _ in range(100):
        assert not circuits.overran(work(), now)
        now += FORGIVEN_SECONDS / LIMIT + 1.0  # The second of the hang itself cancels no overrun.


def test_the_duration_of_a_hang_cancels_no_earlier_overrun():
    limits = Limits(circuit_overruns=LIMIT, evaluation_seconds=FORGIVEN_SECONDS)
    circuits = CircuitBreaker(limits, Counter(), lambda _circuit: None)
    stopped = [circuits.overran(work(), times * FORGIVEN_SECONDS) for times in range(1, LIMIT + 1)]
    assert stopped == [False] * (LIMIT - 1) + [True]


def test_an_answer_cancels_only_overruns_of_its_tenant(circuits):
    for tenant in ("a", "b"):
        for _ in range(LIMIT - 1):
            circuits.overran(work(tenant), 5.0)
    for _ in range(LIMIT * ANSWERS_PER_OVERRUN):
        circuits.note_answer(work())
    assert not circuits.overran(work(), 5.0)
    assert circuits.overran(work("b"), 5.0)
    circuits.note_answer(work("b"))  # An answer from another cell, sent before the circuit opened.
    assert circuits.refusal(work("b"), 5.0) is not None


def test_overruns_that_time_has_cancelled_no_longer_count(circuits):
    for _ in range(LIMIT - 1):
        circuits.overran(work(), 5.0)
    now = 7.0 + FORGIVEN_SECONDS
    assert not circuits.overran(work(), now)
    assert not circuits.overran(work(), now)
    assert circuits.overran(work(), now)
    assert circuits.current(work().code.ref, "a", now).overruns == LIMIT


def test_activating_a_version_closes_its_breaker_for_all_tenants(circuits):
    for tenant in ("a", "b"):
        for _ in range(LIMIT):
            circuits.overran(work(tenant), 5.0)
    circuits.end("loop:1-x")
    assert [circuits.refusal(work(tenant), 5.0) for tenant in ("a", "b")] == [None, None]
    assert not circuits.overran(work(), 5.0), "the count starts again at 0"


def test_the_number_of_remembered_overruns_is_limited(circuits):
    for number in range(RUNS_MAX + 1):
        for _ in range(LIMIT):
            circuits.overran(work(f"t{number}"), 5.0)
    assert circuits.refusal(work("t0"), 5.0) is None
    assert circuits.open_now(5.0) == RUNS_MAX


def test_a_disabled_circuit_breaker_never_opens(starts, counters):
    circuits = CircuitBreaker(Limits(circuit_overruns=0), counters, starts.append)
    assert not any(circuits.overran(work(), 5.0) for _ in range(100))
    assert circuits.refusal(work(), 5.0) is None

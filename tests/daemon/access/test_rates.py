"""Tests of the rate limits of one tenant, by a clock that the test moves."""

import pytest

from moorage.daemon.access import rates
from moorage.daemon.access.rates import EvaluationRate, TenantRates
from moorage.model import Code, Tenant
from moorage.protocol.faults import ServiceError

ANN, BOB = Tenant("ann"), Tenant("bob")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def count_refusals(limits: TenantRates, tenant: Tenant, count: int) -> int:
    return sum(limits.refusal(tenant) is not None for _ in range(count))


def test_the_limit_per_second_holds_for_each_tenant_separately() -> None:
    clock = Clock()
    limits = TenantRates(5, 0, clock)
    assert count_refusals(limits, ANN, 8) == 3
    assert count_refusals(limits, BOB, 5) == 0
    clock.now += 0.4  # Time for two of five requests.
    assert count_refusals(limits, ANN, 3) == 1
    clock.now += 60.0  # A bucket holds one second.
    assert count_refusals(limits, ANN, 8) == 3


def test_a_refusal_for_a_rate_names_the_setting_and_the_time_to_retry() -> None:
    limits = TenantRates(2, 0, Clock())
    assert count_refusals(limits, ANN, 2) == 0
    no = limits.refusal(ANN)
    assert no is not None
    assert no.code is Code.BUSY
    assert "tenant_requests_per_second" in no.reason
    assert no.details == {"retry_after_seconds": 0.5}
    assert no.expected == "the same again, in 0.5 s"


def test_uploads_of_a_tenant_are_counted_by_the_minute() -> None:
    clock = Clock()
    limits = TenantRates(0, 2, clock)
    assert count_refusals(limits, ANN, 1_000) == 0
    for _ in range(2):
        limits.take_upload(ANN)
    with pytest.raises(ServiceError, match="tenant_uploads_per_minute") as no:
        limits.take_upload(ANN)
    assert no.value.details == {"retry_after_seconds": 30.0}
    clock.now += 30.0
    limits.take_upload(ANN)


def test_the_number_of_remembered_tenants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "TENANTS_MAX", 2)
    limits = TenantRates(1, 0, Clock())
    for name in ("a", "b", "c"):
        assert count_refusals(limits, Tenant(name), 1) == 0
    assert count_refusals(limits, Tenant("c"), 1) == 1
    assert count_refusals(limits, Tenant("a"), 1) == 0


def test_time_restores_a_spent_rate() -> None:
    clock = Clock()
    rate = EvaluationRate(6, clock)
    assert rate.refusal(ANN) is None
    rate.burnt(ANN, 5.0)
    assert rate.refusal(ANN) is None
    rate.burnt(ANN, 3.0)  # The cost is known only afterwards: ann owes two seconds.
    no = rate.refusal(ANN)
    assert no is not None
    assert no.code is Code.BUSY
    assert "6 s of processor time a minute" in no.reason
    assert "tenant_evaluation_seconds_per_minute" in no.reason
    assert no.details == {"retry_after_seconds": 20.0}
    assert rate.refusal(BOB) is None
    clock.now += 20.5
    assert rate.refusal(ANN) is None
    rate.burnt(ANN, 0.055)  # A small debt.
    no = rate.refusal(ANN)
    assert no is not None
    assert no.details == {"retry_after_seconds": rates.RETRY_SECONDS_MIN}

"""Tests of the learnt durations of leases: similarity, bounds, and weights by age."""

import pytest
from by_hand import Hand, ask, nodes, place
from msgspec.structs import replace

from moorage.core.state.durations import COUNT_MAX, ENOUGH, LIKENESSES_MAX, Durations
from moorage.model import Demand, Lease, RequestId, Tenant


@pytest.fixture
def lease() -> Lease:
    """Return a lease of one GPU that was granted at the time 0."""
    hand = Hand.seeing(nodes(1, 1))
    hand.grant(ask("a", Demand(gpus=1)), place("n000", "0"))
    return hand.allocator.state.leases[RequestId("a")]


def learn(lease: Lease, seconds: float, times: int = ENOUGH) -> Durations:
    found = Durations()
    for _ in range(times):
        found.add(lease, lease.granted_at + seconds)
    return found


def test_too_few_durations_give_no_estimate(lease: Lease) -> None:
    assert learn(lease, 100.0, ENOUGH - 1).of_lease(lease, 0.0) is None
    assert learn(lease, 100.0).of_lease(lease, 0.0) == pytest.approx(100.0, rel=0.2)


def test_a_long_lease_is_compared_with_leases_of_at_least_its_age(lease: Lease) -> None:
    found = learn(lease, 10.0, 10 * ENOUGH)
    for _ in range(ENOUGH):
        found.add(lease, lease.granted_at + 1000.0)
    assert found.of_lease(lease, 0.0) == pytest.approx(10.0, rel=0.2)
    assert found.of_lease(lease, 100.0) == pytest.approx(1000.0, rel=0.2)


def test_estimates_use_a_tenants_own_durations_or_else_those_of_all_tenants(lease: Lease) -> None:
    found = learn(lease, 10.0)
    other, third = (replace(lease, tenant=Tenant(name)) for name in ("other", "third"))
    for _ in range(3 * ENOUGH):
        found.add(other, lease.granted_at + 1000.0)
    assert found.of_lease(lease, 0.0) == pytest.approx(10.0, rel=0.2)
    assert found.of_lease(third, 0.0) == pytest.approx(1000.0, rel=0.2)


def test_old_durations_lose_weight(lease: Lease) -> None:
    found = learn(lease, 10.0, COUNT_MAX)
    for _ in range(COUNT_MAX):
        found.add(lease, lease.granted_at + 1000.0)
        assert all(sum(n for _, n in each) <= COUNT_MAX for _, each in found.counts())
    assert found.of_lease(lease, 0.0) == pytest.approx(1000.0, rel=0.2)


def test_the_least_recently_used_durations_are_forgotten(lease: Lease) -> None:
    found = learn(lease, 10.0)
    for number in range(LIKENESSES_MAX):
        found.add(replace(lease, tenant=Tenant(f"t{number}")), lease.granted_at + 10.0)
    likenesses = [each for each, _ in found.counts()]
    assert len(likenesses) == LIKENESSES_MAX
    assert not any(tenant == lease.tenant for tenant, *_ in likenesses)

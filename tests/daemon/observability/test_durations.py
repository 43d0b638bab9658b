"""Tests of histograms of durations and of gauges of the fleet: their values and bounds."""

import time

from prometheus_client.metrics_core import Metric

from moorage.core.allocator import Allocator
from moorage.core.state.facts import Refusal
from moorage.core.state.waiters import Waiter
from moorage.core.turns.effects import Consult
from moorage.core.turns.events import ConsultFailed
from moorage.daemon.observability import durations, gauges
from moorage.daemon.observability.durations import DurationMetrics
from moorage.model import (
    Ask,
    Cluster,
    ClusterId,
    Code,
    Gpu,
    Lease,
    LeaseTerms,
    Node,
    NodeId,
    PolicyRef,
    RequestId,
    Tenant,
)
from moorage.policy.fleet import Fleet


def sample(metrics: list[Metric], name: str, **labels: str) -> float:
    """Return the value of a metric's sample with the given labels."""
    (value,) = [
        each.value
        for metric in metrics
        for each in metric.samples
        if each.name == name and labels.items() <= each.labels.items()
    ]
    return value


def consult(policy: str, number: int) -> Consult:
    request = RequestId(f"r{number}")
    ask = Ask(id=request, tenant=Tenant("ann"), policy=PolicyRef(f"{policy}:1-x", "d"))
    return Consult(ask, number)


def answer_consultation(
    measured: DurationMetrics, policy: str, number: int, seconds: float
) -> None:
    measured.observe_consultation(consult(policy, number))
    failed = ConsultFailed(RequestId(f"r{number}"), number, Refusal(Code.INTERNAL, "no"))
    measured.observe_decision(failed, seconds)


def test_a_takeover_is_counted_with_its_seconds() -> None:
    measured = DurationMetrics(lambda _: None)
    assert sample(list(measured.metrics()), "moorage_takeover_seconds_count") == 0
    measured.observe_takeover(3.5)
    found = list(measured.metrics())
    assert sample(found, "moorage_takeover_seconds_bucket", le="2.5") == 0
    assert sample(found, "moorage_takeover_seconds_bucket", le="5.0") == 1
    assert sample(found, "moorage_takeover_seconds_sum") == 3.5


def test_the_entrance_has_no_values_for_parts_that_are_not_configured() -> None:
    without = list(gauges.entrance_metrics({"http": 2}, None, None))
    assert sample(without, "moorage_failed_logins_total", door="http") == 2
    assert [len(metric.samples) for metric in without[1:]] == [0, 0, 0]
    found = list(gauges.entrance_metrics({}, (time.time() + 60, 240.0), failing=True))
    assert sample(found, "moorage_certificate_lifetime_seconds") == 240
    assert 50 < sample(found, "moorage_certificate_expires_seconds") <= 60
    assert sample(found, "moorage_oidc_keys_up") == 0


def test_the_oldest_wait_is_that_of_a_request_without_a_lease() -> None:
    allocator, now = Allocator(), time.time()
    assert sample(list(gauges.core_gauges(allocator)), "moorage_oldest_wait_seconds") == 0
    policy = PolicyRef("p:1-x", "d")
    lease = Lease(RequestId("l"), Tenant("ann"), "", policy, (), 1, now, now + 60, LeaseTerms(60))
    for name, age, held in (("l", 9_000, lease), ("new", 10, None), ("old", 4_000, None)):
        ask = Ask(id=RequestId(name), tenant=Tenant("ann"), policy=policy)
        allocator.state.waiting[ask.id] = Waiter(ask, now - age, now + 60, held)
    age = sample(list(gauges.core_gauges(allocator)), "moorage_oldest_wait_seconds")
    assert 4_000 <= age < 4_060


def test_durations_are_counted_up_to_each_bound_of_the_histogram() -> None:
    measured = DurationMetrics(lambda _: None)
    for seconds in (0.00001, 0.0002, 0.2, 7.0):
        measured.observe_commit(seconds)
    found = list(measured.metrics())
    assert sample(found, "moorage_commit_seconds_bucket", le="0.0001") == 1
    assert sample(found, "moorage_commit_seconds_bucket", le="0.25") == 3
    assert sample(found, "moorage_commit_seconds_bucket", le="+Inf") == 4
    assert sample(found, "moorage_commit_seconds_count") == 4
    assert round(sample(found, "moorage_commit_seconds_sum"), 5) == 7.20021


def test_the_durations_of_policies_beyond_the_bound_are_counted_as_other() -> None:
    measured = DurationMetrics(lambda _: None)
    for number in range(durations.LABELS_MAX + 7):
        answer_consultation(measured, f"p{number}", number, 0.001)
    found = list(measured.metrics())
    name = "moorage_evaluation_seconds_count"
    assert sample(found, name, policy="p3") == 1
    assert sample(found, name, policy=durations.OTHER) == 7
    assert sample(found, "moorage_verification_seconds_count") == durations.LABELS_MAX + 7


def test_an_evaluation_that_is_forgotten_is_not_counted() -> None:
    measured = DurationMetrics(lambda _: None)
    measured.observe_consultation(consult("p", 1))
    measured.forget_consultation(RequestId("r1"))
    failed = ConsultFailed(RequestId("r1"), 1, Refusal(Code.INTERNAL, "no"))
    measured.observe_decision(failed, 0.0)
    names = [each.name for metric in measured.metrics() for each in metric.samples]
    assert "moorage_evaluation_seconds_count" not in names


def fleet(clusters: int) -> Fleet:
    made = Fleet()
    made.install(
        Cluster(
            id=ClusterId(f"c{number:03}"),
            nodes=(
                Node(
                    id=NodeId("n"),
                    gpus=(Gpu("0", "A"), Gpu("1", "B")),
                    cpu_milli=1000,
                    memory_mib=1024,
                ),
            ),
        )
        for number in range(clusters)
    )
    return made


def test_the_fleet_is_measured_by_cluster_and_model() -> None:
    (metric,) = gauges.fleet_gauges(fleet(2))
    found = [metric]
    name = "moorage_fleet_gpu_milli"
    assert sample(found, name, cluster="c001", model="B", what="total") == 1000
    assert sample(found, name, cluster="c000", model="A", what="free") == 1000
    assert len(metric.samples) == 8


def test_clusters_beyond_the_bound_share_one_series() -> None:
    (metric,) = gauges.fleet_gauges(fleet(gauges.FLEET_KINDS_MAX))
    total = sum(each.value for each in metric.samples if each.labels["what"] == "total")
    assert total == gauges.FLEET_KINDS_MAX * 2 * 1000
    assert len(metric.samples) == 2 * (gauges.FLEET_KINDS_MAX + 1)
    assert sample([metric], metric.name, cluster=durations.OTHER, what="free") > 0


def test_an_empty_fleet_has_no_series() -> None:
    (metric,) = gauges.fleet_gauges(Fleet())
    assert metric.samples == []

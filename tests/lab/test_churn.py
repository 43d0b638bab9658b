"""In a simulated steady state, requests match the load from the start, and stay as drawn."""

import numpy as np
import pytest

from moorage.lab.churn import MEAN_STAY_SECONDS, STAYS, Churn, arrivals, by_size, size_of
from moorage.lab.errors import CommandError
from moorage.lab.trace import TracePod

PODS = [
    TracePod("c", 1000, 1, 0, 0),
    TracePod("h", 1000, 1, 1, 500),
    TracePod("w", 1000, 1, 1, 1000),
    TracePod("f", 1000, 1, 4, 1000),
]
CAPACITY = 4_000_000


def draw_arrivals(how, seed=1, later=()):
    return arrivals(PODS, CAPACITY, how, seed, later)


def held_share_at(coming, at):
    return sum(a.pod.demand_milli for a in coming if a.at <= at < a.at + a.stay) / CAPACITY


@pytest.mark.parametrize("stays", STAYS)
def test_the_load_holds_from_the_first_moment_if_all_requests_fit(stays):
    how = Churn(0.8, stays, 4.0)
    coming = draw_arrivals(how)
    assert [each.at for each in coming] == sorted(each.at for each in coming)
    moments = np.linspace(0, how.end - 1, 13)
    assert [held_share_at(coming, at) for at in moments] == pytest.approx([0.8] * 13, rel=0.15)


@pytest.mark.parametrize("stays", STAYS)
def test_requests_stay_an_hour_on_average(stays):
    came = [each for each in draw_arrivals(Churn(2.0, stays, 8.0)) if each.at > 0]
    mean = sum(each.stay for each in came) / len(came)
    assert mean == pytest.approx(MEAN_STAY_SECONDS, rel=0.1)


def test_sized_stays_are_longer_for_requests_with_more_gpus():
    def mean(milli):
        stays = [a.stay for a in came if a.pod.demand_milli == milli]
        return sum(stays) / len(stays)

    came = [each for each in draw_arrivals(Churn(2.0, "sized", 8.0)) if each.at > 0]
    assert mean(4000) == pytest.approx(2 * mean(1000), rel=0.1)
    assert mean(500) == pytest.approx(mean(1000), rel=0.1)


def test_the_second_half_of_the_requests_may_come_from_another_trace():
    how, other = Churn(0.8, length=4.0), TracePod("x", 1, 1, 2, 1000)
    coming = draw_arrivals(how, later=[other])
    half = (how.measured_from + how.end) / 2
    assert {each.pod is other for each in coming if each.at < half} == {False}
    assert {each.pod is other for each in coming if each.at >= half} == {True}
    assert held_share_at(coming, how.end - 1) == pytest.approx(0.8, rel=0.15)


def test_equal_seeds_draw_equal_requests_and_different_seeds_do_not():
    assert (
        draw_arrivals(Churn(0.5)) == draw_arrivals(Churn(0.5)) != draw_arrivals(Churn(0.5), seed=2)
    )


def test_arrivals_raises_if_no_request_of_the_trace_asks_for_gpus():
    with pytest.raises(CommandError, match="requests for GPUs"):
        arrivals(PODS[:1], CAPACITY, Churn(1.0), 1)


def test_sizes_of_requests_are_named_and_sorted_from_small_to_large():
    sizes = [size_of(pod.gpus, pod.gpu_milli) for pod in PODS] + ["16 GPUs"]
    assert sizes == ["CPU only", "share", "1 GPU", "4 GPUs", "16 GPUs"]
    assert sorted({*sizes}, key=by_size) == sizes

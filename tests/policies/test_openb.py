"""The shipped policies under the published protocol reach the published figures."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.packing import openb, pack
from benchmarks.placement import compare, run
from moorage.lab.trace import arrivals, capacity_milli, read_nodes, read_pods, typical_of
from moorage_policies.fgd import AIOSv1PolicyRule as Fgd

DATA = Path(__file__).parents[3] / "shared" / "data" / "openb"
NODES = DATA / "nodes.csv"
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.trace,
    pytest.mark.skipif(not DATA.is_dir(), reason=f"the production traces are not at {DATA}"),
]
# Means of ten runs in the program with which the policy was developed.
EXPECTED_FILL = {
    "default": 96.11,
    "multigpu20": 96.49,
}


@pytest.mark.parametrize(
    ("trace", "rule"),
    [
        ("default", "fgd"),
        ("gpushare40", "dot_product"),
        ("gpuspec33", "best_fit"),
    ],
)
def test_the_result_of_one_run_is_near_the_published_mean(trace, rule):
    (found,) = compare(NODES, [DATA / f"pods_{trace}.csv"], [rule], [42])
    assert abs(found.difference) <= 4 * found.published_deviation, found


def test_fgd_with_a_learnt_mix_packs_better_than_best_fit():
    nodes, pods = read_nodes(NODES), read_pods(DATA / "pods_default.csv")
    order = arrivals(pods, capacity_milli(nodes), 1.3, 42)
    assert pack(Fgd("", {}, {}), openb(nodes, 42), order).allocated_percent > 94.5


def quarter(rule: str, parameters: dict[str, Any]) -> float:
    """Return how much a policy places on a quarter of the nodes, with a quarter of the requests."""
    nodes = sorted(read_nodes(DATA / "nodes.csv"), key=lambda node: node.name)[::4]
    pods = sorted(read_pods(DATA / "pods_default.csv"), key=lambda pod: pod.name)[::4]
    policy = import_module(f"moorage_policies.{rule}").AIOSv1PolicyRule("", {}, parameters)
    order = arrivals(pods, capacity_milli(nodes), 1.3, 42)
    return pack(policy, openb(nodes, 42), order, parameters, 42).allocated_percent


def test_expected_fill_packs_more_than_fgd_with_a_given_or_learnt_mix():
    pods = read_pods(DATA / "pods_default.csv")
    published_best = quarter("fgd", typical_of("fgd", pods))
    assert quarter("expected_fill", typical_of("expected_fill", pods)) > published_best + 0.6
    assert quarter("expected_fill", {}) > published_best + 0.5


@pytest.mark.parametrize(("trace", "reached"), EXPECTED_FILL.items())
def test_expected_fill_reaches_its_offline_figures(trace, reached):
    packing = run("expected_fill", read_nodes(NODES), read_pods(DATA / f"pods_{trace}.csv"), 42)
    assert packing.allocated_percent == pytest.approx(reached, abs=0.25)

"""Tests of the benchmark `churn`: its counted, compared and printed figures."""

import json
import subprocess
import sys

import pytest

from benchmarks import churn_report
from benchmarks.churn import ChurnJob, HeldMilli, churn, run
from benchmarks.churn_report import ChurnRun, SizeCount
from moorage.core.state.facts import Ended, Granted
from moorage.lab.churn import Churn
from moorage.lab.errors import CommandError
from moorage.lab.trace import TraceNode, TracePod
from moorage.model import Lease, LeaseTerms, PolicyRef, Share

pytestmark = pytest.mark.heavy

NODES = [TraceNode(f"n{number:02}", 64_000, 262_144, 4, "A") for number in range(10)]
PODS = [
    TracePod("c", 2000, 1024, 0, 0),
    TracePod("h", 2000, 1024, 1, 500),
    TracePod("w", 4000, 1024, 1, 1000),
    TracePod("v", 4000, 1024, 1, 1000),
    TracePod("f", 16_000, 1024, 4, 1000),
]


@pytest.fixture
def folder(tmp_path):
    rows = [f"{n.name},{n.cpu_milli},{n.memory_mib},{n.gpus},{n.model}" for n in NODES]
    (tmp_path / "nodes.csv").write_text("\n".join(["sn,cpu_milli,memory_mib,gpu,model", *rows]))
    header = "name,cpu_milli,memory_mib,num_gpu,gpu_milli"
    rows = [f"{p.name},{p.cpu_milli},{p.memory_mib},{p.gpus},{p.gpu_milli}" for p in PODS]
    (tmp_path / "pods_a.csv").write_text("\n".join([header, *rows]))
    (tmp_path / "pods_b.csv").write_text("\n".join([header, *rows[2:]]))
    return tmp_path


def play(rule="best_fit", load=1.5, *, queued=False, later=(), stays="memoryless", seed=1):
    how = Churn(load, stays, 8.0)
    return run("t", rule, NODES, PODS, how, seed, queued=queued, later=later)


@pytest.mark.parametrize("stays", ["memoryless", "lognormal", "sized"])
def test_with_too_much_demand_a_fleet_is_full_and_refuses_the_excess(stays):
    outcome = play(stays=stays)
    demanded = sum(each.requested_milli for each in outcome.sizes.values())
    refused = sum(each.refused_milli for each in outcome.sizes.values())
    assert 70 < outcome.allocated_percent <= 100
    assert 0 < refused < demanded
    assert set(outcome.sizes) == {"CPU only", "share", "1 GPU", "4 GPUs"}
    assert outcome.sizes["4 GPUs"].refused > outcome.sizes["share"].refused
    assert sum(each.waited_stays for each in outcome.sizes.values()) == 0


def test_with_a_queue_no_request_is_refused_and_large_requests_wait():
    outcome = play(load=0.9, queued=True)
    assert sum(each.refused for each in outcome.sizes.values()) == 0
    assert outcome.sizes["4 GPUs"].waited_stays > 0
    assert outcome.figures()["wait 4 GPUs"] > outcome.figures()["wait share"]


def test_the_benchmark_sums_held_capacity_over_the_measured_time():
    held = HeldMilli(4000, 10.0)
    lease = Lease(
        "r", "t", "", PolicyRef("", ""), (Share("c", "n", ("0", "1"), 500),), 1, 0.0, 9.0,
        LeaseTerms(9.0), None,
    )  # fmt: skip
    held.note(Granted(lease), 4.0)
    held.note(Ended(lease.id, 15.0, "expired"), 15.0)
    assert held.percent(20.0) == pytest.approx(100 * 1000 * 5 / (4000 * 10))


def runs_of(*allocated, trace="t", rule="fgd"):
    return [
        ChurnRun(
            trace, rule, 1.0, "memoryless", seed, percent, {"share": SizeCount(2, 9, 1, 3)}, 1.0
        )
        for seed, percent in enumerate(allocated)
    ]


def test_means_and_differences_of_equal_seeds_have_standard_errors():
    runs = runs_of(90, 92) + runs_of(91, 93, rule="x") + runs_of(80, 84, trace="u")
    runs += runs_of(82, 86, trace="u", rule="x")
    rows = {(row["trace"], row["rule"]): row for row in churn_report.rows(runs)}
    assert rows["t", "fgd"]["allocated_percent"] == [91, pytest.approx(1)]
    assert rows["t", "x"]["less_baseline"] == [1, 0]
    assert rows["all", "x"]["allocated_percent"] == [88, pytest.approx(1.5)]
    assert rows["all", "x"]["less_baseline"] == [1.5, 0]
    assert rows["all", "x"]["refused_percent share"] == [50, 0]
    assert rows["all", "x"]["refused_percent"][0] == pytest.approx(100 / 3)
    (alone,) = churn_report.rows(runs_of(90))
    assert alone["allocated_percent"] == [90, None]


def test_the_figures_are_plain_json_and_pictures_are_drawn(folder):
    steps = []
    for queued, name in ((False, "a.svg"), (True, "b.png")):
        job = ChurnJob(["fgd", "expected_fill"], [0.8], seeds=2, length=0.1, queued=queued,
                       plots=[folder / name])  # fmt: skip
        figures = churn(folder / "nodes.csv", job=job, progress=steps.append)
        assert json.loads(json.dumps(figures)) == figures
        assert (folder / name).stat().st_size > 1000
        assert churn_report.table(figures).row_count == len(figures["table"]) == 3 * 2
    assert steps[:2] == ["a memoryless 0.8 fgd 1", "a memoryless 0.8 expected_fill 1"]
    assert len(steps) == 2 * 2 * 2 * 2


def test_the_command_prints_a_row_per_trace_and_policy(folder):
    words = ("churn", "--nodes", str(folder / "nodes.csv"), "--seeds=1", "--length=0.2")
    words += ("--rule=spread", "--rule=fgd_learning", "--load=0.9", "--stays=sized", "--queued")
    done = subprocess.run(  # Our own program.
        [sys.executable, "-m", "benchmarks", *words],
        capture_output=True, text=True, check=False, env={"COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = [line.split("│")[1:5] for line in done.stdout.splitlines() if "0.9" in line]
    assert [[cell.strip() for cell in line] for line in shown] == [
        [trace, "sized", "0.9", rule]
        for trace in ("a", "b", "all")
        for rule in ("spread", "fgd_learning")
    ]


def test_errors_name_the_wrong_argument_of_churn(folder):
    with pytest.raises(CommandError, match="--nodes"):
        churn()
    with pytest.raises(CommandError, match="no policy spread_unpriced; there are first_fit"):
        churn(folder / "nodes.csv", job=ChurnJob(["spread_unpriced"]))
    with pytest.raises(CommandError, match=r"plots are \.png or \.svg"):
        churn(folder / "nodes.csv", job=ChurnJob(plots=[folder / "a.pdf"]))
    (folder / "pods_a.csv").write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\nc,1,1,0,0")
    with pytest.raises(CommandError, match="requests for GPUs"):
        churn(folder / "nodes.csv", folder / "pods_a.csv", ChurnJob(seeds=1))

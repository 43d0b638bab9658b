"""Tests of the benchmark `waiting`: how long jobs of a trace wait under each order of the queue."""

import json
import subprocess
import sys

import pytest

from benchmarks.expectations import calibrate
from benchmarks.waiting import ORDERS, WAYS, play, tables, waiting
from benchmarks.waiting_jobs import Job, nodes_for, read_jobs
from moorage.lab.errors import CommandError

# One node: a long job of 8 GPUs waits for a job on 4 of them; a short job may go first.
JOBS = [
    Job(0, 100, 4, "a"),
    Job(1, 100, 8, "a"),
    Job(2, 50, 4, "b"),
    Job(3, 10, 1, "b"),
]


def waits(order, *, backfill, jobs=JOBS):
    played = play(jobs, 1, "best_fit", order, "backfill" if backfill else "strictly")
    return [played.waits[number] for number in range(len(jobs))]


def test_a_strict_queue_lets_no_job_overtake_the_first_job():
    assert waits("first_come", backfill=False) == [0, 99, 198, 197]


def test_backfilled_jobs_overtake_the_first_job_without_delaying_it():
    first, head, *rest = waits("first_come", backfill=True)
    assert (first, head) == (0, 99)
    assert sum(rest) <= 198 + 197


def test_the_order_largest_lets_large_jobs_overtake():
    jobs = [Job(0, 100, 8, "a"), Job(1, 10, 1, "a"), Job(2, 100, 8, "a")]
    assert waits("largest", backfill=False, jobs=jobs) == [0, 199, 98]
    assert waits("first_come", backfill=False, jobs=jobs) == [0, 99, 108]


def test_fair_share_serves_the_tenant_that_holds_less():
    jobs = [Job(0, 100, 8, "a"), Job(1, 100, 4, "a"), Job(2, 100, 4, "a"), Job(3, 100, 4, "b")]
    assert waits("fair_share", backfill=False, jobs=jobs)[3] == 97
    assert waits("first_come", backfill=False, jobs=jobs)[3] == 197


def test_a_job_of_more_than_a_node_takes_whole_nodes():
    jobs = [Job(0, 10, 16, "a")]
    assert nodes_for(jobs, 1_000.0) == 2
    assert play(jobs, 2, "best_fit", "first_come", "backfill").waits == {0: 0}


def test_a_small_job_that_gives_way_after_an_hour_loses_its_work():
    jobs = [Job(0, 10_000, 4, "a"), Job(10, 100, 8, "a")]
    played = play(jobs, 1, "best_fit", "largest", "preemption")
    assert played.waits == {0: 3700, 1: 3590}
    assert played.lost_gpu_hours == 4.0


def test_durations_of_similar_jobs_predict_better_than_deadlines():
    """Jobs of ten minutes, each requested for an hour, run one at a time; eight wait at a time."""
    jobs = [Job(max(n / 10, 600 * (n - 8)), 600, 8, "a") for n in range(60)]
    found = calibrate(jobs, 1, "best_fit")
    assert found["compared"] > 20
    errors = found["error_median_seconds"]
    assert errors["history"] < 0.2 * errors["deadlines"]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "jobs.csv"
    rows = [f"2017-09-23 09:45:{j.at:02},{j.seconds},{j.gpus},{j.cluster}" for j in JOBS]
    path.write_text("\n".join(["timestamp,duration,num_gpus,cluster", *rows]))
    return path


@pytest.mark.heavy
def test_the_command_prints_a_row_for_each_order(trace, tmp_path):
    picture = tmp_path / "waits.svg"
    command = [sys.executable, "-m", "benchmarks", "waiting", "--pods", str(trace)]
    more = ["--load", "100", "--plot", str(picture), "--json"]
    output = subprocess.run([*command, *more], check=True, capture_output=True, text=True).stdout
    figures = json.loads(output)["waiting"]
    assert [(row["order"], row["backfill"]) for row in figures["table"]] == [
        (order, way != "strictly") for order in ORDERS for way in WAYS[order]
    ]
    assert (figures["jobs"], figures["nodes"]) == (4, 1)
    assert picture.read_text().startswith("<?xml")
    assert figures["expected"].keys() >= {"waiting", "compared", "error_p90_seconds"}
    orders, errors = tables(figures)
    assert (orders.row_count, errors.row_count) == (7, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("timestamp,duration,num_gpus,cluster\n2017-09-23,x,1,a", "line 2: .*'x'"),
        ("when,duration\n1,2", "line 2: .*expected timestamp,duration"),
        ("timestamp,duration,num_gpus,cluster", "asks for no GPUs"),
    ],
)
def test_errors_name_the_fault_in_a_trace(tmp_path, text, said):
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    with pytest.raises(CommandError, match=said):
        read_jobs(path)


def test_without_a_trace_the_error_names_the_needed_file():
    with pytest.raises(CommandError, match="--pods"):
        waiting()

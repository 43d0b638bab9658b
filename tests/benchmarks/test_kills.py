"""The daemon is killed at random moments under load: nothing is lost, started twice or left."""

import json
import subprocess
import sys

import pytest

FINDINGS = (
    "double_starts",
    "shared_gpus",
    "lost_leases",
    "never_started",
    "orphans",
    "left_behind",
)


def play_kills(*words: str) -> dict:
    """Run the benchmark in a separate process, since it adopts the orphans of its daemons."""
    command = [sys.executable, "-m", "benchmarks", "kills", "--json", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["kills"]
    assert [name for name in FINDINGS if figures[name] != 0] == []
    return figures


@pytest.mark.heavy
def test_after_kills_no_process_is_left_and_no_workload_started_twice():
    figures = play_kills("--kills", "4")
    assert figures["kills"] == 4
    assert figures["leases_granted"] >= 8
    assert figures["workloads_started"] >= 8


@pytest.mark.heavy
def test_after_kills_no_container_is_left_and_no_workload_started_twice(
    container_engine, container_image
):
    figures = play_kills("--kills", "3", "--category", "container", "--image", container_image)
    assert figures["workloads_started"] >= 4
    assert container_engine.containers(all=True) == []


def test_an_unknown_kind_of_workload_is_refused():
    command = [sys.executable, "-m", "benchmarks", "kills", "--category", "pod"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "process or container, not pod" in done.stderr

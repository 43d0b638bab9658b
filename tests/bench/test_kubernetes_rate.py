"""Tests of the rate of grants beside the rate of pods that a real kube-scheduler binds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moorage.bench.kubernetes_rate import per_second

TOOLS = Path(__file__).parents[1] / "kubernetes" / "kubernetes_binaries.py"


def test_the_rate_leaves_out_the_incomplete_seconds_at_the_start_and_the_end() -> None:
    steady = [float(second) for second in range(100, 110) for _ in range(50)]
    assert per_second(steady) == pytest.approx(50)
    slow_at_first = [90.0, 95.0, *steady]
    assert per_second(slow_at_first) == pytest.approx(50, rel=0.02)


def bench(nodes: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "moorage", "bench", "kubernetes", "--nodes", nodes, "--json"]
    given = {**os.environ, **environment}
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False)


def table(path: Path, gpus: int) -> Path:
    rows = "".join(f"n{number},64000,262144,{gpus},A100\n" for number in range(5))
    path.write_text(f"sn,cpu_milli,memory_mib,gpu,model\n{rows}")
    return path


@pytest.mark.heavy
@pytest.mark.kubernetes
def test_moorage_and_kube_scheduler_place_the_same_demand_on_the_same_nodes(tmp_path: Path) -> None:
    built = subprocess.run([sys.executable, TOOLS], capture_output=True, text=True, check=True)
    if "kube-scheduler: " not in built.stdout:
        pytest.skip(built.stderr)
    done = bench(table(tmp_path / "nodes.csv", 8))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["kubernetes"]
    assert [figures[name] for name in ("nodes", "pods", "pods_bound", "grants")] == [5, 32, 32, 32]
    grants = figures["grants_per_second"]
    assert figures["grants_to_pods"] == grants / figures["pods_per_second"]
    assert figures["grants_to_ready_pods"] == grants / figures["ready_pods_per_second"]


def test_errors_name_too_few_gpus_and_missing_programs(tmp_path: Path) -> None:
    few = bench(table(tmp_path / "few.csv", 1))
    assert "20 GPUs" in few.stdout + few.stderr
    nothing = {name: str(tmp_path) for name in ("KUBEBUILDER_ASSETS", "XDG_CACHE_HOME", "PATH")}
    missing = bench(table(tmp_path / "nodes.csv", 8), **nothing)
    assert missing.returncode != 0
    assert "make kubernetes-tools" in missing.stdout + missing.stderr

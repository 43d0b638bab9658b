"""Tests of the comparison with the published table: the figures, and when two means agree."""

import json
import subprocess
import sys

import pytest

from benchmarks.placement import PUBLISHED, PUBLISHED_AS, compare, placement
from moorage.lab.errors import CommandError

HEADER = "trace,policy,runs,allocated_percent_at_130_mean,allocated_percent_at_130_stdev,"


@pytest.fixture
def folder(tmp_path):
    """A cluster of 40 GPUs, a trace that fills it, and published figures, some of them wrong."""
    rows = [f"n{number},64000,262144,4,T4" for number in range(10)]
    (tmp_path / "nodes.csv").write_text("\n".join(["sn,cpu_milli,memory_mib,gpu,model", *rows]))
    rows = [f"p{number:03},1000,1024,1,1000" for number in range(60)]
    pods = "\n".join(["name,cpu_milli,memory_mib,num_gpu,gpu_milli", *rows])
    (tmp_path / "pods_full.csv").write_text(pods)
    figures = {"best_fit": "100.2,0.1,100", "random": "99.0,0.1,99", "fgd": "98,4,98"}
    rows = [f"full,{PUBLISHED_AS[rule]},10,{found}" for rule, found in figures.items()]
    lines = [f"{HEADER}allocated_percent_at_100_mean", *rows]
    (tmp_path / PUBLISHED).write_text("\n".join(lines))
    return tmp_path


def comparison(folder, *rules, seeds=(1, 2)):
    return compare(folder / "nodes.csv", [folder / "pods_full.csv"], rules, seeds)


def test_two_means_agree_if_they_differ_by_few_points_or_two_standard_errors(folder):
    near, far, scattered = comparison(folder, "best_fit", "random", "fgd")
    assert [each.reached for each in (near, far, scattered)] == [100, 100, 100]
    assert (near.allowed, near.agrees) == (0.3, True)
    assert (far.allowed, far.agrees) == (0.3, False)
    assert (scattered.allowed, scattered.agrees) == (pytest.approx(2 * 4 / 10**0.5), True)
    assert near.difference == pytest.approx(-0.2)


def test_errors_name_the_wrong_argument_of_placement(folder):
    with pytest.raises(CommandError, match="--nodes"):
        placement()
    with pytest.raises(CommandError, match=r"no policy spread; there are random, "):
        comparison(folder, "spread")
    (folder / "pods_full.csv").unlink()
    with pytest.raises(CommandError, match=r"no pods_\*.csv"):
        placement(folder / "nodes.csv")


def test_a_trace_without_published_figures_has_only_our_figures(folder):
    (folder / PUBLISHED).unlink()
    words = ("placement", "--nodes", str(folder / "nodes.csv"), "--seeds=1", "--rule=fgd")
    done = subprocess.run(  # Our own program.
        [sys.executable, "-m", "benchmarks", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if "full" in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["full", "fgd", "100.00 ± 0.00"]
    assert "published" not in done.stdout


def test_the_table_is_plain_json(folder):
    steps = []
    (folder / PUBLISHED).write_text(
        "\n".join(
            [f"{HEADER}allocated_percent_at_100_mean"]
            + [f"full,{name},10,100,0.1,100" for name in PUBLISHED_AS.values()]
        )
    )
    figures = placement(folder / "nodes.csv", seeds=2, progress=steps.append)
    assert json.loads(json.dumps(figures)) == figures
    assert (figures["agree"], figures["of"]) == (6, 6)
    assert steps[:2] == ["full random 42", "full random 43"]
    assert len(steps) == 12

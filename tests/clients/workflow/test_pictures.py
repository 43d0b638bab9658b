"""Tests of the views of a run: the progress bar in a terminal, and the picture."""

import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from moorage.extras import install_command
from moorage.model import ClusterId, NodeId, Share
from moorage_client.workflow import (
    ExecutionCallbacks,
    ExecutionResult,
    ProgressBar,
    ResourceAwareExecutor,
    ResourcePool,
    ResourceRequirements,
    WorkflowError,
    draw_timeline,
)
from tests.clients.workflow.graphs import graph


@pytest.fixture
def result() -> ExecutionResult:
    """The result of a run: two nodes share a pool of GPUs, one fails, and one follows it."""
    dag = graph("load", "train", "broken", "after", edges="load>train broken>after")
    needs = {name: ResourceRequirements({"gpu": 1, "cpu": 2}) for name in dag}
    executor = ResourceAwareExecutor(dag, ResourcePool({"gpu": 2, "cpu": 8}), needs)
    return executor.execute(
        {**dict.fromkeys(dag, lambda: sum(range(999))), "broken": lambda: 1 / 0}
    )


def draw_picture(result, path) -> str:
    """Draw a run; return the picture as SVG that contains text as characters."""
    import matplotlib as mpl  # noqa: PLC0415  # An extra.

    with mpl.rc_context({"svg.fonttype": "none"}):
        draw_timeline(result, path)
    return path.read_text()


@pytest.mark.heavy  # The extra `plots`.
def test_the_picture_has_every_node_that_ran_and_every_resource(result, tmp_path):

    for name in ("load", "train", "broken"):
        # Tasks take microseconds: on a busy machine one may be too short to show its name.
        result[name].duration_seconds = 1.0
    svg = ET.fromstring(draw_picture(result, tmp_path / "run.svg"))  # noqa: S314  # Our own data.
    words = [text.strip() for text in ("".join(each.itertext()) for each in svg.iter()) if text]
    for word in ("load", "train", "broken", "gpu", "cpu", "seconds", "completed", "failed"):
        assert word in words
    assert "after" not in words, "the node never ran"
    draw_timeline(result, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.heavy  # The extra `plots`.
def test_the_picture_groups_nodes_by_the_place_where_they_ran(result, tmp_path):
    for name, node in (("load", "n0"), ("train", "n1"), ("broken", "n0")):
        result[name].placement = (Share(ClusterId("lab"), NodeId(node), ("0",)),)
    svg = draw_picture(result, tmp_path / "run.svg")
    assert {"lab/n0", "lab/n1"} <= set(re.findall(r">(\S+)<", svg))


@pytest.mark.heavy  # The extra `plots`.
def test_the_picture_does_not_draw_names_of_nodes_as_formulas(tmp_path):
    dag, need = graph("$x$", r"$\frac$"), ResourceRequirements({r"$\foo$": 1})
    executor = ResourceAwareExecutor(dag, ResourcePool({r"$\foo$": 1}), dict.fromkeys(dag, need))
    result = executor.execute(dict.fromkeys(dag, lambda: 1))
    for each in result.node_results.values():
        each.duration_seconds = 1.0  # Long enough to show the name.
        each.placement = (Share(ClusterId("$lab$"), NodeId("n0"), ("0",)),)
    words = re.findall(r">\s*([^<>\s]+)\s*<", draw_picture(result, tmp_path / "run.svg"))
    assert {"$x$", r"$\frac$", r"$\foo$", "$lab$/n0"} <= set(words)


@pytest.mark.heavy  # The extra `plots`.
def test_the_error_says_why_a_picture_cannot_be_drawn(result, tmp_path):
    with pytest.raises(WorkflowError, match="cannot draw into"):
        draw_timeline(result, tmp_path / "run.nonsense")
    with pytest.raises(WorkflowError, match="cannot draw into"):
        draw_timeline(result, tmp_path / "nowhere" / "run.svg")
    empty = ResourceAwareExecutor(graph("a"), ResourcePool({})).execute({})
    with pytest.raises(WorkflowError, match="nothing to draw"):
        draw_timeline(empty, tmp_path / "run.svg")


def test_without_matplotlib_only_pictures_fail_and_the_error_names_the_extra():
    program = """
import sys
sys.modules["matplotlib"] = sys.modules["matplotlib.figure"] = None
from moorage_client.workflow import *
dag = DAG.builder().add_node("a").build()
result = ResourceAwareExecutor(dag, ResourcePool({})).execute({"a": lambda: 1})
try:
    draw_timeline(result, "a.svg")
except WorkflowError as error:
    print(error)
"""
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert install_command("plots") in said


def test_the_progress_bar_counts_ended_nodes_and_names_running_ones():
    dag = graph("[/a]", "bad", "after", edges="bad>after")
    screen, started = io.StringIO(), []
    console = Console(file=screen, force_terminal=True, width=100)
    own = ExecutionCallbacks(on_start=started.append)
    with ProgressBar(dag, own, console) as bar:
        executor = ResourceAwareExecutor(dag, ResourcePool({}), callbacks=bar.callbacks)
        executor.execute({"[/a]": bar._progress.refresh, "bad": lambda: 1 / 0})
    shown = screen.getvalue()
    assert "[/a]" in shown
    assert "1 failed, 1 skipped" in shown
    assert "3/3" in shown
    assert sorted(started) == ["[/a]", "bad"]


def test_without_a_terminal_the_progress_bar_is_written_once():
    screen = io.StringIO()
    dag = graph("a", "b")
    with ProgressBar(dag, console=Console(file=screen, width=100), done=1) as bar:
        executor = ResourceAwareExecutor(graph("b"), ResourcePool({}), callbacks=bar.callbacks)
        assert executor.execute({"b": lambda: 1}).succeeded == 1
    assert screen.getvalue().count("2/2") == 1

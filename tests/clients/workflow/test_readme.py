"""The README of workflows: its examples run, and its names exist."""

import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from moorage.testing.daemon_process import daemon
from moorage_client import workflow
from moorage_client.workflow import LeasedPool, ResourceAwareExecutor
from moorage_client.workflow.schedule import PASSED_MAX
from moorage_client.workflow.waiting import OVERTAKEN_MAX
from moorage_policies import catalog

FOLDER = Path(workflow.__file__).parent
DECISIONS = FOLDER.parents[2] / "docs/reference/resource-scheduling.md"
TEXT = (FOLDER / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SHELL = [each for each in EXAMPLES if each.startswith(">>> ")]
LOCAL = [each for each in EXAMPLES if "LeasedPool(" not in each and each not in SHELL]
(LEASED,) = [each for each in EXAMPLES if "LeasedPool(" in each]


def run(text: str, folder: Path, **variables: str) -> str:
    command = [sys.executable, "-W", "error", "-c", text]
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.heavy  # The extra `plots`.
@pytest.mark.parametrize("text", LOCAL)
def test_examples_without_a_server_run(text, tmp_path):
    shown = run(text, tmp_path)
    files = re.findall(r'"(\w+\.(?:json|svg))"', text)
    assert files
    assert all((tmp_path / name).stat().st_size for name in files)
    assert "4 0.93" in shown or "svg" in text


@pytest.mark.parametrize("text", SHELL)
def test_examples_of_the_python_shell_run(text):
    example = doctest.DocTestParser().get_doctest(text, {}, "README.md", None, 0)
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.heavy
def test_the_example_with_a_server_runs(tmp_path):
    gpus = [{"modelName": "A100", "memory": 81_920}] * 2
    node = {"id": "n0", "gpus": {"count": 2, "gpus": gpus}, "vcpus": {"count": 8}, "memory": 4096}
    with daemon() as running:
        document = {"id": "lab", "nodes": {"nodeData": [node]}}
        httpx.post(f"{running.http}/clusters", json=document).raise_for_status()
        policy = catalog.document("first_fit")
        httpx.post(f"{running.http}/policy", json=policy).raise_for_status()
        shown = run(LEASED, tmp_path, MOORAGE_URL=running.ws, PATH="/usr/bin:/bin")
    assert "a runs on n0" in shown
    assert re.search(r"GPUs [01]\n", shown)


def test_the_readme_names_every_argument_and_every_file():
    words = set(re.findall(r"`(\w+)`", TEXT))
    arguments = set(inspect.signature(ResourceAwareExecutor).parameters)
    assert arguments - words == {"dag", "resource_pool"}
    files = {each.stem for each in FOLDER.glob("*.py")} - {"__init__"}
    assert files - words == set()


def test_the_readme_has_the_variables_and_numbers_of_the_code():
    variables = set(
        re.findall(r'"([A-Z_]{8,})":', inspect.getsource(inspect.getmodule(LeasedPool)))
    )
    assert len(variables) >= 5
    assert all(f"`{name}`" in TEXT for name in variables)
    assert f"overtaken by smaller requests {OVERTAKEN_MAX} times" in TEXT
    decisions = " ".join(DECISIONS.read_text().split())
    assert f"after {PASSED_MAX} nodes with smaller needs have overtaken a node" in decisions
    assert f"After {OVERTAKEN_MAX} more nodes have overtaken it" in decisions

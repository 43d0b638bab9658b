"""The tests run in any folder, also without git, and no test is skipped silently."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy

SKIPPING = """
import pytest

def test_with_everything():
    assert [1]

@pytest.mark.skipif(True, reason="no prometheus here: apt-get install prometheus")
def test_of_a_tool():
    assert [1]

def test_of_the_machine():
    pytest.skip("root may look into every process")
"""
SKIPPED_WHOLE = "import pytest\npytest.importorskip('nonesuch', reason='no nonesuch')\n"

FLAKY = """
tries = []

def test_that_passes_at_its_second_try():
    tries.append(1)
    assert len(tries) > 1, "the reason of the first failure"
"""


def test_without_git_the_ignored_files_are_left_out_too(names, tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text(".venv*/\n__pycache__/\n*.pyc\n/data/\n")
    sources = ("README.md", "data.py", "server/data/own.py", "server/moorage/a.py")
    made = (".git/HEAD", ".venv-3.13/x.py", "data/x.db", "server/__pycache__/a.pyc", "b.pyc")
    for name in (*sources, *made):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert names(tmp_path) == [".gitignore", *sources]


def play(root: Path, folder: Path, *flags: str) -> tuple[int, str]:
    """Run the tests of a folder under the common conftest."""
    shutil.copy(root / "tests" / "conftest.py", folder)
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--rootdir", folder, *flags, folder]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    environment["PYTHONPATH"] = str(root)  # To import `benchmarks`.
    ran = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return ran.returncode, ran.stdout


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_the_option_skips_fail_makes_a_skipped_test_fail(
    root: Path, tmp_path: Path, workers: tuple[str, ...]
) -> None:
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    assert play(root, tmp_path, *workers)[0] == 0
    code, shown = play(root, tmp_path, "--skips-fail", *workers)
    assert code == 1
    assert "1 passed, 1 skipped, 1 error" in shown
    assert "no prometheus here: apt-get install prometheus" in shown
    (tmp_path / "test_skipping.py").write_text(SKIPPED_WHOLE)
    code, shown = play(root, tmp_path, "--skips-fail", *workers)
    assert code not in {0, 5}
    assert "no nonesuch" in shown


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_the_first_failure_is_shown_if_the_second_try_passes(
    root: Path, tmp_path: Path, workers: tuple[str, ...]
) -> None:
    (tmp_path / "test_flaky.py").write_text(FLAKY)
    code, shown = play(root, tmp_path, "--reruns", "1", *workers)
    assert code == 0
    assert "1 passed, 1 rerun" in shown
    assert "AssertionError: the reason of the first failure" in shown

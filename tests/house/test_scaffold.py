"""The backend made by `tools/add_backend.py` runs at once, and few files name a backend."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moorage.backends.registry import kinds
from moorage.setting_kinds import read_settings

TREES = ("server", "policies", "clients", "benchmarks", "tests", "tools", "docs")
# Files that name Ray, AWS or Kubernetes for other reasons than backends: policy workers, separate
# libraries, a benchmark, and sources of `moorage fleet import`.
OTHER_USES = re.compile(
    r"server/moorage/(sandbox|slices|resources|bench|ray_devices|commands/display)"
    r"|clients/moorage_client/inventory/"
)
OUTSIDE_MAX = 3


@pytest.mark.parametrize("name", ["aws", "kubernetes", "ray"])
def test_few_files_outside_the_folder_of_a_backend_name_it(root: Path, sources, name: str) -> None:
    """Such a file imports a backend, has its name, uses its settings, or describes it."""
    words = [
        f"moorage.backends.{name}",
        *(each + "\\b" for each in read_settings(kinds()[name].settings)),
    ]
    named = re.compile(rf"""(["']){name}\1|{"|".join(words)}""")
    files = {
        each.name
        for each in sources
        if each.name.startswith(("server/", "clients/"))
        and not each.name.startswith(f"server/moorage/backends/{name}/")
        and not OTHER_USES.match(each.name)
        and named.search(each.text)
    }
    for file, word in (("pyproject.toml", f"\n{name} = ["), (f"docs/how-to/{name}.md", name)):
        if word in (root / file).read_text():
            files.add(file)
    assert len(files) <= OUTSIDE_MAX, sorted(files)


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__", "node_modules")
    for tree in TREES:
        shutil.copytree(root / tree, tmp_path / tree, ignore=ignore)
    shutil.copy(root / "pyproject.toml", tmp_path)
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(folder / each) for each in ("server", "policies", "clients"))
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "MYPYPATH": str(folder / "server")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.heavy
def test_a_new_backend_runs_the_tests_of_all_backends(copy: Path) -> None:
    made = run(copy, "tools/add_backend.py", "tide_pool")
    assert made.returncode == 0, made.stderr
    assert run(copy, "tools/add_backend.py", "tide_pool").stderr.startswith("tide_pool is taken")
    for check in (("check",), ("format", "--check")):
        checked = run(copy, "-m", "ruff", *check, "server", "tests/backends")
        assert checked.returncode == 0, checked.stdout
    typed = run(copy, "-m", "mypy", "--follow-imports=silent", "-p", "moorage.backends.tide_pool")
    assert typed.returncode == 0, typed.stdout
    assert "\n## What can go wrong\n" in (copy / "docs/how-to/tide_pool.md").read_text()
    names = "import moorage.backends.registry as r; print(*r.kinds())"
    assert "tide_pool" in run(copy, "-c", names).stdout
    conformance = ("tests/conformance/test_backend.py", "-k", "tide_pool")
    tested = run(copy, "-m", "pytest", "-q", "tests/backends/tide_pool", *conformance)
    assert tested.returncode == 0, tested.stdout
    assert re.search(r"[1-9]\d* xfailed", tested.stdout), tested.stdout

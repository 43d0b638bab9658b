"""What the rules of the house look at: the files of the tree, and the Python among them."""

import ast
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("server/moorage", "policies/moorage_policies", "clients/moorage_client")


@dataclass(frozen=True)
class Source:
    """One text file of the tree, by its path from the root."""

    name: str

    @property
    def path(self) -> Path:
        return ROOT / self.name

    @cached_property
    def text(self) -> str:
        return self.path.read_text(errors="replace")

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name)


def _names() -> list[str]:
    """Return all files of the tree, those included that are not committed yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return sorted(name for name in set(listed.stdout.splitlines()) if (ROOT / name).is_file())
    # An unpacked archive has no git, and nothing in it but the tree and what the tests made.
    made = {".git", "build", "dist", "__pycache__"}
    files = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return sorted(
        str(path)
        for path in files
        if not any(
            part in made or part.startswith(".venv") or part.endswith("_cache")
            for part in path.parts
        )
    )


_SOURCES = [Source(name) for name in _names()]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def tree() -> list[Source]:
    """Every text file."""
    return [each for each in _SOURCES if not each.name.endswith((".gz", ".png", ".zip"))]


@pytest.fixture(scope="session")
def sources() -> list[Source]:
    """Every Python file of the product."""
    return [
        each for each in _SOURCES if each.name.startswith(PACKAGES) and each.name.endswith(".py")
    ]


@pytest.fixture(scope="session")
def tests() -> list[Source]:
    """Every Python file of the tests."""
    return [
        each for each in _SOURCES if each.name.startswith("tests/") and each.name.endswith(".py")
    ]


@pytest.fixture(scope="session")
def mutant() -> Callable[[str], Source]:
    """Make a source of a given text, to see that a check sees what it should."""

    def make(text: str) -> Source:
        source = Source("mutant.py")
        source.__dict__["text"] = text
        return source

    return make

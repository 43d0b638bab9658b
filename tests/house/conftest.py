"""Fixtures with the files of the tree and its Python sources, for the house rules."""

import ast
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pathspec
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "server/moorage",
    "policies/moorage_policies",
    "clients/moorage_client",
    "benchmarks",
)


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

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the syntax tree, since many checks read all of them."""
        return list(ast.walk(self.tree))


def names(root: Path) -> list[str]:
    """Return all files of a tree, including files that are not committed yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    if (root / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if listed.returncode == 0:  # Git refuses a tree of another user.
            return sorted(
                name for name in set(listed.stdout.splitlines()) if (root / name).is_file()
            )
    # Without git: an unpacked archive, perhaps inside another repository.
    ignored = [".git", *(root / ".gitignore").read_text().splitlines()]
    files = pathspec.GitIgnoreSpec.from_lines(ignored).match_tree_files(root, negate=True)
    return sorted(files)


_SOURCES = [Source(name) for name in names(ROOT)]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session", name="names")
def _names() -> Callable[[Path], list[str]]:
    return names


@pytest.fixture(scope="session")
def tree() -> list[Source]:
    """All text files of the tree."""
    return [each for each in _SOURCES if not each.name.endswith((".gz", ".png", ".zip"))]


@pytest.fixture(scope="session")
def sources() -> list[Source]:
    """All Python files of the product."""
    return [
        each for each in _SOURCES if each.name.startswith(PACKAGES) and each.name.endswith(".py")
    ]


@pytest.fixture(scope="session")
def tests() -> list[Source]:
    """All Python files of the tests."""
    return [
        each for each in _SOURCES if each.name.startswith("tests/") and each.name.endswith(".py")
    ]


@pytest.fixture(scope="session")
def mutant() -> Callable[..., Source]:
    """Build a source from a text, to check that a rule finds its violations."""

    def make(text: str, name: str = "mutant.py") -> Source:
        source = Source(name)
        source.__dict__["text"] = text
        return source

    return make

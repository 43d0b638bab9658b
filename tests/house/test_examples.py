"""Examples of docstrings and READMEs name policies that ship, or that the page itself registers."""

import ast
import re

import pytest

from moorage_policies import catalog

URI = re.compile(r"\b([a-z][a-z0-9_-]*):(\d[\w.]*-[a-z]+)\b")
SHIPPED = f"{catalog.VERSION}-{catalog.RELEASE_TAG}"


def docstrings(file) -> list[str]:
    """Return the docstrings of a file, those of attributes too."""
    return [
        node.value.value
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def nowhere_to_be_found(file, prose: list[str]) -> list[str]:
    """Return the URIs of policies that neither ship nor are registered in the same file."""
    return [
        f"{file.name}: {name}:{version}"
        for text in prose
        for name, version in URI.findall(text)
        if not (name in catalog.shipped() and version == SHIPPED)
        and f"--uri {name}:" not in file.text
    ]


def test_docstrings_name_policies_that_ship(sources) -> None:
    assert [each for file in sources for each in nowhere_to_be_found(file, docstrings(file))] == []


def test_readmes_name_policies_that_ship(tree) -> None:
    pages = [each for each in tree if each.name.endswith(".md")]
    assert len(pages) > 3
    assert [each for page in pages for each in nowhere_to_be_found(page, [page.text])] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"""Ask `first_fit:1.0-stable`."""', 0),
        ('"""Ask `first-fit:1-stable`."""', 1),
        ('"""Ask `best_fit:1-stable`."""', 1),
        ('class Client:\n    """Ask `worst_fit:1.0-stable`."""', 1),
        ('"""Push it with `--uri mine:1-x`, then ask `mine:2-x`."""', 0),
        ('"""A policy, `name:version-tag`; `http://registry:3000`."""', 0),
    ],
)
def test_what_counts_as_a_policy_that_is_nowhere(mutant, text: str, found: int) -> None:
    file = mutant(text)
    assert len(nowhere_to_be_found(file, docstrings(file))) == found

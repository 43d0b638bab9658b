"""No module imports itself by way of others, not even for types or within a function."""

import ast
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest


def module_of(name: str) -> str:
    """Return the dotted name of a source by its path from the root."""
    parts = name.removesuffix(".py").split("/")[name.count("/") > 1 :]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.Module, modules: Iterable[str]) -> set[str]:
    """Return those of `modules` that a source imports anywhere."""
    known = set(modules)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                inner = f"{node.module}.{each.name}"
                found.add(inner if inner in known else node.module)
        elif isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
    return found & known


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Return a circle of a graph, or nothing where it has none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle_of_imports(sources) -> None:
    trees = {module_of(each.name): each.tree for each in sources}
    assert circle({name: imports_of(tree, trees) - {name} for name, tree in trees.items()}) == []


@pytest.mark.parametrize(
    ("graph", "expected"),
    [({"a": ["b"], "b": []}, False), ({"a": ["b"], "b": ["c"], "c": ["a"]}, True)],
)
def test_what_counts_as_a_circle(graph: dict[str, list[str]], expected: bool) -> None:
    assert bool(circle(graph)) == expected

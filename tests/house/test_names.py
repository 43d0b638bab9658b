"""One name for one thing: a public class is defined once, and no name is a metaphor."""

import ast
import re
from collections import defaultdict

import pytest

# Names that several modules define, and why.
SEVERAL = {
    "AIOSv1PolicyRule": "Every policy has a class of this documented name.",
    "APIError": "Documented; cells have clients of their own, and import no client package.",
    "ClusterClient": "As APIError.",
    "GlobalClusterMetricsClient": "As APIError.",
    "ResourcePool": "Documented of slots and of workflows.",
    "Allocator": "Documented of slots; the core's is the allocator of the whole server.",
    "Inventory": "Documented of slots; the client's is what a site's own tools say.",
    "Outcome": "Documented of slots; the model's is part of stored facts.",
    "Lease": "That of `records` has what a holder may see.",
}
METAPHORS = re.compile(
    r"(?:^|_)(crank|desk|nursery|obituar(?:y|ies)|mourn|shelf|shelves|wings)(?:_|$)",
    re.IGNORECASE,
)


def classes(sources) -> dict[str, list[str]]:
    found = defaultdict(list)
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(source.name)
    return found


def test_a_public_class_is_defined_once(sources) -> None:
    several = {name: places for name, places in classes(sources).items() if len(places) > 1}
    assert {name: places for name, places in several.items() if name not in SEVERAL} == {}


def test_no_exception_is_kept_that_is_not_needed(sources) -> None:
    several = {name for name, places in classes(sources).items() if len(places) > 1}
    assert set(SEVERAL) - several == set()


def names(source) -> set[str]:
    """Return all names that a source gives to classes, functions, arguments and variables."""
    found = set()
    for node in ast.walk(source.tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                found.add(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name))
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.add(name)
    return found


def test_no_name_is_a_metaphor(sources) -> None:
    metaphors = {
        f"{source.name}: {name}"
        for source in sources
        for name in names(source)
        if METAPHORS.search(name)
    }
    assert metaphors == set()


@pytest.mark.parametrize(
    ("name", "metaphor"), [("_crank", True), ("shelf_of", True), ("showing", False)]
)
def test_what_counts_as_a_metaphor(name: str, metaphor: bool) -> None:
    assert bool(METAPHORS.search(name)) == metaphor

"""A part of the catalog has a small face, and an operation on it is written down few times."""

import ast
from collections.abc import Iterator

import pytest

METHODS_MAX = 12
PORTS = (
    "server/moorage/catalog/ports.py",
    "server/moorage/protocol/registry.py",
    "server/moorage/web/services.py",
)
DECLARATIONS_MAX = 3
"""The endpoint, the Protocol, the store."""
PLACES = tuple(f"server/moorage/{each}/" for each in ("web", "protocol", "catalog", "daemon"))
# What the endpoints name, and the end of the name of a class that serves it.
NOUNS = {"cluster": ("Clusters", "DocumentCollection"), "metrics": ("Metrics",)}


def protocols(sources) -> dict[str, set[str]]:
    """Return the methods of each Protocol, those of the Protocols that it extends included."""
    found: dict[str, set[str]] = {}
    for source in sorted(sources, key=lambda each: each.name, reverse=True):
        for node in source.tree.body:
            bases = [base.id for base in getattr(node, "bases", ()) if isinstance(base, ast.Name)]
            if "Protocol" in bases:
                methods = (ast.FunctionDef, ast.AsyncFunctionDef)
                own = {each.name for each in node.body if isinstance(each, methods)}
                found[node.name] = own.union(*(found.get(base, set()) for base in bases))
    return found


def declared(source) -> Iterator[tuple[str, str]]:
    """Yield what a source declares: the class it stands in, if in one, and the name.

    What is handed on under a name of its own (`self.update_cluster = catalog.clusters.update`) is
    declared once more; what is made there (`self.update = refuse(…)`) is not.
    """
    for node in ast.walk(source.tree):
        owner = node.name if isinstance(node, ast.ClassDef) else ""
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                yield owner, each.name
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            yield from (
                ("", target.attr) for target in node.targets if isinstance(target, ast.Attribute)
            )


def declarations(sources, noun: str, verb: str) -> list[str]:
    """Return where an operation is declared on the way from HTTP to the embedded store."""
    spelled = {f"{verb}_{noun}", f"{verb}_{noun}s"}
    return [
        f"{source.name}: {owner}.{name}"
        for source in sources
        if source.name.startswith(PLACES) and "/mirrored/" not in source.name
        for owner, name in declared(source)
        if "Block" not in owner  # Their metrics are another part.
        and (name in spelled or (name == verb and owner.endswith(NOUNS[noun])))
    ]


def test_a_protocol_has_at_most_twelve_methods(sources) -> None:
    ports = protocols([each for each in sources if each.name in PORTS])
    parts = {"DocumentCollection", "Metrics", "Blocks", "Policies", "ClusterSearch", "Freshness"}
    assert parts | {"Publications", "AliasChanges", "BlockActions"} <= set(ports)
    assert {name: len(own) for name, own in ports.items() if len(own) > METHODS_MAX} == {}
    assert ports["Blocks"] > ports["BlockDocuments"]


def test_a_protocol_of_thirteen_methods_is_found(mutant) -> None:
    methods = "".join(f"    def f{number}(self): ...\n" for number in range(METHODS_MAX + 1))
    (found,) = protocols([mutant("class Wide(Protocol):\n" + methods)]).values()
    assert len(found) > METHODS_MAX


def test_an_operation_is_declared_at_most_three_times(sources) -> None:
    ports = protocols([each for each in sources if each.name in PORTS])
    verbs = {"cluster": ports["DocumentCollection"], "metrics": ports["Metrics"]}
    found = {
        f"{verb} {noun}": declarations(sources, noun, verb)
        for noun in NOUNS
        for verb in sorted(verbs[noun])
    }
    assert {name: at for name, at in found.items() if len(at) > DECLARATIONS_MAX} == {}
    assert len(found["update cluster"]) == DECLARATIONS_MAX  # All three are seen.


@pytest.mark.parametrize(
    "text",
    [
        "class Front:\n    async def update_cluster(self, name, change): ...\n",
        "def front(self, of):\n    self.update_cluster = of.clusters.update\n",
        "class FrontClusters:\n    async def update(self, name, change): ...\n",
    ],
)
def test_a_fourth_declaration_is_found(mutant, text: str) -> None:
    source = mutant(text, "server/moorage/daemon/front.py")
    assert len(declarations([source], "cluster", "update")) == 1

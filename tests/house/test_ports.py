"""A part of the catalog has a small face: whoever stands in for one has little to write."""

import ast

METHODS_MAX = 12
PORTS = ("server/moorage/catalog/ports.py", "server/moorage/protocol/registry.py")


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


def test_a_protocol_of_the_catalog_has_at_most_twelve_methods(sources) -> None:
    ports = protocols([each for each in sources if each.name in PORTS])
    assert {"Clusters", "Metrics", "Blocks", "Policies", "ClusterSearch", "Freshness"} <= set(ports)
    assert {name: len(own) for name, own in ports.items() if len(own) > METHODS_MAX} == {}
    assert ports["Blocks"] > ports["BlockDocuments"]


def test_a_protocol_of_thirteen_methods_is_found(mutant) -> None:
    methods = "".join(f"    def f{number}(self): ...\n" for number in range(METHODS_MAX + 1))
    (found,) = protocols([mutant("class Wide(Protocol):\n" + methods)]).values()
    assert len(found) > METHODS_MAX

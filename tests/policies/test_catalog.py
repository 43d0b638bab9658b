"""Tests of the shipped policies as they are published: self-contained sources, and documents."""

import ast
import json
import sys
from pathlib import Path

import pytest
from small import cluster_data

import moorage_policies
from moorage.model import Cluster, Demand, Gpu, Node
from moorage.policy import Fleet, FleetView
from moorage_policies import catalog

FOLDER = Path(moorage_policies.__file__).parent
POLICIES = list(catalog.shipped())


def a_fleet():
    fleet = Fleet()
    fleet.install([Cluster("c", (Node("n", 8000, 8192, (Gpu("0"), Gpu("1"))),))])
    return fleet


def test_every_file_of_the_folder_is_a_shipped_policy_or_a_helper():
    files = {path.stem for path in FOLDER.glob("*.py")}
    assert files == set(POLICIES) | {"__init__", "catalog", "types"}


@pytest.mark.parametrize("name", POLICIES)
def test_a_shipped_policy_imports_only_modules_that_cells_have(name):
    for node in ast.walk(ast.parse(catalog.shipped()[name])):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules = [node.module]
        else:
            continue
        for module in modules:
            assert module in {"moorage.model", "moorage.policy"} or module.split(".")[
                0
            ] in sys.stdlib_module_names | {"numpy"}


@pytest.mark.parametrize("name", POLICIES)
def test_the_source_file_of_a_shipped_policy_alone_is_a_working_policy(name):
    namespace = {"__name__": "function"}
    sys.modules["function"] = type(sys)("function")  # A cell also gives every policy a module.
    try:
        exec(compile(catalog.shipped()[name], "function.py", "exec"), namespace)  # noqa: S102  # Our own source, as a cell runs it.
        document = catalog.document(name)
        policy = namespace["AIOSv1PolicyRule"](document["policy_rule_uri"], {}, {})
        fleet = a_fleet()
        data = {"fleet": FleetView(fleet, Demand(2)), "inputs": {}, "seed": 1}
        data["cluster_data"] = cluster_data(fleet)
        value = policy.eval(document["policy_parameters"], data, {})
    finally:
        del sys.modules["function"]
    assert value == {"cluster_id": "c", "node_id": "n", "gpus": ["0", "1"]}


@pytest.mark.parametrize("name", POLICIES)
def test_a_shipped_policys_document_can_be_posted_as_it_is(name):
    document = catalog.document(name)
    assert json.loads(json.dumps(document)) == document
    assert document["policy_rule_uri"] == f"{name}:1.0-stable"
    assert document["code"] == (FOLDER / f"{name}.py").read_text()
    assert document["description"]
    assert set(document["policy_parameters"]) == set(document["policy_parameters_schema"])
    for schema in document["policy_parameters_schema"].values():
        assert schema["type"] in {"string", "number", "boolean", "array", "object", "any"}
        assert schema["description"]


def test_a_publication_may_have_its_own_defaults_under_its_own_version():
    document = catalog.document("spread", {"cpu_weight": 1.0}, version="2.0", release_tag="cpu")
    assert document["policy_rule_uri"] == "spread:2.0-cpu"
    assert document["policy_parameters"] == {"cpu_weight": 1.0}
    assert catalog.document("spread")["policy_parameters"] == {"cpu_weight": 0.5}


def test_the_error_for_an_unknown_policy_lists_the_known_policies():
    with pytest.raises(KeyError, match=r"no shipped policy 'worst_fit'.*best_fit"):
        catalog.document("worst_fit")

"""The README of the shipped policies names every policy and parameter, and its examples run."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
from small import cluster_data

import moorage_policies
from moorage.model import Cluster, Demand, Gpu, Node
from moorage.policy import Fleet, FleetView, parse_proposal
from moorage_policies import catalog

README = (Path(moorage_policies.__file__).parent / "README.md").read_text()
SECTIONS = {
    match[1]: match[2]
    for match in re.finditer(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
}


def test_sections_of_policies_have_the_order_of_the_catalog():
    assert list(SECTIONS) == list(catalog.shipped())


@pytest.mark.parametrize("name", catalog.shipped())
def test_the_readme_describes_each_parameter_with_its_default(name):
    for parameter, default in catalog.document(name)["policy_parameters"].items():
        row = re.search(rf"^\| `{parameter}` \|.*$", SECTIONS[name], re.MULTILINE)
        assert row, parameter
        assert f"| `{json.dumps(default)}` |" in row[0]


@pytest.mark.parametrize("name", catalog.shipped())
def test_each_example_in_the_readme_is_a_request_that_its_policy_serves(name):
    (block,) = re.findall(r"```json\n(.*?)```", SECTIONS[name], re.DOTALL)
    request = json.loads(block)
    assert request["adhoc"] is True
    assert request["policy_rule_uri"] == catalog.document(name)["policy_rule_uri"]
    models = tuple(request["resources"].pop("models", ()))
    demand = Demand(**request["resources"], models=models)
    parameters = {**catalog.document(name)["policy_parameters"], **request.get("parameters", {})}
    fleet = Fleet()
    gpus = tuple(Gpu(str(number), "A100-80GB", link_group="x") for number in range(8))
    fleet.install(
        [Cluster("c", tuple(Node(f"n{n}", 64_000, 1 << 20, gpus, "r1") for n in range(4)))]
    )
    policy = import_module(f"moorage_policies.{name}").AIOSv1PolicyRule("", {}, parameters)
    data = {"fleet": FleetView(fleet, demand), "inputs": request["inputs"], "seed": 1}
    data["cluster_data"] = cluster_data(fleet)
    assert len(parse_proposal(policy.eval(parameters, data, {}), demand)) == demand.nodes

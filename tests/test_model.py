"""Tests of the model's values in policies and programs of users."""

import dataclasses

import pytest

from moorage.model import (
    AntiAffinity,
    ClusterId,
    Demand,
    LeaseTerms,
    NodeId,
    Outcome,
    Placement,
    Provision,
    Share,
)

SHARE = Share(ClusterId("c"), NodeId("n"), ("0",))


@dataclasses.dataclass
class Program:
    """A dataclass of a user that contains values of the model."""

    placement: Placement
    terms: LeaseTerms


@pytest.mark.parametrize(
    ("value", "changed"),
    [
        (Demand(gpus=2), {"topology": "nvlink"}),
        (LeaseTerms(60.0, anti_affinity=AntiAffinity("web")), {"priority": 3}),
        (Provision("local", {"command": ["true"]}), {"attempts_max": 1}),
        (SHARE, {"gpus": ("1",)}),
        (Outcome(1, "failed", "it died", 1.0), {"exit_code": 7}),
    ],
)
def test_values_work_with_functions_of_dataclasses(value, changed):
    copy = dataclasses.replace(value, **changed)
    assert type(copy) is type(value)
    assert dataclasses.asdict(copy) == dataclasses.asdict(value) | changed


def test_values_of_the_model_within_a_dataclass_are_encoded_with_the_dataclass():
    terms = LeaseTerms(60.0, anti_affinity=AntiAffinity("web"))
    document = dataclasses.asdict(Program((SHARE,), terms))
    assert document["placement"][0]["cluster_id"] == "c"
    assert document["terms"]["anti_affinity"] == {"group": "web", "topology": "node"}

"""Tests of the parts of a request, each beside the record of the core that it becomes."""

import pytest
from msgspec import NODEFAULT, structs

from moorage import model
from moorage.records import requests
from moorage.records.fields import TTL_SECONDS

PAIRS = {
    requests.Resources: model.Demand,
    requests.AntiAffinityRequest: model.AntiAffinity,
    requests.LeaseRequest: model.LeaseTerms,
    requests.ProvisionRequest: model.Provision,
    requests.QuotaAmounts: model.Amounts,
    requests.QuotaChange: model.Quota,
}
OWN_DEFAULTS = {"ttl_seconds": (TTL_SECONDS, NODEFAULT), "attempts_max": (None, model.ATTEMPTS_MAX)}
"""Defaults of the wire beside those of the core."""


def defaults(kind):
    return {
        each.name: each.default if each.default is not NODEFAULT else each.default_factory
        for each in structs.fields(kind)
    }


@pytest.mark.parametrize(("part", "record"), PAIRS.items(), ids=lambda kind: kind.__name__)
def test_a_part_has_the_fields_and_defaults_of_its_record(part, record):
    found, expected = defaults(part), defaults(record)
    assert found.keys() == expected.keys()
    for name, default in found.items():
        if name in OWN_DEFAULTS:
            assert (default, expected[name]) == OWN_DEFAULTS[name]
        elif type(default) in PAIRS:
            assert structs.asdict(default) == structs.asdict(expected[name])
        elif callable(default):
            assert default() == expected[name]()
        else:
            assert default == expected[name]


def test_a_label_requirement_has_the_fields_of_its_record():
    names = [each.name for each in structs.fields(requests.LabelRequirement)]
    assert names == list(model.Requirement._fields)

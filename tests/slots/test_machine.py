"""Tests of the pool of this machine, and of the effect of its configuration."""

import argparse
import os
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from moorage.slots import InvalidSpecification, ResourcePool, make_resource_pool


def test_a_pool_without_configuration_has_the_cpus_of_this_process():
    pool = make_resource_pool()
    assert isinstance(pool, ResourcePool)
    assert [row["id"] for row in pool.resources["cpus"]] == [
        str(cpu) for cpu in sorted(os.sched_getaffinity(0))
    ]
    assert pool.count("gpus") == 0


def test_devices_of_the_machine_have_their_own_ids_and_a_description_replaces_them():
    pool = make_resource_pool({"cpu_ids": [4, 5], "gpu_ids": ["0", "1:0", "1:1"]})
    taken = pool.checkout([{"type": "gpus"}, {"type": "gpus"}, {"type": "cpus"}])
    assert [row["id"] for row in taken["gpus"]] == ["0", "1:0"]
    assert [row["id"] for row in taken["cpus"]] == ["4"]
    pool = make_resource_pool({"resource_pool": {"local": {"gpus": [{"id": "x", "slots": 3}]}}})
    assert pool.resources == {"gpus": [{"id": "x", "slots": 3}]}


def test_a_configuration_applies_counts_first_and_then_slots_and_then_oversubscription():
    pool = make_resource_pool(
        {
            "cpu_ids": [0],
            "resources": {"gpu": 2, "licenses": 1},
            "slots_per": {"gpu": 3},
            "oversubscribe": {"cpus": 4, "gpus": 1.5},
        }
    )
    assert pool.slots_per_resource_type == {"cpus": 4, "gpus": 9, "licenses": 1}
    assert pool.resources["gpus"][0] == {"id": "0", "slots": 4.5}
    assert len(pool.checkout([{"type": "cpus"}] * 4)["cpus"]) == 4


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"slots_per": {"apples": 1}}, "apples"),
        ({"oversubscribe": {"apples": 2}}, "apples"),
        ({"oversubscribe": {"cpus": 0}}, "oversubscribe.cpus"),
        ({"oversubscribe": {"cpus": "2"}}, "oversubscribe.cpus"),
        ({"resources": {"gpus": -1}}, "resources.gpus"),
        ({"resources": 3}, "resources: expected numbers by type"),
        ({"resources": {"gpus": 1}, "slots_per": {"gpus": -1}}, "slots"),
        ({"resource_pool": {"resources": 3}}, "resources"),
    ],
)
def test_a_wrong_configuration_of_a_pool_raises_a_value_error(config, place):
    with pytest.raises(InvalidSpecification, match=place):
        make_resource_pool(config)


def test_the_hooks_of_a_pool_get_the_configuration_and_the_description():
    def two_of(config, pool):
        pool["resources"][config["kind"]] = [{"id": "a"}, {"id": "b"}]
        pool["additional_properties"]["made"] = "here"

    pool = make_resource_pool({"kind": "fans"}, [two_of])
    assert pool.getstate() == {
        "additional_properties": {"made": "here"},
        "resources": {"fans": [{"id": "a", "slots": 1}, {"id": "b", "slots": 1}], "gpus": []},
    }


@dataclass
class Config:
    """A configuration with attributes, as the program canary has it."""

    gpu_ids: list[str] | None = None
    resource_pool: dict | None = None
    oversubscribe: dict | None = None


@pytest.mark.parametrize("kind", [Config, SimpleNamespace, argparse.Namespace])
def test_the_configuration_of_a_pool_may_be_an_object_with_attributes(kind):
    pool = make_resource_pool(kind(gpu_ids=["x", "y"], oversubscribe={"gpus": 2}))
    assert pool.resources["gpus"] == [{"id": "x", "slots": 2}, {"id": "y", "slots": 2}]
    assert pool.count("cpus") == make_resource_pool(kind()).count("cpus") > 0
    described = kind(resource_pool={"resources": {"fpgas": 2}})
    assert make_resource_pool(described).types == ["fpgas", "gpus"]
    with pytest.raises(InvalidSpecification):
        make_resource_pool(kind(oversubscribe={"gpus": 0}))
    seen = []
    config = kind(gpu_ids=[])
    make_resource_pool(config, [lambda given, pool: seen.append(given)])
    assert seen == [config]

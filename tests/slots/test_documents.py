"""Every sentence and signature of the published page; the names of the tests are its words."""
# ruff: noqa: FBT003  # As the page calls it.

import inspect
import io

import pytest
import yaml

from moorage import slots
from moorage.slots import (
    AllocationTransaction,
    Allocator,
    EmptyResourcePoolError,
    Inventory,
    Outcome,
    ResourcePool,
    ResourceUnavailable,
    make_resource_pool,
)

CTEST = """
local:
  gpus:
  - id: "01"
    slots: 1
  - id: "02"
    slots: 1
  - id: "03"
    slots: 1
  - id: "04"
    slots: 1
"""
POOL = """
resource_pool:
  additional_properties: {}
  resources:
    gpus:
    - id: "01"
      slots: 1
    - id: "02"
      slots: 1
    - id: "03"
      slots: 1
    - id: "04"
      slots: 1
    cpus:
    - id: "01"
      slots: 1
    - id: "02"
      slots: 1
    - id: "03"
      slots: 1
    - id: "04"
      slots: 1
    - id: "05"
      slots: 1
    - id: "06"
      slots: 1
    - id: "07"
      slots: 1
    - id: "08"
      slots: 1
"""


def parameters(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize(
    ("function", "documented"),
    [
        (Outcome, ["ok", "reason"]),
        (AllocationTransaction, ["inventory"]),
        (AllocationTransaction.record, ["rtype", "rid", "slots"]),
        (AllocationTransaction.rollback, []),
        (Inventory, ["resources"]),
        (Inventory.slots_available, ["rtype"]),
        (Allocator, []),
        (Allocator.acquire, ["inventory", "rtype", "slots"]),
        (ResourcePool, ["pool"]),
        (ResourcePool.empty, []),
        (ResourcePool.count, ["type"]),
        (ResourcePool.fill, ["pool"]),
        (ResourcePool.pop, ["type"]),
        (ResourcePool.getstate, []),
        (ResourcePool.clear, []),
        (ResourcePool.populate, ["kwds"]),
        (ResourcePool.accommodates, ["request"]),
        (ResourcePool.checkout, ["request", "kwds"]),
        (ResourcePool.checkin, ["resources"]),
    ],
)
def test_signatures_are_the_documented_ones(function, documented):
    assert parameters(function) == documented


def test_dump_and_make_resource_pool_take_what_is_documented_first():
    assert parameters(ResourcePool.dump)[0] == "file"
    assert parameters(make_resource_pool)[0] == "config"


def test_outcome_ok_bool_or_none_reason_str_or_none():
    assert Outcome().ok is True
    assert Outcome(True).reason is None
    assert not Outcome(None, "full")
    assert Outcome(1)
    assert not Outcome(False, "full")
    assert (Outcome(False, "full").ok, Outcome(False, "full").reason) == (False, "full")
    assert repr(Outcome()) == "<Outcome ok>"
    assert repr(Outcome(False, "full")) == "<Outcome fail: full>"


def test_outcome_false_requires_a_reason():
    with pytest.raises(ValueError, match="requires a reason"):
        Outcome(False)


def test_transaction_inventory_and_deltas_of_type_id_and_slots():
    inventory = Inventory({"gpus": [{"id": "a", "slots": 2}]})
    transaction = AllocationTransaction(inventory)
    assert transaction.inventory is inventory
    transaction.record("gpus", "a", 1)
    assert transaction.deltas == [("gpus", "a", 1)]


def test_inventory_of_resources_knows_slots_available():
    inventory = Inventory({"gpus": [{"id": "a", "slots": 2}, {"id": "b", "slots": 1}]})
    assert inventory.resources == {"gpus": [{"id": "a", "slots": 2}, {"id": "b", "slots": 1}]}
    assert inventory.slots_available("gpus") == 3
    assert inventory.slots_available("cpus") == 0


def test_allocator_acquires_slots_of_an_inventory():
    inventory = Inventory({"gpus": [{"id": "a", "slots": 2}, {"id": "b", "slots": 1}]})
    assert Allocator().acquire(inventory, "gpus", 1) == {"id": "b", "slots": 1}
    assert inventory.resources["gpus"][1] == {"id": "b", "slots": 0}


def test_class_representing_resources_available_on_the_computer():
    pool = ResourcePool()
    assert pool.empty()
    pool.populate()
    assert pool.count("cpus") >= 1


def test_pool_the_resource_pool_specification():
    assert ResourcePool({"resources": {"cpus": [{"id": "0", "slots": 2}]}}).count("cpus") == 1


def test_the_specification_for_the_resource_pool_is_adopted_from_the_ctest_schema():
    assert ResourcePool(yaml.safe_load(CTEST)).types == ["gpus"]


def test_for_example_a_machine_with_4_gpus_may_have():
    pool = ResourcePool(yaml.safe_load(CTEST))
    assert pool.resources["gpus"] == [{"id": f"0{n}", "slots": 1} for n in (1, 2, 3, 4)]


def test_canary_adopts_a_similar_layout_a_machine_having_8_cpus_and_4_gpus():
    pool = ResourcePool(yaml.safe_load(POOL))
    assert (pool.count("cpus"), pool.count("gpus")) == (8, 4)
    assert pool.additional_properties == {}
    assert pool.getstate() == yaml.safe_load(POOL)["resource_pool"]


def test_additional_properties_resources_and_slots_per_resource_type():
    pool = ResourcePool({"resources": {"cpus": 3}, "additional_properties": {"site": "lab"}})
    assert pool.additional_properties == {"site": "lab"}
    assert pool.resources["cpus"][2] == {"id": "2", "slots": 1}
    assert pool.slots_per_resource_type == {"cpus": 3, "gpus": 0}


def test_dump_to_a_file():
    pool = ResourcePool(yaml.safe_load(POOL))
    file = io.StringIO()
    pool.dump(file)
    assert yaml.safe_load(file.getvalue()) == yaml.safe_load(POOL)


def test_property_types_is_a_list_of_str():
    assert ResourcePool({"gpus": 1, "cpus": 1}).types == ["cpus", "gpus"]
    assert "cpus" in ResourcePool({"cpus": 1})


def test_empty_is_a_bool():
    assert ResourcePool().empty() is True
    assert ResourcePool({"cpus": 1}).empty() is False


def test_count_of_a_type_is_an_int():
    pool = ResourcePool({"resources": {"cpus": [{"id": "0", "slots": 9}]}})
    assert pool.count("cpus") == pool.count("cpu") == 1
    with pytest.raises(ResourceUnavailable, match="licenses"):
        pool.count("licenses")


def test_fill_pop_getstate_clear_and_populate():
    pool = ResourcePool()
    assert pool.fill({"resources": {"cpus": 1}}) is None
    assert pool.getstate() == {
        "additional_properties": {},
        "resources": {"cpus": [{"id": "0", "slots": 1}], "gpus": []},
    }
    assert pool.pop("cpus") == [{"id": "0", "slots": 1}]
    assert pool.pop("cpus") is None
    assert pool.populate(cpus=2) is None
    assert pool.clear() is None
    assert pool.empty()


def test_accommodates_determine_if_the_resources_for_this_test_are_available():
    pool = ResourcePool({"cpus": 2})
    assert pool.accommodates([{"type": "cpus", "slots": 1}] * 2)
    assert isinstance(pool.accommodates([{"type": "cpus", "slots": 1}] * 3), Outcome)
    assert not pool.accommodates([{"type": "cpus", "slots": 1}] * 3)


def test_checkout_returns_resources_available_to_the_test():
    """In the page's words: local[i] = {<type>: [{'id': <id>, 'slots': <slots>}, …], … }."""
    pool = ResourcePool({"cpus": 2, "gpus": 2})
    request = [{"type": "cpus", "slots": 1}, {"type": "gpus", "slots": 1}]
    assert pool.checkout(request, exclusive=True, timeout=3) == {
        "cpus": [{"id": "0", "slots": 1}],
        "gpus": [{"id": "0", "slots": 1}],
    }


def test_checkin_of_resources():
    pool = ResourcePool({"cpus": 2})
    before = pool.getstate()
    assert pool.checkin(pool.checkout([{"type": "cpus", "slots": 1}])) is None
    assert pool.getstate() == before


@pytest.mark.parametrize("error", [ResourceUnavailable, EmptyResourcePoolError])
def test_exceptions_are_exceptions(error):
    assert issubclass(error, Exception)
    assert str(EmptyResourcePoolError())


def test_everything_that_is_documented_is_there():
    names = [
        "ResourcePool",
        "Inventory",
        "Allocator",
        "AllocationTransaction",
        "Outcome",
        "ResourceUnavailable",
        "EmptyResourcePoolError",
        "make_resource_pool",
    ]
    assert set(names) <= set(slots.__all__)

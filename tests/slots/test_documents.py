"""Each sentence and signature of the published page about slot pools has a test."""
# ruff: noqa: FBT003  # Calls as on the page.

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
  gpus: [{id: "01", slots: 1}, {id: "02", slots: 1}, {id: "03", slots: 1}, {id: "04", slots: 1}]
"""
POOL = {
    "additional_properties": {},
    "resources": {
        kind: [{"id": f"0{n + 1}", "slots": 1} for n in range(count)]
        for kind, count in (("gpus", 4), ("cpus", 8))
    },
}


def parameters(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_functions_and_methods_have_the_documented_signatures():
    for function, documented in (
        (Outcome, "ok reason"),
        (AllocationTransaction, "inventory"),
        (AllocationTransaction.record, "rtype rid slots"),
        (AllocationTransaction.rollback, ""),
        (Inventory, "resources"),
        (Inventory.slots_available, "rtype"),
        (Allocator, ""),
        (Allocator.acquire, "inventory rtype slots"),
        (ResourcePool, "pool"),
        (ResourcePool.empty, ""),
        (ResourcePool.count, "type"),
        (ResourcePool.fill, "pool"),
        (ResourcePool.pop, "type"),
        (ResourcePool.getstate, ""),
        (ResourcePool.clear, ""),
        (ResourcePool.populate, "kwds"),
        (ResourcePool.accommodates, "request"),
        (ResourcePool.checkout, "request kwds"),
        (ResourcePool.checkin, "resources"),
    ):
        assert parameters(function) == documented.split(), function
    assert parameters(ResourcePool.dump)[0] == "file"
    assert parameters(make_resource_pool)[0] == "config"


def test_an_outcome_that_is_false_requires_a_reason():
    assert Outcome().ok is True
    assert Outcome(True).reason is None
    assert Outcome(1)
    for no in (None, False):
        assert not Outcome(no, "full")
    assert (Outcome(False, "full").ok, Outcome(False, "full").reason) == (False, "full")
    assert repr(Outcome()) == "<Outcome ok>"
    assert repr(Outcome(False, "full")) == "<Outcome fail: full>"
    with pytest.raises(ValueError, match="requires a reason"):
        Outcome(False)


def test_a_transaction_records_type_and_id_and_slots_of_each_change():
    inventory = Inventory({"gpus": [{"id": "a", "slots": 2}]})
    transaction = AllocationTransaction(inventory)
    assert transaction.inventory is inventory
    transaction.record("gpus", "a", 1)
    assert transaction.deltas == [("gpus", "a", 1)]


def test_an_allocator_takes_slots_from_an_inventory_that_knows_the_free_slots():
    rows = [{"id": "a", "slots": 2}, {"id": "b", "slots": 1}]
    inventory = Inventory({"gpus": rows})
    assert inventory.resources == {"gpus": rows}
    assert (inventory.slots_available("gpus"), inventory.slots_available("cpus")) == (3, 0)
    assert Allocator().acquire(inventory, "gpus", 1) == {"id": "b", "slots": 1}
    assert inventory.resources["gpus"][1] == {"id": "b", "slots": 0}


def test_a_pool_represents_the_resources_of_the_computer():
    pool = ResourcePool()
    assert pool.empty()
    pool.populate()
    assert pool.count("cpus") >= 1


def test_the_specification_of_a_pool_may_have_the_layout_of_ctest():
    """The text `CTEST` describes a machine with 4 GPUs in this layout."""
    pool = ResourcePool(yaml.safe_load(CTEST))
    assert pool.resources == {"gpus": POOL["resources"]["gpus"]}


def test_the_documented_layout_describes_a_machine_of_8_cpus_and_4_gpus():
    pool, file = ResourcePool({"resource_pool": POOL}), io.StringIO()
    assert (pool.count("cpus"), pool.count("gpus")) == (8, 4)
    assert pool.additional_properties == {}
    assert pool.getstate() == POOL
    pool.dump(file)
    assert yaml.safe_load(file.getvalue()) == {"resource_pool": POOL}


def test_a_pool_has_additional_properties_and_resources_and_slots_per_resource_type():
    pool = ResourcePool({"resources": {"cpus": 3}, "additional_properties": {"site": "lab"}})
    assert pool.additional_properties == {"site": "lab"}
    assert pool.resources["cpus"][2] == {"id": "2", "slots": 1}
    assert pool.slots_per_resource_type == {"cpus": 3, "gpus": 0}


def test_the_methods_types_and_empty_and_count_return_the_documented_types():
    assert ResourcePool({"gpus": 1, "cpus": 1}).types == ["cpus", "gpus"]
    pool = ResourcePool({"resources": {"cpus": [{"id": "0", "slots": 9}]}})
    assert "cpus" in pool
    assert (ResourcePool().empty(), pool.empty()) == (True, False)
    assert pool.count("cpus") == pool.count("cpu") == 1
    with pytest.raises(ResourceUnavailable, match="licenses"):
        pool.count("licenses")


def test_fill_pop_getstate_clear_and_populate_work_as_documented():
    pool, row = ResourcePool(), {"id": "0", "slots": 1}
    assert pool.fill({"resources": {"cpus": 1}}) is None
    resources = {"cpus": [row], "gpus": []}
    assert pool.getstate() == {"additional_properties": {}, "resources": resources}
    assert pool.pop("cpus") == [row]
    assert pool.pop("cpus") is None
    assert pool.populate(cpus=1, gpus=1) is None
    assert pool.resources == {"cpus": [row], "gpus": [row]}
    assert pool.clear() is None
    assert pool.empty()


def test_accommodates_says_whether_a_pool_could_ever_satisfy_a_request():
    pool = ResourcePool({"cpus": 2})
    assert pool.accommodates([{"type": "cpus", "slots": 1}] * 2)
    outcome = pool.accommodates([{"type": "cpus", "slots": 1}] * 3)
    assert isinstance(outcome, Outcome)
    assert not outcome


def test_checkout_returns_resources_that_checkin_accepts():
    """In the page's words: local[i] = {<type>: [{'id': <id>, 'slots': <slots>}, …], … }."""
    pool = ResourcePool({"cpus": 2, "gpus": 2})
    before = pool.getstate()
    request = [{"type": kind, "slots": 1} for kind in ("cpus", "gpus", "gpus")]
    taken = pool.checkout(request, exclusive=True, timeout=3)
    assert taken == {
        "cpus": [{"id": "0", "slots": 1}],
        "gpus": [{"id": "0", "slots": 1}, {"id": "1", "slots": 1}],
    }
    assert pool.checkin(taken) is None
    assert pool.getstate() == before


def test_every_documented_name_exists():
    for error in (ResourceUnavailable, EmptyResourcePoolError):
        assert issubclass(error, Exception)
    assert str(EmptyResourcePoolError())
    names = "ResourcePool Inventory Allocator AllocationTransaction Outcome ResourceUnavailable"
    assert {*names.split(), "EmptyResourcePoolError", "make_resource_pool"} <= set(slots.__all__)

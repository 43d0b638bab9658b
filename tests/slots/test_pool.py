"""Tests that the flat pool behaves as documented, without known defects of canary's pool."""

import copy
import datetime as dt
import io
import json
import pickle
import subprocess
import sys
from collections import Counter

import pytest
import yaml

from moorage.slots import (
    EmptyResourcePoolError,
    InvalidCheckin,
    InvalidRequest,
    InvalidSpecification,
    ResourcePool,
    ResourceUnavailable,
    SlotsError,
    UnknownResourceType,
    read_specification,
)
from moorage.slots.outstanding import Allocation

UNEVEN = {
    "resources": {
        "cpus": [{"id": "01", "slots": 2}, {"id": "ab", "slots": 3}],
        "gpus": [{"id": "02", "slots": 3}, {"id": "cd", "slots": 5}],
    }
}


DIVIDED = {
    "resources": {
        "gpus": [{"id": "0", "slots": 1}, {"id": "1", "slots": 1}],
        "mig": [
            {"id": f"1:{n}", "slots": 1, "part_of": {"type": "gpus", "id": "1"}} for n in range(3)
        ],
    }
}


COPIES = [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]  # noqa: S301  # Our own.


def of(**members) -> list[dict]:
    """Return a request with one member per type, with the given slots."""
    return [{"type": kind, "slots": slots} for kind, slots in members.items()]


def free(pool: ResourcePool, kind: str) -> list:
    return [row["slots"] for row in pool.resources[kind]]


def test_a_dumped_pool_can_be_filled_again():
    for description in (UNEVEN, DIVIDED):
        pool = ResourcePool(description)
        pool.checkout(of(gpus=0.5))
        for form in ("yaml", "json"):
            file = io.StringIO()
            pool.dump(file, form)
            again = ResourcePool(read_specification(file.getvalue()))
            assert again.getstate() == pool.getstate()
            assert repr(again) == repr(pool)


class TestAccommodates:
    """`accommodates` agrees with `checkout` on a free pool, and gives clear reasons."""

    def test_accommodates_counts_checked_out_slots_as_available(self):
        pool = ResourcePool({"resources": {"gpus": [{"id": n, "slots": 2} for n in (0, 1)]}})
        pool.checkout(2 * of(gpus=2))
        assert pool.accommodates(2 * of(gpus=2))
        outcome = pool.accommodates(of(gpus=3))
        assert not outcome
        assert outcome.reason == (
            "insufficient slots of gpus (requested 3, available 2) on any one instance"
        )
        assert free(pool, "gpus") == [0, 0]

    def test_accommodates_gives_the_documented_reasons(self):
        pool, few = ResourcePool({"cpus": 2, "gpus": 1}), "cpus (requested 3, available 2)"
        for request, reason in (
            (of(a=1), "Resource unavailable: a"),
            (of(b=1, a=1, cpus=1), "Resources unavailable: a,b"),
            (3 * of(cpus=1), f"insufficient slots of {few}"),
            (
                3 * of(gpus=1, cpus=1),
                f"insufficient slots of {few}, gpus (requested 3, available 1)",
            ),
        ):
            assert pool.accommodates(request).reason == reason
        assert pool.accommodates([])
        assert pool.checkout([]) == {}


class TestRefusals:
    def test_each_refusal_of_a_pool_is_a_slots_error(self):
        for ask in ("checkout", "accommodates"):
            with pytest.raises(EmptyResourcePoolError, match="empty"):
                getattr(ResourcePool(), ask)(of(cpus=1))
        with pytest.raises(TypeError, match="Unknown resource requirement type") as caught:
            ResourcePool({"cpus": 1}).checkout(of(apples=1))
        assert isinstance(caught.value, UnknownResourceType)
        assert "'apples'" in str(caught.value)
        for error in (ResourceUnavailable, EmptyResourcePoolError, UnknownResourceType):
            assert issubclass(error, SlotsError)
        for error in (InvalidRequest, InvalidCheckin, InvalidSpecification):
            assert issubclass(error, SlotsError)
            assert issubclass(error, ValueError)

    def test_the_error_for_missing_slots_names_type_and_requested_and_available_slots(self):
        """The error of canary's pool lacks these details."""
        pool = ResourcePool({"gpus": 2})
        pool.checkout(of(gpus=1))
        with pytest.raises(ResourceUnavailable) as caught:
            pool.checkout(2 * of(gpus=1))
        assert str(caught.value) == "insufficient slots of gpus (requested 2, available 1)"

    @pytest.mark.parametrize(
        "member",
        [
            *(
                {"type": "cpus", "slots": slots}
                for slots in (0, -1, True, "1", None, 10**10, 1e-30)
            ),
            *({"type": "cpus", "slots": slots} for slots in (float("nan"), float("inf"))),
            *({"type": "cpus", "slot": 2}, {"type": 3}, {"slots": 1}, "cpus", None),
        ],
    )
    @pytest.mark.parametrize("ask", ["checkout", "accommodates"])
    def test_a_request_with_a_malformed_member_changes_nothing(self, ask, member):
        pool = ResourcePool({"cpus": 4})
        before = pool.getstate()
        with pytest.raises(InvalidRequest, match="member 1"):
            getattr(pool, ask)([{"type": "cpus"}, member])
        assert pool.getstate() == before

    def test_a_request_must_be_a_list(self):
        for request in (None, 3, "cpus", {"type": "cpus"}):
            with pytest.raises(ValueError, match="expected a list"):
                ResourcePool({"cpus": 4}).checkout(request)


class TestCheckin:
    """A checkin is atomic, works once, and only for slots of this pool."""

    def test_a_second_checkin_is_refused_despite_an_equal_allocation(self):
        pool = ResourcePool({"resources": {"gpus": [{"id": "0", "slots": 2}]}})
        first, second = pool.checkout(of(gpus=1)), pool.checkout(of(gpus=1))
        assert first == second
        pool.checkin(first)
        copies = [each(first) for each in COPIES]
        parts = [dict(first), first.copy(), first | {}, {"gpus": first["gpus"][:]}]
        for again in (first, *copies, *parts, copy.deepcopy(dict(first))):
            with pytest.raises(InvalidCheckin, match="checked in before"):
                pool.checkin(again)
        assert free(pool, "gpus") == [1]
        pool.checkin(json.loads(json.dumps(second)))  # It is recognised by its contents.
        with pytest.raises(InvalidCheckin):
            pool.checkin(second)
        assert free(pool, "gpus") == [2]

    def test_one_checkin_may_return_members_of_several_allocations_each_once(self):
        pool = ResourcePool({"resources": {"gpus": [{"id": "0", "slots": 3}]}})
        first, second, third = (pool.checkout(of(gpus=1)) for _ in range(3))
        plain = {"id": "0", "slots": 1}
        pool.checkin(
            {"gpus": [plain, *first["gpus"]]}
        )  # `plain` is the oldest other one: `second`.
        with pytest.raises(InvalidCheckin, match="checked in before"):
            pool.checkin({"gpus": [plain, *third["gpus"]]})
        with pytest.raises(InvalidCheckin, match="checked in before"):
            pool.checkin(second)
        assert free(pool, "gpus") == [2]
        pool.checkin(third)

    def test_checkin_of_another_pools_allocation_is_refused(self):
        pool, other = ResourcePool({"cpus": 2}), ResourcePool({"cpus": 2})
        pool.checkout(of(cpus=1))
        with pytest.raises(InvalidCheckin):
            pool.checkin(other.checkout(of(cpus=1)))
        assert free(pool, "cpus") == [0, 1]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"apples": [{"id": "0", "slots": 1}]},
            *({"cpus": [{"id": name, "slots": 1}]} for name in "91"),
            *({"cpus": [{"id": "0", "slots": slots}]} for slots in (2, 0, -1, float("nan"))),
            {"cpus": [{"id": "0"}]},
            {"cpus": [{"id": "0", "slots": 1, "more": 1}]},
            {"cpus": {"id": "0", "slots": 1}},
            {"cpus": [{"id": "0", "slots": 1}] * 2},
            *({"cpus": [None]}, {3: []}, [], None),
        ],
    )
    def test_a_malformed_checkin_changes_nothing(self, wrong):
        pool = ResourcePool({"cpus": 4, "gpus": 1})
        pool.checkout(of(gpus=1, cpus=1))
        before = pool.getstate()
        if isinstance(wrong, dict):  # Valid members come first, and must stay checked out.
            wrong = {"gpus": [{"id": "0", "slots": 1}], **wrong}
        with pytest.raises(InvalidCheckin):
            pool.checkin(wrong)
        assert pool.getstate() == before

    def test_members_of_an_allocation_can_be_returned_in_several_checkins(self):
        pool = ResourcePool({"cpus": 2, "gpus": 1})
        taken = pool.checkout([*of(gpus=1), *2 * of(cpus=1)])
        gpus = taken.pop("gpus")
        pool.checkin(taken)
        assert (free(pool, "cpus"), free(pool, "gpus")) == ([1, 1], [0])
        pool.checkin({"gpus": gpus})
        assert free(pool, "gpus") == [1]


class TestStale:
    """A cleared pool has no slots, and reading changes nothing."""

    def test_a_cleared_pool_has_no_slots_and_no_checkouts(self):
        pool = ResourcePool({"cpus": 2})
        taken = pool.checkout(of(cpus=1))
        pool.clear()
        assert pool.slots_per_resource_type == {}
        assert pool.getstate() == {"additional_properties": {}, "resources": {}}
        pool.fill({"cpus": 2})
        with pytest.raises(InvalidCheckin):
            pool.checkin(taken)

    def test_pop_of_a_type_also_removes_its_totals(self):
        pool = ResourcePool({"cpus": 2, "gpus": 1})
        taken = pool.checkout(of(cpus=1, gpus=1))
        assert pool.pop("cpus") == [{"id": "0", "slots": 0}, {"id": "1", "slots": 1}]
        assert pool.slots_per_resource_type == {"gpus": 1}
        with pytest.raises(InvalidCheckin, match="cpus 0"):
            pool.checkin(taken)
        pool.checkin({"gpus": taken["gpus"]})
        assert free(pool, "gpus") == [1]

    def test_counting_the_nodes_of_a_pool_changes_nothing(self):
        pool = ResourcePool({"cpus": 1})
        assert pool.count("node") == pool.count("nodes") == 1
        assert pool.additional_properties == {}
        pool.additional_properties["nodes"] = {"count": 7}
        assert pool.count("nodes") == 7
        pool.additional_properties["nodes"]["count"] = "x"
        with pytest.raises(InvalidSpecification, match=r"nodes\.count: expected a number"):
            pool.count("nodes")

    def test_changes_of_a_returned_state_do_not_change_the_pool(self):
        pool = ResourcePool({"resources": {"cpus": 1}, "additional_properties": {"a": [1]}})
        state = pool.getstate()
        state["additional_properties"]["a"].append(2)
        state["resources"]["cpus"][0]["slots"] = 7
        assert pool.getstate()["additional_properties"] == {"a": [1]}
        assert free(pool, "cpus") == [1]
        assert pool.slots_per_resource_type["cpus"] == 1


class TestPlain:
    """Values of a pool are plain data; writing totals raises an error."""

    def test_results_of_a_pool_are_plain_values_for_yaml_and_json(self):
        pool = ResourcePool({"resources": {"cpus": [{"id": "01", "slots": 2}], "gpus": 1}})
        taken = pool.checkout(of(cpus=1, gpus=1))
        results = {
            "taken": taken,
            "resources": pool.resources,
            "state": pool.getstate(),
            "totals": pool.slots_per_resource_type,
            "types": pool.types,
            "popped": pool.pop("gpus"),
        }
        assert json.loads(json.dumps(results)) == results
        for dumper in (yaml.Dumper, yaml.SafeDumper, getattr(yaml, "CSafeDumper", yaml.SafeDumper)):
            assert yaml.safe_load(yaml.dump(results, Dumper=dumper)) == results

    def test_an_assignment_to_the_totals_of_a_pool_is_refused_with_advice(self):
        pool = ResourcePool({"cpus": 2})
        before, totals = pool.getstate(), pool.slots_per_resource_type
        for write in (
            lambda: totals.__setitem__("cpus", 7),
            lambda: totals.update(cpus=7),
            lambda: totals.subtract(cpus=1),
        ):
            with pytest.raises(
                (TypeError, AttributeError), match=r"cannot be written; change the pool"
            ):
                write()
        assert pool.getstate() == before
        pool.slots_per_resource_type = Counter(cpus=2)  # Equal totals may be assigned.
        for wrong in ({"cpus": 3}, {}):
            with pytest.raises(TypeError, match="computed from the pool"):
                pool.slots_per_resource_type = Counter(wrong)
        assert pool.slots_per_resource_type == {"cpus": 2, "gpus": 0}

    @pytest.mark.parametrize(
        ("write", "cpus"),
        [
            (lambda pool: setattr(pool, "resources", {"cpus": []}), []),
            (lambda pool: setattr(pool, "resources", {"cpus": 1, "gpus": 0}), [1]),
            (lambda pool: pool.resources.update(cpus=[{"id": "x", "slots": 4}]), [4]),
            (lambda pool: pool.resources.pop("cpus"), None),
            (lambda pool: pool.resources.setdefault("fpgas", 2), [1, 1]),
            (lambda pool: pool.resources.__setitem__("cpus", []), []),
            (lambda pool: pool.resources.__delitem__("cpus"), None),
            (lambda pool: pool.resources.__ior__({"cpus": 3}), [1, 1, 1]),
            (lambda pool: pool.resources.clear(), None),
            (lambda pool: pool.resources["cpus"].append({"id": "9", "slots": 5}), [1, 1, 5]),
            (lambda pool: pool.resources["cpus"].__iadd__([{"id": "9"}]), [1, 1, 1]),
            (lambda pool: pool.resources["cpus"].__setitem__(0, {"id": "z", "slots": 2}), [2, 1]),
            (lambda pool: pool.resources["cpus"].sort(key=lambda row: row["id"]), [1, 1]),
            (lambda pool: pool.resources["cpus"].pop(0), [1]),
            (lambda pool: pool.resources["cpus"].clear(), []),
            (lambda pool: pool.resources["cpus"][0].update(slots=7), [7, 1]),
            (lambda pool: pool.resources["cpus"][1].__setitem__("slots", 0), [1, 0]),
            (lambda pool: pool.resources["cpus"][1].__setitem__("uuid", "u"), [1, 1]),
        ],
    )
    def test_resources_that_are_assigned_to_a_pool_take_effect(self, write, cpus):
        pool = ResourcePool({"cpus": 2})
        write(pool)
        found = pool.resources.get("cpus")
        assert (None if found is None else [row["slots"] for row in found]) == cpus
        assert pool.slots_available("cpus") == sum(cpus or ())
        assert pool.slots_per_resource_type["cpus"] == sum(cpus or ())
        if cpus:
            size = max(cpus)
            assert pool.accommodates([{"type": "cpus", "slots": size}])
            taken = pool.checkout([{"type": "cpus", "slots": size}])
            with pytest.raises(ResourceUnavailable):
                pool.checkout([{"type": "cpus", "slots": sum(cpus)}])
            pool.checkin(taken)
        assert ResourcePool(pool.getstate()).getstate() == {
            **pool.getstate(),
            "resources": {"gpus": [], **pool.getstate()["resources"]},
        }

    @pytest.mark.parametrize(
        "write",
        [
            lambda pool: setattr(pool, "resources", []),
            lambda pool: setattr(pool, "resources", {"nodes": 1}),
            lambda pool: pool.resources.update(gpus="two", cpus=1),
            lambda pool: pool.resources.__setitem__("cpus", [{"id": "0"}, {"id": "0"}]),
            lambda pool: pool.resources["cpus"].append({"slots": 1}),
            lambda pool: pool.resources["cpus"].append({"id": "1"}),
            lambda pool: pool.resources["cpus"].append(5),
            lambda pool: pool.resources["cpus"].__imul__(2),
            lambda pool: pool.resources["cpus"][0].update(slots=-1),
            lambda pool: pool.resources["cpus"][0].__setitem__("slots", "many"),
            lambda pool: pool.resources["cpus"][0].__setitem__("slots", float("nan")),
            lambda pool: pool.resources["cpus"][0].__setitem__("slot", 3),
            lambda pool: pool.resources["cpus"][0].__setitem__("id", "1"),
            lambda pool: pool.resources["cpus"][0].pop("id"),
            lambda pool: pool.resources["cpus"][0].clear(),
        ],
    )
    def test_resources_that_are_assigned_to_a_pool_are_checked_first(self, write):
        pool = ResourcePool({"cpus": 2})
        before, view = pool.getstate(), pool.resources
        with pytest.raises(ValueError):  # With the messages of `fill`.
            write(pool)
        assert pool.getstate() == before
        assert view == pool.resources

    def test_checkouts_survive_an_assignment_of_resources(self):
        pool = ResourcePool(
            {"resources": {"gpus": [{"id": "a", "slots": 4}, {"id": "b", "slots": 2}]}}
        )
        taken = pool.checkout([{"type": "gpus", "slots": 3}, {"type": "gpus", "slots": 2}])
        view = pool.resources
        view["gpus"][0]["slots"] += 2
        assert free(pool, "gpus") == [3, 0]
        assert pool.slots_per_resource_type["gpus"] == 8
        pool.checkin({"gpus": taken["gpus"][1:]})
        view["gpus"].append({"id": "c", "slots": 9})  # The view is older than the checkin.
        assert free(pool, "gpus") == [3, 2, 9]
        pool.checkin({"gpus": taken["gpus"][:1]})
        assert free(pool, "gpus") == [6, 2, 9]
        taken = pool.checkout(of(gpus=1))
        pool.resources["gpus"].pop(1)
        with pytest.raises(InvalidCheckin):
            pool.checkin(taken)
        with pytest.raises(InvalidSpecification, match="no such instance any more"):
            view["gpus"][1]["slots"] = 3

    @pytest.mark.parametrize("again", COPIES)
    def test_a_copy_of_a_pools_read_only_resources_and_totals_can_be_changed(self, again):
        pool = ResourcePool({"cpus": 2})
        resources, totals = again(pool.resources), again(pool.slots_per_resource_type)
        resources["gpus"] = [1]
        totals["cpus"] += 1
        assert (type(resources), type(totals)) == (dict, Counter)
        copied = pool.slots_per_resource_type.copy()
        copied.update(cpus=1)
        assert copied == {"cpus": 3, "gpus": 0}

    def test_a_pool_returns_and_dumps_extra_keys_of_its_instances(self):
        row = {"id": "0", "slots": 2, "uuid": "GPU-1", "links": {"1": "NVLink"}}
        pool = ResourcePool({"resources": {"gpus": [row, {"id": "1", "vendor": "x"}]}})
        taken = pool.checkout(of(gpus=1))
        assert taken == {"gpus": [{"id": "1", "slots": 1}]}
        pool.checkin(taken)
        assert pool.resources["gpus"] == [row, {"id": "1", "slots": 1, "vendor": "x"}]
        row["links"]["2"] = "not the pool's"
        file = io.StringIO()
        pool.dump(file)
        again = ResourcePool(read_specification(file.getvalue()))
        assert again.resources["gpus"][0]["links"] == {"1": "NVLink"}
        assert pool.pop("gpus")[0]["uuid"] == "GPU-1"

    def test_extra_keys_of_instances_must_be_json(self):
        for value in (object(), float("nan"), {1, 2}, dt.date(2026, 1, 1)):
            said = r"gpus\[0\]: 'x': expected a JSON value"
            with pytest.raises(InvalidSpecification, match=said):
                ResourcePool({"resources": {"gpus": [{"id": "0", "x": value}]}})
        for key in ("slot", "slotss", "partof", "part-of"):
            with pytest.raises(InvalidSpecification, match=f"unknown {key!r}; expected"):
                ResourcePool({"resources": {"gpus": [{"id": "0", key: 2}]}})


class TestCopies:
    """A copy is a separate pool with the same slots and checkouts."""

    @pytest.mark.parametrize("again", COPIES)
    def test_a_pool_can_be_copied_and_pickled(self, again):
        mig = [{"id": f"0:{n}", "part_of": {"type": "gpus", "id": "0"}} for n in range(2)]
        resources = {"cpus": 3, "gpus": 2, "mig": mig}
        pool = ResourcePool({"resources": resources, "additional_properties": {"site": ["lab"]}})
        taken, part = pool.checkout(of(cpus=1)), pool.checkout(of(mig=1))
        other = again(pool)
        assert other.getstate() == pool.getstate()
        assert other.slots_per_resource_type == pool.slots_per_resource_type
        other.additional_properties["site"].append("there")
        other.checkin(taken)
        other.checkin(part)
        assert free(other, "cpus") == [1, 1, 1]
        assert (free(pool, "cpus"), pool.additional_properties) == ([0, 1, 1], {"site": ["lab"]})
        assert other.slots_available("gpus") == 2
        assert pool.slots_available("gpus") == 1
        pool.checkin(taken)
        for each in (pool, other):
            with pytest.raises(InvalidCheckin):
                each.checkin(taken)
        again(ResourcePool()).fill({"cpus": 1})

    def test_allocation_numbers_stay_unique_in_another_process(self):
        pool = ResourcePool({"resources": {"gpus": [{"id": "0", "slots": 3}]}})
        first = pool.checkout(of(gpus=1))
        program = (
            "import pickle, sys; from moorage.slots import InvalidCheckin\n"
            "pool, first = pickle.load(sys.stdin.buffer)\n"
            "second = [pool.checkout([{'type': 'gpus'}]) for _ in range(2)]\n"
            "pool.checkin(first); pool.checkin(second[0])\n"
            "try: pool.checkin(first)\n"
            "except InvalidCheckin: print(pool.slots_available('gpus'))\n"
        )
        command, both = [sys.executable, "-c", program], pickle.dumps((pool, first))
        assert subprocess.check_output(command, input=both, timeout=60) == b"2\n"


def test_many_checkouts_of_fractions_leave_the_exact_number_of_slots():
    for tenth, times in ((0.1, 10), (1 / 3, 3)):  # As a user writes them.
        pool = ResourcePool({"gpus": 1})
        taken = [pool.checkout(of(gpus=tenth)) for _ in range(times)]
        with pytest.raises(ResourceUnavailable):
            pool.checkout(of(gpus=0.001))
        for each in taken:
            pool.checkin(json.loads(json.dumps(each)))
        assert free(pool, "gpus") == [1]
        assert type(free(pool, "gpus")[0]) is int
    pool.checkout(of(gpus=1))
    with pytest.raises(ResourceUnavailable, match=r"requested 0\.1, available 0\)"):
        pool.checkout(of(gpus=0.1))


class TestParts:
    """MIG instances and their GPU are never granted together, and never counted together."""

    def test_a_checked_out_part_of_a_device_blocks_the_whole_until_the_type_of_parts_is_removed(
        self,
    ):
        pool = ResourcePool(DIVIDED)
        part = pool.checkout(of(mig=1))
        assert (pool.slots_available("gpus"), pool.slots_available("mig")) == (1, 2)
        assert pool.checkout(of(gpus=1)) == {"gpus": [{"id": "0", "slots": 1}]}
        with pytest.raises(ResourceUnavailable):
            pool.checkout(of(gpus=1))
        again = copy.deepcopy(pool)
        again.pop("mig")
        pool.checkin(part)
        for each in (pool, again):
            assert each.checkout(of(gpus=1)) == {"gpus": [{"id": "1", "slots": 1}]}

    def test_the_totals_of_a_type_count_no_device_twice(self):
        assert ResourcePool(DIVIDED).slots_per_resource_type == {"gpus": 2, "mig": 3}
        part = {"id": "0:0", "part_of": {"type": "gpus", "id": "0"}}
        with pytest.raises(InvalidSpecification, match="counted twice"):
            ResourcePool({"resources": {"gpus": [{"id": "0"}, part]}})


def test_a_member_of_a_request_may_have_other_keys_but_no_misspelt_keys():
    pool = ResourcePool({"gpus": 2})
    request = [{"type": "gpus", "slots": 1, "model": "h100", "why": {"a": [1]}}]
    assert pool.accommodates(request)
    assert pool.checkout(request) == {"gpus": [{"id": "0", "slots": 1}]}
    assert request[0]["model"] == "h100"
    for misspelt in ("slot", "Slots"):
        with pytest.raises(InvalidRequest, match="expected 'slots'"):
            pool.checkout([{"type": "gpus", misspelt: 2}])


def test_a_list_of_parts_in_a_member_is_refused_with_an_explanation():
    pool = ResourcePool({"resources": {"cpus": [{"id": "a", "slots": 3}, {"id": "b", "slots": 3}]}})
    taken = pool.checkout([{"type": "cpus", "slots": 3}, {"type": "cpus", "slots": 2}])
    before = pool.getstate()
    for parts in ([1], [1, 2], [4]):
        rows = [{"id": "a", "slots": slots} for slots in parts]
        with pytest.raises(InvalidCheckin, match=r"cpus a: 3 slots are checked out there, not"):
            pool.checkin({"cpus": rows})
        with pytest.raises(InvalidCheckin, match="return whole members"):
            pool.checkin(Allocation({"cpus": rows}, taken.number))
    assert pool.getstate() == before
    pool.checkin({"cpus": [{"id": "b", "slots": 2}]})
    with pytest.raises(InvalidCheckin, match="checked in before"):
        pool.checkin({"cpus": [{"id": "b", "slots": 2}]})

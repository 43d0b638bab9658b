"""The flat pool: the original's scenarios, its defects, which stay away, and what was decided."""

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
    """Return one member of so many slots per type."""
    return [{"type": kind, "slots": slots} for kind, slots in members.items()]


def free(pool: ResourcePool, kind: str) -> list:
    return [row["slots"] for row in pool.resources[kind]]


class TestScenariosOfTheOriginal:
    def test_fill_with_shorthand(self):
        pool = ResourcePool({"cpus": 2})
        assert pool.resources == {
            "cpus": [{"id": "0", "slots": 1}, {"id": "1", "slots": 1}],
            "gpus": [],
        }

    def test_checkout_of_two_and_two_from_four_and_four(self):
        pool = ResourcePool({"cpus": 4, "gpus": 4})
        taken = pool.checkout(2 * of(cpus=1) + 2 * of(gpus=1))
        assert {kind: [row["id"] for row in rows] for kind, rows in taken.items()} == {
            "cpus": ["0", "1"],
            "gpus": ["0", "1"],
        }
        assert free(pool, "cpus") == free(pool, "gpus") == [0, 0, 1, 1]

    @pytest.mark.parametrize("gpus", [0, 1])
    def test_populate(self, gpus):
        pool = ResourcePool()
        pool.populate(cpus=1, gpus=gpus)
        assert pool.getstate() == {
            "additional_properties": {},
            "resources": {
                "cpus": [{"id": "0", "slots": 1}],
                "gpus": [{"id": "0", "slots": 1}] * gpus,
            },
        }

    def test_additional_properties_are_kept(self):
        pool = ResourcePool({"resources": {"cpus": 1}, "additional_properties": {"a": {"b": 1}}})
        assert pool.getstate()["additional_properties"] == {"a": {"b": 1}}

    def test_best_fit(self):
        pool = ResourcePool(UNEVEN)
        taken = pool.checkout(of(cpus=1, gpus=1))
        assert (taken["cpus"][0]["id"], taken["gpus"][0]["id"]) == ("01", "02")
        pool.checkin(taken)
        taken = pool.checkout(of(cpus=3, gpus=3))
        assert (taken["cpus"][0]["id"], taken["gpus"][0]["id"]) == ("ab", "02")

    def test_a_failed_checkout_leaves_the_state_untouched(self):
        pool = ResourcePool(UNEVEN)
        before = pool.getstate()
        with pytest.raises(ResourceUnavailable):
            pool.checkout([*of(cpus=2, gpus=5), *of(gpus=4)])
        assert pool.getstate() == before

    def test_a_round_trip_restores_it_exactly(self):
        pool = ResourcePool(UNEVEN)
        before = pool.getstate()
        taken = pool.checkout(of(cpus=2, gpus=5))
        assert pool.getstate() != before
        pool.checkin(json.loads(json.dumps(taken)))
        assert pool.getstate() == before


class TestAccommodates:
    """S2 and S7: it agrees with checkout, whatever is checked out, in plain words."""

    def test_what_no_instance_can_hold_is_refused(self):
        pool = ResourcePool({"resources": {"gpus": [{"id": n, "slots": 2} for n in (0, 1)]}})
        outcome = pool.accommodates(of(gpus=3))
        assert not outcome
        assert outcome.reason == (
            "insufficient slots of gpus (requested 3, available 2) on any one instance"
        )

    def test_it_does_not_depend_on_what_is_checked_out(self):
        pool = ResourcePool({"cpus": 2})
        pool.checkout(2 * of(cpus=1))
        assert pool.accommodates(2 * of(cpus=1))
        assert free(pool, "cpus") == [0, 0]

    @pytest.mark.parametrize(
        ("request_", "reason"),
        [
            (of(a=1), "Resource unavailable: a"),
            (of(b=1, a=1, cpus=1), "Resources unavailable: a,b"),
            (3 * of(cpus=1), "insufficient slots of cpus (requested 3, available 2)"),
            (
                3 * of(gpus=1, cpus=1),
                (
                    "insufficient slots of cpus (requested 3, available 2),"
                    " gpus (requested 3, available 1)"
                ),
            ),
        ],
    )
    def test_reasons(self, request_, reason):
        assert ResourcePool({"cpus": 2, "gpus": 1}).accommodates(request_).reason == reason

    def test_of_nothing_it_is_possible(self):
        pool = ResourcePool({"cpus": 1})
        assert pool.accommodates([])
        assert pool.checkout([]) == {}


class TestRefusals:
    @pytest.mark.parametrize("ask", ["checkout", "accommodates"])
    def test_an_empty_pool_says_so(self, ask):
        with pytest.raises(EmptyResourcePoolError, match="empty"):
            getattr(ResourcePool(), ask)(of(cpus=1))

    def test_an_unknown_type_is_a_type_error_with_the_original_text(self):
        with pytest.raises(TypeError, match="Unknown resource requirement type") as caught:
            ResourcePool({"cpus": 1}).checkout(of(apples=1))
        assert isinstance(caught.value, UnknownResourceType)
        assert "'apples'" in str(caught.value)

    def test_unavailable_names_type_requested_and_available(self):
        """S6."""
        pool = ResourcePool({"gpus": 2})
        pool.checkout(of(gpus=1))
        with pytest.raises(ResourceUnavailable) as caught:
            pool.checkout(2 * of(gpus=1))
        assert str(caught.value) == "insufficient slots of gpus (requested 2, available 1)"

    @pytest.mark.parametrize(
        "member",
        [
            {"type": "cpus", "slots": 0},
            {"type": "cpus", "slots": -1},
            {"type": "cpus", "slots": float("nan")},
            {"type": "cpus", "slots": float("inf")},
            {"type": "cpus", "slots": True},
            {"type": "cpus", "slots": "1"},
            {"type": "cpus", "slots": None},
            {"type": "cpus", "slots": 10**10},
            {"type": "cpus", "slots": 1e-30},
            {"type": "cpus", "slot": 2},
            {"type": 3},
            {"slots": 1},
            "cpus",
            None,
        ],
    )
    @pytest.mark.parametrize("ask", ["checkout", "accommodates"])
    def test_a_malformed_member_changes_nothing(self, ask, member):
        pool = ResourcePool({"cpus": 4})
        before = pool.getstate()
        with pytest.raises(InvalidRequest, match="member 1"):
            getattr(pool, ask)([{"type": "cpus"}, member])
        assert pool.getstate() == before

    @pytest.mark.parametrize("request_", [None, 3, "cpus", {"type": "cpus"}])
    def test_a_request_is_a_list(self, request_):
        with pytest.raises(ValueError, match="expected a list"):
            ResourcePool({"cpus": 4}).checkout(request_)

    def test_all_of_them_are_one_tree(self):
        for error in (ResourceUnavailable, EmptyResourcePoolError, UnknownResourceType):
            assert issubclass(error, SlotsError)
        for error in (InvalidRequest, InvalidCheckin, InvalidSpecification):
            assert issubclass(error, SlotsError)
            assert issubclass(error, ValueError)


class TestCheckin:
    """S3: atomic, once, and only what was checked out here."""

    def test_twice_is_refused(self):
        pool = ResourcePool({"cpus": 2})
        taken = pool.checkout(of(cpus=1))
        pool.checkin(taken)
        with pytest.raises(InvalidCheckin, match="checked in before"):
            pool.checkin(taken)
        assert free(pool, "cpus") == [1, 1]

    def test_twice_is_refused_even_beside_an_equal_one(self):
        pool = ResourcePool({"resources": {"gpus": [{"id": "0", "slots": 2}]}})
        first, second = pool.checkout(of(gpus=1)), pool.checkout(of(gpus=1))
        assert first == second
        pool.checkin(first)
        for again in (first, copy.deepcopy(first), pickle.loads(pickle.dumps(first))):  # noqa: S301  # Our own.
            with pytest.raises(InvalidCheckin):
                pool.checkin(again)
        assert free(pool, "gpus") == [1]
        pool.checkin(dict(second))  # As JSON it is recognised by what it says.
        with pytest.raises(InvalidCheckin):
            pool.checkin(second)
        assert free(pool, "gpus") == [2]

    def test_of_another_pool_is_refused(self):
        pool, other = ResourcePool({"cpus": 2}), ResourcePool({"cpus": 2})
        pool.checkout(of(cpus=1))
        with pytest.raises(InvalidCheckin):
            pool.checkin(other.checkout(of(cpus=1)))
        assert free(pool, "cpus") == [0, 1]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"apples": [{"id": "0", "slots": 1}]},
            {"cpus": [{"id": "9", "slots": 1}]},
            {"cpus": [{"id": "1", "slots": 1}]},
            {"cpus": [{"id": "0", "slots": 2}]},
            {"cpus": [{"id": "0", "slots": 0}]},
            {"cpus": [{"id": "0", "slots": -1}]},
            {"cpus": [{"id": "0", "slots": float("nan")}]},
            {"cpus": [{"id": "0"}]},
            {"cpus": [{"id": "0", "slots": 1, "more": 1}]},
            {"cpus": [None]},
            {"cpus": {"id": "0", "slots": 1}},
            {3: []},
            {"cpus": [{"id": "0", "slots": 1}] * 2},
            [],
            None,
        ],
    )
    def test_malformed_or_partly_wrong_it_changes_nothing(self, wrong):
        pool = ResourcePool({"cpus": 4, "gpus": 1})
        pool.checkout(of(gpus=1, cpus=1))
        before = pool.getstate()
        if isinstance(wrong, dict):  # Valid members come first, and must not be given back.
            wrong = {"gpus": [{"id": "0", "slots": 1}], **wrong}
        with pytest.raises(InvalidCheckin):
            pool.checkin(wrong)
        assert pool.getstate() == before

    def test_some_members_first_and_the_others_later(self):
        pool = ResourcePool({"cpus": 2, "gpus": 1})
        taken = pool.checkout([*of(gpus=1), *2 * of(cpus=1)])
        gpus = taken.pop("gpus")
        pool.checkin(taken)
        assert (free(pool, "cpus"), free(pool, "gpus")) == ([1, 1], [0])
        pool.checkin({"gpus": gpus})
        assert free(pool, "gpus") == [1]


class TestStale:
    """S4, S9: nothing is left behind, and nothing changes by being looked at."""

    def test_clear_leaves_nothing(self):
        pool = ResourcePool({"cpus": 2})
        taken = pool.checkout(of(cpus=1))
        pool.clear()
        assert pool.slots_per_resource_type == {}
        assert pool.getstate() == {"additional_properties": {}, "resources": {}}
        pool.fill({"cpus": 2})
        with pytest.raises(InvalidCheckin):
            pool.checkin(taken)

    def test_pop_takes_the_totals_along(self):
        pool = ResourcePool({"cpus": 2, "gpus": 1})
        taken = pool.checkout(of(cpus=1, gpus=1))
        assert pool.pop("cpus") == [{"id": "0", "slots": 0}, {"id": "1", "slots": 1}]
        assert pool.slots_per_resource_type == {"gpus": 1}
        with pytest.raises(InvalidCheckin, match="cpus 0"):
            pool.checkin(taken)
        pool.checkin({"gpus": taken["gpus"]})
        assert free(pool, "gpus") == [1]

    def test_nodes_are_counted_without_a_trace(self):
        pool = ResourcePool({"cpus": 1})
        assert pool.count("node") == pool.count("nodes") == 1
        assert pool.additional_properties == {}
        pool.additional_properties["nodes"] = {"count": 7}
        assert pool.count("nodes") == 7

    def test_what_is_looked_at_is_a_copy(self):
        pool = ResourcePool({"resources": {"cpus": 1}, "additional_properties": {"a": [1]}})
        state = pool.getstate()
        state["additional_properties"]["a"].append(2)
        state["resources"]["cpus"][0]["slots"] = 7
        assert pool.getstate()["additional_properties"] == {"a": [1]}
        assert free(pool, "cpus") == [1]
        assert pool.slots_per_resource_type["cpus"] == 1


class TestPlain:
    """What a pool returns is data like any other; totals cannot be written, and say so."""

    @pytest.mark.parametrize(
        "dump",
        [
            yaml.safe_dump,
            yaml.dump,
            lambda data: yaml.dump(data, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)),
        ],
    )
    def test_results_are_plain_for_yaml_and_json(self, dump):
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
        assert yaml.safe_load(dump(results)) == json.loads(json.dumps(results)) == results

    @pytest.mark.parametrize(
        "write",
        [
            lambda pool: pool.slots_per_resource_type.__setitem__("cpus", 7),
            lambda pool: pool.slots_per_resource_type.update(cpus=7),
            lambda pool: pool.slots_per_resource_type.subtract(cpus=1),
        ],
    )
    def test_what_cannot_be_written_says_so_and_what_to_do(self, write):
        pool = ResourcePool({"cpus": 2})
        before = pool.getstate()
        with pytest.raises((TypeError, AttributeError), match=r"cannot be written; fill\(\)"):
            write(pool)
        assert pool.getstate() == before
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
    def test_what_is_written_takes_effect(self, write, cpus):
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
    def test_what_is_written_is_checked_first(self, write):
        pool = ResourcePool({"cpus": 2})
        before, view = pool.getstate(), pool.resources
        with pytest.raises(ValueError):  # The messages are those of `fill`.
            write(pool)
        assert pool.getstate() == before
        assert view == pool.resources

    def test_what_is_checked_out_stays_so(self):
        pool = ResourcePool(
            {"resources": {"gpus": [{"id": "a", "slots": 4}, {"id": "b", "slots": 2}]}}
        )
        taken = pool.checkout([{"type": "gpus", "slots": 3}, {"type": "gpus", "slots": 2}])
        view = pool.resources
        view["gpus"][0]["slots"] += 2
        assert free(pool, "gpus") == [3, 0]
        assert pool.slots_per_resource_type["gpus"] == 8
        pool.checkin({"gpus": taken["gpus"][1:]})
        view["gpus"].append({"id": "c", "slots": 9})  # The view is older than that checkin.
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
    def test_a_copy_of_what_cannot_be_written_can_be(self, again):
        pool = ResourcePool({"cpus": 2})
        resources, totals = again(pool.resources), again(pool.slots_per_resource_type)
        resources["gpus"] = [1]
        totals["cpus"] += 1
        assert (type(resources), type(totals)) == (dict, Counter)
        copied = pool.slots_per_resource_type.copy()
        copied.update(cpus=1)
        assert copied == {"cpus": 3, "gpus": 0}

    def test_extra_keys_of_instances_are_kept(self):
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

    @pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}, dt.date(2026, 1, 1)])
    def test_and_are_what_json_can_say(self, value):
        with pytest.raises(
            InvalidSpecification, match=r"gpus\[0\]: 'x': expected what JSON can say"
        ):
            ResourcePool({"resources": {"gpus": [{"id": "0", "x": value}]}})

    @pytest.mark.parametrize("key", ["slot", "slotss", "partof", "part-of"])
    def test_but_not_those_that_are_misspelt(self, key):
        with pytest.raises(InvalidSpecification, match=f"unknown {key!r}; expected"):
            ResourcePool({"resources": {"gpus": [{"id": "0", key: 2}]}})


class TestCopies:
    """A copy is a pool of its own, with all that the first one had, also what was checked out."""

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

    def test_in_another_process_numbers_are_still_each_ones_own(self):
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
        ran = subprocess.run(
            [sys.executable, "-c", program],
            input=pickle.dumps((pool, first)),
            capture_output=True,
            check=True,
            timeout=60,
        )
        assert ran.stdout == b"2\n"


class TestFractions:
    def test_tenths_do_not_drift(self):
        pool = ResourcePool({"gpus": 1})
        taken = [pool.checkout(of(gpus=0.1)) for _ in range(10)]
        assert free(pool, "gpus") == [0]
        assert taken[0] == {"gpus": [{"id": "0", "slots": 0.1}]}
        with pytest.raises(ResourceUnavailable, match=r"requested 0\.1, available 0\)"):
            pool.checkout(of(gpus=0.1))
        for each in taken:
            pool.checkin(json.loads(json.dumps(each)))
        assert free(pool, "gpus") == [1]
        assert type(free(pool, "gpus")[0]) is int

    def test_thirds_as_their_user_wrote_them(self):
        pool = ResourcePool({"gpus": 1})
        taken = [pool.checkout(of(gpus=1 / 3)) for _ in range(3)]
        with pytest.raises(ResourceUnavailable):
            pool.checkout(of(gpus=0.001))
        for each in taken:
            pool.checkin(each)
        assert free(pool, "gpus") == [1]

    def test_instances_may_have_fractions(self):
        pool = ResourcePool({"resources": {"gpus": [{"id": "a", "slots": 1.5}]}})
        pool.checkout(of(gpus=0.75))
        assert free(pool, "gpus") == [0.75]
        assert pool.slots_per_resource_type["gpus"] == 1.5


class TestParts:
    """MIG instances and their GPU are never handed out together, and never counted together."""

    def test_a_part_blocks_the_whole(self):
        pool = ResourcePool(DIVIDED)
        part = pool.checkout(of(mig=1))
        assert (pool.slots_available("gpus"), pool.slots_available("mig")) == (1, 2)
        assert pool.checkout(of(gpus=1)) == {"gpus": [{"id": "0", "slots": 1}]}
        with pytest.raises(ResourceUnavailable):
            pool.checkout(of(gpus=1))
        pool.checkin(part)
        assert pool.checkout(of(gpus=1)) == {"gpus": [{"id": "1", "slots": 1}]}

    def test_the_whole_blocks_its_parts(self):
        pool = ResourcePool(DIVIDED)
        both = pool.checkout(2 * of(gpus=1))
        assert pool.slots_available("mig") == 0
        with pytest.raises(ResourceUnavailable, match=r"mig \(requested 1, available 0\)"):
            pool.checkout(of(mig=1))
        pool.checkin(both)
        assert len(pool.checkout(3 * of(mig=1))["mig"]) == 3

    def test_both_in_one_request_are_refused_and_rolled_back(self):
        pool = ResourcePool(DIVIDED)
        before = pool.getstate()
        request = [*2 * of(gpus=1), *of(mig=1)]
        assert not pool.accommodates(request)
        with pytest.raises(ResourceUnavailable):
            pool.checkout(request)
        assert pool.getstate() == before
        assert pool.slots_available("mig") == 3

    def test_totals_of_a_type_count_no_device_twice(self):
        pool = ResourcePool(DIVIDED)
        assert pool.slots_per_resource_type == {"gpus": 2, "mig": 3}
        twice = {
            "resources": {
                "gpus": [{"id": "0"}, {"id": "0:0", "part_of": {"type": "gpus", "id": "0"}}]
            }
        }
        with pytest.raises(InvalidSpecification, match="counted twice"):
            ResourcePool(twice)

    def test_a_popped_type_blocks_nothing(self):
        pool = ResourcePool(DIVIDED)
        pool.checkout(of(mig=1))
        pool.pop("mig")
        assert len(pool.checkout(2 * of(gpus=1))["gpus"]) == 2

    def test_the_dump_keeps_them(self):
        pool = ResourcePool(DIVIDED)
        assert ResourcePool(pool.getstate()).getstate() == pool.getstate()


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_what_is_dumped_can_be_filled_in_again(form):
    pool = ResourcePool(UNEVEN)
    pool.checkout(of(cpus=2, gpus=0.5))
    file = io.StringIO()
    pool.dump(file, form)
    again = ResourcePool(read_specification(file.getvalue()))
    assert again.getstate() == pool.getstate()
    assert repr(again) == repr(pool)


def test_what_else_a_member_says_is_no_reason_to_refuse_it():
    pool = ResourcePool({"gpus": 2})
    request = [{"type": "gpus", "slots": 1, "model": "h100", "why": {"a": [1]}}]
    assert pool.accommodates(request)
    assert pool.checkout(request) == {"gpus": [{"id": "0", "slots": 1}]}
    assert request[0]["model"] == "h100"
    for misspelt in ({"type": "gpus", "slot": 2}, {"type": "gpus", "Slots": 2}):
        with pytest.raises(InvalidRequest, match="expected 'slots'"):
            pool.checkout([misspelt])


def test_a_part_of_a_member_is_refused_in_a_sentence_that_says_so():
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


def test_totals_may_be_written_as_what_they_are():
    pool = ResourcePool({"cpus": 2})
    pool.slots_per_resource_type = Counter(cpus=2)
    for wrong in ({"cpus": 3}, {}):
        with pytest.raises(TypeError, match="counted from what the pool has"):
            pool.slots_per_resource_type = Counter(wrong)
    assert pool.slots_per_resource_type == {"cpus": 2, "gpus": 0}

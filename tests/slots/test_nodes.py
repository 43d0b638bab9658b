"""Tests of the pool of several nodes: colocation, exclusive nodes, gangs, exact returns."""

import copy
import io
import json
import os
import pickle
import platform

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from moorage.slots import (
    EmptyResourcePoolError,
    InvalidCheckin,
    InvalidRequest,
    InvalidSpecification,
    NodeRequest,
    NodeResourcePool,
    ResourceUnavailable,
    UnknownResourceType,
    read_specification,
)


def pool_of(**gpus) -> NodeResourcePool:
    """Return a pool of nodes, each with a given number of GPUs and eight CPUs."""
    nodes = [{"id": name, "resources": {"gpus": n, "cpus": 8}} for name, n in gpus.items()]
    return NodeResourcePool({"nodes": nodes})


def one(**resources) -> NodeResourcePool:
    """Return a pool with one node, `a`."""
    return NodeResourcePool({"nodes": [{"id": "a", "resources": resources}]})


def gpus(count: int, *, exclusive: bool = False) -> NodeRequest:
    return NodeRequest(exclusive=exclusive).add("gpus", count=count)


def nodes_of(allocation) -> list[str]:
    return allocation["metadata"]["nodes"]


def test_a_request_is_served_by_one_node():
    pool = pool_of(a=2, b=2)
    for _ in range(2):
        pool.checkout([gpus(1)])
    assert sum(pool.slots_by_node("gpus").values()) == 2
    with pytest.raises(ResourceUnavailable, match=r"requested 2, available 1.* on any one node"):
        pool.checkout([gpus(2)])
    taken = pool.checkout([gpus(1).add("cpus", count=2)])
    assert {row["node"] for rows in taken["resources"].values() for row in rows} == {"a"}


def test_an_allocation_has_metadata_and_names_its_nodes():
    taken = pool_of(a=1).checkout([gpus(1)])
    number = taken["metadata"]["allocation"]
    assert taken == {
        "metadata": {"allocation": number, "nodes": ["a"], "exclusive": []},
        "resources": {"gpus": [{"node": "a", "id": "0", "slots": 1}]},
    }
    assert yaml.safe_load(yaml.safe_dump(taken)) == taken


def test_the_largest_request_is_placed_first_on_the_node_with_most_room():
    pool = pool_of(a=2, b=4, c=3)
    assert nodes_of(pool.checkout([gpus(1)])) == ["b"]
    assert nodes_of(pool.checkout([gpus(1)])) == ["b"]  # Of equal nodes, the first listed one.
    assert nodes_of(pool.checkout([gpus(1)])) == ["c"]
    # The length counts the free slots of all types, not only of the requested type.
    assert nodes_of(pool.checkout([NodeRequest().add("cpus")])) == ["a"]
    taken = pool_of(a=4, b=2).checkout([gpus(2), gpus(3)])
    assert nodes_of(taken) == ["b", "a"], "in the order of the request"


def test_a_flat_request_is_for_one_node_or_the_requested_number_of_nodes():
    pool = pool_of(a=4, b=4)
    assert len(nodes_of(pool.checkout([{"type": "gpus"}] * 2))) == 1
    taken = pool.checkout([{"type": "nodes", "slots": 2}, {"type": "gpus"}, {"type": "gpus"}])
    assert sorted(nodes_of(taken)) == ["a", "b"]
    assert len(taken["resources"]["gpus"]) == 4


def test_a_pool_may_refuse_requests_for_several_nodes():
    pool = pool_of(a=4, b=4)
    with pytest.raises(ResourceUnavailable, match="only one is allowed"):
        pool.checkout([gpus(1), gpus(1)], allow_multinode=False)
    strict = NodeResourcePool(pool.getstate(), allow_multinode=False)
    assert not strict.accommodates([gpus(1), gpus(1)])
    assert strict.accommodates([gpus(1), gpus(1)], allow_multinode=True)
    assert strict.checkout([gpus(1)])


class TestExclusive:
    def test_an_exclusive_request_gets_no_node_in_use(self):
        pool = pool_of(a=4, b=1)
        shared = pool.checkout([gpus(1)])
        assert nodes_of(shared) == ["a"]
        assert nodes_of(pool.checkout([gpus(1, exclusive=True)])) == ["b"]
        assert pool.slots_by_node("gpus") == {"a": 3, "b": 0}
        with pytest.raises(ResourceUnavailable, match="exclusive"):
            pool.checkout([gpus(0, exclusive=True).add("cpus")])
        pool.checkin(shared)
        assert nodes_of(pool.checkout([gpus(1, exclusive=True)])) == ["a"]

    def test_an_exclusive_request_gets_the_whole_node(self):
        pool = pool_of(a=2, b=4)
        taken = pool.checkout([gpus(3, exclusive=True).add("cpus")])
        assert nodes_of(taken) == ["b"]
        assert [row["id"] for row in taken["resources"]["gpus"]] == ["0", "1", "2", "3"]
        assert len(taken["resources"]["cpus"]) == 8
        assert pool.get_node("b")["resources"]["cpus"][7] == {"id": "7", "slots": 0}
        with pytest.raises(ResourceUnavailable, match="requested 3, available 2"):
            pool.checkout([gpus(3, exclusive=True)])
        rest = pool.checkout([NodeRequest(exclusive=True)])["resources"]
        assert {kind: len(rows) for kind, rows in rest.items()} == {"gpus": 2, "cpus": 8}
        pool.checkin(json.loads(json.dumps(taken)))
        assert pool.slots_by_node("gpus") == {"a": 0, "b": 4}

    def test_an_exclusive_request_gets_a_divided_gpu_whole_or_in_all_parts(self):
        pool = one(gpus=[{"id": "0", "slots": 4}])
        taken = pool.checkout([NodeRequest(exclusive=True).add("gpus", 2, slots=0.5)])
        assert taken["resources"] == {"gpus": [{"node": "a", "id": "0", "slots": 4}]}
        mig = [{"id": f"0:{n}", "part_of": {"type": "gpus", "id": "0"}} for n in range(3)]
        pool = one(gpus=2, mig=mig)
        taken = pool.checkout([NodeRequest(exclusive=True)])
        assert set(taken["resources"]) == {"gpus"}
        pool.checkin(taken)
        assert pool.slots_by_node("mig") == {"a": 3}
        taken = pool.checkout([NodeRequest(exclusive=True).add("mig")])["resources"]
        assert [row["id"] for row in taken["mig"]] == ["0:0", "0:1", "0:2"]
        assert [row["id"] for row in taken["gpus"]] == ["1"]

    def test_an_exclusive_request_is_placed_before_other_requests_take_its_only_node(self):
        pool = pool_of(a=3, b=2)
        pool.checkout([gpus(1)])
        taken = pool.checkout([gpus(2), gpus(1, exclusive=True)])
        assert nodes_of(taken) == ["a", "b"]


class TestCheckin:
    def test_a_second_checkin_is_refused_despite_an_equal_allocation(self):
        pool = one(gpus=[{"id": "0", "slots": 2}])
        first, second = pool.checkout([gpus(1)]), pool.checkout([gpus(1)])
        assert first["resources"] == second["resources"]
        pool.checkin(first)
        with pytest.raises(InvalidCheckin, match="checked in before"):
            pool.checkin(first)
        assert pool.slots_by_node("gpus") == {"a": 1}
        pool.checkin(second)

    @pytest.mark.parametrize(
        "change",
        [
            lambda taken: taken["resources"].update(gpus=[]),
            lambda taken: taken["resources"]["gpus"][0].update(id="3"),
            lambda taken: taken["resources"]["gpus"][0].update(slots=2),
            lambda taken: taken["resources"]["gpus"][0].update(node="z"),
            lambda taken: taken["resources"]["gpus"][0].update(node=[]),
            lambda taken: taken["resources"]["gpus"].append({"node": "a", "id": "1", "slots": 1}),
            lambda taken: taken.pop("resources"),
            lambda taken: taken.pop("metadata"),
            lambda taken: taken["metadata"].update(allocation="x"),
            lambda taken: taken["metadata"].update(allocation=None),
            lambda taken: taken["metadata"].update(allocation=0),
        ],
    )
    def test_a_modified_allocation_is_refused_and_changes_nothing(self, change):
        pool = pool_of(a=4)
        taken = pool.checkout([gpus(1)])
        before = pool.getstate()
        changed = json.loads(json.dumps(taken))
        change(changed)
        with pytest.raises(InvalidCheckin):
            pool.checkin(changed)
        assert pool.getstate() == before
        pool.checkin(taken)


def test_the_pool_reports_counts_of_instances_and_slots_per_node():
    pool = pool_of(a=2, b=4)
    pool.checkout([gpus(1)])
    assert pool.count("nodes") == pool.count("node") == 2
    assert pool.count("gpus") == pool.count("gpu") == 6
    assert pool.count_by_node("gpu") == {"a": 2, "b": 4}
    assert pool.slots_by_node("gpu") == {"a": 2, "b": 3}
    assert pool.count_per_node("cpus") == pool.count_per_node("cpu") == 8
    with pytest.raises(ResourceUnavailable, match="of each: a has 2, b has 4") as caught:
        pool.count_per_node("gpus")
    assert isinstance(caught.value, ValueError)
    assert (pool.nodes, pool.types, pool.empty()) == (["a", "b"], ["cpus", "gpus"], False)
    assert "gpus" in pool
    with pytest.raises(ResourceUnavailable, match="apples"):
        pool.count("apples")


def test_a_node_request_counts_its_members_and_can_be_a_key():
    request = NodeRequest().add("cpus", 4)
    assert (request.count("cpus"), request.total_slots("cpus")) == (4, 4)
    assert len(pool_of(a=1).checkout([request])["resources"]["cpus"]) == 4
    request, same = (NodeRequest([{"type": "cpus"}]).add("gpus", 3, 0.5) for _ in range(2))
    assert (request.count("gpus"), request.total_slots("gpus")) == (3, 1.5)
    assert request.total_slots() == 2.5
    assert len({request.freeze(), same.freeze()}) == 1
    assert same.freeze() != NodeRequest(exclusive=True).freeze()


def test_populate_and_get_node_work_as_documented():
    pool = NodeResourcePool()
    pool.populate(nodes=2, cpus=3, gpus=1, licences=2)
    assert pool.nodes == ["0", "1"]
    counts = {"cpus": 3, "gpus": 1, "licences": 2}
    rows = {kind: [{"id": str(n), "slots": 1} for n in range(m)] for kind, m in counts.items()}
    assert pool.get_node("1") == {"id": "1", "resources": rows, "additional_properties": {}}
    pool.get_node("1")["resources"]["gpus"].clear()
    assert pool.count("gpus") == 2
    pool.populate()
    assert pool.count("nodes") == 1
    assert pool.count("cpus") == len(os.sched_getaffinity(0))
    assert pool.nodes == [platform.node()]
    with pytest.raises(ResourceUnavailable, match="node 7; there are"):
        pool.get_node("7")
    with pytest.raises(InvalidSpecification, match="nodes: expected a count"):
        pool.populate(nodes=-1)


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))],  # noqa: S301  # Our own.
)
def test_a_pool_can_be_copied_and_pickled(again):
    pool = pool_of(a=2, b=4)
    taken = pool.checkout([gpus(1, exclusive=True)])
    other = again(pool)
    assert other.getstate() == pool.getstate()
    other.checkin(taken)
    assert other.slots_by_node("gpus") == {"a": 2, "b": 4}
    assert pool.slots_by_node("gpus") == {"a": 2, "b": 0}
    pool.checkin(taken)
    assert nodes_of(other.checkout([gpus(3)])) == ["b"]


def test_extra_keys_of_instances_remain():
    pool = one(gpus=[{"id": "0", "slots": 1, "uuid": "GPU-1"}])
    assert pool.checkout([gpus(1)])["resources"]["gpus"] == [{"node": "a", "id": "0", "slots": 1}]
    assert pool.get_node("a")["resources"]["gpus"] == [{"id": "0", "slots": 0, "uuid": "GPU-1"}]


def test_accommodates_of_a_node_pool_ignores_checkouts():
    pool = pool_of(a=2, b=2)
    pool.checkout([NodeRequest(exclusive=True), NodeRequest(exclusive=True)])
    before = pool.getstate()
    assert pool.accommodates([gpus(2), gpus(2)])
    assert pool.accommodates([gpus(2, exclusive=True)])
    assert not pool.accommodates([gpus(3)])
    assert pool.accommodates([{"type": "x"}]).reason == "Resource unavailable: x"
    assert pool.getstate() == before


def test_refused_requests_have_the_documented_errors():
    with pytest.raises(EmptyResourcePoolError):
        NodeResourcePool().checkout([gpus(1)])
    with pytest.raises(EmptyResourcePoolError):
        NodeResourcePool().accommodates([gpus(1)])
    with pytest.raises(UnknownResourceType, match="'apples'"):
        pool_of(a=1).checkout([{"type": "apples"}])
    for wrong in ([3], "gpus", [{"type": "nodes", "slots": 1.5}], [gpus(1), {"type": "gpus"}]):
        with pytest.raises(InvalidRequest):
            pool_of(a=1).checkout(wrong)
    for count in (-1, 1.5, "2", True):
        with pytest.raises(InvalidRequest, match="count"):
            NodeRequest().add("gpus", count=count)


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"gpus": 4}, "nodes: expected a list"),
        ({"resources": {"gpus": 4}}, "nodes: expected a list"),
        ({"nodes": [{"resources": {}}]}, r"nodes\[0\]"),
        ({"nodes": [{"id": "a"}, {"id": "a"}]}, "'a' occurs twice"),
        ({"nodes": [{"id": "a", "resources": {"gpus": [3]}}]}, r"nodes\[0\].resources.gpus\[0\]"),
        ({"nodes": [{"id": "a", "reources": {}}]}, r"nodes\[0\]: unknown 'reources'"),
        ({"nodes": [], "gpus": 1}, "pool: unknown 'gpus'"),
    ],
)
def test_a_wrong_description_names_its_place(document, place):
    with pytest.raises(InvalidSpecification, match=place):
        NodeResourcePool(document)


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_a_dumped_pool_can_be_filled_again(form):
    pool = pool_of(a=2, b=4)
    pool.additional_properties["site"] = "lab"
    file = io.StringIO()
    pool.dump(file, form)
    assert NodeResourcePool(read_specification(file.getvalue())).getstate() == pool.getstate()


def test_a_request_moves_to_another_node_for_a_request_that_fits_on_only_one_node():
    pool = pool_of(full=1, none=0)
    request = [NodeRequest(exclusive=True), NodeRequest().add("gpus")]
    assert pool.accommodates(request)
    assert nodes_of(pool.checkout(request)) == ["none", "full"]


SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=4)
REQUESTS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans()), min_size=1, max_size=3
)


@given(SIZES, st.lists(REQUESTS, max_size=6))
def test_a_node_pool_gives_no_slot_twice_and_gets_all_slots_back(sizes, requests):
    pool = pool_of(**{f"n{number}": size for number, size in enumerate(sizes)})
    idle = pool.getstate()
    held = []
    for wanted in requests:
        request = [
            NodeRequest(exclusive=alone).add("gpus", count=some).add("cpus", count=more)
            for some, more, alone in wanted
        ]
        fits, before = pool.accommodates(request), pool.getstate()
        try:
            held.append(pool.checkout(request))
        except ResourceUnavailable:
            assert held or not fits
            assert pool.getstate() == before
        else:
            assert fits
    rows = [
        (row["node"], kind, row["id"])
        for each in held
        for kind, listed in each["resources"].items()
        for row in listed
    ]
    assert len(rows) == len(set(rows))
    for each in held:
        assert len(set(nodes_of(each))) == len(nodes_of(each))
        for name in each["metadata"]["exclusive"]:
            assert sum(name in nodes_of(other) for other in held) == 1
    for each in reversed(held):
        pool.checkin(json.loads(json.dumps(each)))
    assert pool.getstate() == idle


class TestLikeCanarys:
    """Tests of the interface that this pool shares with the node pool of the program canary."""

    @pytest.fixture
    def pool(self):
        nodes = [
            {"id": "a", "resources": {"cpus": 2, "gpus": [{"id": "0", "slots": 4}]}},
            {"id": "b", "resources": {"cpus": 1}},
        ]
        return NodeResourcePool({"nodes": nodes, "additional_properties": {"site": "lab"}})

    def test_a_pool_of_nodes_returns_its_contents(self, pool):
        assert pool.node_ids() == ["a", "b"]
        assert pool.get_property("site") == "lab"
        assert pool.get_property("x") is None
        pool.checkout([NodeRequest().add("gpus", slots=3)])
        assert pool.resources == {
            "cpus": [
                {"id": "0", "slots": 1, "node": "a"},
                {"id": "1", "slots": 1, "node": "a"},
                {"id": "0", "slots": 1, "node": "b"},
            ],
            "gpus": [{"id": "0", "slots": 1, "node": "a"}],
        }
        assert (pool.slots_available("gpu"), pool.slots_capacity("gpus")) == (1, 4)
        assert (pool.slots_available("cpus"), pool.slots_capacity("cpu")) == (3, 3)
        assert (pool.slots_available("nodes"), pool.slots_capacity("node")) == (2, 2)
        assert pool.slots_capacity("fpgas") == 0
        assert pool.slots_per_resource_type == {"cpus": 3, "gpus": 4}
        with pytest.raises(ResourceUnavailable):
            pool.slots_available("fpgas")

    def test_a_node_with_an_exclusive_request_has_no_slots_available(self, pool):
        pool.checkin(pool.checkout([NodeRequest(exclusive=True).add("gpus")]))
        assert (pool.slots_available("cpus"), pool.slots_capacity("cpus")) == (3, 3)
        pool.checkout([NodeRequest(exclusive=True).add("gpus")])
        assert (pool.slots_available("cpus"), pool.slots_capacity("cpus")) == (1, 3)

    def test_nodes_can_be_added_to_a_pool(self, pool):
        pool.add_node({"id": "c", "resources": {"gpus": 1}, "additional_properties": {"rack": 1}})
        assert pool.node_ids() == ["a", "b", "c"]
        assert pool.get_node("c")["additional_properties"] == {"rack": 1}
        assert pool.checkout([NodeRequest().add("gpus") for _ in range(2)])
        for wrong in ({"id": "c"}, {"resources": {}}, {"id": "d", "gpus": 1}, "d"):
            with pytest.raises(InvalidSpecification):
                pool.add_node(wrong)
        assert pool.node_ids() == ["a", "b", "c"]

    def test_counts_and_slots_of_a_type_can_be_set(self, pool):
        pool.set_resource_count("gpus", 2)
        assert pool.count_by_node("gpus") == {"a": 2, "b": 2}
        pool.set_resource_count("gpus", 1, node_id="b")
        pool.multiply_slots_per_resource("gpu", 3)
        assert pool.slots_by_node("gpus") == {"a": 6, "b": 3}
        pool.set_slots_per_resource("gpus", 5, node_id="b")
        assert pool.slots_by_node("gpus") == {"a": 6, "b": 5}
        pool.multiply_slots_per_resource("gpus", 0.5, node_id="b")
        assert pool.slots_available("gpus") == 8.5
        pool.set_resource_count("fpgas", 1, node_id="b")
        with pytest.raises(ResourceUnavailable, match="fpgas on node a"):
            pool.multiply_slots_per_resource("fpgas", 2, node_id="a")
        with pytest.raises(ResourceUnavailable, match="node z"):
            pool.set_resource_count("gpus", 2, node_id="z")
        with pytest.raises(ResourceUnavailable):
            pool.multiply_slots_per_resource("tpus", 2)
        before = pool.getstate()
        for wrong in (
            lambda: pool.set_resource_count("gpus", -1),
            lambda: pool.set_resource_count("nodes", 1),
            lambda: pool.multiply_slots_per_resource("gpus", 0),
            lambda: pool.multiply_slots_per_resource("gpus", "2"),
            lambda: pool.set_slots_per_resource("gpus", float("nan")),
        ):
            with pytest.raises(InvalidSpecification):
                wrong()
        assert pool.getstate() == before

    def test_checkouts_survive_changes_of_the_pool(self, pool):
        taken = pool.checkout([NodeRequest().add("gpus", slots=3).add("cpus", 2)])
        before = pool.getstate()
        for wrong in (
            lambda: pool.set_resource_count("gpus", 1),
            lambda: pool.set_resource_count("cpus", 1),
            lambda: pool.multiply_slots_per_resource("gpus", 0.5),
        ):
            with pytest.raises(InvalidSpecification, match="checked out"):
                wrong()
            assert pool.getstate() == before
        pool.multiply_slots_per_resource("gpus", 2)
        pool.set_resource_count("cpus", 3)
        assert (pool.slots_available("gpus"), pool.slots_available("cpus")) == (5, 4)
        pool.checkin(taken)
        assert (pool.slots_available("gpus"), pool.slots_available("cpus")) == (8, 6)

    def test_a_type_of_a_node_pool_can_be_removed_and_the_pool_can_be_cleared(self, pool):
        taken = pool.checkout([NodeRequest().add("gpus", slots=3).add("cpus")])
        assert pool.pop("gpus") == [{"id": "0", "slots": 1, "node": "a"}]
        assert pool.pop("gpus") is None
        assert pool.types == ["cpus"]
        pool.checkin(taken)
        assert pool.slots_available("cpus") == 3
        taken = pool.checkout([NodeRequest().add("cpus")])
        pool.clear()
        assert pool.empty()
        assert pool.getstate() == {"additional_properties": {}, "nodes": []}
        with pytest.raises(InvalidCheckin):
            pool.checkin(taken)

    def test_a_node_request_may_have_additional_keys(self, pool):
        request = NodeRequest([{"type": "gpus", "slots": 2, "model": ["h100"]}]).add("cpus", 2)
        assert request.resources == [
            {"type": "gpus", "slots": 2, "model": ["h100"]},
            {"type": "cpus", "slots": 1},
            {"type": "cpus", "slots": 1},
        ]
        assert request.totals() == {"gpus": 2, "cpus": 2}
        assert hash(request.freeze())
        taken = pool.checkout([request])
        assert taken["resources"]["gpus"] == [{"node": "a", "id": "0", "slots": 2}]


def test_the_error_for_a_checkin_of_an_unknown_node_names_the_node():
    pool = pool_of(a=2)
    before = pool.getstate()
    for more, said in (({}, "missing node in gpus"), ({"node": "z"}, "unknown node 'z' in gpus")):
        row = {"id": "0", "slots": 1, **more}
        with pytest.raises(ValueError, match=said):
            pool.checkin({"metadata": {}, "resources": {"gpus": [row]}})
    assert pool.getstate() == before

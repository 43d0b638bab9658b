"""A refusal says whether the request could ever fit, which changes help, and each node's lack."""

import json

import numpy as np
import pytest
from by_hand import Hand, answers, ask, nodes, place
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from moorage.core.fit.verdicts import NodeKinds
from moorage.model import Cluster, ClusterId, Code, Demand, Gpu, Node, NodeId
from moorage.policy import Fleet
from moorage.records.fields import field_title


def refusal(hand: Hand, demand: Demand, **more):
    (answer,) = answers(hand.ask(ask(f"r{next(hand.numbers)}", demand, **more)))
    return answer


def fleet() -> Hand:
    """A fleet of one node with eight A100 and two nodes with four H100 each."""
    hand = Hand.seeing(nodes(1, 8))
    h100 = tuple(Gpu(str(number), "H100", 40_960) for number in range(4))
    pair = tuple(Node(NodeId(f"h{n}"), 32_000, 16_384, h100) for n in range(2))
    hand.see(Cluster(ClusterId("h"), pair))
    return hand


@pytest.mark.parametrize(
    ("demand", "field", "fits"),
    [
        (Demand(gpus=9), "resources.gpus", 8),
        (Demand(gpus=2, nodes=4), "resources.nodes", 3),
        (Demand(gpus=1, cpu_milli=70_000), "resources.cpu_milli", 64_000),
        (Demand(gpus=1, memory_mib=99_999), "resources.memory_mib", 65_536),
        (Demand(gpus=1, gpu_memory_mib=90_000), "resources.gpu_memory_mib", 81_920),
        (Demand(gpus=1, models=("T4",)), "resources.models", ["A100", "H100"]),
        (Demand(gpus=8, models=("H100",)), "resources.gpus", 4),
        (Demand(gpus=4, topology="nvlink"), "resources.gpus", 1),
        (Demand(gpus=1, nodes=2, topology="rack"), "resources.nodes", 1),
    ],
)
def test_a_refusal_names_the_smallest_helpful_change(
    demand: Demand, field: str, fits: object
) -> None:
    no = refusal(fleet(), demand)
    assert (no.code, no.details["verdict"]) == (Code.NEVER_FITS, "never")
    assert no.details["largest"]["models"] == ["A100", "H100"]
    change = no.details["fits_if"][0]
    assert (change["field"], change["fits"]) == (field, fits)
    assert f"It would fit with {field_title(field)}: " in no.reason
    largest = no.details["largest"]
    assert (largest["nodes"], largest["cpu_milli"], largest["memory_mib"]) == (3, 64_000, 65_536)
    json.dumps(no.details)


def test_a_refusal_names_the_largest_amounts_if_no_single_change_helps() -> None:
    no = refusal(fleet(), Demand(gpus=9, cpu_milli=70_000))
    assert no.details["fits_if"] == []
    assert (no.details["largest"]["gpus"], no.details["largest"]["cpu_milli"]) == (8, 64_000)


@pytest.mark.parametrize(
    ("model", "meant"),
    [("a100", "A100"), ("a100-sxm-80gb", "A100-SXM4-80GB"), ("A10", ""), ("T100", "")],
)
def test_the_refusal_of_a_misspelt_model_suggests_the_nearest_model(model: str, meant: str) -> None:
    hand = Hand()
    gpus = (Gpu("0", "A100"), Gpu("1", "A100-SXM4-80GB"))
    hand.see(Cluster(ClusterId("c"), (Node(NodeId("n"), 1000, 1000, gpus),)))
    reason = refusal(hand, Demand(gpus=1, models=(model,))).reason
    assert f"(did you mean {meant}?)" in reason if meant else "did you mean" not in reason


def test_a_refusal_names_other_clusters_as_a_helpful_change() -> None:
    no = refusal(fleet(), Demand(gpus=1, models=("A100",)), candidates=(ClusterId("h"),))
    assert [each["field"] for each in no.details["fits_if"]] == ["resources.models", "clusters"]


def test_a_request_for_taken_gpus_gets_the_verdict_not_now() -> None:
    hand = Hand.seeing(nodes(1, 2))
    hand.grant(ask("one", Demand(gpus=2)), place("n000", "0", "1"))
    assert refusal(hand, Demand(gpus=1)).details["verdict"] == "not_now"
    hand.ask(ask("late", Demand(gpus=1), wait=5))
    assert hand.inquire("why", subject="late")["verdict"] == "not_now"


def test_the_answer_to_why_lists_the_nodes_closest_to_fit_first() -> None:
    hand = Hand.seeing(nodes(4, 8))
    hand.grant(ask("a", Demand(gpus=2)), place("n001", "0", "1"))
    hand.grant(ask("b", Demand(gpus=5)), place("n002", *"01234"))
    hand.see(nodes(1, 4, name="z"))
    hand.grant(ask("c", Demand(gpus=8)), place("n000", *"01234567"))
    hand.grant(ask("d", Demand(gpus=8)), place("n003", *"01234567"))
    hand.ask(ask("late", Demand(gpus=8), wait=5))
    reply = hand.inquire("why", subject="late", filters={"nodes": True})
    rows = reply["node_verdicts"]
    assert [row["text"] for row in rows] == [
        "n001 lacks 2 of 8 GPUs free",
        "n002 lacks 5 of 8 GPUs free",
        "n000 lacks 8 of 8 GPUs free",
        "n003 lacks 8 of 8 GPUs free",
        "n000 lacks 4 of 8 GPUs that fit",
    ]
    assert [row["verdict"] for row in rows] == [*["not_now"] * 4, "never"]
    found, after = [], ""
    while after is not None:
        page = hand.inquire("why", subject="late", filters={"nodes": True}, after=after, limit=2)
        found += page["node_verdicts"]
        after = page["next"]
    assert found == rows
    yes = hand.inquire("why", subject="a", filters={"nodes": True})["node_verdicts"]
    assert yes[0]["text"] == "n001 fits"
    assert "node_verdicts" not in hand.inquire("why", subject="late")


def test_why_refuses_an_invalid_cursor_of_a_page_of_nodes() -> None:
    hand = Hand.seeing(nodes(1, 1))
    hand.grant(ask("a", Demand(gpus=1)), place("n000", "0"))
    respond = hand.inquire("why", subject="a", filters={"nodes": True}, after="x")
    assert respond.answer.code is Code.BAD_MESSAGE


DEMANDS = st.builds(
    Demand,
    gpus=st.integers(0, 5),
    gpu_milli=st.sampled_from([400, 1_000]),
    models=st.sampled_from([(), ("T4",), ("A100", "none")]),
    gpu_memory_mib=st.sampled_from([0, 10, 30]),
    cpu_milli=st.integers(0, 9).map(lambda n: n * 1_000),
    nodes=st.integers(1, 4),
    topology=st.sampled_from(["", "nvlink", "numa", "rack", "zone"]),
)
GPUS = st.builds(
    lambda model, memory, link: (model, memory, link),
    st.sampled_from(["T4", "A100"]),
    st.sampled_from([10, 20]),
    st.sampled_from(["", "x", "y"]),
)
NODES = st.tuples(st.lists(GPUS, max_size=4), st.integers(1, 4), st.sampled_from(["", "r1", "r2"]))


@given(st.lists(NODES, min_size=1, max_size=5), DEMANDS)
def test_each_suggested_change_is_the_largest_that_fits(rows, demand) -> None:
    made = tuple(
        Node(
            NodeId(f"n{at}"),
            cpu * 1_000,
            1_024,
            tuple(Gpu(str(g), *gpu) for g, gpu in enumerate(gpus)),
            rack,
        )
        for at, (gpus, cpu, rack) in enumerate(rows)
    )
    hand = Hand.seeing(Cluster(ClusterId("c"), made))
    judge, fleet = hand.allocator.feasibility, hand.allocator.state.fleet
    if judge.fits(demand, None):
        return
    reply = judge.refusal(demand, None)
    assert reply.details["verdict"] == "never"  # The fleet is empty.
    for change in reply.details["fits_if"]:
        name = change["field"].removeprefix("resources.")
        fits = change["fits"]
        for value in [(each,) for each in fits] if name == "models" else [fits]:
            assert judge.fits(replace(demand, **{name: value}), None)
        if name in {"gpus", "nodes"}:
            assert not judge.fits(replace(demand, **{name: fits + 1}), None)
    for alone in ("gpus", "nodes"):
        if not any(each["field"] == f"resources.{alone}" for each in reply.details["fits_if"]):
            assert not getattr(demand, alone) > 1 or not judge.fits(
                replace(demand, **{alone: 1}), None
            )
    assert len(fleet) == len(made)


def test_a_kind_of_node_is_judged_once_until_the_fleet_changes() -> None:
    big = Fleet()
    big.install([nodes(500, 8), nodes(2, 4, name="z")])
    kinds = NodeKinds(big)
    demand = Demand(gpus=9)
    allowed = np.ones(len(big), np.bool_)
    enough = lambda able, _: bool(able.any())  # noqa: E731  # A stand-in for the count in `Feasibility`.
    assert kinds.changes(demand, allowed, enough)["fits_if"][0]["fits"] == 8
    big.remove("c")
    allowed = np.ones(len(big), np.bool_)
    assert kinds.changes(demand, allowed, enough)["fits_if"][0]["fits"] == 4

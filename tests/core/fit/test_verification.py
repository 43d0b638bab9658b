"""Tests of refusals of proposals that name missing clusters, nodes or devices."""

import pytest
from by_hand import Hand, answers, ask, both, nodes, place
from msgspec.structs import replace

from moorage.core.state.facts import Refusal
from moorage.model import Cluster, ClusterId, Demand, Gpu, Node, NodeId


def refusal(hand: Hand, value: object, demand: Demand | None = None, **more: object) -> str:
    request = ask("r", demand, **more)
    (no,) = answers(hand.grant(request if demand else replace(request, terms=None), value))
    assert isinstance(no, Refusal)
    return no.reason


@pytest.fixture
def hand() -> Hand:
    hand = Hand.seeing(nodes(3, 2))
    hand.see(nodes(1, 1, "d"))
    return hand


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (place("west", "0"), "“west” is none; there are n000, n001, n002."),
        (place("n02", "0"), "“n02” is none; there are n002, "),
        (place("n001", "7"), "“7” is none; there are 0, 1."),
        ({"cluster_id": "cc", "node_id": "n000", "gpus": []}, "“cc” is none; there are c, d."),
    ],
)
def test_a_refused_proposal_names_the_existing_choices(hand, value, said):
    assert said in refusal(hand, value, Demand(gpus=1))


@pytest.mark.parametrize("demand", [None, Demand(gpus=2)])
def test_a_proposal_of_gpus_without_a_node_is_placed_on_a_single_node(hand, demand):
    value = {"cluster_id": "c", "gpus": ["0", "7"]}
    assert "“7” is none; there are 0, 1." in refusal(hand, value, demand)
    ours = (Gpu("own", "A100", 81_920), Gpu("0", "A100", 81_920))
    hand.see(both(nodes(1, 2), Cluster(ClusterId("c"), (Node(NodeId("m"), 1, 1, ours),))))
    value["gpus"] = ["own", "1"]
    assert "no node has all of them" in refusal(hand, value, demand)
    value["gpus"] = ["own", "0"]
    (answer,) = answers(hand.grant(replace(ask("s", demand), terms=None), value))
    assert not isinstance(answer, Refusal)


def test_the_node_chosen_for_named_gpus_has_these_gpus_free(hand):
    hand.grant(ask("first", Demand(gpus=1)), place("n000", "0"))
    (lease,) = answers(hand.grant(ask("r", Demand(gpus=1)), {"cluster_id": "c", "gpus": ["0"]}))
    assert [(share.node_id, share.gpus) for share in lease.lease.placement] == [("n001", ("0",))]


def test_the_refusal_of_a_proposed_cluster_names_the_candidates(hand):
    only = (ClusterId("d"),)
    assert "“c” is none; there is d." in refusal(hand, place("n000"), None, candidates=only)


def test_a_refusal_suggests_only_a_few_similar_node_names(hand):
    hand.see(nodes(500, 1))
    said = refusal(hand, place("n0007", "0"), Demand(gpus=1))
    assert "there are n007, " in said
    assert said.endswith(", ….")
    assert len(said) < 250


def test_a_refusal_writes_a_count_of_one_in_the_singular():
    hand = Hand()
    device = (Gpu("0", "", 0),)  # A site that gives no model.
    hand.see(Cluster(ClusterId("c"), (Node(NodeId("n"), 1_000, 1_000, device),)))
    (never,) = answers(hand.ask(ask("a", Demand(gpus=1, models=("A100",)))))
    assert never.reason.startswith(
        "It can never fit: of 1 node, 1 has too few GPUs of the accepted"
    )
    assert never.details["largest"]["models"] == []
    assert "models" not in never.details

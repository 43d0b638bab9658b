"""Requests with `where` are granted on labelled nodes, or refused with the reason."""

import pytest
from by_hand import Hand, answers, ask, consults, place

from moorage.core.lifecycle.leases import likeness
from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import LeaseNews
from moorage.model import (
    Cluster,
    ClusterId,
    Code,
    Demand,
    Gpu,
    Node,
    NodeId,
    Provision,
    Requirement,
)

BLUE = Demand(gpus=1, where=(Requirement("zone", "In", ("blue",)),))


def zones(*names: str) -> Cluster:
    gpus = (Gpu("0", "A100"),)
    named = enumerate(names)
    return Cluster(
        ClusterId("c"),
        tuple(
            Node(NodeId(f"n{n}"), 8_000, 8_192, gpus, labels={"zone": zone}) for n, zone in named
        ),
    )


@pytest.fixture
def hand() -> Hand:
    return Hand.seeing(zones("red", "blue"))


def test_a_request_is_granted_on_a_node_with_the_labels(hand: Hand) -> None:
    (news,) = answers(hand.grant(ask("r", BLUE), place("n1", "0")))
    assert isinstance(news, LeaseNews)
    assert [share.node_id for share in news.lease.placement] == ["n1"]


def test_a_proposal_of_a_node_without_the_labels_is_refused(hand: Hand) -> None:
    (no,) = answers(hand.grant(ask("r", BLUE), place("n0", "0")))
    assert isinstance(no, Refusal)
    assert "labels that `resources.where` asks for" in no.reason
    assert not hand.allocator.state.leases


def test_the_allocator_chooses_a_node_with_the_labels(hand: Hand) -> None:
    (news,) = answers(hand.grant(ask("r", BLUE), {"cluster_id": "c"}))
    assert [share.node_id for share in news.lease.placement] == ["n1"]


def test_a_request_waits_while_only_unlabelled_nodes_are_free(hand: Hand) -> None:
    hand.grant(ask("first", BLUE), place("n1", "0"))
    (no,) = answers(hand.ask(ask("at once", BLUE)))
    assert (no.code, no.details["misfits"]) == (Code.NO_CAPACITY, {"labels": 1, "gpus_busy": 1})
    assert not answers(hand.ask(ask("waits", BLUE, 60.0)))
    assert consults(hand.see(zones("red", "blue", "red"))) == []
    assert consults(hand.see(zones("red", "blue", "blue"))) == ["waits"]


def test_a_request_for_labels_that_are_on_no_node_can_never_fit(hand: Hand) -> None:
    green = Demand(gpus=1, where=(Requirement("zone", "In", ("green",)),))
    (no,) = answers(hand.ask(ask("r", green, 60.0)))
    assert (no.code, no.details["misfits"]) == (Code.NEVER_FITS, {"labels": 2})
    (change,) = no.details["fits_if"]
    assert change == {"field": "resources.where", "asked": ["zone"], "fits": ""}
    assert "2 have other labels than `where` asks for" in no.reason
    assert no.reason.endswith("It would fit without `where`.")


@pytest.mark.parametrize(
    ("requirement", "said"),
    [
        (Requirement("zone", "In", ("bleu",)), "No candidate has zone bleu (did you mean blue?)."),
        (
            Requirement("zone", "In", ("x", "y")),
            "No candidate has zone x or y (there are red, blue).",
        ),
        (Requirement("zoone", "Exists"), "No candidate has a label zoone (did you mean zone?)."),
        (Requirement("node", "In", ("n0",)), "a label node (did you mean moorage/node?)."),
        (Requirement("moorage/node", "In", ("n11",)), "has moorage/node n11 (did you mean n1?)."),
        (Requirement("zone", "DoesNotExist"), "`where` asks for. It would fit without `where`."),
    ],
)
def test_the_refusal_of_an_unknown_label_suggests_the_nearest_existing_label(
    hand: Hand, requirement: Requirement, said: str
) -> None:
    (no,) = answers(hand.ask(ask("r", Demand(gpus=1, where=(requirement,)), 60.0)))
    assert said in no.reason


def test_a_smaller_demand_on_labelled_nodes_is_suggested(hand: Hand) -> None:
    two = Demand(gpus=2, where=BLUE.where)
    (no,) = answers(hand.ask(ask("r", two)))
    assert no.code is Code.NEVER_FITS
    assert no.details["fits_if"][0]["field"] == "resources.gpus"
    assert no.details["largest"]["nodes"] == 1


def test_a_warm_lease_that_an_earlier_release_granted_is_still_reused() -> None:
    plain = ask("r", Demand(gpus=1), provision=Provision("local", keep_warm_seconds=9.0))
    before = "72f70cd7562ea6b2b5db3801d9f4a94f"
    assert likeness(plain) == before
    assert likeness(ask("r", BLUE, provision=plain.provision)) != before

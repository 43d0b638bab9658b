"""A dry run of a release returns the requests that would be served, and changes no state."""

from typing import Any

import pytest
from by_hand import Hand, answers, ask, nodes, place, plain

from moorage.core.turns.effects import LeaseNews
from moorage.core.turns.events import DryRun, ReleaseAsked
from moorage.model import ClusterId, Demand, RequestId, Tenant


@pytest.fixture
def hand() -> Hand:
    """An allocator with two nodes of two GPUs, each held by a lease of the tenant ann."""
    hand = Hand.seeing(nodes(2, 2))
    for node in ("n000", "n001"):
        hand.grant(ask(f"on {node}", Demand(gpus=2)), place(node, "0", "1"))
    return hand


def freed_by_release(hand: Hand, lease: str, **more: Any) -> Any:
    event = ReleaseAsked(hand.to(), RequestId(lease), "", Tenant("ann"))
    (answer,) = answers(hand.step(DryRun(hand.to(), event, **more)))
    assert isinstance(answer, LeaseNews)
    assert hand.allocator.state.leases[RequestId(lease)].state == "granted"
    return plain(answer.reasons)


def test_a_dry_run_of_release_lists_requests_served_next(hand: Hand) -> None:
    for name in ("one", "more", "late"):
        hand.now += 1
        hand.ask(ask(name, Demand(gpus=1), wait=500))
    assert freed_by_release(hand, "on n000", stop_seconds=10.0) == {
        "warm": [],
        "then_fit": ["one", "more"],
        "then_fit_others": 0,
        "stop_seconds": 10.0,
    }


def test_a_dry_run_of_several_releases_lists_the_gang_that_would_be_served(hand: Hand) -> None:
    hand.ask(ask("gang", Demand(gpus=2, nodes=2), wait=500))
    assert freed_by_release(hand, "on n000")["then_fit"] == []
    both = freed_by_release(hand, "on n000", beside=(RequestId("on n001"), RequestId("nothing")))
    assert both["then_fit"] == ["gang"]


def test_a_dry_run_only_counts_requests_of_other_tenants(hand: Hand) -> None:
    hand.ask(ask("theirs", Demand(gpus=1), wait=500, tenant=Tenant("bob")))
    reply = freed_by_release(hand, "on n000")
    assert (reply["then_fit"], reply["then_fit_others"]) == ([], 1)
    assert freed_by_release(hand, "on n000", sees_all=True)["then_fit"] == ["theirs"]


def test_a_gang_after_the_head_does_not_take_the_nodes_of_the_head(hand: Hand) -> None:
    """The head needs three nodes of `c`, where two are free; the release frees a node elsewhere."""
    hand.see(nodes(1, 2, "d"))
    elsewhere = {"cluster_id": "d", "node_id": "n000", "gpus": ["0", "1"]}
    hand.grant(ask("elsewhere", Demand(gpus=2)), elsewhere)
    hand.see(nodes(4, 2))
    only = {"candidates": (ClusterId("c"),), "wait": 50.0}
    hand.ask(ask("head", Demand(gpus=2, nodes=3), **only))
    hand.now += 1
    hand.ask(ask("behind", Demand(gpus=2, nodes=2), **only))
    assert list(hand.allocator.state.waiting) == ["head", "behind"]
    assert freed_by_release(hand, "elsewhere")["then_fit"] == []

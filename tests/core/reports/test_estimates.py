"""Readers within a short time share one estimate of when waiters are served."""

import pytest
from by_hand import Hand, ask, nodes, place

from moorage.core.reports.estimates import SHARED_SECONDS
from moorage.core.turns.events import RenewAsked
from moorage.model import Demand, RequestId


@pytest.fixture
def hand() -> Hand:
    """An allocator with a node of one GPU, held until 60, and two requests that wait."""
    hand = Hand.seeing(nodes(1, 1))
    hand.grant(ask("a", Demand(gpus=1)), place("n000", "0"))
    for name in ("first", "second"):
        hand.now += 1.0
        hand.ask(ask(name, Demand(gpus=1), wait=500))
    hand.now += 1.0
    return hand


def rows(hand: Hand) -> dict[str, float | None]:
    return {row["request"]: row["expected_at"] for row in hand.inquire("queue")["waiting"]}


def test_readers_within_a_short_time_share_one_estimate(hand: Hand) -> None:
    assert rows(hand) == {"first": 60, "second": 120}
    hand.step(RenewAsked(hand.to(), RequestId("a"), "token of a", 97.0))
    hand.now += SHARED_SECONDS / 2
    assert rows(hand) == {"first": 60, "second": 120}
    hand.now += SHARED_SECONDS / 2
    assert rows(hand) == {"first": 100, "second": 160}


def test_a_waiter_newer_than_the_shared_estimate_gets_a_new_one(hand: Hand) -> None:
    rows(hand)
    hand.now += SHARED_SECONDS / 4
    hand.ask(ask("third", Demand(gpus=1), wait=500))
    assert rows(hand)["third"] == 180


def test_an_estimate_ignores_ended_leases(hand: Hand) -> None:
    (held,) = hand.inquire("why", subject="first")["waits_for"]
    assert held["lease"] == "a"
    hand.now += SHARED_SECONDS / 4
    del hand.allocator.state.leases["a"]
    assert "waits_for" not in hand.inquire("why", subject="first")

"""Tests of the estimated start of a waiter, if leases last until their deadlines."""

import pytest
from by_hand import Hand, ask, nodes, place
from msgspec.structs import replace

from moorage.core.allocator import Allocator
from moorage.core.reports import forecast
from moorage.core.state.checkpoint import condense
from moorage.core.state.durations import ENOUGH
from moorage.core.state.facts import Fact
from moorage.core.turns.events import RenewAsked, ReserveAsked
from moorage.model import Demand, RequestId, Tenant


def turns(hand: Hand) -> dict[str, float | None]:
    return {row["request"]: row["expected_at"] for row in hand.inquire("queue")["waiting"]}


@pytest.fixture
def hand() -> Hand:
    """An allocator with two nodes of two GPUs, one held until 60 and one until 100."""
    hand = Hand.seeing(nodes(2, 2))
    hand.grant(ask("a", Demand(gpus=2)), place("n000", "0", "1"))
    long = ask("b", Demand(gpus=2), terms={"ttl_seconds": 100.0})
    hand.grant(long, place("n001", "0", "1"))
    return hand


def test_the_estimate_of_a_waiter_is_after_the_estimates_of_earlier_waiters(hand: Hand) -> None:
    for name, gpus in (("first", 1), ("whole", 2), ("last", 1), ("fourth", 1)):
        hand.now += 1
        hand.ask(ask(name, Demand(gpus=gpus), wait=500))
    assert turns(hand) == {"first": 60, "whole": 100, "last": 100, "fourth": 120}
    turn = hand.tick(60.0)
    hand.propose(turn, place("n000", "0"))
    assert "first" not in turns(hand)


def test_an_estimate_after_the_wait_limit_of_a_request_is_null(hand: Hand) -> None:
    hand.ask(ask("impatient", Demand(gpus=1), wait=30))
    hand.ask(ask("unsized", None, wait=500))
    assert turns(hand) == {"impatient": None}  # The other request is being decided.


def test_a_gang_is_estimated_when_all_its_nodes_are_free(hand: Hand) -> None:
    hand.ask(ask("gang", Demand(gpus=2, nodes=2), wait=500))
    hand.now = 1.0
    hand.ask(ask("one", Demand(gpus=1), wait=500))
    assert turns(hand) == {"gang": 100, "one": 160}


def test_leases_are_estimated_to_last_like_similar_leases(hand: Hand) -> None:
    """Eight leases of one GPU ended after ten seconds; eight of two GPUs were renewed to 500."""
    hand.see(nodes(1, 4, "d"))
    placement = {"cluster_id": "d", "node_id": "n000"}
    for number in range(2 * ENOUGH):
        one = number < ENOUGH
        name, gpus = f"before-{number}", ["0"] if one else ["0", "1"]
        hand.grant(ask(name, Demand(gpus=len(gpus))), {**placement, "gpus": gpus})
        for _ in range(0 if one else 9):
            hand.now += 50.0
            hand.step(RenewAsked(hand.to(), RequestId(name), f"token of {name}", None))
        hand.now += 10.0 if one else 50.0
        hand.release(name)
        for each in ("a", "b"):
            hand.step(RenewAsked(hand.to(), RequestId(each), f"token of {each}", 1e6))
    start = hand.now
    hand.grant(ask("short", Demand(gpus=1)), {**placement, "gpus": ["0"]})
    hand.grant(ask("long", Demand(gpus=3)), {**placement, "gpus": ["1", "2", "3"]})
    hand.ask(ask("waits", Demand(gpus=1), wait=5000.0))
    lasts = hand.allocator.state.durations
    (short, long) = (hand.allocator.state.leases[RequestId(each)] for each in ("short", "long"))
    assert lasts.of_lease(short, 0.0) == pytest.approx(10.0, rel=0.2)
    assert lasts.of_lease(long, 100.0) == pytest.approx(500.0, rel=0.2), "like the tenant's others"
    assert lasts.of_lease(short, 600.0) is None
    turn = turns(hand)["waits"]
    assert turn == pytest.approx(start + 10.0, abs=2.0)
    again = Allocator()
    again.replay(condense(hand.allocator.state))
    assert again.state.durations == lasts == hand_of(hand.facts).state.durations


def hand_of(facts: list[Fact]) -> Allocator:
    allocator = Allocator()
    allocator.replay(facts)
    return allocator


def test_a_waiter_blocked_by_a_reservation_is_expected_to_start_after_its_end(hand: Hand) -> None:
    bob = Tenant("bob")
    request = ReserveAsked(hand.to(), RequestId("r"), bob, Demand(gpus=1), 60.0, 90.0)
    hand.step(request)
    assert [each.nodes for each in hand.allocator.state.reserved.by_id.values()] == [
        (("c", "n000"),)
    ]
    for name, ttl, tenant in (
        ("short", 10.0, "ann"),
        ("long", 40.0, "ann"),
        ("own", 40.0, "bob"),
        ("other", 10.0, "ann"),
    ):
        hand.now += 1
        hand.ask(ask(name, Demand(gpus=1), wait=500, terms={"ttl_seconds": ttl}, tenant=tenant))
    assert turns(hand) == {"short": 60.0, "long": 70.0, "other": 100.0}
    state, feasibility = hand.allocator.state, hand.allocator.feasibility
    assert (
        forecast.expect_turns(state, feasibility, state.waiting.values(), hand.now)[
            RequestId("own")
        ]
        == 60.0
    )


def test_a_forecast_changes_nothing_and_its_work_is_limited(hand: Hand) -> None:
    hand.ask(ask("one", Demand(gpus=1), wait=500))
    state, feasibility = hand.allocator.state, hand.allocator.feasibility
    before = state.fleet.gpu_free.copy()
    (waiter,) = state.waiting.values()
    many = [
        replace(waiter, ask=replace(waiter.ask, demand=Demand(gpus=3, cpu_milli=each)))
        for each in range(forecast.LOOKS_MAX + 1)
    ]
    assert forecast.expect_turns(state, feasibility, [*many, waiter], 0.0) == {}
    assert forecast.expect_turns(state, feasibility, [*many[:9], waiter], 0.0) == {
        waiter.ask.id: 60.0
    }
    assert (state.fleet.gpu_free == before).all()


def test_the_answer_to_why_names_the_leases_that_a_waiter_waits_for(hand: Hand) -> None:
    hand.now = 1.0
    hand.ask(ask("own", Demand(gpus=1), wait=500))
    hand.ask(ask("other", Demand(gpus=1), tenant="bob", wait=500))
    hand.ask(ask("gang", Demand(gpus=2, nodes=2), wait=500))
    ends = {"cluster_id": "c", "node_id": "n000", "expires_at": 60.0}
    (row,) = hand.inquire("why", subject="own")["waits_for"]
    assert row == {**ends, "lease": "a"}
    (row,) = hand.inquire("why", "bob", subject="other")["waits_for"]
    assert row == ends
    rows = hand.inquire("why", subject="gang")["waits_for"]
    assert [row["lease"] for row in rows] == ["a", "b"]
    hand.ask(ask("never", Demand(gpus=3)))
    assert "waits_for" not in hand.inquire("why", subject="never")

"""Positions from the index of the queue agree with a count of all waiters."""

import json
from collections.abc import Iterator
from random import Random

import pytest
from by_hand import Hand, ask, consults, nodes, place

from moorage.core.queue.ranking import COUNTED_MAX
from moorage.core.turns.events import CancelAsked
from moorage.model import Demand, RequestId


def waiters(hand: Hand) -> Iterator[RequestId]:
    for line in hand.allocator.requests.queue.lines():
        yield from line.waiters


@pytest.fixture(params=range(5))
def hand(request: pytest.FixtureRequest) -> Hand:
    """An allocator with leases of two tenants, and waiters of several priorities and sizes."""
    draw, hand = Random(request.param), Hand()
    hand.see(nodes(2, 2))
    hand.grant(ask("a", Demand(gpus=2)), place("n000", "0", "1"))
    hand.grant(ask("b", Demand(gpus=2), tenant="bob"), place("n001", "0", "1"))
    for number in range(120):
        hand.now += draw.choice((0.0, 0.25))
        terms = {"priority": draw.choice((0, 0, 5))}
        demand = Demand(gpus=draw.choice((1, 2)))
        tenant = draw.choice(("ann", "bob", "cay", "dan"))
        hand.ask(ask(f"w{number}", demand, tenant=tenant, wait=500, terms=terms))
        if draw.random() < 0.3:
            waiting = hand.allocator.state.waiting
            name = draw.choice(list(waiting))
            hand.step(CancelAsked(hand.to(), name, waiting[name].ask.tenant))
    return hand


def test_positions_match_the_order_of_the_queue(hand: Hand) -> None:
    queue, expected = hand.allocator.requests.queue, list(waiters(hand))
    assert len(queue.lines()) > COUNTED_MAX // 2
    positions = {request: at for at, request in enumerate(expected, 1)}
    assert queue.positions(expected) == positions
    for request in expected:  # The code for one position differs from that for many.
        assert queue.positions([request]) == {request: positions[request]}
    assert queue.positions([RequestId("unknown")]) == {}


def test_a_short_list_of_waiters_begins_like_the_list_of_all_waiters(hand: Hand) -> None:
    queue = hand.allocator.requests.queue
    every = [each.ask.id for each in queue.in_turn(1000)]
    assert sorted(every) == sorted(waiters(hand))
    for many in (1, 7, len(every)):
        assert [each.ask.id for each in queue.in_turn(many)] == every[:many]


def test_pages_of_the_queue_are_in_order_of_seniority(hand: Hand) -> None:
    rows, after = list[dict[str, object]](), ""
    while True:
        page = hand.inquire("queue", after=after, limit=7, sees_all=True)
        rows += page["waiting"]
        after = page["next"]
        if after is None:
            break
    waiting = hand.allocator.state.waiting.values()
    expected = sorted((-each.ask.priority, each.at, each.ask.id) for each in waiting)
    assert [row["request"] for row in rows] == [each[2] for each in expected]
    assert hand.inquire("queue", after=json.dumps(list(expected[-1])))["waiting"] == []


def test_a_later_waiter_is_served_while_an_earlier_one_needs_a_whole_node() -> None:
    hand = Hand.seeing(nodes(2, 2))
    for node in ("n000", "n001"):
        for gpu in "01":
            hand.grant(ask(node + gpu, Demand(gpus=1)), place(node, gpu))
    hand.ask(ask("large", Demand(gpus=2), wait=500))
    assert consults(hand.release("n0000")) == []  # Both GPUs of n000 are for `large`.
    hand.ask(ask("small", Demand(gpus=1), wait=500))
    assert consults(hand.release("n0010")) == ["small"]
    assert consults(hand.release("n0001")) == ["large"]

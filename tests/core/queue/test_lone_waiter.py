"""While a policy decides about a lone waiter, later requests do not get the waiter's nodes."""

import pytest
from by_hand import Hand, ask, consults, nodes, place

from moorage.core.turns.effects import Consult
from moorage.model import Demand

WHOLE, ONE = Demand(gpus=4), Demand(gpus=1)
FIRST = ("c", "n000")


@pytest.fixture
def hand() -> Hand:
    """An allocator whose two nodes are held at least in part, and a waiter for a whole node."""
    hand = Hand.seeing(nodes(2, 4))
    hand.grant(ask("old-0", WHOLE), place("n000", *"0123"))
    hand.grant(ask("old-1", ONE), place("n001", "0"))
    hand.ask(ask("large", WHOLE, wait=100.0))
    return hand


def test_a_later_request_does_not_get_the_nodes_of_a_consulted_waiter(hand: Hand) -> None:
    woken = hand.release("old-0")
    assert consults(woken) == ["large"]
    (asked,) = [each for each in hand.ask(ask("small", ONE)).effects if isinstance(each, Consult)]
    assert asked.reserved == (FIRST,)
    hand.propose(woken, place("n000", *"0123"))
    assert not hand.allocator.state.waiting


def test_the_policy_of_a_declined_lone_waiter_is_consulted_when_room_grows(hand: Hand) -> None:
    hand.propose(hand.release("old-0"), None)
    assert list(hand.allocator.state.waiting) == ["large"]
    assert consults(hand.release("old-1")) == ["large"]


def test_a_later_request_gets_the_nodes_once_the_consulted_waiter_leaves(hand: Hand) -> None:
    woken = hand.release("old-0")
    assert consults(hand.ask(ask("next", WHOLE, wait=100.0, inputs={"own": 1}))) == []
    hand.propose(woken, place("n000", *"0123"))
    assert consults(hand.release("large")) == ["next"]

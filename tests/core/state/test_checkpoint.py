"""A checkpoint has the state of its turn, although its body is written later, in pieces."""

from cProfile import Profile

from by_hand import Hand, ask, nodes, place

from moorage.core.allocator import Allocator
from moorage.core.state.checkpoint import condense
from moorage.core.turns.events import CancelAsked
from moorage.model import Demand, RequestId, Tenant

ONE = Demand(gpus=1)


def crowd(waiters: int) -> Hand:
    """Return an allocator with a full node and a number of waiters."""
    hand = Hand.seeing(nodes(1, 1))
    hand.grant(ask("holder", ONE), place("n000", "0"))
    for number in range(waiters):
        hand.ask(ask(f"w{number}", ONE, 600.0))
    return hand


def test_the_turn_that_makes_a_checkpoint_encodes_no_waiter() -> None:
    calls = []
    for waiters in (10, 1_000):
        state, profile = crowd(waiters).allocator.state, Profile()
        body = profile.runcall(condense, state)
        calls.append(sum(each.callcount for each in profile.getstats()))
        again = Allocator()
        again.replay(body)
        assert again.state == state
    assert calls[0] == calls[1]


def test_a_checkpoint_that_is_encoded_later_has_no_later_events() -> None:
    hand = crowd(9)
    state = hand.allocator.state
    body, before = condense(state), [*condense(state)]
    hand.step(CancelAsked(hand.to(), RequestId("w3"), Tenant("ann")))
    turn = hand.release("holder")
    hand.propose(turn, place("n000", "0"))
    hand.see(nodes(2, 2))
    assert [*body] == before != [*condense(state)]

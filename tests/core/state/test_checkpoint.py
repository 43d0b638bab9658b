"""A checkpoint's body is as of its turn, and is made later, piece by piece."""

from cProfile import Profile

from by_hand import Hand, ask, nodes, place

from moorage.core.allocator import Allocator
from moorage.core.state.checkpoint import condense
from moorage.core.turns.events import CancelAsked, ReleaseAsked
from moorage.model import Demand, RequestId, Tenant

ONE = Demand(gpus=1)


def crowd(waiters: int) -> Hand:
    """Return a full node, beside which as many wait."""
    hand = Hand()
    hand.see(nodes(1, 1))
    hand.grant(ask("holder", ONE), place("n000", "0"))
    for number in range(waiters):
        hand.ask(ask(f"w{number}", ONE, 600.0))
    return hand


def test_a_turn_makes_no_fact_of_any_waiter() -> None:
    calls = []
    for waiters in (10, 1_000):
        state, profile = crowd(waiters).allocator.state, Profile()
        body = profile.runcall(condense, state)
        calls.append(sum(each.callcount for each in profile.getstats()))
        again = Allocator()
        again.replay(body)
        assert again.state == state
    assert calls[0] == calls[1]


def test_what_happens_before_it_is_read_is_not_in_it() -> None:
    hand = crowd(9)
    state = hand.allocator.state
    body, before = condense(state), [*condense(state)]
    hand.step(CancelAsked(hand.to(), RequestId("w3"), Tenant("ann")))
    turn = hand.step(ReleaseAsked(hand.to(), RequestId("holder"), "token of holder"))
    hand.propose(turn, place("n000", "0"))
    hand.see(nodes(2, 2))
    assert [*body] == before != [*condense(state)]

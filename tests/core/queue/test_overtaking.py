"""A waiter is overtaken a limited number of times; after these, it is first in its priority."""

import pytest
from by_hand import Hand, ask, consults, nodes, place

from moorage.core.allocator import Allocator
from moorage.core.state.checkpoint import condense
from moorage.core.state.facts import Granted
from moorage.core.turns.events import QuotaAsked, ReleaseAsked, WorkloadKept, WorkloadStarted
from moorage.model import Amounts, Demand, Provision, Quota, RequestId, Tenant

WHOLE, ONE = Demand(gpus=4), Demand(gpus=1)
TIMES = 3


@pytest.fixture
def hand() -> Hand:
    """An allocator: ann holds a GPU of each node and waits for a node; bob holds none and waits."""
    hand = Hand(Allocator(overtaken_max=TIMES))
    hand.see(nodes(2, 4))
    hand.grant(ask("ann-0", ONE), place("n000", "0"))
    hand.grant(ask("ann-1", ONE), place("n001", "0"))
    hand.ask(ask("ann-2", WHOLE, wait=1000.0))
    hand.ask(ask("bob-1", WHOLE, wait=1000.0, tenant="bob"))
    assert head(hand) == "bob-1"
    return hand


def head(hand: Hand) -> str:
    line = hand.allocator.requests.queue.head
    return next(iter(line.waiters)) if line else ""


def free(hand: Hand) -> str:
    """Return the one of the two nodes that is not reserved for the head of the queue."""
    ((_, reserved),) = hand.allocator.requests.queue.reservation
    return {"n000": "n001", "n001": "n000"}[reserved]


def come(hand: Hand, number: int, **changes: object) -> list[str]:
    """Send a request of another tenant; release its lease if it is granted."""
    name, tenant = f"r{number}", f"tenant-{number}"
    hand.now += 1.0
    turn = hand.propose(hand.ask(ask(name, ONE, tenant=tenant, **changes)), place(free(hand), "1"))
    granted = [fact.lease.id for fact in turn.facts if isinstance(fact, Granted)]
    hand.release(name)
    return granted


def overtaken(hand: Hand) -> dict[str, int]:
    rows = hand.inquire("queue")["waiting"]
    return {row["request"]: row["overtaken"] for row in rows}


def test_tenants_with_smaller_shares_overtake_a_request_only_a_limited_number_of_times(
    hand: Hand,
) -> None:
    for number in range(TIMES):
        assert overtaken(hand)["ann-2"] == number
        assert come(hand, number) == [f"r{number}"]
    assert overtaken(hand) == {"ann-2": TIMES}
    assert head(hand) == "ann-2"
    turn = hand.step(ReleaseAsked(hand.to(), RequestId("ann-1"), "token of ann-1"))
    assert consults(turn)[0] == "ann-2"


def test_a_request_of_higher_priority_does_not_count_as_overtaking(hand: Hand) -> None:
    for number in range(TIMES + 2):
        assert come(hand, number, terms={"priority": 1}) == [f"r{number}"]
    assert overtaken(hand) == {"ann-2": 0}


def test_a_waiter_that_could_not_use_the_place_does_not_count_as_overtaken(hand: Hand) -> None:
    hand.see(nodes(1, 2, "d"))
    hand.now += 1.0
    turn = hand.ask(ask("eve-1", Demand(gpus=0, cpu_milli=1), tenant="eve", candidates=("d",)))
    (granted,) = [
        fact
        for fact in hand.propose(turn, place("n000", cpu_milli=1) | {"cluster_id": "d"}).facts
        if isinstance(fact, Granted)
    ]
    assert granted.overtakes is None


def test_a_grant_to_the_older_of_two_requests_overtakes_no_waiter(hand: Hand) -> None:
    ((_, reserved),) = hand.allocator.requests.queue.reservation
    hand.now += 1.0
    hand.ask(ask("cay-1", WHOLE, wait=1000.0, tenant="cay"))
    lease = f"ann-{int(reserved[1:])}"
    turn = hand.release(lease)
    assert consults(turn) == ["bob-1"]
    turn = hand.propose(turn, place(reserved, "0", "1", "2", "3"))
    assert [f.overtakes for f in turn.facts if isinstance(f, Granted)] == [None]
    assert overtaken(hand) == {"ann-2": 0}


def test_a_request_beyond_its_quota_is_not_overtaken(hand: Hand) -> None:
    quota = Quota(nominal=Amounts(gpu_milli=4000))
    hand.step(QuotaAsked(hand.to(), Tenant("ops"), Tenant("ann"), None, quota))
    assert come(hand, 1) == ["r1"]
    assert overtaken(hand) == {"ann-2": 0}


def test_the_count_of_overtakings_survives_restarts_and_checkpoints(hand: Hand) -> None:
    for number in range(TIMES):
        come(hand, number)
    for facts in (hand.facts, list(condense(hand.allocator.state))):
        again = Allocator(overtaken_max=TIMES)
        again.replay(facts)
        assert again.state == hand.allocator.state
        assert again.state.overtaken == {"ann-2": TIMES}
        assert again.requests.queue.lines()[0].of.overdue


def test_warm_reuse_counts_as_overtaking() -> None:
    """The overtaken waiter leaves its class of waiters while the wake serves another waiter."""
    hand = Hand(Allocator(overtaken_max=1))
    hand.see(nodes(2, 4))
    warm = {"tenant": "dee", "provision": Provision("memory", keep_warm_seconds=60.0)}
    hand.grant(ask("brief", ONE, tenant="eve", terms={"ttl_seconds": 9.0}), place("n000", "0"))
    hand.grant(ask("long", ONE, tenant="eve"), place("n001", "0"))
    hand.grant(ask("first", ONE, **warm), place("n001", "1"))
    fencing = hand.allocator.state.leases[RequestId("first")].fencing
    hand.step(WorkloadStarted(RequestId("first"), fencing))
    hand.ask(ask("large", Demand(gpus=4, cpu_milli=1), wait=1000.0, tenant="eve"))
    hand.now += 1.0
    hand.ask(ask("head", WHOLE, wait=1000.0, tenant="bob"))
    assert head(hand) == "head"
    assert hand.allocator.requests.queue.reservation == (("c", "n000"),)
    hand.now += 1.0
    hand.propose(hand.ask(ask("second", ONE, wait=1000.0, **warm)), {"declined": "not yet"})
    turn = hand.release("first")
    hand.propose(turn, {"declined": "not yet"})
    turn = hand.step(WorkloadKept(RequestId("first"), fencing))
    assert [f.overtakes for f in turn.facts if isinstance(f, Granted)] == ["large"]
    turn = hand.release("brief")
    assert consults(turn)[0] == "large"

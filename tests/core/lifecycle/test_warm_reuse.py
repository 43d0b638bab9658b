"""Tests of warm leases: which requests take a warm lease over, and which requests end one."""

from by_hand import Hand, answers, ask, consults, lab, nodes, place

from moorage.core.lifecycle.warm_reuse import EVICTED
from moorage.core.state.facts import Ending, Refusal
from moorage.core.turns.events import (
    QuotaAsked,
    ReleaseAsked,
    WorkloadKept,
    WorkloadStarted,
    WorkloadStopped,
)
from moorage.model import Amounts, ClusterId, Code, Demand, Provision, Quota, RequestId, Tenant

ONE = Demand(gpus=1)
WARM = Provision("memory", keep_warm_seconds=60.0)


def there(*gpus: str) -> dict[str, object]:
    return place("n000", *gpus) | {"cluster_id": "d"}


def released() -> Hand:
    """Return an allocator with one GPU, whose lease is released and may stay warm."""
    hand = Hand.seeing(nodes(1, 1))
    hand.grant(ask("used", ONE, provision=WARM), place("n000", "0"))
    hand.step(WorkloadStarted(RequestId("used"), 1))
    hand.release("used")
    return hand


def test_a_warm_gang_partly_on_reserved_nodes_is_evicted() -> None:
    hand = Hand.seeing(nodes(1, 2))
    hand.see(nodes(1, 2, "d"))
    gang = [place("n000", "0"), there("0")]
    hand.grant(ask("gang", Demand(gpus=1, nodes=2), provision=WARM), gang)
    hand.grant(ask("b", ONE), place("n000", "1"))
    hand.grant(ask("d", ONE), there("1"))
    hand.step(WorkloadStarted(RequestId("gang"), 1))
    hand.release("gang")
    hand.step(WorkloadKept(RequestId("gang"), 1))
    hand.ask(ask("head", Demand(gpus=2), wait=100.0, candidates=(ClusterId("d"),)))
    assert hand.allocator.requests.queue.reservation == (("d", "n000"),)
    hand.now += 1.0
    turn = hand.ask(ask("unsaid", None, wait=100.0))
    facts = hand.propose(turn, {"declined": "nothing is free"}).facts
    assert [each.reason for each in facts if isinstance(each, Ending)] == [EVICTED]


def test_warm_leases_end_one_by_one_until_the_policy_finds_a_placement() -> None:
    hand = Hand.seeing(nodes(1, 2))
    for number, name in enumerate(("first", "second")):
        hand.now += 1.0
        request = ask(name, ONE, provision=WARM, inputs={"number": number})
        hand.grant(request, place("n000", str(number)))
        lease = hand.allocator.state.leases[request.id]
        hand.step(WorkloadStarted(lease.id, lease.fencing))
        hand.step(ReleaseAsked(hand.to(), lease.id, f"token of {name}"))
        hand.step(WorkloadKept(lease.id, lease.fencing))
    turn = hand.ask(ask("pair", None))
    for number, name in enumerate(("first", "second"), 1):
        facts = hand.propose(turn, {"declined": "it wants two whole GPUs"}).facts
        ending = [each for each in facts if isinstance(each, Ending)]
        assert [(each.lease, each.reason) for each in ending] == [(name, EVICTED)]
        turn = hand.step(WorkloadStopped(RequestId(name), number))
        assert consults(turn) == ["pair"]
    hand.propose(turn, place("n000", "0", "1"))
    assert list(hand.allocator.state.leases) == ["pair"]


def test_the_first_equal_request_takes_over_a_warm_lease() -> None:
    hand = released()
    hand.ask(ask("urgent", ONE, provision=WARM, terms={"priority": 2}))
    hand.ask(ask("patient", ONE, wait=100.0, provision=WARM))
    hand.step(WorkloadKept(RequestId("used"), 1))
    assert list(hand.allocator.state.leases) == ["urgent"]


def test_a_warm_lease_whose_device_moved_is_evicted_for_a_waiter_of_the_new_node() -> None:
    hand = Hand.seeing(lab("aaa", "bbb"))
    hand.grant(ask("lost", ONE, provision=WARM), place("n1", "0"))
    hand.step(WorkloadStarted(RequestId("lost"), 1))
    hand.grant(ask("stays", ONE), place("n1", "1"))
    hand.see(lab("bbb"))
    hand.see(lab("aaa", cluster="d", node="n000"))
    hand.ask(ask("head", ONE, wait=100.0, candidates=(ClusterId("c"),)))
    hand.ask(ask("waits", ONE, wait=100.0, candidates=(ClusterId("d"),)))
    turn = hand.release("lost")
    assert [each.reason for each in turn.facts if isinstance(each, Ending)][1:] == [EVICTED]


def test_warm_leases_end_for_a_request_waiting_for_quota() -> None:
    hand = Hand.seeing(nodes(1, 1))
    hand.see(nodes(1, 1, "d"))
    hand.grant(ask("used", ONE, provision=WARM), place("n000", "0"))
    hand.grant(ask("d", ONE), there("0"))
    hand.step(WorkloadStarted(RequestId("used"), 1))
    hand.release("used")
    hand.step(WorkloadKept(RequestId("used"), 1))
    hand.ask(ask("waits", ONE, wait=100.0, candidates=(ClusterId("d"),)))
    quota = Quota(1.0, Amounts(1_000), Amounts(0))
    hand.step(QuotaAsked(None, Tenant("op"), Tenant("ann"), None, quota))
    turn = hand.release("d")
    assert [each.reason for each in hand.facts if isinstance(each, Ending)][1:] == [EVICTED]
    assert consults(turn) == []
    assert consults(hand.step(WorkloadStopped(RequestId("used"), 1))) == ["waits"]


def test_a_request_without_a_queue_time_is_refused_once_another_takes_its_evicted_lease() -> None:
    hand = released()
    hand.step(WorkloadKept(RequestId("used"), 1))
    hand.ask(ask("at once", ONE))
    assert "at once" in hand.allocator.state.waiting
    hand.ask(ask("urgent", ONE, wait=100.0, terms={"priority": 5}))
    hand.now += 1.0
    turn = hand.step(WorkloadStopped(RequestId("used"), 1))
    assert consults(turn) == ["urgent"]
    (refusal,) = [
        each
        for turn in (turn, hand.propose(turn, place("n000", "0")))
        for each in answers(turn)
        if isinstance(each, Refusal)
    ]
    assert refusal.code is Code.NO_CAPACITY
    assert not hand.allocator.state.waiting

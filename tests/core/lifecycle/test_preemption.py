"""Tests of preemption: which leases end for a request, and when they end."""

from typing import Any

import pytest
from by_hand import Hand, ask, both, consults, lab, nodes, place

from moorage.core.allocator import Allocator
from moorage.core.state.checkpoint import condense
from moorage.core.state.facts import Preempted, Spared
from moorage.core.state.invariants import check
from moorage.core.turns.effects import Stop
from moorage.core.turns.events import (
    CancelAsked,
    CordonAsked,
    Event,
    QuotaAsked,
    ReserveAsked,
    Restarted,
    Stalled,
    Tick,
    WorkloadStarted,
    WorkloadStopped,
)
from moorage.model import (
    Amounts,
    ClusterId,
    Demand,
    Lease,
    NodeId,
    Provision,
    Quota,
    RequestId,
    Tenant,
)

AGAIN = Provision("memory", on_failure="requeue", attempts_max=3)


@pytest.fixture
def hand() -> Hand:
    hand = Hand(Allocator(requeue_pause_seconds=0.0))
    hand.see(nodes(2, 4))
    return hand


def hold(hand: Hand, name: str, node: str, *gpus: str, **terms: Any) -> Lease:
    more = {key: terms.pop(key) for key in ("tenant", "provision") if key in terms}
    terms = {"preemptible": True, "ttl_seconds": 1e6} | terms
    hand.now += 1.0
    hand.grant(ask(name, Demand(gpus=len(gpus)), terms=terms, **more), place(node, *gpus))
    return hand.allocator.state.leases[RequestId(name)]


def need(hand: Hand, gpus: int, priority: int = 1, wait: float = 60.0, **more: Any) -> Any:
    demand = Demand(gpus=gpus, nodes=more.pop("nodes", 1))
    return hand.ask(ask("needs", demand, wait, terms={"priority": priority}, **more))


def notices(hand: Hand) -> list[str]:
    return [fact.lease for fact in hand.facts if isinstance(fact, Preempted)]


def test_preemption_takes_as_few_leases_as_possible_and_the_youngest_of_them(hand: Hand) -> None:
    hold(hand, "old", "n000", "0", "1")
    hold(hand, "young", "n000", "2", "3")
    hold(hand, "a", "n001", "0")
    hold(hand, "b", "n001", "1")
    hold(hand, "c", "n001", "2", "3", preemptible=False)
    turn = need(hand, 2)
    assert notices(hand) == ["young"], "one lease of two GPUs, not two leases of one"
    assert consults(turn) == ["needs"], "the victim had no workload, so it ends at once"
    state = hand.allocator.state
    assert "of tenant ann, of priority 1" in state.ended[RequestId("young")].reason
    check(state)


def test_no_lease_is_preempted_if_the_request_would_still_not_fit(hand: Hand) -> None:
    hold(hand, "a", "n000", "0", "1")
    hold(hand, "b", "n000", "2", "3", preemptible=False)
    hold(hand, "c", "n001", "0", "1", "2", "3", preemptible=False)
    assert consults(need(hand, 4)) == []
    assert notices(hand) == []


@pytest.mark.parametrize("priority", [0, -1])
def test_only_a_request_of_higher_priority_preempts_leases(hand: Hand, priority: int) -> None:
    for node in ("n000", "n001"):
        hold(hand, node, node, "0", "1", "2", "3")
    need(hand, 4, priority)
    assert notices(hand) == []


def test_a_preempted_workload_ends_and_may_be_requeued(hand: Hand) -> None:
    lease = hold(hand, "a", "n000", "0", "1", "2", "3", provision=AGAIN)
    hand.step(WorkloadStarted(lease.id, lease.fencing))
    hold(hand, "b", "n001", "0", "1", "2", "3", preemptible=False)
    turn = need(hand, 4)
    assert [type(each) for each in turn.effects] == [Stop]
    assert consults(turn) == [], "the end of the victim comes before the grant"
    turn = hand.step(WorkloadStopped(lease.id, lease.fencing))
    assert consults(turn) == ["needs"]
    hand.propose(turn, place("n000", "0", "1", "2", "3"))
    waiting = hand.allocator.state.waiting[lease.id].lease
    assert waiting is not None
    assert (waiting.state, waiting.expires_at) == ("queued", lease.expires_at)
    assert "preempted by request needs" in waiting.reason
    check(hand.allocator.state)


def test_a_preempted_lease_gets_its_notice_and_its_minimum_runtime(hand: Hand) -> None:
    lease = hold(
        hand, "a", "n000", "0", "1", "2", "3", runtime_seconds_min=20.0, notice_seconds=5.0
    )
    hold(hand, "b", "n001", "0", "1", "2", "3", preemptible=False)
    need(hand, 4)
    row = hand.inquire("leases")["leases"][0]
    assert row["notice"]["by"] == "needs"
    assert row["notice"]["until"] == lease.granted_at + 20.0
    assert hand.allocator.next_deadline() == lease.granted_at + 20.0
    other = Allocator()
    other.replay(condense(hand.allocator.state))
    assert other.next_deadline() == lease.granted_at + 20.0, "a checkpoint has the deadline"
    assert consults(hand.tick(lease.granted_at + 20.0)) == ["needs"]


def test_a_lease_under_notice_is_spared_when_the_request_leaves_the_queue(hand: Hand) -> None:
    lease = hold(hand, "a", "n000", "0", "1", "2", "3", notice_seconds=5.0)
    hold(hand, "b", "n001", "0", "1", "2", "3", preemptible=False)
    need(hand, 4)
    assert notices(hand) == ["a"]
    hand.step(CancelAsked(hand.to(), RequestId("needs"), Tenant("ann")))
    hand.tick(hand.now + 5.0)
    assert any(isinstance(fact, Spared) for fact in hand.facts)
    assert hand.allocator.state.leases[lease.id].notice is None
    assert hand.allocator.next_deadline() == lease.expires_at


def test_a_lease_under_notice_is_spared_if_the_request_would_still_not_fit(hand: Hand) -> None:
    hold(hand, "a", "n000", "0", "1", "2", "3", notice_seconds=5.0)
    hold(hand, "b", "n001", "0", "1", "2", "3", preemptible=False)
    need(hand, 4)
    assert notices(hand) == ["a"]
    place = ClusterId("c"), NodeId("n000")
    hand.step(CordonAsked(hand.to(), Tenant("op"), *place, "cordon", "", None))
    hand.tick(hand.now + 5.0)
    assert any(isinstance(fact, Spared) for fact in hand.facts)
    hand.step(CordonAsked(hand.to(), Tenant("op"), *place, "uncordon", "", None))
    assert notices(hand) == ["a", "a"]
    assert consults(hand.tick(hand.now + 5.0)) == ["needs"]


def test_no_lease_is_preempted_after_the_request_gave_up(hand: Hand) -> None:
    for node in ("n000", "n001"):
        hold(hand, node, node, "0", "1", "2", "3", notice_seconds=100.0)
    need(hand, 4, wait=60.0)
    assert notices(hand) == []


def test_a_lease_of_several_nodes_is_preempted_as_a_whole(hand: Hand) -> None:
    gang = Demand(gpus=4, nodes=2)
    wanted = [place(node, "0", "1", "2", "3") for node in ("n000", "n001")]
    hand.grant(ask("gang", gang, terms={"preemptible": True}), wanted)
    turn = need(hand, 1)
    assert notices(hand) == ["gang"]
    hand.propose(turn, place("n000", "0"))
    hold(hand, "a", "n001", "0", "1", "2", "3")
    hand.ask(ask("pair", gang, 60.0, terms={"priority": 2}))
    assert notices(hand) == ["gang"], "the other lease is not preemptible"


def test_lent_quota_is_reclaimed_with_notice(hand: Hand) -> None:
    def allow(tenant: str, gpus: int, borrow: int, notice: float = 0.0) -> None:
        amounts = Amounts(gpus * 1000), Amounts(borrow * 1000)
        quota = Quota(1.0, *amounts, notice_seconds=notice)
        hand.step(QuotaAsked(None, Tenant("op"), Tenant(tenant), None, quota))

    allow("ann", 4, 0, notice=10.0)
    allow("bob", 4, 4)
    hold(hand, "own", "n000", "0", "1", "2", "3", tenant=Tenant("bob"), preemptible=False)
    hold(hand, "lent", "n001", "0", "1", tenant=Tenant("bob"), preemptible=False)
    hold(hand, "lent2", "n001", "2", "3", tenant=Tenant("bob"), preemptible=False)
    need(hand, 2, priority=0)
    assert notices(hand) == ["lent2"], "only as many as needed, the youngest first"
    assert consults(hand.tick(hand.now + 10.0)) == ["needs"]
    reason = hand.allocator.state.ended[RequestId("lent2")].reason
    assert "needs its own quota back" in reason


def test_no_lease_is_preempted_for_a_device_that_stays_taken() -> None:
    hand = Hand.seeing(lab("aaa/x", "aaa/y", node="n000"))
    hold(hand, "a", "n000", "0")
    hold(hand, "b", "n000", "1", preemptible=False)
    hand.see(lab("aaa", node="n000"))
    assert consults(need(hand, 1)) == []
    assert notices(hand) == [], "another lease holds a part of the GPU"


@pytest.mark.parametrize("milli", [500, 1000])
def test_a_preempted_lease_with_a_lost_device_is_freed_completely(milli: int) -> None:
    hand = Hand.seeing(lab("aaa", "bbb", node="n000"))
    terms = {"preemptible": True, "ttl_seconds": 1e6}
    demand = Demand(gpus=1, gpu_milli=milli)
    hand.grant(ask("a", demand, terms=terms), place("n000", "0", gpu_milli=milli))
    hold(hand, "b", "n000", "1", preemptible=False)
    hand.see(lab("aaa/x", "bbb", node="n000"))
    turn = need(hand, 1)
    assert notices(hand) == ["a"]
    hand.propose(turn, place("n000", "0"))
    assert "needs" in hand.allocator.state.leases
    check(hand.allocator.state)


def test_a_lost_device_of_a_preempted_lease_is_freed_at_its_new_node() -> None:
    hand = Hand.seeing(both(lab("aaa", node="n000"), lab("bbb", node="n001")))
    hold(hand, "a", "n000", "0")
    hold(hand, "b", "n001", "0", preemptible=False)
    hand.see(both(lab(node="n000"), lab("bbb", "aaa", node="n001")))
    turn = need(hand, 1)
    assert notices(hand) == ["a"]
    hand.propose(turn, place("n001", "1"))
    assert "needs" in hand.allocator.state.leases
    check(hand.allocator.state)


@pytest.mark.parametrize(("starts", "victims"), [(70.0, []), (72.0, ["a"])])
def test_no_lease_is_preempted_if_the_new_lease_would_overlap_a_reservation(
    starts: float, victims: list[str]
) -> None:
    hand = Hand.seeing(nodes(1, 1))
    hold(hand, "a", "n000", "0", notice_seconds=10.0, ttl_seconds=60.0)
    name, bob, one = RequestId("reserved"), Tenant("bob"), Demand(gpus=1)
    hand.step(ReserveAsked(hand.to(), name, bob, one, starts, 100.0))
    need(hand, 1)
    assert notices(hand) == victims
    assert consults(hand.tick(hand.now + 10.0)) == ["needs"] * len(victims)


@pytest.mark.parametrize("stop", [Stalled(9.0, 30.0), Restarted(30.0)])
def test_a_notice_that_expired_during_a_stall_gets_the_restart_grace(
    hand: Hand, stop: Event
) -> None:
    """The holder may not know of the notice yet, so the preempting request waits longer, too."""
    lease = hold(hand, "a", "n000", "0", "1", "2", "3", notice_seconds=5.0)
    hold(hand, "b", "n001", "0", "1", "2", "3", preemptible=False)
    need(hand, 4, wait=6.0)
    assert notices(hand) == ["a"]
    hand.now += 9.0
    hand.step(stop)
    hand.step(Tick())
    held = hand.allocator.state.leases[lease.id]
    assert (held.state, held.notice and held.notice.until) == ("granted", hand.now + 30.0)
    waiter = hand.allocator.state.waiting[RequestId("needs")]
    assert waiter.deadline >= hand.now + 30.0
    hand.tick(hand.now + 30.0)
    assert "a" not in hand.allocator.state.leases
    assert len(notices(hand)) == 2
    again = Allocator()
    again.replay(hand.facts)
    assert again.state == hand.allocator.state


def test_a_notice_with_time_left_is_prolonged_by_the_stall(hand: Hand) -> None:
    lease = hold(hand, "a", "n000", "0", "1", "2", "3", notice_seconds=50.0)
    hold(hand, "b", "n001", "0", "1", "2", "3", preemptible=False)
    need(hand, 4, wait=100.0)
    hand.now += 45.0
    hand.step(Stalled(8.0, 30.0))
    notice = hand.allocator.state.leases[lease.id].notice
    assert notice is not None
    assert notice.until == hand.now + 8.0

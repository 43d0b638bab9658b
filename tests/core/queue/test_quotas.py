"""Tests of quotas and fair shares: how much a tenant may hold, and which waiter is next."""

from typing import Any

import pytest
from by_hand import Hand, answers, ask, consults, nodes, place
from msgspec.structs import replace

from moorage.core.allocator import Allocator
from moorage.core.state.accounts import STEPS, Accounts
from moorage.core.state.checkpoint import condense
from moorage.core.state.facts import QuotaSet
from moorage.core.state.invariants import check
from moorage.core.turns.events import (
    HalfLifeConfigured,
    QuotaAsked,
    WorkloadKept,
    WorkloadStarted,
    WorkloadStopped,
)
from moorage.model import Amounts, Ask, Code, Demand, Provision, Quota, RequestId, Tenant

ONE = Demand(gpus=1)


@pytest.fixture
def hand() -> Hand:
    return Hand.seeing(nodes(2, 8))


def allow(hand: Hand, tenant: str, quota: Quota | None, project: str | None = None) -> Any:
    request = QuotaAsked(hand.to(), Tenant("op"), Tenant(tenant), project, quota)
    (answer,) = answers(hand.step(request))
    return answer.data if quota is None or hasattr(answer, "data") else answer


def gpus(nominal: int, borrow: int = 0, lend: int | None = None, **more: Any) -> Quota:
    given = None if lend is None else lend * 1000
    amounts = (Amounts(nominal * 1000), Amounts(borrow * 1000), Amounts(given))
    return Quota(more.pop("weight", 1.0), *amounts, **more)


def of(tenant: str, name: str, demand: Demand = ONE, wait: float = 0.0, project: str = "") -> Ask:
    return ask(name, demand, wait, tenant=Tenant(tenant), terms={"project": project})


def hold(hand: Hand, tenant: str, name: str, *devices: str, **more: Any) -> None:
    demand = Demand(gpus=len(devices))
    turn = hand.grant(of(tenant, name, demand, **more), place("n000", *devices))
    assert name in hand.allocator.state.leases, turn


def refusal(turn: Any) -> Any:
    (answer,) = answers(turn)
    return answer.code, answer.details


def test_a_refusal_by_quota_has_the_used_and_the_borrowed_amounts(hand: Hand) -> None:
    allow(hand, "ann", gpus(2))
    hold(hand, "ann", "a", "0")
    code, details = refusal(hand.ask(of("ann", "b", Demand(gpus=2))))
    assert code is Code.QUOTA_EXCEEDED
    figures = {"used": 1000, "quota": 2000, "borrowed": 0, "borrow_max": 0, "room": 1000}
    assert details.items() >= {**figures, "asked": 2000, "verdict": "not_you"}.items()
    assert details["never"] is False
    never = refusal(hand.ask(of("ann", "c", Demand(gpus=3), wait=60.0)))
    assert never[0] is Code.QUOTA_EXCEEDED, "a request that never fits does not wait"
    assert never[1]["never"] is True
    assert consults(hand.ask(of("bob", "d", Demand(gpus=8)))) == ["d"], "others have no limit"


def test_no_nodes_are_reserved_for_a_waiter_that_exceeds_its_quota(
    hand: Hand,
) -> None:
    allow(hand, "ann", gpus(1))
    hold(hand, "ann", "a", "0")
    assert consults(hand.ask(of("ann", "waits", wait=60.0))) == []
    assert hand.allocator.requests.queue.reservation == ()
    assert consults(hand.ask(of("bob", "b", Demand(gpus=8)))) == ["b"]
    assert consults(hand.release("a")) == ["waits"]


def test_room_in_a_quota_wakes_a_waiter_for_another_node(hand: Hand) -> None:
    """The released capacity is on a node that the first waiter cannot use."""
    allow(hand, "ann", gpus(8))
    hand.grant(of("ann", "one", ONE), place("n000", "0"))
    assert consults(hand.ask(of("ann", "waits", Demand(gpus=8), wait=60.0))) == []
    turn = hand.release("one")
    assert consults(turn) == ["waits"]
    check(hand.allocator.state)


def test_a_policy_is_consulted_again_if_the_quota_filled_while_it_decided(hand: Hand) -> None:
    """The capacity that grew is on a node that the waiter cannot use."""
    hand.see(nodes(1, 1, "d"))
    hand.see(nodes(1, 2, "e"))
    allow(hand, "ann", gpus(2))
    there = {"cluster_id": "d", "node_id": "n000", "gpus": ["0"]}
    hand.grant(of("bob", "b"), there)
    hand.grant(of("bob", "c"), there | {"cluster_id": "e"})
    hand.ask(ask("head", Demand(gpus=2), 60.0, tenant="cay", candidates=("e",)))
    waits = ask("waits", ONE, 60.0, candidates=("d",))
    assert consults(hand.ask(waits)) == []
    request = hand.release("b")
    assert consults(request) == ["waits"]
    hold(hand, "ann", "a", "0")
    hold(hand, "ann", "a2", "1")
    hand.propose(request, there)
    assert RequestId("waits") in hand.allocator.state.waiting
    assert consults(hand.release("a")) == ["waits"]


def test_a_raised_quota_wakes_the_waiters_that_it_blocked(hand: Hand) -> None:
    allow(hand, "ann", gpus(1))
    hold(hand, "ann", "a", "0")
    hand.ask(of("ann", "waits", wait=60.0))
    request = QuotaAsked(hand.to(), Tenant("op"), Tenant("ann"), None, gpus(2))
    assert consults(hand.step(request)) == ["waits"]


def test_other_tenants_borrow_unused_lent_quota(hand: Hand) -> None:
    allow(hand, "ann", gpus(4, lend=2))
    allow(hand, "bob", gpus(1, borrow=3))
    hold(hand, "bob", "b", "0", "1")
    assert refusal(hand.ask(of("bob", "more", Demand(gpus=2))))[1]["borrowed"] == 1000
    hold(hand, "bob", "b2", "2")
    code, details = refusal(hand.ask(of("bob", "b3")))
    assert (code, details["borrowed"], details["borrow_max"]) == (Code.QUOTA_EXCEEDED, 2000, 3000)
    hold(hand, "ann", "a", "3", "4", "5", "6")
    assert refusal(hand.ask(of("ann", "a2")))[0] is Code.QUOTA_EXCEEDED


def test_projects_share_the_quota_of_their_tenant(hand: Hand) -> None:
    allow(hand, "ann", gpus(3))
    allow(hand, "ann", gpus(1), project="one")
    hold(hand, "ann", "a", "0", project="one")
    assert refusal(hand.ask(of("ann", "b", project="one")))[1]["project"] == "one"
    hold(hand, "ann", "c", "1", "2", project="two")
    assert refusal(hand.ask(of("ann", "d", project="two")))[1]["project"] is None


def test_the_default_quota_holds_for_tenants_without_a_quota(hand: Hand) -> None:
    allow(hand, "*", gpus(1))
    allow(hand, "ann", gpus(2))
    hold(hand, "ann", "a", "0", "1")
    hold(hand, "bob", "b", "2")
    assert refusal(hand.ask(of("bob", "b2")))[0] is Code.QUOTA_EXCEEDED
    allow(hand, "*", None)
    assert consults(hand.ask(of("bob", "b3"))) == ["b3"]


def test_a_proposal_larger_than_the_demand_must_fit_the_quota(hand: Hand) -> None:
    quota = Quota(nominal=Amounts(cpu_milli=1_000))
    allow(hand, "ann", quota)
    turn = hand.grant(of("ann", "a"), place("n000", "0", cpu_milli=2_000))
    assert refusal(turn)[0] is Code.QUOTA_EXCEEDED


def test_the_dominant_share_decides_the_order() -> None:
    """Ann holds half of the CPU, and bob holds two of eight GPUs, which is the smaller share."""
    hand = Hand.seeing(nodes(1, 8))
    hand.grant(of("ann", "cpu", Demand(cpu_milli=32_000)), place("n000", cpu_milli=32_000))
    hold(hand, "bob", "b", "0", "1")
    hold(hand, "cid", "c", "2", "3", "4", "5", "6", "7")
    eight = Demand(gpus=8)
    hand.ask(of("ann", "ann-waits", eight, wait=60.0))
    hand.ask(of("bob", "bob-waits", eight, wait=60.0))
    order = [line.of.tenant for line in hand.allocator.requests.queue.lines()]
    assert order == ["bob", "ann"]
    allow(hand, "ann", Quota(weight=10.0))
    order = [line.of.tenant for line in hand.allocator.requests.queue.lines()]
    assert order == ["ann", "bob"]
    check(hand.allocator.state)


def test_a_tenant_with_past_use_waits_behind_a_tenant_without() -> None:
    hand = Hand.seeing(nodes(1, 8))
    hand.step(HalfLifeConfigured(100.0))
    hold(hand, "ann", "a", *"01234567")
    hand.now = 200.0
    hand.release("a")
    hold(hand, "cid", "c", *"01234567")
    hand.ask(of("ann", "ann-waits", wait=9e9))
    hand.ask(of("bob", "bob-waits", wait=9e9))
    lines = hand.allocator.requests.queue.lines
    assert [line.of.tenant for line in lines()] == ["bob", "ann"]
    share = hand.allocator.state.accounts.share((Tenant("ann"), None))
    assert share == pytest.approx(0.75)
    hand.now = 300.0
    hand.release("c")
    share = hand.allocator.state.accounts.share((Tenant("ann"), None))
    assert share == pytest.approx(0.375)


def test_shares_of_tenants_are_bitwise_equal_however_they_are_computed() -> None:
    hand = Hand.seeing(nodes(1, 8))
    hand.step(HalfLifeConfigured(7.0))
    for number, gpu in enumerate("01234567"):
        hand.now += number * 1.7
        hold(hand, f"t{number % 3}", f"l{number}", gpu)
    accounts = hand.allocator.state.accounts
    names = list(accounts.usages())
    numbers = [accounts.number(each) for each in names]
    import numpy as np  # noqa: PLC0415  # Only for this comparison.

    assert accounts.shares(np.array(numbers)).tolist() == [accounts.share(each) for each in names]
    other = Allocator()
    other.replay(condense(hand.allocator.state))
    again = other.state.accounts
    assert [again.share(each) for each in names] == [accounts.share(each) for each in names]
    replayed = Allocator()
    replayed.replay(hand.facts)
    again = replayed.state.accounts
    assert [again.share(each) for each in names] == [accounts.share(each) for each in names]


def test_setting_the_same_quota_twice_writes_one_fact(hand: Hand) -> None:
    row = allow(hand, "ann", gpus(2))
    assert row["resources"]["gpu_milli"]["room"] == 2000
    allow(hand, "ann", gpus(2))
    assert sum(isinstance(fact, QuotaSet) for fact in hand.facts) == 1
    rows = hand.inquire("quotas")["quotas"]
    assert [(each["tenant"], each["project"]) for each in rows] == [("ann", None)]
    allow(hand, "ann", None)
    allow(hand, "ann", None)
    assert hand.inquire("quotas")["quotas"] == []
    assert STEPS == 64
    assert Accounts().usages() == {}


KEPT = Provision("memory", keep_warm_seconds=60.0)


def keep_warm(
    hand: Hand, tenant: str, name: str, *devices: str, spec: str = "", **more: Any
) -> None:
    """Grant a lease with a workload, and release it so that it stays warm."""
    provision = replace(KEPT, spec={"name": spec or name})
    request = replace(of(tenant, name, Demand(gpus=len(devices)), **more), provision=provision)
    hand.grant(request, place("n000", *devices))
    fencing = hand.allocator.state.leases[RequestId(name)].fencing
    hand.step(WorkloadStarted(RequestId(name), fencing))
    hand.release(name)
    hand.step(WorkloadKept(RequestId(name), fencing))


def state_of(hand: Hand, name: str) -> str:
    found = hand.allocator.state.lease(RequestId(name))
    return found.state if found else "none"


def stop(hand: Hand, name: str) -> Any:
    fencing = hand.allocator.state.leases[RequestId(name)].fencing
    return hand.step(WorkloadStopped(RequestId(name), fencing))


def test_warm_leases_count_toward_the_quota_of_their_tenant(hand: Hand) -> None:
    """A tenant with a quota of two GPUs starts four different workloads of one GPU each."""
    allow(hand, "ann", gpus(2), project="night")
    allow(hand, "ann", gpus(3))
    keep_warm(hand, "ann", "a", "0", project="night")
    keep_warm(hand, "ann", "b", "1", project="night")
    assert (state_of(hand, "a"), state_of(hand, "b")) == ("warm", "warm")
    accounts = hand.allocator.state.accounts
    assert accounts.row(("ann", None))["gpu_milli"]["used"] == 2000
    assert accounts.row(("ann", "night"))["gpu_milli"]["used"] == 2000
    check(hand.allocator.state)
    turn = hand.ask(of("ann", "c", project="night"))
    assert (consults(turn), answers(turn)) == ([], []), "it waits until a warm lease has ended"
    assert (state_of(hand, "a"), state_of(hand, "b")) == ("ending", "warm")
    assert consults(stop(hand, "a")) == ["c"]
    assert consults(hand.ask(of("ann", "day"))) == ["day"], "the project's quota is another one"
    check(hand.allocator.state)


def test_only_as_many_warm_leases_end_as_a_quota_requires(hand: Hand) -> None:
    allow(hand, "ann", gpus(4))
    hold(hand, "ann", "held", "0", "1")
    keep_warm(hand, "ann", "a", "2")
    keep_warm(hand, "ann", "b", "3")
    assert refusal(hand.ask(of("ann", "c", Demand(gpus=3))))[0] is Code.QUOTA_EXCEEDED
    assert (state_of(hand, "a"), state_of(hand, "b")) == ("warm", "warm")
    assert answers(hand.ask(of("ann", "d"))) == []
    assert (state_of(hand, "a"), state_of(hand, "b")) == ("ending", "warm")
    assert answers(hand.ask(of("ann", "e"))) == []
    assert state_of(hand, "b") == "ending", "an ending lease makes space for one request only"
    assert consults(stop(hand, "a")) + consults(stop(hand, "b")) == ["d", "e"]


def test_an_equal_request_reuses_a_warm_lease_within_the_quota(hand: Hand) -> None:
    allow(hand, "ann", gpus(1))
    keep_warm(hand, "ann", "a", "0", spec="same")
    again = replace(of("ann", "b"), provision=replace(KEPT, spec={"name": "same"}))
    hand.ask(again)
    assert (state_of(hand, "a"), state_of(hand, "b")) == ("ended", "starting")
    assert hand.allocator.state.accounts.row(("ann", None))["gpu_milli"]["used"] == 1000
    check(hand.allocator.state)


def test_a_lowered_quota_prevents_warm_reuse(hand: Hand) -> None:
    allow(hand, "ann", gpus(2))
    keep_warm(hand, "ann", "a", "0", spec="same")
    hand.grant(of("ann", "other"), place("n000", "1"))
    allow(hand, "ann", gpus(1))
    again = replace(of("ann", "b", wait=60.0), provision=replace(KEPT, spec={"name": "same"}))
    hand.ask(again)
    assert state_of(hand, "other") == "granted"
    assert RequestId("b") in hand.allocator.state.waiting
    check(hand.allocator.state)


def test_no_workload_stays_warm_while_its_tenant_waits_for_quota(hand: Hand) -> None:
    allow(hand, "ann", gpus(1))
    provision = replace(KEPT, spec={"name": "x"})
    hand.grant(replace(of("ann", "a"), provision=provision), place("n000", "0"))
    hand.step(WorkloadStarted(RequestId("a"), 1))
    assert answers(hand.ask(of("ann", "waits", wait=60.0))) == []
    hand.release("a")
    turn = hand.step(WorkloadKept(RequestId("a"), 1))
    assert state_of(hand, "a") == "ending", turn
    assert consults(stop(hand, "a")) == ["waits"]


def test_warm_leases_on_borrowed_quota_end_for_another_borrower(hand: Hand) -> None:
    allow(hand, "bob", gpus(2, lend=2))
    for tenant in ("ann", "eve"):
        allow(hand, tenant, gpus(0, borrow=2))
    keep_warm(hand, "ann", "a", "0", "1")
    assert answers(hand.ask(of("eve", "e"))) == []
    assert consults(stop(hand, "a")) == ["e"]


def test_a_checkpoint_and_a_replay_count_warm_leases(hand: Hand) -> None:
    allow(hand, "ann", gpus(2))
    keep_warm(hand, "ann", "a", "0")
    for facts in (hand.facts, list(condense(hand.allocator.state))):
        other = Allocator()
        other.replay(facts)
        assert other.state.accounts.row(("ann", None))["gpu_milli"]["used"] == 1000

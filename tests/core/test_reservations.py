"""Nodes reserved in advance: others are out in time, and only the tenant comes in."""

from typing import Any

import pytest
from by_hand import Hand, answers, ask, consults, nodes, place

from moorage.core.allocator import Allocator
from moorage.core.checkpoint import condense
from moorage.core.events import RenewAsked, ReserveAsked, Restarted, Tick, UnreserveAsked
from moorage.core.facts import Reserved, Unreserved
from moorage.core.invariants import check
from moorage.model import ClusterId, Code, Demand, RequestId, Tenant

ONE = Demand(gpus=1)
BOB = Tenant("bob")


@pytest.fixture
def hand() -> Hand:
    hand = Hand()
    hand.see(nodes(2, 1))
    return hand


def reserve(hand: Hand, starts: float, ends: float, demand: Demand = ONE, **more: Any) -> Any:
    name = RequestId(f"reserved-{next(hand.numbers)}")
    asked = ReserveAsked(hand.to(), name, BOB, demand, starts, ends, **more)
    (answer,) = answers(hand.step(asked))
    return answer.data if hasattr(answer, "data") else answer


def at(hand: Hand, now: float) -> None:
    hand.now = now
    hand.step(Tick())


def test_it_takes_what_is_free_of_others_when_it_begins(hand: Hand) -> None:
    hand.grant(ask("long", ONE), place("n000", "0"))
    told = reserve(hand, 50.0, 100.0)
    assert told["nodes"] == [{"cluster_id": "c", "node_id": "n001"}]
    assert (told["tenant"], told["starts_at"], told["ends_at"]) == ("bob", 50.0, 100.0)
    assert reserve(hand, 55.0, 70.0).code is Code.NO_CAPACITY  # Reserved, and leased.
    assert reserve(hand, 60.0, 70.0)["nodes"] == [{"cluster_id": "c", "node_id": "n000"}]
    assert reserve(hand, 100.0, 120.0)["nodes"] == [{"cluster_id": "c", "node_id": "n000"}]


def test_the_smallest_nodes_that_will_do_are_reserved(hand: Hand) -> None:
    hand.see(nodes(1, 8, "a"))
    assert reserve(hand, 50.0, 100.0)["nodes"] == [{"cluster_id": "c", "node_id": "n000"}]
    told = reserve(hand, 50.0, 100.0, candidates=(ClusterId("a"),))
    assert told["nodes"] == [{"cluster_id": "a", "node_id": "n000"}]


def test_a_lease_that_would_run_into_it_goes_elsewhere_or_is_told_how_long(hand: Hand) -> None:
    reserve(hand, 50.0, 100.0)
    turn = hand.ask(ask("long", ONE))
    assert turn.effects[0].reserved == (("c", "n000"),)  # type: ignore[union-attr]  # A consultation.
    hand.propose(turn, place("n001", "0"))
    (refusal,) = answers(hand.ask(ask("longer", ONE)))
    assert (refusal.code, refusal.field) == (Code.NO_CAPACITY, "lease.ttl_seconds")
    assert refusal.details["ttl_max_seconds"] == 50.0
    assert consults(hand.ask(ask("short", ONE, terms={"ttl_seconds": 50.0}))) == ["short"]
    hand.now = 40.0
    (refusal,) = answers(hand.ask(ask("late", ONE, terms={"ttl_seconds": 20.0})))
    assert refusal.details["ttl_max_seconds"] == 10.0


def test_a_shorter_lease_is_granted_where_the_request_agrees(hand: Hand) -> None:
    reserve(hand, 50.0, 100.0, Demand(gpus=1, nodes=2))
    shorter = {"ttl_seconds_min": 20.0}
    turn = hand.grant(ask("brief", ONE, terms=shorter), place("n000", "0"))
    (news,) = answers(turn)
    assert (news.lease.expires_at, news.ttl_max_seconds) == (50.0, 50.0)
    assert news.lease.terms.ttl_seconds == 60.0
    hand.now = 30.0
    assert consults(hand.ask(ask("just", ONE, terms=shorter))) == ["just"]
    hand.now = 31.0
    (refusal,) = answers(hand.ask(ask("late", ONE, terms=shorter)))
    assert refusal.details["ttl_max_seconds"] == 19.0


def test_a_whole_lease_elsewhere_goes_before_a_shorter_one(hand: Hand) -> None:
    reserve(hand, 50.0, 100.0)
    turn = hand.ask(ask("long", ONE, terms={"ttl_seconds_min": 20.0}))
    assert turn.effects[0].reserved == (("c", "n000"),)  # type: ignore[union-attr]  # A consultation.
    (news,) = answers(hand.propose(turn, place("n001", "0")))
    assert (news.lease.expires_at, news.ttl_max_seconds) == (60.0, None)
    (news,) = answers(
        hand.grant(ask("brief", ONE, terms={"ttl_seconds_min": 20.0}), place("n000", "0"))
    )
    assert news.lease.expires_at == 50.0


def test_a_dry_run_says_where_it_would_be_or_what_is_in_the_way(hand: Hand) -> None:
    told = reserve(hand, 50.0, 100.0, dry_run=True)
    assert told["nodes"] == [{"cluster_id": "c", "node_id": "n000"}]
    assert not hand.allocator.state.reserved
    hand.grant(ask("long", ONE), place("n000", "0"))
    name = reserve(hand, 50.0, 100.0)["reservation"]
    refusal = reserve(hand, 40.0, 90.0, dry_run=True)
    assert refusal.details["leases"] == [{"lease": "long", "until": 60.0}]
    assert refusal.details["reservations"] == [{"reservation": name, "until": 100.0}]


def test_what_is_kept_for_the_head_is_no_place_for_a_whole_lease(hand: Hand) -> None:
    hand.see(nodes(3, 1))
    reserve(hand, 50.0, 100.0)  # Node n000.
    hand.grant(ask("there", ONE), place("n002", "0"))
    hand.ask(ask("head", Demand(gpus=1, nodes=2), wait=100.0))
    assert set(hand.allocator.requests.queue.reservation) == {("c", "n001"), ("c", "n002")}
    agrees = {"ttl_seconds_min": 20.0}
    (news,) = answers(hand.grant(ask("shorter", ONE, terms=agrees), place("n000", "0")))
    assert (news.lease.expires_at, news.ttl_max_seconds) == (50.0, 50.0)


def test_a_policy_that_proposes_it_all_the_same_gets_nothing(hand: Hand) -> None:
    reserve(hand, 50.0, 100.0)
    (refusal,) = answers(hand.propose(hand.ask(ask("long", ONE)), place("n000", "0")))
    assert refusal.code is Code.CONFLICT
    assert not hand.allocator.state.leases


def test_a_renewal_ends_where_it_begins(hand: Hand) -> None:
    short = {"ttl_seconds": 40.0}
    hand.grant(ask("short", ONE, terms=short), place("n000", "0"))
    hand.grant(ask("other", ONE), place("n001", "0"))
    assert reserve(hand, 50.0, 100.0)["nodes"] == [{"cluster_id": "c", "node_id": "n000"}]
    hand.now = 30.0
    renewal = RenewAsked(hand.to(), RequestId("short"), "token of short", None)
    (news,) = answers(hand.step(renewal))
    assert (news.lease.expires_at, news.ttl_max_seconds) == (50.0, 20.0)
    hand.step(Restarted(100.0))
    assert hand.allocator.state.leases[RequestId("short")].expires_at == 50.0
    at(hand, 50.0)
    assert list(hand.allocator.state.leases) == ["other"]


def test_from_its_start_on_only_its_tenant_gets_the_nodes_until_it_ends(hand: Hand) -> None:
    reserve(hand, 50.0, 100.0, Demand(gpus=1, nodes=2))
    at(hand, 50.0)
    brief = {"ttl_seconds": 1.0}
    (refusal,) = answers(hand.ask(ask("ann", ONE, terms=brief)))
    assert refusal.code is Code.NO_CAPACITY
    assert refusal.details["reserved_in_advance"] == 2
    assert "ttl_max_seconds" not in refusal.details
    hand.grant(ask("bob", ONE, tenant=BOB), place("n000", "0"))
    hand.ask(ask("waits", ONE, wait=1_000.0))
    hand.now = 100.0
    assert consults(hand.step(Tick())) == ["waits"]
    assert not hand.allocator.state.reserved
    assert "bob" in hand.allocator.state.leases, "its leases go on"


def test_unused_it_lapses_and_used_it_stays(hand: Hand) -> None:
    reserve(hand, 50.0, 100.0, lapse_seconds=10.0)
    at(hand, 60.0)
    assert [f.reason for f in hand.facts if isinstance(f, Unreserved)] == ["unused for 10 s"]
    reserve(hand, 70.0, 100.0, lapse_seconds=10.0)
    reserve(hand, 70.0, 100.0, lapse_seconds=10.0)
    hand.grant(ask("before", ONE, tenant=BOB), place("n000", "0"))
    at(hand, 70.0)
    hand.grant(ask("after", ONE, tenant=BOB, terms={"ttl_seconds": 1.0}), place("n001", "0"))
    for now in (71.0, 80.0, 99.0):
        at(hand, now)
    assert len(hand.allocator.state.reserved.by_id) == 2
    at(hand, 100.0)
    assert not hand.allocator.state.reserved
    assert hand.allocator.next_deadline() == 120.0  # Of "before": nothing of them is left.


def test_an_operator_ends_it_and_who_waits_is_served(hand: Hand) -> None:
    told = reserve(hand, 10.0, 100.0, Demand(gpus=1, nodes=2))
    assert consults(hand.ask(ask("waits", ONE, wait=60.0))) == []
    name = RequestId(told["reservation"])
    assert consults(hand.step(UnreserveAsked(hand.to(), BOB, name))) == ["waits"]
    (refusal,) = answers(hand.step(UnreserveAsked(hand.to(), BOB, name)))
    assert (refusal.code, refusal.field) == (Code.NOT_FOUND, "reservation")


def test_what_can_never_be_or_is_over_is_refused(hand: Hand) -> None:
    assert reserve(hand, 10.0, 20.0, Demand(gpus=2)).code is Code.NEVER_FITS
    assert reserve(hand, 10.0, 20.0, Demand(gpus=1, nodes=1_001)).code is Code.BUSY
    hand.now = 30.0
    assert reserve(hand, 10.0, 20.0).field == "ends_at"
    assert reserve(hand, 50.0, 40.0).field == "ends_at"
    assert reserve(hand, 10.0, 40.0)["starts_at"] == 30.0


def test_each_tenant_sees_its_own(hand: Hand) -> None:
    first, second = (reserve(hand, start, 100.0) for start in (60.0, 50.0))
    listed = hand.inquire("reservations", "bob")
    assert listed == {"reservations": [second, first], "next": None}
    assert hand.inquire("reservations", "ann")["reservations"] == []
    assert hand.inquire("reservations", "op", sees_all=True, limit=1)["reservations"] == [second]


def test_it_is_in_checkpoints(hand: Hand) -> None:
    reserve(hand, 0.0, 100.0, lapse_seconds=10.0)
    hand.grant(ask("bob", ONE, tenant=BOB), place("n000", "0"))
    again = Allocator()
    again.replay(condense(hand.allocator.state))
    assert again.state == hand.allocator.state
    assert [f.reservation.used for f in condense(again.state) if isinstance(f, Reserved)] == [True]
    assert again.next_deadline() == hand.allocator.next_deadline()
    check(again.state)

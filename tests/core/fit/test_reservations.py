"""Only a reservation's tenant gets its nodes, and other tenants' leases end before it starts."""

from typing import Any

import pytest
from by_hand import Hand, answers, ask, consults, lab, nodes, place, plain

from moorage.core.allocator import Allocator
from moorage.core.state.checkpoint import condense
from moorage.core.state.facts import Reserved, Unreserved
from moorage.core.state.invariants import check
from moorage.core.turns.events import (
    CancelAsked,
    RenewAsked,
    ReserveAsked,
    Restarted,
    Tick,
    UnreserveAsked,
)
from moorage.model import ClusterId, Code, Demand, RequestId, Tenant

ONE = Demand(gpus=1)
BOB = Tenant("bob")


@pytest.fixture
def hand() -> Hand:
    return Hand.seeing(nodes(2, 1))


def reserve(hand: Hand, starts: float, ends: float, demand: Demand = ONE, **more: Any) -> Any:
    name = RequestId(f"reserved-{next(hand.numbers)}")
    request = ReserveAsked(hand.to(), name, BOB, demand, starts, ends, **more)
    (answer,) = answers(hand.step(request))
    return plain(answer.data) if hasattr(answer, "data") else answer


def where(reply: Any) -> list[tuple[str, str]]:
    return [(node["cluster_id"], node["node_id"]) for node in reply["nodes"]]


def at(hand: Hand, now: float) -> None:
    hand.tick(now)


def test_a_reservation_takes_nodes_that_are_free_at_its_start(hand: Hand) -> None:
    hand.grant(ask("long", ONE), place("n000", "0"))
    reply = reserve(hand, 50.0, 100.0)
    assert where(reply) == [("c", "n001")]
    assert (reply["tenant"], reply["starts_at"], reply["ends_at"]) == ("bob", 50.0, 100.0)
    assert reserve(hand, 55.0, 70.0).code is Code.NO_CAPACITY  # One is reserved, one leased.
    assert where(reserve(hand, 60.0, 70.0)) == [("c", "n000")]
    assert where(reserve(hand, 100.0, 120.0)) == [("c", "n000")]


def test_a_reservation_takes_the_smallest_sufficient_nodes(hand: Hand) -> None:
    hand.see(nodes(1, 8, "a"))
    assert where(reserve(hand, 50.0, 100.0)) == [("c", "n000")]
    reply = reserve(hand, 50.0, 100.0, candidates=(ClusterId("a"),))
    assert where(reply) == [("a", "n000")]


def test_a_lease_overlapping_a_reservation_goes_elsewhere_or_is_shortened(hand: Hand) -> None:
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


def test_before_a_reservation_a_shorter_lease_is_granted_if_the_request_allows_it(
    hand: Hand,
) -> None:
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


def test_a_lease_of_full_length_elsewhere_is_preferred_to_a_shorter_lease(hand: Hand) -> None:
    reserve(hand, 50.0, 100.0)
    turn = hand.ask(ask("long", ONE, terms={"ttl_seconds_min": 20.0}))
    assert turn.effects[0].reserved == (("c", "n000"),)  # type: ignore[union-attr]  # A consultation.
    (news,) = answers(hand.propose(turn, place("n001", "0")))
    assert (news.lease.expires_at, news.ttl_max_seconds) == (60.0, None)
    (news,) = answers(
        hand.grant(ask("brief", ONE, terms={"ttl_seconds_min": 20.0}), place("n000", "0"))
    )
    assert news.lease.expires_at == 50.0


def test_a_dry_run_of_a_reservation_names_its_nodes_or_the_obstacles(hand: Hand) -> None:
    reply = reserve(hand, 50.0, 100.0, dry_run=True)
    assert where(reply) == [("c", "n000")]
    assert not hand.allocator.state.reserved
    hand.grant(ask("long", ONE), place("n000", "0"))
    name = reserve(hand, 50.0, 100.0)["reservation"]
    refusal = reserve(hand, 40.0, 90.0, dry_run=True)
    assert refusal.details["leases"] == [{"lease": "long", "until": 60.0}]
    assert refusal.details["reservations"] == [{"reservation": name, "until": 100.0}]


def test_a_lease_of_full_length_does_not_get_nodes_that_are_reserved_for_the_head(
    hand: Hand,
) -> None:
    hand.see(nodes(3, 1))
    reserve(hand, 50.0, 100.0)  # Node n000.
    hand.grant(ask("there", ONE), place("n002", "0"))
    hand.ask(ask("head", Demand(gpus=1, nodes=2), wait=100.0))
    assert set(hand.allocator.requests.queue.reservation) == {("c", "n001"), ("c", "n002")}
    agrees = {"ttl_seconds_min": 20.0}
    (news,) = answers(hand.grant(ask("shorter", ONE, terms=agrees), place("n000", "0")))
    assert (news.lease.expires_at, news.ttl_max_seconds) == (50.0, 50.0)


def test_a_proposal_of_reserved_nodes_is_rejected(hand: Hand) -> None:
    reserve(hand, 50.0, 100.0)
    (refusal,) = answers(hand.propose(hand.ask(ask("long", ONE)), place("n000", "0")))
    assert refusal.code is Code.POLICY_UNSOUND  # The policy could see that the node is excluded.
    assert not hand.allocator.state.leases


def test_a_renewal_ends_at_the_start_of_a_reservation(hand: Hand) -> None:
    short = {"ttl_seconds": 40.0}
    hand.grant(ask("short", ONE, terms=short), place("n000", "0"))
    hand.grant(ask("other", ONE), place("n001", "0"))
    assert where(reserve(hand, 50.0, 100.0)) == [("c", "n000")]
    hand.now = 30.0
    renewal = RenewAsked(hand.to(), RequestId("short"), "token of short", None)
    (news,) = answers(hand.step(renewal))
    assert (news.lease.expires_at, news.ttl_max_seconds) == (50.0, 20.0)
    hand.step(Restarted(100.0))
    assert hand.allocator.state.leases[RequestId("short")].expires_at == 50.0
    at(hand, 50.0)
    assert list(hand.allocator.state.leases) == ["other"]


def test_during_a_reservation_only_its_tenant_gets_the_nodes(hand: Hand) -> None:
    reserve(hand, 50.0, 100.0, Demand(gpus=1, nodes=2))
    at(hand, 50.0)
    brief = {"ttl_seconds": 1.0}
    (refusal,) = answers(hand.ask(ask("ann", ONE, terms=brief)))
    assert refusal.code is Code.NO_CAPACITY
    assert refusal.details["reserved_in_advance"] == 2
    assert "ttl_max_seconds" not in refusal.details
    hand.grant(ask("bob", ONE, tenant=BOB), place("n000", "0"))
    hand.ask(ask("waits", ONE, wait=1_000.0))
    assert consults(hand.tick(100.0)) == ["waits"]
    assert not hand.allocator.state.reserved
    assert "bob" in hand.allocator.state.leases, "the tenant's leases continue"


def test_an_unused_reservation_lapses_and_a_used_reservation_stays(hand: Hand) -> None:
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
    assert hand.allocator.next_deadline() == 120.0  # The end of the lease "before".


def test_waiters_get_the_nodes_of_a_reservation_that_has_ended(hand: Hand) -> None:
    reply = reserve(hand, 10.0, 100.0, Demand(gpus=1, nodes=2))
    assert consults(hand.ask(ask("waits", ONE, wait=60.0))) == []
    name = RequestId(reply["reservation"])
    assert consults(hand.step(UnreserveAsked(hand.to(), BOB, name))) == ["waits"]
    (refusal,) = answers(hand.step(UnreserveAsked(hand.to(), BOB, name)))
    assert (refusal.code, refusal.field) == (Code.NOT_FOUND, "reservation")


def test_an_impossible_or_past_reservation_is_refused(hand: Hand) -> None:
    assert reserve(hand, 10.0, 20.0, Demand(gpus=2)).code is Code.NEVER_FITS
    refusal = reserve(hand, 10.0, 20.0, candidates=(ClusterId("x"),))
    assert (refusal.code, refusal.field) == (Code.UNKNOWN_CLUSTERS, "clusters")
    assert "“x”" in refusal.reason
    assert reserve(hand, 10.0, 20.0, Demand(gpus=1, nodes=1_001)).code is Code.BUSY
    hand.now = 30.0
    assert reserve(hand, 10.0, 20.0).field == "ends_at"
    assert reserve(hand, 50.0, 40.0).field == "ends_at"
    assert reserve(hand, 10.0, 40.0)["starts_at"] == 30.0


def test_each_tenant_sees_only_its_own_reservations(hand: Hand) -> None:
    first, second = (reserve(hand, start, 100.0) for start in (60.0, 50.0))
    listed = hand.inquire("reservations", "bob")
    assert listed == {"reservations": [second, first], "next": None}
    assert hand.inquire("reservations", "ann")["reservations"] == []
    assert hand.inquire("reservations", "op", sees_all=True, limit=1)["reservations"] == [second]


def test_reservations_are_in_checkpoints(hand: Hand) -> None:
    reserve(hand, 0.0, 100.0, lapse_seconds=10.0)
    hand.grant(ask("bob", ONE, tenant=BOB), place("n000", "0"))
    again = Allocator()
    again.replay(condense(hand.allocator.state))
    assert again.state == hand.allocator.state
    assert [f.reservation.used for f in condense(again.state) if isinstance(f, Reserved)] == [True]
    assert again.next_deadline() == hand.allocator.next_deadline()
    check(again.state)


TWO = Demand(gpus=2)


@pytest.fixture
def one(hand: Hand) -> Hand:
    """An allocator with one node of eight devices, 64 cores and 64 GiB."""
    return Hand.seeing(nodes(1, 8))


def test_a_reservation_of_devices_includes_their_share_of_cpu_and_memory(one: Hand) -> None:
    (node,) = reserve(one, 50.0, 100.0, TWO)["nodes"]
    assert node == {
        "cluster_id": "c",
        "node_id": "n000",
        "gpus": ["0", "1"],
        "gpu_milli": 1000,
        "cpu_milli": 16_000,
        "memory_mib": 16_384,
        "whole": False,
    }
    (node,) = reserve(one, 50.0, 100.0, Demand(gpus=1, cpu_milli=40_000))["nodes"]
    assert (node["gpus"], node["cpu_milli"], node["memory_mib"]) == (["2"], 40_000, 8_192)
    assert reserve(one, 50.0, 100.0, Demand(gpus=1, cpu_milli=9_000)).code is Code.NO_CAPACITY
    (node,) = reserve(one, 50.0, 100.0, Demand(gpus=4))["nodes"]
    assert (node["gpus"], node["cpu_milli"]) == (["3", "4", "5", "6"], 8_000), "the unreserved part"
    (node,) = reserve(one, 100.0, 120.0, Demand(gpus=8))["nodes"]
    assert (len(node["gpus"]), node["cpu_milli"], node["memory_mib"]) == (8, 64_000, 65_536)


def test_other_tenants_get_the_unreserved_parts_of_a_node(one: Hand) -> None:
    reserve(one, 50.0, 100.0, TWO)
    turn = one.ask(ask("six", Demand(gpus=6)))
    (share, devices) = turn.effects[0].excluded_parts  # type: ignore[union-attr]  # A consultation.
    assert (share.cpu_milli, share.memory_mib, devices.gpus) == (16_000, 16_384, ("0", "1"))
    one.propose(turn, {"cluster_id": "c", "node_id": "n000"})
    assert one.allocator.state.leases[RequestId("six")].placement[0].gpus == tuple("234567")
    (refusal,) = answers(one.ask(ask("more", ONE)))
    assert (refusal.code, refusal.details["ttl_max_seconds"]) == (Code.NO_CAPACITY, 50.0)
    brief = {"ttl_seconds": 50.0}
    one.grant(ask("brief", ONE, terms=brief), place("n000", "0"))
    one.grant(ask("bob", ONE, tenant=BOB), place("n000", "1"))


def test_a_reservation_of_devices_includes_cpu_cores(one: Hand) -> None:
    reserve(one, 50.0, 100.0, TWO)
    (refusal,) = answers(one.ask(ask("wide", Demand(gpus=1, cpu_milli=48_001))))
    assert refusal.details["ttl_max_seconds"] == 50.0
    one.grant(ask("fits", Demand(gpus=1, cpu_milli=48_000)), place("n000", "2"))
    at(one, 55.0)
    one.grant(ask("bob", Demand(gpus=2, cpu_milli=16_000), tenant=BOB), place("n000", "0", "1"))


def test_leases_ending_in_time_do_not_block_a_reservation(one: Hand) -> None:
    one.grant(
        ask("brief", Demand(gpus=2, cpu_milli=60_000), terms={"ttl_seconds": 40.0}),
        place("n000", "0", "1"),
    )
    reply = reserve(one, 50.0, 100.0, TWO)
    assert reply["nodes"][0]["gpus"] == ["0", "1"]
    one.grant(ask("stays", Demand(gpus=6, cpu_milli=4_000)), place("n000", *"234567"))
    renewal = RenewAsked(one.to(), RequestId("brief"), "token of brief", 60.0)
    (news,) = answers(one.step(renewal))
    assert news.lease.expires_at == 50.0
    renewal = RenewAsked(one.to(), RequestId("stays"), "token of stays", 90.0)
    (news,) = answers(one.step(renewal))
    assert (news.lease.expires_at, news.ttl_max_seconds) == (90.0, None)


def test_unneeded_parts_of_a_used_reservation_are_open_to_other_tenants(one: Hand) -> None:
    reserve(one, 0.0, 100.0, Demand(gpus=4))
    at(one, 1.0)
    one.grant(ask("bob", Demand(gpus=4, cpu_milli=32_000), tenant=BOB), place("n000", *"0123"))
    one.grant(ask("ann", Demand(gpus=4, cpu_milli=32_000)), place("n000", *"4567"))


def test_a_lease_fills_only_one_of_two_reservations_of_its_tenant(one: Hand) -> None:
    half = Demand(gpus=1, gpu_milli=500)
    assert [reserve(one, 0.0, 100.0, half)["nodes"][0]["gpus"] for _ in range(2)] == [["0"]] * 2
    one.grant(ask("bob", half, tenant=BOB), place("n000", "0", gpu_milli=500))
    turn = one.ask(ask("ann", half))
    excluded = {
        gpu: share.gpu_milli for share in turn.effects[0].excluded_parts for gpu in share.gpus
    }  # type: ignore[union-attr]  # A consultation.
    assert excluded == {"0": 500}


def test_two_tenants_share_a_device_on_a_node_reserved_for_the_head(one: Hand) -> None:
    half = Demand(gpus=1, gpu_milli=500)
    for tenant in (BOB, Tenant("eve")):
        name = RequestId(f"reserved for {tenant}")
        one.step(ReserveAsked(one.to(), name, tenant, half, 0.0, 100.0))
    at(one, 1.0)
    one.grant(ask("ann", ONE), place("n000", "7"))
    one.ask(ask("head", Demand(gpus=7), wait=100.0, tenant="cay"))
    assert one.allocator.requests.queue.reservation == (("c", "n000"),)
    turn = one.ask(ask("bob", half, tenant=BOB))
    taken = sum(
        share.gpu_milli
        for share in turn.effects[0].excluded_parts  # type: ignore[union-attr]  # A consultation.
        if "0" in share.gpus
    )
    assert taken == 500, "the tenant gets its own reserved half"
    one.propose(turn, place("n000", "0", gpu_milli=500))
    assert RequestId("bob") in one.allocator.state.leases


def test_a_policy_that_saw_only_the_reserved_part_is_consulted_again(one: Hand) -> None:
    reserve(one, 0.0, 100.0, ONE)
    at(one, 1.0)
    one.grant(ask("ann", ONE), place("n000", "7"))
    one.ask(ask("head", Demand(gpus=7), wait=100.0, tenant="cay"))
    turn = one.ask(ask("bob", None, wait=100.0, tenant=BOB))
    assert turn.effects[0].reserved == ()  # type: ignore[union-attr]  # A consultation.
    one.step(CancelAsked(one.to(), RequestId("head"), Tenant("cay")))
    turn = one.propose(turn, {"declined": "one device is not enough"})
    assert consults(turn) == ["bob"]


def test_the_start_of_a_reservation_that_is_already_in_use_wakes_waiters(one: Hand) -> None:
    """Waiters wake when a reservation starts, even if a lease uses it just before the tick."""
    reserve(one, 5.0, 100.0, Demand(gpus=2, cpu_milli=2_000))
    one.grant(ask("ann", ONE), place("n000", "7"))
    one.ask(ask("head", Demand(gpus=6), wait=100.0, tenant="cay"))
    one.now = 5.0
    one.grant(ask("used", ONE, tenant=BOB, terms={"priority": 1}), place("n000", "0"))
    assert consults(one.ask(ask("waits", ONE, wait=100.0, tenant=BOB))) == []
    assert consults(one.step(Tick())) == ["waits"]


def test_a_request_for_a_short_lease_is_served_before_an_equal_request_for_a_longer_lease(
    hand: Hand,
) -> None:
    hand.see(nodes(3, 1))
    hand.grant(ask("ann", ONE), place("n000", "0"))
    reserve(hand, 50.0, 100.0)
    pair = Demand(gpus=1, nodes=2)
    hand.ask(ask("long", pair, wait=100.0))
    assert len(hand.allocator.requests.queue.reservation) == 2
    turn = hand.ask(ask("brief", pair, wait=100.0, terms={"ttl_seconds": 9.0}))
    assert consults(turn) == ["brief"]


def test_a_tenants_lease_in_its_reservation_is_not_preempted(one: Hand) -> None:
    reserve(one, 0.0, 1_000.0, TWO)
    gives = {"preemptible": True, "ttl_seconds": 900.0}
    one.grant(ask("bob", TWO, tenant=BOB, terms=gives), place("n000", "0", "1"))
    one.grant(ask("ann", Demand(gpus=6), terms=gives), place("n000", *"234567"))
    one.ask(ask("urgent", TWO, wait=600.0, terms={"priority": 9}))
    assert [name for name in ("bob", "ann") if name in one.allocator.state.leases] == ["bob"]


def test_the_refusal_of_a_reservation_counts_only_candidate_nodes(one: Hand) -> None:
    for name in ("a", "b"):
        one.see(nodes(1, 8, name))
        assert "nodes" in reserve(one, 0.0, 100.0, Demand(gpus=8), candidates=(ClusterId(name),))
    here = (ClusterId("c"),)
    one.grant(ask("ann", Demand(gpus=1), candidates=here), place("n000", "0"))
    refusal = reserve(one, 0.0, 100.0, Demand(gpus=8), candidates=here)
    assert (refusal.details["reserved"], refusal.details["leased"]) == (0, 1)
    (refusal,) = answers(one.ask(ask("all", Demand(gpus=8), candidates=here)))
    assert "reserved_in_advance" not in refusal.details
    reserve(one, 0.0, 100.0, TWO, candidates=here)
    (refusal,) = answers(one.ask(ask("all again", Demand(gpus=6), candidates=here)))
    assert refusal.details["reserved_in_advance"] == 1


def test_a_reservation_without_devices_takes_whole_nodes(one: Hand) -> None:
    reply = reserve(one, 50.0, 100.0, Demand(cpu_milli=1_000))
    assert reply["nodes"] == [{"cluster_id": "c", "node_id": "n000", "whole": True}]
    turn = one.ask(ask("ann", None))
    assert turn.effects[0].reserved == (("c", "n000"),)  # type: ignore[union-attr]  # A consultation.


@pytest.mark.parametrize(("less", "more"), [(ONE, TWO), (Demand(cpu_milli=1),) * 2])
def test_a_lost_device_stays_with_its_lease_until_the_lease_ends(
    less: Demand, more: Demand
) -> None:
    hand = Hand.seeing(lab("aaa", "ccc", cluster="left"))
    hand.grant(ask("lost", ONE), place("n1", "0", cluster_id="left"))
    hand.see(lab("ccc", cluster="left"))
    hand.see(lab("bbb", "aaa"))
    hand.grant(ask("beside", ONE), place("n1", "0"))
    here = (ClusterId("c"),)
    refusal = reserve(hand, 59.0, 100.0, less, candidates=here)
    assert refusal.code is Code.NO_CAPACITY
    assert [each["lease"] for each in refusal.details["leases"]] == ["beside", "lost"]
    assert where(reserve(hand, 60.0, 100.0, more, candidates=here)) == [("c", "n1")]
    hand.now = 30.0
    hand.step(RenewAsked(hand.to(), RequestId("lost"), "token of lost", None))
    assert hand.allocator.state.leases[RequestId("lost")].expires_at == 60.0
    check(hand.allocator.state)

"""Tests of the allocator's limits and special cases that simulation and transcripts lack."""

import pytest
from by_hand import Hand, answers, ask, consults, nodes, place
from msgspec.structs import replace

from moorage.core.allocator import Allocator
from moorage.core.lifecycle.requests import CONSULTS_MAX
from moorage.core.queue.open_requests import ASKS_BYTES_MAX, PENDING_MAX
from moorage.core.queue.order import CONSULTED_MAX, PIECE
from moorage.core.queue.ranking import FILTERS_OF_TENANT_MAX
from moorage.core.state.checkpoint import condense
from moorage.core.state.deadlines import SPARE
from moorage.core.state.facts import Refusal
from moorage.core.state.invariants import check
from moorage.core.state.state import ENDED_MAX
from moorage.core.turns.effects import Advice, LeaseNews, Recall
from moorage.core.turns.events import (
    CancelAsked,
    ClusterGone,
    Inquired,
    RenewAsked,
    SessionLost,
)
from moorage.core.turns.turn import DECISIONS_MAX
from moorage.model import (
    ClusterId,
    Code,
    Demand,
    Provision,
    RequestId,
    Requirement,
    SessionId,
    Tenant,
)

ONE = Demand(gpus=1)


def full(gpus: int = 1) -> Hand:
    hand = Hand.seeing(nodes(1, gpus))
    demand = Demand(gpus=gpus)
    hand.grant(ask("holder", demand), place("n000", *map(str, range(gpus))))
    return hand


def test_a_refusal_reports_an_empty_inventory() -> None:
    (answer,) = answers(Hand().ask(ask("r", ONE)))
    assert answer.code is Code.UNKNOWN_CLUSTERS


def test_a_request_id_cannot_be_used_twice_in_any_state_of_the_request() -> None:
    hand = full()
    for name in ("holder",):
        assert answers(hand.ask(ask(name, ONE)))[0].code is Code.ALREADY_EXISTS
    hand.ask(ask("waiter", ONE, wait=60.0))
    assert answers(hand.ask(ask("waiter", ONE)))[0].code is Code.ALREADY_EXISTS
    hand.release("holder")
    assert answers(hand.ask(ask("holder", ONE)))[0].code is Code.ALREADY_EXISTS
    pending = hand.ask(ask("advice", None, terms={}))
    assert consults(pending) == ["advice"]
    assert answers(hand.ask(ask("advice", ONE)))[0].code is Code.ALREADY_EXISTS


def test_requests_beyond_the_limit_are_refused_as_busy() -> None:
    hand = Hand.seeing(nodes(1, 1))
    for number in range(PENDING_MAX):
        hand.ask(ask(f"r{number}", ONE))
    assert hand.allocator.undecided == PENDING_MAX
    assert answers(hand.ask(ask("more", ONE)))[0].code is Code.BUSY
    assert consults(hand.ask(ask("of another tenant", ONE, tenant=Tenant("bob"))))


def test_parts_of_a_message_with_several_requests_are_granted_and_refused_one_by_one() -> None:
    hand = Hand.seeing(nodes(2, 4))
    value = [
        place("n000", "0"),
        None,
        {"error": "no GPU with 200 GB"},
        place("n000", "1"),
        place("n009", "0"),
        place("n001", "9"),
        place("n000", "1"),
        place("n001", 1.5),
    ]
    (answer,) = answers(hand.grant(ask("several", None), value))
    assert [(share.node_id, share.gpus) for share in answer.lease.placement] == [
        ("n000", ("0", "1"))
    ]
    assert answer.data[:4] == value[:4]
    reasons = [part["error"] for part in answer.data[4:]]
    for reason, said in zip(
        reasons, ["n009", "GPUs of n001", "an earlier part names", "malformed"], strict=True
    ):
        assert said in reason
    (advice,) = answers(hand.grant(ask("advice", None, terms={"ttl_seconds": 60.0}), [None]))
    assert advice.code is Code.POLICY_DECLINED
    (full,) = answers(hand.grant(ask("full", None), [place("n001", "0"), place("n009", "0")]))
    assert (full.data[0], "n009" in full.data[1]["error"]) == (place("n001", "0"), True)
    (unsound,) = answers(hand.grant(ask("unsound", None), [None, place("n009", "0")]))
    assert unsound.code is Code.POLICY_UNSOUND
    halves = [place("n001", "1", gpu_milli=500), place("n001", "2", gpu_milli=300)]
    (mixed,) = answers(hand.grant(ask("mixed", None), halves))
    assert "expected other GPUs, with equal gpu_milli" in mixed.data[1]["error"]
    nothing = [None, {"error": "all are taken."}]
    (refusal,) = answers(hand.grant(ask("nothing", None), nothing))
    assert refusal.reason == "The policy declined: all are taken."
    (refusal,) = answers(hand.grant(ask("text", None), "c"))
    assert refusal.reason == "The policy declined: its answer names no “cluster_id”."
    check(hand.allocator.state)


def test_a_list_of_proposals_has_gaps_only_for_requests_without_a_gang() -> None:
    hand = Hand.seeing(nodes(2, 4))
    (one,) = answers(hand.grant(ask("one", ONE), [None, place("n000", "0")]))
    assert one.lease.placement[0].gpus == ("0",)
    assert one.data == [None, place("n000", "0")]
    gang = [place("n000", "1"), None]
    (refusal,) = answers(hand.grant(ask("gang", Demand(gpus=1, nodes=2)), gang))
    assert refusal.code is Code.POLICY_BAD_OUTPUT
    advice = ask("advice", None)
    (passed_on,) = answers(hand.grant(replace(advice, terms=None), [*gang, place("gone")]))
    assert passed_on.data[:2] == gang
    assert "gone" in passed_on.data[2]["error"]


def test_a_request_that_loses_its_place_too_often_ends_in_a_conflict() -> None:
    hand = Hand.seeing(nodes(2, CONSULTS_MAX))
    turn = hand.ask(ask("slow", ONE))
    for number in range(CONSULTS_MAX):
        gpu = str(number)
        hand.grant(ask(f"fast{number}", ONE), place("n000", gpu))
        turn = hand.propose(turn, place("n000", gpu))
        assert len(consults(turn)) == (number < CONSULTS_MAX - 1)
    (answer,) = answers(turn)
    assert answer.code is Code.CONFLICT
    assert hand.allocator.undecided == 0


def test_a_waiter_that_fits_is_tried_again_after_a_conflict() -> None:
    hand = Hand.seeing(nodes(2, CONSULTS_MAX))
    turn = hand.ask(ask("slow", ONE, wait=60.0))
    for number in range(CONSULTS_MAX):
        gpu = str(number)
        hand.grant(ask(f"fast{number}", ONE), place("n000", gpu))
        turn = hand.propose(turn, place("n000", gpu))
    assert list(hand.allocator.state.waiting) == ["slow"]
    assert consults(turn) == ["slow"], "the waiter fits, so its policy is consulted again"
    assert isinstance(answers(hand.propose(turn, place("n001", "0")))[0], LeaseNews)


def test_a_policy_is_consulted_again_with_capacity_freed_while_it_decided() -> None:
    hand = Hand.seeing(nodes(1, 2))
    hand.grant(ask("holder", ONE), place("n000", "0"))
    thinking = hand.ask(ask("picky", ONE, wait=60.0))
    hand.release("holder")
    turn = hand.propose(thinking, {"declined": "I wanted device 0"})
    assert consults(turn) == ["picky"]
    turn = hand.propose(turn, {"declined": "still not good enough"})
    assert consults(turn) == [], "nothing has changed, so the refusal stands"
    assert consults(hand.see(nodes(1, 2, name="d"))) == ["picky"]


def test_a_new_request_gets_capacity_freed_during_its_evaluation() -> None:
    for demand in (ONE, None):
        hand = Hand.seeing(nodes(1, 2))
        hand.grant(ask("holder", ONE), place("n000", "0"))
        thinking = hand.ask(ask("picky", demand))
        hand.release("holder")
        turn = hand.propose(thinking, {"declined": "I wanted device 0"})
        assert consults(turn) == ["picky"]
        assert isinstance(answers(hand.propose(turn, place("n000", "0")))[0], LeaseNews)


def test_a_new_request_gets_the_place_of_a_failed_proposal() -> None:
    """The policy's process counts the GPUs of the failed proposal as taken in its own fleet."""
    hand = Hand.seeing(nodes(1, 1))
    first, second = hand.ask(ask("first", None)), hand.ask(ask("second", None))
    assert answers(hand.propose(first, place("n000", "7")))[0].code is Code.POLICY_UNSOUND
    turn = hand.propose(second, {"declined": "it is taken"})
    assert consults(turn) == ["second"]
    assert isinstance(answers(hand.propose(turn, place("n000", "0")))[0], LeaseNews)


def test_repeated_declines_of_a_policy_become_a_refusal() -> None:
    hand = Hand.seeing(nodes(1, 2))
    turn = hand.ask(ask("never", ONE))
    for number in range(CONSULTS_MAX):
        hand.grant(ask(f"other{number}", ONE), place("n000", "0"))
        hand.release(f"other{number}")
        turn = hand.propose(turn, {"declined": "not today"})
        assert len(consults(turn)) == (number < CONSULTS_MAX - 1)
    (answer,) = answers(turn)
    assert (answer.code, answer.details) == (
        Code.POLICY_DECLINED,
        {"verdict": "not_now", "data": {"declined": "not today"}},
    )
    turn = hand.propose(hand.ask(ask("again", ONE)), {"declined": "not today"})
    assert answers(turn)[0].code is Code.POLICY_DECLINED, "no capacity became free meanwhile"


def test_policies_are_consulted_for_only_a_few_waiters_at_a_time() -> None:
    hand = full(gpus=1)
    for number in range(CONSULTED_MAX + 5):
        hand.ask(ask(f"w{number}", ONE, wait=600.0))
    turn = hand.see(nodes(4, 8, name="d"))
    first = [f"w{number}" for number in range(CONSULTED_MAX)]
    assert consults(turn) == first
    turn = hand.propose(turn, {"cluster_id": "d", "node_id": "n000", "gpus": ["0"]})
    assert consults(turn) == [f"w{CONSULTED_MAX}"]


def test_identical_waiters_are_judged_once() -> None:
    hand = full()
    for number in range(50):
        hand.ask(ask(f"w{number}", ONE, wait=600.0))
    assert len(hand.allocator.requests.queue.lines()) == 1
    turn = hand.release("holder")
    assert len(consults(turn)) == CONSULTED_MAX


def test_a_policy_is_not_blamed_for_a_changed_inventory() -> None:
    hand = Hand.seeing(nodes(2, 1))
    hand.see(nodes(1, 1, name="d"))
    turn = hand.ask(ask("r", ONE))
    hand.step(ClusterGone(ClusterId("c")))
    turn = hand.propose(turn, place("n000", "0"))
    assert consults(turn) == ["r"]
    (answer,) = answers(hand.propose(turn, place("n000", "0")))
    assert answer.code is Code.POLICY_UNSOUND, "this time the policy saw the inventory"


def test_the_policy_of_a_waiter_after_an_undecided_head_is_not_consulted() -> None:
    hand = full(gpus=2)
    hand.ask(ask("head", Demand(gpus=2), wait=600.0))
    hand.see(nodes(1, 2, name="d"))  # Now the head's policy decides about `d`.
    turn = hand.ask(ask("behind", ONE, wait=600.0))
    assert consults(turn) == []
    assert "behind" in hand.allocator.state.waiting


def test_advice_may_name_nodes_that_are_reserved_for_the_head_of_the_queue() -> None:
    hand = Hand.seeing(nodes(1, 2))
    hand.grant(ask("holder", ONE), place("n000", "0"))
    hand.ask(ask("head", Demand(gpus=2), wait=600.0))
    turn = hand.ask(replace(ask("advice", ONE), terms=None))
    assert isinstance(answers(hand.propose(turn, place("n000", "1")))[0], Advice)
    (answer,) = answers(hand.ask(ask("behind", ONE)))
    assert answer.code is Code.NO_CAPACITY
    assert answer.details["reserved_for_waiting"] == 1
    assert "1 kept for a request that waits already" in answer.reason


def test_the_tenant_with_the_smallest_share_is_first_among_equal_priorities() -> None:
    hand = Hand.seeing(nodes(1, 3))
    hand.grant(ask("a0", Demand(gpus=2), tenant=Tenant("ann")), place("n000", "0", "1"))
    hand.grant(ask("b0", ONE, tenant=Tenant("bob")), place("n000", "2"))
    hand.ask(ask("a1", ONE, wait=600.0, tenant=Tenant("ann")))
    hand.ask(ask("b1", ONE, wait=600.0, tenant=Tenant("bob")))
    assert [line.of.tenant for line in hand.allocator.requests.queue.lines()] == ["bob", "ann"]
    assert consults(hand.release("b0"))[0] == "b1"


def test_an_idempotency_key_reused_with_another_demand_is_refused() -> None:
    hand = Hand.seeing(nodes(1, 4))
    keyed = {"idempotency_key": "k"}
    hand.grant(ask("r1", ONE, terms=keyed), place("n000", "0"))
    (same,) = answers(hand.ask(ask("r2", ONE, terms=keyed)))
    assert isinstance(same, LeaseNews)
    assert same.lease.id == "r1"
    like = [("models", ("H100",)), ("topology", "numa"), ("where", (Requirement("a", "Exists"),))]
    same_size = [replace(ONE, **{field: value}) for field, value in like]
    elastic = replace(ask("r3", ONE, terms=keyed), alternatives=(ONE, Demand(gpus=2)))
    more = (Demand(gpus=2), Demand(gpus=1, nodes=2), Demand(gpus=1, cpu_milli=9))
    others = [ask("r3", other, terms=keyed) for other in (*more, *same_size, None)]
    for other in (*others, elastic):
        (answer,) = answers(hand.ask(other))
        assert answer.code is Code.IDEMPOTENCY_MISMATCH
    # A lease without a workload does not answer a request that starts one.
    (answer,) = answers(
        hand.ask(replace(ask("r4", ONE, terms=keyed), provision=Provision("memory")))
    )
    assert answer.code is Code.IDEMPOTENCY_MISMATCH


def test_the_last_ended_leases_are_known_and_older_ended_leases_are_not() -> None:
    hand = Hand.seeing(nodes(1, 1))
    for number in range(ENDED_MAX + 1):
        name = f"r{number}"
        keyed = ask(name, ONE, terms={"idempotency_key": name})
        hand.grant(keyed, place("n000", "0"))
        hand.release(name)
    state = hand.allocator.state
    assert len(state.ended) == ENDED_MAX
    assert len(state.keys) == ENDED_MAX
    assert len(hand.allocator._turn.decisions) <= DECISIONS_MAX
    assert answers(hand.release("r0"))[0].code is Code.UNKNOWN_LEASE
    assert isinstance(answers(hand.release("r1"))[0], LeaseNews)
    assert isinstance(hand.inquire("why", subject="r0"), Recall)
    check(state)
    again = Allocator()
    again.replay(list(condense(state)))
    assert again.state == state
    assert list(again.state.ended) == list(state.ended)
    hand.allocator = again
    assert hand.grant(ask("new", ONE), place("n000", "0")).facts[0].lease.fencing == ENDED_MAX + 2  # type: ignore[union-attr]  # Plain values in tests.


def test_ended_leases_of_a_tenant_do_not_push_out_ended_leases_of_another_tenant() -> None:
    hand = Hand.seeing(nodes(1, 1))
    for number in range(ENDED_MAX + 2):
        name, tenant = f"r{number}", "bob" if number == 1 else "mallory"
        hand.grant(
            ask(name, ONE, tenant=tenant, terms={"idempotency_key": name}), place("n000", "0")
        )
        hand.release(name)
    state = hand.allocator.state
    again = Allocator()
    again.replay(list(condense(state)))
    assert len(state.ended) == ENDED_MAX
    assert [name for name in ("r0", "r1", "r2", "r3") if name in state.ended] == ["r1", "r3"]
    assert (Tenant("bob"), "r1") in state.keys
    assert [each.ended_by_tenant.forget() for each in (state, again.state)] == ["r3", "r3"]


def test_endless_renewals_do_not_fill_the_memory() -> None:
    hand = full()
    for _ in range(5 * SPARE):
        hand.now += 0.01
        hand.step(RenewAsked(hand.to(), RequestId("holder"), "token of holder", None))
    state = hand.allocator.state
    assert len(state.deadlines) <= SPARE + 2
    assert hand.allocator.next_deadline() == hand.now + 60.0
    assert len(hand.tick(hand.now + 60.0).facts) == 1


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_pages_of_a_listing_have_every_entry_only_once(limit: int) -> None:
    hand = Hand.seeing(nodes(2, 4))
    hand.see(nodes(1, 1, name="d"))
    for number in range(5):
        hand.grant(ask(f"r{number}", ONE), place(f"n00{number // 4}", str(number % 4)))
    hand.grant(ask("other", ONE, tenant=Tenant("bob")), place("n001", "1"))
    for number in range(3):
        hand.ask(ask(f"w{number}", Demand(gpus=4, nodes=2), wait=600.0))

    def pages(question: str, name: str, key: str, **more) -> list:
        found, after = [], ""
        for _ in range(20):
            page = hand.inquire(question, after=after, limit=limit, **more)
            assert len(page[name]) <= limit
            found += [row[key] for row in page[name]]
            if page["next"] is None:
                return found
            after = page["next"]
        raise AssertionError("there are more pages than entries")

    assert pages("leases", "leases", "id") == [f"r{number}" for number in range(5)]
    assert pages("queue", "waiting", "request") == ["w0", "w1", "w2"]
    assert pages("fleet", "clusters", "cluster_id") == ["c", "d"]
    in_c = {"filters": {"cluster": "c"}}
    assert pages("fleet", "nodes", "node_id", **in_c) == ["n000", "n001"]
    assert pages("leases", "leases", "id", filters={"node_id": "n001"}) == ["r4"]
    assert pages("leases", "leases", "id", filters={"state": "ended"}) == []


def test_why_and_status_hide_requests_of_other_tenants() -> None:
    hand = full()
    assert hand.inquire("why", subject="holder")["lease"]["id"] == "holder"
    assert "token" not in repr(hand.inquire("why", subject="holder"))
    assert isinstance(hand.inquire("why", tenant="bob", subject="holder"), Recall)
    hand.ask(ask("no", ONE))
    assert hand.inquire("why", subject="no")["code"] == "no_capacity"
    assert isinstance(hand.inquire("why", tenant="bob", subject="no"), Recall)
    refusal = hand.inquire("status", tenant="bob", subject="holder").answer
    assert isinstance(refusal, Refusal)
    assert hand.inquire("status", subject="holder").answer.owner is False


def test_the_bytes_of_undecided_and_waiting_requests_are_limited() -> None:
    hand = Hand.seeing(nodes(1, 1))
    hand.grant(ask("holder", Demand(gpus=1)), place("n000", "0"))
    large = ASKS_BYTES_MAX // 2 + 1
    first = ask("first", Demand(gpus=1), wait=9.0, size=large)
    assert answers(hand.ask(first)) == []  # The request waits.
    (no,) = answers(hand.ask(ask("second", Demand(gpus=1), wait=9.0, size=large)))
    assert no.code is Code.BUSY
    assert hand.allocator.state.waiting_loads.bytes == large
    hand.step(CancelAsked(hand.to(), first.id, first.tenant))
    assert hand.allocator.state.waiting_loads.bytes == 0
    # Without a demand the policy is consulted at once, and again until it answers.
    (request,) = consults(hand.ask(ask("third", None, size=large)))
    assert request == "third"
    (no,) = answers(hand.ask(ask("fourth", None, size=large)))
    assert no.code is Code.BUSY
    hand.step(SessionLost(SessionId("s")))
    assert consults(hand.ask(ask("fifth", None, size=large))) == ["fifth"]


def test_a_follower_of_the_facts_gives_the_same_answers_and_indexes_the_waiters_once() -> None:
    hand, follower, followed = full(4), Allocator(), 0
    for name in ("first", "second"):
        hand.ask(ask(name, Demand(gpus=2), wait=60.0))
    follower.follow(hand.facts)
    followed = len(hand.facts)
    assert len([*follower.index()]) == 0, "fewer waiters than one piece"
    assert [line.since for line in follower.requests.queue.lines()] == [hand.now]
    index = follower.requests.queue._ranking  # A full index would replace this object.
    for step in (
        lambda: hand.propose(hand.see(nodes(2, 4)), place("n001", "0", "1")),
        lambda: hand.release("holder"),
        lambda: hand.ask(ask("third", Demand(gpus=4), wait=60.0)),
        lambda: hand.step(CancelAsked(hand.to(), RequestId("second"), Tenant("ann"))),
        lambda: hand.step(ClusterGone(ClusterId("c"))),
    ):
        step()
        follower.follow(hand.facts[followed:])
        followed = len(hand.facts)
        assert follower.state == hand.allocator.state
        for question in ("leases", "queue", "fleet", "quotas", "reservations"):
            inquiry = Inquired(hand.to(), question, Tenant("ann"), limit=100)
            ours, theirs = hand.step(inquiry), follower.read(inquiry, hand.now)
            assert (theirs.facts, theirs.effects) == ([], ours.effects)
    follower.replay(())
    assert follower.requests.queue._ranking is index
    follower.forget()


def test_the_index_of_many_waiters_is_built_in_steps() -> None:
    hand, follower = full(), Allocator()
    for number in range(2 * PIECE):
        hand.ask(ask(f"w{number}", ONE, wait=60.0))
    follower.follow(hand.facts)
    assert len([*follower.index()]) == 2
    assert len([*follower.index()]) == 0, "from then on the index is up to date"
    (line,) = follower.requests.queue.lines()
    assert len(line.waiters) == 2 * PIECE


def test_the_number_of_device_filters_per_tenant_is_limited() -> None:
    hand = full()
    for number in range(FILTERS_OF_TENANT_MAX - 2):  # “known” is one more.
        hand.ask(ask(f"w{number}", replace(ONE, models=("A100", str(number))), wait=60.0))
    several = tuple(replace(ONE, models=("A100", each)) for each in "ab")
    two = ask("two", several[0], wait=60.0, alternatives=several)
    hand.ask(ask("known", ONE, wait=60.0))
    (no,) = answers(hand.ask(two))
    assert (no.code, str(FILTERS_OF_TENANT_MAX) in no.reason) == (Code.BUSY, True)
    for other in (replace(two, tenant=Tenant("bob")), ask("again", ONE, wait=60.0)):
        assert answers(hand.ask(other)) == []
    gone = RequestId("w7")
    hand.step(CancelAsked(hand.to(), gone, Tenant("ann")))
    hand.step(CancelAsked(hand.to(), RequestId("w8"), Tenant("ann")))
    assert answers(hand.ask(replace(two, id=RequestId("later")))) == []

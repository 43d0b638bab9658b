"""Tests of leases that return to the queue, in cases that transcripts and simulation lack."""

import pytest
from by_hand import Hand, answers, ask, consults, nodes, place

from moorage.core.allocator import Allocator
from moorage.core.lifecycle.leases import likeness
from moorage.core.lifecycle.requests import FAULT_PAUSE_SECONDS, FAULTS_MAX
from moorage.core.state.checkpoint import condense
from moorage.core.state.facts import Refusal, Requeued
from moorage.core.state.invariants import check
from moorage.core.state.refusals import PASSING
from moorage.core.turns.effects import Consult, LeaseNews
from moorage.core.turns.events import (
    Asked,
    CancelAsked,
    ConsultFailed,
    RenewAsked,
    Restarted,
    WorkloadFailed,
    WorkloadStarted,
)
from moorage.core.turns.turn import Turn
from moorage.model import REQUEUE_PAUSE_SECONDS_MAX, Code, Demand, Provision, RequestId, Tenant
from moorage.sandbox.host.circuit_breaker import OPEN_SECONDS_MAX

ONE = Demand(gpus=1)
AGAIN = Provision("memory", on_failure="requeue", attempts_max=3)


def fail(hand: Hand, name: str):
    lease = hand.allocator.state.leases[RequestId(name)]
    return hand.step(WorkloadFailed(lease.id, lease.fencing, "no image", 1, ("its last line",)))


def at_once(machines: int, gpus: int) -> Hand:
    """An allocator that starts failed leases again without a pause."""
    hand = Hand(Allocator(requeue_pause_seconds=0.0))
    hand.see(nodes(machines, gpus))
    return hand


def crowd(*names: str) -> Hand:
    """Grant leases of one device each on one node, in the order of their requests."""
    hand = at_once(1, len(names))
    for number, name in enumerate(names):
        hand.now += 1.0
        hand.grant(ask(name, ONE, provision=AGAIN), place("n000", str(number)))
    return hand


def test_the_oldest_of_several_failed_leases_starts_first() -> None:
    hand = crowd("old", "young")
    waiter = ask("waiter", Demand(gpus=2), wait=60.0, terms={"priority": 9})
    hand.ask(waiter)
    assert consults(fail(hand, "young")) == []
    hand.propose(fail(hand, "old"), place("n000", "0", "1"))
    assert [each.ask.id for each in hand.allocator.requests.queue.in_turn(9)] == ["old", "young"]
    assert list(hand.allocator.state.waiting) == ["young", "old"]
    again = Allocator()
    again.replay(list(condense(hand.allocator.state)))
    assert [each.ask.id for each in again.requests.queue.in_turn(9)] == ["old", "young"]
    assert again.state == hand.allocator.state
    assert consults(hand.release("waiter")) == ["old", "young"]
    check(hand.allocator.state)


def test_the_bytes_of_a_queued_lease_count_until_it_leaves_the_queue() -> None:
    hand = at_once(1, 1)
    hand.grant(ask("r", ONE, provision=AGAIN, size=1_000), place("n000", "0"))
    state = hand.allocator.state
    assert state.waiting_loads.bytes == 0
    turn = fail(hand, "r")
    assert state.waiting_loads.bytes == 1_000
    hand.propose(turn, place("n000", "0"))
    assert (state.waiting_loads.bytes, state.leases[RequestId("r")].attempt) == (0, 2)
    fail(hand, "r")
    hand.release("r")
    assert state.waiting_loads.bytes == 0
    assert state.ended[RequestId("r")].ask is None


def test_a_policy_that_fails_without_the_avoided_node_is_consulted_with_all_nodes() -> None:
    hand = at_once(2, 1)
    hand.grant(ask("r", ONE, provision=AGAIN), place("n000", "0"))
    turn = fail(hand, "r")
    (consult,) = [effect for effect in turn.effects if isinstance(effect, Consult)]
    assert consult.reserved == (("c", "n000"),)
    no = Refusal(Code.POLICY_ERROR, "KeyError: 'n000'")
    turn = hand.step(ConsultFailed(consult.ask.id, consult.consultation, no))
    (consult,) = [effect for effect in turn.effects if isinstance(effect, Consult)]
    assert consult.reserved == ()
    hand.step(ConsultFailed(consult.ask.id, consult.consultation, no))
    ended = hand.allocator.state.ended[RequestId("r")]
    assert ended.reason == "attempt 1 of 3 failed: no image; then: KeyError: 'n000'"


def test_a_failed_lease_without_resources_is_tried_on_other_nodes_first() -> None:
    hand = at_once(2, 1)
    hand.grant(ask("r", None, provision=AGAIN), place("n000", "0"))
    turn = fail(hand, "r")
    turn = hand.propose(turn, {"declined": "it must be n000"})
    assert consults(turn) == ["r"], "the policy declines all other nodes"
    hand.propose(turn, place("n000", "0"))
    assert hand.allocator.state.leases[RequestId("r")].attempt == 2


def test_an_idempotency_key_finds_its_lease_whether_queued_or_ended() -> None:
    hand = at_once(1, 1)
    keyed = ask("r", ONE, provision=AGAIN, terms={"idempotency_key": "key"})
    hand.grant(keyed, place("n000", "0"))
    hand.propose(fail(hand, "r"), {"declined": "not today"})
    other = ask("other", Demand(gpus=2), provision=AGAIN, terms={"idempotency_key": "key"})
    assert answers(hand.ask(other))[0].code is Code.IDEMPOTENCY_MISMATCH
    for state in ("queued", "ended"):
        same = ask("same", ONE, provision=AGAIN, terms={"idempotency_key": "key"})
        (answer,) = answers(hand.step(Asked(hand.to(), same)))
        assert isinstance(answer, LeaseNews)
        assert (answer.lease.id, answer.lease.state) == ("r", state)
        hand.release("r")


def test_pages_of_leases_continue_after_a_waiting_lease() -> None:
    hand = crowd("a", "b", "c")
    hand.propose(fail(hand, "a"), {"declined": "not today"})
    assert [type(fact) for fact in hand.facts].count(Requeued) == 1
    page = hand.inquire("leases", limit=2)
    assert [each["id"] for each in page["leases"]] == ["a", "b"]
    page = hand.inquire("leases", limit=2, after=page["next"])
    assert [each["id"] for each in page["leases"]] == ["c"]
    (row,) = hand.inquire("leases", filters={"state": "queued"})["leases"]
    assert (row["workload"]["phase"], row["placement"]) == ("failed", [])
    reply = hand.inquire("why", subject="a")
    assert (reply["state"], reply["reason"]) == ("queued", "attempt 1 of 3 failed: no image")


def test_a_running_workload_has_an_endpoint() -> None:
    hand = crowd("a")
    lease = hand.allocator.state.leases[RequestId("a")]
    hand.step(WorkloadStarted(lease.id, lease.fencing, "http://10.0.0.1:80"))
    (row,) = hand.inquire("leases")["leases"]
    assert row["workload"]["endpoint"] == "http://10.0.0.1:80"
    hand.propose(fail(hand, "a"), {"declined": "not today"})
    (row,) = hand.inquire("leases")["leases"]
    assert row["workload"]["endpoint"] == ""


def pausing(attempts: int = 3) -> Hand:
    """Return an allocator with a lease whose workload starts again after a pause if it fails."""
    hand = Hand(Allocator(requeue_pause_seconds=2.0))
    hand.see(nodes(1, 1))
    again = Provision("memory", on_failure="requeue", attempts_max=attempts)
    hand.grant(ask("r", ONE, provision=again, terms={"ttl_seconds": 1e6}), place("n000", "0"))
    return hand


def test_each_pause_of_a_lease_is_twice_as_long_as_the_last_up_to_a_bound() -> None:
    hand, pauses = pausing(attempts=100), []
    for _ in range(99):
        assert consults(fail(hand, "r")) == []
        due = hand.allocator.next_deadline()
        assert due is not None
        pauses.append(due - hand.now)
        hand.propose(hand.tick(due), place("n000", "0"))
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, *[REQUEUE_PAUSE_SECONDS_MAX] * 94]
    check(hand.allocator.state)


def test_a_paused_lease_is_not_tried_before_its_retry_time() -> None:
    hand = pausing()
    fail(hand, "r")
    assert consults(hand.see(nodes(2, 4))) == []
    (row,) = hand.inquire("queue")["waiting"]
    assert row["lease"]["retry_at"] == hand.now + 2.0
    reply = hand.inquire("why", subject="r")
    assert reply["lease"]["retry_at"] == hand.now + 2.0
    assert "it is tried again at retry_at, not before" in reply["reason"]
    assert consults(hand.tick(hand.now + 2.0)) == ["r"]
    (row,) = hand.inquire("queue")["waiting"]
    assert "retry_at" not in row["lease"]


def test_other_requests_get_the_place_of_a_paused_lease() -> None:
    hand = pausing()
    fail(hand, "r")
    hand.grant(ask("other", ONE), place("n000", "0"))
    assert consults(hand.tick(hand.now + 2.0)) == []
    assert consults(hand.release("other")) == ["r"]


def test_a_pause_of_a_lease_has_the_same_end_after_a_restart() -> None:
    hand = pausing()
    fail(hand, "r")
    for facts in (hand.facts, list(condense(hand.allocator.state))):
        again = Hand(Allocator(requeue_pause_seconds=2.0), hand.now + 1.0)
        again.allocator.replay(facts)
        assert again.allocator.state == hand.allocator.state
        assert consults(again.step(Restarted(0.0))) == []
        assert again.allocator.next_deadline() == hand.now + 2.0
        assert consults(again.tick(hand.now + 2.0)) == ["r"]
        check(again.allocator.state)


def test_a_paused_lease_can_expire_and_be_released() -> None:
    def release_it(hand: Hand):
        return hand.release("r")

    def cancel_it(hand: Hand):
        return hand.step(CancelAsked(hand.to(), RequestId("r"), Tenant("ann")))

    def over(hand: Hand):
        hand.step(RenewAsked(hand.to(), RequestId("r"), "token of r", 1.0))
        return hand.tick(hand.now + 1.0)

    for end, reason in ((release_it, "released"), (cancel_it, "cancelled"), (over, "expired")):
        hand = pausing()
        fail(hand, "r")
        end(hand)
        lease = hand.allocator.state.ended[RequestId("r")]
        assert (lease.reason, lease.retry_at) == (reason, 0.0)
        assert hand.allocator.next_deadline() is None
        check(hand.allocator.state)


def test_a_paused_lease_can_be_renewed() -> None:
    hand = pausing()
    fail(hand, "r")
    retry_at = hand.now + 2.0
    for ttl in (100.0, 1.0, 50.0):
        hand.step(RenewAsked(hand.to(), RequestId("r"), "token of r", ttl))
        assert hand.allocator.next_deadline() == min(retry_at, hand.now + ttl)
    hand.propose(hand.tick(retry_at), place("n000", "0"))
    assert hand.allocator.next_deadline() == 50.0 + retry_at - 2.0


def fail_consultation(hand: Hand, turn: Turn, code: Code = Code.POLICY_TIMEOUT) -> Turn:
    (consult,) = [effect for effect in turn.effects if isinstance(effect, Consult)]
    refusal = Refusal(code, "its cell was stopped")
    return hand.step(ConsultFailed(consult.ask.id, consult.consultation, refusal))


@pytest.mark.parametrize("code", sorted(PASSING))
def test_a_failure_of_the_sandbox_ends_no_queued_lease(code: Code) -> None:
    hand = at_once(1, 1)
    hand.grant(ask("r", ONE, provision=AGAIN), place("n000", "0"))
    assert consults(fail_consultation(hand, fail(hand, "r"), code)) == []
    reply = hand.inquire("why", subject="r")
    assert reply["lease"]["retry_at"] == hand.now + FAULT_PAUSE_SECONDS
    assert reply["last"]["code"] == code
    assert "attempt 1 of 3 failed: no image; it is tried again at" in reply["reason"]
    hand.propose(hand.tick(hand.now + FAULT_PAUSE_SECONDS), place("n000", "0"))
    lease = hand.allocator.state.leases[RequestId("r")]
    assert (lease.attempt, lease.faults) == (2, 0)
    check(hand.allocator.state)


@pytest.mark.parametrize("others", [0, 1])
def test_a_queued_lease_whose_policy_never_answers_ends_despite_restarts(
    others: int,
) -> None:
    hand = at_once(1 + others, 1)
    terms = {"ttl_seconds": 1e6}
    hand.grant(ask("r", ONE, provision=AGAIN, terms=terms), place("n000", "0"))
    turn, began = fail(hand, "r"), hand.now
    for _ in range(FAULTS_MAX):
        assert consults(turn) == ["r"]
        fail_consultation(hand, turn)
        facts = list(condense(hand.allocator.state))
        hand.allocator = Allocator(requeue_pause_seconds=0.0)
        hand.allocator.replay(facts)
        turn = hand.tick(hand.allocator.next_deadline() or 0.0)
    assert hand.now - began > 2 * OPEN_SECONDS_MAX, "a paused policy is consulted once more"
    fail_consultation(hand, turn)
    ended = hand.allocator.state.ended[RequestId("r")]
    assert ended.reason == "attempt 1 of 3 failed: no image; then: its cell was stopped"


def test_policy_failures_are_counted_separately_for_each_start() -> None:
    hand = at_once(1, 1)
    hand.grant(ask("r", ONE, provision=AGAIN), place("n000", "0"))
    for _ in range(2):
        fail_consultation(hand, fail(hand, "r"))
        assert hand.allocator.next_deadline() == hand.now + FAULT_PAUSE_SECONDS
        hand.propose(hand.tick(hand.now + FAULT_PAUSE_SECONDS), place("n000", "0"))


def test_a_paused_lease_does_not_block_other_waiters() -> None:
    hand = at_once(1, 1)
    hand.grant(ask("r", ONE, provision=AGAIN), place("n000", "0"))
    turn = fail(hand, "r")
    hand.ask(ask("waiter", ONE, wait=60.0))
    assert consults(fail_consultation(hand, turn)) == ["waiter"]


@pytest.mark.parametrize(
    "change",
    [
        {"provision": Provision("memory", {"command": ["other"]})},
        {"provision": Provision("memory", {"command": ["one"], "stop_seconds": 1})},
        {"parameters": {"x": 1}},
        {"demand": Demand(gpus=1, cpu_milli=1000)},
        {"tenant": Tenant("bob")},
    ],
    ids=["command", "spec", "parameters", "resources", "tenant"],
)
def test_a_different_request_does_not_reuse_a_warm_workload(change: dict) -> None:
    same = {"demand": ONE, "provision": Provision("memory", {"command": ["one"]})}
    assert likeness(ask("a", **same)) == likeness(ask("b", wait=9.0, **same))
    assert likeness(ask("a", **same)) != likeness(ask("b", **same | change))

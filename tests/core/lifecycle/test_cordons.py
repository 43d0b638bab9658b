"""A cordoned or drained node gets no new lease, and a drain moves leases that may move."""

from typing import Any

import pytest
from by_hand import Hand, answers, ask, consults, nodes, place

from moorage.core.allocator import Allocator
from moorage.core.state.checkpoint import condense
from moorage.core.state.facts import Cordoned
from moorage.core.state.invariants import check
from moorage.core.turns.effects import Stop
from moorage.core.turns.events import (
    ClusterGone,
    CordonAsked,
    RenewAsked,
    Restarted,
    WorkloadStarted,
    WorkloadStopped,
)
from moorage.model import ClusterId, Code, Demand, NodeId, Provision, RequestId, Tenant

ONE = Demand(gpus=1)
AGAIN = Provision("memory", on_failure="requeue", attempts_max=3)


@pytest.fixture
def hand() -> Hand:
    hand = Hand(Allocator(requeue_pause_seconds=0.0))
    hand.see(nodes(2, 1))
    return hand


def cordon(hand: Hand, mode: Any, node: str = "", **more: Any) -> Any:
    request = CordonAsked(hand.to(), Tenant("op"), ClusterId("c"), NodeId(node), mode, **more)
    return hand.step(request)


def reply(turn: Any) -> Any:
    (answer,) = answers(turn)
    return answer.data


def offered_nodes(hand: Hand) -> list[str]:
    rows = hand.inquire("fleet", filters={"cluster": "c"})["nodes"]
    return [row["node_id"] for row in rows if not row.get("unavailable")]


def test_a_cordoned_node_gets_no_leases_until_uncordoned(hand: Hand) -> None:
    turn = cordon(hand, "cordon", "n000", reason="new fans")
    assert reply(turn) == {
        "cluster_id": "c",
        "node_id": "n000",
        "leases": [],
        "unavailable": "cordoned by op: new fans",
    }
    assert offered_nodes(hand) == ["n001"]
    hand.see(nodes(2, 1, "c"))  # The cluster's document does not list the cordon.
    assert offered_nodes(hand) == ["n001"]
    hand.propose(hand.ask(ask("bold", ONE)), place("n000", "0"))
    assert not hand.allocator.state.leases, "a proposal of the cordoned node is not granted"
    hand.grant(ask("first", ONE), place("n001", "0"))
    assert consults(hand.ask(ask("waits", ONE, wait=60.0))) == []
    assert consults(cordon(hand, "uncordon", "n000")) == ["waits"], "the waiter is served at once"
    assert offered_nodes(hand) == ["n000", "n001"]


def test_a_cordon_of_a_cluster_holds_for_nodes_that_are_added_later(hand: Hand) -> None:
    cordon(hand, "cordon")
    hand.see(nodes(3, 1))
    assert offered_nodes(hand) == []
    cordon(hand, "cordon", "n002")
    cordon(hand, "uncordon")
    assert offered_nodes(hand) == ["n000", "n001"]
    cordon(hand, "uncordon", "n002")
    assert len(offered_nodes(hand)) == 3
    assert reply(cordon(hand, "uncordon", "n002"))["unavailable"] is None, "a repetition is fine"


def test_a_drain_moves_requeueable_leases_and_notifies_the_holders_of_all_others(
    hand: Hand,
) -> None:
    hand.grant(ask("moves", ONE, provision=AGAIN), place("n000", "0"))
    lease = hand.allocator.state.leases[RequestId("moves")]
    hand.step(WorkloadStarted(lease.id, lease.fencing))
    turn = cordon(hand, "cordon", "n000")
    assert reply(turn)["leases"] == ["moves"]
    assert not any(isinstance(effect, Stop) for effect in turn.effects), "a cordon stops nothing"
    turn = cordon(hand, "drain", "n000")
    assert any(isinstance(effect, Stop) for effect in turn.effects)
    assert reply(turn)["leases"] == ["moves"], "it holds its node until its backend reports the end"
    turn = hand.step(WorkloadStopped(lease.id, lease.fencing))
    hand.propose(turn, place("n001", "0"))
    moved = hand.allocator.state.leases[RequestId("moves")]
    assert (moved.placement[0].node_id, moved.attempt) == ("n001", 2)
    assert moved.outcome is not None
    assert "drained by op" in moved.outcome.detail
    assert reply(cordon(hand, "drain", "n000"))["leases"] == []
    check(hand.allocator.state)


def test_a_lease_cannot_be_renewed_beyond_the_time_of_a_drain(hand: Hand) -> None:
    hand.grant(ask("stays", ONE), place("n000", "0"))
    assert reply(cordon(hand, "drain", "n000", seconds=20.0))["leases"] == ["stays"]
    lease = hand.allocator.state.leases[RequestId("stays")]
    assert lease.expires_at == 20.0
    hand.now = 10.0
    renewal = RenewAsked(hand.to(), lease.id, "token of stays", 60.0)
    assert answers(hand.step(renewal))[0].lease.expires_at == 20.0
    hand.tick(20.0)
    assert not hand.allocator.state.leases
    ended = hand.allocator.state.ended[lease.id]
    assert ended.reason == "its node was drained by op"
    hand.now = 0.0


def test_a_restart_after_the_time_of_a_drain_gives_no_grace(hand: Hand) -> None:
    hand.grant(ask("stays", ONE), place("n000", "0"))
    cordon(hand, "drain", "n000", seconds=20.0)
    hand.now = 25.0
    hand.step(Restarted(30.0))
    renewal = RenewAsked(hand.to(), RequestId("stays"), "token of stays", 60.0)
    (refusal,) = answers(hand.step(renewal))
    assert refusal.code is Code.LEASE_ENDED
    assert "drained by op" in refusal.reason
    assert not hand.allocator.state.leases


def test_without_a_deadline_a_drain_waits_for_the_release_of_a_lease(hand: Hand) -> None:
    hand.grant(ask("stays", ONE), place("n000", "0"))
    cordon(hand, "drain", "n000")
    hand.now = 50.0
    renewal = RenewAsked(hand.to(), RequestId("stays"), "token of stays", 60.0)
    assert answers(hand.step(renewal))[0].lease.expires_at == 110.0
    hand.release("stays")
    assert offered_nodes(hand) == ["n001"]


def test_a_cordon_of_an_unknown_node_or_cluster_is_refused(hand: Hand) -> None:
    (refusal,) = answers(cordon(hand, "cordon", "n009"))
    assert (refusal.code, refusal.field) == (Code.NOT_FOUND, "node")
    assert "did you mean n00" in refusal.reason
    (unlike,) = answers(cordon(hand, "drain", "pump"))
    assert unlike.reason.endswith("(there are n000, n001).")
    bare = CordonAsked(hand.to(), Tenant("op"), ClusterId("n001"), NodeId(""), "drain")
    (unnamed,) = answers(hand.step(bare))
    assert unnamed.reason == ("No live cluster “n001” is registered (did you mean node c/n001?).")
    nowhere = CordonAsked(hand.to(), Tenant("op"), ClusterId("x"), NodeId(""), "drain")
    (refusal,) = answers(hand.step(nowhere))
    assert (refusal.code, refusal.field) == (Code.UNKNOWN_CLUSTERS, "cluster")


def test_a_cordon_is_in_checkpoints_and_ends_with_its_cluster(hand: Hand) -> None:
    cordon(hand, "cordon", "n000")
    again = Allocator()
    again.replay(condense(hand.allocator.state))
    assert again.state == hand.allocator.state
    assert [fact.node for fact in condense(again.state) if isinstance(fact, Cordoned)] == ["n000"]
    hand.step(ClusterGone(ClusterId("c")))
    hand.see(nodes(2, 1))
    assert len(offered_nodes(hand)) == 2

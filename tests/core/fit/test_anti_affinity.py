"""Tests of leases that avoid the nodes or zones of other leases of their group."""

import pytest
from by_hand import Hand, answers, ask, place

from moorage.core.queue.order import CONSULTED_MAX
from moorage.core.state.facts import Granted
from moorage.core.turns.effects import Consult
from moorage.core.turns.events import ReleaseAsked
from moorage.model import (
    AntiAffinity,
    Cluster,
    ClusterId,
    Code,
    Demand,
    Gpu,
    Node,
    NodeId,
    RequestId,
    Tenant,
)

ONE = Demand(gpus=1)


def fleet() -> Hand:
    """Return an allocator with four nodes of two GPUs: two in zone a, one in b, one in no zone."""
    hand = Hand()
    gpus = (Gpu("0"), Gpu("1"))
    zones = ("a", "a", "b", "")
    made = (
        Node(NodeId(f"n{n}"), 8_000, 8_192, gpus, f"r{n // 2}", zone=zone)
        for n, zone in enumerate(zones)
    )
    hand.see(Cluster(ClusterId("c"), tuple(made)))
    return hand


def apart(name, group="web", topology="node", wait=0.0, **changes):
    terms = {"anti_affinity": AntiAffinity(group, topology), **changes.pop("terms", {})}
    return ask(name, ONE, wait, terms=terms, **changes)


def shut(turn):
    return {node for effect in turn.effects for _, node in getattr(effect, "reserved", ())}


@pytest.mark.parametrize(
    ("topology", "nodes"),
    [("node", {"n0"}), ("rack", {"n0", "n1"}), ("zone", {"n0", "n1"})],
)
def test_a_policy_sees_excluded_nodes_as_full(topology, nodes) -> None:
    hand = fleet()
    hand.grant(apart("first"), place("n0", "0"))
    assert shut(hand.ask(apart("second", topology=topology))) == nodes
    assert shut(hand.ask(apart("other", group="db", topology=topology))) == set()
    assert shut(hand.ask(apart("else", topology=topology, tenant=Tenant("bob")))) == set()


def test_the_first_lease_excludes_later_leases_of_its_group_from_its_zone() -> None:
    hand = fleet()
    hand.grant(apart("first", topology="zone"), place("n0", "0"))
    assert shut(hand.ask(apart("second"))) == {"n0", "n1"}


def test_a_node_without_a_zone_shares_a_zone_with_no_other_node() -> None:
    hand = fleet()
    hand.grant(apart("first", topology="zone"), place("n3", "0"))
    assert shut(hand.ask(apart("second", topology="zone"))) == {"n3"}


def test_only_one_of_two_proposals_on_one_node_for_one_group_is_granted() -> None:
    hand = fleet()
    one, two = hand.ask(apart("one")), hand.ask(apart("two"))
    hand.propose(one, place("n0", "0"))
    again = hand.propose(two, place("n0", "1"))
    assert "two" not in hand.allocator.state.leases
    assert shut(again) == {"n0"}
    hand.propose(again, place("n1", "0"))
    assert "two" in hand.allocator.state.leases


def test_a_waiter_is_woken_when_a_lease_of_its_group_leaves_another_node_of_the_zone() -> None:
    hand = fleet()
    hand.grant(apart("a", topology="zone"), place("n0", "0"))
    hand.grant(ask("full", ONE), place("n0", "1"))
    hand.grant(apart("b", topology="zone"), place("n2", "0"))
    hand.grant(apart("c", topology="zone"), place("n3", "0"))
    (refusal,) = answers(hand.ask(apart("now", topology="zone")))
    assert refusal.code is Code.NO_CAPACITY
    answer = {"group": "web", "nodes": 4, "leases": ["a", "b", "c"]}
    assert refusal.details["anti_affinity"] == answer
    assert "4 are too near to leases of your group “web”" in refusal.reason
    assert answers(hand.ask(apart("later", topology="zone", wait=30.0))) == []
    turn = hand.step(
        ReleaseAsked(hand.to(), a := hand.allocator.state.leases["a"].id, f"token of {a}")
    )
    hand.propose(turn, place("n1", "0"))
    (share,) = hand.allocator.state.leases["later"].placement
    assert share.node_id == "n1"


def test_a_waiter_behind_waiters_of_a_blocked_group_is_woken() -> None:
    hand = fleet()
    for n in range(4):
        hand.grant(apart(f"web{n}"), place(f"n{n}", "0"))
        hand.grant(ask(f"full{n}", ONE), place(f"n{n}", "1"))
    for n in range(CONSULTED_MAX + 1):
        hand.ask(apart(f"w{n}", wait=30.0))
    hand.ask(apart("db", group="db", wait=30.0))
    full = RequestId("full1")
    turn = hand.step(ReleaseAsked(hand.to(), full, f"token of {full}"))
    assert [each.ask.id for each in turn.effects if isinstance(each, Consult)] == ["db"]


def test_an_idempotency_key_reused_with_another_group_is_refused() -> None:
    hand = fleet()
    key = {"idempotency_key": "k"}
    hand.grant(apart("first", terms=key), place("n0", "0"))
    (refusal,) = answers(hand.ask(apart("again", group="db", terms=key)))
    assert refusal.code is Code.IDEMPOTENCY_MISMATCH
    assert sum(isinstance(fact, Granted) for fact in hand.facts) == 1

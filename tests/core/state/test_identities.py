"""If a machine is in the inventory twice, its first node counts, the second has no capacity."""

import pytest
from by_hand import Hand, answers, ask, nodes, place
from msgspec.structs import replace

from moorage.core.allocator import Allocator
from moorage.core.state.checkpoint import condense
from moorage.core.state.facts import ClusterSet
from moorage.core.state.identities import is_same_machine
from moorage.core.state.invariants import check
from moorage.core.turns.effects import LeaseNews
from moorage.core.turns.events import ClusterGone, Restarted
from moorage.model import Cluster, ClusterId, Code, Demand, NodeId

ONE = Demand(gpus=1)


def machines(cluster: str, *identities: tuple[str, ...]) -> Cluster:
    made = nodes(len(identities), 1, cluster)
    pairs = zip(made.nodes, identities, strict=True)
    return replace(made, nodes=tuple(replace(node, identity=each) for node, each in pairs))


def twins(hand: Hand) -> dict[str, str]:
    return {
        f"{cluster.id}/{node.id}": node.duplicate_of
        for cluster in hand.allocator.state.clusters.values()
        for node in cluster.nodes
        if node.duplicate_of
    }


def gpus(hand: Hand) -> int:
    return int(hand.allocator.state.fleet.gpu_total.sum()) // 1000


def test_the_second_node_of_one_machine_has_no_capacity() -> None:
    hand = Hand.seeing(machines("b", ("device GPU-1",)))
    hand.see(machines("a", ("device GPU-1",), ("device GPU-2",)))
    assert twins(hand) == {"a/n000": "b/n000"}
    assert gpus(hand) == 2
    (row, _) = hand.inquire("fleet", filters={"cluster": "a"})["nodes"]
    assert (row["duplicate_of"], row["gpus"], row["cpu_milli_total"]) == ("b/n000", {}, 0)
    refused = hand.grant(ask("r", ONE), place("n000", "0") | {"cluster_id": "a"})
    assert not any(isinstance(answer, LeaseNews) for answer in answers(refused))
    check(hand.allocator.state)


def test_only_one_of_two_nodes_on_one_machine_has_capacity() -> None:
    hand = Hand.seeing(machines("a", ("machine m",), ("machine m",), ("machine n",)))
    assert twins(hand) == {"a/n001": "a/n000"}


def test_a_node_without_identity_is_not_a_duplicate() -> None:
    hand = Hand.seeing(machines("a", (), ()))
    hand.see(machines("b", (), ()))
    assert twins(hand) == {}
    assert gpus(hand) == 4


def test_registering_the_same_document_again_changes_nothing() -> None:
    hand = Hand()
    for cluster in ("a", "b"):
        hand.see(machines(cluster, ("machine m",)))
    facts = len(hand.facts)
    for cluster in ("b", "a"):
        hand.see(machines(cluster, ("machine m",)))
    assert len(hand.facts) == facts


def test_a_duplicate_node_has_capacity_once_the_first_node_is_gone() -> None:
    hand = Hand()
    for cluster in ("a", "b", "c"):
        hand.see(machines(cluster, ("machine m",)))
    assert twins(hand) == {"b/n000": "a/n000", "c/n000": "a/n000"}
    hand.step(ClusterGone(ClusterId("a")))
    assert twins(hand) == {"c/n000": "b/n000"}
    assert gpus(hand) == 1
    check(hand.allocator.state)


def test_a_machine_that_was_moved_has_capacity_once_its_leases_have_ended() -> None:
    hand = Hand.seeing(machines("c", ("device GPU-1",)))
    hand.grant(ask("holder", ONE), place("n000", "0"))
    hand.step(ClusterGone(ClusterId("c")))
    hand.see(machines("d", ("device GPU-1",)))
    assert twins(hand) == {"d/n000": "c/n000"}, "the workload still runs there"
    assert gpus(hand) == 0
    hand.release("holder")
    assert twins(hand) == {}
    assert gpus(hand) == 1


@pytest.mark.parametrize("others", [(), ("machine m",)])
def test_after_a_restart_a_machine_that_was_moved_has_capacity_once_its_leases_have_ended(
    others,
) -> None:
    before = Hand.seeing(machines("c", ("machine 1",), *([others] if others else [])))
    before.grant(ask("holder", ONE), place("n000", "0"))
    if others:
        stays = machines("c", (), others)
        before.see(replace(stays, nodes=stays.nodes[1:]))
    else:
        before.step(ClusterGone(ClusterId("c")))
    before.see(machines("d", ("machine 1",)))
    again = Allocator()
    again.replay(condense(before.allocator.state))
    assert again.state.clusters == before.allocator.state.clusters
    hand = Hand(again)
    hand.step(Restarted(60.0))
    check(hand.allocator.state)
    assert twins(hand) == {"d/n000": "c/n000"}, "the workload still runs there"
    hand.release("holder")
    assert twins(hand) == {}


def test_a_renamed_node_has_its_capacity_under_its_new_name() -> None:
    hand = Hand.seeing(machines("c", ("machine m",)))
    old = machines("c", ("machine m",))
    renamed = replace(old, nodes=(replace(old.nodes[0], id=NodeId("new")),))
    hand.see(renamed)
    assert twins(hand) == {}
    hand.grant(ask("holder", ONE), place("new", "0"))
    hand.see(old)
    assert twins(hand) == {"c/n000": "c/new"}
    hand.release("holder")
    assert twins(hand) == {}


def test_a_duplicate_node_that_is_listed_first_does_not_take_the_capacity() -> None:
    hand = Hand()
    old = machines("c", ("machine m",))
    hand.see(old)
    first = replace(old.nodes[0], id=NodeId("a-first"))
    hand.see(replace(old, nodes=(first, *old.nodes)))
    assert twins(hand) == {"c/a-first": "c/n000"}


def test_duplicates_are_the_same_after_a_replay() -> None:
    hand = Hand()
    for cluster in ("a", "b"):
        hand.see(machines(cluster, ("machine m", "device GPU-1")))
    again = Allocator()
    again.replay(condense(hand.allocator.state))
    assert again.state.clusters == hand.allocator.state.clusters
    later = Hand(again)
    later.see(machines("b", ("machine m", "device GPU-1")))
    assert not any(isinstance(fact, ClusterSet) for fact in later.facts)
    later.step(ClusterGone(ClusterId("a")))
    assert twins(later) == {}


def test_one_machine_id_with_different_gpus_is_two_machines() -> None:
    assert is_same_machine(("machine m",), ("machine m", "device GPU-1"))
    assert not is_same_machine(("machine m", "device GPU-2"), ("machine m", "device GPU-1"))
    assert is_same_machine(("machine m", "device GPU-1"), ("machine n", "device GPU-1"))
    assert not is_same_machine(("machine m", "provider p"), ("machine n", "provider p"))
    assert not is_same_machine(("machine m", "provider p"), ("machine m", "provider q"))
    assert is_same_machine(("machine m", "provider p"), ("provider p",))
    assert not is_same_machine((), ())


def test_a_request_for_a_duplicate_node_alone_does_not_fit() -> None:
    hand = Hand.seeing(machines("a", ("machine m",)))
    hand.see(machines("b", ("machine m",)))
    refused = hand.ask(ask("r", ONE, candidates=(ClusterId("b"),)))
    assert answers(refused)[0].code is Code.NEVER_FITS


def test_a_request_waits_for_a_machine_that_leases_hold_under_another_name() -> None:
    hand = Hand.seeing(machines("c", ("machine m",)))
    hand.grant(ask("holder", ONE), place("n000", "0"))
    hand.step(ClusterGone(ClusterId("c")))
    hand.see(machines("d", ("machine m",)))
    elsewhere = {"candidates": (ClusterId("d"),)}
    (refused,) = answers(hand.ask(ask("now", ONE, **elsewhere)))
    assert refused.code is Code.NO_CAPACITY
    assert "1 node will count once leases under another name have ended" in refused.reason
    (refused,) = answers(hand.ask(ask("two", Demand(gpus=2), **elsewhere)))
    assert refused.code is Code.NEVER_FITS
    hand.ask(ask("waits", ONE, wait=50.0, **elsewhere))
    turn = hand.release("holder")
    hand.propose(turn, place("n000", "0") | {"cluster_id": "d"})
    assert "waits" in hand.allocator.state.leases

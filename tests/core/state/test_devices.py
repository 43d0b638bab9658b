"""A lease holds devices, not positions: a device stays with its lease when its index changes."""

import itertools
import json
import random

import pytest
from by_hand import Hand, answers, ask, both, lab, nodes, place, plain
from msgspec.structs import replace

from moorage.core.allocator import Allocator
from moorage.core.state.checkpoint import condense
from moorage.core.state.facts import ClusterSet, Fact, Granted, Moved
from moorage.core.state.invariants import check
from moorage.core.turns.effects import LeaseNews
from moorage.core.turns.events import ClusterGone, ReserveAsked
from moorage.ledger.codec import FACTS
from moorage.model import ClusterId, Demand, Lease, RequestId, Tenant
from moorage.records.leases import Lease as LeaseAnswer

ONE = Demand(gpus=1)


def lease(hand: Hand, name: str) -> Lease:
    return hand.allocator.state.leases[RequestId(name)]


def held_devices(hand: Hand, name: str) -> tuple[str, ...]:
    return lease(hand, name).placement[0].gpus


def free(hand: Hand, node: str = "n1") -> dict[str, int]:
    fleet = hand.allocator.state.fleet
    row = fleet.row("c", node)
    assert row is not None
    return dict(zip(fleet.gpu_ids[row], fleet.gpu_free[row].tolist(), strict=False))


def hold(hand: Hand, name: str, *gpus: str, milli: int = 1000, node: str = "n1") -> None:
    demand = Demand(gpus=len(gpus), gpu_milli=milli)
    turn = hand.grant(ask(name, demand), place(node, *gpus, gpu_milli=milli))
    assert any(isinstance(answer, LeaseNews) for answer in answers(turn)), answers(turn)


def of(facts: list[Fact]) -> list[Moved]:
    return [fact for fact in facts if isinstance(fact, Moved)]


def test_a_lease_keeps_its_gpu_when_a_gpu_with_a_lower_index_is_lost():
    hand = Hand.seeing(lab("aaa", "bbb", "ccc", "ddd"))
    hold(hand, "first", "0", "1")
    hold(hand, "second", "2")
    hand.release("first")
    turn = hand.see(lab("aaa", "ccc", "ddd"))
    assert held_devices(hand, "second") == ("1",)
    assert free(hand) == {"0": 1000, "1": 0, "2": 1000}
    (moved,) = of(turn.facts)
    assert (moved.lease, moved.lost) == ("second", ())
    refused = hand.grant(ask("third", Demand(gpus=2)), place("n1", "0", "1"))
    assert not any(isinstance(answer, LeaseNews) for answer in answers(refused))
    hold(hand, "third", "0", "2")


@pytest.mark.parametrize("order", list(itertools.permutations(["aaa", "bbb", "ccc"])))
def test_reordered_devices_get_their_new_index_in_all_leases(order):
    hand = Hand()
    before = ["aaa", "bbb", "ccc"]
    hand.see(lab(*before))
    for name, gpu, milli in (("a", "0", 1000), ("b", "1", 300), ("c", "1", 300)):
        hold(hand, name, gpu, milli=milli)
    hand.see(lab(*order))
    assert held_devices(hand, "a") == (str(order.index("aaa")),)
    assert held_devices(hand, "b") == held_devices(hand, "c") == (str(order.index("bbb")),)
    left = {"aaa": 0, "bbb": 400, "ccc": 1000}
    assert free(hand) == {str(index): left[uuid] for index, uuid in enumerate(order)}


def test_a_lost_device_stays_with_its_lease_and_watchers_are_notified():
    hand = Hand.seeing(lab("aaa", "bbb", "ccc"))
    hold(hand, "holder", "1")
    turn = hand.see(lab("aaa", "ccc"))
    (moved,) = of(turn.facts)
    assert [device.uuid for device in moved.lost] == ["GPU-bbb"]
    assert free(hand) == {"0": 1000, "1": 0}, "its holder may still use the device now called 1"
    reply = hand.inquire("why", subject="holder")
    assert reply["lease"]["lost_devices"] == ["GPU-bbb"]
    assert "GPU-bbb is gone from its node" in reply["drift"][0]
    assert (
        plain(LeaseAnswer.of(hand.inquire("status", subject="holder").answer.lease))
        == reply["lease"]
    )
    hand.see(lab("aaa", "ccc", "bbb"))
    assert (held_devices(hand, "holder"), lease(hand, "holder").lost) == (("2",), ())
    assert free(hand) == {"0": 1000, "1": 1000, "2": 0}
    hand.release("holder")
    assert free(hand) == {"0": 1000, "1": 1000, "2": 1000}


def test_a_held_device_that_was_lost_and_returns_still_belongs_to_its_lease():
    hand = Hand.seeing(lab("aaa", "bbb", "ccc"))
    hold(hand, "lost", "1")
    hold(hand, "kept", "2")
    hand.see(lab("aaa", "ccc"))
    assert held_devices(hand, "kept") == ("1",)
    assert held_devices(hand, "lost") == ("GPU-bbb",)
    hand.release("kept")
    assert free(hand) == {"0": 1000, "1": 1000}
    hand.see(lab("bbb", "aaa", "ccc"))
    assert held_devices(hand, "lost") == ("0",)
    check(hand.allocator.state)


def test_a_leased_gpu_moved_to_another_machine_is_not_free():
    hand = Hand.seeing(both(lab("aaa", "bbb"), lab("ddd", node="n2")))
    hold(hand, "holder", "1")
    hand.see(both(lab("aaa"), lab("ddd", "bbb", node="n2")))
    assert free(hand, "n2") == {"0": 1000, "1": 0}
    refused = hand.grant(ask("other", ONE), place("n2", "1"))
    assert not any(isinstance(answer, LeaseNews) for answer in answers(refused))
    hand.release("holder")
    assert free(hand, "n2") == {"0": 1000, "1": 1000}
    hold(hand, "other", "1", node="n2")


def test_mig_instances_and_their_gpu_exclude_each_other():
    hand = Hand.seeing(lab("x/a", "x/b", "yyy"))
    hold(hand, "a", "0")
    hand.see(lab("x/b", "x/a", "yyy"))
    assert held_devices(hand, "a") == ("1",)
    assert free(hand) == {"0": 1000, "1": 0, "2": 1000}
    hand.see(lab("x", "yyy"))
    assert free(hand)["0"] == 0, "a lease holds a part of the GPU"
    hand.release("a")
    hold(hand, "whole", "0")
    hand.see(lab("yyy", "x/a", "x/b"))
    assert free(hand) == {"0": 0, "1": 0, "2": 0}, "0 is held, and 1 and 2 are its parts"
    hand.release("whole")
    assert free(hand) == {"0": 1000, "1": 1000, "2": 1000}


def test_a_replaced_gpu_does_not_belong_to_the_lease():
    hand = Hand.seeing(lab("aaa", "bbb"))
    hold(hand, "holder", "0", "1")
    hand.see(lab("eee", "bbb"))
    assert [device.uuid for device in lease(hand, "holder").lost] == ["GPU-aaa"]
    assert free(hand) == {"0": 0, "1": 0}


def test_a_node_that_returns_with_reordered_gpus_still_has_its_leases():
    hand = Hand.seeing(lab("aaa", "bbb", "ccc"))
    hold(hand, "holder", "0")
    hand.step(ClusterGone(ClusterId("c")))
    assert held_devices(hand, "holder") == ("0",)
    assert lease(hand, "holder").lost
    hand.see(lab("ccc", "bbb", "aaa"))
    assert (held_devices(hand, "holder"), lease(hand, "holder").lost) == (("2",), ())
    assert free(hand) == {"0": 1000, "1": 1000, "2": 0}


def test_devices_of_a_gang_get_their_new_index_on_each_node():
    hand = Hand.seeing(both(lab("a1", "a2"), lab("b1", "b2", node="n2")))
    value = [place("n1", "0"), place("n2", "1")]
    hand.grant(ask("gang", Demand(gpus=1, nodes=2)), value)
    turn = hand.see(both(lab("a2", "a1"), lab("b2", "b1", node="n2")))
    assert len(of(turn.facts)) == 1
    assert [share.gpus for share in lease(hand, "gang").placement] == [("1",), ("0",)]
    assert free(hand) == {"0": 1000, "1": 0}
    assert free(hand, "n2") == {"0": 0, "1": 1000}


def test_reserved_devices_get_their_new_index_when_devices_are_reordered():
    hand = Hand.seeing(lab("aaa", "bbb", "ccc"))
    hold(hand, "holder", "0")
    until = (100.0, 200.0)
    hand.step(ReserveAsked(hand.to(), RequestId("r"), Tenant("bob"), ONE, *until))
    (part,) = hand.allocator.state.reserved.by_id[RequestId("r")].parts
    uuid = {"0": "aaa", "1": "bbb", "2": "ccc"}[part.gpus[0]]
    order = ["ccc", "aaa", "bbb"]
    hand.see(lab(*order))
    (part,) = hand.allocator.state.reserved.by_id[RequestId("r")].parts
    assert part.gpus == (str(order.index(uuid)),)
    order.remove(uuid)
    hand.see(lab(*order))
    hold(hand, "beside", *(gpu for gpu, milli in free(hand).items() if milli), milli=100)
    hand.see(lab(*order, uuid))
    (part,) = hand.allocator.state.reserved.by_id[RequestId("r")].parts
    assert part.gpus == ("2",), "the device is back"
    check(hand.allocator.state)


def test_without_uuids_devices_are_identified_by_index():
    hand = Hand.seeing(nodes(1, 3))
    hold(hand, "holder", "2", node="n000")
    turn = hand.see(nodes(1, 2))
    assert held_devices(hand, "holder") == ("2",)
    assert of(turn.facts) == []
    assert hand.allocator.state.leases[RequestId("holder")].devices == ()


def test_uuids_found_later_belong_to_the_held_indices():
    hand = Hand.seeing(lab("", "", ""))
    hold(hand, "holder", "1")
    hand.see(lab("aaa", "bbb", "ccc"))
    assert held_devices(hand, "holder") == ("1",)
    hand.see(lab("aaa", "ccc", "bbb"))
    assert held_devices(hand, "holder") == ("2",)
    hand.see(lab("", "", ""))
    assert held_devices(hand, "holder") == ("2",), "a document without UUIDs changes nothing"
    hand.see(lab("bbb", "aaa", "ccc"))
    assert held_devices(hand, "holder") == ("0",)


def test_devices_of_leases_are_the_same_after_a_replay():
    hand = Hand.seeing(both(lab("aaa", "bbb", "ccc"), lab("ddd", node="n2")))
    hold(hand, "lost", "1")
    hold(hand, "moved", "2", milli=400)
    hand.see(both(lab("ccc", "aaa"), lab("ddd", "bbb", node="n2")))
    written = [FACTS.encode(fact) for fact in hand.facts]
    read = [FACTS.decode(kind.name, kind.version, body, "here", "it") for kind, body in written]
    for facts in (read, list(condense(hand.allocator.state))):
        again = Hand(allocator=Allocator())
        again.allocator.replay(facts)
        assert again.allocator.state == hand.allocator.state
        assert free(again) == free(hand)
        assert free(again, "n2") == free(hand, "n2") == {"0": 1000, "1": 0}


@pytest.mark.parametrize("seed", range(6))
def test_no_device_is_in_two_leases_however_documents_change(seed):
    rng, hand = random.Random(seed), Hand()
    uuids = [f"gpu{number}" for number in range(7)]
    names = itertools.count()
    for _ in range(40):
        rng.shuffle(uuids)
        cut = rng.randint(0, 6)
        hand.see(both(lab(*uuids[:cut]), lab(*uuids[cut : rng.randint(cut, 7)], node="n2")))
        for node in ("n1", "n2"):
            can = [gpu for gpu, milli in free(hand, node).items() if milli >= 500]
            if can and rng.random() < 0.6:
                hold(hand, f"r{next(names)}", rng.choice(can), milli=500, node=node)
        running = list(hand.allocator.state.leases)
        if running and rng.random() < 0.3:
            hand.release(rng.choice(running))
        check(hand.allocator.state)


def test_a_ledger_of_a_release_without_uuids_identifies_devices_by_index():
    """In facts of the first release, only a node's identity had UUIDs."""
    before = replace(lab("aaa", "bbb", "ccc"), nodes=lab("aaa", "bbb", "ccc").nodes)
    body = FACTS.encode(ClusterSet(before))[1]
    old = json.loads(body)
    for node in old["cluster"]["nodes"]:
        del node["devices"]
    hand = Hand.seeing(before)
    hold(hand, "holder", "2")
    granted = replace(lease(hand, "holder"), devices=())
    read = FACTS.decode("cluster_set", 1, json.dumps(old).encode(), "here", "it")
    again = Hand()
    again.allocator.replay([read, Granted(granted)])
    again.see(lab("aaa", "ccc"))
    assert held_devices(again, "holder") == ("1",)

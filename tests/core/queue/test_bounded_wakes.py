"""A turn examines a bounded number of waiters per tenant; other tenants still have their turn."""

import sys
from collections.abc import Callable
from cProfile import Profile
from types import FrameType
from typing import Any

import pytest
from by_hand import Hand, ask, consults, place

from moorage.core.lifecycle.backfill import LOOKS_MAX
from moorage.core.turns.events import ReleaseAsked, Tick
from moorage.core.turns.turn import Turn
from moorage.model import (
    AntiAffinity,
    Cluster,
    ClusterId,
    Demand,
    Gpu,
    Lease,
    Node,
    NodeId,
    RequestId,
    Tenant,
)

MANY = 4 * LOOKS_MAX
BOB, MALLORY = Tenant("bob"), Tenant("mallory")
ONE = Demand(gpus=1)


@pytest.fixture
def hand() -> Hand:
    return full()


def full() -> Hand:
    """Return an allocator with three racks of two nodes; all four GPUs of each node are held."""
    hand = Hand()
    gpus = tuple(Gpu(str(n), "A100", 80, link_group=f"l{n // 2}") for n in range(4))
    nodes = [
        Node(NodeId(f"n{n}"), 64_000, 99_999, gpus, rack=f"r{n // 2}", zone="z") for n in range(6)
    ]
    hand.see(Cluster(ClusterId("c"), tuple(nodes)))
    for node in nodes:
        for gpu in "0123":
            hand.grant(ask(node.id + gpu, ONE, terms={"ttl_seconds": 9e5}), place(node.id, gpu))
    return hand


def looks(work: Callable[[], Turn]) -> tuple[int, Turn]:
    """Return the number of lines of waiters at which a turn looks, and the turn."""
    profile = Profile()
    turn = profile.runcall(work)
    found = (each for each in profile.getstats() if not isinstance(each.code, str))
    return sum(each.callcount for each in found if each.code.co_name == "_wake_line"), turn


def wait(hand: Hand, name: str, demand: Demand, tenant: Tenant, **terms: Any) -> Turn:
    return hand.ask(ask(name, demand, 600.0, tenant=tenant, terms=terms))


def release(hand: Hand, name: str) -> tuple[int, Turn]:
    lease: Lease = hand.allocator.state.leases[RequestId(name)]
    event = ReleaseAsked(hand.to(), lease.id, f"token of {name}", lease.tenant)
    return looks(lambda: hand.step(event))


def go_on(hand: Hand) -> tuple[list[int], list[str]]:
    """Take the remaining turns; return how many waiters each examined, and which were consulted."""
    counts, consulted = [], list[str]()
    while hand.allocator.next_deadline() == hand.now:
        many, turn = looks(lambda: hand.step(Tick()))
        counts.append(many)
        consulted += consults(turn)
    return counts, consulted


@pytest.mark.parametrize(
    ("each", "ends"),
    [
        ({"nodes": 2, "gpus": 1, "topology": "rack"}, ["n40"]),
        ({"gpus": 2, "topology": "nvlink"}, ["n40", "n42", "n50", "n52"]),  # The head reserves n4.
    ],
)
def test_a_release_examines_a_bounded_number_of_waiters_per_tenant(
    hand: Hand, each: Any, ends: list[str]
) -> None:
    for number in range(MANY):
        # No demand contains another: each needs less of one resource and more of the other.
        wait(
            hand,
            f"m{number}",
            Demand(cpu_milli=1 + number, memory_mib=MANY - number, **each),
            MALLORY,
        )
    wait(hand, "last", ONE, MALLORY)
    wait(hand, "bob", ONE, BOB)
    hand.now += 1.0
    consulted = []
    for name in ends:
        many, turn = release(hand, name)
        assert many <= LOOKS_MAX + 3
        consulted += consults(turn)
    assert "bob" in consulted, "who has the next turn does not wait for them"
    counts, later = go_on(hand)
    assert max(counts) <= LOOKS_MAX + 3
    assert sum(counts) + many >= MANY
    assert sorted(consulted + later) == ["bob", "last"], "they are all looked at"
    assert go_on(hand) == ([], [])


def test_waiters_with_anti_affinity_are_examined_once_for_each_release(hand: Hand) -> None:
    hand.now += 1.0
    for name in ("n40", "n41", "n42", "n43", "n50", "n52", "n53"):
        release(hand, name)
    for number in range(MANY):
        terms = {"ttl_seconds": 9e5, "anti_affinity": AntiAffinity(f"g{number}", "zone")}
        small = Demand(gpus=1, gpu_milli=1)
        hand.grant(
            ask(f"h{number}", small, tenant=MALLORY, terms=terms),
            place(("n4", "n5")[number % 2], "0", gpu_milli=1),
        )
    for number in range(MANY):
        apart = AntiAffinity(f"g{number}", "zone")
        asking = lambda: wait(hand, f"m{number}", ONE, MALLORY, anti_affinity=apart)  # noqa: B023, E731  # Called at once.
        many, _ = looks(asking)
        assert many <= 3, "the others were looked at before"
    many, turn = release(hand, "n51")
    assert many <= LOOKS_MAX + 3
    counts, consulted = go_on(hand)
    assert max(counts) <= LOOKS_MAX + 3
    assert sum(counts) + many <= MANY + 3 * (1 + len(counts))
    assert (consults(turn), consulted) == ([], [])
    for number in (7, MANY - 1):
        _, turn = release(hand, f"h{number}")
        assert f"m{number}" in [*consults(turn), *go_on(hand)[1]]


def steps(work: Callable[[], Turn]) -> tuple[int, Turn]:
    """Return the number of calls of functions that a turn makes, and the turn."""
    profile = Profile()
    turn = profile.runcall(work)
    return sum(each.callcount for each in profile.getstats()), turn


@pytest.mark.parametrize("alone", [False, True], ids=["one group", "a group each"])
def test_a_release_costs_the_same_beside_any_number_of_waiters_that_avoid_nodes(
    alone: bool,
) -> None:
    found, most = {}, 2_000 if alone else 5_000
    for many in (most // 10, most):
        hand = full()
        groups = [AntiAffinity(f"g{number if alone else 0}") for number in range(many)]
        for number, group in enumerate(groups[: many if alone else 1]):
            terms = {"ttl_seconds": 9e5, "anti_affinity": group}
            holder = ask(f"h{number}", Demand(cpu_milli=1), tenant=MALLORY, terms=terms)
            hand.grant(holder, {**place("n4"), "cpu_milli": 1})
        for number, group in enumerate(groups):
            wait(hand, f"m{number}", ONE, MALLORY, anti_affinity=group)
        wait(hand, "bob", ONE, BOB)
        hand.now += 1.0
        lease = hand.allocator.state.leases[RequestId("n40")]
        event = ReleaseAsked(hand.to(), lease.id, "token of n40", lease.tenant)
        found[many], turn = steps(lambda hand=hand, event=event: hand.step(event))  # type: ignore[misc]  # Called at once.
        assert consults(turn) == ["bob"], "all others keep apart from what is on this node"
        while hand.allocator.next_deadline() == hand.now:
            count, turn = steps(lambda hand=hand: hand.step(Tick()))  # type: ignore[misc]  # As above.
            found[many] = max(found[many], count)
    assert found[most] < 2 * found[most // 10]


def test_the_head_is_not_examined_when_capacity_grows_in_other_clusters(hand: Hand) -> None:
    node = Node(NodeId("far"), 64_000, 99_999, (Gpu("0", "A100", 80),))
    hand.see(Cluster(ClusterId("d"), (node,)))
    hand.grant(ask("away", ONE, terms={"ttl_seconds": 9e5}), place("far", "0", cluster_id="d"))
    hand.ask(ask("head", ONE, 600.0, candidates=(ClusterId("c"),)))
    hand.ask(ask("next", Demand(gpus=2), 600.0, candidates=(ClusterId("c"),)))
    many, turn = release(hand, "away")
    assert (many, consults(turn)) == (0, [])
    many, turn = release(hand, "n50")
    assert consults(turn) == ["head"]


def lines(work: Callable[[], object]) -> int:
    """Return the number of lines of code that some work runs."""
    many = 0

    def count(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal many
        many += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return many


def test_each_further_waiter_with_anti_affinity_costs_the_same() -> None:
    found = {}
    for many in (100, 1_000):
        hand = full()
        for number in range(many + 1):
            terms = {"ttl_seconds": 9e5, "anti_affinity": AntiAffinity(f"g{number}")}
            holder = ask(f"h{number}", Demand(cpu_milli=1), tenant=MALLORY, terms=terms)
            hand.grant(holder, {**place("n4"), "cpu_milli": 1})
        hand.now += 1.0
        release(hand, "n40")
        go_on(hand)
        for number in range(many):
            wait(hand, f"m{number}", ONE, MALLORY, anti_affinity=AntiAffinity(f"g{number}"))
        last = AntiAffinity(f"g{many}")
        found[many] = lines(lambda: wait(hand, "last", ONE, MALLORY, anti_affinity=last))  # noqa: B023  # Called at once.
        assert len(hand.allocator.state.waiting) == many + 1
    assert found[1_000] < 1.5 * found[100]


class Model(str):
    """A name of a GPU model; the class counts look-ups of names in dictionaries."""

    __slots__ = ()
    looked_up = 0

    def __hash__(self) -> int:
        Model.looked_up += 1
        return super().__hash__()


def test_a_waiter_costs_the_same_however_many_models_other_waiters_want() -> None:
    found = {}
    for many in (50, 500):
        hand = full()
        for number in range(many):
            wait(hand, f"m{number}", Demand(gpus=1, models=("A100", Model(f"x{number}"))), MALLORY)
        Model.looked_up = 0
        wait(hand, "last", Demand(gpus=1, models=("A100", "last")), MALLORY)
        found[many] = Model.looked_up
    assert found[500] <= 2 * found[50]

"""Tests of requests with alternatives: which alternative a request gets, and when."""

import sys
from random import Random

import pytest
from by_hand import Hand, answers, ask, consults, nodes, place

from moorage.core.queue.alternatives import loosest
from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Consult, LeaseNews
from moorage.core.turns.events import QuotaAsked
from moorage.model import Amounts, Ask, Cluster, Code, Demand, Gpu, Quota, Requirement

EIGHT, FOUR, TWO = Demand(gpus=8), Demand(gpus=4), Demand(gpus=2)
SIZES = (EIGHT, FOUR, TWO)


def elastic(name: str, *demands: Demand, **more: object) -> Ask:
    return ask(name, demands[0], alternatives=demands, **more)


@pytest.fixture
def hand() -> Hand:
    return Hand.seeing(nodes(1, 8))


def consulted_demand(turn) -> Demand | None:
    (consult,) = (effect for effect in turn.effects if isinstance(effect, Consult))
    return consult.ask.demand


def lease(turn):
    (news,) = answers(turn)
    assert isinstance(news, LeaseNews), news
    return news.lease


def test_the_policy_gets_the_first_fitting_alternative(hand):
    assert consulted_demand(hand.ask(elastic("a", *SIZES))) == EIGHT
    hand.grant(ask("b", TWO), place("n000", "0", "1"))
    turn = hand.ask(elastic("c", *SIZES))
    assert consulted_demand(turn) == FOUR
    granted = lease(hand.propose(turn, place("n000", "2", "3", "4", "5")))
    assert (granted.choice, granted.ask) == (1, None)
    assert lease(hand.grant(ask("d", TWO), place("n000", "6", "7"))).choice is None


def test_a_waiting_request_with_alternatives_is_tried_with_the_preferred_demand_first(hand):
    hand.grant(ask("big", EIGHT), place("n000", *"01234567"))
    assert not answers(hand.ask(elastic("a", *SIZES, wait=50)))
    turn = hand.release("big")
    assert consults(turn) == ["a"]
    assert consulted_demand(turn) == EIGHT, "the largest alternative first"


def test_a_waiter_is_woken_if_only_a_small_alternative_fits(hand):
    for number in range(4):
        gpus = [str(2 * number), str(2 * number + 1)]
        hand.grant(ask(f"l{number}", TWO), place("n000", *gpus))
    hand.ask(elastic("a", EIGHT, FOUR, wait=50))
    assert not consults(hand.release("l0"))
    turn = hand.release("l1")
    assert consulted_demand(turn) == FOUR
    granted = lease(hand.propose(turn, place("n000", "0", "1", "2", "3")))
    assert granted.choice == 1


def test_after_a_decline_the_next_alternative_is_tried(hand):
    turn = hand.ask(elastic("a", *SIZES))
    turn = hand.propose(turn, None)
    assert consulted_demand(turn) == FOUR
    turn = hand.propose(turn, {"declined": True})
    assert consulted_demand(turn) == TWO
    (refusal,) = answers(hand.propose(turn, None))
    assert refusal.code is Code.POLICY_DECLINED


def test_a_request_gets_the_verdict_never_if_no_alternative_can_ever_fit(hand):
    (refusal,) = answers(hand.ask(elastic("a", Demand(gpus=16), Demand(gpus=9), wait=50)))
    assert refusal.code is Code.NEVER_FITS
    hand.grant(ask("big", EIGHT), place("n000", *"01234567"))
    assert not answers(hand.ask(elastic("b", Demand(gpus=16), EIGHT, Demand(gpus=9), wait=50)))
    assert hand.inquire("queue")["waiting"][0]["resources"]["gpus"] == 8
    turn = hand.release("big")
    assert consulted_demand(turn) == EIGHT


def test_a_small_quota_leads_to_a_smaller_alternative(hand):
    quota = Quota(nominal=Amounts(gpu_milli=4000))
    hand.step(QuotaAsked(hand.to(), "root", "ann", None, quota))
    turn = hand.ask(elastic("a", *SIZES))
    assert consulted_demand(turn) == FOUR
    assert lease(hand.propose(turn, place("n000", "0", "1", "2", "3"))).choice == 1
    (refusal,) = answers(hand.ask(elastic("b", *SIZES)))
    assert refusal.code is Code.QUOTA_EXCEEDED
    assert not refusal.details["never"]


def test_a_repeated_request_with_alternatives_gets_the_lease_of_the_first_request(hand):
    terms = {"idempotency_key": "k"}
    turn = hand.ask(elastic("a", *SIZES, terms=terms))
    granted = lease(hand.propose(turn, place("n000", *"01234567")))
    assert lease(hand.ask(elastic("b", *SIZES, terms=terms))) == granted
    (refusal,) = answers(hand.ask(elastic("c", Demand(gpus=3), Demand(gpus=1), terms=terms)))
    assert isinstance(refusal, Refusal)
    assert refusal.code is Code.IDEMPOTENCY_MISMATCH


def test_models_are_tried_in_order_of_preference(hand):
    old = tuple(Gpu(str(n), "V100") for n in range(2))
    cluster = nodes(1, 1)
    (node,) = cluster.nodes
    other = nodes(1, 0, "d").nodes[0]
    hand.see(Cluster("d", (type(other)(other.id, 64_000, 65_536, old),)))
    hand.see(Cluster("c", (node,)))
    new, two = Demand(gpus=1, models=("A100",)), Demand(gpus=2, models=("V100",))
    assert consulted_demand(hand.ask(elastic("a", new, two))) == new
    hand.grant(ask("b", new), place("n000", "0"))
    turn = hand.ask(elastic("c", new, two))
    assert consulted_demand(turn) == two
    value = {"cluster_id": "d", "node_id": "n000", "gpus": ["0", "1"]}
    assert lease(hand.propose(turn, value)).choice == 1
    assert not answers(hand.ask(elastic("d", two, new, wait=50)))
    assert consults(hand.release("b")) == ["d"]


def draw_demand(draw: Random) -> Demand:
    where = [Requirement("zone", "In", ("a",)), Requirement("spot", "Exists")]
    return Demand(
        gpus=draw.randint(0, 3),
        gpu_milli=draw.choice((1000, 500)),
        models=draw.choice(((), ("A100",), ("V100", "A100"))),
        gpu_memory_mib=draw.choice((0, 40_000)),
        cpu_milli=draw.randint(0, 3) * 1000,
        memory_mib=draw.randint(0, 3) * 1000,
        nodes=draw.randint(1, 2),
        where=tuple(draw.sample(where, draw.randint(0, 2))),
    )


@pytest.mark.parametrize("seed", range(50))
def test_the_least_demanding_alternative_fits_on_each_node_on_which_another_alternative_fits(seed):
    draw = Random(seed)
    hand = Hand()
    for name in "cde":
        gpus = tuple(
            Gpu(
                str(n),
                draw.choice(("A100", "V100")),
                draw.choice((16_000, 80_000)),
                exclusive=draw.random() < 0.4,
            )
            for n in range(draw.randint(0, 3))
        )
        labels = {k: "a" for k in ("zone", "spot") if draw.random() < 0.6}
        cpu, memory = draw.randint(0, 4) * 1000, draw.randint(0, 4) * 1000
        (node,) = nodes(1, 0, name).nodes
        hand.see(Cluster(name, (type(node)(node.id, cpu, memory, gpus, labels=labels),)))
    fits = hand.allocator.feasibility.fits
    for number in range(20):
        some = tuple(draw_demand(draw) for _ in range(draw.randint(2, 3)))
        one = loosest(elastic(f"r{number}", *some))
        for each in some:
            assert not fits(each, None, ()) or fits(one, None, ()), (each, one)


def calls_of(work) -> int:
    """Return how many functions `work` calls, which shows how many alternatives it looks at."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def crowd(waiters: int) -> Hand:
    """Return an allocator with a free node of one device, and waiters that cannot use this node."""
    hand = Hand.seeing(nodes(1, 8))
    hand.grant(ask("all", EIGHT), place("n000", *"01234567"))
    hand.see(nodes(1, 1, name="d"))
    for number in range(waiters):
        # Almost any capacity meets their least demands combined, but none of them alone.
        shared = Demand(gpu_milli=900, cpu_milli=70_000 + number)
        whole = [Demand(gpus=2 + n % 7, cpu_milli=n + number) for n in range(6)]
        hand.ask(elastic(f"w{number}", *whole, shared, wait=600.0))
    return hand


def test_a_grant_and_a_release_examine_few_waiters_with_alternatives() -> None:
    def bystander(hand: Hand) -> None:
        request = ask("bystander", Demand(gpus=1), terms={"priority": 9})
        hand.grant(request, {"cluster_id": "d", "node_id": "n000", "gpus": ["0"]})
        hand.release("bystander")

    few, many = crowd(8), crowd(160)
    assert calls_of(lambda: bystander(many)) < 2 * calls_of(lambda: bystander(few))


def test_a_waiter_is_served_if_any_alternative_fits() -> None:
    chance = Random(7)
    for _ in range(20):
        hand = crowd(12)
        demands = [Demand(gpus=1, cpu_milli=chance.randrange(60_000)) for _ in range(3)]
        chosen = chance.sample([*(Demand(gpus=n) for n in range(2, 7)), *demands[:1]], 6)
        hand.grant(ask("d", Demand(gpus=1)), {"cluster_id": "d", "node_id": "n000", "gpus": ["0"]})
        hand.ask(elastic("a", *chosen, wait=600.0))
        turn = hand.release("d")
        assert consults(turn) == (["a"] if demands[0] in chosen else [])

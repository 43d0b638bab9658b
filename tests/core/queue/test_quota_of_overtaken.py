"""Quota is reserved for a request that smaller requests of its tenant overtook too often."""

from typing import Any

import pytest
from by_hand import Hand, answers, ask, consults, nodes, place

from moorage.core.allocator import Allocator
from moorage.core.state.facts import Granted
from moorage.core.turns.events import CancelAsked, QuotaAsked
from moorage.model import Amounts, Code, Demand, Quota, RequestId, Tenant

TIMES = 3
ONE, WHOLE = Demand(gpus=1), Demand(gpus=4)


def allow(hand: Hand, tenant: str, gpus: int, project: str | None = None, borrow: int = 0) -> Any:
    quota = Quota(nominal=Amounts(gpus * 1000), borrow=Amounts(borrow * 1000))
    return hand.step(QuotaAsked(hand.to(), Tenant("ops"), Tenant(tenant), project, quota))


@pytest.fixture
def hand() -> Hand:
    """An allocator in which ann holds the four GPUs of her quota, and waits for four at once."""
    hand = Hand(Allocator(overtaken_max=TIMES))
    hand.see(nodes(2, 8))
    allow(hand, "ann", 4)
    for number in range(4):
        come(hand, f"a{number}", str(number))
    hand.ask(ask("large", WHOLE, wait=1000.0))
    return hand


def come(hand: Hand, name: str, device: str, **changes: Any) -> list[str | None]:
    """Request a GPU; return the waiters that the grant overtakes."""
    hand.now += 1.0
    turn = hand.ask(ask(name, ONE, **changes))
    if not consults(turn):
        return []
    facts = hand.propose(turn, place("n000", device)).facts
    return [fact.overtakes for fact in facts if isinstance(fact, Granted)]


def leave(hand: Hand, name: str) -> list[str]:
    return consults(hand.release(name))


def pass_by(hand: Hand, times: int, **changes: Any) -> None:
    for number in range(times):
        leave(hand, f"a{number}")
        assert come(hand, f"again-{number}", str(number), **changes) == ["large"]


def refusal(hand: Hand, request: Any) -> Any:
    hand.now += 1.0
    (answer,) = answers(hand.ask(request))
    return answer


def test_quota_is_reserved_for_a_request_that_was_overtaken_too_often(hand: Hand) -> None:
    pass_by(hand, TIMES)
    leave(hand, "a3")
    no = refusal(hand, ask("no", ONE))
    assert no.code is Code.QUOTA_EXCEEDED
    assert no.details.items() >= {"room": 1000, "kept": 4000, "kept_for": "large"}.items()
    assert "1 are left now, and 4 are reserved for request “large”" in no.reason
    hand.ask(ask("waits", ONE, wait=1000.0))
    assert [leave(hand, f"again-{number}") for number in range(TIMES)] == [[], [], ["large"]]


def test_unreserved_quota_can_still_be_used(hand: Hand) -> None:
    pass_by(hand, TIMES)
    allow(hand, "ann", 9)
    assert consults(hand.ask(ask("one", ONE))) == ["one"]
    assert consults(hand.ask(ask("two", Demand(gpus=2)))) == []


def test_a_request_of_higher_priority_may_use_reserved_quota(hand: Hand) -> None:
    pass_by(hand, TIMES)
    leave(hand, "a3")
    assert come(hand, "urgent", "3", terms={"priority": 1}) == [None]


def test_reserved_quota_does_not_limit_other_tenants(hand: Hand) -> None:
    pass_by(hand, TIMES)
    assert come(hand, "bob", "7", tenant="bob") == [None]


def test_a_waiter_is_served_when_a_reservation_of_nodes_ends(hand: Hand) -> None:
    pass_by(hand, TIMES)
    leave(hand, "a3")
    hand.ask(ask("waits", ONE, wait=1000.0))
    turn = hand.step(CancelAsked(hand.to(), RequestId("large"), Tenant("ann")))
    assert consults(turn) == ["waits"]


def test_the_policy_of_a_request_without_resources_is_consulted_again(hand: Hand) -> None:
    pass_by(hand, TIMES)
    leave(hand, "a3")
    turn = hand.ask(ask("unsaid", None, wait=1000.0))
    hand.propose(turn, place("n000", "3"))
    assert RequestId("unsaid") in hand.allocator.state.waiting
    turn = hand.step(CancelAsked(hand.to(), RequestId("large"), Tenant("ann")))
    assert consults(turn) == ["unsaid"]


def test_borrowed_quota_is_not_reserved(hand: Hand) -> None:
    pass_by(hand, TIMES)
    allow(hand, "bob", 8)
    allow(hand, "ann", 3, borrow=1)
    leave(hand, "a3")
    assert come(hand, "more", "3") == [None]


def test_the_server_reserves_the_quota_of_a_project_for_its_overtaken_request(hand: Hand) -> None:
    night = {"terms": {"project": "night"}}
    hand.step(CancelAsked(hand.to(), RequestId("large"), Tenant("ann")))
    allow(hand, "ann", 8)
    allow(hand, "ann", 2, project="night")
    come(hand, "n", "4", **night)
    hand.ask(ask("pair", Demand(gpus=2), wait=1000.0, **night))
    for number in range(TIMES):
        assert come(hand, f"n{number}", "5", **night) == ["pair"]
        leave(hand, f"n{number}")
    assert refusal(hand, ask("no", ONE, **night)).details["kept_for"] == "pair"
    assert come(hand, "day", "7", terms={"project": "day"}) == [None]


def test_the_earlier_of_two_overtaken_requests_is_served_first(hand: Hand) -> None:
    hand.now += 1.0
    hand.ask(ask("second", Demand(gpus=3), wait=1000.0))
    pass_by(hand, TIMES)
    for number in range(3):
        leave(hand, f"again-{number}")
        if number < 2:
            assert refusal(hand, ask(f"no-{number}", ONE)).details["kept_for"] == "large"
    turn = hand.release("a3")
    assert consults(turn) == ["large"]
    hand.propose(turn, place("n000", "0", "1", "2", "3"))
    assert leave(hand, "large") == ["second"]


def test_the_answer_to_why_names_the_quota_that_a_waiter_lacks(hand: Hand) -> None:
    """`why` gives the same answer after a restart, which restores only the facts."""
    pass_by(hand, TIMES)
    again = Hand(Allocator(overtaken_max=TIMES))
    again.allocator.replay(hand.facts)
    for each in (hand, again):
        reply = each.inquire("why", subject="large")
        assert (reply["state"], reply["code"], reply["used"]) == ("waiting", "quota_exceeded", 4000)
        assert reply["overtaken"] == TIMES
    hand.now += 1.0
    hand.ask(ask("later", ONE, wait=1000.0))
    assert hand.inquire("why", subject="later")["used"] == 4000
    leave(hand, "a3")
    reply = hand.inquire("why", subject="later")
    assert (reply["used"], reply["kept_for"]) == (3000, "large")

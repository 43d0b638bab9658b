"""After a stall or a clock change, leases have enough time left, and reservations keep dates."""

from typing import Any

import pytest
from by_hand import Hand, answers, ask, nodes, place

from moorage.core.allocator import Allocator
from moorage.core.state.checkpoint import condense
from moorage.core.state.facts import Dequeued, Ended, Ending, Unreserved, WaitExtended
from moorage.core.state.invariants import check
from moorage.core.state.state import RELEASED
from moorage.core.turns.effects import Consult
from moorage.core.turns.events import (
    ClockSet,
    CordonAsked,
    HalfLifeConfigured,
    ReleaseAsked,
    RenewAsked,
    ReserveAsked,
    Restarted,
    Stalled,
    Tick,
    WorkloadKept,
    WorkloadStarted,
)
from moorage.model import Code, Demand, NodeId, Provision, RequestId, Tenant

ONE = Demand(gpus=1)
BOB = Tenant("bob")
HOURS = 7_200.0
GRACE = 30.0


@pytest.fixture
def hand() -> Hand:
    hand = Hand(now=100_000.0)
    hand.see(nodes(3, 1))
    return hand


def reserve(hand: Hand, begins_in: float, seconds: float, lapse: float = 0.0) -> RequestId:
    name = RequestId(f"reserved-{next(hand.numbers)}")
    starts_at = hand.now + begins_in
    event = ReserveAsked(hand.to(), name, BOB, ONE, starts_at, starts_at + seconds, lapse)
    (answer,) = answers(hand.step(event))
    assert answer.data["reservation"] == name
    return name


def stand_still(hand: Hand, seconds: float, grace: float = GRACE) -> None:
    hand.now += seconds
    hand.step(Stalled(seconds, grace))
    hand.step(Tick())


def set_clock(hand: Hand, seconds: float) -> None:
    hand.now += seconds
    hand.step(ClockSet(seconds))
    hand.step(Tick())
    again = Allocator()
    again.replay(hand.facts)
    assert again.state == hand.allocator.state
    again = Allocator()
    again.replay(condense(hand.allocator.state))
    assert again.state == hand.allocator.state
    assert again.next_deadline() == hand.allocator.next_deadline()


def seconds_to_end(hand: Hand, name: str) -> float:
    lease = hand.allocator.state.lease(RequestId(name))
    assert lease is not None
    return lease.expires_at - hand.now


def renew(hand: Hand, name: str) -> Any:
    renewal = RenewAsked(hand.to(), RequestId(name), f"token of {name}", None)
    (answer,) = answers(hand.step(renewal))
    return answer


def over(hand: Hand) -> list[str]:
    ended = (fact for fact in hand.facts if isinstance(fact, Ended | Ending))
    ends = (fact.lease for fact in ended if fact.reason != RELEASED)
    lapsed = (fact.reservation for fact in hand.facts if isinstance(fact, Unreserved))
    return [*ends, *lapsed, *(fact.request for fact in hand.facts if isinstance(fact, Dequeued))]


def keep_warm(hand: Hand, name: str, seconds: float) -> None:
    lease = hand.allocator.state.leases[RequestId(name)]
    hand.step(WorkloadStarted(lease.id, lease.fencing))
    hand.step(ReleaseAsked(hand.to(), lease.id, f"token of {name}"))
    hand.step(WorkloadKept(lease.id, lease.fencing))
    assert seconds_to_end(hand, name) == seconds


def test_leases_that_ran_out_during_a_stall_get_the_restart_grace(hand: Hand) -> None:
    hand.grant(ask("lease", ONE, terms={"ttl_seconds": 6.0}), place("n000", "0"))
    warm_spec = Provision("memory", keep_warm_seconds=5.0)
    hand.grant(ask("warm", ONE, provision=warm_spec), place("n001", "0"))
    keep_warm(hand, "warm", 5.0)
    reservation = reserve(hand, 0.0, 1_000.0, lapse=4.0)
    hand.step(Tick())
    hand.ask(ask("waiter", Demand(gpus=1, nodes=3), wait=3.0))
    stand_still(hand, 8.0)
    assert over(hand) == []
    assert (seconds_to_end(hand, "lease"), seconds_to_end(hand, "warm")) == (GRACE, GRACE)
    assert hand.allocator.state.waiting[RequestId("waiter")].deadline == hand.now + GRACE
    lapses_at = hand.allocator.state.reserved.by_id[reservation].lapses_at
    assert lapses_at == hand.now + GRACE
    hand.now += GRACE - 1.0
    assert renew(hand, "lease").lease.expires_at == hand.now + 6.0
    hand.tick(hand.now + 2.0)
    assert sorted(over(hand)) == [reservation, "waiter", "warm"]


def test_waiters_and_warm_leases_get_the_restart_grace(hand: Hand) -> None:
    warm_spec = Provision("memory", keep_warm_seconds=5.0)
    hand.grant(ask("warm", ONE, provision=warm_spec), place("n001", "0"))
    keep_warm(hand, "warm", 5.0)
    reservation = reserve(hand, 0.0, 1_000.0, lapse=4.0)
    hand.grant(ask("lease", ONE), place("n002", "0"))
    hand.step(Tick())
    hand.ask(ask("waiter", Demand(gpus=1, nodes=3), wait=3.0))
    again = Hand(Allocator(), hand.now + 8.0)
    again.allocator.replay(hand.facts)
    again.step(Restarted(GRACE))
    again.step(Tick())
    assert over(again) == []
    assert seconds_to_end(again, "warm") == GRACE
    assert again.allocator.state.waiting[RequestId("waiter")].deadline == again.now + GRACE
    assert again.allocator.state.reserved.by_id[reservation].lapses_at == again.now + GRACE
    last = Allocator()
    last.replay([*hand.facts, *again.facts])
    assert last.state == again.allocator.state


@pytest.mark.parametrize("ttl", [3.0, 6.0, 7.9])
@pytest.mark.parametrize("wait", [8.0, 8.1, 9.0, 12.0, 500.0])
def test_after_a_stall_a_waiter_waits_longer_than_the_leases_that_it_needs(
    hand: Hand, ttl: float, wait: float
) -> None:
    """The leases expire during the stall; the waiter's limit is at the same time or later."""
    for number in range(3):
        terms = {"ttl_seconds": ttl + number / 100}
        hand.grant(ask(f"lease {number}", ONE, terms=terms), place(f"n00{number}", "0"))
    hand.ask(ask("waiter", Demand(gpus=1, nodes=3), wait=wait))
    stand_still(hand, 8.0)
    ends = [seconds_to_end(hand, f"lease {number}") for number in range(3)]
    assert ends == [GRACE] * 3
    waits = hand.allocator.state.waiting[RequestId("waiter")].deadline - hand.now
    assert waits == pytest.approx(max(wait - 8.0, GRACE + min(wait - ttl, GRACE)))
    turn = hand.tick(hand.now + GRACE)
    assert sorted(over(hand)) == ["lease 0", "lease 1", "lease 2"]
    (consultation,) = (each for each in turn.effects if isinstance(each, Consult))
    assert consultation.ask.id == "waiter"


def test_a_waiter_whose_limit_precedes_the_end_of_leases_gets_only_the_grace(hand: Hand) -> None:
    hand.grant(ask("lease", ONE, terms={"ttl_seconds": 7.0}), place("n000", "0"))
    hand.ask(ask("waiter", Demand(gpus=1, nodes=3), wait=6.0))
    stand_still(hand, 8.0)
    assert hand.allocator.state.waiting[RequestId("waiter")].deadline == hand.now + GRACE


def test_a_waiter_waits_longer_than_a_lease_prolonged_by_a_restart(hand: Hand) -> None:
    hand.grant(ask("lease", ONE, terms={"ttl_seconds": 6.0}), place("n000", "0"))
    hand.ask(ask("waiter", Demand(gpus=1, nodes=3), wait=8.0))
    again = Hand(Allocator(), hand.now + HOURS)
    again.allocator.replay(hand.facts)
    again.step(Restarted(GRACE))
    waiter = again.allocator.state.waiting[RequestId("waiter")]
    assert waiter.deadline == again.now + GRACE + 2.0


def test_unexpired_leases_are_prolonged_by_the_stall(hand: Hand) -> None:
    hand.grant(ask("short", ONE, terms={"ttl_seconds": 9.0}), place("n000", "0"))
    hand.grant(ask("long", ONE, terms={"ttl_seconds": 60.0}), place("n001", "0"))
    stand_still(hand, 8.0)
    assert (seconds_to_end(hand, "short"), seconds_to_end(hand, "long")) == (8.0, 52.0)
    for _ in range(2):  # Short stalls must not prolong a lease without limit.
        hand.tick(hand.now + 5.0)
        stand_still(hand, 1.0)
    assert over(hand) == ["short"]


def test_a_stall_does_not_prolong_a_lease_beyond_a_drain(hand: Hand) -> None:
    hand.grant(ask("lease", ONE, terms={"ttl_seconds": 6.0}), place("n000", "0"))
    cordon = CordonAsked(hand.to(), BOB, "c", NodeId("n000"), "drain", "", 5.0)  # type: ignore[arg-type]  # Plain strings in tests.
    hand.step(cordon)
    stand_still(hand, 8.0)
    assert over(hand) == ["lease"]


@pytest.mark.parametrize("seconds", [HOURS, -HOURS, 2.5, -2.5])
def test_setting_the_clock_changes_no_remaining_time(hand: Hand, seconds: float) -> None:
    hand.step(HalfLifeConfigured(600.0))
    hand.grant(ask("lease", ONE), place("n000", "0"))
    warm_spec = Provision("memory", keep_warm_seconds=50.0)
    hand.grant(ask("warm", ONE, provision=warm_spec), place("n001", "0"))
    keep_warm(hand, "warm", 50.0)
    hand.ask(ask("first", Demand(gpus=1, nodes=3), wait=40.0))
    hand.now += 10.0
    cordon = CordonAsked(hand.to(), BOB, "c", NodeId("n000"), "drain", "", 20.0)  # type: ignore[arg-type]  # As above.
    hand.step(cordon)
    usage = [*hand.allocator.state.accounts.past()]
    set_clock(hand, seconds)
    assert (seconds_to_end(hand, "lease"), seconds_to_end(hand, "warm")) == (20.0, 40.0)
    lease = hand.allocator.state.leases[RequestId("lease")]
    assert lease.granted_at == hand.now - 10.0
    (cordoned,) = hand.allocator.state.cordons.values()
    assert cordoned.until == hand.now + 20.0
    hand.ask(ask("second", Demand(gpus=1, nodes=3), wait=40.0))
    queue = hand.allocator.requests.queue
    assert [each.ask.id for each in queue.in_turn(9)] == ["first", "second"]
    past = [*hand.allocator.state.accounts.past()]
    assert [each.share for _, each in past] == [each.share for _, each in usage]
    assert hand.allocator.next_deadline() == hand.now + 20.0
    hand.tick(hand.now + 20.0)
    assert over(hand) == ["lease"]
    hand.tick(hand.now + 10.0)
    assert over(hand) == ["lease", "first"]
    check(hand.allocator.state)


def test_a_clock_change_shifts_the_arrival_of_an_undecided_request(hand: Hand) -> None:
    turn = hand.ask(ask("asked", ONE, wait=50.0))
    hand.grant(ask("other", Demand(gpus=1)), place("n000", "0"))
    set_clock(hand, -HOURS)
    hand.propose(turn, place("n001", "0"))
    assert hand.allocator.state.leases[RequestId("asked")].asked_at == hand.now


def test_reservations_keep_their_calendar_time_after_a_clock_change(hand: Hand) -> None:
    reservation = reserve(hand, HOURS + 100.0, 1_000.0, lapse=60.0)
    (place_of,) = hand.allocator.state.reserved.by_id[reservation].nodes
    set_clock(hand, HOURS)
    assert hand.allocator.next_deadline() == hand.now + 100.0
    hand.tick(hand.now + 100.0)
    known = hand.allocator.state.reserved.by_id[reservation]
    assert known.begun
    assert known.lapses_at == hand.now + 60.0
    assert hand.ask(ask("other", ONE)).effects[0].reserved == (place_of,)  # type: ignore[union-attr]  # A consultation.


def test_a_reservation_in_hours_that_the_calendar_skipped_begins_at_once(hand: Hand) -> None:
    skipped = reserve(hand, 60.0, HOURS + 600.0, lapse=90.0)
    gone = reserve(hand, 60.0, 600.0)
    begun = reserve(hand, 0.0, 2 * HOURS, lapse=50.0)
    hand.step(Tick())
    hand.now += 20.0
    set_clock(hand, HOURS)
    known = hand.allocator.state.reserved.by_id
    assert over(hand) == [gone]
    assert known[skipped].lapses_at == hand.now + 90.0  # Its tenant had no time to use it yet.
    assert known[begun].lapses_at == hand.now + 30.0  # The remaining time is unchanged.
    assert known[skipped].begun


def test_after_a_change_of_the_clock_a_reservation_that_began_too_early_begins_again(
    hand: Hand,
) -> None:
    reservation = reserve(hand, 100.0, 1_000.0, lapse=60.0)
    hour = hand.now + 100.0
    hand.tick(hand.now + 110.0)
    assert hand.allocator.state.reserved.by_id[reservation].begun
    set_clock(hand, -HOURS)
    assert not hand.allocator.state.reserved.by_id[reservation].begun
    assert hand.allocator.next_deadline() == hour
    hand.tick(hour)
    assert hand.allocator.state.reserved.by_id[reservation].begun


def test_a_lease_overlapping_a_reservation_cannot_be_prolonged(hand: Hand) -> None:
    hand.see(nodes(1, 1))
    hand.grant(ask("there", ONE), place("n000", "0"))
    reserve(hand, HOURS, 1_000.0)
    hand.now += 10.0
    set_clock(hand, HOURS)
    check(hand.allocator.state)
    assert seconds_to_end(hand, "there") == 50.0
    renewed = renew(hand, "there")
    assert renewed.lease.expires_at == hand.now + 50.0
    assert renewed.ttl_max_seconds == 50.0
    hand.tick(hand.now + 50.0)
    assert over(hand) == ["there"]
    (refusal,) = answers(hand.ask(ask("other", ONE)))
    assert refusal.code is Code.NO_CAPACITY


def test_a_stall_extends_the_wait_of_a_waiter_whose_limit_passed(hand: Hand) -> None:
    hand.ask(ask("waiter", Demand(gpus=1, nodes=4), wait=3.0))
    hand.see(nodes(4, 1))
    hand.grant(ask("lease", ONE), place("n000", "0"))
    hand.ask(ask("waiter", Demand(gpus=1, nodes=4), wait=3.0))
    stand_still(hand, 8.0)
    assert [fact for fact in hand.facts if isinstance(fact, WaitExtended)] == [
        WaitExtended(RequestId("waiter"), hand.now + GRACE)
    ]

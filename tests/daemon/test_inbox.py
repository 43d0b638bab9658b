"""Tests of the event that the commit loop takes next, and of the clients that it reads again."""

import asyncio

from moorage.core.turns.effects import Address
from moorage.core.turns.events import (
    Asked,
    CancelAsked,
    ClusterGone,
    Proposed,
    RenewAsked,
    SessionLost,
    Tick,
)
from moorage.daemon.inbox import AHEAD_MAX, READERS_PER_BATCH, Inbox
from moorage.model import Ask, ClusterId, PolicyRef, RequestId, SessionId, Tenant

TO = Address(SessionId("s"), 1)
TENANT = Tenant("t")


def request(name):
    return Asked(TO, Ask(RequestId(name), TENANT, PolicyRef("one:1-x", "digest")))


def renew_event(name):
    return RenewAsked(TO, RequestId(name), "digest", None)


def take_all(inbox):
    return [inbox.take() for _ in range(len(inbox))]


def test_events_of_leases_and_decisions_go_before_requests_and_stay_in_order():
    inbox = Inbox()
    first, second = request("a"), request("b")
    renewal, proposal = renew_event("x"), Proposed(RequestId("y"), 1, {})
    lost = SessionLost(SessionId("s"))
    for event in (first, renewal, second, lost, proposal):
        inbox.post(event, TENANT)
    assert inbox.requests(TENANT) == 2
    assert take_all(inbox) == [renewal, proposal, first, second, lost]
    assert inbox.requests(TENANT) == 0


def test_the_inbox_does_not_move_a_cancellation_before_its_request():
    inbox = Inbox()
    first, other = request("a"), request("b")
    early = CancelAsked(TO, RequestId("a"), TENANT)
    late = CancelAsked(TO, RequestId("long ago"), TENANT)
    for event in (other, first, early, late):
        inbox.post(event, TENANT)
    assert take_all(inbox) == [late, other, first, early]


def test_requests_of_a_session_that_is_over_are_dropped():
    inbox, cancel = Inbox(), CancelAsked(TO, RequestId("a"), TENANT)
    other = Asked(Address(SessionId("other"), 1), request("b").ask)
    for event in (request("a"), cancel, other, request("c")):
        inbox.post(event, TENANT)
    inbox.leave(TO.session, TENANT)
    assert (len(inbox), inbox.requests(TENANT)) == (3, 1)
    assert take_all(inbox) == [cancel, other, SessionLost(TO.session)]
    assert inbox.requests(TENANT) == 0


def test_tenants_take_turns_and_keep_their_order():
    inbox, other = Inbox(), Tenant("other")
    many = [request(str(number)) for number in range(3)]
    for event in many:
        inbox.post(event, TENANT)
    late, lost = request("late"), SessionLost(SessionId("s"))
    seen = ClusterGone(ClusterId("c"))
    for event in (late, lost):
        inbox.post(event, other)
    inbox.post(seen)
    assert take_all(inbox) == [seen, many[0], late, many[1], lost, many[2]]


def test_requests_are_counted_by_tenant():
    """Requests of one tenant never cause refusals of requests of another tenant."""
    inbox, bob = Inbox(), Tenant("bob")
    for name in "abc":
        inbox.post(request(name), TENANT)
    assert (inbox.requests(TENANT), inbox.requests(bob)) == (3, 0)
    inbox.post(request("d"), bob)
    inbox.take()
    inbox.leave(TO.session, bob)
    assert (inbox.requests(TENANT), inbox.requests(bob)) == (2, 0)
    inbox.leave(TO.session, TENANT)
    assert inbox.requests(TENANT) == 0


def test_requests_have_their_turn_among_many_events_that_go_before_them():
    inbox = Inbox()
    waiting = request("a")
    inbox.post(waiting)
    for number in range(3 * AHEAD_MAX):
        inbox.post(renew_event(str(number)))
    assert take_all(inbox).index(waiting) == AHEAD_MAX


async def test_a_client_is_read_again_after_a_batch_or_at_once_if_no_request_waits():
    inbox = Inbox()
    assert inbox.turn() is None
    inbox.post(Tick())
    turns = [inbox.turn() for _ in range(READERS_PER_BATCH + 2)]
    turns[0].cancel()
    inbox.read_on()
    assert [turn.done() for turn in turns] == [True] * READERS_PER_BATCH + [False] * 2
    inbox.take()
    waiting = asyncio.ensure_future(inbox.wait())
    await asyncio.wait_for(turns[-1], 60)
    inbox.post(Tick())
    await waiting


def test_events_that_arrived_before_a_deadline_are_handled_before_the_deadline():
    inbox = Inbox()
    renewals = [renew_event(str(number)) for number in range(3)]
    for event in (request("a"), *renewals, Tick(), late := renew_event("late")):
        inbox.post(event, TENANT)
    assert take_all(inbox)[:5] == [*renewals, Tick(), late]

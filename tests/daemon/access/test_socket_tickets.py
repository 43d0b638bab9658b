"""A ticket for the WebSocket is good once and for ten seconds; the number is bounded."""

import pytest

from moorage.daemon.access import socket_tickets
from moorage.daemon.access.socket_tickets import TICKET_SECONDS, TICKETS_MAX, SocketTickets
from moorage.model import Tenant
from moorage.records.rights import Caller, Role


def tickets() -> SocketTickets:
    return SocketTickets(lambda token: Caller(Tenant(token), Role.CLIENT) if token else None)


def test_a_socket_ticket_can_be_used_only_once() -> None:
    store = tickets()
    secret, ticket = store.issue("ann")
    assert store.redeem(secret) == ticket
    assert ticket.token == "ann"  # noqa: S105  # A tenant's name here.
    assert store.redeem(secret) is None
    assert store.redeem("guessed") is None


def test_a_socket_ticket_is_void_after_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    store = tickets()
    secret, ticket = store.issue("ann")
    monkeypatch.setattr(socket_tickets.time, "time", lambda: ticket.expires_at)
    assert store.redeem(secret) is None
    assert TICKET_SECONDS == 10


def test_a_tenant_at_its_limit_of_tickets_ends_no_tickets_of_other_tenants() -> None:
    store = tickets()
    theirs, _ = store.issue("bob")
    ours = [store.issue("ann")[0] for _ in range(TICKETS_MAX + 5)]
    assert store.redeem(theirs) is not None
    assert store.redeem(ours[0]) is None
    assert store.redeem(ours[-1]) is not None


def test_a_ticket_does_not_reveal_its_token() -> None:
    assert "ann" not in repr(tickets().issue("ann")[1])

"""Tickets for the WebSocket: a page that may not know a token is let in once, by a short secret.

The HTTP side issues them and the handshake redeems them. They live in memory only.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from moorage.daemon.requests.lease_tokens import digest
from moorage.model import Tenant
from moorage.protocol.logins import IssuedTicket

TICKET_SECONDS: Final = 10.0
"""From the answer over HTTP to the handshake of the page that it is passed to."""
TICKETS_MAX: Final = 1_000
"""Tickets at one time; beyond it the oldest is void of the tenant that has most."""


class SocketTickets:
    """Tickets by their digest, the oldest first.

    Args:
        tenant: Given a token, returns whose it is, or None.

    """

    def __init__(self, tenant: Callable[[str | None], Tenant | None]) -> None:
        self._tenant = tenant
        self._tickets: dict[str, IssuedTicket] = {}

    def issue(self, token: str | None) -> tuple[str, IssuedTicket]:
        """Return a ticket for who has a token, and what it stands for; None: no token is needed."""
        self._forget_expired()
        if len(self._tickets) >= TICKETS_MAX:
            held = Counter(self._tenant(each.token) for each in self._tickets.values())
            most = max(held, key=lambda each: held[each])
            del self._tickets[
                next(n for n, each in self._tickets.items() if self._tenant(each.token) == most)
            ]
        secret = secrets.token_urlsafe(32)
        ticket = self._tickets[digest(secret)] = IssuedTicket(token, time.time() + TICKET_SECONDS)
        return secret, ticket

    def redeem(self, secret: str) -> IssuedTicket | None:
        """Return what a ticket stands for, once and in time; else None."""
        self._forget_expired()
        return self._tickets.pop(digest(secret), None)

    def _forget_expired(self) -> None:
        now = time.time()
        self._tickets = {
            name: ticket for name, ticket in self._tickets.items() if ticket.expires_at > now
        }

"""Single-use tickets with which a browser page opens a WebSocket without knowing a token.

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
"""Lifetime of a ticket, from the HTTP answer to the handshake."""
TICKETS_MAX: Final = 1_000
"""Tickets at one time; beyond it the tenant that has most loses its oldest."""


class SocketTickets:
    """Tickets by their digest, the oldest first.

    Args:
        tenant: Given a token, returns whose it is, or None.

    """

    def __init__(self, tenant: Callable[[str | None], Tenant | None]) -> None:
        self._tenant = tenant
        self._tickets: dict[str, IssuedTicket] = {}

    def issue(self, token: str | None) -> tuple[str, IssuedTicket]:
        """Issue a ticket for a token, None on a server without tokens; return secret and record."""
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
        """Consume a ticket; return its record, or None if it is unknown, used or expired."""
        self._forget_expired()
        return self._tickets.pop(digest(secret), None)

    def _forget_expired(self) -> None:
        now = time.time()
        self._tickets = {
            name: ticket for name, ticket in self._tickets.items() if ticket.expires_at > now
        }

"""Single-use tickets with which a browser page opens a WebSocket without knowing a token.

The HTTP side issues them and the handshake redeems them. Tickets live in memory only.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from moorage.daemon.access.lease_tokens import digest
from moorage.protocol.logins import IssuedTicket
from moorage.records.rights import Caller

TICKET_SECONDS: Final = 10.0
"""Lifetime of a ticket, from the HTTP answer to the handshake."""
TICKETS_MAX: Final = 1_000
"""Maximum tickets at a time; one more drops the oldest ticket of the tenant with most tickets."""


class SocketTickets:
    """Tickets by their digest, the oldest first.

    Args:
        authenticate: Given a token, returns the caller, or None.
    """

    def __init__(self, authenticate: Callable[[str | None], Caller | None]) -> None:
        self._authenticate = authenticate
        self._tickets: dict[str, IssuedTicket] = {}

    def issue(self, token: str | None) -> tuple[str, IssuedTicket]:
        """Issue a ticket for a token (None: the server has no tokens); return secret and record."""
        self._drop_expired()
        if len(self._tickets) >= TICKETS_MAX:
            owners = {name: self._owner(ticket) for name, ticket in self._tickets.items()}
            most = Counter(owners.values()).most_common(1)[0][0]
            del self._tickets[next(name for name, owner in owners.items() if owner == most)]
        secret = secrets.token_urlsafe(32)
        ticket = self._tickets[digest(secret)] = IssuedTicket(token, time.time() + TICKET_SECONDS)
        return secret, ticket

    def redeem(self, secret: str) -> IssuedTicket | None:
        """Consume a ticket; return its record, or None if it is unknown, used or expired."""
        self._drop_expired()
        return self._tickets.pop(digest(secret), None)

    def _owner(self, ticket: IssuedTicket) -> str:
        caller = self._authenticate(ticket.token)
        return "" if caller is None else caller.tenant

    def _drop_expired(self) -> None:
        now = time.time()
        self._tickets = {
            name: ticket for name, ticket in self._tickets.items() if ticket.expires_at > now
        }

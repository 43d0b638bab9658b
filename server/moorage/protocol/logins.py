"""Logins to the console and tickets for the WebSocket, as both ports use them.

The daemon stores logins and tickets.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from moorage.records.rights import Caller


@dataclass(frozen=True, slots=True)
class Login:
    """The login of a person, who got a cookie for a token.

    Args:
        caller: The caller of the token.
        token: The token.
        csrf: The value that requests for changes must carry; pages of other sites cannot read it.
        expires_at: End of the login, in seconds since the epoch.
        id_token: The issuer's ID token, empty if the issuer gave none; None: no issuer was used.
    """

    caller: Caller
    token: str = field(repr=False)
    csrf: str = field(repr=False)
    expires_at: float
    id_token: str | None = field(repr=False, default=None)


class Logins(Protocol):
    """The logins of all persons to the console."""

    def enter(self, token: str, id_token: str | None = None) -> tuple[str, Login] | None:
        """Exchange a token for a cookie; None: the token belongs to no tenant.

        `id_token`: See `Login`.

        Raises:
            ServiceError: `unavailable`: the login cannot be stored.
        """

    def find(self, cookies: Iterable[str]) -> Login | None:
        """Return the login of one of these cookies, while it is valid."""

    def leave(self, cookies: Iterable[str]) -> None:
        """End the logins of these cookies.

        Raises:
            ServiceError: `unavailable`: the end of a login cannot be stored.
        """


@dataclass(frozen=True, slots=True)
class IssuedTicket:
    """The stored data of a ticket.

    Args:
        token: The token that the ticket stands for; None on a server without tokens.
        expires_at: End of the ticket, in seconds since the epoch.
    """

    token: str | None = field(repr=False)
    expires_at: float


class Tickets(Protocol):
    """Tickets for the WebSocket, each good for one handshake."""

    def issue(self, token: str | None) -> tuple[str, IssuedTicket]:
        """Issue a ticket for a token; return its secret and its record."""

    def redeem(self, secret: str) -> IssuedTicket | None:
        """Consume a ticket; return its record, or None if the ticket is not valid."""

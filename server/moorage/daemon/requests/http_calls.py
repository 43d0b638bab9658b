"""Addresses for the answers to `POST /allocate`, in the form of WebSocket addresses."""

import asyncio
from typing import Final

from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Address
from moorage.model import Code, SessionId
from moorage.records.rights import Caller

_PREFIX: Final = "http "
"""Prefix of the session name of an HTTP call; no WebSocket session has this prefix."""
STOPPING: Final = Refusal(Code.SHUTTING_DOWN, "The server is stopping; connect again in a moment.")
"""The answer to HTTP calls while the server stops."""


class HttpCalls:
    """Addresses for `POST /allocate`: each call is one message of a session of its own.

    Attributes:
        draining: Whether the daemon is stopping and refuses calls.
    """

    def __init__(self) -> None:
        self.draining = False
        self._number = 0
        self._waiting: dict[Address, asyncio.Future[bytes]] = {}
        self._origins: dict[Address, tuple[Caller, str]] = {}

    def waiting(self) -> tuple[Address, ...]:
        """Return the addresses of calls that wait for a reply."""
        return tuple(self._waiting)

    def open(self, caller: Caller, remote: str = "") -> tuple[Address, asyncio.Future[bytes]]:
        """Return a new address and the future of its reply; `remote` is the caller's address."""
        self._number += 1
        to = Address(SessionId(f"{_PREFIX}{self._number}"), self._number)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[to], self._origins[to] = future, (caller, remote)
        return to, future

    @staticmethod
    def has(to: Address) -> bool:
        """Return whether an address belongs or belonged to an HTTP call."""
        return to.session.startswith(_PREFIX)

    def origin(self, to: Address) -> tuple[Caller | None, str]:
        """Return the caller that waits at an address, and its network address; or None and ""."""
        return self._origins.get(to, (None, ""))

    def leave(self, to: Address) -> None:
        """Forget a call whose caller has disconnected."""
        self._waiting.pop(to, None)
        self._origins.pop(to, None)

    def reply(self, to: Address, reply: bytes) -> None:
        """Deliver a reply to its HTTP caller, if the caller still waits."""
        future = self._waiting.pop(to, None)
        self._origins.pop(to, None)
        if future is not None and not future.done():
            future.set_result(reply)

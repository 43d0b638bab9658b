"""Addresses for answers to `POST /allocate`, like those of sockets."""

import asyncio
from typing import Final

from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Address
from moorage.model import Code, SessionId
from moorage.records.rights import Caller

_PREFIX: Final = "http "
"""Of the sessions of calls; that of no socket begins so."""
STOPPING: Final = Refusal(Code.SHUTTING_DOWN, "The server is stopping; connect again in a moment.")
"""Answers calls from `draining` on."""


class HttpCalls:
    """Addresses for `POST /allocate`: each call is one message of a session of its own.

    Attributes:
        draining: The daemon stops: calls are refused from now on.
    """

    def __init__(self) -> None:
        self.draining = False
        self._number = 0
        self._waiting: dict[Address, asyncio.Future[bytes]] = {}
        self._origins: dict[Address, tuple[Caller, str]] = {}

    def waiting(self) -> tuple[Address, ...]:
        """Return the addresses where a reply is awaited."""
        return tuple(self._waiting)

    def open(self, caller: Caller, remote: str = "") -> tuple[Address, asyncio.Future[bytes]]:
        """Return a new address, and the future of its reply; `remote` is where the caller is."""
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
        """Return the caller that awaits a reply, and its address; None and "" if no caller does."""
        return self._origins.get(to, (None, ""))

    def leave(self, to: Address) -> None:
        """Forget a call whose caller has left."""
        self._waiting.pop(to, None)
        self._origins.pop(to, None)

    def reply(self, to: Address, reply: bytes) -> None:
        """Deliver a reply to its HTTP caller, if the caller still waits."""
        future = self._waiting.pop(to, None)
        self._origins.pop(to, None)
        if future is not None and not future.done():
            future.set_result(reply)

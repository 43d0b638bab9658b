"""Bounds on reading: the share of each tenant in one turn of the event loop."""

import asyncio
from collections import deque
from typing import Final

from moorage.model import Tenant

__all__ = ["READ_SECONDS_MAX", "LoopShares"]

READ_SECONDS_MAX: Final = 0.002
"""An answer takes some ten turns of the event loop; each of them waits for what clients send."""


class LoopShares:
    """Bounds how long the messages of one tenant are read in one turn."""

    def __init__(self) -> None:
        self._spent: dict[Tenant, float] = {}
        self._waiting: dict[Tenant, deque[asyncio.Future[None]]] = {}
        """Sessions; the first of each tenant is read on in the next turn."""

    def spend(self, tenant: Tenant, seconds: float) -> asyncio.Future[None] | None:
        """Note how long it took to read a message of a tenant.

        Returns:
            What its session must await before it reads on; None: nothing.

        """
        loop = asyncio.get_running_loop()
        if not self._spent and not self._waiting:
            loop.call_soon(self._next_turn)
        spent = self._spent[tenant] = self._spent.get(tenant, 0.0) + seconds
        if spent < READ_SECONDS_MAX:
            return None
        turn = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        return turn

    def _next_turn(self) -> None:
        self._spent.clear()
        for tenant, turns in [*self._waiting.items()]:
            turn = turns.popleft()
            if not turn.done():  # Its session may have been cancelled.
                turn.set_result(None)
            if not turns:
                del self._waiting[tenant]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next_turn)

"""Limits how long one turn of the event loop reads messages of each tenant.

Both doors have one: frames and messages of the WebSocket, requests over HTTP.
"""

import asyncio
from collections import deque
from typing import Final

from moorage.model import Tenant

READ_SECONDS_MAX: Final = 0.002
"""An answer takes some ten turns of the event loop; each of them waits for what clients send."""


class LoopShares:
    """Limits the time for reading messages of one tenant in one turn."""

    def __init__(self) -> None:
        self._spent: dict[Tenant, float] = {}
        self._waiting: dict[Tenant, deque[asyncio.Future[None]]] = {}
        """In the next turn, the first connection of each tenant is read further."""

    def turn(self, tenant: Tenant) -> asyncio.Future[None] | None:
        """Return an awaitable before more of a tenant is read; None: read more at once."""
        if self._spent.get(tenant, 0.0) < READ_SECONDS_MAX:
            return None
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        return turn

    def spend(self, tenant: Tenant, seconds: float) -> None:
        """Record how long a read for a tenant took."""
        if not self._spent and not self._waiting:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._spent[tenant] = self._spent.get(tenant, 0.0) + seconds

    def _next_turn(self) -> None:
        self._spent.clear()
        for tenant, turns in [*self._waiting.items()]:
            turn = turns.popleft()
            if not turn.done():  # What awaits it may have been cancelled.
                turn.set_result(None)
            if not turns:
                del self._waiting[tenant]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next_turn)

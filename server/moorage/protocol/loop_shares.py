"""Limits how long one turn of the event loop reads messages of each tenant.

The WebSocket (for frames and messages) and the HTTP port (for requests) have one `LoopShares` each.
"""

import asyncio
from collections import deque
from typing import Final

from moorage.model import Tenant

READ_SECONDS_MAX: Final = 0.002
"""At most this many seconds per tenant and turn of the event loop; a reply takes ten turns."""


class LoopShares:
    """Limits the time for reading messages of one tenant in one turn of the event loop."""

    def __init__(self) -> None:
        self._spent: dict[Tenant, float] = {}
        self._waiting: dict[Tenant, deque[asyncio.Future[None]]] = {}
        """Waiting connections by tenant; the next turn lets the first one of each tenant read."""

    def turn(self, tenant: Tenant) -> asyncio.Future[None] | None:
        """Return a future to await before reading more of a tenant; None: read more at once."""
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
            if not turn.done():  # The waiting task may be cancelled.
                turn.set_result(None)
            if not turns:
                del self._waiting[tenant]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next_turn)

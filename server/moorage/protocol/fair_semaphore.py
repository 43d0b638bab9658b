"""Lets tenants take turns at work that only a few callers may do at one time.

Uploads and rechecks of policies take seconds each: the server unpacks, loads and runs the policies.
Large messages and bodies take up to twenty milliseconds of the event loop each. A tenant may send
any number of these, but never has all turns, unless there is only one. If too many callers wait,
the tenant with the most waiters loses its latest waiter. So another tenant never waits behind a
flood, but only for tenants that hold as few turns as itself.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from moorage.model import Code
from moorage.protocol.faults import ServiceError

_Place = asyncio.Future[None]


class FairSemaphore:
    """Gives a limited number of callers a turn; all others wait.

    Args:
        at_once_max: The largest number of turns at a time; if it is above 1, a tenant may hold all
            turns but one.
        waiting_max: The largest number of callers that wait; None: no limit.
        busy: The words that follow the number of waiters in the refusal of a further caller.
        rests: Whether a turn that took some time stays taken for the same time again, so that this
            work gets at most half of the event loop's time.
    """

    def __init__(
        self,
        at_once_max: int = 1,
        waiting_max: int | None = None,
        *,
        busy: str = "requests wait for a turn",
        rests: bool = False,
    ) -> None:
        self._free = at_once_max
        self._share = max(1, at_once_max - 1)
        self._waiting_max = waiting_max
        self._busy = busy
        self._rests = rests
        self._closed = False
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, dict[_Place, None]] = {}
        """The order of tenants that hold equally many turns; a served tenant goes to its end."""

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn and hold it.

        Raises:
            ServiceError: Too many callers wait already (`busy`).
        """
        if self._closed or (tenant not in self._waiting and self._may(tenant)):
            self._take(tenant)
        else:
            await self._wait(tenant)
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            yield
        finally:
            if self._rests:
                loop.call_later(loop.time() - start, self._give_back, tenant)
            else:
                self._give_back(tenant)

    def close(self) -> None:
        """Admit all present and later waiters, since the server stops."""
        self._closed = True
        for tenant, places in self._waiting.items():
            for place in places:
                if not place.cancelled():
                    self._take(tenant)
                    place.set_result(None)
        self._waiting.clear()

    def _may(self, tenant: str) -> bool:
        return self._free > 0 and self._held[tenant] < self._share

    def _take(self, tenant: str) -> None:
        self._free -= 1
        self._held[tenant] += 1

    def _give_back(self, tenant: str) -> None:
        self._free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._serve()

    async def _wait(self, tenant: str) -> None:
        self._evict(tenant)
        place: _Place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, {})[place] = None
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._leave(tenant, place)  # `_serve` has not seen that the waiter is gone.
            elif place.exception() is None:  # The waiter's turn came in the same moment.
                self._give_back(tenant)
            raise

    def _evict(self, tenant: str) -> None:
        """Make room for one more waiter; the tenant with most waiters loses one."""
        if self._waiting_max is None or sum(map(len, self._waiting.values())) < self._waiting_max:
            return
        mine = len(self._waiting.get(tenant, ()))
        most = max(self._waiting, key=lambda each: len(self._waiting[each]))
        reason = f"{self._waiting_max} {self._busy}; try again in a moment"
        fault = ServiceError(Code.BUSY, reason)
        if len(self._waiting[most]) <= mine + 1:
            raise fault
        place = next(reversed(self._waiting[most]))
        self._leave(most, place)
        if not place.cancelled():  # Else the waiter's task is cancelled, and runs later.
            place.set_exception(fault)

    def _leave(self, tenant: str, place: _Place) -> None:
        waiting = self._waiting.get(tenant, {})
        if place in waiting:
            del waiting[place]
            if not waiting:
                del self._waiting[tenant]

    def _serve(self) -> None:
        """Give free turns to the tenants that hold the fewest."""
        while self._free > 0:
            able = [tenant for tenant in self._waiting if self._may(tenant)]
            if not able:
                return
            tenant = min(able, key=lambda each: self._held[each])
            place = next(iter(self._waiting[tenant]))
            self._leave(tenant, place)
            if place.cancelled():  # The waiter's task runs later.
                continue
            if tenant in self._waiting:
                self._waiting[tenant] = self._waiting.pop(tenant)
            self._take(tenant)
            place.set_result(None)

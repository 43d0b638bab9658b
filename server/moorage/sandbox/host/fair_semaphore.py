"""Who may have a policy looked at now, fairly among tenants. `Sandbox` has two of them.

To look at a policy takes seconds: it is unpacked, loaded, and evaluates its own examples, each
until its deadline. So few are looked at at one time, and some more wait. A tenant may send any
number: it never has all turns, and where the waiting room is full, the latest of the one with most
there makes way. So another one's policy waits for as many others as there are tenants that hold as
little, and never behind a flood.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from moorage.core.facts import Refusal
from moorage.model import Code
from moorage.sandbox.host.contract import PolicyFault

_Place = asyncio.Future[None]


class FairSemaphore:
    """Lets some policies be looked at at one time, and some more wait for it.

    Args:
        at_once_max: How many are looked at; of one tenant, one less.
        waiting_max: How many wait.

    """

    def __init__(self, at_once_max: int, waiting_max: int) -> None:
        self._free = at_once_max
        self._share = max(1, at_once_max - 1)
        self._waiting_max = waiting_max
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[_Place]] = {}
        """Served in this order where tenants hold equally many; who was served goes to its end."""

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn and hold it.

        Raises:
            PolicyFault: Too many wait already (BUSY).

        """
        if tenant in self._waiting or not self._may(tenant):
            await self._wait(tenant)
        else:
            self._take(tenant)
        try:
            yield
        finally:
            self._give_back(tenant)

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
        self._waiting.setdefault(tenant, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._leave(tenant, place)  # Where it was not seen to be gone.
            elif place.exception() is None:  # Its turn came in the same moment.
                self._give_back(tenant)
            raise

    def _evict(self, tenant: str) -> None:
        """See to it that one more may wait, at the cost of the tenant with most waiting."""
        if sum(map(len, self._waiting.values())) < self._waiting_max:
            return
        mine = len(self._waiting.get(tenant, ()))
        most = max(self._waiting, key=lambda each: len(self._waiting[each]))
        reason = f"{self._waiting_max} policies wait to be checked; try again in a moment"
        fault = PolicyFault(Refusal(Code.BUSY, reason))
        if len(self._waiting[most]) <= mine + 1:
            raise fault
        place = self._waiting[most][-1]
        self._leave(most, place)
        if not place.cancelled():  # Else its task does not know yet.
            place.set_exception(fault)

    def _leave(self, tenant: str, place: _Place) -> None:
        waiting = self._waiting.get(tenant, deque[_Place]())
        if place in waiting:
            waiting.remove(place)
            if not waiting:
                del self._waiting[tenant]

    def _serve(self) -> None:
        """Give what is free to those who hold least, in turns."""
        while True:
            able = [tenant for tenant in self._waiting if self._may(tenant)]
            if not able:
                return
            tenant = min(able, key=lambda each: self._held[each])
            place = self._waiting[tenant][0]
            self._leave(tenant, place)
            if place.cancelled():  # Its task does not know yet.
                continue
            if tenant in self._waiting:
                self._waiting[tenant] = self._waiting.pop(tenant)
            self._take(tenant)
            place.set_result(None)

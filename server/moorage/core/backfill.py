"""Whose turn it is when capacity was freed, and what the head of the queue keeps from the others.

The allocator is the only caller: at the end of each turn in which capacity may have been freed.
"""

from itertools import islice

from moorage.core.feasibility import Feasibility
from moorage.core.open_requests import OpenRequests
from moorage.core.pending import Pending
from moorage.core.queue import CONSULTED_MAX, WaiterLine
from moorage.core.requests import Requests
from moorage.core.state import State
from moorage.core.warm_reuse import WarmReuse
from moorage.model import Nodes


class Backfill:
    """Serves the queue.

    Args:
        state: Read, never changed.
        feasibility: Knows what fits.
        requests: Those that are open.
        warm: Has warm leases give way.
        asks: Consults for them, grants, and says no.

    """

    def __init__(
        self,
        state: State,
        feasibility: Feasibility,
        requests: OpenRequests,
        warm: WarmReuse,
        asks: Requests,
    ) -> None:
        self._state = state
        self._feasibility = feasibility
        self._requests = requests
        self._warm = warm
        self._asks = asks

    def wake(self) -> None:
        """Consult for the waiters that may now be served, in order, backfilling behind the head."""
        while self._any_took_over():
            pass  # The lines are others now.

    def _any_took_over(self) -> bool:
        """Wake all lines in order; stop and return True where one took over a warm lease."""
        reserved: Nodes = ()
        queue = self._requests.queue
        for line in queue.lines() if queue else ():
            judged = line.refused_at == (self._state.gains, reserved)
            if not judged and self._wake_line(line, reserved):
                return True
            reserved = reserved or line.reservation
        return False

    def _wake_line(self, line: WaiterLine, reserved: Nodes) -> bool:
        first = (self._state.waiting[name] for name in islice(line.waiters, CONSULTED_MAX))
        idle = [
            Pending(waiter.ask, waiter.at)
            for waiter in first
            if self._requests.undecided.get(waiter.ask.id) is None
        ]
        if any(self._asks.take_over(each, reserved) for each in idle):
            return True
        demand, candidates = line.demand, line.candidates
        if idle and demand is not None and not self._feasibility.fits(demand, candidates, reserved):
            capacities = [self._warm.capacity(each.ask, reserved) for each in idle]
            self._asks.refuse_line(idle[0].ask, reserved, self._state.gains, capacities[0])
            return False
        for each in idle:
            self._asks.consult(each, reserved)
        head = self._state.waiting[next(iter(line.waiters))].ask
        line.reservation = self._asks.kept(head, reserved, None)
        return False

"""Whose turn it is when capacity was freed, and what the head of the queue keeps from the others.

The allocator is the only caller.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any

from moorage.core import questions
from moorage.core.judge import Judge
from moorage.core.pending import Pending, Undecided
from moorage.core.queue import CONSULTED_MAX, Line, Queue
from moorage.core.state import State, Waiter
from moorage.core.warm import Warm
from moorage.core.words import Refusal
from moorage.model import Ask, Code, Nodes


class Waking:
    """Serves the queue.

    Args:
        state: Read, never changed.
        queue: The waiters in their order.
        judge: Knows what fits.
        warm: Has warm leases give way.
        undecided: Whom a rule is being consulted about already.
        consult: Asks the rule of one.
        take_over: Grants one the warm lease that is like it; returns whether there was any.

    """

    def __init__(
        self,
        *,
        state: State,
        queue: Queue,
        judge: Judge,
        warm: Warm,
        undecided: Undecided,
        consult: Callable[[Pending, Nodes], None],
        take_over: Callable[[Pending, Nodes], bool],
    ) -> None:
        self._state = state
        self._queue = queue
        self._judge = judge
        self._warm = warm
        self._undecided = undecided
        self._consult = consult
        self._take_over = take_over

    def wake(self) -> None:
        """Consult for the waiters that may now be served, in order, backfilling behind the head."""
        while self._any_took_over():
            pass  # The lines are others now.

    def inventory_changed(self) -> None:
        """Wake, and let go of what was kept on nodes or devices that are no longer there."""
        self._warm.inventory_changed()
        self.wake()

    def room(self, ask: Ask, refusal: Refusal, reserved: Nodes) -> Nodes | None:
        """Have warm leases end for an ask that did not fit, or whose rule found nothing.

        Returns:
            As `Warm.room`.

        """
        declined = ask.demand is None and refusal.code is Code.POLICY_DECLINED
        wanting = declined or refusal.code is Code.NO_CAPACITY
        return self._warm.room(ask, reserved) if wanting else None

    def refuse_line(self, ask: Ask, reserved: Nodes, gains: int, room: Nodes | None) -> None:
        """Let everybody like `ask` wait until capacity grows, and keep nodes for the first.

        Args:
            ask: One of them.
            reserved: What was kept for somebody else when they were judged.
            gains: `State.gains` then.
            room: What `room` returned for it.

        """
        first = self._state.waiting[self._queue.first_like(ask)].ask
        self._queue.refused(ask, (gains, reserved), self._kept(first, reserved, room))

    def waited_enough(self, waiter: Waiter, now: float) -> Refusal:
        """Return why a waiter gets nothing: its time is up, and this is how things stand."""
        ask, details = waiter.ask, dict[str, Any]()
        if ask.demand is not None:
            details = {
                "last": questions.refusal_object(self._judge.refusal(ask.demand, ask.candidates))
            }
        waited = f"It waited {now - waiter.at:.1f} s and did not fit in that time."
        code = Code.WAIT_TIMEOUT if self._is_patient(ask) else Code.NO_CAPACITY
        return Refusal(code, waited, "", "", details)

    def _any_took_over(self) -> bool:
        """Wake all lines in order; stop and return True where one took over a warm lease."""
        reserved: Nodes = ()
        for line in self._queue.lines() if self._queue else ():
            judged = line.refused_at == (self._state.gains, reserved)
            if not judged and self._wake_line(line, reserved):
                return True
            reserved = reserved or line.reservation
        return False

    def _wake_line(self, line: Line, reserved: Nodes) -> bool:
        first = (self._state.waiting[name] for name in islice(line.waiters, CONSULTED_MAX))
        idle = [
            Pending(waiter.ask, [], waiter.at)
            for waiter in first
            if self._undecided.get(waiter.ask.id) is None
        ]
        if any(self._take_over(each, reserved) for each in idle):
            return True
        demand, candidates = line.demand, line.candidates
        if idle and demand is not None and not self._judge.fits(demand, candidates, reserved):
            rooms = [self._warm.room(each.ask, reserved) for each in idle]
            self.refuse_line(idle[0].ask, reserved, self._state.gains, rooms[0])
            return False
        for each in idle:
            self._consult(each, reserved)
        head = self._state.waiting[next(iter(line.waiters))].ask
        line.reservation = self._kept(head, reserved, None)
        return False

    def _kept(self, ask: Ask, reserved: Nodes, room: Nodes | None) -> Nodes:
        """Return the nodes to keep for a line's first, also while its rule is being consulted.

        None for one that would not wait: what it evicts comes soon, and others fit beside it.
        """
        if ask.demand is None or reserved or not self._is_patient(ask):
            return ()
        return room or self._judge.reservation(ask.demand, ask.candidates)

    def _is_patient(self, ask: Ask) -> bool:
        comes_back = self._state.waiting[ask.id].lease is not None
        return comes_back or (ask.terms is not None and ask.terms.wait_seconds > 0)

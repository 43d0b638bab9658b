"""The amounts of a pool, and the order in which its waiters are served.

Amounts are units by resource number. No function here waits or takes a lock: `ResourcePool` holds
its lock during each call, and wakes the served waiters.

The policy: waiters queue. A waiter that fits may overtake a waiter that does not fit yet,
which keeps the pool busy. After a waiter was overtaken `OVERTAKEN_MAX` times, no request is granted
that would leave less than this waiter needs. Freed resources add up, and the waiter is served at
the latest when all present holders have released theirs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

OVERTAKEN_MAX: Final = 8
"""Maximum number of later requests that overtake and delay one waiter."""
LOOKED_AT_MAX: Final = 64
"""Maximum waiters that do not fit and that one release or request checks, from the queue's head.
Other waiters are served later, since the head always advances."""

Amounts = tuple[tuple[int, int], ...]
"""Requested amounts: pairs of a resource's number and units, none of them 0."""


class Ticket:
    """A request's place in the queue of a pool.

    Args:
        amounts: The requested amounts.
        node_name: The name for the timeline.
        wake: Called after the ticket was served.
    """

    __slots__ = ("amounts", "granted", "node_name", "overtaken", "wake")

    def __init__(self, amounts: Amounts, node_name: str | None, wake: Callable[[], None]) -> None:
        self.amounts = amounts
        self.node_name = node_name
        self.wake = wake
        self.granted = False
        self.overtaken = 0


class Account:
    """Counts the free amounts of a pool, and serves the queue of waiting tickets.

    Args:
        capacities: Units of each resource.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self.capacities = tuple(capacities)
        self.free = list(capacities)
        self._line: dict[Ticket, None] = {}

    def __len__(self) -> int:
        return len(self._line)

    def possible(self, amounts: Amounts) -> bool:
        """Return whether the total capacity is enough for the given amounts."""
        return all(count <= self.capacities[number] for number, count in amounts)

    def take(self, amounts: Amounts) -> bool:
        """Take amounts; return False if they do not fit, or would delay a ticket once too often."""
        free = self.free
        for number, count in amounts:
            if count > free[number]:
                return False
        if self._line and amounts:
            return self._overtake(amounts, self._head())
        for number, count in amounts:
            free[number] -= count
        return True

    def wait(self, ticket: Ticket) -> None:
        """Join the end of the queue; later calls of `give_back` and `leave` serve the ticket.

        The amounts must be possible, and `take` must have refused them just before.
        """
        self._line[ticket] = None

    def has_taken(self, amounts: Amounts) -> bool:
        """Return whether at least these amounts are taken."""
        for number, count in amounts:
            if self.free[number] + count > self.capacities[number]:
                return False
        return True

    def give_back(self, amounts: Amounts) -> list[Ticket]:
        """Free amounts, and serve the queue; return the served tickets."""
        for number, count in amounts:
            self.free[number] += count
            assert self.free[number] <= self.capacities[number], (
                "more resources were returned than taken"
            )
        return self._serve() if self._line else []

    def exchange(self, ticket: Ticket, new: Ticket) -> list[Ticket]:
        """Replace a ticket in the queue by a new ticket; return the served tickets."""
        new.overtaken = ticket.overtaken
        self._line = {new if each is ticket else each: None for each in self._line}
        return self._serve()

    def leave(self, ticket: Ticket) -> list[Ticket]:
        """Remove a ticket from the queue; return the tickets that are served instead."""
        del self._line[ticket]
        return self._serve() if self._line else []

    def _serve(self) -> list[Ticket]:
        served: list[Ticket] = []
        blocked: list[Ticket] = []
        for ticket in self._line:
            if self._fits(ticket.amounts) and self._overtake(ticket.amounts, blocked):
                ticket.granted = True
                served.append(ticket)
                continue
            blocked.append(ticket)
            if len(blocked) == LOOKED_AT_MAX:
                break
        for ticket in served:
            del self._line[ticket]
        return served

    def _head(self) -> list[Ticket]:
        return [ticket for _, ticket in zip(range(LOOKED_AT_MAX), self._line, strict=False)]

    def _fits(self, amounts: Amounts) -> bool:
        return all(count <= self.free[number] for number, count in amounts)

    def _overtake(self, amounts: Amounts, waiting: Sequence[Ticket]) -> bool:
        """Take amounts that fit, unless that delays a ticket that was delayed too often."""
        delayed = list(self._delayed_tickets(amounts, waiting)) if waiting else []
        if any(ticket.overtaken >= OVERTAKEN_MAX for ticket in delayed):
            return False
        for ticket in delayed:
            ticket.overtaken += 1
        for number, count in amounts:
            self.free[number] -= count
        return True

    def _delayed_tickets(self, amounts: Amounts, waiting: Sequence[Ticket]) -> Iterator[Ticket]:
        """Yield waiting tickets that would not fit after `amounts` are taken."""
        left = {number: self.free[number] - count for number, count in amounts}
        for ticket in waiting:
            if any(count > left.get(number, count) for number, count in ticket.amounts):
                yield ticket

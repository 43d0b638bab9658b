"""The order of the queue: priority, then fair share, then age; identical waiters judged once.

An index over `State.waiting`, less those that pause, rebuilt from it at start. The allocator asks
it whose turn it is when capacity grew; nothing is ever polled.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

from moorage.core.state import State, Waiter
from moorage.model import Ask, ClusterId, Demand, Nodes, PolicyRef, RequestId, Tenant

CONSULTED_MAX: Final = 8
"""Waiters of one line that are consulted about at the same time."""

LineKey = tuple[Tenant, PolicyRef, Demand | None, tuple[ClusterId, ...] | None, int, str, Nodes]


@dataclass(slots=True)
class WaiterLine:
    """Waiters that differ only in age.

    Attributes:
        waiters: Oldest first.
        refused_at: `State.gains` and the reservation at the last "no"; the line is not judged
            again before either changes.
        reservation: Nodes kept for its first waiter since then; only the head of the queue has
            some. They stay the same until capacity grows, so that they can drain.

    """

    key: LineKey
    waiters: dict[RequestId, None] = field(default_factory=dict[RequestId, None])
    refused_at: Any = None
    reservation: Nodes = ()

    @property
    def priority(self) -> int:
        """The priority of each of them."""
        return self.key[4]

    @property
    def demand(self) -> Demand | None:
        """What each of them needs."""
        return self.key[2]

    @property
    def candidates(self) -> tuple[ClusterId, ...] | None:
        """Where each of them may go."""
        return self.key[3]


def _key(ask: Ask) -> LineKey:
    priority = ask.terms.priority if ask.terms else 0
    # What only the policy reads may change its mind: such asks are not identical.
    told = sha256(repr((ask.inputs, ask.parameters, ask.settings)).encode()).hexdigest()
    return ask.tenant, ask.policy, ask.demand, ask.candidates, priority, told, ask.avoid


class WaitingQueue:
    """The waiters, in lines.

    Args:
        state: Read, never changed.

    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._lines: dict[LineKey, WaiterLine] = {}
        self._line_of: dict[RequestId, WaiterLine] = {}
        self.restore()

    def restore(self) -> None:
        """Index the waiters of a state that was changed behind its back."""
        self._lines.clear()
        self._line_of.clear()
        for waiter in self._state.waiting.values():
            if not waiter.pauses:
                self.add(waiter.ask)

    def __bool__(self) -> bool:
        """Return whether anybody waits for a place."""
        return bool(self._lines)

    def add(self, ask: Ask) -> None:
        """Put a waiter into its line: at the end, or where its age says if it comes back."""
        key = _key(ask)
        line = self._lines.setdefault(key, WaiterLine(key))
        newest = next(reversed(line.waiters), None)
        line.waiters[ask.id] = None
        self._line_of[ask.id] = line
        waiting = self._state.waiting
        if newest is not None and waiting[newest].at > waiting[ask.id].at:
            by_age = sorted(line.waiters, key=lambda request: waiting[request].at)
            line.waiters = dict.fromkeys(by_age)

    def remove(self, ask: Ask) -> None:
        """Take a waiter out: granted or given up."""
        line = self._line_of.pop(ask.id)
        del line.waiters[ask.id]
        if not line.waiters:
            del self._lines[line.key]

    def first_like(self, ask: Ask) -> RequestId:
        """Return the oldest waiter of the line that `ask` stands in."""
        return next(iter(self._line_of[ask.id].waiters))

    def refused(self, ask: Ask, as_of: tuple[int, Nodes], kept: Nodes) -> None:
        """Note a "no" for everybody in the line of `ask`.

        Args:
            ask: One of them.
            as_of: `State.gains`, and the nodes kept for somebody else, when they were judged.
            kept: Nodes to keep for the first of them, should they be the head.

        """
        line = self._line_of[ask.id]
        line.refused_at = as_of
        line.reservation = kept

    def lines(self) -> list[WaiterLine]:
        """Return the lines in the order in which their first waiters are to be served."""
        return self._ranked(self._held(set()))

    def reserved_before(self, ask: Ask) -> Nodes:
        """Return the nodes kept for a waiter ahead of `ask`, which may be new or wait itself.

        Advice holds nothing, so it delays nobody and everything is open to it.
        """
        if ask.terms is None or not self._lines:
            return ()
        held = self._held({ask.tenant})
        own = self._line_of.get(ask.id)
        newest = -ask.terms.priority, held.get(ask.tenant, 0), math.inf
        for line in self._ranked(held):
            if (line is own) if own is not None else (self._rank(line, held) > newest):
                return ()
            if line.reservation:
                return line.reservation
        return ()

    def _ranked(self, held: dict[Tenant, int]) -> list[WaiterLine]:
        return sorted(self._lines.values(), key=lambda line: self._rank(line, held))

    def _rank(self, line: WaiterLine, held: dict[Tenant, int]) -> tuple[int, int, float]:
        first = self._state.waiting[next(iter(line.waiters))]
        return -line.priority, held.get(line.key[0], 0), first.at

    def _held(self, others: set[Tenant]) -> dict[Tenant, int]:
        """Return the GPU milli that each tenant holds, where several compete."""
        held: dict[Tenant, int] = {}
        tenants = others | {key[0] for key in self._lines}
        for lease in self._state.leases.values() if len(tenants) > 1 else ():
            if lease.state == "warm":
                continue  # It is nobody's, and gives way to everybody.
            milli = sum(len(share.gpus) * share.gpu_milli for share in lease.placement)
            held[lease.tenant] = held.get(lease.tenant, 0) + milli
        return held

    def waiters(self) -> Iterator[Waiter]:
        """Yield the waiters, line by line in order; then those that pause (for `queue`)."""
        for line in self.lines():
            for request in line.waiters:
                yield self._state.waiting[request]
        yield from (waiter for waiter in self._state.waiting.values() if waiter.pauses)

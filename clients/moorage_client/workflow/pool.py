"""A pool of counted resources, for threads, for coroutines and for the executors.

A release wakes exactly the waiters that it serves. Any number of executors and other callers may
share one pool.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from typing import Final

from moorage_client.workflow.errors import ResourceError
from moorage_client.workflow.grants import Claim, Grant
from moorage_client.workflow.journal import RunJournal
from moorage_client.workflow.requirements import (
    ResourceRequirements,
    amount_of,
    read_amount,
    resource_name,
    units,
)
from moorage_client.workflow.timeline import SNAPSHOTS_MAX, ResourceTimeline
from moorage_client.workflow.waiting import Account, Amounts, Ticket

COMPILED_MAX: Final = 10_000
"""Maximum requirements that are cached with their amounts; beyond this, the cache is cleared."""

_NO_VARIABLES: Final[Mapping[str, str]] = {}


class ResourcePool:
    """Counts named resources with finite capacities, and queues the requests that must wait.

    Waiters are served in order. A later waiter that fits may overtake a waiter that does not fit,
    but at most `waiting.OVERTAKEN_MAX` times; then freed resources are reserved for the overtaken
    waiter. So `try_acquire` may return False although enough is free, since it is reserved.

    Args:
        capacities: Amounts by name, such as `{"gpu": 4, "cpu": 16, "memory_mb": 32000}`.
        snapshots_max: The timeline stores at most this many snapshots; None: all.

    Raises:
        ResourceError: A capacity is negative, no finite number, or so small that it would count as
            0 (a ValueError).
    """

    claims_max = 1  # Only the best of a run's nodes that do not fit waits in the queue.

    def __init__(
        self, capacities: Mapping[str, float], *, snapshots_max: int | None = SNAPSHOTS_MAX
    ) -> None:
        self._capacities = dict(capacities)
        self._names = tuple(self._capacities)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._account = Account(
            [
                read_amount(amount, f"capacities[{name!r}]")
                for name, amount in self._capacities.items()
            ]
        )
        self._timeline = ResourceTimeline(snapshots_max)
        self._lock = threading.Lock()
        self._watchers: dict[Callable[[], None], None] = {}
        self._releases = 0
        self._compiled: dict[ResourceRequirements, Amounts | None] = {}

    @property
    def capacities(self) -> dict[str, float]:
        """The total of each resource."""
        return dict(self._capacities)

    @property
    def available(self) -> dict[str, float]:
        """The free amount of each resource."""
        with self._lock:
            return dict(zip(self._names, map(amount_of, self._account.free), strict=True))

    @property
    def allocated(self) -> dict[str, float]:
        """The allocated amount of each resource."""
        with self._lock:
            return dict(zip(self._names, map(amount_of, self._used()), strict=True))

    @property
    def timeline(self) -> ResourceTimeline:
        """The allocations over time."""
        return self._timeline

    def can_satisfy(self, requirements: ResourceRequirements) -> bool:
        """Return whether the pool meets these requirements when none of its resources is held."""
        return self._amounts(requirements) is not None

    def try_acquire(self, requirements: ResourceRequirements, node_name: str | None = None) -> bool:
        """Acquire all amounts at once or none; return whether they were acquired."""
        amounts = self._amounts(requirements)
        return amounts is not None and self._take(amounts, node_name)

    def acquire(
        self,
        requirements: ResourceRequirements,
        timeout: float | None = None,
        *,
        node_name: str | None = None,
    ) -> bool:
        """Acquire amounts; wait until they are available.

        Args:
            requirements: The amounts, which are acquired all at once.
            timeout: Seconds to wait at most; None: without limit.
            node_name: The name that the timeline shows.

        Returns:
            Whether the amounts were acquired; always True without a timeout.

        Raises:
            ResourceError: An amount exceeds the capacity, and no timeout ends the wait (a
                ValueError).
        """
        amounts = self._waitable(requirements, endless=timeout is None)
        if amounts is None:
            return False
        woken = threading.Event()
        ticket = Ticket(amounts, node_name, woken.set)
        if self._take_or_wait(ticket):
            return True
        try:
            woken.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        except BaseException:  # After Ctrl-C, release amounts that were granted meanwhile.
            if not self._leave(ticket):
                self._free(amounts, node_name, None)
            raise
        return not self._leave(ticket)

    async def acquire_async(
        self,
        requirements: ResourceRequirements,
        timeout: float | None = None,  # noqa: ASYNC109  # A timeout returns False.
        *,
        node_name: str | None = None,
    ) -> bool:
        """Acquire as `acquire` does, without blocking the event loop."""
        amounts = self._waitable(requirements, endless=timeout is None)
        if amounts is None:
            return False
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # If the event loop is closed, no waiter is left to wake.
            if not loop.is_closed():
                loop.call_soon_threadsafe(woken.set)

        ticket = Ticket(amounts, node_name, wake)
        if self._take_or_wait(ticket):
            return True
        try:
            async with asyncio.timeout(timeout):
                await woken.wait()
        except TimeoutError:
            return not self._leave(ticket)
        except BaseException:
            if not self._leave(ticket):
                self._free(amounts, node_name, None)
            raise
        return True

    def release(self, requirements: ResourceRequirements, node_name: str | None = None) -> None:
        """Give back acquired amounts, and wake the waiters that get them.

        Raises:
            ResourceError: The pool has less allocated; nothing changes (a ValueError).
        """
        amounts = self._amounts(requirements)
        if amounts is None or not self._free(amounts, node_name, None):
            raise ResourceError(
                f"{dict(requirements.resources)} was released, but the pool has only "
                f"{self.allocated} allocated; release what was acquired, once"
            )

    def holding(
        self,
        requirements: ResourceRequirements,
        timeout: float | None = None,
        *,
        node_name: str | None = None,
    ) -> "Holding":
        """Hold resources while a block runs: `with pool.holding(need):`, or `async with`.

        Raises:
            TimeoutError: The block cannot start: the amounts were not available in time.
            ResourceError: An amount exceeds the capacity, and no timeout ends the wait (a
                ValueError).
        """
        return Holding(self, requirements, timeout, node_name)

    # The methods below are for executors: see `grants.Pool`.

    @property
    def releases(self) -> int:
        """The number of releases."""
        return self._releases

    def resume(self, journal: RunJournal) -> None:
        """Do nothing: counted resources are free when a program has ended."""

    def take(self, requirements: ResourceRequirements, node_name: str) -> Grant | None:
        """Grant a node's requirements at once, or return None."""
        amounts = self._amounts(requirements)
        if amounts is None:
            return None
        if not self._take(amounts, node_name):
            return None
        return Grant(requirements, (), _NO_VARIABLES, amounts)

    def claim(self, claim: Claim) -> None:
        """Put a claim into the queue."""
        claim.place = self._ticket(claim)
        if self._take_or_wait(claim.place):
            claim.place.wake()

    def exchange(self, waiting: Claim, claim: Claim) -> bool:
        """Give the queue place of `waiting` to `claim`; False if `waiting` is already granted."""
        claim.place = self._ticket(claim)
        with self._lock:
            if waiting.place.granted:
                return False
            served = self._account.exchange(waiting.place, claim.place)
            for each in served:
                self._note(each.node_name, "acquire")
        for each in served:
            each.wake()
        return True

    def outsized(self, requirements: ResourceRequirements, than: ResourceRequirements) -> bool:
        """Return whether a needed amount exceeds both the amount in `than` and the free amount."""
        less = dict(self._amounts(than) or ())
        amounts = self._amounts(requirements) or ()
        with self._lock:
            free = self._account.free
            return any(count > free[n] and 0 < less.get(n, 0) < count for n, count in amounts)

    def withdraw(self, claim: Claim) -> bool:
        """Remove a claim from the queue; False if the claim is already granted."""
        return self._leave(claim.place)

    def give_back(
        self,
        grant: Grant,
        node_name: str,
        by: Callable[[], None] | None,
        journal: RunJournal | None,  # noqa: ARG002  # Counted resources need no journal.
    ) -> None:
        """End a grant."""
        freed = self._free(grant.held, node_name, by)
        assert freed, f"node {node_name!r} gave back what it did not hold"

    def watch(self, wake: Callable[[], None], releases: int) -> bool:
        """Call `wake` once at the next release; return False if there were newer releases."""
        with self._lock:
            if releases != self._releases:
                return False
            self._watchers[wake] = None
            return True

    def unwatch(self, wake: Callable[[], None]) -> None:
        """End the `watch` with this function."""
        with self._lock:
            self._watchers.pop(wake, None)

    def _amounts(self, requirements: ResourceRequirements) -> Amounts | None:
        """Return the required amounts by resource number, or None if they exceed the capacity."""
        try:
            return self._compiled[requirements]
        except (KeyError, TypeError) as error:
            if not isinstance(requirements, ResourceRequirements):
                raise ResourceError(
                    f"expected a ResourceRequirements, found {requirements!r}"
                ) from error
        counts: dict[str, int] = {}
        for name, amount in requirements.resources.items():
            own = resource_name(name, self._capacities)
            counts[own] = counts.get(own, 0) + units(amount, name)
        counts = {name: count for name, count in counts.items() if count}
        amounts: Amounts | None = None
        if counts.keys() <= self._numbers.keys():
            amounts = tuple((self._numbers[name], count) for name, count in counts.items())
            amounts = amounts if self._account.possible(amounts) else None
        if len(self._compiled) >= COMPILED_MAX:
            self._compiled.clear()
        self._compiled[requirements] = amounts
        return amounts

    def _ticket(self, claim: Claim) -> Ticket:
        amounts = self._waitable(claim.requirements, endless=True)
        assert amounts is not None
        granted = Grant(claim.requirements, (), _NO_VARIABLES, amounts)

        def serve() -> None:
            claim.grant = granted
            claim.wake(claim)

        return Ticket(amounts, claim.node_name, serve)

    def _waitable(self, requirements: ResourceRequirements, *, endless: bool) -> Amounts | None:
        amounts = self._amounts(requirements)
        if amounts is None and endless:
            raise ResourceError(
                f"{dict(requirements.resources)} is required but pool capacity is "
                f"{self._capacities}: waiting would never end"
            )
        return amounts

    def _take(self, amounts: Amounts, node_name: str | None) -> bool:
        with self._lock:
            taken = self._account.take(amounts)
            if taken:
                self._note(node_name, "acquire")
            return taken

    def _take_or_wait(self, ticket: Ticket) -> bool:
        with self._lock:
            if self._account.take(ticket.amounts):
                ticket.granted = True
                self._note(ticket.node_name, "acquire")
            else:
                self._account.wait(ticket)
            return ticket.granted

    def _leave(self, ticket: Ticket) -> bool:
        """Remove a ticket from the queue; return False if it was served already."""
        with self._lock:
            if ticket.granted:
                return False
            served = self._account.leave(ticket)
            for each in served:
                self._note(each.node_name, "acquire")
        for each in served:
            each.wake()
        return True

    def _free(self, amounts: Amounts, node_name: str | None, by: Callable[[], None] | None) -> bool:
        """Free amounts and wake the nodes that now fit; return False if less is held."""
        with self._lock:
            if not self._account.has_taken(amounts):
                return False
            served = self._account.give_back(amounts)
            self._releases += 1
            self._note(node_name, "release", served)
            watchers: Iterable[Callable[[], None]] = ()
            if self._watchers:
                watchers = [each for each in self._watchers if each is not by]
                self._watchers.clear()
        for ticket in served:
            ticket.wake()
        for wake in watchers:
            wake()
        return True

    def _used(self) -> list[int]:
        return list(map(sub, self._account.capacities, self._account.free))

    def _note(self, node_name: str | None, event: str, served: Sequence[Ticket] = ()) -> None:
        """Record a change, and the grants that follow from it, on the timeline."""
        there = self._account.capacities
        used = self._used()
        if not served:
            self._timeline.note(self._names, there, tuple(used), node_name, event)
            return
        # The freed amounts served the queue: record each grant.
        for ticket in served:
            for number, count in ticket.amounts:
                used[number] -= count
        self._timeline.note(self._names, there, tuple(used), node_name, event)
        for ticket in served:
            for number, count in ticket.amounts:
                used[number] += count
            self._timeline.note(self._names, there, tuple(used), ticket.node_name, "acquire")


@dataclass(frozen=True, slots=True)
class Holding:
    """Holds resources of a pool during a block: acquires at its start, releases at its end.

    Args:
        pool: The pool.
        requirements: The amounts to hold.
        timeout: Seconds to wait at most; None: without limit.
        node_name: The name that the timeline shows.
    """

    pool: ResourcePool
    requirements: ResourceRequirements
    timeout: float | None
    node_name: str | None

    def __enter__(self) -> ResourcePool:
        acquired = self.pool.acquire(self.requirements, self.timeout, node_name=self.node_name)
        return self._enter(acquired=acquired)

    def __exit__(self, *error: object) -> None:
        self.pool.release(self.requirements, self.node_name)

    async def __aenter__(self) -> ResourcePool:
        acquired = await self.pool.acquire_async(
            self.requirements, self.timeout, node_name=self.node_name
        )
        return self._enter(acquired=acquired)

    async def __aexit__(self, *error: object) -> None:
        self.pool.release(self.requirements, self.node_name)

    def _enter(self, *, acquired: bool) -> ResourcePool:
        if not acquired:
            raise TimeoutError(
                f"{dict(self.requirements.resources)} did not become available within "
                f"{self.timeout} s"
            )
        return self.pool

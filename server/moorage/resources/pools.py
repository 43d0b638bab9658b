"""The bookkeeping of `ResourceEngine`: holders and waiters. No I/O, no waiting, no lock.

One pool for each spec and backend. The engine calls everything here under its lock and carries out
what the return values say. The laws, which `check` asserts:

- a pool never has more resources than its cap, those being made or ended included;
- no claim waits while a resource is free or a slot is left; the longest waiting is served first;
- a resource is free, or held by one id, or on the way between the two.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from moorage.backends.specs import BaseResourceSpec
from moorage.resources.resources import BaseResource, Runner


class ClaimStage(Enum):
    """The progress of a claim on a resource."""

    WAITING = auto()
    """The claim waits for a resource or a slot."""
    STARTING = auto()
    """It has a slot; its resource is being made, or looked at."""
    HELD = auto()
    """It has a resource."""
    OVER = auto()
    """It failed, was ended or given up."""


@dataclass(eq=False, slots=True)
class ResourceClaim:
    """A caller that wants a resource, or has one.

    Attributes:
        id: As the user says it; None if the resource is for the store.
        pool: Where from.
        timeout_seconds: For the backend's start.
        loop: Where its resource is made: the first caller's.
        options: Options of its runner, beside the spec.
        stage: How far it is.
        callers: How many wait for it now.
        taken: A caller has the resource.
        release_at_once: It was released before it had a resource.
        resource: What it has.
        warm: A free resource to look at before it is handed out.
        spoiled: `warm` is not fit, and could not be ended.
        admitted: Resolved when it waits no longer.
        outcome: The resource, or why there is none.
        task: Makes the resource.
        quiet: Resolved when `task` has ended and nothing more will come of it.
    """

    id: str | None
    pool: "SpecPool"
    timeout_seconds: float | None
    loop: asyncio.AbstractEventLoop
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    stage: ClaimStage = ClaimStage.WAITING
    callers: int = 0
    taken: bool = False
    release_at_once: bool = False
    resource: BaseResource | None = None
    warm: BaseResource | None = None
    spoiled: bool = False
    admitted: Future[None] = field(default_factory=Future[None])
    outcome: Future[BaseResource] = field(default_factory=Future[BaseResource])
    task: asyncio.Task[None] | None = None
    quiet: Future[None] = field(default_factory=Future[None])

    def admit(self, warm: BaseResource | None = None) -> None:
        """Give the claim a slot, with a warm resource or empty."""
        assert self.stage is ClaimStage.WAITING
        self.stage = ClaimStage.STARTING
        self.warm = warm
        self.admitted.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Wake the claim's waiter: it will get no resource."""
        self.stage = ClaimStage.OVER
        if not self.admitted.done():
            self.admitted.set_result(None)
        if not self.outcome.done():
            self.outcome.set_exception(error)


@dataclass(eq=False, slots=True)
class SpecPool:
    """The resources of one spec at one backend.

    Attributes:
        key: Its name.
        backend: Where they are made.
        spec: What they are made from.
        runner: Who makes them.
        free: Released last, taken first: it is the warmest.
        claims: Those that have a slot.
        waiters: Those that have none, the longest waiting first.
        moving: Being reset, or ended.
        stuck: Could not be ended; they may still run, so they count.
        closed: The engine was closed; whatever comes back is ended.
    """

    key: str
    backend: str
    spec: BaseResourceSpec
    runner: Runner
    free: list[BaseResource] = field(default_factory=list[BaseResource])
    claims: set[ResourceClaim] = field(default_factory=set[ResourceClaim])
    waiters: deque[ResourceClaim] = field(default_factory=deque[ResourceClaim])
    moving: int = 0
    stuck: list[BaseResource] = field(default_factory=list[BaseResource])
    closed: bool = False

    @property
    def total(self) -> int:
        """The number of resources, including those that are starting or ending."""
        return len(self.free) + self.acquired

    @property
    def acquired(self) -> int:
        """The number of resources that are not free."""
        return len(self.claims) + self.moving + len(self.stuck)

    @property
    def stocking(self) -> int:
        """The number of resources that are starting for the store."""
        return sum(1 for claim in self.claims if claim.id is None)

    @property
    def room(self) -> int | None:
        """The number of further resources that may be started; None for no limit."""
        cap = self.spec.max_global_num
        return None if cap is None else max(0, cap - self.total)

    def enter(self, claim: ResourceClaim) -> bool:
        """Add a new claim.

        Returns:
            Whether its resource is to be made or looked at now; else it waits.
        """
        if self.waiters or (not self.free and self.room == 0):
            self.waiters.append(claim)
            return False
        claim.admit(self.free.pop() if self.free else None)
        self.claims.add(claim)
        return True

    def stock(self, claim: ResourceClaim) -> None:
        """Add a claim for the store; there must be room."""
        assert self.room != 0
        claim.admit()
        self.claims.add(claim)

    def put(self, resource: BaseResource) -> ResourceClaim | None:
        """Store a free resource. It must not have a slot any more.

        Returns:
            The waiter it is for, or None if it is free now.
        """
        if self.waiters:
            claim = self.waiters.popleft()
            claim.admit(resource)
            self.claims.add(claim)
            return claim
        self.free.append(resource)
        return None

    def vacate(self) -> Iterator[ResourceClaim]:
        """Yield the waiters that get the free slots, longest waiting first."""
        while self.waiters and self.room != 0:
            claim = self.waiters.popleft()
            claim.admit()
            self.claims.add(claim)
            yield claim

    def check(self) -> None:
        """Assert the invariants of the bookkeeping."""
        cap = self.spec.max_global_num
        assert cap is None or self.total <= cap, "the pool has more resources than it may have"
        assert not (self.waiters and self.free), "a claim waits although a resource is free"
        assert not (self.waiters and self.room != 0), (
            "a claim waits although the pool may start another resource"
        )
        assert all(claim.stage is ClaimStage.WAITING for claim in self.waiters)
        assert all(claim.stage in {ClaimStage.STARTING, ClaimStage.HELD} for claim in self.claims)
        assert self.moving >= 0

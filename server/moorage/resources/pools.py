"""The bookkeeping of `ResourceEngine`: who has a resource, and who waits. No I/O and no lock.

There is one pool for each spec and backend. `store` calls this code under its lock, and acts on the
returned values. `check` asserts these invariants:

- a pool never has more resources than its cap, including those that are starting or ending; each
  takes one of the pool's slots;
- no claim waits while a resource is free or a slot is left; the claim that has waited longest is
  served first;
- a resource is free, or one id holds it, or it is being reset or ended.
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
    """The claim has a slot; its resource is being started, or checked."""
    HELD = auto()
    """The claim has a resource."""
    OVER = auto()
    """The claim failed, was ended, or was given up."""


@dataclass(eq=False, slots=True)
class ResourceClaim:
    """A claim on a resource; its callers wait for the resource, or one of them has it.

    Attributes:
        id: The user's id; None if the resource becomes free when it has started.
        pool: The pool of the resource.
        timeout_seconds: Maximum seconds for the start of the resource.
        loop: The event loop of the first caller, in which the resource is started.
        options: Arguments for the runner, in addition to the spec.
        stage: The progress of the claim.
        callers: The number of callers that wait for the claim now.
        taken: Whether a caller has the resource.
        release_at_once: Whether the resource becomes free when it has started.
        resource: The resource of the claim.
        warm: A free resource for the claim, to be checked before a caller gets it.
        spoiled: Whether `warm` is not fit and could not be ended.
        admitted: Resolved when the claim has a slot or has failed.
        outcome: The resource, or the error.
        task: The task that starts the resource.
        quiet: Resolved when `task` has ended and its result has been handled.
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
        """Give the claim a slot, with or without a warm resource."""
        assert self.stage is ClaimStage.WAITING
        self.stage = ClaimStage.STARTING
        self.warm = warm
        self.admitted.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the claim with an error, which its callers get."""
        self.stage = ClaimStage.OVER
        if not self.admitted.done():
            self.admitted.set_result(None)
        if not self.outcome.done():
            self.outcome.set_exception(error)


@dataclass(eq=False, slots=True)
class SpecPool:
    """Records the free, held and awaited resources of one spec at one backend.

    Attributes:
        key: The pool's name.
        backend: The name of the resources' backend.
        spec: The spec of the resources.
        runner: The runner that starts and ends the resources.
        free: Free resources; the resource that was released last is used first, since its caches
            are warm.
        claims: The claims that have a slot.
        waiters: The claims without a slot; the first claim has waited longest.
        moving: The number of resources that are being reset or ended.
        stuck: Resources that could not be ended; they count, since they may still run.
        closed: Whether the engine was closed; resources that come back are then ended.
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
        """The number of starting resources that no caller claims, so that they become free."""
        return sum(1 for claim in self.claims if claim.id is None)

    @property
    def room(self) -> int | None:
        """The number of further resources that may be started; None for no limit."""
        cap = self.spec.max_global_num
        return None if cap is None else max(0, cap - self.total)

    def enter(self, claim: ResourceClaim) -> bool:
        """Add a new claim.

        Returns:
            Whether to start or check the claim's resource now; False: the claim waits.
        """
        if self.waiters or (not self.free and self.room == 0):
            self.waiters.append(claim)
            return False
        claim.admit(self.free.pop() if self.free else None)
        self.claims.add(claim)
        return True

    def stock(self, claim: ResourceClaim) -> None:
        """Add a claim for a resource that becomes free when it has started; `room` is not 0."""
        assert self.room != 0
        claim.admit()
        self.claims.add(claim)

    def put(self, resource: BaseResource) -> ResourceClaim | None:
        """Store a free resource. No claim may have the resource.

        Returns:
            The waiter that gets the resource, or None if the resource is free now.
        """
        if self.waiters:
            claim = self.waiters.popleft()
            claim.admit(resource)
            self.claims.add(claim)
            return claim
        self.free.append(resource)
        return None

    def vacate(self) -> Iterator[ResourceClaim]:
        """Yield the waiters that get the free slots, the one that has waited longest first."""
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

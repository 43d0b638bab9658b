"""Waiters: requests and leases that wait, classes of similar waiters, and their order."""

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from moorage.core.state.accounts import Amounts
from moorage.core.state.facts import Refusal
from moorage.model import (
    AntiAffinity,
    Ask,
    ClusterId,
    Demand,
    Lease,
    Nodes,
    PolicyRef,
    RequestId,
    Tenant,
)

UNJUDGED: Final = -1
"""Value of `refused_at` and `looked_at` when there has been no check."""


class Waiter(msgspec.Struct, frozen=True, gc=False):
    """A request that waits, or a lease that waits for another place.

    Args:
        at: Start of the wait; for a lease, the arrival of its request.
        deadline: End of the wait; for a lease, its end unless it is renewed.
        lease: The lease, which holds nothing while it waits; None: a request without a lease.
    """

    ask: Ask
    at: float
    deadline: float
    lease: Lease | None = None

    @property
    def pauses(self) -> bool:
        """Whether the waiter pauses: it is skipped now, even if it fits."""
        return self.lease is not None and self.lease.retry_at > 0

    @property
    def due(self) -> float:
        """The waiter's next deadline: its own, or the end of its pause."""
        if self.lease is None or not self.pauses:
            return self.deadline
        return min(self.deadline, self.lease.retry_at)

    def later(self, seconds: float) -> "Waiter":
        """Return a copy with all times shifted by `seconds`."""
        lease = self.lease and self.lease.later(seconds)
        return Waiter(self.ask, self.at + seconds, self.deadline + seconds, lease)


class WaiterClass(NamedTuple):
    """Attributes of waiters that decide when they are served.

    Args:
        tenant: The tenant of the waiters.
        project: The tenant's project to whose use the leases of the waiters will be added.
        needs: The amounts that each waiter would add to the use of tenant and project.
        demand: The demand of each waiter, if known; with alternatives, one looser than all of them.
        alternatives: All demands of each waiter, if it has several.
        candidates: The waiters' candidate clusters; None: all.
        priority: Waiters of higher priority are served first.
        reserves: Whether nodes are reserved for the oldest waiter while it heads the queue.
        overdue: Whether the waiters were overtaken the maximum number of times, so that fair shares
            no longer decide their order.
    """

    tenant: Tenant
    project: str
    needs: Amounts
    policy: PolicyRef
    demand: Demand | None
    candidates: tuple[ClusterId, ...] | None
    priority: int
    reserves: bool
    alternatives: tuple[Demand, ...] = ()
    overdue: bool = False

    @property
    def precedence(self) -> int:
        """The sort key before shares and age: priority, then whether the class is overdue."""
        return 2 * self.priority + self.overdue

    @property
    def shape(self) -> "Shape":
        """The attributes that decide whether the waiters fit."""
        return self.demand or Demand(), self.candidates, self.alternatives


Shape = tuple[Demand, tuple[ClusterId, ...] | None, tuple[Demand, ...]]
"""A demand, the candidates, and the alternatives; the demand is looser than each of them."""


class LineKey(NamedTuple):
    """Attributes of waiters that differ only in age; includes what their policy sees."""

    waiters: WaiterClass
    inputs: str
    avoid: Nodes
    anti_affinity: AntiAffinity | None


@dataclass(slots=True, eq=False)
class WaiterLine:
    """Waiters that differ only in age.

    Attributes:
        waiters: The waiters, oldest first.
        since: Arrival of the first waiter, in seconds since the epoch.
        refused_at: `WaitingQueue.changes` when no waiter fitted, even without reserved nodes.
        looked_at: `WaitingQueue.changes` when no waiter fitted beside reserved and excluded nodes.
        declined: The policy's refusal, after it declined all free places. The line is passed over
            until capacity grows where the demand fits.
        excluded: Nodes not offered to the waiters' policy, as they are reserved for the head of the
            queue.
        over_quota_at: `Ranking.rooms` when a proposal for them exceeded their quota; 0: no proposal
            did.
    """

    key: LineKey
    number: int
    waiters: dict[RequestId, None] = field(default_factory=dict[RequestId, None])
    since: float = math.inf
    refused_at: int = UNJUDGED
    looked_at: int = UNJUDGED
    declined: Refusal | None = None
    excluded: Nodes = ()
    over_quota_at: int = 0

    @property
    def of(self) -> WaiterClass:
        """The class of the line. A class also has lines whose policies see other inputs."""
        return self.key.waiters


@dataclass(slots=True)
class ClassLines:
    """The lines of one class of waiters.

    Attributes:
        row: Row in the ranking.
        ready: The lines that are not passed over, by age.
        declined: The lines that are passed over.
        visited: Number of `ready` lines that the current wake has visited.
        passed: Number of lines at the start of `ready` that did not fit as of `passed_at`; a
            wake-up skips them.
        passed_at: `WaitingQueue.changes` for which `passed` is valid.
        alone: Whether the class has one ready line, refused because of this line's own exclusions.
    """

    row: int
    ready: list[tuple[float, int, WaiterLine]] = field(
        default_factory=list[tuple[float, int, WaiterLine]]
    )
    declined: dict[WaiterLine, None] = field(default_factory=dict[WaiterLine, None])
    visited: int = 0
    passed: int = 0
    passed_at: int = UNJUDGED
    alone: bool = False


class Seniority(NamedTuple):
    """The key that pages of the queue are sorted by: unlike a position, it never changes."""

    priority: int
    """Negated priority."""
    since: float
    request: RequestId


def seniority(waiter: Waiter) -> Seniority:
    """Return the key of a waiter in the pages of the queue."""
    return Seniority(-waiter.ask.priority, waiter.at, waiter.ask.id)

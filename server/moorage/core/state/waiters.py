"""Waiters: one, classes of like ones, and the place of each. `State` has the first."""

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
"""In the place of the count of changes at which a demand was found not to fit."""


class Waiter(msgspec.Struct, frozen=True, gc=False):
    """An ask that waits, or a lease that waits for another place.

    Args:
        ask: What for.
        at: Since when; of a lease, of its first request.
        deadline: Until when; of a lease, when it ends unless it is renewed.
        lease: The lease, which holds nothing meanwhile; None for an ask that has none.
    """

    ask: Ask
    at: float
    deadline: float
    lease: Lease | None = None

    @property
    def pauses(self) -> bool:
        """Whether the waiter is skipped now, even if it would fit."""
        return self.lease is not None and self.lease.retry_at > 0

    @property
    def due(self) -> float:
        """The waiter's next deadline: its own, or the end of its pause."""
        if self.lease is None or not self.pauses:
            return self.deadline
        return min(self.deadline, self.lease.retry_at)

    def later(self, seconds: float) -> "Waiter":
        """Return a copy with all times moved by some seconds."""
        lease = self.lease and self.lease.later(seconds)
        return Waiter(self.ask, self.at + seconds, self.deadline + seconds, lease)


class WaiterClass(NamedTuple):
    """Attributes of waiters that decide about their turn.

    Args:
        tenant: Whose they are.
        project: Which of the tenant's projects they count for.
        needs: What each of them would add to what these hold.
        policy: Who proposes for them.
        demand: What each of them needs, if they say so; of alternatives, the loosest.
        alternatives: All demands that would do for each of them, where there are several.
        candidates: Where they may go; None for everywhere.
        priority: Higher goes first.
        reserves: Nodes are reserved for the first of them while it heads the queue.
        overdue: They were overtaken as often as a waiter may be: shares do not count for them.
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
        """The key before shares and age: priority, then whether the waiter is overdue."""
        return 2 * self.priority + self.overdue

    @property
    def shape(self) -> "Shape":
        """The attributes that decide whether the waiter fits."""
        return self.demand or Demand(), self.candidates, self.alternatives


Shape = tuple[Demand, tuple[ClusterId, ...] | None, tuple[Demand, ...]]
"""A demand, where it may be met, and what it is the loosest of."""


class LineKey(NamedTuple):
    """Attributes of waiters that differ in age alone, down to the view of their policy."""

    waiters: WaiterClass
    inputs: str
    avoid: Nodes
    anti_affinity: AntiAffinity | None


@dataclass(slots=True, eq=False)
class WaiterLine:
    """Waiters that differ only in age.

    Attributes:
        waiters: Oldest first.
        since: Since when the first of them waits, in seconds since the epoch.
        refused_at: `WaitingQueue.changes` when there was no room for them, with nothing reserved.
        looked_at: The same with all that was reserved and excluded then.
        declined: What their policy answered, where it wants nothing of what is free; they are
            passed over until capacity grows where they fit.
        excluded: Nodes that it was not offered: they are reserved for the head of the queue.
        over_quota_at: `Ranking.rooms` when what it proposed was beyond their quota; 0: it was not.
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
        """The class: waiters of like demand, whatever their policies see."""
        return self.key.waiters


@dataclass(slots=True)
class ClassLines:
    """The lines of one class.

    Attributes:
        row: In the ranking.
        ready: Those that are not passed over, by age.
        declined: Those that are.
        visited: How many of `ready` the wake that is under way has seen.
        passed: How many of the first of `ready` were looked at, and found not to fit, as of
            `passed_at`: a wake does not look at each of them again.
        passed_at: `WaitingQueue.changes` then.
        alone: Its only line that is ready was refused for what is excluded from that line.
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
    """The key of the pages of the queue: that of a waiter never changes, unlike its position."""

    priority: int
    """Negated."""
    since: float
    request: RequestId


def seniority(waiter: Waiter) -> Seniority:
    """Return a waiter's place in the pages of the queue."""
    return Seniority(-waiter.ask.priority, waiter.at, waiter.ask.id)

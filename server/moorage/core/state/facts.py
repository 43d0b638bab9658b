"""Facts: the only changes of the state, and all that the ledger stores.

A closed union of frozen records, as `events` and `effects` are. A new behaviour is a new member;
`assert_never` then points at every place that must learn it. Only `state.apply` acts on facts.
"""

import msgspec

from moorage.core.state.reserved import NodeReservation
from moorage.model import (
    Ask,
    Cluster,
    ClusterId,
    Code,
    DeviceId,
    Lease,
    NodeId,
    Outcome,
    Placement,
    Quota,
    RequestId,
    Tenant,
)
from moorage.records.json_values import JsonMapping, JsonObject


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """A refusal as a value. `why` and every failure reply are made of it.

    Args:
        reason: One sentence for a person.
        field: The field of the request that was wrong, or empty.
        expected: What was expected there, or empty.
        details: More data, e.g. `nodes` counted by constraint.
    """

    code: Code
    reason: str
    field: str = ""
    expected: str = ""
    details: JsonMapping = msgspec.field(default_factory=JsonObject)


class ClusterSet(msgspec.Struct, frozen=True, gc=False):
    """The inventory has this cluster, exactly as it is here."""

    cluster: Cluster


class ClusterRemoved(msgspec.Struct, frozen=True, gc=False):
    """The inventory no longer has this cluster. Leases on it stand until they end."""

    cluster: ClusterId


class Cordoned(msgspec.Struct, frozen=True, gc=False):
    """A cordon: no new lease on a node or a whole cluster, whatever its document says.

    Args:
        node: Empty: all nodes of the cluster, those that come later included.
        who: The tenant whose request it is.
        drains: What is there shall leave: see `core.lifecycle.cordons`.
        until: When leases there end at the latest, in seconds since the epoch; 0: when they will.
    """

    cluster: ClusterId
    node: NodeId
    at: float
    who: Tenant
    reason: str = ""
    drains: bool = False
    until: float = 0.0

    @property
    def why(self) -> str:
        """Why nothing is placed there, in words."""
        done = "drained" if self.drains else "cordoned"
        return f"{done} by {self.who}" + (f": {self.reason}" if self.reason else "")


class Uncordoned(msgspec.Struct, frozen=True, gc=False):
    """A `Cordoned` fact about this cluster or node holds no longer."""

    cluster: ClusterId
    node: NodeId
    at: float
    who: Tenant


class Reserved(msgspec.Struct, frozen=True, gc=False):
    """Nodes are reserved for a tenant, exactly as it is here."""

    reservation: NodeReservation


class Unreserved(msgspec.Struct, frozen=True, gc=False):
    """A reservation is over: its time is up, it was not used, or an operator says so."""

    reservation: RequestId
    at: float
    reason: str


class QuotaSet(msgspec.Struct, frozen=True, gc=False):
    """A tenant, or one of its projects, has this quota from now on.

    Args:
        tenant: `*`: each tenant that has no quota of its own.
        project: None: the tenant as a whole; empty: what names no project.
        quota: None: no quota of its own any more.
        who: Which tenant said so.
    """

    tenant: Tenant
    project: str | None
    quota: Quota | None
    at: float
    who: Tenant


class HalfLifeSet(msgspec.Struct, frozen=True, gc=False):
    """Past use counts half as much after these seconds; 0: not at all."""

    seconds: float
    at: float


class UsageCarried(msgspec.Struct, frozen=True, gc=False):
    """Past use of an account. Only checkpoints hold this fact.

    Args:
        share: See `core.state.accounts.Past`.
        step: As of when, in steps of the half-life.
    """

    tenant: Tenant
    project: str | None
    share: float
    step: int


class DurationsCarried(msgspec.Struct, frozen=True, gc=False):
    """Counts of durations of like leases. Only checkpoints hold this fact.

    Args:
        tenant: Empty: of any. As are `policy`, and `gpu_milli` where it is -1.
        counts: Steps (see `core.state.durations`), and how many lasted that long.
    """

    tenant: str
    policy: str
    gpu_milli: int
    counts: tuple[tuple[int, int], ...]


class Queued(msgspec.Struct, frozen=True, gc=False):
    """An ask waits, at most until `deadline`."""

    ask: Ask
    at: float
    deadline: float


class WaitExtended(msgspec.Struct, frozen=True, gc=False):
    """An ask in the queue waits until `deadline`."""

    request: RequestId
    deadline: float


class Dequeued(msgspec.Struct, frozen=True, gc=False):
    """A waiter left the queue without a lease."""

    request: RequestId
    at: float
    refusal: Refusal


class Granted(msgspec.Struct, frozen=True, gc=False):
    """A lease exists.

    Args:
        overtakes: Who came before it, might have been where it is, and waits on; None: none does.
    """

    lease: Lease
    overtakes: RequestId | None = None


class Overtaken(msgspec.Struct, frozen=True, gc=False):
    """The number of times that a waiter was overtaken. Only checkpoints hold this fact."""

    request: RequestId
    times: int


class Renewed(msgspec.Struct, frozen=True, gc=False):
    """A lease lasts until `expires_at`."""

    lease: RequestId
    expires_at: float


class Started(msgspec.Struct, frozen=True, gc=False):
    """The workload of a lease runs."""

    lease: RequestId
    at: float
    endpoint: str = ""


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The workload of a lease came to an end by itself: it did not start, died, or did its work.

    What is left of it still holds what the lease holds. Another fact says what follows: the lease
    is `Ending` or `Ended`, or `Requeued` when its backend has let go.
    """

    lease: RequestId
    outcome: Outcome


class Requeued(msgspec.Struct, frozen=True, gc=False):
    """A lease whose workload failed waits for another place, and holds nothing meanwhile."""

    lease: RequestId
    at: float
    reason: str


class Paused(msgspec.Struct, frozen=True, gc=False):
    """A lease in the queue is not tried again before `retry_at`.

    Args:
        faults: How often in a row its policy did not get to answer; 0: its workload failed.
    """

    lease: RequestId
    at: float
    retry_at: float
    faults: int = 0


class Resumed(msgspec.Struct, frozen=True, gc=False):
    """The pause of a lease in the queue is over: it stands in line again."""

    lease: RequestId
    at: float


class Preempted(msgspec.Struct, frozen=True, gc=False):
    """A lease has to give way to a request that waits; see `model.Notice`."""

    lease: RequestId
    at: float
    by: RequestId
    until: float
    reason: str


class Spared(msgspec.Struct, frozen=True, gc=False):
    """A lease need not give way any more: the request is served, gave up, or would not fit."""

    lease: RequestId
    at: float


class Moved(msgspec.Struct, frozen=True, gc=False):
    """A node renamed devices that a lease holds, or lost them.

    Args:
        placement: What it holds, by the names that are valid now.
        devices: As `model.Lease.devices`.
        lost: As `model.Lease.lost`.
    """

    lease: RequestId
    at: float
    placement: Placement
    devices: tuple[tuple[DeviceId, ...], ...]
    lost: tuple[DeviceId, ...] = ()


class Ending(msgspec.Struct, frozen=True, gc=False):
    """A lease is over, but its backend has not let go: its share is not free yet."""

    lease: RequestId
    at: float
    reason: str


class Warmed(msgspec.Struct, frozen=True, gc=False):
    """A released lease, now without owner, holds its share for the next like request."""

    lease: RequestId
    at: float
    expires_at: float


class Ended(msgspec.Struct, frozen=True, gc=False):
    """A lease is over and its share is free."""

    lease: RequestId
    at: float
    reason: str


class Carried(msgspec.Struct, frozen=True, gc=False):
    """A lease as a checkpoint found it, held or ended. Only checkpoints hold this fact."""

    lease: Lease


class ClockMoved(msgspec.Struct, frozen=True, gc=False):
    """The calendar was set: it is `at` now, and was `at - seconds` just before.

    Times of leases, waiters and drains move along, so that the time left stays the same.
    Reservations keep their calendar times.
    """

    at: float
    seconds: float


class Counted(msgspec.Struct, frozen=True, gc=False):
    """Fencing numbers up to this one were given out. Only checkpoints, which forget, hold it."""

    fencing: int


Fact = (
    ClusterSet
    | ClusterRemoved
    | Cordoned
    | Uncordoned
    | Reserved
    | Unreserved
    | QuotaSet
    | HalfLifeSet
    | UsageCarried
    | DurationsCarried
    | Queued
    | Overtaken
    | WaitExtended
    | Dequeued
    | Granted
    | Renewed
    | Started
    | Finished
    | Requeued
    | Paused
    | Resumed
    | Preempted
    | Spared
    | Moved
    | Ending
    | Warmed
    | Ended
    | Carried
    | ClockMoved
    | Counted
)

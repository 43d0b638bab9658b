"""Facts: the only changes of the state, and all that the ledger stores.

A closed union of frozen records, as `events` and `effects` are. A new behaviour is a new member;
`assert_never` then marks every place that must handle it. Only `state.apply` acts on facts.
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
    """The reason why a request is refused; `why` and all failure replies are made from it.

    Args:
        field: The wrong field of the request, or empty.
        expected: The expected value of the field, or empty.
        details: More data, e.g. `nodes` counted by constraint.
    """

    code: Code
    reason: str
    field: str = ""
    expected: str = ""
    details: JsonMapping = msgspec.field(default_factory=JsonObject)


class ClusterSet(msgspec.Struct, frozen=True, gc=False):
    """The inventory has this cluster, in exactly this form."""

    cluster: Cluster


class ClusterRemoved(msgspec.Struct, frozen=True, gc=False):
    """The inventory no longer has this cluster. Leases on the cluster stand until they end."""

    cluster: ClusterId


class Cordoned(msgspec.Struct, frozen=True, gc=False):
    """A cordon: a node or a cluster gets no new leases, even if it is ready in the inventory.

    Args:
        node: Empty: all nodes of the cluster, those that come later included.
        who: The tenant that sent the request.
        drains: Whether the leases in the place must leave, too: see `core.lifecycle.cordons`.
        until: Latest end of leases in the place, in seconds since the epoch; 0: no limit.
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
        """The reason, in words, why nothing is placed there."""
        done = "drained" if self.drains else "cordoned"
        return f"{done} by {self.who}" + (f": {self.reason}" if self.reason else "")


class Uncordoned(msgspec.Struct, frozen=True, gc=False):
    """The cordon of a cluster or node is over."""

    cluster: ClusterId
    node: NodeId
    at: float
    who: Tenant


class Reserved(msgspec.Struct, frozen=True, gc=False):
    """A reservation exists, in exactly this form."""

    reservation: NodeReservation


class Unreserved(msgspec.Struct, frozen=True, gc=False):
    """A reservation is over: it expired, was not used in time, or was ended by an operator."""

    reservation: RequestId
    at: float
    reason: str


class QuotaSet(msgspec.Struct, frozen=True, gc=False):
    """A tenant, or one of its projects, has this quota from now on.

    Args:
        tenant: The tenant; `*`: each tenant that has no quota of its own.
        project: None: the tenant as a whole; empty: requests that name no project.
        quota: The quota; None: the account's own quota is removed.
        who: The tenant that sent the request.
    """

    tenant: Tenant
    project: str | None
    quota: Quota | None
    at: float
    who: Tenant


class HalfLifeSet(msgspec.Struct, frozen=True, gc=False):
    """The half-life of past use is set, in seconds; 0: past use does not count."""

    seconds: float
    at: float


class UsageCarried(msgspec.Struct, frozen=True, gc=False):
    """Past use of an account. Only checkpoints hold this fact.

    Args:
        share: See `core.state.accounts.Past`.
        step: The time of the share, in steps of the half-life.
    """

    tenant: Tenant
    project: str | None
    share: float
    step: int


class DurationsCarried(msgspec.Struct, frozen=True, gc=False):
    """Counts of durations of similar leases. Only checkpoints hold this fact.

    Args:
        tenant: Empty: any tenant. An empty `policy` and `gpu_milli` -1 also mean any.
        counts: Pairs of a step (see `core.state.durations`) and the number of leases whose duration
            is in this step.
    """

    tenant: str
    policy: str
    gpu_milli: int
    counts: tuple[tuple[int, int], ...]


class Queued(msgspec.Struct, frozen=True, gc=False):
    """A request waits in the queue, at most until `deadline`."""

    ask: Ask
    at: float
    deadline: float


class WaitExtended(msgspec.Struct, frozen=True, gc=False):
    """A request in the queue may wait until `deadline`."""

    request: RequestId
    deadline: float


class Dequeued(msgspec.Struct, frozen=True, gc=False):
    """A waiter left the queue without a lease."""

    request: RequestId
    at: float
    refusal: Refusal


class Granted(msgspec.Struct, frozen=True, gc=False):
    """A lease was granted.

    Args:
        overtakes: The earlier waiter that could have used this place and still waits; None: no
            waiter could.
    """

    lease: Lease
    overtakes: RequestId | None = None


class Overtaken(msgspec.Struct, frozen=True, gc=False):
    """The number of grants that overtook a waiter. Only checkpoints hold this fact."""

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
    """The workload of a lease ended by itself: it did not start, crashed, or completed.

    The lease keeps its capacity for now. Another fact follows: the lease is `Ending` or `Ended`, or
    `Requeued` once its backend has cleaned up.
    """

    lease: RequestId
    outcome: Outcome


class Requeued(msgspec.Struct, frozen=True, gc=False):
    """A lease whose workload failed waits for another place; until then it holds no capacity."""

    lease: RequestId
    at: float
    reason: str


class Paused(msgspec.Struct, frozen=True, gc=False):
    """A lease in the queue is not considered again before `retry_at`.

    Args:
        faults: Consultations in a row that failed; 0: the pause is due to a failed workload.
    """

    lease: RequestId
    at: float
    retry_at: float
    faults: int = 0


class Resumed(msgspec.Struct, frozen=True, gc=False):
    """The pause of a lease in the queue is over."""

    lease: RequestId
    at: float


class Preempted(msgspec.Struct, frozen=True, gc=False):
    """A lease has notice to end for a waiting request; see `model.Notice`."""

    lease: RequestId
    at: float
    by: RequestId
    until: float
    reason: str


class Spared(msgspec.Struct, frozen=True, gc=False):
    """The notice of a lease is withdrawn: the request was served, gave up, or would not fit."""

    lease: RequestId
    at: float


class Moved(msgspec.Struct, frozen=True, gc=False):
    """A node renamed devices that a lease holds, or lost them.

    Args:
        placement: The placement, with the present device names.
        devices: The devices of the lease, as `model.Lease.devices`.
        lost: The lost devices, as `model.Lease.lost`.
    """

    lease: RequestId
    at: float
    placement: Placement
    devices: tuple[tuple[DeviceId, ...], ...]
    lost: tuple[DeviceId, ...] = ()


class Ending(msgspec.Struct, frozen=True, gc=False):
    """A lease has ended, but its backend still cleans up: its share is not free yet."""

    lease: RequestId
    at: float
    reason: str


class Warmed(msgspec.Struct, frozen=True, gc=False):
    """A released lease, now without an owner, keeps its share for the next matching request."""

    lease: RequestId
    at: float
    expires_at: float


class Ended(msgspec.Struct, frozen=True, gc=False):
    """A lease has ended and its share is free."""

    lease: RequestId
    at: float
    reason: str


class Carried(msgspec.Struct, frozen=True, gc=False):
    """A lease, held or ended, in a checkpoint. Only checkpoints hold this fact."""

    lease: Lease


class ClockMoved(msgspec.Struct, frozen=True, gc=False):
    """The calendar was set: it says `at` now, and said `at - seconds` just before.

    Times of leases, waiters and drains shift too, so that the remaining time stays the same.
    Reservations keep their calendar times.
    """

    at: float
    seconds: float


class Counted(msgspec.Struct, frozen=True, gc=False):
    """The last fencing number given out. Only checkpoints, which drop leases, hold this fact."""

    fencing: int


AboutLease = (
    Renewed
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
)
"""A change of one granted lease, whose id is `lease`."""

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
    | AboutLease
    | Carried
    | ClockMoved
    | Counted
)

"""Events: inputs of the core from outside. Events are never stored.

A closed union of frozen records. Time is never read here: `step` is given `now`.
"""

from typing import Final, Literal

import msgspec

from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Address
from moorage.model import (
    Ask,
    Cluster,
    ClusterId,
    Demand,
    NodeId,
    Quota,
    RequestId,
    SessionId,
    Tenant,
)
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue


class Asked(msgspec.Struct, frozen=True, gc=False):
    """A session requests a placement."""

    to: Address
    ask: Ask


class Proposed(msgspec.Struct, frozen=True, gc=False):
    """A policy answered a consultation; an answer to an earlier consultation is ignored."""

    request: RequestId
    consultation: int
    value: JsonValue


class ConsultFailed(msgspec.Struct, frozen=True, gc=False):
    """A consultation failed: the policy raised, timed out, crashed or returned an invalid value."""

    request: RequestId
    consultation: int
    refusal: Refusal


class ReleaseAsked(msgspec.Struct, frozen=True, gc=False):
    """A client releases a lease.

    Args:
        tenant: The tenant of a caller without a token, which may release its own leases.
    """

    to: Address
    lease: RequestId
    token_digest: str
    tenant: Tenant | None = None


class RenewAsked(msgspec.Struct, frozen=True, gc=False):
    """A client renews a lease. `ttl_seconds` None keeps the lease's own TTL."""

    to: Address
    lease: RequestId
    token_digest: str
    ttl_seconds: float | None


class CancelAsked(msgspec.Struct, frozen=True, gc=False):
    """A client cancels a request that waits."""

    to: Address
    request: RequestId
    tenant: Tenant


class Inquired(msgspec.Struct, frozen=True, gc=False):
    """A client asks a question. Its answer is sent once the facts that it shows are durable.

    Args:
        tenant: The caller's tenant; only its leases and waiters are shown.
        subject: Id of a lease or request, for `status` and `why`.
        filters: Required values of the listed objects' fields, e.g. `{"state": "active"}`.
        after: The `next` of the page before; empty for the first page.
        limit: Objects on a page.
        sees_all: Whether the leases and waiters of all tenants are shown.
        sort: Field that orders leases, descending with a "-" in front; empty: by fencing number.
    """

    to: Address
    question: Literal["status", "why", "queue", "leases", "fleet", "quotas", "reservations"]
    tenant: Tenant
    subject: str = ""
    filters: JsonMapping = msgspec.field(default_factory=JsonObject)
    after: str = ""
    limit: int = 100
    sees_all: bool = False
    sort: str = ""

    def may_see(self, owner: Tenant | str) -> bool:
        """Return whether the caller may see objects of tenant `owner`."""
        return self.sees_all or owner == self.tenant


class SessionLost(msgspec.Struct, frozen=True, gc=False):
    """A session's socket closed: its requests without an answer or a queue place are dropped."""

    session: SessionId


class WorkloadStarted(msgspec.Struct, frozen=True, gc=False):
    """A backend reports that a lease's workload runs.

    The fencing number names the grant: a lease whose workload failed may be granted again before
    the last report about its first start arrives.
    """

    lease: RequestId
    fencing: int
    endpoint: str = ""


class WorkloadFailed(msgspec.Struct, frozen=True, gc=False):
    """A backend reports that a lease's workload did not start; all its parts are gone.

    Args:
        fencing: Fencing number of the grant.
        exit_code: The exit code of a process; None if it is not known.
        log_tail: The last lines that the workload wrote.
    """

    lease: RequestId
    fencing: int
    reason: str
    exit_code: int | None = None
    log_tail: tuple[str, ...] = ()


class WorkloadEnded(msgspec.Struct, frozen=True, gc=False):
    """A backend reports that a lease's workload ended by itself; fields: see `WorkloadFailed`.

    The backend remembers this end until it gets the order to stop the workload, which follows once
    the end is durable. If the backend forgot it earlier, a crash would start the workload again.
    """

    lease: RequestId
    fencing: int
    phase: Literal["succeeded", "failed"]
    reason: str
    exit_code: int | None = None
    log_tail: tuple[str, ...] = ()


class WorkloadStopped(msgspec.Struct, frozen=True, gc=False):
    """A backend reports that a lease's workload was stopped as ordered; all its parts are gone.

    Args:
        fencing: Fencing number of the grant.
        unfit: The reason why the workload did not become warm as ordered; else empty.
    """

    lease: RequestId
    fencing: int
    unfit: str = ""


class WorkloadKept(msgspec.Struct, frozen=True, gc=False):
    """A backend reports that the workload of a released lease is fit for its next user."""

    lease: RequestId
    fencing: int


class FlushAsked(msgspec.Struct, frozen=True, gc=False):
    """A client ends the warm leases of a tenant, in all clusters or in one."""

    to: Address
    tenant: Tenant
    cluster: ClusterId | None = None


class CordonAsked(msgspec.Struct, frozen=True, gc=False):
    """An operator takes a cluster or a node out of service, or puts it back.

    Args:
        node: The node; empty: the whole cluster.
        mode: `cordon`: the place gets no new lease; `drain`: existing leases must leave, too.
        seconds: How long leases may still last after a `drain`; None: until their own end.
    """

    to: Address
    tenant: Tenant
    cluster: ClusterId
    node: NodeId
    mode: Literal["cordon", "drain", "uncordon"]
    reason: str = ""
    seconds: float | None = None


class ReserveAsked(msgspec.Struct, frozen=True, gc=False):
    """An operator reserves nodes.

    Args:
        id: The reservation's id, made by the daemon.
        tenant: See `NodeReservation` for the fields `tenant` to `lapse_seconds`.
        candidates: Clusters to choose from; None: all.
        dry_run: Whether to reserve nothing, and only answer which nodes would be reserved.
    """

    to: Address
    id: RequestId
    tenant: Tenant
    demand: Demand
    starts_at: float
    ends_at: float
    lapse_seconds: float = 0.0
    candidates: tuple[ClusterId, ...] | None = None
    dry_run: bool = False


class UnreserveAsked(msgspec.Struct, frozen=True, gc=False):
    """An operator ends a reservation.

    Args:
        who: The tenant that sent the request.
    """

    to: Address
    who: Tenant
    reservation: RequestId


class QuotaAsked(msgspec.Struct, frozen=True, gc=False):
    """An operator sets the quota of a tenant, or of one of its projects.

    Args:
        to: Address of the answer; None: the configuration sets it, without an answer.
        who: The tenant that sent the request.
        tenant: See `QuotaSet` for this field and the next two.
    """

    to: Address | None
    who: Tenant
    tenant: Tenant
    project: str | None
    quota: Quota | None


class HalfLifeConfigured(msgspec.Struct, frozen=True, gc=False):
    """The configuration sets the half-life of past use."""

    seconds: float


class DryRun(msgspec.Struct, frozen=True, gc=False):
    """A client asks for the effect of an operation.

    Args:
        sees_all: Whether the answer names the leases of other tenants; otherwise the answer only
            counts these leases.
        beside: Further leases that end with the release.
        stop_seconds: The longest time to stop the workload at a release; None: not known.
    """

    to: Address
    event: ReleaseAsked | CancelAsked | FlushAsked | CordonAsked
    sees_all: bool = False
    beside: tuple[RequestId, ...] = ()
    stop_seconds: float | None = None


class ClusterSeen(msgspec.Struct, frozen=True, gc=False):
    """The registry has this cluster, as it is now."""

    cluster: Cluster


class ClusterGone(msgspec.Struct, frozen=True, gc=False):
    """The registry no longer has this cluster."""

    cluster: ClusterId


class Restarted(msgspec.Struct, frozen=True, gc=False):
    """The daemon has restarted. Leases last `grace_seconds` or more, so that clients can renew."""

    grace_seconds: float


class Stalled(msgspec.Struct, frozen=True, gc=False):
    """The daemon continues after a stall in which it read no renewals.

    Args:
        seconds: Length of the stall.
        grace_seconds: Least time left to leases that expired during the stall; see `Grace`.
    """

    seconds: float
    grace_seconds: float


class ClockSet(msgspec.Struct, frozen=True, gc=False):
    """The calendar was set, or advanced while the machine slept; `now` is by the new calendar.

    Args:
        seconds: Seconds that the calendar moved forward; negative if it went back.
    """

    seconds: float


class Tick(msgspec.Struct, frozen=True, gc=False):
    """A deadline may have passed."""


Event = (
    Asked
    | Proposed
    | ConsultFailed
    | ReleaseAsked
    | RenewAsked
    | CancelAsked
    | Inquired
    | SessionLost
    | WorkloadStarted
    | WorkloadFailed
    | WorkloadEnded
    | WorkloadStopped
    | WorkloadKept
    | FlushAsked
    | CordonAsked
    | DryRun
    | ReserveAsked
    | UnreserveAsked
    | QuotaAsked
    | HalfLifeConfigured
    | ClusterSeen
    | ClusterGone
    | Restarted
    | Stalled
    | ClockSet
    | Tick
)

CONSULTED: Final = (Proposed, ConsultFailed)
"""Events that end a consultation."""

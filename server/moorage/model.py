"""The data of the core: GPUs, nodes, clusters, demands, placements, asks and leases.

Only values, without behaviour beyond properties of the value itself. Every package may import this
file; it imports nothing but the standard library and msgspec.

Units, everywhere: GPU shares and CPU in thousandths (`milli`, 1000 is one device or one core),
memory in MiB, times in seconds since the epoch, durations in seconds.
"""

from collections.abc import Mapping
from dataclasses import fields, make_dataclass
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple, NewType

import msgspec
from msgspec.structs import replace

ClusterId = NewType("ClusterId", str)
NodeId = NewType("NodeId", str)
RequestId = NewType("RequestId", str)
"""The server's id of a request; the lease of the request has the same id."""
SessionId = NewType("SessionId", str)
Tenant = NewType("Tenant", str)

GPU_MILLI = 1000
"""The thousandths of one device: a whole GPU or a MIG instance; shares have fewer."""
ATTEMPTS_MAX = 3
"""By default, a workload that is requeued after failures is started at most this many times."""

Nodes = tuple[tuple[str, str], ...]
"""Nodes by name: pairs of cluster and node."""


class Gpu(msgspec.Struct, frozen=True, gc=False):
    """One device of a node.

    Args:
        id: Name of the device within the node; the list index if the inventory has no name.
        model: Model name, e.g. `A100-80GB`; empty when unknown.
        memory_mib: Memory of the device; 0 when unknown.
        link_group: NVLink joins the devices of a node with the same link group; empty: none.
        numa: NUMA domain, -1 when unknown.
        exclusive: Whether the device can only be taken whole.
    """

    id: str
    model: str = ""
    memory_mib: int = 0
    link_group: str = ""
    numa: int = -1
    exclusive: bool = False


class DeviceId(NamedTuple):
    """The identity of a device, which does not depend on its name on the node.

    Args:
        uuid: The device's UUID; empty if the inventory has none.
        parent: UUID of the GPU of which the device is a MIG instance; empty for a whole GPU.
    """

    uuid: str = ""
    parent: str = ""


DEVICE: Final = "device "
"""Prefix of a GPU's UUID in a node's `identity`; other keys identify the machine."""


LOST: Final = "lost: "
"""Prefix of the reason why no workload can start on a node whose machine is lost."""


class Node(msgspec.Struct, frozen=True, gc=False):
    """One machine of a cluster, with its total amounts.

    Args:
        id: The node's name within the cluster.
        cpu_milli: The node's CPU.
        memory_mib: The node's memory.
        gpus: The node's devices.
        rack: The rack of the node.
        labels: The labels in the inventory.
        identity: The keys that identify the machine under any name: `machine ID`,
            `provider ID`, and `device UUID` for each GPU; empty if the inventory has none.
        duplicate_of: The node, as `cluster/node`, that was registered first for the same machine;
            this node then has no capacity. Only the core sets this field.
        unavailable: Why no workload can start on the node now, e.g. `cordoned`; empty: one can.
            Leases keep their resources there, and no other resources of the node are free.
        zone: The zone of the node's rack, which may fail as a whole.
        devices: The identities of `gpus`, in the same order; empty if the inventory has none.
    """

    id: NodeId
    cpu_milli: int
    memory_mib: int
    gpus: tuple[Gpu, ...] = ()
    rack: str = ""
    labels: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    identity: tuple[str, ...] = ()
    duplicate_of: str = ""
    unavailable: str = ""
    zone: str = ""
    devices: tuple[DeviceId, ...] = ()


class Cluster(msgspec.Struct, frozen=True, gc=False):
    """The part of a cluster document that placement depends on."""

    id: ClusterId
    nodes: tuple[Node, ...]


class Requirement(NamedTuple):
    """A condition on one label of a node, in the form of Kubernetes' `matchExpressions`.

    The keys `moorage/cluster` and `moorage/node` are the ids of the node's cluster and of the node.
    """

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()


class Demand(msgspec.Struct, frozen=True, gc=False):
    """The demand: the `resources` of a request.

    Args:
        gpus: Number of GPUs on each node; 0 asks for CPU and memory only.
        gpu_milli: Thousandths of each of those GPUs. Less than 1000 is a share of one device.
        models: Accepted GPU models; empty accepts any.
        gpu_memory_mib: Memory that each GPU must have; 0 asks for none.
        cpu_milli: CPU on each node.
        memory_mib: Memory on each node.
        nodes: Number of different nodes (a gang), each holding all of the above.
        topology: `nvlink` and `numa`: the GPUs of a node share one link group or NUMA domain.
            `rack` and `zone`: the nodes of a gang share a rack or zone of one cluster.
        where: Requirements on the labels of each node, all of which must hold.
    """

    gpus: int = 0
    gpu_milli: int = GPU_MILLI
    models: tuple[str, ...] = ()
    gpu_memory_mib: int = 0
    cpu_milli: int = 0
    memory_mib: int = 0
    nodes: int = 1
    topology: Literal["", "nvlink", "numa", "rack", "zone"] = ""
    where: tuple[Requirement, ...] = ()


class Share(msgspec.Struct, frozen=True, gc=False):
    """One node's part of a placement.

    Attributes:
        cluster_id: The cluster.
        node_id: The node within the cluster.
        gpus: Ids of the devices held.
        gpu_milli: Thousandths held of each of these devices.
        cpu_milli: CPU held.
        memory_mib: Memory held.
    """

    cluster_id: ClusterId
    node_id: NodeId
    gpus: tuple[str, ...] = ()
    gpu_milli: int = GPU_MILLI
    cpu_milli: int = 0
    memory_mib: int = 0


Placement = tuple[Share, ...]
"""Where a lease is held: one share per node, more than one for a gang."""


OVERTAKEN_MAX: Final = 1_000
"""How often later requests of the same or a lower priority may overtake a waiter. A waiter that was
overtaken this often goes before the others of its priority, whatever their fair shares are."""
NO_SECONDS: Final = 0.0
"""The default of durations. msgspec omits a default only where a value is this very object."""
REQUEUE_PAUSE_SECONDS: Final = 1.0
"""Default pause before the second start of a workload."""
REQUEUE_PAUSE_SECONDS_MAX: Final = 60.0
"""Longest pause between two starts; each pause is twice as long as the one before."""
RESOURCES: Final = ("gpu_milli", "cpu_milli", "memory_mib")
"""The resources that quotas and shares limit."""


class Amounts(msgspec.Struct, frozen=True, gc=False):
    """The amount of each resource; None for a resource that is not named."""

    gpu_milli: int | None = None
    cpu_milli: int | None = None
    memory_mib: int | None = None


class Quota(msgspec.Struct, frozen=True, gc=False):
    """The quota of a tenant, or of one of its projects, and its weight.

    Args:
        weight: A tenant with twice the weight may hold twice as much before others go first.
        nominal: The tenant's own quota; None: no limit.
        borrow: The unused quota of others that the tenant may hold as well; None: nothing.
        lend: The tenant's unused quota that others may hold; None: all of it.
        notice_seconds: How long leases on borrowed quota may stay once its lender needs it.
    """

    weight: float = 1.0
    nominal: Amounts = Amounts()
    borrow: Amounts = Amounts()
    lend: Amounts = Amounts()
    notice_seconds: float = 0.0


class AntiAffinity(msgspec.Struct, frozen=True, gc=False):
    """The domain in which a lease is alone of its group: `topologyKey` in Kubernetes."""

    group: str
    topology: Literal["node", "rack", "zone"] = "node"


class LeaseTerms(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The `lease` of a request: how long the lease lasts, and how long the request may wait.

    Args:
        ttl_seconds: The lease ends this long after its grant or its last renewal.
        wait_seconds: How long the request may wait in the queue; 0 answers at once.
        priority: Requests of a higher priority go first.
        preemptible: Whether the lease may be ended early for other requests; `on_failure` decides
            whether its workload starts again.
        runtime_seconds_min: How long a preemptible lease lasts in any case.
        notice_seconds: The least time between the notice and the end.
        idempotency_key: A repeated request of the tenant with the same key gets the same lease;
            empty: no key.
        project: The tenant's project to whose use the lease is added; empty: none.
        ttl_seconds_min: Shortest acceptable TTL if a reservation begins earlier; 0: never shorten.
        anti_affinity: Keeps the lease away from other leases of its group; None: no group.
    """

    ttl_seconds: float
    wait_seconds: float = NO_SECONDS
    priority: int = 0
    preemptible: bool = False
    idempotency_key: str = ""
    runtime_seconds_min: float = NO_SECONDS
    notice_seconds: float = NO_SECONDS
    project: str = ""
    ttl_seconds_min: float = NO_SECONDS
    anti_affinity: AntiAffinity | None = None


class PolicyRef(msgspec.Struct, frozen=True, gc=False):
    """One immutable version of a policy: its URI, and the digest of its content."""

    uri: str
    digest: str


class Provision(msgspec.Struct, frozen=True, gc=False):
    """The workload for the granted resources: a backend's name, and the spec for the backend.

    Args:
        backend: The backend.
        spec: The spec of the workload.
        on_failure: What happens to the lease if the workload fails: `end` ends the lease; `requeue`
            releases its resources, and the lease waits for another place.
        attempts_max: The most starts, including the first, if a failure requeues.
        keep_warm_seconds: How long the workload stays after its release, for warm reuse.
    """

    backend: str
    spec: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    on_failure: Literal["end", "requeue"] = "end"
    attempts_max: int = ATTEMPTS_MAX
    keep_warm_seconds: float = 0.0


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one start of a workload that ended by itself.

    Args:
        attempt: The number of the start, from 1.
        phase: `succeeded`, or `failed` if the workload did not start, or died.
        detail: One sentence for a person.
        at: Time of the end, in seconds since the epoch.
        nodes: The nodes on which the workload ran: pairs of cluster and node.
        exit_code: Exit code of a process; negative: a signal's number; None: unknown.
        log_tail: The last lines of output, if the workload failed.
    """

    attempt: int
    phase: Literal["succeeded", "failed"]
    detail: str
    at: float
    nodes: Nodes = ()
    exit_code: int | None = None
    log_tail: tuple[str, ...] = ()


class Ask(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One request for a placement, as its session sent it.

    Args:
        id: The server's id of the request.
        tenant: The tenant that sent the request.
        policy: The policy that proposes.
        candidates: The candidate clusters, or None for all live ones.
        demand: The resources that must fit, or None if the request has no `resources`; see
            `alternatives`.
        terms: The requested lease, or None for advice.
        provision: The workload to start, or None.
        inputs: The `inputs` of the request, only for the policy.
        parameters: Overrides of the policy's default parameters.
        settings: Overrides of the policy's default settings.
        token_digest: Digest of the token that will own the lease; the daemon makes the token.
        seed: Seed of all random choices of the policy for this request.
        explain: Whether the reply has the reasons.
        dry_run: Whether to decide, verify and answer without holding anything.
        size: Bytes of inputs, parameters, settings and spec as JSON, for the limits of memory.
        avoid: Nodes where the request's workload has failed; other nodes are tried first.
        deadline_seconds: Time limit of one evaluation for the request; 0: that of the policy.
        alternatives: Acceptable demands, the preferred one first; `demand` is the one that is
            decided.
    """

    id: RequestId
    tenant: Tenant
    policy: PolicyRef
    candidates: tuple[ClusterId, ...] | None = None
    demand: Demand | None = None
    terms: LeaseTerms | None = None
    provision: Provision | None = None
    inputs: Any = None
    parameters: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    settings: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    token_digest: str = ""
    seed: int = 0
    explain: bool = False
    dry_run: bool = False
    size: int = 0
    avoid: Nodes = ()
    deadline_seconds: float = 0.0
    alternatives: tuple[Demand, ...] = ()

    @property
    def priority(self) -> int:
        """The priority of the request in the queue."""
        return self.terms.priority if self.terms else 0

    @property
    def project(self) -> str:
        """The project of the tenant to which the request counts; "" for no project."""
        return self.terms.project if self.terms else ""


LeaseState = Literal[
    "granted", "starting", "active", "failing", "queued", "ending", "warm", "ended"
]


class Notice(msgspec.Struct, frozen=True, gc=False):
    """A notice that a lease must end for another request.

    Attributes:
        by: The request that needs the lease's place.
        until: When the lease ends, in seconds since the epoch, if that request still waits then.
        reason: One sentence for a person, with the request and its reason.
    """

    by: RequestId
    until: float
    reason: str


class Lease(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The right to hold a placement until it is ended.

    Used capacity is always computed from the existing leases, and never stored beside the leases.

    Args:
        id: The id of the lease, and of the request that got it.
        tenant: The owner of the lease.
        token_digest: Digest of the token that lets a client renew and release the lease.
        policy: The policy that proposed the placement.
        placement: The held resources.
        fencing: Grows with every grant of this server and never repeats.
        granted_at: Time of the grant, in seconds since the epoch.
        expires_at: End of the lease unless it is renewed, in seconds since the epoch.
        terms: The terms in the lease's request.
        provision: The lease's workload; None: the lease has no workload.
        state: `granted`; `starting` while a backend starts its workload; `active` once that
            runs; `failing` when the workload ended by itself, until the backend has removed its
            remains; `queued` while it waits for another place because its workload failed (it holds
            nothing then); `ending` while the backend stops or resets it (its GPUs are still held);
            `warm` while its workload waits for the next equal request, and no tenant owns the lease
            (its GPUs are still held); `ended`.
        reason: Why the lease is queued, ending, warm or ended; empty in the other states.
        endpoint: The network address of the running workload; empty if it has none.
        attempt: The number of the present start of the workload, from 1.
        outcome: The last end of the workload by itself; None if it never ended by itself.
        asked_at: When the request arrived; the lease's age in the queue counts from this time.
        ask: The request, as long as a failure may requeue the lease.
        inherited: Name of the warm workload that the lease took over; empty: the lease started its
            own workload.
        likeness: See `core.lifecycle.leases.likeness`; empty if the workload may not stay warm.
        retry_at: End of the pause of a queued lease, in seconds since the epoch; else 0.
        faults: How often in a row the policy of the queued lease could not answer.
        notice: The notice that the lease must give way; None: there is none.
        choice: The number of the granted alternative, from 0; None: the request had none.
        devices: For each share of `placement`, the identities of its `gpus`, in the same order;
            empty if the inventory has none.
        lost: The devices that are no longer on the lease's nodes; no other lease gets these devices
            while this lease lasts.
    """

    id: RequestId
    tenant: Tenant
    token_digest: str
    policy: PolicyRef
    placement: Placement
    fencing: int
    granted_at: float
    expires_at: float
    terms: LeaseTerms
    provision: Provision | None = None
    state: LeaseState = "granted"
    reason: str = ""
    endpoint: str = ""
    attempt: int = 1
    outcome: Outcome | None = None
    asked_at: float = 0.0
    ask: Ask | None = None
    inherited: str = ""
    likeness: str = ""
    retry_at: float = 0.0
    faults: int = 0
    notice: Notice | None = None
    choice: int | None = None
    devices: tuple[tuple[DeviceId, ...], ...] = ()
    lost: tuple[DeviceId, ...] = ()

    @property
    def may_start_again(self) -> bool:
        """Whether the lease returns to the queue if its workload fails."""
        provision = self.provision
        return (
            provision is not None
            and provision.on_failure == "requeue"
            and self.attempt < provision.attempts_max
        )

    @property
    def over(self) -> bool:
        """Whether no tenant owns the lease any more."""
        return self.state in {"ending", "warm", "ended"}

    @property
    def workload(self) -> str:
        """The name of the lease's workload at the backend."""
        return self.inherited or self.id

    def later(self, seconds: float) -> "Lease":
        """Return a copy with all times shifted by `seconds`."""
        notice, outcome = self.notice, self.outcome
        return replace(
            self,
            granted_at=self.granted_at + seconds,
            expires_at=self.expires_at + seconds,
            asked_at=self.asked_at + seconds,
            retry_at=self.retry_at and self.retry_at + seconds,
            notice=notice and replace(notice, until=notice.until + seconds),
            outcome=outcome and replace(outcome, at=outcome.at + seconds),
        )


class Code(StrEnum):
    """The code of a refusal: the machine-readable part of every failure reply."""

    # The message itself.
    BAD_JSON = "bad_json"
    BAD_MESSAGE = "bad_message"
    MISSING_FIELDS = "missing_fields"
    UNKNOWN_OP = "unknown_op"
    UNSUPPORTED = "unsupported"
    TOO_LARGE = "too_large"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    # Objects that the message names.
    UNKNOWN_POLICY = "unknown_policy"
    UNKNOWN_CLUSTERS = "unknown_clusters"
    UNKNOWN_LEASE = "unknown_lease"
    UNKNOWN_REQUEST = "unknown_request"
    WRONG_TOKEN = "wrong_token"  # noqa: S105  # A code, not a password.
    LEASE_ENDED = "lease_ended"
    IDEMPOTENCY_MISMATCH = "idempotency_mismatch"
    ALREADY_EXISTS = "already_exists"
    NOT_FOUND = "not_found"
    # The fleet: never, not now, not in time.
    NEVER_FITS = "never_fits"
    QUOTA_EXCEEDED = "quota_exceeded"
    NO_CAPACITY = "no_capacity"
    WAIT_TIMEOUT = "wait_timeout"
    CONFLICT = "conflict"
    # The policy.
    BAD_POLICY = "bad_policy"
    POLICY_ERROR = "policy_error"
    POLICY_TIMEOUT = "policy_timeout"
    POLICY_CRASHED = "policy_crashed"
    POLICY_MEMORY = "policy_memory"
    POLICY_BAD_OUTPUT = "policy_bad_output"
    POLICY_UNSOUND = "policy_unsound"
    POLICY_DECLINED = "policy_declined"
    # The server.
    CANCELLED = "cancelled"
    ENGINE_FAILED = "engine_failed"
    BUSY = "busy"
    SHUTTING_DOWN = "shutting_down"
    NOT_LEADER = "not_leader"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


def like_dataclasses(*kinds: type[msgspec.Struct]) -> None:
    """Make `dataclasses.replace` and `asdict` accept records, since users' programs call them."""
    for kind in kinds:
        like = make_dataclass(kind.__name__, kind.__struct_fields__, init=False, eq=False)
        named = {each.name: each for each in fields(like)}
        setattr(kind, "__dataclass_fields__", named)  # noqa: B010  # No type declares it.


like_dataclasses(Demand, AntiAffinity, LeaseTerms, Notice, Provision, Share, Outcome)

"""The data of the core: GPUs, nodes, clusters, demands, placements, asks and leases.

Values only, no behaviour beyond what a value can say about itself. Every package may import this
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
"""The server's own name for one request; the lease it may become carries the same one."""
SessionId = NewType("SessionId", str)
Tenant = NewType("Tenant", str)

GPU_MILLI = 1000
"""The slots of one GPU: shares, MIG instances and whole devices are one arithmetic."""
ATTEMPTS_MAX = 3
"""Starts of a workload in all, where a failure requeues and the request does not say how many."""

Nodes = tuple[tuple[str, str], ...]
"""Nodes by name: pairs of cluster and node."""


class Gpu(msgspec.Struct, frozen=True, gc=False):
    """One device of a node.

    Args:
        id: Its name within the node; the list index where the inventory names none.
        model: Model name, e.g. `A100-80GB`; empty when unknown.
        memory_mib: Memory of the device; 0 when unknown.
        link_group: Devices of a node with the same name are joined by NVLink; empty: none.
        numa: NUMA domain, -1 when unknown.
        exclusive: The device can only be taken whole.
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
        uuid: Its UUID; empty if the inventory has none.
        parent: UUID of the GPU that it is a MIG instance of; empty for a whole GPU.
    """

    uuid: str = ""
    parent: str = ""


DEVICE: Final = "device "
"""Before the UUID of a GPU in a node's `identity`; other keys name the machine."""


LOST: Final = "lost: "
"""How the reason begins why nothing can start on a node whose machine is not heard of."""


class Node(msgspec.Struct, frozen=True, gc=False):
    """One machine of a cluster, with its total amounts.

    Args:
        id: Its name within the cluster.
        cpu_milli: Its CPU.
        memory_mib: Its memory.
        gpus: Its devices.
        rack: Where it stands.
        labels: As the inventory has them.
        identity: What tells it from all other machines, whatever they are called: `machine ID`,
            `provider ID`, and `device UUID` for each GPU; empty if the inventory has none.
        duplicate_of: The node, as `cluster/node`, that is the same machine and was there first:
            this one then counts for nothing. The core says so, no document does.
        unavailable: Why nothing can start there now, e.g. `cordoned`; empty: it can. Leases keep
            what they hold there, and nothing of it is free.
        zone: What its rack is part of, and fails as a whole.
        devices: Which devices `gpus` are, in their order; empty if the inventory does not say.
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

    The keys `moorage/cluster` and `moorage/node` are the ids of the two.
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
            `rack` and `zone`: the nodes of a gang share one, of one cluster.
        where: What the labels of each node must be, all of it.
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
        node_id: The node within it.
        gpus: Ids of the devices held.
        gpu_milli: Thousandths held of each of them.
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
"""The most requests that come after a waiter and go before it, of its priority or of lower. Then
it goes before all others of its priority, whatever its tenant holds."""
REQUEUE_PAUSE_SECONDS: Final = 1.0
"""Before the second start of a workload, where the lease does not say otherwise."""
REQUEUE_PAUSE_SECONDS_MAX: Final = 60.0
"""Each pause is twice as long as the one before, and none is longer than this."""
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
        weight: Who has twice the weight may hold twice as much before others go first.
        nominal: Its own; None: no limit.
        borrow: How much more it may hold of what others leave unused; None: nothing.
        lend: How much of its own others may hold while it does not; None: all of it.
        notice_seconds: How long borrowed leases may stay once the tenant needs its quota.
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


class LeaseTerms(msgspec.Struct, frozen=True, gc=False):
    """The `lease` of a request: how long the lease lasts, and how long the request may wait.

    Args:
        ttl_seconds: The lease ends this long after its grant or its last renewal.
        wait_seconds: How long the request may wait in the queue; 0 answers at once.
        priority: Higher goes first.
        preemptible: It may be ended early for others; `on_failure` says whether it starts again.
        runtime_seconds_min: But not before it has lasted these seconds.
        notice_seconds: The least time between the notice and the end.
        idempotency_key: The same request of a tenant with it gets the same lease; empty: none.
        project: Which project of its tenant it counts for; empty: none.
        ttl_seconds_min: So short will do where others reserved its nodes; 0: nothing shorter.
        anti_affinity: It keeps apart from others of its group; None: from none.
    """

    ttl_seconds: float
    wait_seconds: float = 0.0
    priority: int = 0
    preemptible: bool = False
    idempotency_key: str = ""
    runtime_seconds_min: float = 0.0
    notice_seconds: float = 0.0
    project: str = ""
    ttl_seconds_min: float = 0.0
    anti_affinity: AntiAffinity | None = None


class PolicyRef(msgspec.Struct, frozen=True, gc=False):
    """One immutable version of a policy: its URI, and the digest of its content."""

    uri: str
    digest: str


class Provision(msgspec.Struct, frozen=True, gc=False):
    """The workload for the granted resources: a backend's name, and the spec for the backend.

    Args:
        backend: The backend.
        spec: What it starts.
        on_failure: What a workload that fails does to its lease: `end` ends it; `requeue` gives
            back what it holds and has it wait for another place.
        attempts_max: Starts in all, the first among them, where a failure requeues.
        keep_warm_seconds: How long the workload stays after its release, for a request like it.
    """

    backend: str
    spec: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    on_failure: Literal["end", "requeue"] = "end"
    attempts_max: int = ATTEMPTS_MAX
    keep_warm_seconds: float = 0.0


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one start of a workload that ended by itself.

    Args:
        attempt: Which start of it this was, from 1.
        phase: `succeeded`: it did its work; `failed`: it did not start, or died.
        detail: One sentence for a person.
        at: When, in seconds since the epoch.
        nodes: Where it ran: pairs of cluster and node.
        exit_code: Of a process; negative is a signal's number, None is not known.
        log_tail: The last lines it wrote, where it failed.
    """

    attempt: int
    phase: Literal["succeeded", "failed"]
    detail: str
    at: float
    nodes: Nodes = ()
    exit_code: int | None = None
    log_tail: tuple[str, ...] = ()


class Ask(msgspec.Struct, frozen=True, gc=False):
    """One request for a placement, as its session sent it.

    Args:
        id: The server's name for it.
        tenant: Whose it is.
        policy: The policy that proposes.
        candidates: Clusters it may go to, or None for every live one.
        demand: What must fit, or None if the request gave no `resources`; see `alternatives`.
        terms: The requested lease, or None for advice.
        provision: What to start, or None.
        inputs: The request's own `inputs`, for the policy alone.
        parameters: Overrides of the policy's default parameters.
        settings: Overrides of the policy's default settings.
        token_digest: Digest of the token that will own the lease; the shell makes the token.
        seed: Seed of every choice that the policy makes at random for this ask.
        explain: The caller wants the reasons in the reply.
        dry_run: Decide, verify and answer, but hold nothing.
        size: Bytes of inputs, parameters, settings and spec as JSON, for the bounds on memory.
        avoid: Nodes where its workload has failed; others are tried first.
        deadline_seconds: What one evaluation for it may take; 0: as its policy says.
        alternatives: Demands that would do, preferred first; `demand` is the one decided about.
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
        """The project of the tenant to which the request counts; "" for none."""
        return self.terms.project if self.terms else ""


LeaseState = Literal[
    "granted", "starting", "active", "failing", "queued", "ending", "warm", "ended"
]


class Notice(msgspec.Struct, frozen=True, gc=False):
    """A notice that a lease must end for another request.

    Args:
        by: The request that needs its place.
        until: When it leaves, in seconds since the epoch, if that request waits then.
        reason: One sentence for a person: who wants it, and why.
    """

    by: RequestId
    until: float
    reason: str


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right to hold a placement until it is ended.

    A lease is a row: all capacity is derived from the rows that exist, never counted beside them.

    Args:
        id: The id of the ask that it was granted to.
        tenant: Whose it is.
        token_digest: Digest of its token: its holder may renew and release.
        policy: The policy that proposed the placement.
        placement: What is held.
        fencing: Grows with every grant of this server and never repeats.
        granted_at: When, in seconds since the epoch.
        expires_at: When it ends unless it is renewed.
        terms: As requested.
        provision: What runs on it, or None.
        state: `granted`; `starting` while a backend starts its workload; `active` once that
            runs; `failing` when that came to an end by itself, until the backend has put away what
            is left; `queued` while it waits for another place because its workload failed (it
            holds nothing then); `ending` while the backend stops or resets it (its GPUs are still
            held); `warm` while its workload waits for the next request like its own, and none
            owns it (its GPUs are still held); `ended`.
        reason: Why it is queued, ending, warm or ended; empty in the other states.
        endpoint: Where its workload is reached, once that runs; empty if nowhere.
        attempt: Which start of its workload this is, from 1.
        outcome: How its workload last came to an end by itself; None if it never did.
        asked_at: When its request came; its age in the queue counts from here.
        ask: The request, as long as a failure may send it back into the queue.
        inherited: Name of the warm workload that it took over; empty if its own was started.
        likeness: See `core.lifecycle.leases.likeness`; empty if it may not stay warm.
        retry_at: Until when it pauses while it is queued, in seconds since the epoch; else 0.
        faults: While it is queued, how often in a row its policy did not get to answer.
        notice: That it has to give way, and to whom; None if it need not.
        choice: Which of the request's alternatives it is, from 0; None: there were none.
        devices: For each share of `placement`, which devices its `gpus` are, in their order; empty
            where the inventory does not say.
        lost: Those of them that its nodes have no more; no other lease gets them while it lasts.
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
        """Return a copy with all times moved by some seconds."""
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
    """Why the answer is no: the machine-readable part of every failure reply."""

    # The message itself.
    BAD_JSON = "bad_json"
    BAD_MESSAGE = "bad_message"
    MISSING_FIELDS = "missing_fields"
    UNKNOWN_OP = "unknown_op"
    UNSUPPORTED = "unsupported"
    TOO_LARGE = "too_large"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    # What it names.
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
    """Make `dataclasses.replace` and `asdict` accept records, since users' programs use them."""
    for kind in kinds:
        like = make_dataclass(kind.__name__, kind.__struct_fields__, init=False, eq=False)
        named = {each.name: each for each in fields(like)}
        setattr(kind, "__dataclass_fields__", named)  # noqa: B010  # No type declares it.


like_dataclasses(Demand, AntiAffinity, LeaseTerms, Provision, Share, Outcome)

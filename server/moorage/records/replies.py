"""The types of the server's replies, for the wire, the specifications and the clients.

Objects may have more fields later. `protocol.replies` has what all replies share.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from moorage.model import Code, Share
from moorage.records.fields import ESSENTIAL, ExitCode, Next, Seconds, StartNumber, values
from moorage.records.json_values import JsonObject, JsonValue
from moorage.records.leases import Lease as LeaseAnswer
from moorage.records.requests import QuotaAmounts, Resources

Verdict = Annotated[
    Literal["never", "not_now", "not_you"],
    Meta(
        description="never: it does not fit an empty fleet; not_now: it may fit later;"
        " not_you: a quota or a missing permission prevents it."
    ),
]


class RequestChange(Struct):
    """One change of a request that would make it fit."""

    field: str
    asked: JsonValue
    fits: JsonValue


class LargestNode(Struct):
    """The number of candidate nodes, and the largest amount of each resource on one of them."""

    nodes: int
    models: list[str]
    gpus: int
    gpu_memory_mib: int
    cpu_milli: int
    memory_mib: int


class NodeVerdict(Struct):
    """The verdict of a node on a request now. `has` and `needs` give the missing amount."""

    cluster_id: str
    node_id: str
    verdict: Annotated[str, values("fits", "not_now", "never")]
    text: str
    misfit: str | UnsetType = UNSET
    has: int | UnsetType = UNSET
    needs: int | UnsetType = UNSET


class AwaitedLease(Struct):
    """A lease whose end a request waits for; `lease` is its id, if you may see it."""

    cluster_id: str
    node_id: str
    expires_at: Seconds
    lease: str | UnsetType = UNSET


class FailureReason(Struct):
    """The reason for a refusal. `field` and `expected` are present if it concerns one field."""

    code: Code
    reason: str
    field: str | UnsetType = UNSET
    expected: str | UnsetType = UNSET
    verdict: Verdict | UnsetType = UNSET
    largest: LargestNode | UnsetType = UNSET
    models: list[str] | UnsetType = UNSET
    fits_if: list[RequestChange] | UnsetType = UNSET
    ttl_max_seconds: float | UnsetType = UNSET


class WaiterAnswer(Struct):
    """A waiting request: what it asks for, and the start and the latest end of its wait."""

    request: str
    tenant: str
    policy_rule_uri: str
    priority: int
    since: Seconds
    deadline: Seconds
    resources: Resources | None
    alternatives: list[Resources] | UnsetType = UNSET
    lease: LeaseAnswer | UnsetType = UNSET


class QueuedWaiter(WaiterAnswer, kw_only=True):
    """A waiting request, as a row of the queue.

    `expected_at`: the waiter's turn, if leases last as long as similar ones did. `overtaken`: how
    often a later request was granted before this one.
    """

    position: int
    expected_at: Seconds | None
    overtaken: int


class WaiterStatus(WaiterAnswer, kw_only=True):
    """The status of a request that has no lease yet."""

    state: Literal["waiting"]


class CancelledRequest(Struct):
    """A cancelled request; if it was waiting, with the fields of a waiter."""

    request: str
    state: Literal["cancelled"]


class Reasons(Struct):
    """Why a request or lease is in its state, or waits; the other fields depend on the state."""

    request: str
    state: str | UnsetType = UNSET
    overtaken: int | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    code: Code | UnsetType = UNSET
    lease: LeaseAnswer | UnsetType = UNSET
    history: list[JsonObject] | UnsetType = UNSET
    drift: list[str] | UnsetType = UNSET
    verdict: Verdict | UnsetType = UNSET
    largest: LargestNode | UnsetType = UNSET
    models: list[str] | UnsetType = UNSET
    fits_if: list[RequestChange] | UnsetType = UNSET
    waits_for: list[AwaitedLease] | UnsetType = UNSET
    room_at: Seconds | UnsetType = UNSET
    ttl_max_seconds: float | UnsetType = UNSET
    node_verdicts: list[NodeVerdict] | UnsetType | None = UNSET
    next: Next | UnsetType = UNSET


class LeasesOfOthers(Struct):
    """The number of other tenants' leases, and the number of these tenants."""

    leases: int
    tenants: int


class OutOfService(Struct):
    """A cluster or node with its state of service, and the leases on it.

    `others`: in a dry run, counts of the leases that the tenant may not see.
    """

    cluster_id: str
    node_id: str | None
    leases: list[str]
    unavailable: str | None
    others: LeasesOfOthers | UnsetType = UNSET


class QuotaTerms(Struct):
    """A quota, as it was set."""

    nominal: QuotaAmounts
    borrow: QuotaAmounts
    lend: QuotaAmounts
    notice_seconds: float


class ResourceUse(Struct):
    """The use of one resource; null: no limit."""

    used: int
    quota: int | None
    borrowed: int
    borrow_max: int | None
    room: int | None


class QuotaState(Struct):
    """The quota and use of a tenant or project; `*` is each tenant without a quota."""

    tenant: str
    project: str | None
    weight: float
    quota: QuotaTerms | None
    share: float | None
    resources: dict[str, ResourceUse] | UnsetType = UNSET


class QuotaPage(Struct):
    """One page of quotas."""

    quotas: list[QuotaState]
    next: Next


class FlushedLeases(Struct):
    """The ids of the warm leases that end."""

    flushed: list[str]


class QueuePage(Struct):
    """One page of the queue."""

    waiting: list[QueuedWaiter]
    next: Next


class LeasePage(Struct):
    """One page of leases. `total`: the number of leases on all pages, if `sort` was given."""

    leases: list[LeaseAnswer]
    next: Next
    total: int | UnsetType = UNSET


class ClusterCapacity(Struct):
    """A cluster, with total and free capacity.

    `owner` is the tenant that registered it, or `(server)` for a cluster that the server maintains;
    null: not recorded.
    """

    cluster_id: str
    nodes: int
    nodes_unavailable: int
    gpus: int
    gpu_milli_total: int
    gpu_milli_free: int
    cpu_milli_total: int
    cpu_milli_free: int
    memory_mib_total: int
    memory_mib_free: int
    owner: str | None = None


class NodeCapacity(Struct, kw_only=True):
    """A node, with total and free capacity; `gpus` gives the free thousandths of each device."""

    cluster_id: str
    node_id: str
    duplicate_of: str | UnsetType = UNSET
    unavailable: str | UnsetType = UNSET
    models: list[str]
    gpus: dict[str, int]
    cpu_milli_total: int
    cpu_milli_free: int
    memory_mib_total: int
    memory_mib_free: int


class ClusterPage(Struct):
    """One page of clusters."""

    clusters: list[ClusterCapacity]
    next: Next


class NodePage(Struct):
    """One page of the nodes of a cluster."""

    nodes: list[NodeCapacity]
    next: Next


class DecisionRow(Struct):
    """A decision about a request. For a lease, `resources` may be the granted ones."""

    request: str
    at: Seconds
    seq: int
    state: Annotated[str, values("granted", "queued", "refused", "requeued", "ended")]
    tenant: str
    policy_rule_uri: str
    reason: str
    resources: Resources | None
    code: Code | UnsetType = UNSET
    placement: list[Share] | UnsetType = UNSET


class DecisionPage(Struct):
    """One page of decisions. `kept_since`: older decisions are pruned; null: none is pruned."""

    decisions: list[DecisionRow]
    next: Next
    kept_since: float | None


class OutputPart(Struct):
    """A piece of a workload's output; the next piece starts at `offset`."""

    offset: int
    attempt: StartNumber
    over: bool
    exit_code: ExitCode | None
    text: str | UnsetType = UNSET
    base64: str | UnsetType = UNSET


class ExecutionAnswer(Struct):
    """The result of a command inside a workload."""

    exit_code: Annotated[ExitCode, ESSENTIAL]
    output: str


class RunFile(Struct):
    """A file that a workload left in its folder."""

    path: str
    size: int


class LeftOutFile(Struct):
    """An object of a workload's folder that is not fetched: a link, a pipe, a surplus file."""

    path: str
    reason: str


class RunFileList(Struct):
    """The files of one start of a workload."""

    files: Annotated[list[RunFile], ESSENTIAL]
    left_out: list[LeftOutFile]
    attempt: StartNumber


class FilePart(Struct):
    """A piece of a file; the next piece starts at `offset`."""

    base64: Annotated[str, ESSENTIAL]
    offset: int
    over: bool


class WatchedTopics(Struct):
    """All topics that the session watches now."""

    topics: list[str]


class WhatIfAnswer(Struct):
    """The predicted answer to a request; `position`: the place in the queue, if it is `waiting`."""

    state: Literal["granted", "waiting", "advised", "refused"]
    request: str
    placement: list[Share] | UnsetType = UNSET
    data: JsonValue = UNSET
    code: Code | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    position: int | UnsetType = UNSET


class WouldBeGranted(Struct):
    """A waiter that would be granted a lease, or a lease that would move elsewhere."""

    request: str
    placement: list[Share]


class WouldGiveWay(Struct):
    """A lease that would have to give way to the request `by`, before the time `until`.

    `by` is empty if it is another tenant's request, which is not shown.
    """

    lease: str
    by: str
    until: Seconds


class WouldLeave(Struct):
    """A lease on drained nodes: it stays until its end, moves, waits for a place, or ends."""

    lease: str
    becomes: Literal["stays", "moves", "waits", "ends"]
    placement: list[Share] | UnsetType = UNSET


class Consequences(Struct):
    """The predicted effects of a change.

    `others` counts other tenants' requests and leases that the reply omits; `other_tenants` is the
    number of these tenants.
    """

    at: Seconds
    answer: WhatIfAnswer | None
    granted: list[WouldBeGranted]
    preempted: list[WouldGiveWay]
    drained: list[WouldLeave]
    others: dict[str, int]
    other_tenants: int
    warnings: list[str]


class ResumedWaiter(Struct):
    """A request without an answer; `message` is the `id` of its message.

    `position`: the request's last known place in the queue; null: not in the queue, or unknown.
    """

    request: str
    message: str | int | None
    position: int | None


class ResumedLease(Struct):
    """A lease of the session that has not ended; `message` is the `id` of its request's message."""

    message: str | int | None
    lease: LeaseAnswer


class ResumedSession(Struct):
    """The open requests and leases of a resumed session.

    `open` has the `id` of each message without a reply yet; null: a message without `id`. The
    session still watches `topics`. The news since the interruption follow; `missed` counts
    lost news.
    """

    session: str
    open: list[str | int | None]
    waiting: list[ResumedWaiter]
    leases: list[ResumedLease]
    topics: list[str]


class ReservedNode(Struct):
    """The reserved part of a node: the whole node if `whole`, else devices and amounts."""

    cluster_id: str
    node_id: str
    whole: bool
    gpus: list[str] | None = None
    gpu_milli: int | None = None
    cpu_milli: int | None = None
    memory_mib: int | None = None


class ReservationAnswer(Struct):
    """A reservation of nodes for one tenant. `used`: whether the tenant has leased its nodes."""

    reservation: str
    tenant: str
    nodes: list[ReservedNode]
    resources: Resources
    starts_at: Seconds
    ends_at: Seconds
    lapse_seconds: float
    used: bool


class ReservationPage(Struct):
    """One page of reservations."""

    reservations: list[ReservationAnswer]
    next: Next


class RecalledFleet(Struct):
    """The fleet before a decision, packed as in topic `map`, and the message that was decided."""

    at: Seconds
    seq: int
    request: JsonObject
    packed: str


class PastFleetAnswer(Struct):
    """The fleet at a time, packed as in topic `map`, after the fact `seq`; 0: before the first."""

    at: Seconds
    seq: int
    packed: str


class FailureMessage(Struct):
    """The reply to every failure: `message` is a sentence for a person, `error` is for programs."""

    success: Annotated[bool, Meta(extra_json_schema={"const": False})]
    message: str
    error: FailureReason
    id: str | int | UnsetType | None = UNSET
    request: str | UnsetType = UNSET
    lease: LeaseAnswer | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    reasons: JsonObject | UnsetType = UNSET
    policy_rule_uri: str | UnsetType = UNSET
    revision: int | UnsetType = UNSET
    as_of: float | UnsetType = UNSET
    leader: str | UnsetType = UNSET


class NewsMessage(Struct):
    """A pushed message: news of a topic, or, with `id`, the progress of a request with `stream`.

    `missed` counts lost messages.
    """

    event: str
    data: JsonObject
    topic: str | UnsetType = UNSET
    id: str | int | UnsetType = UNSET

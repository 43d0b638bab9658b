"""Every message that a client may send.

The gateway reads them with `decode`, `POST /allocate` with `decode_allocation`; the client
package makes them and writes them with `encode`. The shapes are those of
docs/reference/allocation-server.md, "Requests and replies" (for clients that existed before
Moorage), and of the `op` messages.

The fast path is decoding in C; if that fails, `diagnosis` names the field and the value expected
there.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, Final, TypeVar, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from moorage import model
from moorage.model import Code
from moorage.protocol.diagnosis import (
    QUOTED_CHARS_MAX,
    check_bounds,
    check_names,
    diagnose,
    message_id,
    missing_fields,
    no_kind,
    unknown_op,
    warn_of_unknown,
)
from moorage.protocol.errors import BadMessage
from moorage.records import fields as f
from moorage.records.json_values import JsonValue
from moorage.records.requests import (
    Alternatives,
    LeaseRequest,
    ProvisionRequest,
    QuotaAmounts,
    Resources,
    cluster_ids,
)

_NOTHING: Final = msgspec.Raw(b"")
_ABSENT: Final = (_NOTHING, msgspec.Raw(b"null"))


class AllocationRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request for a placement (`adhoc: true`).

    Empty or null `clusters`, `filter`, `search`, `parameters` and `settings` mean the same as
    omitted ones; here they are None. Numeric cluster ids become strings, without duplicates.
    Unknown keys are ignored, since existing clients may send them, and `ignored_fields` names them;
    with `strict` they are refused.
    """

    policy_rule_uri: f.Uri
    inputs: f.Document
    id: f.MessageId = None
    clusters: f.Clusters = None
    filter: f.OptionalDocument = None
    search: f.OptionalDocument = None
    parameters: f.OptionalDocument = None
    settings: f.OptionalDocument = None
    resources: Resources | None = None
    alternatives: Alternatives = ()
    lease: LeaseRequest | None = None
    provision: ProvisionRequest | None = None
    deadline_seconds: f.DeadlineSeconds | None = None
    explain: f.Flag = False
    dry_run: f.Flag = False
    stream: f.Flag = False
    strict: f.Flag = False
    traceparent: f.TraceParent = ""

    def __post_init__(self) -> None:
        """Set empty optional fields to None, and make cluster ids unique strings."""
        if self.alternatives and self.resources is None:
            raise ValueError("alternatives: expected `resources` as well, which are tried first")
        if self.clusters is not None:
            names = tuple(dict.fromkeys(map(str, self.clusters)))
            force_setattr(self, "clusters", names or None)
        if not self.filter:
            force_setattr(self, "filter", None)
        if not self.search:
            force_setattr(self, "search", None)
        if not self.parameters:
            force_setattr(self, "parameters", None)
        if not self.settings:
            force_setattr(self, "settings", None)

    def candidates(self) -> tuple[model.ClusterId, ...] | None:
        """Return the ids in `clusters`, or None if the request names none."""
        return cluster_ids(self.clusters)

    def demand(self) -> model.Demand | None:
        """Return `resources` in the form of the core, or None."""
        return None if self.resources is None else self.resources.demand()

    def demands(self) -> tuple[model.Demand, ...]:
        """Return all acceptable demands, the preferred one first; empty without alternatives."""
        if self.resources is None or not self.alternatives:
            return ()
        each = (self.resources, *self.alternatives)
        return tuple(dict.fromkeys(resources.demand() for resources in each))

    def terms(self) -> model.LeaseTerms | None:
        """Return `lease` in the form of the core, or None for advice."""
        return None if self.lease is None else self.lease.terms()

    def provisioning(self) -> model.Provision | None:
        """Return `provision` in the form of the core, or None."""
        return None if self.provision is None else self.provision.provisioning()


class BlockRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A block-level request: it has `input` and no `adhoc`."""

    input: f.Document
    id: f.MessageId = None
    mode: f.Mode = "dry_run"
    strict: f.Flag = False


# Messages that carry `op` ------------------------------------------------------------------------


class OpMessage(
    Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="op",
):
    """The common fields of all `op` messages. Unknown fields are always refused.

    A misspelt field could widen the operation: a drain without `node` drains all nodes.
    """

    id: f.MessageId = None
    strict: f.Flag = False


class ListingMessage(OpMessage, frozen=True, kw_only=True):
    """One page of a list: rows must equal `filters`; `after` is the `next` of the previous page.

    A standby waits a short time for the fact `min_revision`, and refuses if it does not come.
    """

    min_revision: f.Revision = 0
    filters: f.Filters = {}
    cluster: f.OptionalName = ""
    after: f.OptionalName = ""
    next: f.OptionalName = ""
    limit: f.PageLimit = 100

    @property
    def cursor(self) -> str:
        """Where the page starts; `next` is accepted as another name of `after`."""
        return self.after or self.next

    def equalities(self) -> dict[str, str | int | float | bool]:
        """Return the values that rows must have: `filters`, and `cluster` if it is set."""
        return {**self.filters, "cluster": self.cluster} if self.cluster else dict(self.filters)


class Release(OpMessage, frozen=True, kw_only=True, tag="release"):
    """End a lease. Without `token`, the lease must be of the caller's own tenant.

    With `dry_run`, nothing ends, and `reasons` of the reply names the requests that would be served
    next. The leases in `beside` are assumed to end, too.
    """

    lease: f.Identifier
    token: f.Identifier | None = None
    dry_run: f.Flag = False
    beside: f.Leases = ()


class Renew(OpMessage, frozen=True, kw_only=True, tag="renew"):
    """Let a lease last longer: `ttl_seconds` from now, by default the TTL of its request."""

    lease: f.Identifier
    token: f.Identifier
    ttl_seconds: f.TtlSeconds | None = None


class Flush(OpMessage, frozen=True, kw_only=True, tag="flush"):
    """End your warm leases, in one cluster or everywhere."""

    cluster: f.OptionalName = ""
    dry_run: f.Flag = False


class _Place(OpMessage, frozen=True, kw_only=True):
    """A cluster or one of its nodes. With `dry_run`, the reply only reports the effects."""

    cluster: f.Name
    node: f.OptionalName = ""
    dry_run: f.Flag = False


class Cordon(_Place, frozen=True, kw_only=True, tag="cordon"):
    """Place no new leases on a node or cluster."""

    reason: f.OptionalName = ""


class Drain(Cordon, frozen=True, kw_only=True, tag="drain"):
    """Cordon a node or cluster, and end or move its leases, after `seconds` if given."""

    seconds: f.WaitSeconds | None = None


class Uncordon(_Place, frozen=True, kw_only=True, tag="uncordon"):
    """Place new leases on a node or cluster again."""


class ForgetMachine(OpMessage, frozen=True, kw_only=True, tag="forget"):
    """Remove a machine whose agent will not come back: its leases fail, its node is removed."""

    cluster: f.Name
    node: f.Name


class ReserveNodes(OpMessage, frozen=True, kw_only=True, tag="reserve"):
    """Reserve nodes that fit `resources` for a tenant, from `starts_at` to `ends_at`."""

    resources: Resources
    starts_at: f.Moment
    ends_at: f.Moment
    tenant: f.OptionalName = ""
    clusters: f.Clusters = None
    lapse_seconds: f.KeepSeconds = 0.0
    dry_run: f.Flag = False

    def candidates(self) -> tuple[model.ClusterId, ...] | None:
        """Return the clusters to choose from, or None for all."""
        return cluster_ids(self.clusters or None)


class UnreserveNodes(OpMessage, frozen=True, kw_only=True, tag="unreserve"):
    """End a reservation before its time."""

    reservation: f.Identifier


class RemoveQuota(OpMessage, frozen=True, kw_only=True, tag="remove_quota"):
    """Remove the quota of a tenant or project; then the quota `*` holds for a tenant."""

    tenant: f.Name
    project: f.Identifier | None = None


class SetQuota(OpMessage, frozen=True, kw_only=True, tag="set_quota"):
    """Set the quota of a tenant or of one of its projects. Omitted fields have their defaults."""

    tenant: f.Name
    project: f.Identifier | None = None
    weight: f.Weight = 1.0
    nominal: QuotaAmounts = QuotaAmounts()
    borrow: QuotaAmounts = QuotaAmounts()
    lend: QuotaAmounts = QuotaAmounts()
    notice_seconds: f.WaitSeconds = 0.0

    def quota(self) -> model.Quota:
        """Return the quota in the form of the core."""
        quota: model.Quota = msgspec.convert(self, model.Quota, from_attributes=True)
        return quota


class _Inquiry(OpMessage, frozen=True, kw_only=True):
    """A question about one lease or one request; a lease has the id of its request."""

    min_revision: f.Revision = 0
    lease: f.OptionalIdentifier = ""
    request: f.OptionalIdentifier = ""

    @property
    def subject(self) -> str:
        """The id of the lease or request."""
        return self.lease or self.request


class Status(_Inquiry, frozen=True, kw_only=True, tag="status"):
    """Return the state of a lease or request."""


class Why(_Inquiry, frozen=True, kw_only=True, tag="why"):
    """Return why a lease or request is in its state; with `nodes`, what each node lacks."""

    nodes: f.Flag = False
    after: f.OptionalName = ""
    limit: f.PageLimit = 100


class Cancel(OpMessage, frozen=True, kw_only=True, tag="cancel"):
    """Cancel a waiting request."""

    request: f.Identifier
    dry_run: f.Flag = False


class QueueListing(ListingMessage, frozen=True, kw_only=True, tag="queue"):
    """List the tenant's waiting requests; for operators, those of all tenants."""


class LeaseListing(ListingMessage, frozen=True, kw_only=True, tag="leases"):
    """List the tenant's leases; for operators, all leases. With `sort`, also their total number."""

    state: f.OptionalName = ""
    sort: f.LeaseOrder = ""

    def equalities(self) -> dict[str, str | int | float | bool]:
        """Return the values that rows must have: `filters`, and `cluster` and `state` if set."""
        filters = super().equalities()
        return {**filters, "state": self.state} if self.state else filters


class FleetListing(ListingMessage, frozen=True, kw_only=True, tag="fleet"):
    """List the clusters, or the nodes of `cluster`, with their total and free capacity."""


class QuotaListing(ListingMessage, frozen=True, kw_only=True, tag="quotas"):
    """List the quotas of tenants and projects, and how much of each is held."""


class ReservationListing(ListingMessage, frozen=True, kw_only=True, tag="reservations"):
    """List the tenant's reservations; for operators, those of all tenants."""


class DecisionListing(ListingMessage, frozen=True, kw_only=True, tag="decisions"):
    """List the tenant's recent decisions, newest first; for operators, those of all tenants."""


class DecisionFleet(OpMessage, frozen=True, kw_only=True, tag="decision_fleet"):
    """Return the fleet at the time when a request was decided, and the request."""

    request: f.Identifier


class PastFleet(OpMessage, frozen=True, kw_only=True, tag="past_fleet"):
    """Return the fleet at the time `at`."""

    at: f.Moment


class Manage(OpMessage, frozen=True, kw_only=True, tag="manage"):
    """Call `management` of a policy with `action` and `data`."""

    policy_rule_uri: f.Uri
    action: f.Name
    data: f.Document = {}  # msgspec copies it.


class Logs(OpMessage, frozen=True, kw_only=True, tag="logs"):
    """Return a workload's output from a byte offset on; a negative offset counts from the end.

    If there is no output at the offset yet, the reply waits up to `wait_seconds` for it. Each start
    of the workload has its own output and offsets; `attempt` 0 means the last start. Only `base64`
    returns output that is not UTF-8 unchanged. Without `token`, the lease must be of the caller's
    own tenant.
    """

    lease: f.Identifier
    token: f.Identifier | None = None
    offset: f.Offset = 0
    attempt: f.AttemptNumber = 0
    wait_seconds: f.LogWaitSeconds = 0
    encoding: f.Encoding = "text"


class Exec(OpMessage, frozen=True, kw_only=True, tag="exec"):
    """Run a command inside the workload of a lease; `token` is as for `logs`."""

    lease: f.Identifier
    token: f.Identifier | None = None
    command: f.Command
    timeout_seconds: f.ExecSeconds = 60
    workdir: f.OptionalName = ""
    user: f.OptionalName = ""
    environment: f.Variables = {}  # msgspec copies it.


class Files(OpMessage, frozen=True, kw_only=True, tag="files"):
    """List the files that the workload of a lease left in its own folder, or read one of them.

    Without `path` the reply lists the files; with `path` it has a piece of that file, from `offset`
    on. `attempt` and `token` are as for `logs`.
    """

    lease: f.Identifier
    token: f.Identifier | None = None
    attempt: f.AttemptNumber = 0
    path: f.RunPath = ""
    offset: f.FileOffset = 0


class WatchTopics(OpMessage, frozen=True, kw_only=True, tag="watch"):
    """Push the news of these topics to this session from now on."""

    topics: f.Topics


class Resume(OpMessage, frozen=True, kw_only=True, tag="resume"):
    """Resume a session that lost its connection; must be the first message of a connection."""

    session: f.Identifier


class WhatIf(OpMessage, frozen=True, kw_only=True, tag="whatif"):
    """Return the answer that `request` would get after `change`, and the change's other effects."""

    request: AllocationRequest | msgspec.UnsetType = msgspec.UNSET
    change: f.Document = {}  # msgspec copies it.


Operation = (
    Release
    | Renew
    | Flush
    | Cordon
    | Drain
    | Uncordon
    | ForgetMachine
    | ReserveNodes
    | UnreserveNodes
    | ReservationListing
    | SetQuota
    | RemoveQuota
    | QuotaListing
    | Status
    | Why
    | Cancel
    | QueueListing
    | LeaseListing
    | FleetListing
    | DecisionListing
    | DecisionFleet
    | PastFleet
    | Manage
    | Logs
    | Exec
    | Files
    | WhatIf
    | WatchTopics
    | Resume
)
Message = AllocationRequest | BlockRequest | Operation
M = TypeVar("M", bound=Message)

OPERATIONS: Final[dict[str, type[Operation]]] = {
    str(kind.__struct_config__.tag): kind for kind in get_args(Operation)
}
"""The class of the messages with each `op`."""


class _Requested(Struct):
    """The request of a what-if, not decoded."""

    request: msgspec.Raw


class _Head(Struct):
    """The fields of a message that decide its kind. The decoder skips the rest."""

    adhoc: JsonValue = None
    op: JsonValue = None
    input: msgspec.Raw = _NOTHING


_head: Final = msgspec.json.Decoder(_Head).decode
_readers: Final[dict[type, Callable[[str], Any]]] = {
    kind: msgspec.json.Decoder(kind).decode for kind in get_args(Message)
}
_lenient: Final[dict[type, frozenset[str]]] = {
    kind: frozenset((*kind.__struct_fields__, "adhoc"))
    for kind in (AllocationRequest, BlockRequest)
}
_OF_A_LEASE: Final = (Status, Why)
_NO_RESOURCES: Final = Resources()
_OF_GPUS: Final = ("gpu_milli", "models", "gpu_memory_mib")
_requested: Final = msgspec.json.Decoder(_Requested).decode
_carry: Final = msgspec.msgpack.Encoder().encode


def decode(frame: str | bytes) -> Message:
    """Read one message of a client.

    `adhoc` (any truthy value) makes it an `AllocationRequest`, else `op` an operation, else
    `input` a `BlockRequest`.

    Args:
        frame: The text of the message.

    Raises:
        BadMessage: The text is not JSON, not an object, or not a message of the protocol. The error
            names the field and the expected value. No other error is raised.
    """
    text = _text(frame)
    return _read(text, _kind_of(text))[0]


def decode_and_warn(frame: str | bytes) -> tuple[Message, list[str]]:
    """Return a message, and its warnings; see `decode` and `ignored_fields`, also for errors."""
    text = _text(frame)
    kind = _kind_of(text)
    message, names = _read(text, kind)
    known = _lenient.get(kind)
    if known is not None and names <= known:
        return message, _without_use(message)
    return message, ignored_fields(text, message)


def _kind_of(text: str) -> type[Message]:
    try:
        head = _head(text)
    except (ValueError, RecursionError) as error:
        raise diagnose(text, _Head, error, ()) from None
    if head.adhoc:
        return AllocationRequest
    if head.op is not None:
        kind = OPERATIONS.get(head.op) if isinstance(head.op, str) else None
        if kind is None:
            raise unknown_op(head.op, list(OPERATIONS), message_id(text))
        return kind
    if head.input not in _ABSENT:
        return BlockRequest
    raise no_kind(text, AllocationRequest, list(OPERATIONS))


def decode_allocation(body: str | bytes) -> AllocationRequest:
    """Read the body of `POST /allocate`: as `decode`, but `adhoc` may be missing.

    Raises:
        BadMessage: The text is not such a message; see `decode`.
    """
    return _read(_text(body), AllocationRequest)[0]


def operation_of(body: bytes) -> str:
    """Return the `op` of a message; empty if the message has none or is a request."""
    try:
        head = _head(_text(body))
    except (BadMessage, ValueError, RecursionError):
        return ""
    return "" if head.adhoc or head.op is None else str(head.op)[:QUOTED_CHARS_MAX]


def ignored_fields(frame: str | bytes, message: Message) -> list[str]:
    """Return a warning for each field of a message that has no meaning.

    Ignored fields are unknown fields, and resources that request nothing.

    Args:
        frame: The text of the message.
        message: The decoded message; operations get no warning, as `decode` refuses such fields.

    Raises:
        BadMessage: A field is ignored, and the message is `strict` or a what-if, or the field's
            name is close to `dry_run`.
    """
    if isinstance(message, WhatIf) and message.request:
        request = _requested(frame).request
        try:
            return warn_of_unknown(
                request, AllocationRequest, _lenient[AllocationRequest], strict=True
            )
        except BadMessage as error:
            at, reason = f"request.{error.field}", f"request.{error.reason}"
            raise BadMessage(error.code, reason, at, error.expected, message.id) from None
    if not isinstance(message, AllocationRequest | BlockRequest):
        return []
    kind = type(message)
    return warn_of_unknown(frame, kind, _lenient[kind], strict=message.strict) + _without_use(
        message
    )


def _without_use(message: Message) -> list[str]:
    """Return a warning for resources that request nothing, or describe GPUs but request none."""
    wanted = message.resources if isinstance(message, AllocationRequest) else None
    if wanted is None or wanted.gpus:
        return []
    said = [name for name in _OF_GPUS if getattr(wanted, name) != getattr(_NO_RESOURCES, name)]
    if said:
        return [f"resources.{said[0]}: the request has no GPUs; give a number, such as `gpus` 1."]
    if wanted.cpu_milli or wanted.memory_mib:
        return []
    return ["resources: they request nothing; give `gpus`, `cpu_milli` or `memory_mib`."]


def encode(message: Message) -> str:
    """Write one message, for a client to send; defaults are left out."""
    if isinstance(message, AllocationRequest):
        fields = msgspec.to_builtins(message)
        return msgspec.json.encode({"adhoc": True, **fields}).decode()
    return msgspec.json.encode(message).decode()


def _text(frame: str | bytes) -> str:
    try:
        text = frame if isinstance(frame, str) else frame.decode()
    except UnicodeDecodeError as error:
        raise BadMessage(
            Code.BAD_JSON,
            f"The message is not valid JSON: byte {error.start} is not UTF-8.",
            expected="JSON (RFC 8259), in UTF-8",
        ) from None
    check_bounds(text)
    return text


def _read(text: str, kind: type[M]) -> tuple[M, AbstractSet[str]]:
    """Return a message, and the names of its fields."""
    try:
        message: M = _readers[kind](text)
        # What cannot be packed here could not be carried to a policy either: integers beyond 64
        # bits inside free-form objects, which typed decoding lets pass.
        _carry(message)
    except (ValueError, OverflowError, RecursionError) as error:
        raise diagnose(text, kind, error, ()) from None
    names = check_names(text)
    if isinstance(message, _OF_A_LEASE) and bool(message.lease) == bool(message.request):
        one = "lease or request, not both" if message.lease else "lease or request"
        raise missing_fields([one], "the id of a lease or request", message.id)
    return message, names

"""Every message that a client may send.

The gateway reads them with `decode`, `POST /allocate` with `decode_allocation`; the client
package makes them and writes them with `encode`. The shapes are those of
docs/reference/allocation-server.md, "Requests and replies" (existing clients), and of the `op`
messages beside them.

The fast path is decoding in C; where it says no, `diagnosis` names the field and what is expected.
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
    leaving them out, and read as None here. Cluster ids that came as numbers read as
    strings, each id once. Unknown keys are ignored, since existing clients may send them, and
    `ignored_fields` names them; with `strict` they are refused.
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
        """Give every spelling of "absent" one form."""
        if self.alternatives and self.resources is None:
            raise ValueError("alternatives: expected `resources` beside it, which is tried first")
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
        """Return the clusters it may go to, or None if it names none."""
        return cluster_ids(self.clusters)

    def demand(self) -> model.Demand | None:
        """Return `resources` as the core knows it, or None."""
        return None if self.resources is None else self.resources.demand()

    def demands(self) -> tuple[model.Demand, ...]:
        """Return all that would do, the preferred one first, where there are several."""
        if self.resources is None or not self.alternatives:
            return ()
        each = (self.resources, *self.alternatives)
        return tuple(dict.fromkeys(resources.demand() for resources in each))

    def terms(self) -> model.LeaseTerms | None:
        """Return `lease` as the core knows it, or None for advice."""
        return None if self.lease is None else self.lease.terms()

    def provisioning(self) -> model.Provision | None:
        """Return `provision` as the core knows it, or None."""
        return None if self.provision is None else self.provision.provisioning()


class BlockRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A block-level request: no `adhoc`, but an `input`."""

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
    """What all `op` messages share. Unknown fields are refused, with `strict` or without.

    To ignore one would do more than its sender means: a drain without its `node` is of all nodes.
    """

    id: f.MessageId = None
    strict: f.Flag = False


class ListingMessage(OpMessage, frozen=True, kw_only=True):
    """One page of a list: `filters` are equalities, `after` is the `next` of the page before.

    A standby answers once it knows of the fact `min_revision`, or says soon that it does not.
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
        """Return all filters, `cluster` among them where it was given."""
        return {**self.filters, "cluster": self.cluster} if self.cluster else dict(self.filters)


class Release(OpMessage, frozen=True, kw_only=True, tag="release"):
    """End a lease. Without `token`, one of the caller's own tenant.

    With `dry_run`, `reasons` of the reply say which requests then have their turn; leases of
    `beside` are taken to end, too.
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
    """A cluster, or a node of it. With `dry_run`, it is only said what would come of it."""

    cluster: f.Name
    node: f.OptionalName = ""
    dry_run: f.Flag = False


class Cordon(_Place, frozen=True, kw_only=True, tag="cordon"):
    """Place nothing new there."""

    reason: f.OptionalName = ""


class Drain(Cordon, frozen=True, kw_only=True, tag="drain"):
    """Place nothing new there, and end or move what runs there, within `seconds` where given."""

    seconds: f.WaitSeconds | None = None


class Uncordon(_Place, frozen=True, kw_only=True, tag="uncordon"):
    """Place something there again."""


class ForgetMachine(OpMessage, frozen=True, kw_only=True, tag="forget"):
    """Give up a machine whose agent will not come back: its leases fail, and its node goes."""

    cluster: f.Name
    node: f.Name


class ReserveNodes(OpMessage, frozen=True, kw_only=True, tag="reserve"):
    """Keep nodes for a tenant, from one moment to another: such as `resources` fits on."""

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
    """Remove the quota of a tenant, or of one of its projects: that of all holds then."""

    tenant: f.Name
    project: f.Identifier | None = None


class SetQuota(OpMessage, frozen=True, kw_only=True, tag="set_quota"):
    """Set the quota of a tenant or of one of its projects. A field left out is as at first."""

    tenant: f.Name
    project: f.Identifier | None = None
    weight: f.Weight = 1.0
    nominal: QuotaAmounts = QuotaAmounts()
    borrow: QuotaAmounts = QuotaAmounts()
    lend: QuotaAmounts = QuotaAmounts()
    notice_seconds: f.WaitSeconds = 0.0

    def quota(self) -> model.Quota:
        """Return it as the core knows it."""
        limits = (self.nominal.amounts(), self.borrow.amounts(), self.lend.amounts())
        return model.Quota(self.weight, *limits, self.notice_seconds)


class _Inquiry(OpMessage, frozen=True, kw_only=True):
    """About one lease or one request; the two share their ids."""

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
    """The reasons for what became of a lease or request; `nodes`: and what each node lacks now."""

    nodes: f.Flag = False
    after: f.OptionalName = ""
    limit: f.PageLimit = 100


class Cancel(OpMessage, frozen=True, kw_only=True, tag="cancel"):
    """Give up waiting."""

    request: f.Identifier
    dry_run: f.Flag = False


class QueueListing(ListingMessage, frozen=True, kw_only=True, tag="queue"):
    """Who waits: the tenant's own; for operators, all."""


class LeaseListing(ListingMessage, frozen=True, kw_only=True, tag="leases"):
    """Who holds what: the tenant's own; for operators, all. With `sort`, and how many in all."""

    state: f.OptionalName = ""
    sort: f.LeaseOrder = ""

    def equalities(self) -> dict[str, str | int | float | bool]:
        """Return all filters, `cluster` and `state` among them where they were given."""
        filters = super().equalities()
        return {**filters, "state": self.state} if self.state else filters


class FleetListing(ListingMessage, frozen=True, kw_only=True, tag="fleet"):
    """What there is and what of it is free: the clusters, or the nodes of `cluster`."""


class QuotaListing(ListingMessage, frozen=True, kw_only=True, tag="quotas"):
    """What tenants and projects may hold, and what they hold of it."""


class ReservationListing(ListingMessage, frozen=True, kw_only=True, tag="reservations"):
    """What is reserved, and when: the tenant's own; for operators, all."""


class DecisionListing(ListingMessage, frozen=True, kw_only=True, tag="decisions"):
    """What was decided of late, newest first: the tenant's own; for operators, all."""


class DecisionFleet(OpMessage, frozen=True, kw_only=True, tag="decision_fleet"):
    """The fleet as it was when a request was decided, and the request."""

    request: f.Identifier


class PastFleet(OpMessage, frozen=True, kw_only=True, tag="past_fleet"):
    """The fleet as it was at a time."""

    at: f.Moment


class Manage(OpMessage, frozen=True, kw_only=True, tag="manage"):
    """Call `management` of a policy."""

    policy_rule_uri: f.Uri
    action: f.Name
    data: f.Document = {}  # msgspec copies it.


class Logs(OpMessage, frozen=True, kw_only=True, tag="logs"):
    """What the workload of a lease wrote, from a byte offset on; a negative one is from the end.

    Where nothing has been written there yet, the reply waits for it, up to `wait_seconds`. The
    offset counts in what the start number `attempt` wrote, and starts again with the next one; 0
    means the last start. Text that is no UTF-8 comes unaltered as `base64` only. Without `token`,
    the lease is one of the caller's own tenant.
    """

    lease: f.Identifier
    token: f.Identifier | None = None
    offset: f.Offset = 0
    attempt: f.AttemptNumber = 0
    wait_seconds: f.LogWaitSeconds = 0
    encoding: f.Encoding = "text"


class Exec(OpMessage, frozen=True, kw_only=True, tag="exec"):
    """Run a command inside of the workload of a lease; about `token` as `logs`."""

    lease: f.Identifier
    token: f.Identifier | None = None
    command: f.Command
    timeout_seconds: f.ExecSeconds = 60
    workdir: f.OptionalName = ""
    user: f.OptionalName = ""
    environment: f.Variables = {}  # msgspec copies it.


class Files(OpMessage, frozen=True, kw_only=True, tag="files"):
    """List the files that the workload of a lease left in its own folder, or read one of them.

    Without `path` the reply lists them; with it, the reply is a piece of that file from `offset`
    on. `attempt` and `token` are as with `logs`.
    """

    lease: f.Identifier
    token: f.Identifier | None = None
    attempt: f.AttemptNumber = 0
    path: f.RunPath = ""
    offset: f.FileOffset = 0


class WatchTopics(OpMessage, frozen=True, kw_only=True, tag="watch"):
    """Get the news of these topics from now on."""

    topics: f.Topics


class Resume(OpMessage, frozen=True, kw_only=True, tag="resume"):
    """Go on with a session that lost its connection; the first message of a connection."""

    session: f.Identifier


class WhatIf(OpMessage, frozen=True, kw_only=True, tag="whatif"):
    """The answer that `request` would get if `change` had happened, and what else would differ."""

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
"""Every `op`, by name."""


class _Requested(Struct):
    """The request of a what-if, as it came."""

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
    """Read one message.

    `adhoc` (any truthy value) makes it an `AllocationRequest`, else `op` an operation, else
    `input` a `BlockRequest`.

    Args:
        frame: The text of the message.

    Raises:
        BadMessage: It is not JSON, not an object, or no message of the protocol. The one error
            names the field and what was expected there. Nothing else is ever raised.
    """
    text = _text(frame)
    return _read(text, _kind_of(text))[0]


def decode_and_warn(frame: str | bytes) -> tuple[Message, list[str]]:
    """Read one message, with what `ignored_fields` says of it; errors as of both."""
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
    """Read the body of `POST /allocate`: as `decode`, but `adhoc` need not be said.

    Raises:
        BadMessage: As in `decode`.
    """
    return _read(_text(body), AllocationRequest)[0]


def operation_of(body: bytes) -> str:
    """Return the `op` of a message that names one and is no request, or an empty text."""
    try:
        head = _head(_text(body))
    except (BadMessage, ValueError, RecursionError):
        return ""
    return "" if head.adhoc or head.op is None else str(head.op)[:QUOTED_CHARS_MAX]


def ignored_fields(frame: str | bytes, message: Message) -> list[str]:
    """Return a warning for each field of a message that was read and that means nothing.

    That is a field that is unknown, and resources that ask for none.

    Args:
        frame: The text of the message.
        message: What it was read as. Operations have no such fields: they are refused.

    Raises:
        BadMessage: The message is `strict` or a what-if, or the field is nearly called `dry_run`.
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
    """Return a warning for resources that say how GPUs are to be, but not that any is wanted."""
    wanted = message.resources if isinstance(message, AllocationRequest) else None
    if wanted is None or wanted.gpus:
        return []
    said = [name for name in _OF_GPUS if getattr(wanted, name) != getattr(_NO_RESOURCES, name)]
    if said:
        return [f"resources.{said[0]}: no GPU is asked for; say how many, such as `gpus` 1."]
    if wanted.cpu_milli or wanted.memory_mib:
        return []
    return ["resources: they ask for nothing; give `gpus`, `cpu_milli` or `memory_mib`."]


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
        raise missing_fields(["lease or request"], "the id of one of the two", message.id)
    return message, names

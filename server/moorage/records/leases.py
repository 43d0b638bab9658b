"""A lease as the wire has it, with its workload: the reply, the listings, the news, the clients.

`Lease.of` is the only way from the core's lease to this one. What is at its default is left
out on the wire, and a client that decodes it has the default again.
"""

from collections.abc import Iterator
from typing import Annotated, Final, Self, assert_never, cast, get_args

from msgspec import Raw, Struct, to_builtins
from msgspec.structs import replace

from moorage import model
from moorage.model import Share, like_dataclasses
from moorage.records.fields import ESSENTIAL, Seconds, Sparse, values
from moorage.records.json_values import JsonObject

EMPTY: Final = cast("str", Raw(b'""'))
"""An empty text that is written out, although it is a default."""
NEVER: Final = 0.0


class NodeName(Struct, frozen=True):
    """A node by name."""

    cluster_id: str
    node_id: str

    # Programs of users know it as a pair.

    def __iter__(self) -> Iterator[str]:
        """Yield both, for `cluster, node = name`."""
        return iter((self.cluster_id, self.node_id))

    def __getitem__(self, place: int) -> str:
        """Return one of the two."""
        return tuple(self)[place]

    def __eq__(self, other: object) -> bool:
        """Compare it with another, or with a pair."""
        return isinstance(other, NodeName | tuple) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class WorkloadEnd(Struct, frozen=True):
    """How one start of a workload came to an end by itself.

    Attributes:
        attempt: Which start of it this was, from 1.
        phase: `succeeded` or `failed`.
        exit_code: Of a process; negative: a signal's number; null: not known.
        log_tail: The last lines it wrote, where it failed.
    """

    attempt: int
    phase: str
    detail: str
    at: Seconds
    nodes: tuple[NodeName, ...]
    exit_code: int | None
    log_tail: tuple[str, ...]

    @classmethod
    def of(cls, outcome: model.Outcome) -> Self:
        """Return the outcome that the core has recorded."""
        return cls(
            outcome.attempt,
            outcome.phase,
            outcome.detail,
            outcome.at,
            tuple(NodeName(*node) for node in outcome.nodes),
            outcome.exit_code,
            outcome.log_tail,
        )


class Workload(Sparse, frozen=True):
    """How the workload of a lease is.

    Attributes:
        backend: What starts it.
        phase: From `pending`, `pulling` and `starting` over `ready` to `succeeded` or `failed`;
            `lost` while a machine of it is not heard of: it may run there, or not.
        endpoint: Where it is reached; empty if nowhere, or not yet.
        attempt: Which start of it this is, from 1.
        attempts_max: Starts that there are in all, should it fail.
        warm: It was running when the lease was granted.
        outcome: How the last start that came to an end by itself did.
        detail: What is going on while it starts, or which machine of it is lost.
    """

    backend: str
    phase: str
    endpoint: str
    attempt: int
    attempts_max: int
    warm: bool = False
    outcome: WorkloadEnd | None = None
    detail: str = ""


class NoticeAnswer(Struct, frozen=True):
    """A lease has to give way to a request, by then at the latest."""

    by: str
    until: Seconds
    reason: str


class Lease(Sparse, frozen=True):
    """A lease. Only the reply to its owner has its `token`.

    It ends at `expires_at`, by the server's clock, unless it is renewed. Where it is `queued` and
    pauses after a failure, it is tried again at `retry_at`; 0 and absent: it does not pause.
    `ttl_max_seconds` is there where it was not renewed for longer, since its nodes are reserved or
    drained then. `choice` is there where the request had `alternatives`: 0 is `resources` itself.
    `lost_devices`: UUIDs of GPUs that it holds, and that its nodes have no more.

    Attributes:
        id: Its id, also that of the request it was granted to.
        tenant: Whose it is.
        placement: What is held: one share per node; nothing while it is `queued`.
        fencing: Grows with every grant; hand it to storage that must refuse earlier holders.
        ttl_seconds: It ends this long after its grant or last renewal.
        policy_rule_uri: The policy that placed it.
        reason: Why it is queued, ending or ended, and which machine of it is not heard of.
        notice: That it has to give way, and to whom.
        workload: What runs on it.
        token: Its holder may renew and release.
        project: Whose quota it counts for, within the tenant.
    """

    id: Annotated[str, ESSENTIAL]
    state: Annotated[str, ESSENTIAL, values(*get_args(model.LeaseState))]
    tenant: str
    placement: tuple[Share, ...]
    granted_at: Seconds
    expires_at: Seconds
    fencing: int
    ttl_seconds: float
    policy_rule_uri: str
    choice: int | None = None
    reason: str = ""
    retry_at: Seconds = NEVER
    lost_devices: tuple[str, ...] = ()
    notice: NoticeAnswer | None = None
    workload: Workload | None = None
    token: str = ""
    ttl_max_seconds: float | None = None
    project: str = ""

    @classmethod
    def of(
        cls,
        lease: model.Lease,
        *,
        token: str = "",
        ttl_max_seconds: float | None = None,
        lost: str = "",
    ) -> Self:
        """Return a lease of the core; without its token as the listings show it.

        Args:
            lease: As the core knows it.
            token: For its owner.
            ttl_max_seconds: How long it may last, where it was not renewed for longer.
            lost: Which machine of it is not heard of.
        """
        notice = lease.notice
        return cls(
            lease.id,
            lease.state,
            lease.tenant,
            lease.placement,
            lease.granted_at,
            lease.expires_at,
            lease.fencing,
            lease.terms.ttl_seconds,
            lease.policy.uri,
            lease.choice,
            f"{lease.reason}; {lost}" if lease.reason and lost else lease.reason or lost,
            lease.retry_at or NEVER,
            tuple([device.uuid for device in lease.lost]),
            None if notice is None else NoticeAnswer(notice.by, notice.until, notice.reason),
            None if lease.provision is None else _workload(lease, lease.provision, lost),
            token,
            ttl_max_seconds,
            lease.terms.project,
        )

    @property
    def lasts_seconds(self) -> float:
        """How long it lasts from the grant or renewal on that this tells of."""
        return self.ttl_seconds if self.ttl_max_seconds is None else self.ttl_max_seconds

    def document(self) -> JsonObject:
        """Return the lease as plain JSON values, without its token."""
        document: JsonObject = to_builtins(replace(self, token=""))
        document |= {"reason": self.reason, "retry_at": self.retry_at}
        if self.workload is not None:
            document["workload"] |= {"detail": self.workload.detail}
            document["workload"].setdefault("outcome", None)
        return document

    def __repr__(self) -> str:
        """Return it for people and logs, without its token."""
        shown = (name for name in self.__struct_fields__ if name != "token")
        return f"Lease({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


class ReleasePreview(Struct, frozen=True):
    """The capacity that a release would free, as `reasons` of a dry run.

    Attributes:
        warm: Leases whose workload stays for the next request like theirs.
        then_fit: Requests that have their turn once it has ended, of those that you may see.
        then_fit_others: How many others have.
        stop_seconds: The most that a workload has to end; null: none has any, or it is not known.
    """

    warm: tuple[str, ...]
    then_fit: tuple[str, ...]
    then_fit_others: int
    stop_seconds: float | None


like_dataclasses(NodeName, NoticeAnswer, WorkloadEnd, Workload, Lease)


def _workload(lease: model.Lease, provision: model.Provision, lost: str) -> Workload:
    """Return the final facts about a lease's workload."""
    is_lost = bool(lost) and lease.state in {"starting", "active", "warm"}
    return Workload(
        provision.backend,
        "lost" if is_lost else _phase(lease),
        lease.endpoint,
        lease.attempt,
        provision.attempts_max if provision.on_failure == "requeue" else 1,
        bool(lease.inherited),  # It was running when the lease was granted.
        None if lease.outcome is None else WorkloadEnd.of(lease.outcome),
        lost if is_lost else "",
    )


def _phase(lease: model.Lease) -> str:
    match lease.state:
        case "granted" | "starting":
            return "starting"
        case "active":
            return "ready"
        case "failing" | "queued":
            return "failed"
        case "ending":
            return "stopping"
        case "warm":
            return "warm"
        case "ended":
            last = lease.outcome
            return last.phase if last is not None and last.attempt == lease.attempt else "stopped"
        case _:
            assert_never(lease.state)

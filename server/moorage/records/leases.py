"""The lease and its workload on the wire: in replies, listings, news and clients.

Only `Lease.of` converts the core's lease to this lease. The wire omits fields at their defaults,
and a client that decodes the lease restores them.
"""

from collections.abc import Iterator
from typing import Annotated, Final, Self, assert_never, cast, get_args

from msgspec import Raw, Struct, to_builtins
from msgspec.structs import replace

from moorage import model
from moorage.model import Notice, Share, like_dataclasses
from moorage.records.fields import ESSENTIAL, Seconds, Sparse, values
from moorage.records.json_values import JsonObject

EMPTY: Final = cast("str", Raw(b'""'))
"""The default of a text that replies contain even if it is empty."""
NEVER: Final = 0.0


class NodeName(Struct, frozen=True):
    """The name of a node, with the name of its cluster."""

    cluster_id: str
    node_id: str

    # Programs of users unpack a name as a pair.

    def __iter__(self) -> Iterator[str]:
        """Yield cluster and node, for `cluster, node = name`."""
        return iter((self.cluster_id, self.node_id))

    def __getitem__(self, place: int) -> str:
        """Return cluster or node by its index."""
        return tuple(self)[place]

    def __eq__(self, other: object) -> bool:
        """Compare with another name, or with a pair."""
        return isinstance(other, NodeName | tuple) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class WorkloadEnd(Struct, frozen=True):
    """The end of one start of a workload, unless the server ended it.

    Attributes:
        attempt: The number of the start, from 1.
        phase: `succeeded` or `failed`.
        exit_code: The exit code of a process; negative: a signal's number; null: it is not known.
        log_tail: The last lines of output, if the workload failed.
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
    """The workload of a lease.

    Attributes:
        backend: The backend that starts the workload.
        phase: From `pending`, `pulling` and `starting` over `ready` to `succeeded` or `failed`;
            `lost` while the server has no contact with one of its machines: the workload may still
            run.
        endpoint: The workload's network address; empty if it has none, or none yet.
        attempt: The number of this start, from 1.
        attempts_max: The most starts, if each one fails.
        warm: Whether the workload was running when the lease was granted.
        outcome: The end of the last start that the server did not end.
        detail: The progress of the workload's start, or the machine that is lost.
    """

    backend: str
    phase: str
    endpoint: str
    attempt: int
    attempts_max: int
    warm: bool = False
    outcome: WorkloadEnd | None = None
    detail: str = ""


class Lease(Sparse, frozen=True):
    """A lease. Only the reply to its owner has its `token`.

    The lease ends at `expires_at`, by the server's clock, unless it is renewed. A `queued` lease
    that pauses after a failure is placed again at `retry_at`; 0 and absent: no pause.
    `ttl_max_seconds` is present if the lease can last no longer, since a reservation or drain of
    its nodes begins then. `choice` is present if the request had `alternatives`: 0 is `resources`
    itself. `lost_devices`: UUIDs of GPUs of the lease that are no longer on its nodes.

    Attributes:
        id: The id of the lease, and of the request that it was granted to.
        tenant: The owner of the lease.
        placement: The resources that the lease holds: one share per node; empty while it is
            `queued`.
        fencing: Grows with every grant; storage that knows this number can refuse earlier holders.
        ttl_seconds: The lease ends this long after its grant or last renewal.
        policy_rule_uri: The policy that placed the lease.
        reason: Why the lease is queued, ending or ended, or which of its machines is lost.
        notice: The notice that the lease must end for another request, if any.
        workload: The workload on the placement.
        token: The secret that lets a client renew and release the lease.
        project: The tenant's project to whose use the lease is added.
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
    notice: Notice | None = None
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
        """Convert a lease of the core; without `token`, the result is as in the listings.

        Args:
            lease: The lease of the core.
            token: The lease's token, for replies to its owner.
            ttl_max_seconds: How long the lease may last, if a reservation or drain limits it.
            lost: The machine with which the server has no contact, in a sentence.
        """
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
            lease.notice,
            None if lease.provision is None else _workload(lease, lease.provision, lost),
            token,
            ttl_max_seconds,
            lease.terms.project,
        )

    @property
    def lasts_seconds(self) -> float:
        """How long the lease lasts after its grant or last renewal."""
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
        """Return the lease for people and logs, without its token."""
        shown = (name for name in self.__struct_fields__ if name != "token")
        return f"Lease({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


class ReleasePreview(Struct, frozen=True):
    """The capacity that a release would free, as `reasons` of a dry run.

    Attributes:
        warm: Leases whose workload stays, for warm reuse.
        then_fit: Requests that would be served after the release, of those that you may see.
        then_fit_others: The number of other tenants' requests that would be served.
        stop_seconds: The longest time that a workload may take to end; null: none, or not known.
    """

    warm: tuple[str, ...]
    then_fit: tuple[str, ...]
    then_fit_others: int
    stop_seconds: float | None


like_dataclasses(NodeName, WorkloadEnd, Workload, Lease)


def _workload(lease: model.Lease, provision: model.Provision, lost: str) -> Workload:
    """Return the workload of a lease of the core."""
    is_lost = bool(lost) and lease.state in {"starting", "active", "warm"}
    return Workload(
        provision.backend,
        "lost" if is_lost else _phase(lease),
        lease.endpoint,
        lease.attempt,
        provision.attempts_max if provision.on_failure == "requeue" else 1,
        bool(lease.inherited),  # Whether the workload ran at the grant.
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

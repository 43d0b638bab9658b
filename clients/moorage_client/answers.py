"""What a server's replies mean: answers and leases, read from the JSON of the socket.

Called by the clients and the command line. Unknown keys are ignored, so that a newer server can
say more; a key of the wrong kind is an error that names it.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import msgspec

from moorage.model import ClusterId, NodeId, Outcome, Placement, Share
from moorage.protocol.replies import (
    ErrorObject,
    LeaseObject,
    OutcomeObject,
    Reply,
    ShareObject,
    WorkloadObject,
)
from moorage_client.errors import ProtocolViolated, RequestRefused, refusal

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Workload:
    """What runs on a lease, as its holder sees it.

    Args:
        backend: What starts it.
        phase: `pending`, `pulling`, `starting`, `ready`, `stopping`, `stopped`, `succeeded` or
            `failed`.
        endpoint: Where it is reached; empty where nowhere, or not yet.
        attempt: Which start of it this is, from 1.
        attempts_max: Starts that there are in all, should it fail.
        detail: What is going on while it starts; often empty.
        outcome: How the last start that came to an end by itself did; None where none has.

    """

    backend: str
    phase: str
    endpoint: str = ""
    attempt: int = 1
    attempts_max: int = 1
    detail: str = ""
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease, as its holder sees it.

    Args:
        id: Its id, also that of the request it was granted to.
        state: `granted`, `starting`, `active`, `failing`, `queued`, `ending` or `ended`.
        tenant: Whose it is.
        placement: What is held: one share per node; nothing while it is `queued`.
        expires_at: When it ends unless it is renewed, in seconds since the epoch, by the
            server's clock.
        fencing: Grows with every grant; hand it to storage that must refuse earlier holders.
        token: Its holder may renew and release; empty in lists and to strangers.
        granted_at: When it was granted, in seconds since the epoch.
        ttl_seconds: It ends this long after its grant or last renewal.
        policy_rule_uri: The policy that placed it.
        reason: Why it is queued, ending or ended; empty in the other states.
        retry_at: While it is `queued` and pauses after a failure: when it is tried again, in
            seconds since the epoch; 0 where it does not pause.
        workload: What runs on it; None without `provision`.
        choice: Which of the request's alternatives it is, from 0; None: there were none.
        ttl_max_seconds: How long it lasts from the grant or renewal on, where that is less than
            requested, since its nodes are reserved or drained then; else None.

    """

    id: str
    state: str
    tenant: str
    placement: Placement
    expires_at: float
    fencing: int
    token: str = field(default="", repr=False)
    granted_at: float = 0.0
    ttl_seconds: float = 0.0
    policy_rule_uri: str = ""
    reason: str = ""
    retry_at: float = 0.0
    workload: Workload | None = None
    choice: int | None = None
    ttl_max_seconds: float | None = None

    @property
    def lasts_seconds(self) -> float:
        """How long it lasts from the grant or renewal on that this tells of."""
        return self.ttl_seconds if self.ttl_max_seconds is None else self.ttl_max_seconds

    def document(self) -> dict[str, Any]:
        """Return it as plain JSON values, without its token."""
        document = asdict(self)
        del document["token"]
        for name in ("choice", "ttl_max_seconds"):
            if document[name] is None:
                del document[name]
        if self.workload is None:
            del document["workload"]
        elif self.workload.outcome is not None:
            nodes = self.workload.outcome.nodes
            named = [{"cluster_id": cluster, "node_id": node} for cluster, node in nodes]
            document["workload"]["outcome"]["nodes"] = named
        return document


@dataclass(frozen=True, slots=True)
class Answer:
    """A yes.

    Args:
        data: What the policy returned, as plain JSON values.
        lease: The lease, if one was requested.
        warnings: What the server did differently from what the request may have meant.
        reasons: Why this placement, if the request had `explain`.
        request: The server's id of the request, for `why`.
        policy_rule_uri: The version that answered, where the request named an alias.

    """

    data: Any
    lease: Lease | None = None
    warnings: tuple[str, ...] = ()
    reasons: Mapping[str, Any] | None = None
    request: str = ""
    policy_rule_uri: str = ""


class UnreadableError(ValueError):
    """A reply is JSON, but not what the protocol promises. Stops at the client's edge."""


def read_answer(reply: Reply) -> Answer:
    """Return the answer in a success reply."""
    return Answer(
        data=reply.data,
        lease=None if reply.lease is None else read_lease(reply.lease),
        warnings=reply.warnings,
        reasons=reply.reasons,
        request=reply.request,
        policy_rule_uri=reply.policy_rule_uri,
    )


def read_refusal(reply: Reply) -> RequestRefused:
    """Return the error that a failure reply stands for."""
    error = reply.error or ErrorObject()
    known = {"code", "reason", "field", "expected"}
    return refusal(
        error.code,
        error.reason or "the server gave no reason",
        field=error.field,
        expected=error.expected,
        details={name: value for name, value in reply.details.items() if name not in known},
        request=reply.request,
    )


def read_lease(document: Any) -> Lease:
    """Return the lease that a reply or a JSON object describes.

    Raises:
        UnreadableError: The object is not what the protocol promises.

    """
    try:
        found = msgspec.convert(document, LeaseObject)
    except msgspec.ValidationError as error:
        raise UnreadableError(f"this is not a lease ({error}): {_start(document)}") from error
    return Lease(
        id=found.id,
        state=found.state,
        tenant=found.tenant,
        placement=tuple(_share(share) for share in found.placement),
        expires_at=found.expires_at,
        fencing=found.fencing,
        token=found.token,
        granted_at=found.granted_at,
        ttl_seconds=found.ttl_seconds,
        policy_rule_uri=found.policy_rule_uri,
        reason=found.reason,
        retry_at=found.retry_at,
        workload=None if found.workload is None else _workload(found.workload),
        choice=found.choice,
        ttl_max_seconds=found.ttl_max_seconds,
    )


def read_as(kind: type[T], document: Any) -> T:
    """Return a document as what it should be; fields that are unknown are left out.

    Raises:
        UnreadableError: It is something else; the error names the field.

    """
    try:
        return msgspec.convert(document, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise UnreadableError(f"{error}, in {_start(document)}") from error


def _start(document: Any) -> str:
    """Return how a document begins, for messages."""
    try:
        return str(document)[:200]
    except (RecursionError, ValueError):  # Too deep, or a number that is too long to be written.
        return "what is too large to be shown"


def read_object(value: Any) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        UnreadableError: It is not one.

    """
    if not isinstance(value, dict):
        raise UnreadableError(f"expected an object, got {_start(value)}")
    return value


def _share(share: ShareObject) -> Share:
    return Share(
        cluster_id=ClusterId(share.cluster_id),
        node_id=NodeId(share.node_id),
        gpus=share.gpus,
        gpu_milli=share.gpu_milli,
        cpu_milli=share.cpu_milli,
        memory_mib=share.memory_mib,
    )


def _workload(found: WorkloadObject) -> Workload:
    return Workload(
        backend=found.backend,
        phase=found.phase,
        endpoint=found.endpoint,
        attempt=found.attempt,
        attempts_max=found.attempts_max,
        detail=found.detail,
        outcome=None if found.outcome is None else _outcome(found.outcome),
    )


def _outcome(found: OutcomeObject) -> Outcome:
    return Outcome(
        attempt=found.attempt,
        phase="succeeded" if found.phase == "succeeded" else "failed",
        detail=found.detail,
        at=found.at,
        nodes=tuple((node.cluster_id, node.node_id) for node in found.nodes),
        exit_code=found.exit_code,
        log_tail=found.log_tail,
    )


def read_flushed(value: Any) -> list[str]:
    """Return the ids of the leases that `flush` ends."""
    return read_as(list[str], read_object(value).get("flushed"))


def read_from(url: str, read: Callable[[Any], T], document: Any) -> T:
    """Return what a server said, as `read` understands it.

    Raises:
        ProtocolViolated: It cannot be understood.

    """
    try:
        return read(document)
    except UnreadableError as error:
        raise ProtocolViolated(url, f"sent what the protocol does not know: {error}") from error

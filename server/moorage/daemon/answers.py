"""Turns the core's answers into replies of the protocol. No other module knows both."""

from collections.abc import Sequence

from msgspec.structs import replace

from moorage.backends.base import WorkloadReport
from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Advice, Information, LeaseNews, Response
from moorage.model import Lease
from moorage.protocol import replies
from moorage.protocol.faults import ServiceError
from moorage.protocol.replies import MessageId
from moorage.records.json_values import JsonValue
from moorage.records.leases import EMPTY
from moorage.records.leases import Lease as LeaseAnswer


def encode(
    answer: Response,
    *,
    message_id: MessageId = None,
    request: str = "",
    warnings: Sequence[str] = (),
    version: str = "",
    workload: WorkloadReport | None = None,
    token: str = "",
    stamp: replies.Shared | None = None,
) -> bytes:
    """Write an answer as one reply.

    Args:
        answer: The answer of the core.
        message_id: The request's own `id`, echoed.
        request: The server's id of the request, for `why`; empty if there is none.
        warnings: Sentences that the caller should know beside the answer.
        version: The version of the policy that decided, where the request named an alias.
        workload: The backend's last report on the lease's workload, if it starts or runs.
        token: The token of a lease; empty where it is not known.
        stamp: The last fact that the answer reflects, and the time.

    Returns:
        JSON text.
    """
    shared: replies.Shared = {"id": message_id, "warnings": tuple(warnings)}
    if stamp:
        shared |= stamp
    if type(answer) is not Information:
        shared |= {"request": request, "policy_rule_uri": version}
    match answer:
        case Advice(data, reasons):
            shared |= {"reasons": reasons}
            return replies.success(data, **shared)
        case LeaseNews():
            lease, data = answer.lease, answer.data
            shared["reasons"] = answer.reasons
            shared["lease"] = lease_answer(
                lease,
                workload,
                token=token if answer.owner else "",
                ttl_max_seconds=answer.ttl_max_seconds,
                lost=answer.lost,
            )
            return replies.success(placement(lease) if data is None else data, **shared)
        case Information(data):
            return replies.success(data, **shared)
        case Refusal(code, reason, field, expected, details):
            return replies.failure(
                code, reason, field=field, expected=expected, details=details, **shared
            )


def refusal_of(error: ServiceError) -> Refusal:
    """Return the refusal of the core for an error of a service."""
    return Refusal(error.code, error.reason, error.field, error.expected, error.details)


def error_of(
    no: Refusal, *, reason: str = "", field: str | None = None, status: int = 0
) -> ServiceError:
    """Return the service error for the core's refusal; the other arguments replace its parts."""
    return ServiceError(
        no.code,
        reason or no.reason,
        field=no.field if field is None else field,
        expected=no.expected,
        details=no.details,
        status=status,
    )


def lease_answer(
    lease: Lease,
    workload: WorkloadReport | None = None,
    *,
    token: str = "",
    ttl_max_seconds: float | None = None,
    lost: str = "",
) -> LeaseAnswer:
    """Return a lease in the form of the protocol.

    Args:
        lease: The lease, as the core knows it.
        workload: The backend's last report on the workload; until the workload runs, it has more
            than the core knows.
        token: The token of the lease, for its owner.
        ttl_max_seconds: Seconds that the lease may last, if the client requested more; else None.
        lost: The machine of the lease that stopped reporting, and since when; or empty.
    """
    answer = LeaseAnswer.of(lease, token=token, ttl_max_seconds=ttl_max_seconds, lost=lost)
    known = answer.workload
    if workload is None or known is None:
        return answer
    if lease.state == "starting" and not workload.phase.over:
        known = replace(known, phase=workload.phase, detail=workload.detail or EMPTY)
    if lease.state == "active":
        known = replace(known, endpoint=lease.endpoint or workload.endpoint)
    return replace(answer, workload=known)


def placement(lease: Lease) -> JsonValue:
    """Return the placement of a lease as a policy would have proposed it."""
    return lease.placement[0] if len(lease.placement) == 1 else lease.placement

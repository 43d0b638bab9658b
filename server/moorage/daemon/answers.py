"""From the core's answers to the replies of the wire: the one place where the two meet."""

from collections.abc import Mapping, Sequence
from typing import Any

from moorage.backends.base import WorkloadReport
from moorage.core.reports import explain
from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Advice, Information, LeaseNews, Response
from moorage.model import Lease
from moorage.protocol import replies
from moorage.protocol.faults import ServiceError
from moorage.protocol.replies import MessageId


def encode(
    answer: Response,
    *,
    message_id: MessageId = None,
    request: str = "",
    warnings: Sequence[str] = (),
    version: str = "",
    workload: WorkloadReport | None = None,
    token: str = "",
) -> bytes:
    """Write an answer as one reply.

    Args:
        answer: What the core answered.
        message_id: The request's own `id`, echoed.
        request: The server's id of the request, for `why`; empty where there is none.
        warnings: What the caller should know beside the answer.
        version: The version of the policy that was asked, where the request named an alias.
        workload: What its backend last said of the workload of a lease, where that starts or runs.
        token: The token of a lease; empty where it is not known.

    Returns:
        JSON text.

    """
    match answer:
        case Advice(data, reasons):
            return replies.success(
                data,
                id=message_id,
                request=request,
                warnings=warnings,
                reasons=reasons,
                policy_rule_uri=version,
            )
        case LeaseNews(lease, data, reasons, owner):
            told: dict[str, Any] = {"token": token} if owner and token else {}
            if answer.ttl_max_seconds is not None:
                told["ttl_max_seconds"] = answer.ttl_max_seconds
            return replies.success(
                placement(lease) if data is None else data,
                id=message_id,
                request=request,
                warnings=warnings,
                reasons=reasons,
                lease=lease_object(lease, workload) | told,
                policy_rule_uri=version,
            )
        case Information(data):
            return replies.success(data, id=message_id, warnings=warnings)
        case Refusal():
            return refuse(
                answer, message_id=message_id, request=request, warnings=warnings, version=version
            )


def refuse(
    refusal: Refusal,
    *,
    message_id: MessageId = None,
    request: str = "",
    warnings: Sequence[str] = (),
    version: str = "",
) -> bytes:
    """Write a refusal as a failure reply."""
    details: Mapping[str, Any] = refusal.details
    return replies.failure(
        refusal.code,
        refusal.reason,
        field=refusal.field,
        expected=refusal.expected,
        details=details,
        id=message_id,
        request=request,
        warnings=warnings,
        policy_rule_uri=version,
    )


def refusal_of(error: ServiceError) -> Refusal:
    """Return what a service's "no" says, as the core's kind of "no"."""
    return Refusal(error.code, error.reason, error.field, error.expected, error.details)


def lease_object(lease: Lease, workload: WorkloadReport | None = None) -> dict[str, Any]:
    """Return a lease as the wire has it, without its token.

    Args:
        lease: As the core knows it.
        workload: What its backend last said of its workload; more than the core knows as long as
            that starts.

    """
    row = explain.lease_row(lease)
    if workload is not None and "workload" in row:
        known = row["workload"]
        if lease.state == "starting" and not workload.phase.over:
            known |= {"phase": workload.phase, "detail": workload.detail}
        if lease.state == "active":
            known["endpoint"] = lease.endpoint or workload.endpoint
    return row


def placement(lease: Lease) -> Any:
    """Return the placement of a lease as a policy would have proposed it."""
    shares = [explain.share_row(share) for share in lease.placement]
    return shares[0] if len(shares) == 1 else shares

"""From the core's answers to the replies of the wire: the one place where the two meet."""

from collections.abc import Mapping, Sequence
from typing import Any

from moorage.core import questions
from moorage.core.words import Advice, Answer, LeaseNews, Refusal, Told
from moorage.model import Lease
from moorage.protocol import replies
from moorage.protocol.faults import ServiceError

MessageId = str | int | None


def encode(
    answer: Answer,
    *,
    message_id: MessageId = None,
    request: str = "",
    warnings: Sequence[str] = (),
    version: str = "",
) -> bytes:
    """Write an answer as one reply.

    Args:
        answer: What the core answered.
        message_id: The request's own `id`, echoed.
        request: The server's id of the request, for `why`; empty where there is none.
        warnings: What the caller should know beside the answer.
        version: The version of the rule that was asked, where the request named an alias.

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
            return replies.success(
                placement(lease) if data is None else data,
                id=message_id,
                request=request,
                warnings=warnings,
                reasons=reasons,
                lease=questions.lease_row(lease) | ({"token": lease.token} if owner else {}),
                policy_rule_uri=version,
            )
        case Told(data):
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


def placement(lease: Lease) -> Any:
    """Return the placement of a lease as a rule would have proposed it."""
    shares = [questions.share_row(share) for share in lease.placement]
    return shares[0] if len(shares) == 1 else shares

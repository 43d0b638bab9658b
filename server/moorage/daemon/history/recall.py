"""Answers `why` about requests that the core has forgotten, from the ledger's history."""

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import structlog

from moorage.core.reports import explain
from moorage.core.state.facts import Dequeued, Ended, Finished, Granted, Queued, Refusal, Requeued
from moorage.core.turns.effects import Information, Recall, Response
from moorage.daemon.history.decisions import subject_of
from moorage.ledger.base import LedgerEntry, LedgerError, LedgerHistory
from moorage.model import Code
from moorage.records.json_values import JsonObject
from moorage.records.leases import Lease as LeaseAnswer
from moorage.records.leases import WorkloadEnd

log = structlog.get_logger("moored")


async def recall(question: Recall, ledger: LedgerHistory) -> Response:
    """Return the story of a lease or request from the ledger.

    If a fact cannot be read, only this question is refused.
    """
    try:
        entries = await ledger.history(question.subject)
        since = await ledger.history_start()
    except LedgerError as error:
        log.warning("ledger_read_failed", finding=str(error), subject=question.subject)
        reason = f"The ledger's facts about {question.subject} cannot be read: {error}"
        return Refusal(Code.UNAVAILABLE, reason, "request")
    return answer(question, entries, since)


def answer(  # One case per fact.
    question: Recall, entries: Sequence[LedgerEntry], since: float | None
) -> Response:
    """Return the story of a lease or request from its entries.

    Args:
        question: The question, with the tenant that asks.
        entries: The facts about the subject, oldest first.
        since: Time of the oldest remaining fact; None: no fact was pruned.

    Returns:
        The story; a refusal if no entry exists, or the subject belongs to another tenant.
    """
    owners = [each.tenant for entry in entries if (each := subject_of(entry.fact)) is not None]
    if not owners or not (question.sees_all or question.tenant in owners):
        return _unknown(question, since)
    story: JsonObject = {"request": question.subject, "history": []}
    for entry in entries:
        fact = entry.fact
        kind = type(fact).__name__.lower()
        story["history"].append({"seq": entry.seq, "at": entry.at, "fact": kind})
        match fact:
            case Queued():
                story |= {"state": "waiting"}
            case Granted(lease):
                story |= {"state": lease.state, "lease": LeaseAnswer.of(lease)}
                story["reason"] = explain.grant_reason(lease)
            case Finished(_, outcome):
                story |= {"outcome": WorkloadEnd.of(outcome)}
            case Requeued(_, _, reason):
                story |= {"state": "queued", "reason": reason}
            case Ended(_, _, reason):
                story |= {"state": "ended", "reason": reason}
            case Dequeued(_, _, refusal):
                story |= {"state": "refused", **explain.refusal_object(refusal)}
            case _:  # The fact itself says all.
                story["history"][-1] |= msgspec.to_builtins(fact)
    return Information(story)


def _unknown(question: Recall, since: float | None) -> Refusal:
    what = "no request with this id was granted or queued, and it is not among the last decisions"
    reason = f"Nothing is known about {question.subject}: {what}."
    if since is not None:
        oldest = datetime.fromtimestamp(since, UTC).isoformat(timespec="seconds")
        reason += f" History before {oldest} was pruned."
    return Refusal(Code.UNKNOWN_REQUEST, reason, "request", "the id of a request or lease")

"""Judges each part of a policy's answer to a request that combines several demands.

A part that cannot be granted is replaced by the reason; the other parts stay valid. A gang is
granted whole or not at all; `verification` judges the gang.
"""

from moorage.core.fit.verification import Unsound, verify
from moorage.core.state import refusals
from moorage.core.state.facts import Refusal
from moorage.model import Ask, Cluster, ClusterId
from moorage.policy import Fleet, ProposalError, ProposedShare, has_empty_parts, parse_proposal
from moorage.records.json_values import JsonValue


def with_reasons(
    ask: Ask, value: JsonValue, fleet: Fleet, clusters: dict[ClusterId, Cluster]
) -> JsonValue:
    """Return the proposed parts, each replaced by its refusal if it can never be granted.

    Args:
        ask: The request.
        value: The policy's value; only lists with parts that name no cluster are changed.
        fleet: The fleet as it is now.
        clusters: The inventory.
    """
    if not has_empty_parts(value, ask.demand):
        return value
    taken: list[ProposedShare] = []
    judged: list[JsonValue] = []
    for part in value:
        refusal = _refusal(ask, part, taken, fleet, clusters)
        judged.append(part if refusal is None else {"error": refusal.reason})
    return judged


def _refusal(
    ask: Ask,
    part: JsonValue,
    taken: list[ProposedShare],
    fleet: Fleet,
    clusters: dict[ClusterId, Cluster],
) -> Refusal | None:
    """Return why a part never fits beside the parts in `taken`; else add the part to `taken`."""
    try:
        wishes = parse_proposal(part, ask.demand)
    except ProposalError as error:
        return refusals.malformed(error)
    if not wishes:
        return None
    verdict = verify(ask, wishes, fleet, clusters)
    if isinstance(verdict, Unsound):
        return verdict.refusal
    (wish,) = wishes
    if not all(wish.lies_beside(each) for each in taken):
        where = f"“{wish.node_id}”"
        return refusals.unsound("gpus", "GPUs of its own", f"an earlier part names {where}, too")
    taken.append(wish)
    return None

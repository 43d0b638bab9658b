"""Judges each part of a policy's answer to a request that combines several demands.

A part that cannot be granted is replaced by the reason; the other parts stay valid. A gang is
granted whole or not at all; `verification` judges the gang.
"""

from moorage.core.fit.verification import Unsound, verify
from moorage.core.state import refusals
from moorage.core.state.facts import Refusal
from moorage.model import Ask, Cluster, ClusterId
from moorage.policy import Fleet, ProposalError, ProposedShare, has_empty_parts, parse_proposal
from moorage.policy.proposal import SHARES_MAX
from moorage.records.json_values import JsonValue


def with_reasons(
    ask: Ask, value: JsonValue, fleet: Fleet, clusters: dict[ClusterId, Cluster]
) -> JsonValue:
    """Return the proposed parts, each replaced by its refusal if it can never be granted.

    Args:
        ask: The request.
        value: The policy's value; returned unchanged if it is no list of parts, or if no part can
            be granted.
        fleet: The fleet as it is now.
        clusters: The inventory.
    """
    several = ask.demand is None and isinstance(value, list)
    if not (several or has_empty_parts(value, ask.demand)) or len(value) > SHARES_MAX:
        return value
    taken: list[ProposedShare] = []
    judged: list[JsonValue] = []
    for part in value:
        refusal = _refusal(ask, part, taken, fleet, clusters)
        judged.append(part if refusal is None else {"error": refusal.reason})
    return judged if taken else value


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
        found = f"an earlier part names “{wish.node_id}”, too"
        return refusals.unsound("gpus", "other GPUs, with equal gpu_milli", found)
    taken.append(wish)
    return None

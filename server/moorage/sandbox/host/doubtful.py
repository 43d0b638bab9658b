"""Is an answer of a worker one that its policy can have given? Used by `pool`.

An answer that nothing can come of is the fault of the policy or of the worker; the evaluation is
done once more where the daemon is, which shows of which. What passes is verified all the same.
"""

from moorage.core.fit.verification import Stale, Unsound, verify
from moorage.model import Cluster
from moorage.policy import Fleet, ProposalError, parse_proposal
from moorage.records.json_values import JsonValue
from moorage.sandbox.host.work import Work


def doubtful(work: Work, value: JsonValue, fleet: Fleet) -> bool:
    """Return whether an answer would be refused in any state of the fleet."""
    guard = work.code.guard
    if guard is not None and work.judged and guard.judge(value) is not None:
        return True
    ask = work.consult.ask if work.consult is not None else None
    if ask is None or work.consult is None or (ask.terms is None and ask.demand is None):
        return False
    try:
        shares = parse_proposal(value, ask.demand)
    except ProposalError:
        return True
    if not shares:
        return False
    named = {share.cluster_id for share in shares}
    known = {name: Cluster(name, ()) for name in named if fleet.part(name) is not None}
    verdict = verify(ask, shares, fleet, known, work.consult.reserved)
    seen = work.fleet_version == fleet.version  # It was taken already when the policy began.
    return isinstance(verdict, Unsound) or (isinstance(verdict, Stale) and seen)

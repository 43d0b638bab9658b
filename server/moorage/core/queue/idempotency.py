"""Compares a repeated request with the first one of the same idempotency key.

The allocator is the only caller.
"""

from moorage.core.queue import alternatives
from moorage.core.state import refusals
from moorage.core.state.facts import Refusal
from moorage.model import AntiAffinity, Ask, Demand, Lease, Placement, RequestId

Gist = tuple[object, ...]


def mismatch(
    ask: Ask, first: RequestId, earlier: Gist | None, lease: Lease | None
) -> Refusal | None:
    """Return why a repeated request differs from the first one, or None if it does not.

    Args:
        ask: The repeated request.
        first: The id of the first request.
        earlier: The gist of the first request; None if the core no longer knows it.
        lease: The lease that the first request got; None if the core knows no lease.
    """
    if earlier is not None:
        same = earlier == gist(ask)
    else:
        same = lease is None or _could_have_got(ask, lease)
    if same:
        return None
    key = ask.terms.idempotency_key if ask.terms else ""
    return refusals.key_of_another(key, first)


def gist(ask: Ask) -> Gist:
    """Return the fields in which two requests with one idempotency key must agree."""
    return ask.policy.uri, ask.alternatives or ask.demand, ask.provision, _apart(ask)


def _apart(of: Ask | Lease) -> AntiAffinity | None:
    return of.terms.anti_affinity if of.terms is not None else None


def _could_have_got(ask: Ask, lease: Lease) -> bool:
    """Return whether a request like `ask` could have been granted `lease`."""
    if lease.policy.uri != ask.policy.uri or _apart(lease) != _apart(ask):
        return False
    if ask.provision is not None and ask.provision != lease.provision:
        return False
    # A lease that ended while waiting for another place has no placement to compare.
    if not lease.placement:
        return True
    return any(_is_met(each.demand, lease.placement) for each in alternatives.each(ask))


def _is_met(demand: Demand | None, placement: Placement) -> bool:
    return demand is None or (
        len(placement) == demand.nodes
        and all(len(share.gpus) == demand.gpus for share in placement)
        and all(share.cpu_milli >= demand.cpu_milli for share in placement)
        and all(share.memory_mib >= demand.memory_mib for share in placement)
        and all(not share.gpus or share.gpu_milli >= demand.gpu_milli for share in placement)
    )

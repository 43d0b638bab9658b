"""Anti-affinity: finds the nodes that a request may not use because leases of its group are near.

`queue.exclusions` excludes these nodes, and lists the leases in refusals.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from msgspec.structs import replace

from moorage.core.state.facts import Refusal
from moorage.core.state.state import State
from moorage.model import Ask, Code, Lease, Nodes

LEASES_TOLD_MAX: Final = 20
"""Maximum leases of the request's group that a refusal lists."""


def near(state: State, ask: Ask) -> Nodes:
    """Return the nodes where a lease of this request would be too close to leases of its group.

    Two leases are too close if they share a node, rack or zone and one of them forbids that. A node
    without a rack or zone shares its rack or zone with no other node.
    """
    wanted = ask.terms.anti_affinity if ask.terms is not None else None
    if wanted is None:
        return ()
    fleet, found = state.fleet, set[tuple[str, str]]()
    for lease in _others(state, ask):
        assert lease.terms.anti_affinity is not None
        for share in lease.placement:
            row = fleet.row(share.cluster_id, share.node_id)
            found.add((share.cluster_id, share.node_id))
            for topology in {wanted.topology, lease.terms.anti_affinity.topology} - {"node"}:
                groups = fleet.rack if topology == "rack" else fleet.zone
                if row is not None and groups[row] >= 0:
                    rows = np.flatnonzero(groups == groups[row]).tolist()
                    found.update(fleet.node_ids[each] for each in rows)
    return tuple(sorted(found))


def add_reasons(refusal: Refusal, state: State, ask: Ask) -> Refusal:
    """Add to a refusal the leases that exclude nodes by anti-affinity."""
    nodes = len(near(state, ask))
    if not nodes or refusal.code is not Code.NO_CAPACITY:
        return refusal
    assert ask.terms is not None
    assert ask.terms.anti_affinity is not None
    group = ask.terms.anti_affinity.group
    leases = [lease.id for lease in _others(state, ask)]
    are = "is" if nodes == 1 else "are"
    reason = f"{refusal.reason[:-1]}; {nodes} {are} too near to leases of your group “{group}”."
    group_details = {"group": group, "nodes": nodes, "leases": leases[:LEASES_TOLD_MAX]}
    return replace(
        refusal, reason=reason, details={**refusal.details, "anti_affinity": group_details}
    )


def _others(state: State, ask: Ask) -> Iterator[Lease]:
    """Yield the other leases of a request's group; a warm lease belongs to no group."""
    assert ask.terms is not None
    assert ask.terms.anti_affinity is not None
    for name in state.groups.of.get((ask.tenant, ask.terms.anti_affinity.group), ()):
        if state.leases[name].state != "warm":
            yield state.leases[name]

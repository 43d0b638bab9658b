"""Where a backend can start something, of the nodes that a request may go to.

Admission asks it for requests with a `provision`: a backend that starts on certain nodes only, as
`local` does on its own machine, would refuse what a policy put anywhere else.
"""

from collections.abc import Collection
from typing import Final

import numpy as np

from moorage.model import ClusterId, Demand, NodeId, Nodes
from moorage.policy import NEVER, Fleet, Misfit

AVOIDED_MAX: Final = 1024
"""Nodes named one by one beside those; of larger clusters, policies see all."""


def within_reach(
    fleet: Fleet,
    names: Collection[str],
    candidates: tuple[ClusterId, ...] | None,
    demand: Demand | None,
) -> tuple[tuple[ClusterId, ...] | None, Nodes]:
    """Return the candidates that have such nodes, and their other nodes, to be left out.

    Args:
        fleet: As it is now.
        names: Of the nodes that the backend starts on; none where that is any.
        candidates: Of the request; None for all. They stay as they are where none has such a node
            that could hold it: the backend then says what it would need.
        demand: What such a node must have, when it is empty.

    """
    if not names:
        return candidates, ()
    known = fleet.cluster_ids if candidates is None else candidates
    rows = {
        row: cluster
        for cluster in known
        for name in names
        if (row := fleet.row(cluster, name)) is not None
    }
    if rows and demand is not None:
        misfits = fleet.misfits(demand, np.fromiter(rows, np.intp))
        if not ((misfits == Misfit.FITS) | (misfits > NEVER)).any():
            return candidates, ()
    here = tuple(map(ClusterId, dict.fromkeys(rows.values())))
    if not here:
        return candidates, ()
    others = [
        fleet.node_ids[row]
        for cluster in here
        for row in (fleet.cluster == fleet.cluster_ids.index(cluster)).nonzero()[0].tolist()
        if row not in rows
    ]
    avoided = tuple((ClusterId(cluster), NodeId(node)) for cluster, node in others)
    return here, avoided if len(avoided) <= AVOIDED_MAX else ()

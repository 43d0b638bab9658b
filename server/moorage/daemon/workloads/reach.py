"""Finds the candidate nodes on which a backend can start a workload.

Admission calls this module for requests with a `provision`: a backend that starts on certain nodes
or in certain clusters only, as `local` does on its own machine, would refuse a workload that a
policy placed anywhere else, after the lease was granted.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from moorage.backends.base import NO_NODE, Support
from moorage.core.state.facts import Refusal
from moorage.model import ClusterId, Code, Demand, NodeId, Nodes
from moorage.policy import NEVER, Fleet, Misfit

AVOIDED_MAX: Final = 1024
"""Maximum unusable nodes that a request is to avoid; beyond this, policies see all nodes."""
NAMES_MAX: Final = 5
"""Maximum names of nodes or clusters that a refusal lists."""
_ACCOUNTS_ONLY: Final = "memory"
"""The backend that starts nothing, and therefore never replaces another one."""
_Candidates = tuple[ClusterId, ...] | None


def within_reach(
    fleet: Fleet, support: Support, candidates: _Candidates, demand: Demand | None
) -> tuple[_Candidates, Nodes] | None:
    """Return the candidates with usable nodes, and their unusable nodes, which are to be avoided.

    Args:
        fleet: The present fleet.
        support: The clusters and nodes on which the backend can start workloads.
        candidates: The candidates of the request; None: all clusters.
        demand: The demand that an empty node must fit to be usable.

    Returns:
        None if no candidate has a usable node.
    """
    known = fleet.cluster_ids if candidates is None else candidates
    if not known:  # The core says so.
        return candidates, ()
    if support.clusters:
        known = tuple(ClusterId(each) for each in known if each in support.clusters)
        if not known:
            return None
    if not support.nodes:
        return (tuple(map(ClusterId, known)) if support.clusters else candidates), ()
    rows = {
        row: cluster
        for cluster in known
        for name in support.nodes
        if (row := fleet.row(cluster, name)) is not None
    }
    if rows and demand and not _could_hold(fleet, demand, np.fromiter(rows, np.intp)):
        codes = [fleet.cluster_ids.index(each) for each in known if each in fleet.cluster_ids]
        anywhere = _could_hold(fleet, demand, np.isin(fleet.cluster, codes).nonzero()[0])
        return None if anywhere else (candidates, ())  # The core says what would fit.
    here = tuple(map(ClusterId, dict.fromkeys(rows.values())))
    if not here:
        return None
    others = [
        fleet.node_ids[row]
        for cluster in here
        for row in (fleet.cluster == fleet.cluster_ids.index(cluster)).nonzero()[0].tolist()
        if row not in rows
    ]
    avoided = tuple((ClusterId(cluster), NodeId(node)) for cluster, node in others)
    return here, avoided if len(avoided) <= AVOIDED_MAX else ()


def _could_hold(fleet: Fleet, demand: Demand, rows: npt.NDArray[np.intp]) -> bool:
    """Return whether one of the nodes could fit a demand if it were empty."""
    misfits = fleet.misfits(demand, rows)
    return bool(((misfits == Misfit.FITS) | (misfits > NEVER)).any())


def out_of_reach(
    fleet: Fleet,
    backend: str,
    supports: Mapping[str, Support],
    candidates: _Candidates,
    demand: Demand | None,
) -> Refusal:
    """Return the refusal of a request whose backend starts nothing on any candidate.

    Args:
        fleet: The present fleet.
        backend: The backend that the request names.
        supports: The abilities of each backend of this server, by its name.
        candidates: The candidates of the request; None: all clusters.
        demand: The request's demand on each node.
    """
    support = supports[backend]
    names = sorted((support.nodes or support.clusters) - {NO_NODE})
    where = "nodes" if support.nodes else "clusters"
    shown = ", ".join(names[:NAMES_MAX]) + (", …" if len(names) > NAMES_MAX else "")
    others = [
        name
        for name, each in sorted(supports.items())
        if name not in {backend, _ACCOUNTS_ONLY}
        and within_reach(fleet, each, candidates, demand) is not None
    ]
    ways = ["let the request use a machine that could hold it"] if names else []
    if NO_NODE in support.nodes:
        ways.insert(0, "add a machine with an agent (`moored agent token`)")
        ways.insert(1, "set MOORAGE_LOCAL_HERE=true to use the server's own machine")
    elif backend == "local":
        ways.insert(
            0, "register this machine (`moored serve --here`, or `moorage fleet import local`)"
        )
    last = f"name the backend {' or '.join(others)}" if others else "ask without `provision`"
    way = f"{', '.join(ways)}, or {last}"
    reason = (
        f"provision.backend: {backend} only starts workloads on the {where} {shown}, and none of "
        f"them that this request may use could ever hold the workload; {way}."
    )
    if not names:
        reason = f"provision.backend: {backend} has no machine to start a workload on; {way}."
    expected = "a backend that starts workloads on a node that the request may use"
    return Refusal(Code.UNSUPPORTED, reason, "provision.backend", expected, {"backends": others})

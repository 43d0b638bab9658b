"""Verifies a proposal against the current state, immediately before the grant.

A policy is not trusted here: `verification` checks its proposal with the same feasibility function
that the policy, the queue and the explanations use.
"""

from collections.abc import Collection
from itertools import islice
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from moorage.core.state import refusals
from moorage.core.state.facts import Refusal
from moorage.model import Ask, Cluster, ClusterId, Demand, NodeId, Placement, Share
from moorage.policy import Fleet, ProposedShare, gang_groups

NAMES_SHOWN_MAX: Final = 5
"""Maximum known names that a refusal suggests for a wrong one."""
_NOTHING: Final = Demand()


class Unsound(msgspec.Struct, frozen=True, gc=False):
    """The fault of a proposal that does not meet the request, or names a missing node or device."""

    refusal: Refusal


class Stale(msgspec.Struct, frozen=True, gc=False):
    """The fault of a proposal that was possible, but whose devices or amounts are taken now."""

    refusal: Refusal


def verify(
    ask: Ask,
    wishes: tuple[ProposedShare, ...],
    fleet: Fleet,
    clusters: dict[ClusterId, Cluster],
    reserved: tuple[tuple[str, str], ...] = (),
) -> Placement | Unsound | Stale:
    """Return the placement that a proposal asks for, or the reason why it cannot be granted.

    Args:
        ask: The request.
        wishes: The proposed shares; not empty.
        fleet: The present fleet.
        clusters: The inventory.
        reserved: Nodes that must not be chosen if the policy left the choice of the node open.

    Returns:
        The placement, with node and GPUs chosen here if the policy left them open; or the fault.
    """
    if ask.demand is not None and len(wishes) != ask.demand.nodes:
        wanted = refusals.counted(ask.demand.nodes, "node")
        got = refusals.counted(len(wishes), "node")
        return _unsound("", wanted, f"the policy proposed {got}")
    shares: list[Share] = []
    for number, proposed in enumerate(wishes):
        path = f"[{number}]." if len(wishes) > 1 else ""
        if proposed.node_id is None and ask.demand is not None and proposed.cluster_id in clusters:
            proposed = _choose_node(proposed, ask.demand, fleet, (*reserved, *map(_pair, shares)))
        verdict = _one(ask, proposed, fleet, clusters, path, tuple(shares))
        if not isinstance(verdict, Share):
            return verdict
        shares.append(verdict)
    together = gang_groups(fleet, ask.demand or _NOTHING)
    if together is not None:
        places = {_group(fleet, share, together) for share in shares}
        if len(places) > 1 or -1 in places:
            level = ask.demand.topology  # type: ignore[union-attr]  # A gang has a demand.
            expected = f"nodes of one {level}"
            return _unsound("node_id", expected, f"the nodes are in different {level}s")
    return tuple(shares)


def _one(
    ask: Ask,
    proposed: ProposedShare,
    fleet: Fleet,
    clusters: dict[ClusterId, Cluster],
    path: str,
    taken: Placement,
) -> Share | Unsound | Stale:
    if ask.candidates is not None and proposed.cluster_id not in ask.candidates:
        found = _unknown(proposed.cluster_id, ask.candidates)
        return _unsound(f"{path}cluster_id", "one of the candidates", found)
    if proposed.cluster_id not in clusters:
        found = _unknown(proposed.cluster_id, clusters)
        return _unsound(f"{path}cluster_id", "a live cluster", found)
    if proposed.node_id is None:
        wrong = _gpus_elsewhere(proposed, fleet, clusters[proposed.cluster_id], path)
        if wrong is not None:
            return wrong
    if ask.terms is None and ask.demand is None:
        return _judge_advice(proposed, fleet, clusters[proposed.cluster_id], path)
    if proposed.node_id is None:
        if ask.demand is None:
            return _unsound(f"{path}node_id", "a node to hold", "a lease needs a node")
        return Stale(refusals.nothing_fits_in(proposed.cluster_id))
    row = fleet.row(proposed.cluster_id, proposed.node_id)
    if row is None:
        return _no_node(proposed.node_id, clusters[proposed.cluster_id], path)
    if (proposed.cluster_id, proposed.node_id) in map(_pair, taken):
        return _unsound(f"{path}node_id", "different nodes", f"“{proposed.node_id}” is named twice")
    return _on_node(ask, proposed, fleet, row, path)


def _judge_advice(
    proposed: ProposedShare, fleet: Fleet, cluster: Cluster, path: str
) -> Share | Unsound:
    """Verify a proposal for advice without `resources`: check only that node and devices exist."""
    if proposed.node_id is not None and cluster.nodes:
        row = fleet.row(proposed.cluster_id, proposed.node_id)
        if row is None:
            return _no_node(proposed.node_id, cluster, path)
        if unknown := [gpu for gpu in proposed.gpus or () if gpu not in fleet.gpu_ids[row]]:
            found = _unknown(unknown[0], fleet.gpu_ids[row])
            return _unsound(f"{path}gpus", f"GPUs of {proposed.node_id}", found)
    return Share(proposed.cluster_id, proposed.node_id or NodeId(""), proposed.gpus or ())


def _on_node(
    ask: Ask, proposed: ProposedShare, fleet: Fleet, row: int, path: str
) -> Share | Unsound | Stale:
    if ask.demand is not None and (short := _short(proposed, ask.demand)):
        return _unsound(f"{path}{short}", "what `resources` asks for", "the policy proposed less")
    need = _need(proposed, ask.demand or _NOTHING)
    if need.where and not fleet.matching(need.where)[row]:
        return _unsound(
            f"{path}node_id",
            "a node with the labels that `resources.where` asks for",
            f"“{proposed.node_id}” has others",
        )
    ids = fleet.gpu_ids[row]
    if proposed.gpus is None:
        columns = fleet.pick_gpus(row, need)
        if len(columns) < need.gpus:
            return _stale(fleet, row, need, path)
    else:
        if unknown := [gpu for gpu in proposed.gpus if gpu not in ids]:
            found = _unknown(unknown[0], ids)
            return _unsound(f"{path}gpus", f"GPUs of {proposed.node_id}", found)
        columns = [ids.index(gpu) for gpu in proposed.gpus]
        if ask.demand is not None and len(columns) != ask.demand.gpus:
            wanted = refusals.counted(ask.demand.gpus, "GPU")
            return _unsound(f"{path}gpus", wanted, f"{len(columns)} proposed")
    free = fleet.takes(row, need, columns)
    if not (free or fleet.eligible_gpus(need)[row, columns].all()):
        return _unsound(
            f"{path}gpus", "GPUs that `resources` accepts", f"{list(proposed.gpus or ())}"
        )
    if not _one_group(fleet, row, columns, need):
        return _unsound(f"{path}gpus", f"GPUs of one {need.topology} group", f"{proposed.gpus}")
    return fleet.share(row, need, columns) if free else _stale(fleet, row, need, path)


def _need(proposed: ProposedShare, demand: Demand) -> Demand:
    """Return the demand on one node: the proposed amounts and the request's constraints."""
    return Demand(
        gpus=demand.gpus if proposed.gpus is None else len(proposed.gpus),
        gpu_milli=proposed.gpu_milli,
        models=demand.models,
        gpu_memory_mib=demand.gpu_memory_mib,
        cpu_milli=proposed.cpu_milli,
        memory_mib=proposed.memory_mib,
        topology=demand.topology,
        where=demand.where,
    )


def _short(proposed: ProposedShare, demand: Demand) -> str:
    if proposed.gpu_milli < demand.gpu_milli and demand.gpus:
        return "gpu_milli"
    if proposed.cpu_milli < demand.cpu_milli:
        return "cpu_milli"
    return "memory_mib" if proposed.memory_mib < demand.memory_mib else ""


def _pair(share: Share) -> tuple[str, str]:
    return share.cluster_id, share.node_id


def _choose_node(
    proposed: ProposedShare, demand: Demand, fleet: Fleet, used: tuple[tuple[str, str], ...]
) -> ProposedShare:
    """Choose a node for a proposal that names none: the first that fits with its GPUs free."""
    need = _need(proposed, demand)
    for row in fleet.feasible(need).nonzero()[0].tolist():
        pair, ids = fleet.node_ids[row], fleet.gpu_ids[row]
        if pair[0] != proposed.cluster_id or pair in used:
            continue
        named = proposed.gpus or ()
        if set(named) <= set(ids) and fleet.takes(row, need, [ids.index(gpu) for gpu in named]):
            return replace(proposed, node_id=NodeId(pair[1]))
    return proposed


def _gpus_elsewhere(
    proposed: ProposedShare, fleet: Fleet, cluster: Cluster, path: str
) -> Unsound | None:
    """Refuse a proposal that names GPUs but no node, if no node of the cluster has all the GPUs."""
    if not proposed.gpus or not cluster.nodes:
        return None
    known: dict[str, None] = {}
    for node in cluster.nodes:
        row = fleet.row(cluster.id, node.id)
        ids = () if row is None else fleet.gpu_ids[row]
        if set(proposed.gpus) <= set(ids):
            return None
        known.update(dict.fromkeys(ids))
    unknown = [gpu for gpu in proposed.gpus if gpu not in known]
    found = _unknown(unknown[0], known) if unknown else "no node has all of them"
    return _unsound(f"{path}gpus", f"GPUs of one node of {cluster.id}", found)


def _one_group(fleet: Fleet, row: int, columns: list[int], need: Demand) -> bool:
    if len(columns) <= 1 or need.topology not in {"nvlink", "numa"}:
        return True
    groups = fleet.gpu_link if need.topology == "nvlink" else fleet.gpu_numa
    found = set(groups[row, columns].tolist())
    return len(found) == 1 and -1 not in found


def _group(fleet: Fleet, share: Share, groups: npt.NDArray[np.int64]) -> int:
    row = fleet.row(share.cluster_id, share.node_id)
    return -1 if row is None else int(groups[row])


def _no_node(name: str, cluster: Cluster, path: str) -> Unsound:
    names = [node.id for node in cluster.nodes[: refusals.NAMES_COMPARED_MAX]]
    found = _unknown(name, names)
    return _unsound(f"{path}node_id", f"a node of {cluster.id}", found)


def _unknown(name: str, known: Collection[str]) -> str:
    """Return a sentence that a name is unknown, with similar known names, the closest first."""
    near = refusals.closest(name, known, NAMES_SHOWN_MAX)
    shown = list(dict.fromkeys([*near, *islice(known, NAMES_SHOWN_MAX)]))[:NAMES_SHOWN_MAX]
    more = ", …" if len(known) > len(shown) else ""
    are = "is" if len(shown) == 1 else "are"
    there = f"there {are} {', '.join(shown)}{more}" if shown else "there are none"
    return f"“{name[: refusals.NAME_CHARS_MAX]}” is none; {there}"


def _unsound(field: str, expected: str, found: str) -> Unsound:
    return Unsound(refusals.unsound(field, expected, found))


def _stale(fleet: Fleet, row: int, need: Demand, path: str) -> Stale:
    cluster_id, node_id = fleet.node_ids[row]
    cpu, memory, gpus = fleet.capacity(row)
    free = {
        "cpu_milli": cpu,
        "memory_mib": memory,
        "gpus": dict(zip(fleet.gpu_ids[row], gpus, strict=False)),
    }
    details = {"free": free, "gpus": need.gpus}
    return Stale(refusals.not_free(f"{path}{cluster_id}/{node_id}", details))

"""Decides whether a demand can fit before any policy runs, and explains a refusal.

`Feasibility` remembers one node that fits per class of demand (the witness) and the classes that
fit nowhere, so that thousands of identical requests cost one check of the fleet. `Feasibility` only
caches: all verdicts come from `Fleet.feasible` and `Fleet.misfits`.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

import numpy as np
import numpy.typing as npt

from moorage.core.fit.verdicts import NodeKinds, change_in_words, node_verdicts, unmet_labels
from moorage.core.state import refusals
from moorage.core.state.facts import Refusal
from moorage.core.state.state import State
from moorage.model import Ask, ClusterId, Demand, Nodes, Placement
from moorage.policy import NEVER, Fleet, Misfit, gang_groups
from moorage.records.json_values import JsonObject

CLASSES_MAX: Final = 4_096
"""Maximum classes of demand in the cache; one more empties the cache."""

MODELS_TOLD_MAX: Final = 20
"""Most GPU models that a refusal lists."""
_LIKENESS: Final = 0.9
"""Least similarity, 0 to 1, at which an unknown GPU model is taken for a misspelled known one."""
TALLIES_BYTES_MAX: Final = 16 << 20
"""Maximum bytes of the cached reasons for refusals; more bytes empty the cache."""

Candidates = tuple[ClusterId, ...] | None

_ELSEWHERE: Final = max(Misfit) + 1

_TEXT: Final = {
    Misfit.LABELS: "have other labels than `where` asks for",
    Misfit.GPU_MODEL: "have too few GPUs of the accepted models",
    Misfit.GPU_MEMORY: "have too few GPUs with that much memory",
    Misfit.GPU_COUNT: "have too few GPUs that fit",
    Misfit.TOPOLOGY: "have too few GPUs in one link group or NUMA domain",
    Misfit.CPU: "have too little CPU even when empty",
    Misfit.MEMORY: "have too little memory even when empty",
    Misfit.UNAVAILABLE: "cannot be used now (cordoned, not ready or out of reach)",
    Misfit.GPUS_BUSY: "have too few free GPUs",
    Misfit.TOPOLOGY_BUSY: "have no link group or NUMA domain with enough free GPUs",
    Misfit.CPU_BUSY: "have too little free CPU",
    Misfit.MEMORY_BUSY: "have too little free memory",
}


@dataclass(slots=True)
class _Verdict:
    """The last verdict on a class: the row of a node that fits; None: none fits as of `gains`."""

    layout: int
    row: int | None
    gains: int


@dataclass(slots=True)
class _Tally:
    """The reason why each node cannot take one class of demand, and the nodes per reason.

    Attributes:
        layout: The `Fleet.layout` of the rows.
        version: The `Fleet.version` at which the reasons were found.
        reasons: `Misfit` of each node, int8 `[nodes]`; `_ELSEWHERE` where the node is no candidate.
        counts: Number of nodes per reason, int64 `[reasons]`.
        never: The largest demand that could fit, and helpful changes of the request, if the demand
            can never fit; valid for this layout.
        refusal: The resulting refusal if the nodes of `reserved` are reserved; valid until a reason
            changes.
    """

    layout: int
    version: int
    reasons: npt.NDArray[np.int8]
    counts: npt.NDArray[np.int64]
    never: JsonObject | None = None
    refusal: Refusal | None = None
    reserved: Nodes = ()


class Feasibility:
    """Decides which demands fit in the present state.

    Args:
        state: The present state, which is only read.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._verdicts: dict[tuple[Demand, Candidates], _Verdict] = {}
        self._tallies: dict[tuple[Demand, Candidates], _Tally] = {}
        self._kinds: NodeKinds | None = None
        self._beside: tuple[int, Placement, Fleet] | None = None

    def fits(self, demand: Demand, candidates: Candidates, reserved: Nodes = ()) -> bool:
        """Return whether `demand` fits now on candidate nodes, without those in `reserved`."""
        fleet, gains = self._state.fleet, self._state.gains
        key = (demand, candidates)
        known = self._verdicts.get(key)
        if known is not None and known.layout == fleet.layout:
            if known.row is None and known.gains == gains:
                return False  # No capacity was freed since the last check.
            witness = None if reserved or demand.nodes != 1 else known.row
            if witness is not None and fleet.takes(witness, demand):
                return True
        allowed = fleet.feasible(demand) & self.allowed(candidates, reserved)
        fits = self.enough_nodes(allowed, demand)
        if fits or not reserved:  # With reserved nodes, a "no" holds for this call only.
            if len(self._verdicts) >= CLASSES_MAX:
                self._verdicts.clear()
            # The node with the most free CPU stays a witness for longest.
            row = int(np.where(allowed, fleet.cpu_free, -2).argmax()) if fits else None
            self._verdicts[key] = _Verdict(fleet.layout, row, gains)
        return fits

    def beside(self, held: Placement) -> Fleet:
        """Return a copy of the fleet in which the shares in `held` are taken, too."""
        fleet = self._state.fleet
        if not held:
            return fleet
        known = self._beside
        if known is None or known[:2] != (fleet.version, held):
            less = fleet.imagined()
            for share in held:
                less.take(share)
            self._beside = known = (fleet.version, held, less)
        return known[2]

    def avoided(self, ask: Ask, reserved: Nodes) -> Nodes:
        """Return the nodes where `ask`'s workload failed; none if `ask` fits on no other node."""
        if not ask.avoid or ask.demand is None:
            return ask.avoid
        elsewhere = self.fits(ask.demand, ask.candidates, (*reserved, *ask.avoid))
        return ask.avoid if elsewhere else ()

    def refusal(self, demand: Demand, candidates: Candidates, reserved: Nodes = ()) -> Refusal:
        """Return why `demand` does not fit, now or ever, with the number of nodes per reason."""
        tally = self._tally(demand, candidates)
        if tally.refusal is not None and tally.reserved == reserved:
            return tally.refusal
        tally.reserved, tally.refusal = reserved, self._refusal(demand, tally, reserved)
        return tally.refusal

    def _refusal(self, demand: Demand, tally: _Tally, reserved: Nodes) -> Refusal:
        nodes, counts = _counts(tally)
        details: JsonObject = {"nodes": nodes, "misfits": counts}
        able = tally.reasons == Misfit.FITS
        capable = able | ((tally.reasons > NEVER) & (tally.reasons != _ELSEWHERE))
        never = not self.enough_nodes(capable, demand)
        held: list[int] = []
        if never:
            held = self._rows_held_elsewhere(demand, tally.reasons)
            capable[held] = True
            never = not self.enough_nodes(capable, demand)
        together = self.most_together(capable if never else able, demand)
        if gang_groups(self._state.fleet, demand) is not None:
            details["nodes_together"] = together
        why = _sentence(counts, nodes, demand, together, len(held))
        if counts.get(Misfit.GPU_MODEL.name.lower()) == nodes and (
            models := self._models(demand, tally.reasons != _ELSEWHERE)
        ):
            why = f"{why[:-1]}. {_no_node_has(demand, models)}"
            details["models"] = models
        if counts.get(Misfit.LABELS.name.lower()) == nodes and (
            unmet := unmet_labels(self._state.fleet, demand, tally.reasons != _ELSEWHERE)
        ):
            why = f"{why[:-1]}. {unmet}"
        if reserved:
            details["reserved_for_waiting"] = len(reserved)
        if never:
            details["binding"] = _binding(counts, never=True)
            if tally.never is None:
                tally.never = self._changes(demand, tally.reasons != _ELSEWHERE)
            if fits_if := tally.never["fits_if"]:
                why = f"{why} {change_in_words(fits_if[0])}"
            return refusals.never_fits(why, details | tally.never)
        rows = (self._state.fleet.row(*place) for place in reserved)
        if kept := sum(row is not None and bool(able[row]) for row in rows):
            why = f"{why[:-1]}; {kept} kept for a request that waits already."
        details["binding"] = _binding(counts, never=False)
        return refusals.no_capacity(why, details)

    def _rows_held_elsewhere(self, demand: Demand, reasons: npt.NDArray[np.int8]) -> list[int]:
        """Return rows that could hold `demand` once the leases under a node's old name end."""
        fleet, later = self._state.fleet, Fleet()
        for cluster in self._state.clusters_held_elsewhere():
            later.put(cluster)
        misfits = later.misfits(demand)
        able = np.flatnonzero((misfits == Misfit.FITS) | (misfits > NEVER)).tolist()
        rows = (fleet.row(*later.node_ids[row]) for row in able)
        return [row for row in rows if row is not None and reasons[row] != _ELSEWHERE]

    def _models(self, demand: Demand, rows: npt.NDArray[np.bool_]) -> list[str]:
        """Return the GPU models on these rows; [] if the demand accepts one of them."""
        fleet = self._state.fleet
        codes = np.unique(fleet.gpu_model[rows])
        models = list(filter(None, (fleet.models[code] for code in codes[codes >= 0].tolist())))
        return [] if set(models) & set(demand.models) else models[:MODELS_TOLD_MAX]

    def _changes(self, demand: Demand, rows: npt.NDArray[np.bool_]) -> JsonObject:
        """Return the largest demand that could ever fit, and changes that make `demand` fit."""
        if self._kinds is None:
            self._kinds = NodeKinds(self._state.fleet)
        return self._kinds.changes(demand, rows, self.enough_nodes)

    def nodes(
        self, demand: Demand, candidates: Candidates, after: int, limit: int
    ) -> tuple[list[JsonObject], int | None]:
        """Return a page of candidate nodes with verdicts on `demand`, the closest to fit first."""
        reasons = self._tally(demand, candidates).reasons
        rows = np.flatnonzero(reasons != _ELSEWHERE)
        return node_verdicts(self._state.fleet, demand, rows, reasons[rows], (after, limit))

    def reasons(self, demand: Demand, candidates: Candidates) -> JsonObject:
        """Return the numbers of fitting nodes, and of other nodes by reason, to explain a grant."""
        nodes, counts = _counts(self._tally(demand, candidates))
        fitting = nodes - sum(counts.values())
        return {"nodes": nodes, "nodes_fitting": fitting, "misfits": counts}

    def _tally(self, demand: Demand, candidates: Candidates) -> _Tally:
        """Return the obstacle to `demand` on each node; only changed nodes are examined again."""
        fleet, key = self._state.fleet, (demand, candidates)
        tally = self._tallies.get(key)
        changed = None
        if tally is not None and tally.layout == fleet.layout:
            changed = fleet.changed_since(tally.version)
        if tally is None or changed is None:
            reasons = np.where(self.allowed(candidates, ()), fleet.misfits(demand), _ELSEWHERE)
            counts = np.bincount(reasons, minlength=_ELSEWHERE + 1)
            if (len(self._tallies) + 1) * len(fleet) > TALLIES_BYTES_MAX:
                self._tallies.clear()
            tally = _Tally(fleet.layout, fleet.version, reasons.astype(np.int8), counts)
            self._tallies[key] = tally
            return tally
        rows = np.array(changed, np.int64)
        rows = rows[tally.reasons[rows] != _ELSEWHERE]
        now = fleet.misfits(demand, rows) if len(rows) else tally.reasons[rows]
        tally.version = fleet.version
        if np.array_equal(now, tally.reasons[rows]):
            return tally
        tally.counts -= np.bincount(tally.reasons[rows], minlength=_ELSEWHERE + 1)
        tally.counts += np.bincount(now, minlength=_ELSEWHERE + 1)
        tally.reasons[rows], tally.refusal = now, None
        return tally

    def reservation(
        self,
        demand: Demand,
        candidates: Candidates,
        fleet: Fleet | None = None,
        excluded: Nodes = (),
    ) -> Nodes:
        """Return the nodes to reserve for a waiter at the head of the queue.

        Args:
            demand: The waiter's demand.
            candidates: The waiter's candidates.
            fleet: The fleet once the leases that make room have ended; None: the present fleet.
            excluded: Nodes that the waiter may not get.

        They could take the demand when empty: first the nodes where it fits now, then those with
        the most free capacity. Other requests get only the other nodes, so small requests do not
        starve a large waiter. For a gang that wants one rack or zone, all nodes are in one.
        """
        fleet = fleet or self._state.fleet
        misfits = fleet.misfits(demand)
        capable = ((misfits == Misfit.FITS) | (misfits > NEVER)) & self.allowed(
            candidates, excluded
        )
        rows = np.flatnonzero(capable)
        if len(rows) < demand.nodes:
            return ()
        if demand.nodes == 1 and len(fitting := rows[misfits[rows] == Misfit.FITS]):
            rows = fitting  # In a full fleet, few rows are left to sort.
        usable = np.where(fleet.eligible_gpus(demand)[rows], fleet.gpu_free[rows], 0).sum(1)
        busy = misfits[rows] != Misfit.FITS
        best = rows[np.lexsort((-fleet.cpu_free[rows], -usable, busy))].tolist()
        return tuple(fleet.node_ids[row] for row in self.together(best, demand))

    def together(self, rows: list[int], demand: Demand) -> list[int]:
        """Return the first of these rows that form a gang, in one rack or zone if demanded."""
        together = gang_groups(self._state.fleet, demand)
        if together is not None:
            return _first_group(rows, together[rows].tolist(), demand.nodes)
        return rows[: demand.nodes]

    def allowed(self, candidates: Candidates, reserved: Nodes) -> npt.NDArray[np.bool_]:
        """Return a mask of the candidate nodes that are not reserved: bool `[nodes]`."""
        fleet = self._state.fleet
        if candidates is None:
            allowed = np.ones(len(fleet), np.bool_)
        else:
            wanted = set(candidates)
            is_candidate = np.array([name in wanted for name in fleet.cluster_ids], np.bool_)
            allowed = is_candidate[fleet.cluster]
        for cluster_id, node_id in reserved:
            row = fleet.row(cluster_id, node_id)
            if row is not None:
                allowed[row] = False
        return allowed

    def enough_nodes(self, nodes: npt.NDArray[np.bool_], demand: Demand) -> bool:
        """Return whether the nodes in a mask, bool `[nodes]`, are enough for a gang."""
        return self.most_together(nodes, demand) >= demand.nodes

    def most_together(self, nodes: npt.NDArray[np.bool_], demand: Demand) -> int:
        """Return the most nodes of a mask, bool `[nodes]`, that are in one rack or zone."""
        together = gang_groups(self._state.fleet, demand)
        if together is None:
            return int(np.count_nonzero(nodes))
        here = together[nodes]
        return int(np.bincount(here[here >= 0], minlength=1).max())


def _counts(tally: _Tally) -> tuple[int, dict[str, int]]:
    """Return the number of candidate nodes, and for each reason the number of unfit nodes."""
    counts = tally.counts.tolist()
    by_name = {misfit.name.lower(): counts[misfit] for misfit in Misfit if misfit}
    nodes = sum(counts[:_ELSEWHERE])
    return nodes, {name: count for name, count in by_name.items() if count}


def _first_group(rows: list[int], of: list[int], nodes: int) -> list[int]:
    """Return rows of the first rack or zone with enough nodes, in the given order; [] if none."""
    groups: dict[int, list[int]] = {}
    for row, number in zip(rows, of, strict=True):
        group = groups.setdefault(number, [])
        group.append(row)
        if number >= 0 and len(group) == nodes:
            return group
    return []


def _sentence(counts: dict[str, int], nodes: int, demand: Demand, together: int, held: int) -> str:
    if not nodes:
        return "no candidate cluster has a node."
    parts = [_part(count, _TEXT[Misfit[name.upper()]]) for name, count in counts.items()]
    gang = f", and {demand.nodes} nodes are needed at once" if demand.nodes > 1 else ""
    if demand.nodes > 1 and demand.topology in {"rack", "zone"}:
        place = demand.topology
        gang = f"; the largest {place} that could hold it has {together} of {demand.nodes} nodes"
    if held:
        machines = refusals.counted(held, "node")
        gang = f"{gang}; {machines} will count once leases under another name have ended"
    many = refusals.counted(nodes, "node")
    return f"of {many}, {', '.join(parts) or 'all fit one by one'}{gang}."


def _part(count: int, text: str) -> str:
    return f"{count} {text.replace('have', 'has', 1) if count == 1 else text}"


def _no_node_has(demand: Demand, models: list[str]) -> str:
    """Return a sentence that lists the fleet's GPU models, since “a100” may be a misspelling."""
    wanted = " or ".join(demand.models[:MODELS_TOLD_MAX])
    spelled = {model.casefold(): model for model in models}
    near = [
        spelled[each]
        for model in demand.models[:MODELS_TOLD_MAX]
        for each in get_close_matches(model.casefold(), spelled, 1, _LIKENESS)
    ]
    meant = f" (did you mean {near[0]}?)" if near else ""
    return f"No candidate has {wanted}; there are {', '.join(models)}{meant}."


def _binding(counts: dict[str, int], *, never: bool) -> str:
    """Return the constraint to relax first: the constraint that the closest nodes do not meet."""
    names = [name for name in counts if (Misfit[name.upper()] <= NEVER) == never]
    return names[-1] if names else "nodes"

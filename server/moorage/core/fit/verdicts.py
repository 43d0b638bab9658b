"""Details of a refusal: the largest demand that could ever fit, and the shortage on each node.

`feasibility` adds the demand to refusals, and `explain` adds the shortages to answers to `why`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from moorage.core.state import refusals
from moorage.model import GPU_MILLI, Demand, Requirement
from moorage.policy import NEVER, Fleet, Misfit
from moorage.policy.inventory import Ints
from moorage.policy.matching import CLUSTER_KEY, NODE_KEY, label_values
from moorage.records.fields import field_title
from moorage.records.json_values import JsonObject, JsonValue

Verdict = Literal["never", "not_now", "not_you"]
NAMES_MAX: Final = 20
"""Maximum models or clusters that a verdict lists."""
NODES_MAX: Final = 1_000
"""Maximum nodes that all pages of one `why` list together."""

_Bools = npt.NDArray[np.bool_]
_WHICH: Final = {
    Misfit.GPU_MODEL: " of the accepted models",
    Misfit.GPU_MEMORY: " with that much memory",
    Misfit.GPU_COUNT: " that fit",
    Misfit.TOPOLOGY: " in one link group or NUMA domain",
    Misfit.TOPOLOGY_BUSY: " free in one link group or NUMA domain",
    Misfit.GPUS_BUSY: " free",
}
_UNITS: Final = {"CPU": "CPU milli", "MEMORY": "MiB of memory"}


# What could ever fit ---------------------------------------------------------------------------


class NodeKinds:
    """An empty sample of each kind of node: tens of samples stand for a hundred thousand nodes.

    Args:
        fleet: The fleet; read only.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._layout = -1

    def changes(
        self, demand: Demand, allowed: _Bools, enough: Callable[[_Bools, Demand], bool]
    ) -> JsonObject:
        """Return the largest fitting demand, and changes that would make an impossible demand fit.

        Args:
            demand: A demand that fits nowhere, even if all nodes are empty.
            allowed: The candidate nodes: bool `[nodes]`.
            enough: Returns whether the nodes that fit, bool `[nodes]`, are enough for the demand.

        Returns:
            `largest`: the most of each resource on one candidate, and the existing models.
            `fits_if`: single changes of the request that would make it fit, the smallest first.
        """
        self._sort_nodes()
        everywhere, original = allowed, demand
        if demand.where:  # Nodes of one kind may have different labels: check each node.
            allowed = allowed & self._fleet.matching(demand.where)
            demand = replace(demand, where=())

        def could(changed: Demand, where: _Bools = allowed) -> bool:
            misfits = self._sample.misfits(changed)
            able = (misfits == Misfit.FITS) | (misfits > NEVER)
            return enough(able[self._kinds] & where, changed)

        sample, here = self._sample, np.unique(self._kinds[allowed])
        codes = np.unique(sample.gpu_model[here])
        # An unknown model has an empty name, which no request can contain.
        models = list(filter(None, (sample.models[code] for code in codes[codes >= 0].tolist())))
        largest = {
            "nodes": int(np.count_nonzero(allowed)),
            "models": models[:NAMES_MAX],
            "gpus": int(sample.eligible_gpus(demand)[here].sum(1).max(initial=0)),
            "gpu_memory_mib": int(sample.gpu_memory[here].max(initial=0)),
            "cpu_milli": int(sample.cpu_total[here].max(initial=0)),
            "memory_mib": int(sample.memory_total[here].max(initial=0)),
        }
        steps = self._steps(demand, here)
        found = [each for name, values in steps if (each := _most(demand, name, values, could))]
        found.sort(key=lambda each: 1 - each["fits"] / each["asked"])
        if demand.gpu_milli < GPU_MILLI and could(replace(demand, gpu_milli=GPU_MILLI)):
            found.append(_change("gpu_milli", demand.gpu_milli, GPU_MILLI))
        if demand.topology and could(replace(demand, topology="")):
            found.append(_change("topology", demand.topology, ""))
        if demand.models:
            able = [each for each in models if could(replace(demand, models=(each,)))]
            if able:
                found.append(_change("models", list(demand.models), able[:NAMES_MAX]))
        if original.where and could(demand, everywhere):
            found.append(_change("where", [each.key for each in original.where], ""))
        others = np.ones_like(allowed) & self._fleet.matching(original.where)
        if not everywhere.all() and could(demand, others):
            found.append({"field": "clusters", "asked": None, "fits": "others"})
        return {"largest": largest, "fits_if": found}

    def _steps(
        self, demand: Demand, here: npt.NDArray[np.intp]
    ) -> Iterable[tuple[str, Sequence[int]]]:
        sample = self._sample
        yield "gpus", range(1, demand.gpus)
        yield "nodes", range(1, demand.nodes)
        for name, column in (
            ("gpu_memory_mib", sample.gpu_memory),
            ("cpu_milli", sample.cpu_total),
            ("memory_mib", sample.memory_total),
        ):
            values = np.unique(column[here])
            most = getattr(demand, name)
            yield name, values[(values > 0) & (values < most)].tolist()

    def _sort_nodes(self) -> None:
        """Group nodes of equal empty capacity by checksum; detect collisions."""
        fleet = self._fleet
        if self._layout == fleet.layout:
            return
        gpus = (fleet.gpu_total, fleet.gpu_model, fleet.gpu_memory, fleet.gpu_link, fleet.gpu_numa)
        columns = [fleet.cpu_total[:, None], fleet.memory_total[:, None], *gpus]
        columns.append(fleet.gpu_exclusive.astype(np.int64))
        sums = np.zeros(len(fleet), np.uint64)
        start = 1
        for column in columns:
            numbers = np.arange(start, start + column.shape[1], dtype=np.uint64)
            start += column.shape[1]
            sums += column.astype(np.uint64) @ _scatter(numbers)
        _, first, kinds = np.unique(sums, return_index=True, return_inverse=True)
        kinds = kinds.reshape(-1)
        if not all(np.array_equal(column, column[first[kinds]]) for column in columns):
            first = kinds = np.arange(len(fleet))
        self._sample, self._kinds = fleet.sample(first), kinds
        self._layout = fleet.layout


def _scatter(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return hashes of the numbers (the mix function of splitmix64)."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return mixed ^ (mixed >> np.uint64(27)) | np.uint64(1)


def _most(
    demand: Demand, name: str, values: Sequence[int], could: Callable[[Demand], bool]
) -> JsonObject | None:
    """Return the largest of ascending values with which the demand could fit."""
    low, high = 0, len(values)
    if not values or not could(_with(demand, name, values[0])):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if could(_with(demand, name, values[middle])):
            low = middle
        else:
            high = middle
    return _change(name, getattr(demand, name), values[low])


def _with(demand: Demand, name: str, value: JsonValue) -> Demand:
    changed: dict[str, Any] = {name: value}
    return replace(demand, **changed)


def _change(name: str, now: JsonValue, fits: JsonValue) -> JsonObject:
    return {"field": f"resources.{name}", "asked": now, "fits": fits}


def change_in_words(change: JsonObject) -> str:
    """Return a change of the list `fits_if` as a sentence."""
    fits = change["fits"]
    if change["field"] == "clusters":
        return "It would fit in other clusters."
    value, name = (
        " or ".join(fits) if isinstance(fits, list) else fits,
        field_title(change["field"]),
    )
    if value == "":
        return f"It would fit without {name}."
    return f"It would fit with {name}: {value} instead of {_plain(change['asked'])}."


def unmet_labels(fleet: Fleet, demand: Demand, candidates: _Bools) -> str:
    """Return a sentence on a label of `where` that no candidate has; empty if all exist."""
    rows = np.flatnonzero(candidates)
    some = rows[: refusals.NAMES_COMPARED_MAX].tolist()
    for each in (each for each in demand.where if each.operator in {"In", "Exists"}):
        values = label_values(fleet, each.key)
        there = dict.fromkeys(value for row in some if (value := values[row]) is not None)
        if not fleet.matching((Requirement(each.key, "Exists"),))[rows].any():
            keys = dict.fromkeys(key for row in some for key in fleet.labels[row])
            keys |= dict.fromkeys((CLUSTER_KEY, NODE_KEY))
            longer = [key for key in keys if key.rpartition("/")[2] == each.key]
            near = "".join(f" (did you mean {key}?)" for key in longer[:1])
            hint = near or refusals.nearest_or_known(each.key, keys)
            return f"No candidate has a label {each.key}{hint}."
        if each.operator == "In" and not fleet.matching((each,))[rows].any():
            hint = refusals.nearest_or_known(each.values[0], there)
            return f"No candidate has {each.key} {' or '.join(each.values[:NAMES_MAX])}{hint}."
    return ""


def _plain(value: JsonValue) -> JsonValue:
    return " or ".join(value[:NAMES_MAX]) if isinstance(value, list) else value


# What each node lacks --------------------------------------------------------------------------


def node_verdicts(
    fleet: Fleet,
    demand: Demand,
    candidates: npt.NDArray[np.intp],
    reasons: npt.NDArray[np.int8],
    page: tuple[int, int],
) -> tuple[list[JsonObject], int | None]:
    """Return one page of candidate nodes with their verdicts on a demand, the closest to fit first.

    Args:
        fleet: The present fleet.
        demand: The demand.
        candidates: The rows of the candidate nodes.
        reasons: `Misfit` of each candidate.
        page: Number of nodes to skip, and to return.

    Returns:
        The rows of the page, and the number to skip for the next page; None: this page is the last.
    """
    has, needs = _had(fleet, demand, candidates, reasons)
    missing = 1 - has / np.maximum(needs, 1)
    kind = np.where(reasons == Misfit.FITS, 0, np.where(reasons > NEVER, 1, 2))
    order = np.lexsort((candidates, missing, kind))[:NODES_MAX]
    after, limit = page
    shown = order[after : after + limit].tolist()
    rows = [
        _node_row(fleet, int(candidates[each]), Misfit(int(reasons[each])), has[each], needs[each])
        for each in shown
    ]
    return rows, after + limit if after + limit < len(order) else None


def _had(
    fleet: Fleet, demand: Demand, rows: npt.NDArray[np.intp], reasons: npt.NDArray[np.int8]
) -> tuple[Ints, Ints]:
    """Return, per node, the existing and the needed amount of the missing resource."""
    has, needs = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    amounts = {
        Misfit.CPU: (fleet.cpu_total, demand.cpu_milli),
        Misfit.CPU_BUSY: (fleet.cpu_free, demand.cpu_milli),
        Misfit.MEMORY: (fleet.memory_total, demand.memory_mib),
        Misfit.MEMORY_BUSY: (fleet.memory_free, demand.memory_mib),
    }
    for misfit in (Misfit(each) for each in np.unique(reasons).tolist()):
        at = reasons == misfit
        if misfit in amounts:
            column, needs[at] = amounts[misfit]
            has[at] = np.maximum(column[rows[at]], 0)
        elif misfit in _WHICH:
            has[at], needs[at] = _devices(fleet, demand, rows[at], misfit), demand.gpus
    return has, needs


def _devices(fleet: Fleet, demand: Demand, rows: npt.NDArray[np.intp], misfit: Misfit) -> Ints:
    """Return the number of GPUs per node that satisfy the constraint named by `misfit`."""
    if misfit is Misfit.GPU_MODEL:
        demand = replace(demand, gpu_memory_mib=0)
    if misfit in {Misfit.GPU_MODEL, Misfit.GPU_MEMORY}:
        demand = replace(demand, gpu_milli=GPU_MILLI)
    busy = misfit in {Misfit.GPUS_BUSY, Misfit.TOPOLOGY_BUSY}
    usable = fleet.fitting_gpus(demand, rows) if busy else fleet.eligible_gpus(demand)[rows]
    if misfit not in {Misfit.TOPOLOGY, Misfit.TOPOLOGY_BUSY}:
        return np.asarray(usable.sum(1), np.int64)
    groups = (fleet.gpu_link if demand.topology == "nvlink" else fleet.gpu_numa)[rows]
    most = np.zeros(len(rows), np.int64)
    for group in range(int(groups.max(initial=-1)) + 1):
        most = np.maximum(most, (usable & (groups == group)).sum(1))
    return most


def _node_row(
    fleet: Fleet, row: int, misfit: Misfit, has: JsonValue, needs: JsonValue
) -> JsonObject:
    cluster, node = fleet.node_ids[row]
    verdict = "fits" if misfit is Misfit.FITS else "not_now" if misfit > NEVER else "never"
    lacks = int(needs) - int(has)
    if misfit is Misfit.FITS:
        text = f"{node} fits"
    elif misfit is Misfit.LABELS:
        text = f"{node} has other labels than `where` asks for"
    elif misfit is Misfit.UNAVAILABLE:
        text = f"{node} cannot be used now (cordoned, not ready or out of reach)"
    elif misfit in _WHICH:
        text = f"{node} lacks {lacks} of {needs} GPUs{_WHICH[misfit]}"
    else:
        unit = _UNITS[misfit.name.removesuffix("_BUSY")]
        free = "free" if misfit > NEVER else "even when empty"
        text = f"{node} lacks {lacks} of {needs} {unit} {free}"
    verdict_row = {"cluster_id": cluster, "node_id": node, "verdict": verdict, "text": text}
    if misfit is Misfit.FITS:
        return verdict_row
    return {**verdict_row, "misfit": misfit.name.lower(), "has": int(has), "needs": int(needs)}

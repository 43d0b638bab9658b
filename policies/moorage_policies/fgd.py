"""FGD, fragmentation gradient descent: keep the free GPUs useful to the requests that will come.

The policy of "Beware of Fragmentation" (USENIX ATC'23). The free GPU capacity of a node is
*fragmented* as far as a typical request cannot use it: because the node lacks CPU, or GPUs of an
accepted model, or because what is left on a GPU is too small. With F(node) = the fragmented GPU
milli, averaged over the typical requests, the score of a placement is

    int(100 * sigmoid((F before - F after) / 1000))

and the highest score wins. A share of one GPU tries every GPU; whole GPUs are the lowest-numbered
free ones. Scores are whole numbers on purpose: the ties they make, broken by the stable order of
the nodes, are what keeps nodes empty for large requests.

It is fast because it re-scores only the nodes that changed since the same demand was last seen,
and because the usable part of a node is a sum of table look-ups, one per GPU. All of that is a
cache: a fresh instance gives the same answers.

Parameters:
    typical: list of {cpu_milli, gpus (or num_gpu), gpu_milli, models, weight}: what requests
        look like and how frequent each kind is (`weight`, any unit). At most 128. A typical
        request of several GPUs is taken to need whole ones. Empty (the default): learnt from
        the requests seen, starting from a guess.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moorage.model import GPU_MILLI, Demand
from moorage.policy import (
    FleetView,
    Misfit,
    best_rows,
    decline,
    propose,
    read_demand,
    tightest_gpus,
)

TYPICAL_MAX: Final = 128
"""At most this many typical requests; of a longer list, those with the highest weights count."""
DEMANDS_MAX: Final = 512
"""Most demands with cached scores; then the demand that was scored least recently is dropped."""
ROWS_FEW: Final = 3
"""Up to this number of changed nodes, numbers of Python are faster than arrays: the usual case."""
KINDS_MAX: Final = 64
"""Most classes of GPUs, by the typical requests they serve; others count as the first class."""
KIND_CHARACTERS_MAX: Final = 200
"""Longest description of a request that is counted (a long list of models is not)."""
PARTS_MAX: Final = 10**9
"""Weights that are no whole numbers, or whose sum is larger, are converted to this many parts: sums
of whole numbers do not depend on their order, so that equal scores are equal."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Typical:
    """A kind of typical request, and its frequency."""

    cpu_milli: int
    gpus: int
    gpu_milli: int
    models: tuple[str, ...]
    weight: float


def read_typical(raw: list[dict[str, Any]]) -> list[Typical]:
    """Return the parameter `typical` as a list of request kinds."""
    kinds = [
        Typical(
            cpu_milli=int(kind.get("cpu_milli", 0)),
            gpus=int(kind.get("gpus", kind.get("num_gpu", 0))),
            gpu_milli=int(kind.get("gpu_milli") or GPU_MILLI),
            models=tuple(kind.get("models", ())),
            weight=float(kind.get("weight", 1)),
        )
        for kind in raw
        if kind.get("weight", 1) > 0
    ]
    return sorted(kinds, key=lambda kind: -kind.weight)[:TYPICAL_MAX]


class Learner:
    """The typical requests of a fleet: assumed ones at first, then those that were observed.

    The requests so far are in the policy's `context`, which outlives this instance: a count per
    kind. It is brought up to date once per `BATCH` requests, since the server has to carry a
    changed context; the fleet is valued again each time the count has doubled.
    """

    BATCH: Final = 64
    COUNT_MAX: Final = 16_384
    """Requests counted before all counts are halved, so that old ones lose weight."""

    def __init__(self) -> None:
        self._fresh: dict[str, int] = {}
        self._fresh_count = 0
        self._learnt_at = 0

    def observe(self, demand: Demand, context: dict[str, Any]) -> bool:
        """Count a request; return whether the typical requests have changed."""
        models = "|".join(demand.models)
        kind = f"{demand.cpu_milli} {demand.gpus} {demand.gpu_milli} {models}"
        if len(kind) <= KIND_CHARACTERS_MAX:
            self._fresh[kind] = self._fresh.get(kind, 0) + demand.nodes
        self._fresh_count += 1
        if self._fresh_count < self.BATCH:
            return False
        seen = dict(context.get("seen", {}))
        for kind, count in self._fresh.items():
            seen[kind] = seen.get(kind, 0) + count
        self._fresh, self._fresh_count = {}, 0
        if sum(seen.values()) > self.COUNT_MAX:
            seen = {kind: (count + 1) // 2 for kind, count in seen.items()}
            self._learnt_at //= 2
        frequent = sorted(seen, key=lambda kind: (-seen[kind], kind))[:TYPICAL_MAX]
        context["seen"] = {kind: seen[kind] for kind in frequent}
        return sum(seen.values()) >= 2 * self._learnt_at

    def typical(self, fleet: FleetView, context: dict[str, Any]) -> list[Typical]:
        """Return the typical requests: those observed so far, and the assumed ones."""
        seen = context.get("seen", {})
        self._learnt_at = sum(seen.values())
        kinds = self._guess(fleet)
        for kind, count in seen.items():
            cpu_milli, gpus, gpu_milli, models = kind.split(" ", 3)
            accepted = tuple(models.split("|")) if models else ()
            kinds.append(Typical(int(cpu_milli), int(gpus), int(gpu_milli), accepted, float(count)))
        return sorted(kinds, key=lambda kind: -kind.weight)[:TYPICAL_MAX]

    def _guess(self, fleet: FleetView) -> list[Typical]:
        """Return the assumed mix of requests, which counts like 30 requests: mostly for one GPU.

        No whole nodes: guessing them fragments the start (measured), and ties keep nodes whole.
        """
        gpus = fleet.gpu_total.sum() // GPU_MILLI
        cpu_each = int(fleet.cpu_total.sum() // max(1, 2 * gpus))
        return [
            Typical(cpu_each, 1, GPU_MILLI, (), 18.0),
            Typical(cpu_each // 2, 1, GPU_MILLI // 2, (), 6.0),
            Typical(cpu_each // 4, 1, GPU_MILLI // 4, (), 3.0),
            Typical(cpu_each, 0, GPU_MILLI, (), 3.0),
        ]


class Usable:
    """Looks up how much of a node's free GPU milli the typical requests can use.

    For a typical request c the usable milli are the sum of the free milli of its GPUs that are
    large enough for c, if the node has the CPU and enough such GPUs, else 0. So, for requests of
    one GPU, a GPU contributes `single[kind, free, step]`, whatever its neighbours hold; and for
    those of several whole GPUs, a node with `n` free ones contributes `several[kind, n, step]`.
    `step` says how many of the sorted CPU demands the free CPU covers; `kind` tells GPUs apart
    that serve different typical requests. F = all free milli - the usable ones.
    """

    def __init__(self, typical: list[Typical], fleet: FleetView) -> None:
        total = sum(kind.weight for kind in typical)
        counts = total <= PARTS_MAX and all(kind.weight.is_integer() for kind in typical)
        scale = 1.0 if counts else PARTS_MAX / total
        parts = [round(scale * kind.weight) for kind in typical]
        self.all_parts = sum(parts)
        wants = [(kind, part) for kind, part in zip(typical, parts, strict=True) if kind.gpus]
        self._cpu_steps = np.unique([kind.cpu_milli for kind, _ in wants])
        self._width = fleet.gpu_total.shape[1]
        self._steps = steps = len(self._cpu_steps) + 1

        kinds: dict[tuple[bool, ...], int] = {}
        kind_of = np.zeros(fleet.gpu_total.shape, np.int64)
        exclusive = fleet.gpu_exclusive
        for code, model in enumerate(fleet.models):
            for alone in (False, True):
                these = (fleet.gpu_model == code) & (exclusive == alone)
                if not these.any():
                    continue
                serves = tuple(
                    (not kind.models or model in kind.models)
                    and not (alone and kind.gpus == 1 and kind.gpu_milli < GPU_MILLI)
                    for kind, _ in wants
                )
                if len(kinds) < KINDS_MAX:
                    kinds.setdefault(serves, len(kinds))
                kind_of[these] = kinds.get(serves, 0)
        single = np.zeros((max(1, len(kinds)), GPU_MILLI + 1, steps), np.int64)
        several = np.zeros((max(1, len(kinds)), self._width + 1, steps), np.int64)
        free, count = np.arange(GPU_MILLI + 1), np.arange(self._width + 1)
        for serves, number in kinds.items():
            for (kind, part), served in zip(wants, serves, strict=True):
                step = int(self._steps_at(np.array([kind.cpu_milli]))[0])
                if served and kind.gpus == 1:
                    enough = free * (free >= kind.gpu_milli) * part
                    single[number, :, step:] += enough[:, None]
                elif served:
                    enough = count * GPU_MILLI * (count >= kind.gpus) * part
                    several[number, :, step:] += enough[:, None]
        self._single = single.ravel()
        self._several = several.ravel() if several.any() else None
        # Where the table of a GPU's kind begins. A node of mixed GPUs counts its whole ones by
        # the kind of its first.
        self._gpu_base = kind_of * (GPU_MILLI + 1) * steps
        first = kind_of[:, 0] if self._width else np.zeros(len(fleet), np.int64)
        self._node_base = first * (self._width + 1) * steps

        # Python reads one number from these in a fifth of the time that NumPy takes.
        self._steps_list = self._cpu_steps.tolist()
        self._single_view = self._single.data
        self._several_view = None if self._several is None else self._several.data

    def _steps_at(self, cpu: Ints) -> Ints:
        return self._cpu_steps.searchsorted(cpu, side="right")

    def gains(self, demand: Demand, rows: Ints, cpu: Ints, gpus: Ints, able: Bools) -> Ints:
        """Return how much less fragmentation each row has with `demand`, in parts of a milli.

        Args:
            demand: What each row would take.
            rows: Nodes it fits on.
            cpu: Their free CPU, milli.
            gpus: Their free GPU milli, `[rows, devices]`.
            able: Which of these GPUs could serve the demand.

        Returns:
            `[rows, devices]` for one GPU: a column per GPU that could take it, nonsense where it
            could not. Else `[rows, 1]`.
        """
        steps, milli = self._steps, demand.gpu_milli
        before = self._steps_at(cpu)[:, None]
        after = self._steps_at(cpu - demand.cpu_milli)[:, None]
        # For a moment a replica may count a grant twice, and show less than nothing as free.
        # Each of these steps takes a microsecond: few rows have changed, and requests are many.
        gpu_at = np.minimum(np.maximum(gpus, 0), GPU_MILLI)
        gpu_at *= steps
        gpu_at += self._gpu_base.take(rows, 0)
        was = np.add.reduce(self._single.take(gpu_at + before), 1, keepdims=True)
        gpu_at += after
        free_counts = self._single.take(gpu_at)
        will_be = np.add.reduce(free_counts, 1, keepdims=True)
        whole = gpus == GPU_MILLI
        lost: Any = 0  # Whole GPUs that would be whole no more.
        if demand.gpus == 1:
            will_be = will_be - free_counts + self._single.take(gpu_at - milli * steps)
            lost = whole
        elif demand.gpus:
            taken = tightest_gpus(demand, gpus, able)
            will_be = self._single[gpu_at - taken * (milli * steps)].sum(1)[:, None]
            lost = (whole & taken).sum(1)[:, None]
        if self._several is not None:
            node_at = (self._node_base[rows] + whole.sum(1) * steps)[:, None]
            was = was + self._several[node_at + before]
            will_be = will_be + self._several[node_at - lost * steps + after]
        gains: Ints = self.all_parts * demand.gpus * milli - was + will_be
        return gains

    def gains_of_row(self, demand: Demand, row: int, cpu: int, gpus: Sequence[int]) -> Ints:
        """Return `gains` of one row for a demand of one GPU: `[devices]`."""
        steps, milli, single = self._steps, demand.gpu_milli, self._single_view
        before = bisect_right(self._steps_list, cpu)
        after = bisect_right(self._steps_list, cpu - demand.cpu_milli)
        bases = self._gpu_base[row].tolist()
        gpu_at = [
            base + steps * min(max(free, 0), GPU_MILLI)
            for base, free in zip(bases, gpus, strict=True)
        ]
        was = sum([single[at + before] for at in gpu_at])
        counts = [single[at + after] for at in gpu_at]
        rest = self.all_parts * milli - was + sum(counts)
        lost = after - milli * steps
        gains = [rest - count + single[at + lost] for count, at in zip(counts, gpu_at, strict=True)]
        if (several := self._several_view) is not None:
            whole = [free == GPU_MILLI for free in gpus]
            node_at = self._node_base.item(row) + sum(whole) * steps
            held = several[node_at + before]
            gains = [
                gain - held + several[node_at - full * steps + after]
                for gain, full in zip(gains, whole, strict=True)
            ]
        return np.array(gains)


class FragmentationScores:
    """The score of each node for one demand, and the GPU with which the node has that score."""

    def __init__(self, nodes: int) -> None:
        self.version = -1
        self.scores = np.full(nodes, -1, np.int8)
        self.columns = np.zeros(nodes, np.int16)


class AIOSv1PolicyRule:
    """Proposes the node and GPU that lose the least usable capacity."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:  # noqa: ARG002  # The contract's signature.
        self._learner = Learner()
        self._typical: list[dict[str, Any]] | None = None
        self._nodes: list[tuple[str, str]] | None = None
        self._layout = -1
        self._scored: dict[Demand, FragmentationScores] = {}

    def eval(self, parameters: dict[str, Any], input_data: Any, context: dict[str, Any]) -> Any:
        """Return the placement, or `{"declined": reason}`."""
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        self._prepare(fleet, demand, parameters.get("typical") or [], context)
        scored = self._assess(fleet, demand)
        scores = scored.scores
        if fleet.allowed is not None:
            scores = np.where(fleet.allowed, scores, np.int8(-1))
        rows = best_rows(fleet, demand, scores)
        if demand.gpus == 1:
            return propose(fleet, demand, rows, lambda row: [int(scored.columns[row])])
        return propose(fleet, demand, rows)

    def _prepare(
        self,
        fleet: FleetView,
        demand: Demand,
        typical: list[dict[str, Any]],
        context: dict[str, Any],
    ) -> None:
        """Compute the values of all nodes again if the fleet or the typical requests changed."""
        learnt = not typical and self._learner.observe(demand, context)
        same_fleet = self._nodes is fleet.node_ids and self._layout == fleet.layout
        if same_fleet and not learnt and (typical is self._typical or typical == self._typical):
            return
        kinds = read_typical(typical) if typical else self._learner.typical(fleet, context)
        self._usable = Usable(kinds, fleet)
        self._typical, self._nodes, self._layout = typical, fleet.node_ids, fleet.layout
        self._scored.clear()

    def _assess(self, fleet: FleetView, demand: Demand) -> FragmentationScores:
        """Update the scores of nodes that have changed, and return the demand's scores."""
        scored = self._scored.pop(demand, None)
        changed: Sequence[int] | None = None
        if scored is not None:
            changed = fleet.changed_since(scored.version)
        if scored is None or changed is None:
            scored, changed = FragmentationScores(len(fleet)), range(len(fleet))
            if len(self._scored) >= DEMANDS_MAX:
                del self._scored[next(iter(self._scored))]
        self._scored[demand] = scored  # To the end: scored most recently.
        scored.version = fleet.version
        if len(changed) <= ROWS_FEW and demand.gpus == 1:
            for row in changed:
                self._score_row(fleet, demand, row, scored)
        elif changed:
            self._score(fleet, demand, np.array(changed, np.int64), scored)
        return scored

    def _score_row(
        self, fleet: FleetView, demand: Demand, row: int, scored: FragmentationScores
    ) -> None:
        """Score one node for a demand of one GPU, as `_score` does for many."""
        scored.scores[row] = -1
        cpu, memory, gpus = fleet.capacity(row)
        eligible = fleet.eligible_gpus(demand)[row].tolist()
        milli = demand.gpu_milli
        able = [may and free >= milli for may, free in zip(eligible, gpus, strict=True)]
        if not any(able) or cpu < demand.cpu_milli or memory < demand.memory_mib:
            return
        scores = self._scores(self._usable.gains_of_row(demand, row, cpu, gpus)).tolist()
        scores = [score if may else -1 for score, may in zip(scores, able, strict=True)]
        scored.scores[row] = best = max(scores)
        scored.columns[row] = scores.index(best)

    def _scores(self, gains: Ints) -> npt.NDArray[np.int8]:
        fragmented_less = gains / (self._usable.all_parts * GPU_MILLI)
        return (100 / (1 + np.exp(-fragmented_less))).astype(np.int8)

    def _score(
        self, fleet: FleetView, demand: Demand, rows: Ints, scored: FragmentationScores
    ) -> None:
        scored.scores[rows] = -1
        cpu, gpus = fleet.cpu_free.take(rows), fleet.gpu_free.take(rows, 0)
        able = (gpus >= demand.gpu_milli) & fleet.eligible_gpus(demand).take(rows, 0)
        fits = np.add.reduce(able, 1, np.int64) >= demand.gpus
        fits &= cpu >= demand.cpu_milli
        fits &= fleet.memory_free.take(rows) >= demand.memory_mib
        if demand.gpus > 1 and demand.topology in {"nvlink", "numa"}:
            fits &= fleet.misfits(demand, rows) == Misfit.FITS
        fitting = np.count_nonzero(fits)
        if not fitting:
            return
        if fitting < len(rows):
            rows, able, cpu, gpus = rows[fits], able[fits], cpu[fits], gpus[fits]
        scores = self._scores(self._usable.gains(demand, rows, cpu, gpus, able))
        if demand.gpus == 1:
            scores = np.where(able, scores, np.int8(-1))
            scored.columns[rows] = scores.argmax(1)
        scored.scores[rows] = np.maximum.reduce(scores, 1)

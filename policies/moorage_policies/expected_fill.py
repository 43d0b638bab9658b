"""Expected fill: keep every node as fillable as it can be by the requests that will come.

A node is worth the GPU milli that it can still be expected to host when a random stream of typical
requests runs into it, plus a protection of what is scarce:

    V(node) = A(node) + M(node)

A, the expected fill: the mean over `STREAMS` fixed random streams of `STREAM_LENGTH` typical
requests of the GPU milli that the node takes from the stream. What does not fit is skipped; a
request of one GPU, or of a share, goes to the tightest GPU that fits; several GPUs are whole ones.

M, the protection: requests of several GPUs, and those that only part of the fleet could ever
serve, each count the copies of themselves that the node could hold, the more the scarcer the
nodes that can serve them. Without it, large requests are turned away early.

The score of a placement is V after - V before, and the highest wins. A share of one GPU tries every
different GPU of the node; whole GPUs are the lowest-numbered free ones.

It is fast because values are kept by the state of a node, since states recur; because each request
re-scores only the nodes that changed since the same demand was last seen; and because all streams
of all new states are walked at once, from one request that fits to the next, by table look-up.
All of that is a cache: a fresh instance gives the same answers.

Parameters:
    typical: list of {cpu_milli, gpus (or num_gpu), gpu_milli, memory_mib, models, weight}: what
        requests look like and how frequent each kind is (`weight`, any unit). The 512 heaviest
        count. A typical request of several GPUs is taken to need whole ones. Empty (the default):
        learnt from the requests seen, starting from a guess.
    stream_seed: whole number from which the streams are drawn.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moorage.model import GPU_MILLI, Demand
from moorage.policy import (
    FleetView,
    Misfit,
    MixLearner,
    RequestKind,
    best_rows,
    decline,
    node_sorts,
    propose,
    read_demand,
    read_typical,
    tightest_gpus,
)

STREAMS: Final = 32
"""Streams a node is filled from; more are more exact, and cost as much more."""
STREAM_LENGTH: Final = 40
"""Requests in a stream: enough to fill a node of eight GPUs."""
FREQUENT_SHARE: Final = 0.95
"""Streams are drawn from the most frequent kinds, which make up this share of the requests."""
CPU_ONLY_WEIGHT: Final = 0.5
"""How often requests without GPUs come up in a stream, for each time they really do."""
LEVELS_MAX: Final = 16
"""Steps of free CPU, and of free GPUs, between which the walk along a stream tells the difference
when it looks for the next request that fits. More kinds share a step, and are tried in vain."""
VALUES_MAX: Final = 1 << 17
"""States whose value is kept; beyond it the cache starts afresh."""
COMPRESSED_MIN: Final = 1024
"""Lanes below which walking the finished ones along is cheaper than leaving them out."""
BATCH_MAX: Final = 1024
"""States valued at once: bounds the memory of it."""
ROWS_MAX: Final = 4096
"""Nodes judged in one evaluation; the rest counts as the worst of those that fit, until later."""
DEMANDS_MAX: Final = 512
"""Demands whose scores are kept; the one judged least recently makes room."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_FITS: Final = 2.0**30
"""Added to every score: a node that fits counts 0 or more. It leaves 22 bits below the point."""


class Streams:
    """A, the expected fill of nodes.

    A node's GPUs are sized on one scale: the milli of its freest GPU, and one more for every
    whole free GPU beyond the first. So `size >= size_of(kind)` says whether a kind's GPUs fit, for
    shares and for several whole GPUs alike.

    `_next[sort, stream, position, size level, cpu level]` is the position of the first request,
    from `position` on, that a node with so much free might fit. Position `length` is the end: a
    request of nothing.

    Args:
        kinds: What streams are made of.
        weights: How frequent each kind is on each sort of node: `[sorts, kinds]`.
        width: GPUs of the largest node.
        seed: From which the streams are drawn, the same for every sort.

    """

    def __init__(
        self, kinds: Sequence[RequestKind], weights: Floats, width: int, seed: int
    ) -> None:
        self._length = length = max(STREAM_LENGTH, 5 * width)
        self._width = width
        # A GPU's free milli and its number in one figure, so that no two GPUs are equal. Free
        # milli below zero wrap to what is larger than any.
        self._type = np.dtype(np.uint16 if GPU_MILLI * width + width < 1 << 15 else np.uint32)
        drawn = np.stack([self._draw(each, length, seed) for each in weights])
        # The end of every stream is a request of nothing.
        drawn = np.concatenate([drawn, np.full((*drawn.shape[:2], 1), len(kinds))], 2)
        needs = [(k.cpu_milli, size_of(k), k.gpu_milli, k.gpus) for k in kinds]
        cpu, size, milli, gpus = np.array([*needs, (0, 0, 0, 0)], np.int64).T
        self._cpu = cpu[drawn].ravel()
        self._share = (milli * (gpus == 1) * width).astype(self._type)[drawn].ravel()
        self._several = (gpus * (gpus > 1))[drawn].ravel() if gpus.max() > 1 else None
        self._cpu_steps, cpu_level = levels(cpu)
        size_steps, size_level = levels(size)
        self._exact = len(np.unique(cpu)) <= LEVELS_MAX >= len(np.unique(size))
        shape = len(size_steps) + 1, len(self._cpu_steps) + 1
        self._per_position = shape[0] * shape[1]
        # Where the rows of a size level begin: by the freest GPU, and by the whole ones.
        freest = np.arange((GPU_MILLI + 1) * width) // max(1, width)
        self._size_at = size_steps.searchsorted(freest, "right") * shape[1]
        whole = np.arange(width + 1).clip(1) - 1 + GPU_MILLI
        self._more_at = size_steps.searchsorted(whole, "right") * shape[1]
        self._more_at -= self._more_at[0]
        fits = size_level[:, None, None] <= np.arange(shape[0])[:, None]
        self._next = self._nexts(fits & (cpu_level[:, None, None] <= np.arange(shape[1])), drawn)

    def _draw(self, weights: Floats, length: int, seed: int) -> Ints:
        """Return balanced streams: each has every kind about as often as is expected."""
        chance = np.random.default_rng(seed)
        steps = np.arange(length)[:, None] + chance.random((length, STREAMS))
        shares = np.cumsum(weights)
        drawn = np.searchsorted(shares, steps / length * shares[-1], side="right")
        shuffled: Ints = chance.permuted(drawn.clip(0, len(weights) - 1), axis=0).T
        return shuffled

    def _nexts(self, fits: Bools, drawn: Ints) -> Ints:
        """Return `_next`, flat: filled from the end of the streams to their beginning."""
        length = self._length
        shape = *drawn.shape[:2], length + 2, *fits.shape[1:]
        table = np.full(shape, length, np.min_scalar_type(length))
        for position in range(length - 1, -1, -1):
            here = fits[drawn[:, :, position]]
            table[:, :, position] = np.where(here, position, table[:, :, position + 1])
        return table.ravel()

    def fill(self, sorts: Ints, cpu: Ints, gpus: Ints) -> Floats:
        """Return A of some node states, in milli.

        Args:
            sorts: Sort of each node: `[states]`.
            cpu: Free CPU milli: `[states]`.
            gpus: Free milli of every GPU, 0 to 1000: `[states, devices]`.

        """
        length, width, per_position = self._length, self._width, self._per_position
        streams = (sorts[:, None] * STREAMS + np.arange(STREAMS)).ravel()
        items = streams * (length + 1)
        starts = streams * ((length + 2) * per_position)
        coded = (gpus * width + np.arange(width)).astype(self._type).T
        free = coded.repeat(STREAMS, axis=1)
        left = cpu.repeat(STREAMS)
        filled = np.zeros(len(streams), np.int64)
        lanes: Any = slice(None)
        at = starts
        while True:
            freest = np.maximum.reduce(free)
            at = at + self._size_at.take(freest)
            if self._several is not None:
                at += self._more_at.take((free >= GPU_MILLI * width).sum(0))
            at += self._cpu_steps.searchsorted(left, "right")
            position = self._next.take(at)
            going = position < length
            count = np.count_nonzero(going)
            if not count:
                break
            if count * 2 < len(going) and len(going) > COMPRESSED_MIN:
                lanes = np.flatnonzero(going) if isinstance(lanes, slice) else lanes[going]
                free, left, position = free[:, going], left[going], position[going]
                items, starts, freest = items[going], starts[going], freest[going]
            item = items + position
            at = starts + (position + np.int64(1)) * per_position
            takes, wants = self._cpu.take(item), self._share.take(item)
            if self._several is not None:
                several = self._several.take(item)
                if several.any():
                    filled[lanes] += self._take_several(several, free, takes, left)
            if not self._exact:
                vain = (takes > left) | (wants > freest)
                takes[vain] = wants[vain] = 0
            after = free - wants
            np.copyto(free, after, where=after == np.minimum.reduce(after))
            left = left - takes
            filled[lanes] += wants
        mean: Floats = filled.reshape(-1, STREAMS).sum(1) / (STREAMS * width)
        return mean

    def _take_several(self, several: Ints, free: npt.NDArray[Any], takes: Ints, left: Ints) -> Ints:
        """Take whole GPUs where a stream's request wants several; none where they do not suffice.

        Returns:
            What each took, in the units of `free`.

        """
        lanes = np.flatnonzero(several)
        these, whole = free[:, lanes], GPU_MILLI * self._width
        rank = (these >= whole).cumsum(0)
        enough = (rank[-1] >= several[lanes]) & (takes[lanes] <= left[lanes])
        taken = (these >= whole) & (rank <= several[lanes]) & enough
        free[:, lanes] = these - (taken * whole).astype(self._type)
        takes[lanes] *= enough
        filled = np.zeros(len(several), np.int64)
        filled[lanes] = several[lanes] * enough * whole
        return filled


def size_of(kind: RequestKind) -> int:
    """Return what a kind needs of a node's GPUs, on the scale of `Streams`."""
    return kind.gpu_milli + kind.gpus - 1 if kind.gpus else 0


def levels(needs: Ints) -> tuple[Ints, Ints]:
    """Return steps of what is free, and for each need the level from which it might be met.

    `searchsorted(steps, free, "right")` is the level of `free`. Never is a need's level above
    that of what would meet it; it is exact while there are no more than `LEVELS_MAX` different
    needs.
    """
    different = np.unique(needs)
    if len(different) > LEVELS_MAX:
        different = different[np.linspace(0, len(different) - 1, LEVELS_MAX).astype(np.int64)]
    return different, np.searchsorted(different, needs, side="right")


class Scarce:
    """M, the protection of what few nodes can serve, in closed form.

    Args:
        kinds: All kinds of request.
        serves: Which sort of node may serve which kind: `[sorts, kinds]`.
        shares: For each kind, the share of the fleet's GPUs on nodes that it fits when they are
            empty.

    """

    def __init__(self, kinds: Sequence[RequestKind], serves: Bools, shares: Floats) -> None:
        kept, worths = [], []
        for number, (kind, share) in enumerate(zip(kinds, shares.tolist(), strict=True)):
            if kind.gpus and share and (kind.gpus > 1 or share < 1):
                factor = 1 / share - (kind.gpus == 1)
                kept.append(number)
                worths.append(kind.weight * factor * kind.milli)
        of = [kinds[number] for number in kept]
        self._worths = np.array(worths)
        self._serves = serves[:, kept]
        self._cpu = np.array([max(1, kind.cpu_milli) for kind in of], np.int64)
        self._gpus = np.array([kind.gpus for kind in of], np.int64)
        self._memory = np.array([kind.memory_mib * (kind.gpus > 1) for kind in of], np.int64)
        self.memory_steps = np.unique(self._memory)
        sizes, self._size_of = np.unique([k.gpu_milli for k in of], return_inverse=True)
        # How many shares of each size a GPU with so much free has room for.
        self._copies = np.arange(GPU_MILLI + 1)[:, None] // sizes.astype(np.int64)

    def protect(self, sorts: Ints, cpu: Ints, memory: Ints, gpus: Ints) -> Floats:
        """Return M of some node states, in milli; arguments as `Streams.fill`."""
        if not len(self._worths):
            return np.zeros(len(sorts))
        copies = self._copies.take(gpus, 0).sum(1)[:, self._size_of] // self._gpus
        np.minimum(copies, np.maximum(cpu, 0)[:, None] // self._cpu, out=copies)
        copies *= self._serves[sorts] & (memory[:, None] >= self._memory)
        worth: Floats = copies @ self._worths
        return worth


class Values:
    """V of node states: A + M, each state valued once.

    Args:
        kinds: What requests look like, the most frequent first.
        fleet: The nodes to be valued.
        seed: From which the streams are drawn.

    """

    def __init__(self, kinds: Sequence[RequestKind], fleet: FleetView, seed: int) -> None:
        serves, self._sort_of = node_sorts(kinds, fleet)
        devices = (fleet.gpu_total > 0).sum(1)
        # Nodes that are equal when they are empty, and how many GPUs are on such nodes.
        shape = np.stack([self._sort_of, devices, fleet.cpu_total, fleet.memory_total], 1)
        shapes, nodes = np.unique(shape, axis=0, return_counts=True)
        sort, gpus, cpu, memory = shapes.T
        whole_fleet = max(1, int(devices.sum()))
        served = np.bincount(sort, nodes * gpus, minlength=len(serves)) @ serves
        fitting = [
            (nodes * gpus)[
                serves[sort, number]
                & (gpus >= kind.gpus)
                & (cpu >= kind.cpu_milli)
                & (memory >= kind.memory_mib)
            ].sum()
            for number, kind in enumerate(kinds)
        ]
        self._scarce = Scarce(kinds, serves, np.array(fitting) / whole_fleet)
        often = np.array([k.weight * (1 if k.gpus else CPU_ONLY_WEIGHT) for k in kinds])
        scarcity = np.where([kind.gpus > 0 for kind in kinds], whole_fleet / served.clip(1), 1.0)
        rank = np.cumsum([kind.weight for kind in kinds]).searchsorted(FREQUENT_SHARE)
        frequent = kinds[: int(rank) + 1]
        weights = np.where(serves, often * scarcity, 0.0)[:, : len(frequent)]
        weights[weights.sum(1) == 0] = 1.0  # Never asked for: whatever is drawn will not fit.
        self._streams = Streams(frequent, weights, fleet.gpu_total.shape[1], seed)
        self._known: dict[bytes, float] = {}

    def of(self, rows: Ints, cpu: Ints, memory: Ints, gpus: Ints) -> Floats:
        """Return V of the nodes `rows`, were so much of them free.

        Args:
            rows: The nodes: `[states]`.
            cpu: Free CPU milli: `[states]`.
            memory: Free MiB: `[states]`.
            gpus: Free milli of every GPU: `[states, devices]`.

        """
        if not gpus.shape[1]:
            return np.zeros(len(rows))
        # What V depends on, in whole numbers, is the name of a state. For a moment a replica may
        # count a grant twice, and show less than nothing as free.
        states = np.empty((len(rows), gpus.shape[1] + 3), np.int64)
        states[:, 0] = self._sort_of[rows]
        states[:, 1] = cpu
        states[:, 2] = self._scarce.memory_steps.searchsorted(memory, "right")
        np.maximum(gpus, 0, out=states[:, 3:])
        states[:, 3:].sort(axis=1)
        size, packed, known = states.shape[1] * states.itemsize, states.tobytes(), self._known
        names = [packed[start : start + size] for start in range(0, len(packed), size)]
        new = {name: at for at, name in enumerate(names) if name not in known}
        if new:
            if len(known) + len(new) > VALUES_MAX:
                known.clear()
                new = {name: at for at, name in enumerate(names)}
            which = np.fromiter(new.values(), np.int64, len(new))
            for start in range(0, len(which), BATCH_MAX):
                some = which[start : start + BATCH_MAX]
                values = self._value(states[some], memory[some])
                known.update(
                    zip(list(new)[start : start + BATCH_MAX], values.tolist(), strict=True)
                )
        return np.array([known[name] for name in names])

    def _value(self, states: Ints, memory: Ints) -> Floats:
        sorts, cpu, gpus = states[:, 0], states[:, 1], states[:, 3:]
        value: Floats = self._streams.fill(sorts, cpu, gpus)
        return value + self._scarce.protect(sorts, cpu, memory, gpus)


class FillScores:
    """The scores of one demand on every node, and the GPU they were reached on."""

    def __init__(self, nodes: int) -> None:
        self.version = -1
        self.scores = np.full(nodes, -1.0)
        self.columns = np.zeros(nodes, np.int16)
        self.later = np.arange(nodes)  # Nodes to judge even where they do not change.


class AIOSv1PolicyRule:
    """Proposes the node and GPU whose loss leaves the fleet the most fillable."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:  # noqa: ARG002  # The contract's signature.
        self._learner = MixLearner()
        self._typical: tuple[list[dict[str, Any]], int] | None = None
        self._nodes: list[tuple[str, str]] | None = None
        self._layout = -1
        self._scored: dict[Demand, FillScores] = {}

    def eval(self, parameters: dict[str, Any], input_data: Any, context: dict[str, Any]) -> Any:
        """Return the placement, or `{"declined": reason}`."""
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        self._prepare(fleet, demand, parameters, context)
        scored = self._assess(fleet, demand)
        scores = scored.scores
        if fleet.allowed is not None:
            scores = np.where(fleet.allowed, scores, -1.0)
        rows = best_rows(fleet, demand, scores)
        if demand.gpus != 1:
            return propose(fleet, demand, rows)
        columns = scored.columns
        return propose(
            fleet,
            demand,
            rows,
            lambda row: [int(columns[row])] if columns[row] >= 0 else fleet.pick_gpus(row, demand),
        )

    def _prepare(
        self,
        fleet: FleetView,
        demand: Demand,
        parameters: dict[str, Any],
        context: dict[str, Any],
    ) -> None:
        """Value the fleet anew where it, or what is typical, is no longer what it was."""
        typical, seed = parameters.get("typical") or [], int(parameters.get("stream_seed", 1))
        learnt = not typical and self._learner.observe(demand, context)
        same_fleet = self._nodes is fleet.node_ids and self._layout == fleet.layout
        if same_fleet and not learnt and (typical, seed) == self._typical:
            return
        kinds = read_typical(typical) if typical else self._learner.typical(fleet, context)
        self._values = Values(kinds, fleet, seed)
        self._typical, self._nodes, self._layout = (typical, seed), fleet.node_ids, fleet.layout
        self._scored.clear()
        self._worth, self._version = np.full(len(fleet), np.nan), fleet.version

    def _assess(self, fleet: FleetView, demand: Demand) -> FillScores:
        """Return the demand's scores, after judging the nodes that changed since the last time."""
        scored = self._scored.pop(demand, None)
        changed = None if scored is None else fleet.changed_since(scored.version)
        if scored is None or changed is None:
            scored, rows = FillScores(len(fleet)), np.arange(len(fleet))
            if len(self._scored) >= DEMANDS_MAX:
                del self._scored[next(iter(self._scored))]
        else:
            rows = np.array(changed, np.int64)
            if len(scored.later):
                rows = np.union1d(rows, scored.later)
        self._scored[demand] = scored  # Last in the order: judged most recently.
        scored.version = fleet.version
        self._forget_worth(fleet)
        if len(rows):
            self._score(fleet, demand, rows, scored)
        return scored

    def _forget_worth(self, fleet: FleetView) -> None:
        changed = fleet.changed_since(self._version)
        self._worth[slice(None) if changed is None else changed] = np.nan
        self._version = fleet.version

    def _worth_of(self, fleet: FleetView, rows: Ints) -> Floats:
        """Return V of nodes as they are."""
        stale = rows[np.isnan(self._worth[rows])]
        if len(stale):
            free = fleet.cpu_free[stale], fleet.memory_free[stale], fleet.gpu_free[stale]
            self._worth[stale] = self._values.of(stale, *free)
        worth: Floats = self._worth[rows]
        return worth

    def _score(self, fleet: FleetView, demand: Demand, rows: Ints, scored: FillScores) -> None:
        scored.scores[rows] = -1
        able = (fleet.gpu_free[rows] >= demand.gpu_milli) & fleet.eligible_gpus(demand)[rows]
        fits = able.sum(1) >= demand.gpus
        fits &= fleet.cpu_free[rows] >= demand.cpu_milli
        fits &= fleet.memory_free[rows] >= demand.memory_mib
        if demand.gpus > 1 and demand.topology in {"nvlink", "numa"}:
            fits &= fleet.misfits(demand, rows) == Misfit.FITS
        scored.later = rows[fits][ROWS_MAX:]
        scored.scores[scored.later], scored.columns[scored.later] = 0, -1
        rows, able = rows[fits][:ROWS_MAX], able[fits][:ROWS_MAX]
        if not len(rows):
            return
        cpu = fleet.cpu_free[rows] - demand.cpu_milli
        memory, gpus = fleet.memory_free[rows] - demand.memory_mib, fleet.gpu_free[rows]
        if demand.gpus == 1:
            option, column = np.nonzero(able & first_of_equals(np.where(able, gpus, -1)))
            gpus = gpus[option]
            gpus[np.arange(len(option)), column] -= demand.gpu_milli
            values = np.full(able.shape, -np.inf)
            values[option, column] = self._values.of(
                rows[option], cpu[option], memory[option], gpus
            )
            scored.columns[rows] = values.argmax(1)
            after = values.max(1)
        else:
            if demand.gpus:
                gpus = gpus - tightest_gpus(demand, gpus, able) * demand.gpu_milli
            after = self._values.of(rows, cpu, memory, gpus)
        scored.scores[rows] = _FITS + after - self._worth_of(fleet, rows)


def first_of_equals(gpus: Ints) -> Bools:
    """Return which GPUs of each node are the lowest-numbered with as much free."""
    equal = gpus[:, :, None] == gpus[:, None, :]
    first: Bools = equal.argmax(2) == np.arange(gpus.shape[1])
    return first

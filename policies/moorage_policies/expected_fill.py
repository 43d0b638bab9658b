"""Expected fill: keep the fleet as usable as possible for the requests that will come.

A node is worth the GPU milli that it can still be expected to host when a random stream of typical
requests runs into it, a protection of what is scarce by nature, and a price for what is scarce now:

    V(node) = FILL_WEIGHT * (A(node) + M(node)) + sum over kinds of price * copies(node)

A, the expected fill (`RequestStreams`): the mean over fixed random streams of typical requests of
the GPU milli that the node takes from the stream. What does not fit is skipped; a request of one
GPU, or of a share, goes to the tightest GPU that fits; several GPUs are whole ones.

M, the protection: requests of several GPUs, and those that only part of the fleet could ever
serve, each count the copies of themselves that the node could hold, the more the scarcer the
nodes that can serve them. Without it, large requests are turned away early.

The prices (`ScarcityPrices`): each kind of request counts the copies of itself that the node could
hold, the more the fewer the whole fleet has room for. They follow the fleet in steps. Without them,
a fleet from which requests also leave serves fewer: what is scarce there changes.

The score of a placement is V after - V before, and the highest wins. A share of one GPU tries every
different GPU of the node; whole GPUs are the lowest-numbered free ones.

It is fast because states recur, and each is valued once; because each request judges only the nodes
that changed since the same demand was last seen, and looks the others' values up where prices have
changed; and because all streams of all new states are walked at once, by table look-up. All of that
is a cache: a fresh instance gives the same answers, but that its prices are those of now.

Parameters:
    typical: list of {cpu_milli, gpus (or num_gpu), gpu_milli, memory_mib, models, weight}: what
        requests look like and how frequent each kind is (`weight`, any unit). The 512 heaviest
        count. A typical request of several GPUs is taken to need whole ones. Empty (the default):
        learnt from the requests seen, starting from a guess.
    stream_seed: whole number from which the streams are drawn.
    prices: whether places have prices; without, V = A + M.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moorage.model import Demand
from moorage.policy import (
    FleetView,
    KindCopies,
    Misfit,
    MixLearner,
    RequestKind,
    RequestStreams,
    ScarcityPrices,
    best_rows,
    decline,
    fleet_shares,
    node_sorts,
    propose,
    read_demand,
    read_typical,
    tightest_gpus,
)

FREQUENT_SHARE: Final = 0.95
"""Share of all requests that the kinds in the streams cover; rarer kinds are left out of them."""
CPU_ONLY_WEIGHT: Final = 0.5
"""Frequency of requests without GPUs in a stream, relative to their real frequency."""
STATES_MAX: Final = 1 << 17
"""Most states with a cached value; then the cache is cleared."""
STATES_BYTES_MAX: Final = 48 << 20
"""Bytes of cached states; beyond it the cache starts afresh. A state takes `STATE_BYTES`, and two
bytes for each kind."""
STATE_BYTES: Final = 300
BATCH_MAX: Final = 1024
"""Most states valued at once, to limit memory."""
ROWS_MAX: Final = 4096
"""Nodes judged per evaluation; the others count as the worst fitting node until a later one."""
DEMANDS_MAX: Final = 512
"""Most demands with cached scores; then the demand that was scored least recently is dropped."""
DEMANDS_MIN: Final = 16
SCORES_BYTES_MAX: Final = 64 << 20
"""Bytes of cached scores; beyond it demands are dropped, but at least `DEMANDS_MIN` stay."""
SCORE_BYTES: Final = 10
"""Bytes of a demand's score per node, in addition to four per GPU."""
FILL_WEIGHT: Final = 0.003
"""Weight of one milli of A and M, relative to the price of a place."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_FITS: Final = 2.0**30
"""Added to every score, so that a node that fits scores above 0; leaves 22 bits after the point."""
_FITS_PRICED: Final = 2.0**37
"""Rounds values with prices: leaves 15 bits, so values of V closer than 1e-7 are equal."""


def protections(kinds: Sequence[RequestKind], shares: Floats) -> Floats:
    """Return, per kind of request, the protection that one copy adds to a node, in GPU milli.

    Args:
        kinds: All kinds of request.
        shares: For each kind, the share of the fleet's GPUs on nodes that it fits when they are
            empty.
    """
    return np.array(
        [
            kind.weight * (1 / share - (kind.gpus == 1)) * kind.milli
            if kind.gpus and share and (kind.gpus > 1 or share < 1)
            else 0.0
            for kind, share in zip(kinds, shares.tolist(), strict=True)
        ]
    )


class Values:
    """The values of node states: each is computed once, and again when the prices change.

    A state that was valued has a number; 0 stands for none, and is worth less than any.

    Args:
        kinds: Kinds of requests, the most frequent first.
        fleet: The nodes to be valued.
        seed: The seed of the streams.
        priced: Whether places have prices.
    """

    def __init__(
        self, kinds: Sequence[RequestKind], fleet: FleetView, seed: int, *, priced: bool
    ) -> None:
        serves, self._sort_of = node_sorts(kinds, fleet)
        served, fitting = fleet_shares(kinds, serves, self._sort_of, fleet)
        protection = protections(kinds, fitting)
        priced_kinds = [
            n for n, kind in enumerate(kinds) if protection[n] or (priced and kind.gpus)
        ]
        of = [kinds[number] for number in priced_kinds]
        self._protection = protection[priced_kinds]
        needs = [
            kind.memory_mib * (kind.gpus > 1) * (protection[n] > 0) for n, kind in enumerate(kinds)
        ]
        self._memory = np.array(needs, np.int64)[priced_kinds]
        self._memory_steps = np.unique(self._memory)
        self._copies = KindCopies(of, serves[:, priced_kinds])
        self._prices = ScarcityPrices(of, self._copies, self._sort_of, fleet) if priced else None
        often = np.array([k.weight * (1 if k.gpus else CPU_ONLY_WEIGHT) for k in kinds])
        scarcity = np.where([kind.gpus > 0 for kind in kinds], 1 / served, 1.0)
        rank = np.cumsum([kind.weight for kind in kinds]).searchsorted(FREQUENT_SHARE)
        frequent = kinds[: int(rank) + 1]
        weights = np.where(serves, often * scarcity, 0.0)[:, : len(frequent)]
        weights[weights.sum(1) == 0] = 1.0  # No request was like it: nothing drawn will fit.
        self._streams = RequestStreams(frequent, weights, fleet.gpu_total.shape[1], seed)
        self.states_max = min(STATES_MAX, STATES_BYTES_MAX // (STATE_BYTES + 2 * len(priced_kinds)))
        self.refreshed = 0
        self.forget()

    def forget(self) -> None:
        """Forget all states; the next new state gets the number 0."""
        self._numbers: dict[bytes, int] = {}
        self._fixed, self._worth = np.full(1, -np.inf), np.full(1, -np.inf)  # A + M, and V …
        self._priced = np.full(1, -1)  # … as of this refresh of the prices.
        self._held = np.zeros((1, len(self._protection)), np.uint16)  # Copies of each kind.

    def __len__(self) -> int:
        """Return the number of known states."""
        return len(self._numbers)

    def refresh(self, fleet: FleetView) -> None:
        """Count a request, and update the prices if an update is due."""
        if self._prices is not None and self._prices.refresh(fleet):
            self.refreshed += 1

    def numbers(self, rows: Ints, cpu: Ints, memory: Ints, gpus: Ints) -> Ints:
        """Return the state numbers of nodes with these free amounts.

        Args:
            rows: The nodes: `[states]`.
            cpu: Free CPU milli: `[states]`.
            memory: Free MiB: `[states]`.
            gpus: Free milli of every GPU: `[states, devices]`.
        """
        # What V depends on, in whole numbers, is the name of a state. For a moment a replica may
        # count a grant twice, and show less than nothing as free.
        states = np.empty((len(rows), gpus.shape[1] + 3), np.int64)
        states[:, 0] = self._sort_of[rows]
        states[:, 1] = cpu
        states[:, 2] = self._memory_steps.searchsorted(memory, "right")
        np.maximum(gpus, 0, out=states[:, 3:])
        states[:, 3:].sort(axis=1)
        size, packed, known = states.shape[1] * states.itemsize, states.tobytes(), self._numbers
        names = [packed[start : start + size] for start in range(0, len(packed), size)]
        new = {name: at for at, name in enumerate(names) if name not in known}
        if new:
            which = np.fromiter(new.values(), np.int64, len(new))
            for start in range(0, len(which), BATCH_MAX):
                some = which[start : start + BATCH_MAX]
                self._learn(len(known) + 1 + start, states[some], memory[some])
            known.update(zip(new, range(len(known) + 1, len(known) + 1 + len(new)), strict=True))
        return np.array([known[name] for name in names], np.int64)

    def _learn(self, first: int, states: Ints, memory: Ints) -> None:
        """Compute the values of new states; `first` is the number of the first one."""
        sorts, cpu, gpus = states[:, 0], states[:, 1], states[:, 3:]
        end = first + len(states)
        if end > len(self._fixed):
            size = max(end, 2 * len(self._fixed))
            self._fixed, self._worth = np.resize(self._fixed, size), np.resize(self._worth, size)
            self._held = np.resize(self._held, (size, self._held.shape[1]))
            self._priced = np.resize(self._priced, size)
        self._held[first:end] = held = self._copies.count(sorts, cpu, gpus)
        protection = (held * (memory[:, None] >= self._memory)) @ self._protection
        fill = self._streams.fill(sorts, cpu, gpus) if gpus.shape[1] else 0.0
        self._fixed[first:end] = fill + protection
        self._priced[first:end] = -1

    def worth(self, numbers: npt.NDArray[Any]) -> Floats:
        """Return the value of each state at current prices."""
        worth = self._fixed
        if self._prices is not None:
            worth = self._worth
            stale = numbers[self._priced[numbers] != self.refreshed]
            if len(stale := np.unique(stale[stale > 0])):
                prices = self._prices.prices / FILL_WEIGHT
                worth[stale] = self._fixed[stale] + self._held[stale] @ prices
                self._priced[stale] = self.refreshed
        found: Floats = worth[numbers]
        return found


class FillScores:
    """The score of each node for one demand, and the GPU with which the node has that score."""

    def __init__(self, nodes: int, options: int) -> None:
        self.version = self.refreshed = -1
        self.scores = np.full(nodes, -1.0)
        self.columns = np.zeros(nodes, np.int16)
        self.states = np.zeros((options, nodes), np.int32)  # After each way to take the node.
        self.later = np.arange(nodes)  # Nodes to judge even where they do not change.
        self.unpriced = self.later[:0]  # Nodes whose score is of older prices.


class AIOSv1PolicyRule:
    """Proposes the node and GPU after which the most future requests still fit on the fleet."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:  # noqa: ARG002  # The contract's signature.
        self._learner = MixLearner()
        self._typical: tuple[list[dict[str, Any]], int, bool] | None = None
        self._nodes: list[tuple[str, str]] | None = None
        self._layout = -1
        self._scored: dict[Demand, FillScores] = {}
        self._values: Values

    def eval(self, parameters: dict[str, Any], input_data: Any, context: dict[str, Any]) -> Any:
        """Return the placement, or `{"declined": reason}`."""
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        self._prepare(fleet, demand, parameters, context)
        self._values.refresh(fleet)
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
        self, fleet: FleetView, demand: Demand, parameters: dict[str, Any], context: dict[str, Any]
    ) -> None:
        """Compute the values of all nodes again if the fleet or the typical requests changed."""
        typical, seed = parameters.get("typical") or [], int(parameters.get("stream_seed", 1))
        priced = bool(parameters.get("prices", True))
        learnt = not typical and self._learner.observe(demand, context)
        same_fleet = self._nodes is fleet.node_ids and self._layout == fleet.layout
        if same_fleet and not learnt and (typical, seed, priced) == self._typical:
            if len(self._values) > self._values.states_max:
                self._values.forget()
                self._forget()
            return
        kinds = read_typical(typical) if typical else self._learner.typical(fleet, context)
        self._values = Values(kinds, fleet, seed, priced=priced)
        self._typical = typical, seed, priced
        self._fits = _FITS_PRICED if priced else _FITS
        self._nodes, self._layout = fleet.node_ids, fleet.layout
        self._now = np.zeros(len(fleet), np.int64)
        bytes_each = len(fleet) * (4 * fleet.gpu_total.shape[1] + SCORE_BYTES)
        self._demands_max = min(
            DEMANDS_MAX, max(DEMANDS_MIN, SCORES_BYTES_MAX // max(1, bytes_each))
        )
        self._forget()
        self._version = fleet.version

    def _forget(self) -> None:
        """Forget the numbers of states, since later states will get the same numbers."""
        self._scored.clear()
        self._now[:] = 0

    def _assess(self, fleet: FleetView, demand: Demand) -> FillScores:
        """Update the scores of nodes that have changed, and return the demand's scores."""
        changed = fleet.changed_since(self._version)
        self._now[slice(None) if changed is None else changed] = 0
        self._version = fleet.version
        scored = self._scored.pop(demand, None)
        changed = None if scored is None else fleet.changed_since(scored.version)
        if scored is None or changed is None:
            options = fleet.gpu_total.shape[1] if demand.gpus == 1 else 1
            scored, rows = FillScores(len(fleet), options), np.arange(len(fleet))
            if len(self._scored) >= self._demands_max:
                del self._scored[next(iter(self._scored))]
        else:
            rows = np.array(changed, np.int64)
            if len(scored.later):
                rows = np.union1d(rows, scored.later)
        self._scored[demand] = scored  # Last in the order: judged most recently.
        if scored.refreshed != self._values.refreshed:
            scored.unpriced = np.flatnonzero(scored.scores > 0)
            scored.refreshed = self._values.refreshed
        if len(rows):
            rows = self._judge(fleet, demand, rows, scored)
        if len(scored.unpriced):
            due, scored.unpriced = scored.unpriced[:ROWS_MAX], scored.unpriced[ROWS_MAX:]
            rows = np.union1d(rows, due[scored.scores[due] > 0])
        if len(rows):
            after = self._values.worth(scored.states[:, rows])
            scored.columns[rows] = after.argmax(0)
            gained = after.max(0) - self._worth_now(fleet, rows)
            scored.scores[rows] = self._fits + gained
        scored.version = fleet.version
        return scored

    def _worth_now(self, fleet: FleetView, rows: Ints) -> Floats:
        """Return the value of each node in its current state."""
        new = rows[self._now[rows] == 0]
        if len(new):
            free = fleet.cpu_free[new], fleet.memory_free[new], fleet.gpu_free[new]
            self._now[new] = self._values.numbers(new, *free)
        return self._values.worth(self._now[rows])

    def _judge(self, fleet: FleetView, demand: Demand, rows: Ints, scored: FillScores) -> Ints:
        """Find the state of each node after a placement of the demand; return the fitting nodes."""
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
            return rows
        cpu = fleet.cpu_free[rows] - demand.cpu_milli
        memory, gpus = fleet.memory_free[rows] - demand.memory_mib, fleet.gpu_free[rows]
        if demand.gpus == 1:
            scored.states[:, rows] = 0
            option, column = np.nonzero(able & first_of_equals(np.where(able, gpus, -1)))
            gpus = gpus[option]
            gpus[np.arange(len(option)), column] -= demand.gpu_milli
            rows_of = rows[option]
            scored.states[column, rows_of] = self._values.numbers(
                rows_of, cpu[option], memory[option], gpus
            )
        else:
            if demand.gpus:
                gpus = gpus - tightest_gpus(demand, gpus, able) * demand.gpu_milli
            scored.states[0, rows] = self._values.numbers(rows, cpu, memory, gpus)
        return rows


def first_of_equals(gpus: Ints) -> Bools:
    """Return a mask that leaves one GPU, the lowest-numbered, of equally free GPUs of a node."""
    equal = gpus[:, :, None] == gpus[:, None, :]
    first: Bools = equal.argmax(2) == np.arange(gpus.shape[1])
    return first

"""Counts how often the most frequent demands fit: now, and if free capacity were on few nodes.

The daemon keeps one `ShapeCounts` for each shape that the console shows. The counts are those of
`Fleet.copies`; only changed nodes are counted again.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from moorage.model import GPU_MILLI, Demand, Tenant
from moorage.policy import Fleet, gang_groups
from moorage.policy.fleet import rounds
from moorage.policy.inventory import Ints
from moorage.records.json_values import JsonObject

SHAPES_MAX: Final = 6
"""Maximum shapes shown at one time."""
ASKED_MAX: Final = 4_096
"""Maximum counted pairs of tenant and demand; beyond this, the least frequent are forgotten."""
HALVED_AT: Final = 100_000
"""Number of requests after which all counts are halved, so that recent requests count more."""
PLACES_MAX: Final = 100
"""Maximum nodes listed for one shape."""
STRANDED_MAX: Final = 3
"""Maximum nodes listed as having the most free capacity that a shape cannot use."""
USUAL: Final = tuple(Demand(gpus=gpus) for gpus in (1, 2, 4, 8))
"""Shapes that fill the list if requests had fewer shapes."""
_GPUS_EXACT: Final = 8
_GPUS_MOST: Final = 16
_NODES_MOST: Final = 64
_SHARES: Final = (500, 250, 125)


class AskedShapes:
    """Counts requests by tenant and demand; recent requests count more."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Tenant, Demand], int] = {}
        self._total = 0

    def note(self, tenant: Tenant, demand: Demand) -> None:
        """Count a request. Runs on the hot path."""
        key = (tenant, demand)
        self._counts[key] = self._counts.get(key, 0) + 1
        self._total += 1
        if self._total >= HALVED_AT or len(self._counts) > ASKED_MAX:
            halved = {name: count // 2 for name, count in self._counts.items() if count > 1}
            left = sorted(halved, key=halved.__getitem__, reverse=True)[: ASKED_MAX // 2]
            self._counts = {name: halved[name] for name in left}
            self._total = sum(self._counts.values())

    def most(self, viewer: Tenant | None) -> list[tuple[Demand, int]]:
        """Return the shapes to show, the most frequent first, filled up with the usual ones.

        Args:
            viewer: The tenant whose requests count; None: all tenants.
        """
        counts: dict[Demand, int] = {}
        for (tenant, demand), count in self._counts.items():
            if demand.gpus and (viewer is None or tenant == viewer):
                counts[demand] = counts.get(demand, 0) + count
        most = sorted(counts.items(), key=lambda each: each[1], reverse=True)[:SHAPES_MAX]
        known = {demand for demand, _ in most}
        usual = ((demand, 0) for demand in USUAL if demand not in known)
        return [*most, *usual][:SHAPES_MAX]

    def sizes(self) -> list[Demand]:
        """Return the GPUs of the most frequent requests of all tenants, without other constraints.

        The list is filled up with the usual shapes. A size is rounded as `size_class` says, since
        each one of the server's life is a time series, and callers choose what they request.
        """
        counts: dict[tuple[int, int, int], int] = {}
        for (_, demand), count in self._counts.items():
            if demand.gpus:
                size = size_class(demand)
                counts[size] = counts.get(size, 0) + count
        most = sorted(counts, key=counts.__getitem__, reverse=True)[:SHAPES_MAX]
        sizes = [Demand(gpus=gpus, gpu_milli=milli, nodes=nodes) for gpus, milli, nodes in most]
        return [*sizes, *(each for each in USUAL if each not in sizes)][:SHAPES_MAX]


def size_class(demand: Demand) -> tuple[int, int, int]:
    """Return one of the 90 sizes that metrics tell apart: GPUs of a node, GPU milli, and nodes.

    A size is rounded down: to 1 to 8 or 16 GPUs, and to a power of two of at most 64 nodes. Shares
    of GPUs are rounded to a half, a quarter or an eighth, and are those of one node.

    Args:
        demand: A demand with GPUs.
    """
    gpus = _GPUS_MOST if demand.gpus >= _GPUS_MOST else min(demand.gpus, _GPUS_EXACT)
    if demand.gpu_milli == GPU_MILLI:
        return gpus, GPU_MILLI, 1 << min(demand.nodes, _NODES_MOST).bit_length() - 1
    share = next((each for each in _SHARES if each <= demand.gpu_milli), _SHARES[-1])
    return gpus, share, 1


def size_name(demand: Demand) -> str:
    """Return the size of a demand as metrics name it: `2x500m`, or `4x8x1000m` on four nodes."""
    nodes = f"{demand.nodes}x" if demand.nodes > 1 else ""
    return f"{nodes}{demand.gpus}x{demand.gpu_milli}m"


class ShapeCounts:
    """Counts how often one shape fits on all nodes.

    Args:
        fleet: The nodes to count on; read only.
    """

    def __init__(self, demand: Demand, fleet: Fleet) -> None:
        self._demand = demand
        self._fleet = fleet
        self._layout = -1
        self._version = -1
        self._copies: Ints = np.zeros(0, np.int64)
        self._classes: Ints = self._copies
        self._sizes: Ints = self._copies
        self._empty: Ints = self._copies
        self._sent: JsonObject = {}

    def row(self) -> JsonObject:
        """Return how often the demand fits now and could fit; only recount changed nodes."""
        fleet = self._fleet
        same = self._layout == fleet.layout
        changed = fleet.changed_since(self._version) if same else None
        if changed is None:
            self._copies = fleet.copies(self._demand)
            self._sort_nodes()
        elif changed:
            rows = np.array(changed, np.int64)
            self._copies[rows] = fleet.copies(self._demand, rows)
        if changed is None or changed:
            self._sent = self._totals()
        self._layout, self._version = fleet.layout, fleet.version
        return self._sent

    def capacity(self) -> int:
        """Return how often the demand would fit if all open nodes were free; call `row` first."""
        return self._gangs(self._empty[self._classes])

    def _totals(self) -> JsonObject:
        demand, fleet = self._demand, self._fleet
        fits = self._gangs(self._copies)
        eligible = np.where(fleet.eligible_gpus(demand), fleet.gpu_free, 0).sum(1)
        gathered = int(self._gather(eligible).sum()) // demand.nodes
        used = fits * demand.nodes * demand.gpus * demand.gpu_milli
        places = np.flatnonzero(self._copies)[:PLACES_MAX].tolist()
        left = (eligible - self._copies * demand.gpus * demand.gpu_milli) // GPU_MILLI
        most = [row for row in np.argsort(-left, kind="stable")[:STRANDED_MAX] if left[row] > 0]
        return {
            "fits": fits,
            "defragmented": max(fits, gathered),
            "stranded": (int(eligible.sum()) - used) // GPU_MILLI,
            "stranded_on": [
                [*fleet.node_ids[row], int(left[row])] for row in most if left[row] > 0
            ],
            "where": [[*fleet.node_ids[row], int(self._copies[row])] for row in places],
        }

    def _sort_nodes(self) -> None:
        """Sort nodes into classes of equal totals: free capacity is gathered within a class."""
        fleet, demand = self._fleet, self._demand
        empty = fleet.imagined()
        open_nodes = fleet.closed == 0
        empty.cpu_free[:] = np.where(open_nodes, fleet.cpu_total, -1)
        empty.memory_free[:] = np.where(open_nodes, fleet.memory_total, 0)
        empty.gpu_free[:] = np.where(open_nodes[:, None], fleet.gpu_total, 0)
        devices = (fleet.eligible_gpus(demand) & open_nodes[:, None]).sum(1)
        rows = np.stack([devices, empty.copies(demand), fleet.cpu_total, fleet.memory_total], 1)
        kinds, classes = np.unique(rows, axis=0, return_inverse=True)
        self._classes = classes.reshape(-1)
        self._sizes, self._empty = kinds[:, 0], kinds[:, 1]

    def _gather(self, eligible: Ints) -> Ints:
        """Return how often the demand would fit on each class of nodes: int64 `[classes]`.

        Whole nodes become free first; the rest of the free capacity lies on one more node.
        """
        demand, fleet = self._demand, self._fleet

        def sum_column(column: Ints) -> Ints:
            sums = np.bincount(self._classes, column, len(self._sizes))
            return sums.astype(np.int64)

        free, now = sum_column(eligible), sum_column(self._copies)
        whole, rest = np.divmod(free, np.maximum(self._sizes * GPU_MILLI, 1))
        devices, over = np.divmod(rest, GPU_MILLI)
        parts = devices * (GPU_MILLI // demand.gpu_milli) + over // demand.gpu_milli
        enough = devices + (over >= demand.gpu_milli) >= demand.gpus
        more = np.where(enough, np.minimum(parts // demand.gpus, self._empty), 0)
        gathered = whole * self._empty + more
        if demand.cpu_milli:
            gathered = np.minimum(
                gathered, sum_column(np.maximum(fleet.cpu_free, 0)) // demand.cpu_milli
            )
        if demand.memory_mib:
            gathered = np.minimum(gathered, sum_column(fleet.memory_free) // demand.memory_mib)
        return np.maximum(gathered, now)

    def _gangs(self, copies: Ints) -> int:
        """Return how many gangs fit on separate nodes, in one rack or zone if so demanded."""
        demand = self._demand
        if demand.nodes == 1:
            return int(copies.sum())
        together = gang_groups(self._fleet, demand)
        if together is None:
            return int(rounds(copies[None], demand.nodes)[0])
        places: Sequence[int] = np.unique(together[together >= 0]).tolist()
        inside = (copies[together == place] for place in places)
        return sum(int(rounds(each[None], demand.nodes)[0]) for each in inside)

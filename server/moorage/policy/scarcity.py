"""Counts the places of each kind of request (how many more fit), and prices these places.

`expected_fill` uses this module to keep places free for the kinds of request that have the fewest.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moorage.model import GPU_MILLI
from moorage.policy.typical import RequestKind
from moorage.policy.view import FleetView

ROWS_MAX: Final = 4096
"""At most this many nodes are counted at once, to bound memory."""
COPIES_MAX: Final = (1 << 16) - 1
"""Highest count of copies on one node."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def fleet_shares(
    kinds: Sequence[RequestKind], serves: Bools, sort_of: Ints, fleet: FleetView
) -> tuple[Floats, Floats]:
    """Return the share of the fleet's GPUs that each kind of request may ever use.

    Args:
        kinds: Kinds of request.
        serves: Whether each type of node may serve each kind: `[types, kinds]`.
        sort_of: The type of each node.
        fleet: The nodes.

    Returns:
        Two shares for each kind: of GPUs on nodes that may serve the kind, never 0; and of GPUs on
        the nodes among them where the kind fits when they are empty.
    """
    devices = (fleet.gpu_total > 0).sum(1)
    # Nodes that are equal when they are empty, and how many GPUs are on such nodes.
    shape = np.stack([sort_of, devices, fleet.cpu_total, fleet.memory_total], 1)
    shapes, nodes = np.unique(shape, axis=0, return_counts=True)
    node_type, gpus, cpu, memory = shapes.T
    all_gpus = max(1, int(devices.sum()))
    served = np.bincount(node_type, nodes * gpus, minlength=len(serves)) @ serves
    fitting = [
        (nodes * gpus)[
            serves[node_type, number]
            & (gpus >= kind.gpus)
            & (cpu >= kind.cpu_milli)
            & (memory >= kind.memory_mib)
        ].sum()
        for number, kind in enumerate(kinds)
    ]
    return served.clip(1) / all_gpus, np.array(fitting) / all_gpus


class KindCopies:
    """How many copies of each kind a node could hold without other kinds, by a formula.

    The formula ignores memory. A kind with several GPUs needs whole GPUs.

    Args:
        kinds: Kinds of request with GPUs.
        serves: Whether each type of node may serve each kind: `[types, kinds]`.
    """

    def __init__(self, kinds: Sequence[RequestKind], serves: Bools) -> None:
        self._serves = serves.astype(np.int32)
        self._cpu = np.array([max(1, kind.cpu_milli) for kind in kinds], np.int64)
        self._no_cpu = np.array([COPIES_MAX * (not k.cpu_milli) for k in kinds], np.int64)
        self._gpus = np.array([kind.gpus for kind in kinds], np.int32)
        sizes, self._size_of = np.unique([k.gpu_milli for k in kinds], return_inverse=True)
        # How many shares of each size a GPU has room for, by its free milli.
        shares = np.arange(GPU_MILLI + 1)[:, None] // sizes.astype(np.int64)
        self._shares = shares.astype(np.int32)

    def count(self, sorts: Ints, cpu: Ints, gpus: Ints) -> npt.NDArray[np.int32]:
        """Return the copies of each kind on nodes in some states: `[states, kinds]`.

        Args:
            sorts: Type of each node: `[states]`.
            cpu: Free CPU milli: `[states]`.
            gpus: Free milli of every GPU, 0 to 1000: `[states, devices]`.
        """
        by_size = self._shares.take(gpus, 0).sum(1, dtype=np.int32)
        copies: npt.NDArray[np.int32] = by_size.take(self._size_of, 1)
        copies //= self._gpus
        by_cpu = np.maximum(cpu, 0)[:, None] // self._cpu + self._no_cpu
        np.minimum(copies, by_cpu.clip(max=COPIES_MAX), out=copies, casting="unsafe")
        copies *= self._serves[sorts]
        return copies


class ScarcityPrices:
    """The price of one place, by kind of request: the fewer places, the higher.

        price = share of all requests x GPU milli / (1 + N / k)^2

    N is the number of copies that the whole fleet could still hold if each node held this kind
    alone; `refresh` updates it from the nodes that changed. k is a number of copies: one for every
    `GPUS_PER_COPY` GPUs of the fleet, at least 1. So a fleet ten times as large has the same prices
    if ten times as many copies fit.

    `refresh` computes the prices once per `len(fleet) / NODES_PER_REQUEST` requests: a price
    depends on hundreds of nodes, so a few changed nodes matter little.

    Args:
        kinds: Kinds of request with GPUs, their weights as shares of all requests.
        copies: Counts copies of the same kinds.
        sort_of: The type of each node.
        fleet: The nodes.

    Attributes:
        prices: The price of each kind.
    """

    GPUS_PER_COPY: Final = 600
    NODES_PER_REQUEST: Final = 6

    def __init__(
        self, kinds: Sequence[RequestKind], copies: KindCopies, sort_of: Ints, fleet: FleetView
    ) -> None:
        self._copies, self._type_of = copies, sort_of
        self._worths = np.array([kind.weight * kind.milli for kind in kinds])
        gpus = int((fleet.gpu_total > 0).sum())
        self._copies_k = max(1.0, gpus / self.GPUS_PER_COPY)
        self._held = np.zeros((len(fleet), len(kinds)), np.uint16)
        self._copies_free = np.zeros(len(kinds), np.int64)
        self._version = -1
        self._every = max(1, len(fleet) // self.NODES_PER_REQUEST)
        self._requests = self._every
        self.prices = self._worths

    def refresh(self, fleet: FleetView) -> bool:
        """Count a request; return whether the prices were computed again."""
        self._requests += 1
        if self._requests <= self._every:
            return False
        self._requests = 1
        changed = fleet.changed_since(self._version)
        rows = np.arange(len(fleet)) if changed is None else np.array(changed, np.int64)
        self._version = fleet.version
        for start in range(0, len(rows), ROWS_MAX):
            self._count(fleet, rows[start : start + ROWS_MAX])
        prices: Any = self._worths / (1 + self._copies_free / self._copies_k) ** 2
        self.prices = prices
        return True

    def _count(self, fleet: FleetView, rows: Ints) -> None:
        gpus = np.maximum(fleet.gpu_free[rows], 0)
        now = self._copies.count(self._type_of[rows], fleet.cpu_free[rows], gpus)
        self._copies_free += now.sum(0) - self._held[rows].sum(0, dtype=np.int64)
        self._held[rows] = now

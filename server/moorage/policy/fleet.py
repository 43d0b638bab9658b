"""The fleet in columns: what every node has and what of it is free.

One class, three places. The core keeps its truth in it, every cell keeps its replica in it, and
an author's rule reads it as `input_data["fleet"]`. So the rule that proposes, the allocator that
verifies and the reply that explains all ask the same feasibility function, and none can disagree.

Rows are nodes, ordered by (cluster id, node id): the order is stable, so "the first row wins" is
a deterministic tie-break. GPU columns are `[nodes, devices]`, zero where a node has fewer devices.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moorage.model import GPU_MILLI, Cluster, Demand, Gpu, Share

CHANGES_MAX: Final = 65_536
"""Changes remembered for `changed_since`; whoever is further behind is told to look at all."""
ELIGIBLE_MAX: Final = 256
"""Device masks kept per (models, memory, share) asked for; beyond it the cache starts afresh."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_NODE_COLUMNS: Final = ("cpu_total", "cpu_free", "memory_total", "memory_free", "rack", "cluster")
_GPU_COLUMNS: Final = ("gpu_total", "gpu_free", "gpu_model", "gpu_memory", "gpu_link", "gpu_numa")


class Misfit(IntEnum):
    """Why a node cannot take a demand: the first constraint that fails, in this order.

    The members up to `MEMORY` say that the node could not take it even when empty ("never
    here"); the later ones that it cannot take it now.
    """

    FITS = 0
    GPU_MODEL = 1
    GPU_MEMORY = 2
    GPU_COUNT = 3
    TOPOLOGY = 4
    CPU = 5
    MEMORY = 6
    GPUS_BUSY = 7
    TOPOLOGY_BUSY = 8
    CPU_BUSY = 9
    MEMORY_BUSY = 10


NEVER: Final = Misfit.MEMORY
"""Misfits up to this one do not depend on what is running."""


class Fleet:
    """Columns over all nodes, and the log of which rows changed.

    Attributes:
        version: Grows by one with every change of a row's free capacity, never repeats.
        layout: Grows when the inventory changes; rows may then mean other nodes.
        cluster_ids: Clusters, sorted; `cluster` holds indices into it.
        node_ids: `(cluster_id, node_id)` per row.
        gpu_ids: Device ids per row, in column order.
        models: Model names; `gpu_model` holds indices into it, -1 for no device.
        cpu_total, cpu_free: int64 `[nodes]`, milli.
        memory_total, memory_free: int64 `[nodes]`, MiB.
        gpu_total, gpu_free: int64 `[nodes, devices]`, milli.
        gpu_memory: int64 `[nodes, devices]`, MiB.
        gpu_link, gpu_numa: int64 `[nodes, devices]`, group numbers within the node, -1: none.
        gpu_exclusive: bool `[nodes, devices]`: only to be taken whole.
        rack, cluster: int64 `[nodes]`, group numbers; rack -1: unknown.

    """

    def __init__(self) -> None:
        self.version = 0
        self.layout = 0
        self._changes: list[int] = []
        self._changes_base = 0
        self._eligible: dict[tuple[tuple[str, ...], int, bool], Bools] = {}
        self._fill([])

    # Inventory -----------------------------------------------------------------------------

    def install(self, clusters: Iterable[Cluster]) -> None:
        """Take over a new inventory; every node is then empty and every row counts as changed."""
        self._fill(sorted(clusters, key=lambda cluster: cluster.id))
        self._renew()

    def _fill(self, clusters: Sequence[Cluster]) -> None:
        pairs = [
            (number, cluster.id, node)
            for number, cluster in enumerate(clusters)
            for node in sorted(cluster.nodes, key=lambda node: node.id)
        ]
        # Nodes of one kind have equal devices: each kind's columns are made once.
        kinds: dict[tuple[Gpu, ...], int] = {}
        kind_of = [kinds.setdefault(node.gpus, len(kinds)) for _, _, node in pairs]
        # Tuples, because rules are handed them: a rule that sorts one would mislead the next.
        self.cluster_ids: tuple[str, ...] = tuple(cluster.id for cluster in clusters)
        self.node_ids: tuple[tuple[str, str], ...] = tuple(
            (name, node.id) for _, name, node in pairs
        )
        ids = [tuple(gpu.id for gpu in gpus) for gpus in kinds]
        self.gpu_ids: tuple[tuple[str, ...], ...] = tuple(ids[kind] for kind in kind_of)
        self.models: tuple[str, ...] = tuple(sorted({g.model for gpus in kinds for g in gpus}))
        # A rack's name is its cluster's own: two clusters may each have a "rack-1".
        named = sorted({(number, node.rack) for number, _, node in pairs if node.rack})
        racks = {rack: code for code, rack in enumerate(named)}
        self.rack: Ints = np.array([racks.get((c, n.rack), -1) for c, _, n in pairs], np.int64)
        self.cluster: Ints = np.array([number for number, _, _ in pairs], np.int64)
        self.cpu_total: Ints = np.array([node.cpu_milli for _, _, node in pairs], np.int64)
        self.memory_total: Ints = np.array([node.memory_mib for _, _, node in pairs], np.int64)
        self._fill_devices(list(kinds), kind_of)
        self.cpu_free: Ints = self.cpu_total.copy()
        self.memory_free: Ints = self.memory_total.copy()
        self.gpu_free: Ints = self.gpu_total.copy()

    def _fill_devices(self, kinds: Sequence[tuple[Gpu, ...]], kind_of: Sequence[int]) -> None:
        shape = len(kinds), max(map(len, kinds), default=0)
        assert shape[1] < 256, "devices are counted in bytes"  # noqa: PLR2004  # A byte's range.
        model_code = {model: code for code, model in enumerate(self.models)}
        total, memory = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        model, link, numa = (np.full(shape, -1, np.int64) for _ in range(3))
        exclusive = np.zeros(shape, np.bool_)
        for row, gpus in enumerate(kinds):
            links = sorted({gpu.link_group for gpu in gpus} - {""})
            domains = sorted({gpu.numa for gpu in gpus if gpu.numa >= 0})
            for column, gpu in enumerate(gpus):
                total[row, column] = GPU_MILLI
                memory[row, column] = gpu.memory_mib
                model[row, column] = model_code[gpu.model]
                link[row, column] = links.index(gpu.link_group) if gpu.link_group else -1
                numa[row, column] = domains.index(gpu.numa) if gpu.numa >= 0 else -1
                exclusive[row, column] = gpu.exclusive
        rows = np.array(kind_of, np.int64)
        self.gpu_total: Ints = total[rows]
        self.gpu_memory: Ints = memory[rows]
        self.gpu_model: Ints = model[rows]
        self.gpu_link: Ints = link[rows]
        self.gpu_numa: Ints = numa[rows]
        self.gpu_exclusive: Bools = exclusive[rows]

    def _renew(self) -> None:
        self._row_of = {pair: row for row, pair in enumerate(self.node_ids)}
        self.layout += 1
        self.version += 1
        self._changes_base = self.version
        self._changes.clear()
        self._eligible.clear()

    def snapshot(self) -> dict[str, Any]:
        """All of it as plain values and bytes, for a replica to `restore`."""
        columns: dict[str, Any] = {
            name: getattr(self, name).tobytes() for name in (*_NODE_COLUMNS, *_GPU_COLUMNS)
        }
        return {
            "version": self.version,
            "width": int(self.gpu_total.shape[1]),
            "cluster_ids": self.cluster_ids,
            "node_ids": [node for _, node in self.node_ids],
            "gpu_ids": self.gpu_ids,
            "models": self.models,
            "gpu_exclusive": self.gpu_exclusive.tobytes(),
            **columns,
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Become the replica of the fleet that `snapshot` was taken of."""
        rows, width = len(snapshot["node_ids"]), snapshot["width"]
        for name in _NODE_COLUMNS:
            setattr(self, name, np.frombuffer(snapshot[name], np.int64).copy())
        for name in _GPU_COLUMNS:
            column = np.frombuffer(snapshot[name], np.int64).reshape(rows, width)
            setattr(self, name, column.copy())
        exclusive = np.frombuffer(snapshot["gpu_exclusive"], np.bool_)
        self.gpu_exclusive = exclusive.reshape(rows, width).copy()
        self.cluster_ids = tuple(snapshot["cluster_ids"])
        self.models = tuple(snapshot["models"])
        self.gpu_ids = tuple(tuple(ids) for ids in snapshot["gpu_ids"])
        names = self.cluster_ids
        self.node_ids = tuple(
            (names[number], node)
            for number, node in zip(self.cluster.tolist(), snapshot["node_ids"], strict=True)
        )
        self._renew()

    # Capacity ------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self.node_ids)

    def row(self, cluster_id: str, node_id: str) -> int | None:
        """Return the row of a node, or None where the fleet has no such node."""
        return self._row_of.get((cluster_id, node_id)) if self.node_ids else None

    def take(self, share: Share) -> None:
        """Count `share` as held. A node or device that the fleet lost holds nothing."""
        self._move(share, -1)

    def give(self, share: Share) -> None:
        """Count `share` as free again."""
        self._move(share, 1)

    def _move(self, share: Share, sign: int) -> None:
        row = self.row(share.cluster_id, share.node_id)
        if row is None:
            return
        self.cpu_free[row] += sign * share.cpu_milli
        self.memory_free[row] += sign * share.memory_mib
        ids = self.gpu_ids[row]
        for gpu in share.gpus:
            if gpu in ids:
                self.gpu_free[row, ids.index(gpu)] += sign * share.gpu_milli
        self.touch(row)

    def touch(self, row: int) -> None:
        """Note that the free capacity of `row` changed."""
        self._changes.append(row)
        self.version += 1
        if len(self._changes) > CHANGES_MAX:
            half = len(self._changes) // 2
            del self._changes[:half]
            self._changes_base += half

    def changed_since(self, version: int) -> list[int] | None:
        """Return the rows that changed after `version`, oldest change first, each once.

        None means "look at all of them": the caller is too far behind, or the inventory
        changed.
        """
        if version < self._changes_base:
            return None
        return list(dict.fromkeys(self._changes[version - self._changes_base :]))

    def capacity(self, row: int) -> tuple[int, int, list[int]]:
        """Return what is free on a node: CPU milli, memory MiB, milli per device."""
        return int(self.cpu_free[row]), int(self.memory_free[row]), self.gpu_free[row].tolist()

    def set_capacity(self, row: int, cpu: int, memory: int, gpus: Sequence[int]) -> None:
        """Overwrite what is free on a node (for a replica that is told so)."""
        self.cpu_free[row] = cpu
        self.memory_free[row] = memory
        self.gpu_free[row] = gpus
        self.touch(row)

    # Feasibility ---------------------------------------------------------------------------

    def eligible_gpus(self, demand: Demand) -> Bools:
        """Return which devices may serve `demand` at all: bool `[nodes, devices]`, do not write."""
        share = demand.gpu_milli < GPU_MILLI
        key = (demand.models, demand.gpu_memory_mib, share)
        mask = self._eligible.get(key)
        if mask is None:
            mask = self.gpu_total > 0
            if demand.models:
                mask &= np.isin(self.gpu_model, self._codes(demand.models))
            if demand.gpu_memory_mib:
                mask &= self.gpu_memory >= demand.gpu_memory_mib
            if share:
                mask &= ~self.gpu_exclusive
            if len(self._eligible) >= ELIGIBLE_MAX:
                self._eligible.clear()
            mask.flags.writeable = False
            self._eligible[key] = mask
        return mask

    def fitting_gpus(self, demand: Demand, rows: Any = slice(None)) -> Bools:
        """Return which devices could serve `demand` now: bool `[rows, devices]`."""
        fitting: Bools = self.gpu_free[rows] >= demand.gpu_milli
        fitting &= self.eligible_gpus(demand)[rows]
        return fitting

    def feasible(self, demand: Demand, rows: Any = slice(None)) -> Bools:
        """Return which nodes could take one node's part of `demand` now: bool `[rows]`.

        Args:
            demand: What must fit on the node.
            rows: Index of the rows to judge (slice, or array of row numbers); all by default.

        """
        fits: Bools = self.cpu_free[rows] >= demand.cpu_milli
        fits &= self.memory_free[rows] >= demand.memory_mib
        if demand.gpus:
            fits &= self._enough(self.fitting_gpus(demand, rows), demand, rows)
        return fits

    def misfits(self, demand: Demand, rows: Any = slice(None)) -> npt.NDArray[np.int8]:
        """Return the first failing constraint per node, as `Misfit` values: int8 `[rows]`.

        A node is `FITS` exactly when `feasible` says so.
        """
        verdict = np.zeros(len(self.cpu_free[rows]), np.int8)

        def fail(bad: Bools, why: Misfit) -> None:
            verdict[bad & (verdict == 0)] = why

        if demand.gpus:
            exists = self.gpu_total[rows] > 0
            if demand.models:
                exists &= np.isin(self.gpu_model[rows], self._codes(demand.models))
                fail(_devices(exists) < demand.gpus, Misfit.GPU_MODEL)
            if demand.gpu_memory_mib:
                exists &= self.gpu_memory[rows] >= demand.gpu_memory_mib
                fail(_devices(exists) < demand.gpus, Misfit.GPU_MEMORY)
            able = self.eligible_gpus(demand)[rows]
            fail(_devices(able) < demand.gpus, Misfit.GPU_COUNT)
            fail(~self._enough(able, demand, rows), Misfit.TOPOLOGY)
        fail(self.cpu_total[rows] < demand.cpu_milli, Misfit.CPU)
        fail(self.memory_total[rows] < demand.memory_mib, Misfit.MEMORY)
        if demand.gpus:
            fitting = self.fitting_gpus(demand, rows)
            fail(_devices(fitting) < demand.gpus, Misfit.GPUS_BUSY)
            fail(~self._enough(fitting, demand, rows), Misfit.TOPOLOGY_BUSY)
        fail(self.cpu_free[rows] < demand.cpu_milli, Misfit.CPU_BUSY)
        fail(self.memory_free[rows] < demand.memory_mib, Misfit.MEMORY_BUSY)
        return verdict

    def pick_gpus(self, row: int, demand: Demand) -> list[int]:
        """Return device columns of `row` that serve `demand`, or [] where they do not suffice.

        Whole devices: the lowest-numbered free ones. Shares: the tightest that fit, so that
        whole devices stay whole. With `nvlink` or `numa`, all from the smallest group that
        suffices.
        """
        fitting = self.fitting_gpus(demand, slice(row, row + 1))[0]
        columns: list[int] = np.flatnonzero(fitting).tolist()
        groups = self._groups(demand)
        if groups is not None:
            by_group: dict[int, list[int]] = {}
            for column in columns:
                if groups[row, column] >= 0:
                    by_group.setdefault(int(groups[row, column]), []).append(column)
            enough = [found for found in by_group.values() if len(found) >= demand.gpus]
            columns = min(enough, key=len, default=[])
        if demand.gpu_milli < GPU_MILLI:
            columns.sort(key=lambda column: int(self.gpu_free[row, column]))
        return sorted(columns[: demand.gpus]) if len(columns) >= demand.gpus else []

    def share(self, row: int, demand: Demand, columns: Sequence[int]) -> Share:
        """Return the share of node `row` that serves `demand` on the devices `columns`."""
        cluster_id, node_id = self.node_ids[row]
        return Share(
            cluster_id=cluster_id,  # type: ignore[arg-type]  # Plain strings in the replica.
            node_id=node_id,  # type: ignore[arg-type]  # As above.
            gpus=tuple(self.gpu_ids[row][column] for column in columns),
            gpu_milli=demand.gpu_milli,
            cpu_milli=demand.cpu_milli,
            memory_mib=demand.memory_mib,
        )

    def _codes(self, models: Sequence[str]) -> list[int]:
        return [code for code, model in enumerate(self.models) if model in models]

    def _groups(self, demand: Demand) -> Ints | None:
        if demand.gpus <= 1:
            return None  # One device is its own group.
        if demand.topology == "nvlink":
            return self.gpu_link
        return self.gpu_numa if demand.topology == "numa" else None

    def _enough(self, usable: Bools, demand: Demand, rows: Any) -> Bools:
        """Return which rows have enough usable devices, in one group where topology asks so."""
        groups = self._groups(demand)
        enough: Bools
        if groups is None:
            enough = _devices(usable) >= demand.gpus
            return enough
        enough = np.zeros(len(usable), np.bool_)
        for group in range(int(groups.max(initial=-1)) + 1):
            enough |= _devices(usable & (groups[rows] == group)) >= demand.gpus
        return enough


def _devices(mask: Bools) -> npt.NDArray[np.uint8]:
    """Count the devices of each node that are set in `mask`.

    A product of bytes is three times as fast here as numpy's sum over the last axis, and no node
    has 256 devices.
    """
    count: npt.NDArray[np.uint8] = mask.view(np.uint8) @ np.ones(mask.shape[1], np.uint8)
    return count

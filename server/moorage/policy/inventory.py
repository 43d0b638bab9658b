"""Columns with totals and free amounts of all nodes, updated with the inventory.

`policy.fleet.Fleet` adds feasibility. The core replaces each cluster that changes; a cell's replica
restores a snapshot once, and then replaces the parts that changed.

Rows are nodes, ordered by (cluster id, node id): the order is stable, so "the first row wins" is
a deterministic tie-break. GPU columns are `[nodes, devices]`, zero where a node has fewer devices.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from moorage.model import GPU_MILLI, Cluster, Demand, DeviceId, Gpu, Node
from moorage.records.json_values import JsonObject

CHANGES_MAX: Final = 65_536
"""At most this many changes are stored; a reader that is further behind must read all rows."""
SPLICES_MAX: Final = 256
"""At most this many replaced clusters are stored; a reader further behind takes a snapshot."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_AMOUNTS: Final = ("cpu_total", "cpu_free", "memory_total", "memory_free", "closed")
_TOGETHER: Final = ("rack", "zone")
"""The domains that the nodes of a gang may share."""
_NODE_COLUMNS: Final = (*_AMOUNTS, *_TOGETHER, "cluster")
_GPU_COLUMNS: Final = ("gpu_total", "gpu_free", "gpu_model", "gpu_memory", "gpu_link", "gpu_numa")
_DEVICE_COLUMNS: Final = (*_GPU_COLUMNS, "gpu_exclusive")
_NO_DEVICE: Final = {"gpu_model": -1, "gpu_link": -1, "gpu_numa": -1}
"""Values of a GPU column for a missing device; other columns have 0."""


class NodeInventory:
    """Columns over all nodes, and a log of the changed rows.

    Attributes:
        version: Grows by one with every change of a row's free capacity, never repeats.
        layout: Grows when the inventory changes; row numbers may then mean other nodes.
        cluster_ids: Clusters, sorted; `cluster` holds indices into it.
        node_ids: `(cluster_id, node_id)` per row.
        gpu_ids: Device ids per row, in column order.
        labels: Labels per row, as the inventory has them; empty in a replica.
        devices: Identities of the devices in `gpu_ids`, per row; empty if the inventory has none,
            and in a replica.
        models: Model names; `gpu_model` holds indices into it, -1 for no device.
        cpu_total, cpu_free: int64 `[nodes]`, milli.
        memory_total, memory_free: int64 `[nodes]`, MiB.
        gpu_total, gpu_free: int64 `[nodes, devices]`, milli.
        gpu_memory: int64 `[nodes, devices]`, MiB.
        gpu_link, gpu_numa: int64 `[nodes, devices]`, group numbers within the node, -1: none.
        gpu_exclusive: bool `[nodes, devices]`: shares of this device are not granted.
        rack, zone, cluster: int64 `[nodes]`, group numbers; rack and zone -1: unknown.
        closed: int64 `[nodes]`, 1 where nothing can start now: the node's free CPU is -1, which is
            too little for all demands, and neither memory nor a device is free.
    """

    def __init__(self) -> None:
        self.version = 0
        self.layout = 0
        self._changes: list[int] = []
        self._changes_base = 0
        self._layout_version = 0
        self._splices: list[str] = []
        self._splices_base = 0
        self._fill([])
        self._number_rows()

    # Inventory -----------------------------------------------------------------------------

    def install(self, clusters: Iterable[Cluster]) -> None:
        """Replace the inventory: all nodes are empty, and all rows count as changed."""
        self._fill(sorted(clusters, key=lambda cluster: cluster.id))
        self._renew()

    def _fill(self, clusters: Sequence[Cluster]) -> None:
        pairs = [
            (number, cluster.id, _counted_part(node))
            for number, cluster in enumerate(clusters)
            for node in sorted(cluster.nodes, key=lambda node: node.id)
        ]
        # Nodes of one kind have equal devices: each kind's columns are made once.
        kinds: dict[tuple[Gpu, ...], int] = {}
        # Equal devices are often the same tuple object, which is compared only once.
        same: dict[int, int] = {}
        kind_of: list[int] = []
        for _, _, node in pairs:
            kind = same.get(id(node.gpus))
            if kind is None:
                kind = same[id(node.gpus)] = kinds.setdefault(node.gpus, len(kinds))
            kind_of.append(kind)
        # Tuples, because policies read them: a policy that sorts a list would mislead the next.
        self.cluster_ids: tuple[str, ...] = tuple(cluster.id for cluster in clusters)
        self.node_ids: tuple[tuple[str, str], ...] = tuple(
            (name, node.id) for _, name, node in pairs
        )
        self.labels: tuple[Mapping[str, str], ...] = tuple(node.labels for _, _, node in pairs)
        self.devices: tuple[tuple[DeviceId, ...], ...] = tuple(node.devices for _, _, node in pairs)
        ids = [tuple(gpu.id for gpu in gpus) for gpus in kinds]
        self.gpu_ids: tuple[tuple[str, ...], ...] = tuple(ids[kind] for kind in kind_of)
        self.models: tuple[str, ...] = tuple(sorted({g.model for gpus in kinds for g in gpus}))
        self.rack: Ints = _number([(number, node.rack) for number, _, node in pairs])
        self.zone: Ints = _number([(number, node.zone) for number, _, node in pairs])
        self.cluster: Ints = np.array([number for number, _, _ in pairs], np.int64)
        self.cpu_total: Ints = np.array([node.cpu_milli for _, _, node in pairs], np.int64)
        self.memory_total: Ints = np.array([node.memory_mib for _, _, node in pairs], np.int64)
        self._fill_devices(list(kinds), kind_of)
        self.closed: Ints = np.array([bool(node.unavailable) for _, _, node in pairs], np.int64)
        shut = self.closed > 0
        self.cpu_free: Ints = np.where(shut, -1, self.cpu_total)
        self.memory_free: Ints = np.where(shut, 0, self.memory_total)
        self.gpu_free: Ints = np.where(shut[:, None], 0, self.gpu_total)

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
        self.layout += 1
        self.version += 1
        self._changes_base = self._layout_version = self.version
        self._changes.clear()
        self._splices_base = self.layout
        self._splices.clear()
        self._number_rows()

    def _number_rows(self) -> None:
        borders = np.searchsorted(self.cluster, np.arange(len(self.cluster_ids) + 1)).tolist()
        self._spans = dict(zip(self.cluster_ids, pairwise(borders), strict=True))
        self._places: dict[str, dict[str, int]] = {}

    def put(self, cluster: Cluster) -> None:
        """Add a cluster, or replace the cluster that has its id.

        All other rows keep their values; the work is at most a copy of the columns. Afterwards the
        cluster's own nodes are empty.
        """
        part = type(self)()
        part.install([cluster])
        self.splice(cluster.id, part)

    def remove(self, cluster_id: str) -> None:
        """Remove a cluster; do nothing if the fleet lacks it."""
        self.splice(cluster_id, None)

    def part(self, cluster_id: str) -> Self | None:
        """Return a fleet of one cluster, for a replica's `splice`; None for an unknown cluster."""
        if cluster_id not in self._spans:
            return None
        start, end = self._spans[cluster_id]
        part = type(self)()
        for name in (*_NODE_COLUMNS, *_DEVICE_COLUMNS):
            setattr(part, name, getattr(self, name)[start:end].copy())
        part.cluster[:] = 0
        for name in _TOGETHER:
            column = getattr(part, name)
            column[column >= 0] -= getattr(self, name)[:start].max(initial=-1) + 1
        part.cluster_ids, part.models = (cluster_id,), self.models
        part.node_ids, part.gpu_ids = self.node_ids[start:end], self.gpu_ids[start:end]
        part.labels, part.devices = self.labels[start:end], self.devices[start:end]
        part._renew()  # noqa: SLF001  # One of its own kind.
        return part

    def sample(self, rows: npt.NDArray[np.intp]) -> Self:
        """Return an inventory of some of the rows, for reading only."""
        part = type(self)()
        for name in (*_NODE_COLUMNS, *_DEVICE_COLUMNS):
            setattr(part, name, getattr(self, name)[rows])
        part.cluster_ids, part.models = self.cluster_ids, self.models
        return part

    def splice(self, cluster_id: str, part: Self | None) -> None:
        """Replace the rows of one cluster, their free amounts included; None removes them.

        The result is the same as that of installing all clusters again, and the other rows' free
        capacity stays.
        """
        known = cluster_id in self._spans
        if part is None:
            if not known:
                return
            part = type(self)()
        number = bisect_left(self.cluster_ids, cluster_id)
        start, end = np.searchsorted(self.cluster, (number, number + known)).tolist()
        self._merge_devices(part, start, end)
        self._merge_nodes(part, start, end, number)
        if len(part.cluster_ids) != known:
            self.cluster[start + len(part) :] += 1 if part.cluster_ids else -1
            rest = self.cluster_ids[number + known :]
            self.cluster_ids = (*self.cluster_ids[:number], *part.cluster_ids, *rest)
        moved = len(part) - (end - start)
        if moved or len(part.cluster_ids) != known:
            self._number_rows()
        self._places.pop(cluster_id, None)
        self._note_splice(cluster_id, start, end, moved)

    def _merge_nodes(self, part: Self, start: int, end: int, number: int) -> None:
        for name in _TOGETHER:
            ours, theirs = getattr(self, name), getattr(part, name)
            before = int(ours[:start].max(initial=-1)) + 1
            held = int(ours[start:end].max(initial=before - 1)) + 1 - before
            groups = np.where(theirs >= 0, theirs + before, -1)
            ours[end:][ours[end:] >= 0] += int(theirs.max(initial=-1)) + 1 - held
            setattr(self, name, _splice(ours, groups, start, end))
        self.cluster = _splice(self.cluster, np.full(len(part), number, np.int64), start, end)
        for name in _AMOUNTS:
            setattr(self, name, _splice(getattr(self, name), getattr(part, name), start, end))
        for name in ("node_ids", "gpu_ids", "labels", "devices"):
            ours, theirs = getattr(self, name), getattr(part, name)
            if ours[start:end] != theirs:
                setattr(self, name, (*ours[:start], *theirs, *ours[end:]))

    def _merge_devices(self, part: Self, start: int, end: int) -> None:
        """Replace the GPU columns of some rows; adjust model codes and the width."""
        codes = np.unique(self.gpu_model[start:end])
        gone = {
            self.models[code]
            for code in codes[codes >= 0].tolist()
            if self.models[code] not in part.models
            and not (self.gpu_model[:start] == code).any()
            and not (self.gpu_model[end:] == code).any()
        }
        models = tuple(sorted((frozenset(self.models) - gone).union(part.models)))
        if models != self.models:
            self.gpu_model = _recode(self.gpu_model, self.models, models)
        own = {"gpu_model": _recode(part.gpu_model, part.models, models)}
        self.models = models
        width, wanted = self.gpu_total.shape[1], _width(part.gpu_total)
        full = wanted < width and bool(self.gpu_total[start:end, width - 1 :].any())
        width = max(width, wanted)
        for name in _DEVICE_COLUMNS:
            fill = _NO_DEVICE.get(name, 0)
            ours = _widen(getattr(self, name), width, fill)
            theirs = _widen(own.get(name, getattr(part, name)), width, fill)
            setattr(self, name, _splice(ours, theirs, start, end))
        if full and (width := _width(self.gpu_total)) < self.gpu_total.shape[1]:
            for name in _DEVICE_COLUMNS:
                setattr(self, name, getattr(self, name)[:, :width].copy())

    def _note_splice(self, cluster_id: str, start: int, end: int, moved: int) -> None:
        """Record the splice of a cluster; renumber the rows in `_changes`, -1: a replaced row."""
        self._changes = [
            row if row < start else -1 if row < end else row + moved for row in self._changes
        ]
        self.touch(-1)
        self.layout += 1
        self._layout_version = self.version
        self._splices.append(cluster_id)
        if len(self._splices) > SPLICES_MAX:
            half = SPLICES_MAX // 2
            del self._splices[:half]
            self._splices_base += half

    def spliced_since(self, layout: int) -> list[str] | None:
        """Return the clusters whose rows were replaced after `layout`; None: all clusters."""
        if layout < self._splices_base:
            return None
        return list(dict.fromkeys(self._splices[layout - self._splices_base :]))

    def snapshot(self) -> JsonObject:
        """Return the whole fleet as plain values and bytes, for `restore` of a replica.

        A column has the narrowest type for its values: at a million devices, a fifth of the bytes.
        """
        # Most nodes have the same device ids.
        kinds = {ids: kind for kind, ids in enumerate(dict.fromkeys(self.gpu_ids))}
        columns: JsonObject = {
            name: _pack(getattr(self, name)) for name in (*_NODE_COLUMNS, *_GPU_COLUMNS)
        }
        return {
            "version": self.version,
            "width": int(self.gpu_total.shape[1]),
            "cluster_ids": self.cluster_ids,
            "node_ids": [node for _, node in self.node_ids],
            "gpu_ids": tuple(kinds),
            "gpu_ids_of": _pack(np.array([kinds[ids] for ids in self.gpu_ids], np.int64)),
            "models": self.models,
            "gpu_exclusive": self.gpu_exclusive.tobytes(),
            **columns,
        }

    def restore(self, snapshot: JsonObject) -> None:
        """Load the state of another fleet's `snapshot`, to become its replica."""
        rows, width = len(snapshot["node_ids"]), snapshot["width"]
        for name in _NODE_COLUMNS:
            setattr(self, name, _unpack(snapshot[name]))
        for name in _GPU_COLUMNS:
            setattr(self, name, _unpack(snapshot[name]).reshape(rows, width))
        exclusive = np.frombuffer(snapshot["gpu_exclusive"], np.bool_)
        self.gpu_exclusive = exclusive.reshape(rows, width).copy()
        self.cluster_ids = tuple(snapshot["cluster_ids"])
        self.models = tuple(snapshot["models"])
        kinds = [tuple(ids) for ids in snapshot["gpu_ids"]]
        self.gpu_ids = tuple(kinds[kind] for kind in _unpack(snapshot["gpu_ids_of"]).tolist())
        self.labels = self.devices = ()
        names = self.cluster_ids
        self.node_ids = tuple(
            (names[number], node)
            for number, node in zip(self.cluster.tolist(), snapshot["node_ids"], strict=True)
        )
        self._renew()

    def __len__(self) -> int:
        return len(self.node_ids)

    def rows_of(self, cluster_id: str) -> range:
        """Return the rows of a cluster; none if the fleet has no such cluster."""
        return range(*self._spans.get(cluster_id, (0, 0)))

    def row(self, cluster_id: str, node_id: str) -> int | None:
        """Return the row of a node, or None if the fleet has no such node."""
        span = self._spans.get(cluster_id)
        if span is None:
            return None
        places = self._places.get(cluster_id)
        if places is None:
            names = self.node_ids[slice(*span)]
            places = self._places[cluster_id] = {
                node: span[0] + place for place, (_, node) in enumerate(names)
            }
        return places.get(node_id)

    # Which rows changed ----------------------------------------------------------------------

    def touch(self, row: int) -> None:
        """Record that the free capacity of `row` changed."""
        self._changes.append(row)
        self.version += 1
        if len(self._changes) > CHANGES_MAX:
            half = len(self._changes) // 2
            del self._changes[:half]
            self._changes_base += half

    def changed_since(self, version: int) -> list[int] | None:
        """Return the rows that changed after `version`, oldest change first, each once.

        None: read all rows again, since rows were added or removed, or `version` is too old.
        """
        return None if version < self._layout_version else self.rows_since(version)

    def rows_since(self, version: int) -> list[int] | None:
        """Return the present numbers of changed rows, for callers that also use `spliced_since`."""
        if version < self._changes_base:
            return None
        rows = dict.fromkeys(self._changes[version - self._changes_base :])
        rows.pop(-1, None)
        return list(rows)


def gang_groups(fleet: Any, demand: Demand) -> Ints | None:
    """Return the group of each node; all nodes of a gang must be in one group.

    Args:
        fleet: A fleet, or a view of one.
        demand: The demand.

    Returns:
        A group number for each node, int64 `[nodes]`, -1: no group. None: no group is required.
    """
    together = demand.nodes > 1 and demand.topology in _TOGETHER
    return getattr(fleet, demand.topology) if together else None


def _number(names: Sequence[tuple[int, str]]) -> Ints:
    """Return a number for each name within its cluster: two clusters may each have a "rack-1"."""
    numbers = {name: at for at, name in enumerate(sorted({each for each in names if each[1]}))}
    return np.array([numbers.get(name, -1) for name in names], np.int64)


def _counted_part(node: Node) -> Node:
    """Return a node; without capacity if another node represents the same machine."""
    return (
        replace(node, cpu_milli=0, memory_mib=0, gpus=(), devices=()) if node.duplicate_of else node
    )


def _splice(column: npt.NDArray[Any], rows: npt.NDArray[Any], start: int, end: int) -> Any:
    """Replace rows of a column; in place if their number stays the same."""
    if len(rows) != end - start:
        return np.concatenate([column[:start], rows, column[end:]])
    column[start:end] = rows
    return column


def _recode(codes: Ints, before: Sequence[str], after: Sequence[str]) -> Ints:
    """Translate model codes to the numbering of another list of names; -1 stays -1."""
    numbers = {model: code for code, model in enumerate(after)}
    table = np.array([*(numbers.get(model, -1) for model in before), -1], np.int64)
    recoded: Ints = table[codes]
    return recoded


def _width(totals: Ints) -> int:
    """Return the number of columns that have a device."""
    return int(np.flatnonzero(totals.any(0)).max(initial=-1)) + 1


def _widen(column: npt.NDArray[Any], width: int, fill: int) -> npt.NDArray[Any]:
    """Return a GPU column with exactly `width` device columns; added ones have no device."""
    rows, held = column.shape
    if held == width:
        return column
    if held > width:
        return column[:, :width]
    return np.concatenate([column, np.full((rows, width - held), fill, column.dtype)], axis=1)


def _pack(column: Ints) -> tuple[str, bytes]:
    low, high = column.min(initial=0), column.max(initial=0)
    narrow = np.result_type(np.min_scalar_type(low), np.min_scalar_type(high))
    return narrow.str, column.astype(narrow).tobytes()


def _unpack(packed: Sequence[Any]) -> Ints:
    kind, content = packed
    return np.frombuffer(content, kind).astype(np.int64)

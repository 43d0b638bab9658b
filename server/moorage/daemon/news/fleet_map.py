"""The fleet map of the console: the state of each GPU slot in columns, and the changed slots.

The daemon makes a map of the state while a session watches, and applies only durable facts to it:
so no map shows what a crash could undo. A fact that the state has already may be applied again.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np

from moorage.core.state.facts import (
    Carried,
    ClockMoved,
    ClusterRemoved,
    ClusterSet,
    Cordoned,
    Ended,
    Ending,
    Fact,
    Finished,
    Granted,
    Moved,
    Renewed,
    Requeued,
    Started,
    Uncordoned,
    Warmed,
)
from moorage.core.state.state import State
from moorage.model import GPU_MILLI, ClusterId, Lease, NodeId, RequestId, Tenant
from moorage.policy.inventory import Ints
from moorage.records.json_values import JsonObject, JsonValue

STATES: Final = ("free", "held", "warm", "failing", "cordoned", "stale")
"""States of a slot: `free`, held in some way, or the reason why it is not free."""
FREE, HELD, WARM, FAILING, CORDONED, STALE = range(6)
VIEWED: Final = ("", "yours", "busy")
"""Shown instead of tenant names to viewers who may not see other tenants."""
YOURS, BUSY = 1, 2
_TELLING: Final = (0, 2, 1, 3)
"""Rank of each state: of several leases on one slot, the highest decides the shown state."""
COLUMNS: Final = ("state", "milli", "tenant", "ends")


class ShownSlot(NamedTuple):
    """What the map shows for one slot."""

    state: int
    milli: int
    tenant: int
    ends: int


class _Held(NamedTuple):
    tenant: int
    state: int
    ends: int
    slots: dict[int, int]


class FleetMap:
    """Slots in the order of nodes and devices, with their content.

    Args:
        state: The core's state, which has the inventory; `put` adds its leases.

    Attributes:
        is_outdated: The inventory has changed: a new map must be made.
        tenants: Names of tenants, by their number in the columns; "" means no tenant.
    """

    def __init__(self, state: State) -> None:
        fleet = state.fleet
        self.is_outdated = False
        self.tenants: list[str] = [""]
        self._named = 1
        self._new_names: list[str] = []
        self._numbers: dict[Tenant, int] = {}
        self._held: dict[RequestId, _Held] = {}
        self._on: dict[int, dict[RequestId, None]] = {}
        self._of: dict[int, dict[RequestId, None]] = {}
        self._changed: dict[int, None] = {}
        self._nodes, self._devices = fleet.node_ids, fleet.gpu_ids
        counts = [len(each) for each in fleet.gpu_ids]
        starts = np.concatenate([[0], np.cumsum(np.array(counts, np.int64))]).tolist()
        self._rows = {place: row for row, place in enumerate(fleet.node_ids)}
        self._starts: list[int] = starts
        by_operators = {place for place in state.cordons if place[1]}
        whole = {cluster for cluster, node in state.cordons if not node}
        idle = [
            (CORDONED if place in by_operators or place[0] in whole else STALE) if closed else FREE
            for place, closed in zip(fleet.node_ids, fleet.closed.tolist(), strict=True)
        ]
        self._idle: Ints = np.repeat(np.array(idle, np.int64), counts)
        zero = np.zeros(starts[-1], np.int64)
        self._columns = (self._idle.copy(), zero, zero.copy(), zero.copy())
        self._layout = self._describe(state, counts)

    def _describe(self, state: State, counts: list[int]) -> JsonObject:
        """Return the part of a snapshot that changes only with the inventory."""
        fleet = state.fleet
        real = np.arange(fleet.gpu_total.shape[1]) < np.array(counts, np.int64)[:, None]
        links = fleet.gpu_link[real]
        racks, rows, rack = np.unique(fleet.rack, return_index=True, return_inverse=True)
        known = racks >= 0
        return {
            "clusters": fleet.cluster_ids,
            "cluster_nodes": np.bincount(fleet.cluster, minlength=len(fleet.cluster_ids)),
            "nodes": [node for _, node in fleet.node_ids],
            "devices": counts,
            "racks": _rack_names(state, rows[known].tolist()),
            "rack": rack - np.count_nonzero(~known) if known.any() else [],
            "link": links if (links >= 0).any() else [],
            "models": fleet.models,
            "model": fleet.gpu_model[real],
        }

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self._idle)

    # The state ---------------------------------------------------------------------------------

    def put(self, lease: Lease) -> None:
        """Draw a lease on the slots of its placement; remove it from all other slots."""
        self._drop(lease.id)
        slots = dict(self._slots(lease))
        tenant = self._number(lease.tenant)
        self._held[lease.id] = _Held(tenant, _state(lease), int(lease.expires_at), slots)
        self._of.setdefault(tenant, {})[lease.id] = None
        for slot in slots:
            self._on.setdefault(slot, {})[lease.id] = None
        self._changed.update(dict.fromkeys(slots))

    def apply(self, fact: Fact) -> None:
        """Apply a fact."""
        match fact:
            case Granted(lease):
                self.put(lease)
            case Carried(lease) if lease.placement and lease.state != "ended":
                self.put(lease)
            case Renewed(request, expires_at):
                self._change(request, ends=int(expires_at))
            case Started(request) | Ending(request):
                self._change(request, state=HELD)
            case Finished(request):
                self._change(request, state=FAILING)
            case Warmed(request, _, expires_at):
                self._change(request, state=WARM, ends=int(expires_at))
            case Requeued(request) | Ended(request):
                self._drop(request)
            case (
                ClusterSet() | ClusterRemoved() | Cordoned() | Uncordoned() | Moved() | ClockMoved()
            ):
                self.is_outdated = True
            case _:  # The fact is about no slot.
                pass

    def _slots(self, lease: Lease) -> Iterator[tuple[int, int]]:
        """Yield the slots that a lease holds, without those that the inventory no longer has."""
        for share in lease.placement:
            row = self._rows.get((share.cluster_id, share.node_id))
            ids = () if row is None else self._devices[row]
            for gpu in share.gpus:
                if row is not None and gpu in ids:
                    yield self._starts[row] + ids.index(gpu), share.gpu_milli

    def _change(self, request: RequestId, **changed: JsonValue) -> None:
        held = self._held.get(request)
        if held is not None:
            self._held[request] = held._replace(**changed)
            self._changed.update(dict.fromkeys(held.slots))

    def _drop(self, request: RequestId) -> None:
        held = self._held.pop(request, None)
        if held is None:
            return
        del self._of[held.tenant][request]
        for slot in held.slots:
            here = self._on[slot]
            del here[request]
            if not here:
                del self._on[slot]
        self._changed.update(dict.fromkeys(held.slots))

    def _number(self, tenant: Tenant) -> int:
        number = self._numbers.get(tenant)
        if number is None:
            number = self._numbers[tenant] = len(self.tenants)
            self.tenants.append(tenant)
        return number

    # Messages for pages ------------------------------------------------------------------------

    def take_changes(self) -> list[int]:
        """Return the slots that changed since the last call."""
        changed, self._changed = list(self._changed), {}
        self._new_names, self._named = self.tenants[self._named :], len(self.tenants)
        for slot in changed:
            for column, value in zip(self._columns, self._show(slot, None), strict=True):
                column[slot] = value
        return changed

    def delta(self, slots: list[int], viewer: Tenant | None) -> JsonObject:
        """Return the content of some slots, as columns.

        Args:
            slots: The slots, as `take_changes` returned them.
            viewer: The tenant that looks; other tenants are hidden. None: shows all.
        """
        number = None if viewer is None else self._numbers.get(viewer, 0)
        rows = [self._show(slot, number) for slot in slots]
        columns = zip(COLUMNS, zip(*rows, strict=True), strict=True) if rows else ()
        names = {"tenants": self._new_names} if viewer is None and self._new_names else {}
        return {"slots": slots, **dict(columns), **names}

    def snapshot(self, viewer: Tenant | None) -> JsonObject:
        """Return a copy of the whole map as of the last `take_changes`."""
        state, milli, tenant, ends = (column.copy() for column in self._columns)
        names: Iterable[str] = tuple(self.tenants)
        if viewer is not None:
            names = VIEWED
            held = tenant > 0
            state, tenant = np.where(held, HELD, state), np.where(held, BUSY, 0)
            ends[:] = 0
            number = self._numbers.get(viewer, 0)
            for request in self._of.get(number, ()):
                for slot in self._held[request].slots:
                    state[slot], _, tenant[slot], ends[slot] = self._show(slot, number)
        columns = dict(zip(COLUMNS, (state, milli, tenant, ends), strict=True))
        return {**self._layout, "states": STATES, "tenants": names, **columns}

    def _show(self, slot: int, viewer: int | None) -> ShownSlot:
        here = [self._held[request] for request in self._on.get(slot, ())]
        if not here:
            return ShownSlot(int(self._idle[slot]), 0, 0, 0)
        milli = min(sum(each.slots[slot] for each in here), GPU_MILLI)
        seen = here if viewer is None else [each for each in here if each.tenant == viewer]
        if not seen:
            return ShownSlot(HELD, milli, BUSY, 0)
        top = max(seen, key=lambda each: _TELLING[each.state])
        ends = min(each.ends for each in seen)
        return ShownSlot(top.state, milli, top.tenant if viewer is None else YOURS, ends)


def _state(lease: Lease) -> int:
    return {"failing": FAILING, "warm": WARM}.get(lease.state, HELD)


def _rack_names(state: State, rows: list[int]) -> list[str]:
    """Return the names of the racks of the given nodes."""
    places = [state.fleet.node_ids[row] for row in rows]
    names = {
        (cluster.id, node.id): node.rack
        for cluster in (state.clusters[name] for name in {ClusterId(name) for name, _ in places})
        for node in cluster.nodes
    }
    return [names.get((ClusterId(cluster), NodeId(node)), "") for cluster, node in places]

"""A cell's own copy of the fleet, and its updates. Only `worker` uses this module.

The protocol: every `Evaluate` frame has either a snapshot of the whole fleet, or first the rows of
the replaced clusters and then the rows whose free capacity changed on the host since the frame
before. Capacities are absolute, and read from the live fleet when the frame is built. The frame
also names the requests whose proposals were settled since the frame before.

The replica subtracts a policy's own proposal for a lease at once, so that the next request in the
pipe does not see the same GPU as free: the proposal is *outstanding*. When a frame says that the
proposal is settled, granted or not, the proposal is no longer outstanding; if it was granted, the
host's rows already count it. So at every evaluation

    what the policy sees  ==  what the host last said  -  what is outstanding

and nothing else is ever computed: settled proposals are dropped first. Then each row in the frame
becomes the host's value minus what is outstanding on it, and any other row gets back what the
dropped proposals held there. A proposal that was granted before its settlement is announced is
counted twice for that moment: the policy sees too little, never too much. A new consultation for a
request ends its earlier proposal, since the core asks again only when it did not take the first.

A row whose net capacity did not move is not marked as changed, because fast policies score changed
rows again: a grant of exactly what was proposed marks nothing.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import msgspec

from moorage.model import Demand, Share
from moorage.policy import Fleet, ProposalError, parse_proposal
from moorage.policy.fleet import ALL
from moorage.policy.inventory import Bools
from moorage.records.json_values import JsonValue
from moorage.sandbox.wire.frames import Part, Row, ShareFields
from moorage.sandbox.wire.limits import OUTSTANDING_MAX

GONE: Final = -1
"""The row number of a missing node."""
DEMANDS_MAX: Final = 64
"""Maximum demands for which a cell stores where they fit; a further one clears the store."""
ROWS_FEW: Final = 6
"""Up to this number of changed nodes, it is quicker to judge them one by one than to judge all."""
_decode: Final = msgspec.msgpack.decode


class _Held(NamedTuple):
    """A share (the part of a proposal on one node), with the node's row and its GPUs' columns."""

    row: int
    share: Share
    columns: tuple[int, ...]


class _Fleet(Fleet):
    """A fleet that stores where demands fit: only a few nodes change from request to request."""

    def __init__(self) -> None:
        self._fits: dict[Demand, tuple[int, Bools]] = {}
        """By demand: the version at which its nodes were judged, and the result."""
        super().__init__()

    def feasible(self, demand: Demand, rows: Any = ALL) -> Bools:
        """Return the same as `Fleet.feasible`."""
        # Only demands of the server cannot change. A policy may pass anything with these fields.
        if rows is not ALL or type(demand) is not Demand or type(demand.models) is not tuple:
            return super().feasible(demand, rows)
        version, fits = self._fits.get(demand, (-1, None))
        changed = self.changed_since(version)
        if fits is None or changed is None or len(changed) > ROWS_FEW:
            if len(self._fits) >= DEMANDS_MAX:
                self._fits.clear()
            fits = super().feasible(demand)
        else:
            for row in changed:
                fits[row] = self.takes(row, demand)
        self._fits[demand] = self.version, fits
        return fits.copy()  # Policies may change it.

    def imagined(self) -> "Fleet":
        """Return the same as `Fleet.imagined`, with stored results of its own."""
        other = super().imagined()
        assert isinstance(other, _Fleet)
        other._fits = {}  # noqa: SLF001  # One of its own kind.
        return other


class Replica:
    """The fleet as one cell sees it.

    Attributes:
        fleet: The fleet as the host last sent it, without the outstanding amounts.
    """

    def __init__(self) -> None:
        self.fleet: Fleet = _Fleet()
        self._outstanding: dict[str, tuple[_Held, ...]] = {}
        self._on_row: dict[int, int] = {}
        """Number of outstanding shares (parts of proposals) on a row; most rows have none."""

    def update(
        self,
        snapshot: bytes | None,
        parts: Sequence[Part],
        rows: Sequence[Row],
        settled: Sequence[str],
    ) -> None:
        """Apply the changes in one frame, in the order that the module docstring gives."""
        if not (settled or rows or snapshot or parts):
            return
        dropped: list[_Held] = []
        for request in settled:
            dropped += self._drop(request)
        if snapshot is not None:
            self.fleet.restore(_decode(snapshot))
            self._relocate(None)
            dropped.clear()
        elif parts:
            replaced = frozenset(name for name, _ in parts)
            for name, packed in parts:
                self.fleet.splice(name, _fleet_of(packed) if packed else None)
            self._relocate(replaced)
            dropped = [
                held._replace(row=row)
                for held in dropped
                if held.share.cluster_id not in replaced
                and (row := self.fleet.row(held.share.cluster_id, held.share.node_id)) is not None
            ]
        spoken = set()
        for row, cpu, memory, gpus in rows:
            spoken.add(row)
            self._set(row, cpu, memory, gpus)
        for held in dropped:
            if held.row not in spoken:
                self.fleet.give(held.share)

    def reconsider(self, request: str) -> None:
        """End the outstanding proposal of a request that is consulted again."""
        if request in self._outstanding:
            for held in self._drop(request):
                self.fleet.give(held.share)

    def propose(self, request: str, value: JsonValue, demand: Demand | None) -> None:
        """Subtract a proposal provisionally if it is complete and fits; else do nothing."""
        try:
            proposals = parse_proposal(value, demand)
        except ProposalError:
            return
        shares = [proposed.share() for proposed in proposals]
        taken: list[_Held] = []
        for share in shares:
            held = None if share is None else self._subtract(share)
            if held is None:
                for undone in taken:
                    self.fleet.give(undone.share)
                return
            taken.append(held)
        if not taken:
            return
        self._outstanding[request] = tuple(taken)
        for held in taken:
            self._on_row[held.row] = self._on_row.get(held.row, 0) + 1
        if len(self._outstanding) > OUTSTANDING_MAX:
            self.reconsider(next(iter(self._outstanding)))

    def without(self, reserved: Sequence[ShareFields]) -> AbstractContextManager[None]:
        """Hide from the policy the amounts that other requests reserved."""
        return self._less(reserved) if reserved else nullcontext()

    @contextmanager
    def _less(self, reserved: Sequence[ShareFields]) -> Iterator[None]:
        shares = [Share(*fields) for fields in reserved]  # type: ignore[arg-type]  # Plain strings in the replica.
        for share in shares:
            self.fleet.take(share)
        try:
            yield
        finally:
            for share in shares:
                self.fleet.give(share)

    def _drop(self, request: str) -> tuple[_Held, ...]:
        dropped = self._outstanding.pop(request, ())
        for held in dropped:
            left = self._on_row[held.row] - 1
            if left:
                self._on_row[held.row] = left
            else:
                del self._on_row[held.row]
        return dropped

    def _subtract(self, share: Share) -> _Held | None:
        """Subtract a proposal's part on one node, and return it; None: it does not fit."""
        fleet = self.fleet
        row = fleet.row(share.cluster_id, share.node_id)
        if row is None:
            return None
        cpu, memory, gpus = fleet.capacity(row)
        if cpu < share.cpu_milli or memory < share.memory_mib:
            return None
        ids, columns = fleet.gpu_ids[row], list[int]()
        for gpu in share.gpus:
            if gpu not in ids:
                return None
            columns.append(column := ids.index(gpu))
            gpus[column] -= share.gpu_milli
            if gpus[column] < 0:
                return None
        fleet.set_capacity(row, cpu - share.cpu_milli, memory - share.memory_mib, gpus)
        return _Held(row, share, tuple(columns))

    def _set(self, row: int, cpu: int, memory: int, gpus: Sequence[int]) -> None:
        """Set a row to the host's amounts less outstanding proposals, only if that differs."""
        net = list(gpus)
        if row in self._on_row:
            outstanding = (held for shares in self._outstanding.values() for held in shares)
            for held in (each for each in outstanding if each.row == row):
                cpu -= held.share.cpu_milli
                memory -= held.share.memory_mib
                for column in held.columns:
                    net[column] -= held.share.gpu_milli
        fleet = self.fleet
        net += [0] * (fleet.gpu_free.shape[1] - len(net))
        if fleet.capacity(row) != (cpu, memory, net):
            fleet.set_capacity(row, cpu, memory, net)

    def _relocate(self, replaced: Collection[str] | None) -> None:
        """Subtract outstanding proposals again, by name, since rows may have new numbers.

        Args:
            replaced: Clusters whose rows the host has just sent; None: all.
        """
        outstanding, self._outstanding, self._on_row = self._outstanding, {}, {}
        for request, shares in outstanding.items():
            held_rows: list[_Held] = []
            for held in shares:
                row = self.fleet.row(held.share.cluster_id, held.share.node_id)
                # A missing node holds nothing until it is back.
                ids = () if row is None else self.fleet.gpu_ids[row]
                columns = tuple(ids.index(gpu) for gpu in held.share.gpus if gpu in ids)
                if replaced is None or held.share.cluster_id in replaced:
                    self.fleet.take(held.share)
                row = GONE if row is None else row
                held_rows.append(_Held(row, held.share, columns))
                self._on_row[row] = self._on_row.get(row, 0) + 1
            self._outstanding[request] = tuple(held_rows)


def _fleet_of(packed: bytes) -> Fleet:
    fleet = Fleet()
    fleet.restore(_decode(packed))
    return fleet

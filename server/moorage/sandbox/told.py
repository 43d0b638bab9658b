"""What one cell was told of the world, and how each question brings it up to date.

Used by `channel`. A frame says what changed since the frame before it: rows of the fleet, documents
that the cell keeps, proposals that were settled, and the context where the cell has an older one.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from moorage.policy import Fleet
from moorage.sandbox import frames
from moorage.sandbox.contexts import Contexts, ToldContexts
from moorage.sandbox.contract import PolicyCode
from moorage.sandbox.limits import CONTEXTS_PER_CELL_MAX, OUTSTANDING_MAX, PARTS_MAX
from moorage.sandbox.work import Work, demand_fields, overrides

_encoder: Final = msgspec.msgpack.Encoder()
_Changes = tuple[bytes | None, tuple[frames.Part, ...], tuple[frames.Row, ...]]
"""A snapshot of the fleet, or parts and rows of it."""


class World:
    """What there is to tell: the fleet, as cells are told of it.

    Args:
        fleet: The live one.

    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._snapshot: tuple[int, int, bytes] = (-1, -1, b"")

    def snapshot(self) -> bytes:
        """Return the packed snapshot of the fleet as it is now, made once per version."""
        layout, version, packed = self._snapshot
        if (layout, version) != (self.fleet.layout, self.fleet.version):
            packed = _encoder.encode(self.fleet.snapshot())
            self._snapshot = (self.fleet.layout, self.fleet.version, packed)
        return packed

    def part(self, cluster_id: str) -> frames.Part:
        """Return the rows of one cluster as they are now, packed."""
        part = self.fleet.part(cluster_id)
        return cluster_id, b"" if part is None else _encoder.encode(part.snapshot())


class Told:
    """What one cell knows.

    Args:
        world: The server's own.
        contexts: The host's, or those of a trial.
        code: The policy of the cell.

    Attributes:
        contexts: Those of the cell.

    """

    def __init__(self, world: World, contexts: Contexts, code: PolicyCode) -> None:
        # By URI too: two policies that happen to have the same code remember for themselves.
        version = f"{code.ref.uri} {code.ref.digest}"
        self.contexts = ToldContexts(contexts, version, CONTEXTS_PER_CELL_MAX)
        self._world = world
        self._version = self._layout = -1
        self._settled: list[str] = []
        self._stale: list[str] = []
        self._documents: set[str] = set()

    def frame(self, work: Work) -> frames.Evaluate | frames.Manage | frames.Apply:
        """Return the question that work is; what it says of the fleet is true at this moment."""
        if work.consult is not None:
            return self._evaluate(work)
        if work.kind == "apply":
            return self._apply(work)
        return frames.Manage(work.nonce, work.action, work.data)

    def sent(self, work: Work) -> None:
        """Note that the frame of this work is on its way: the next one need not repeat it."""
        if work.consult is not None:
            self._settled.clear()
            self._stale.clear()
            fleet = self._world.fleet
            self._version, self._layout = fleet.version, fleet.layout

    def settle(self, request: str) -> bool:
        """Note that a proposal is no longer outstanding; False: more than a cell can be told."""
        self._settled.append(request)
        return len(self._settled) <= OUTSTANDING_MAX * 2

    def document_changed(self, cluster_id: str) -> None:
        """Note that the cell may keep an old document."""
        if cluster_id in self._documents:
            self._documents.discard(cluster_id)
            self._stale.append(cluster_id)

    def keeps(self, cluster_ids: Iterable[str]) -> None:
        """Note that the cell is about to get documents of these clusters, and may keep them.

        Before they are fetched: a change meanwhile then makes them stale.
        """
        self._documents.update(cluster_ids)

    def _apply(self, work: Work) -> frames.Apply:
        context, forget, work.chain = self.contexts.tell(work.tenant)
        return frames.Apply(
            work.nonce,
            work.tenant,
            work.input_data,
            work.overrides,
            context,
            forget,
            work.ids_only,
            work.fleet,
        )

    def _evaluate(self, work: Work) -> frames.Evaluate:
        assert work.consult is not None  # `frame` asked for it.
        ask = work.consult.ask
        context, forget, work.chain = self.contexts.tell(ask.tenant)
        if work.trial is None:
            stale = tuple(self._stale)
            snapshot, parts, rows = self._changes()
        else:
            stale = tuple(self._documents)
            snapshot, parts, rows = _encoder.encode(work.trial.fleet.snapshot()), (), ()
            self._documents.clear()  # The next trial may have others under the same ids.
        work.snapshot_bytes = 0 if snapshot is None else len(snapshot)
        return frames.Evaluate(
            work.nonce,
            ask.id,
            ask.tenant,
            None if ask.demand is None else demand_fields(ask.demand),
            ask.candidates,
            work.consult.reserved,
            ask.inputs,
            ask.seed,
            work.provisional,
            overrides(ask.settings, ask.parameters),
            context,
            forget,
            stale,
            rows,
            tuple(self._settled),
            snapshot,
            parts,
        )

    def _changes(self) -> _Changes:
        fleet = self._world.fleet
        if fleet.version == self._version:
            return None, (), ()
        spliced = fleet.spliced_since(self._layout)
        changed = fleet.rows_since(self._version)
        if spliced is None or changed is None or len(spliced) > PARTS_MAX:
            return self._world.snapshot(), (), ()
        told = ((row, *fleet.capacity(row)) for row in changed)
        rows = tuple((row, cpu, memory, tuple(gpus)) for row, cpu, memory, gpus in told)
        return None, tuple(map(self._world.part, spliced)), rows

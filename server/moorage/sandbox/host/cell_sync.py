"""Tracks what one cell knows of the fleet, and makes the messages that update the cell.

`channel` uses this module. A frame has the changes since the previous frame: rows of the fleet,
cached documents, settled proposals, and the context if the cell has an older one.

A cell's cached documents are current as of the last frame that it read: before each request or
answer, the host sends the changes since. So a policy that makes no calls reads the state of one
moment, and after a call, a policy reads nothing older than the answer.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import numpy as np

from moorage.policy import Fleet
from moorage.sandbox.host import answers
from moorage.sandbox.host.contexts import Contexts, SentContexts
from moorage.sandbox.host.contract import HostServices, PolicyCode
from moorage.sandbox.host.work import Work, demand_fields, overrides, share_fields
from moorage.sandbox.wire import frames
from moorage.sandbox.wire.limits import (
    AHEAD_BYTES_MAX,
    AHEAD_BYTES_MIN,
    CONTEXTS_PER_CELL_MAX,
    NEWS_MAX,
    OUTSTANDING_MAX,
    PARTS_MAX,
    STALE_MAX,
)

_DOUBLINGS_MAX: Final = (AHEAD_BYTES_MAX // AHEAD_BYTES_MIN).bit_length() - 1
_encoder: Final = msgspec.msgpack.Encoder()
_Changes = tuple[bytes | None, tuple[frames.Part, ...], tuple[frames.Row, ...]]
"""A snapshot of the fleet, or its changed parts and rows."""


class World:
    """The fleet and documents that cells get."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._snapshot: tuple[int, int, bytes] = (-1, -1, b"")

    def change(self, fleet: Fleet) -> None:
        """Use another fleet from now on; no cell has a copy of it yet."""
        self.fleet, self._snapshot = fleet, (-1, -1, b"")

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


class CellSync:
    """The state of the fleet and the documents that one cell has.

    Args:
        contexts: The contexts of the host, or those of a sample.

    Attributes:
        contexts: The contexts that the cell has.
        behind: Whether the cell's cached documents have changed, so that `news` must come first.
    """

    def __init__(self, world: World, contexts: Contexts, code: PolicyCode) -> None:
        # By URI, too: two policies with equal code have separate contexts.
        version = f"{code.ref.uri} {code.ref.digest}"
        self.contexts = SentContexts(contexts, version, CONTEXTS_PER_CELL_MAX)
        self._world = world
        self._version = self._layout = -1
        self._settled: list[str] = []
        self.behind = False
        self._stale: dict[str, list[str]] | None = {}
        """Changed clusters, each with the kinds in the cell's cache; None: too many to count."""
        self._cached: defaultdict[str, set[str]] = defaultdict(set)
        """By kind, the clusters of which the cell may cache a document."""

    def frame(self, work: Work) -> frames.Evaluate | frames.RunManagement | frames.Apply:
        """Return the frame for a piece of work, with the present fleet."""
        if work.consult is not None:
            return self._evaluate(work)
        if work.kind == "apply":
            return self._apply(work)
        return frames.RunManagement(work.nonce, work.action, work.data, work.overrides)

    def note_sent(self, work: Work) -> None:
        """Record that the frame of this work was sent: the next one omits its contents."""
        if work.consult is not None:
            self._settled.clear()
            fleet = self._world.fleet
            self._version, self._layout = fleet.version, fleet.layout

    def settle(self, request: str) -> bool:
        """Record that a proposal is no longer outstanding; return False if a frame has no room."""
        self._settled.append(request)
        return len(self._settled) <= OUTSTANDING_MAX * 2

    def drop_document(self, cluster_id: str) -> None:
        """Record that the cell may hold an outdated document of this cluster."""
        if self._stale is None:
            return
        for kind, cached in self._cached.items():
            if cluster_id in cached:
                cached.discard(cluster_id)
                self._stale.setdefault(cluster_id, []).append(kind)
                self.behind = True
        if len(self._stale) > STALE_MAX:
            self._stale = None
            self._cached.clear()

    def news(self, services: HostServices) -> bytes:
        """Return frames about changes of cached documents; they go before the next frame.

        The frames also have some of the new documents, as many as a prefetch.
        """
        self.behind = False
        stale, self._stale = self._stale, {}
        if stale is None:
            return frames.pack(frames.KeepDocuments(None, "", {}))
        parts: list[bytes] = []
        forget = tuple(stale)
        for kind in self._cached:
            names = [name for name, kinds in stale.items() if kind in kinds]
            if names:
                parts.append(self._bring(services, kind, names[:NEWS_MAX], forget))
                forget = ()
        return b"".join(parts)

    def keeps(self, kind: str, cluster_ids: Iterable[str]) -> None:
        """Record that the cell receives documents of these clusters now, and may cache them."""
        self._cached[kind].update(cluster_ids)

    def ahead(self, services: HostServices, work: Work, kind: str, ids: Sequence[str]) -> bytes:
        """Return a frame with more documents of these clusters, before a cell needs them."""
        if not ids or work.consult is None:
            return b""  # Only frames of consultations name stale documents.
        doublings = min(work.calls - 1, _DOUBLINGS_MAX)
        return self._bring(services, kind, ids, bytes_max=AHEAD_BYTES_MIN << doublings)

    def _bring(
        self,
        services: HostServices,
        kind: str,
        cluster_ids: Sequence[str],
        stale: tuple[str, ...] = (),
        bytes_max: int = AHEAD_BYTES_MIN,
    ) -> bytes:
        items = answers.at_hand(services, kind, cluster_ids, bytes_max)
        if not items and not stale:
            return b""
        self.keeps(kind, items)
        return frames.pack(frames.KeepDocuments(stale, kind, items))

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
        assert work.consult is not None  # `frame` has checked it.
        ask = work.consult.ask
        context, forget, work.chain = self.contexts.tell(ask.tenant)
        if work.sample is None:
            snapshot, parts, rows = self._changes()
        else:
            # Samples have different documents under the same ids.
            self.behind, self._stale = True, None
            self._cached.clear()
            snapshot, parts, rows = _encoder.encode(work.sample.fleet.snapshot()), (), ()
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
            rows,
            tuple(self._settled),
            snapshot,
            parts,
            self._matching(work),
            tuple(map(share_fields, work.consult.excluded_parts)),
        )

    def _matching(self, work: Work) -> bytes:
        """Return which rows have the required labels; a cell knows no labels."""
        demand = work.consult.ask.demand if work.consult is not None else None
        if demand is None or not demand.where:
            return b""
        fleet = self._world.fleet if work.sample is None else work.sample.fleet
        return np.packbits(fleet.matching(demand.where)).tobytes()

    def _changes(self) -> _Changes:
        fleet = self._world.fleet
        if fleet.version == self._version:
            return None, (), ()
        spliced = fleet.spliced_since(self._layout)
        changed = fleet.rows_since(self._version)
        if spliced is None or changed is None or len(spliced) > PARTS_MAX:
            return self._world.snapshot(), (), ()
        rows = list[frames.Row]()
        for row in changed:
            cpu, memory, gpus = fleet.capacity(row)
            rows.append((row, cpu, memory, tuple(gpus)))
        return None, tuple(map(self._world.part, spliced)), tuple(rows)

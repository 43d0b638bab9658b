"""Topic `shapes`: tells all watchers how often the most frequent demands fit.

The module `shapes` does the counting.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.metrics_core import Metric

from moorage.core.state.state import State
from moorage.daemon.news.shapes import AskedShapes, ShapeCounts, size_name
from moorage.daemon.observability.counters import gauges, gauges_of
from moorage.model import Demand, SessionId, Tenant
from moorage.protocol.replies import event
from moorage.records.json_values import JsonObject
from moorage.records.requests import resources_of
from moorage.records.rights import Caller, Right

TOPIC: Final = "shapes"
PAUSE_SECONDS: Final = 1.0
"""Seconds between two messages."""
MEASURE_SECONDS: Final = 5.0
"""Least seconds between two counts for `/metrics`, no matter how often it is read."""


class ShapeNews:
    """Sends the counts of shapes to all sessions that watch topic `shapes`.

    Args:
        push: Sends news to a session.
        reads_on: Returns whether a session has read all that was sent to it.
        revision: Returns the number of the last durable fact.

    Attributes:
        counts: Counts the demands of requests.
    """

    def __init__(
        self,
        state: State,
        push: Callable[[SessionId, bytes], None],
        reads_on: Callable[[SessionId], bool],
        revision: Callable[[], int],
    ) -> None:
        self.counts = AskedShapes()
        self._state = state
        self._push = push
        self._reads_on = reads_on
        self._revision = revision
        self._watching: dict[SessionId, tuple[Tenant | None, list[JsonObject] | None]] = {}
        self._counts: dict[Demand, ShapeCounts] = {}
        self._wanted = asyncio.Event()
        self._sizes: dict[Demand, ShapeCounts] = {}
        self._measured: dict[str, tuple[int, int, int]] = {}
        """How often each size fits now, defragmented, and on an empty fleet."""
        self._read = asyncio.Event()
        self._read.set()

    def add(self, session: SessionId, caller: Caller) -> None:
        """Send a session the shapes at once, even if it has them already."""
        self._watching[session] = (None if caller.may(Right.READ_ALL) else caller.tenant, None)
        self._wanted.set()

    def drop_session(self, session: SessionId) -> None:
        """Forget a session."""
        self._watching.pop(session, None)

    async def run(self) -> None:
        """Send the shapes repeatedly. Runs until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._watching:
                self._tell()
                waiting = asyncio.ensure_future(self._wanted.wait())
                await asyncio.wait([waiting], timeout=PAUSE_SECONDS)
                waiting.cancel()
                self._wanted.clear()
            self._counts.clear()

    def _tell(self) -> None:
        shown: dict[Tenant | None, list[JsonObject]] = {}
        counted: dict[Demand, ShapeCounts] = {}
        frames: dict[Tenant | None, bytes] = {}
        for session, (viewer, last) in tuple(self._watching.items()):
            if viewer not in shown:
                shown[viewer] = self._shapes(viewer, counted)
            shapes = shown[viewer]
            if shapes == last or not self._reads_on(session):
                continue
            if viewer not in frames:
                head = {"at": round(time.time(), 3), "revision": self._revision()}
                frames[viewer] = event("shapes", {**head, "shapes": shapes}, TOPIC)
            self._watching[session] = (viewer, shapes)
            self._push(session, frames[viewer])
        self._counts = counted

    async def measure(self) -> None:
        """Count the sizes of requests after each read of `/metrics`. Runs until cancelled."""
        while True:
            await self._read.wait()
            self._read.clear()
            await self._measure()
            await asyncio.sleep(MEASURE_SECONDS)

    async def _measure(self) -> None:
        counted: dict[Demand, ShapeCounts] = {}
        measured: dict[str, tuple[int, int, int]] = {}
        for demand in self.counts.sizes():
            fleet = self._state.fleet  # Reading `fleet` updates it first.
            counts = counted[demand] = self._sizes.get(demand) or ShapeCounts(demand, fleet)
            row = counts.row()
            now, gathered = row["fits"], row["defragmented"]
            measured[size_name(demand)] = now, gathered, max(counts.capacity(), gathered)
            await asyncio.sleep(0)  # A full count with 10,000 nodes takes 30 ms.
        self._sizes, self._measured = counted, measured

    def metrics(self) -> Iterable[Metric]:
        """Yield the utilization and fragmentation of the fleet by size, as last counted."""
        self._read.set()
        fits: list[tuple[tuple[str, str], float]] = []
        used: list[tuple[str, float]] = []
        scattered: list[tuple[str, float]] = []
        for name, (now, gathered, whole) in self._measured.items():
            counted = {"now": now, "defragmented": gathered, "empty": whole}
            fits += (((name, what), float(value)) for what, value in counted.items())
            used.append((name, 1 - gathered / whole if whole else 0.0))
            scattered.append((name, 1 - now / gathered if gathered else 0.0))
        yield gauges_of(
            "moorage_shape_fits",
            "Leases of a shape that fit: `now`, `defragmented`, or on an `empty` fleet",
            ("shape", "what"),
            fits,
        )
        yield gauges(
            "moorage_shape_utilization_ratio",
            "Part of an empty fleet's leases of a shape that would not fit, even defragmented",
            "shape",
            used,
        )
        yield gauges(
            "moorage_shape_fragmentation_ratio",
            "Part of a defragmented fleet's leases of a shape that do not fit now",
            "shape",
            scattered,
        )

    def _shapes(
        self, viewer: Tenant | None, counted: dict[Demand, ShapeCounts]
    ) -> list[JsonObject]:
        rows: list[JsonObject] = []
        fleet = self._state.fleet  # Reading `fleet` updates it first.
        for demand, times in self.counts.most(viewer):
            if demand not in counted:
                known = self._counts.get(demand)
                counted[demand] = known or ShapeCounts(demand, fleet)
            rows.append(
                {"resources": resources_of(demand), "asked": times, **counted[demand].row()}
            )
        return rows

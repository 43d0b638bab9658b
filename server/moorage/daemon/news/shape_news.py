"""Topic `shapes`: tells all watchers how often the most frequent demands fit.

The module `shapes` does the counting.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from moorage.core.state.state import State
from moorage.daemon.news.shapes import AskedShapes, ShapeCounts
from moorage.model import Demand, SessionId, Tenant
from moorage.protocol.replies import event
from moorage.records.json_values import JsonObject
from moorage.records.requests import resources_of
from moorage.records.rights import Caller, Right

TOPIC: Final = "shapes"
PAUSE_SECONDS: Final = 1.0
"""Seconds between two messages."""


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

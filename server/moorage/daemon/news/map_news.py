"""Topic `map`: sends the console's fleet map to all watchers, first whole, then its changes.

A session with unread news gets nothing more, and later the whole map again: a slow browser misses
news, but costs no memory. While no session watches, no map exists.
"""

import asyncio
import base64
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from moorage.core.state.facts import Fact
from moorage.core.state.state import State
from moorage.daemon.news.fleet_map import FleetMap
from moorage.model import SessionId, Tenant
from moorage.protocol.replies import event
from moorage.records.json_values import JsonObject
from moorage.records.rights import Caller, Right

TOPIC: Final = "map"
PAUSE_SECONDS: Final = 0.1
"""Least seconds between two messages; with many watchers, `PAUSE_EACH_SECONDS` per watcher."""
PAUSE_EACH_SECONDS: Final = 0.02
PAUSE_SECONDS_MAX: Final = 1.0
REMAKE_SECONDS: Final = 1.0
"""Least seconds between two maps when the inventory changes."""
FACTS_MAX: Final = 100_000
"""Maximum facts that wait for the next message; beyond this, the map is made again."""
PIECE: Final = 1_000
"""Leases drawn on a new map before other tasks run."""


@dataclass(slots=True)
class _Watching:
    viewer: Tenant | None
    is_current: bool = False


class MapNews:
    """Sends the fleet map and its changes to all sessions that watch it.

    Args:
        state: The state to draw.
        push: Sends news to a session.
        reads_on: Returns whether a session has read all that was sent to it.
        revision: Returns the number of the last durable fact.
    """

    def __init__(
        self,
        state: State,
        push: Callable[[SessionId, bytes], None],
        reads_on: Callable[[SessionId], bool],
        revision: Callable[[], int],
    ) -> None:
        self._state = state
        self._push = push
        self._reads_on = reads_on
        self._revision = revision
        self._watching: dict[SessionId, _Watching] = {}
        self._wanted = asyncio.Event()
        self._facts: list[Fact] = []
        self._too_many = False
        self._number = 0

    def add(self, session: SessionId, caller: Caller) -> None:
        """Send a session the whole map soon, even if it has the map already."""
        viewer = None if caller.may(Right.READ_ALL) else caller.tenant
        self._watching[session] = _Watching(viewer)
        self._wanted.set()

    def drop_session(self, session: SessionId) -> None:
        """Forget a session."""
        self._watching.pop(session, None)

    def note_durable(self, facts: Iterable[Fact]) -> None:
        """Record durable facts for the next message. Runs on the hot path."""
        if not self._watching:
            return
        self._facts.extend(facts)
        if len(self._facts) > FACTS_MAX:
            self._facts.clear()
            self._too_many = True

    async def run(self, settle: Callable[[], Awaitable[object]]) -> None:
        """Send the map and its changes. Runs until cancelled.

        Args:
            settle: Waits until all present facts of the state are durable.
        """
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            shown = await self._make(settle)
            made_at = time.monotonic()
            while self._watching:
                late = time.monotonic() - made_at > REMAKE_SECONDS
                if late and (shown.is_outdated or self._too_many):
                    shown, made_at = await self._make(settle), time.monotonic()
                await self._tell(shown)
                await asyncio.sleep(pause_seconds(len(self._watching)))
            self._facts.clear()

    async def _make(self, settle: Callable[[], Awaitable[object]]) -> FleetMap:
        """Return a map of the state when all its facts are durable. Until then new facts wait."""
        self._facts.clear()
        self._too_many = False
        shown = FleetMap(self._state)
        leases = list(self._state.leases.values())
        for start in range(0, len(leases), PIECE):
            for lease in leases[start : start + PIECE]:
                shown.put(self._state.leases.get(lease.id, lease))
            shown.take_changes()
            await asyncio.sleep(0)
        await settle()
        for each in self._watching.values():
            each.is_current = False
        return shown

    async def _tell(self, shown: FleetMap) -> None:
        facts, self._facts = self._facts, []
        for fact in facts:
            shown.apply(fact)
        changed = shown.take_changes()
        self._number += bool(changed)
        head = {"number": self._number, "revision": self._revision(), "at": round(time.time(), 3)}
        deltas: dict[Tenant | None, bytes] = {}
        behind: dict[Tenant | None, list[SessionId]] = {}
        for session, each in self._watching.items():
            reads_on = self._reads_on(session)
            if each.is_current and not changed:
                continue
            if not each.is_current or not reads_on:
                each.is_current = False
                if reads_on:
                    behind.setdefault(each.viewer, []).append(session)
                continue
            frame = deltas.get(each.viewer)
            if frame is None:
                data = {**head, **shown.delta(changed, each.viewer)}
                frame = deltas[each.viewer] = event("delta", data, TOPIC)
            self._push(session, frame)
        for viewer, sessions in behind.items():
            packed = await asyncio.to_thread(pack_text, shown.snapshot(viewer))
            frame = event("snapshot", {**head, "packed": packed}, TOPIC)
            for session in sessions:
                if session in self._watching:
                    self._watching[session].is_current = True
                    self._push(session, frame)


def pause_seconds(watching: int) -> float:
    """Return the pause before the next message: many watchers get a bounded share of time."""
    return min(PAUSE_SECONDS_MAX, max(PAUSE_SECONDS, PAUSE_EACH_SECONDS * watching))


def pack_text(snapshot: JsonObject) -> str:
    """Return a snapshot as compressed JSON, as text: for a large fleet, this takes a while."""
    encoded = msgspec.json.encode(snapshot, enc_hook=np.ndarray.tolist)
    return base64.b64encode(zlib.compress(encoded, 6)).decode()

"""The allocations of a pool over time."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from operator import add, itemgetter, sub
from typing import Final, overload

from moorage_client.workflow.errors import WorkflowError
from moorage_client.workflow.requirements import amount_of, units

SNAPSHOTS_MAX: Final = 200_000
"""Default number of snapshots in a pool's timeline."""
log: Final = logging.getLogger(__name__)

_EVENTS: Final = {"acquired": "acquire", "released": "release"}


@dataclass(frozen=True, slots=True)
class ResourceSnapshot:
    """The allocated amount of each resource, right after a change.

    Args:
        timestamp: Seconds since the epoch. Snapshots of a timeline are ordered by it.
        allocated: The allocated amount of each resource.
        available: The free amount of each resource.
        node_name: The node whose amounts changed; None for callers without a name.
        event: `acquire` or `release`.
        elapsed: Seconds since the first snapshot of its timeline.
    """

    timestamp: float
    allocated: dict[str, float]
    available: dict[str, float]
    node_name: str | None
    event: str
    elapsed: float = 0.0


# A stored change: the names of the resources, the total units and the units in use of each, the
# time, the node's name, and the event.
_Change = tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...], float, str | None, str]


class ResourceTimeline:
    """Records all changes of a pool in order, and makes snapshots of them.

    A timeline drops the oldest of more than `snapshots_max` changes. It logs one warning and counts
    the dropped changes in `dropped`; peaks stay exact.

    Any thread may use a timeline. Snapshots are made when they are read: per change, a pool only
    stores two small tuples.

    Args:
        snapshots_max: At most this many changes are stored; None: all.

    Attributes:
        dropped: The number of dropped changes.
    """

    def __init__(self, snapshots_max: int | None = SNAPSHOTS_MAX) -> None:
        if snapshots_max is not None and (type(snapshots_max) is not int or snapshots_max < 1):
            raise WorkflowError(
                f"snapshots_max is {snapshots_max!r}; expected a whole number above 0, or None"
            )
        self.dropped = 0
        self._changes: deque[_Change] = deque()
        self._changes_max = math.inf if snapshots_max is None else snapshots_max
        self._peaks: dict[str, tuple[int, float]] = {}  # Peaks of the dropped changes.
        self._first: float | None = None  # The time of the earliest dropped change.
        self._lock = threading.Lock()
        # The wall clock may be set back during the run; the monotonic clock is not.
        self._offset = time.time() - time.monotonic()

    @overload
    def record(self, allocated: ResourceSnapshot) -> None: ...

    @overload
    def record(self, *, snapshot: ResourceSnapshot) -> None: ...

    @overload
    def record(
        self,
        allocated: Mapping[str, float],
        available: Mapping[str, float],
        node_name: str | None = None,
        event: str = "",
    ) -> None: ...

    def record(
        self,
        allocated: ResourceSnapshot | Mapping[str, float] | None = None,
        available: Mapping[str, float] | None = None,
        node_name: str | None = None,
        event: str = "",
        *,
        snapshot: ResourceSnapshot | None = None,
    ) -> None:
        """Add a snapshot. Programs need not call this: pools record their own changes.

        Args:
            allocated: A snapshot, or allocated amounts by name.
            available: Free amounts by name, if no snapshot is given.
            node_name: See `ResourceSnapshot`.
            event: See `ResourceSnapshot`; `acquired` and `released` are accepted, too.
            snapshot: A snapshot, instead of all other arguments.
        """
        given = snapshot or allocated or {}
        if isinstance(given, ResourceSnapshot):
            snapshot, when = given, given.timestamp
        else:
            snapshot = ResourceSnapshot(0, dict(given), dict(available or {}), node_name, event)
            when = None
        names = tuple(dict.fromkeys((*snapshot.allocated, *snapshot.available)))
        used = tuple(units(snapshot.allocated.get(name, 0), name) for name in names)
        free = (units(snapshot.available.get(name, 0), name) for name in names)
        there = tuple(map(add, used, free))
        kind = _EVENTS.get(snapshot.event, snapshot.event)
        self.note(names, there, used, snapshot.node_name, kind, when)

    def note(
        self,
        names: tuple[str, ...],
        there: tuple[int, ...],
        used: tuple[int, ...],
        node_name: str | None,
        event: str,
        when: float | None = None,
    ) -> None:
        """Record a change, in units; pools call this.

        Args:
            names: Names of the resources, in the order of the two tuples.
            there: Total units.
            used: Units in use.
            node_name: The node's name.
            event: `acquire` or `release`.
            when: Seconds since the epoch; None: now.
        """
        if when is None:
            when = time.monotonic() + self._offset
        change = (names, there, used, when, node_name, event)
        # No lock is needed: `append` is atomic, and pools call this function under their own lock.
        if len(self._changes) < self._changes_max:
            self._changes.append(change)
            return
        with self._lock:
            dropped = self._changes.popleft()
            self._first = dropped[3] if self._first is None else min(self._first, dropped[3])
            self._fold(dropped)
            self._changes.append(change)
            self.dropped += 1
            first = self.dropped == 1
        if first:
            log.warning(
                "a timeline has %s snapshots, and drops the oldest from now on; "
                "give its pool a larger snapshots_max, or None for all",
                self._changes_max,
            )

    def _fold(self, change: _Change) -> None:
        """Update the peak use of each resource by a change, before the change is dropped."""
        names, there, used, *_ = change
        for name, capacity, count in zip(names, there, used, strict=True):
            peak, fraction = self._peaks.get(name, (0, 0.0))
            share = count / capacity if capacity else 0.0
            self._peaks[name] = (max(peak, count), max(fraction, share))

    def _folded(self) -> dict[str, tuple[int, float]]:
        """Return each resource's peak use, in units and as a fraction, dropped changes included."""
        with self._lock:
            peaks_before = self._peaks.copy()
            for change in self._changes:
                self._fold(change)
            peaks, self._peaks = self._peaks, peaks_before
            return peaks

    @property
    def snapshots(self) -> list[ResourceSnapshot]:
        """All stored snapshots, ordered by time."""
        with self._lock:
            # `record` may have added an earlier time after a later one.
            changes, first = sorted(self._changes, key=itemgetter(3)), self._first
        if changes:
            first = changes[0][3] if first is None else min(first, changes[0][3])
        return [
            ResourceSnapshot(
                timestamp=when,
                allocated=dict(zip(names, map(amount_of, used), strict=True)),
                available=dict(zip(names, map(amount_of, map(sub, there, used)), strict=True)),
                node_name=node_name,
                event=event,
                elapsed=when - (first or 0.0),
            )
            for names, there, used, when, node_name, event in changes
        ]

    def __len__(self) -> int:
        return len(self._changes)

    def peak_utilization(self) -> dict[str, float]:
        """Return the highest fraction of each resource that was ever in use, 0.0 to 1.0."""
        return {name: fraction for name, (_, fraction) in self._folded().items()}

    def peak_allocated(self) -> dict[str, float]:
        """Return the highest amount of each resource that was ever in use."""
        return {name: amount_of(count) for name, (count, _) in self._folded().items()}

"""A cell's bounded cache of the host's answers: packed documents by kind and cluster.

`worker` uses this cache. Entries are decoded at each read, so no policy changes them. If the cache
is full, prefetched documents stay only until the next ones of their kind arrive.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from moorage.sandbox.wire import frames
from moorage.sandbox.wire.limits import AHEAD_MAX, AHEAD_MIN, KEPT_BYTES_MAX, KEPT_ENTRY_BYTES

_TRIES: Final = AHEAD_MIN << 4
"""Number of prefetched documents after which prefetching may stop."""
_USED_MIN: Final = 0.25
"""If a policy reads a smaller share of the prefetched documents, prefetching stops."""


class DocumentCache:
    """Packed answers of the host, which reports when one of them is outdated.

    Args:
        bytes_max: Maximum size of all entries; each also counts `KEPT_ENTRY_BYTES`.
    """

    def __init__(self, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._kinds: dict[str, dict[str, bytes]] = {}
        self._bytes = 0
        self._passing: dict[str, dict[str, bytes]] = {}
        self._passed: dict[str, int] = {}
        """By kind, how many prefetched documents did not fit into the cache."""
        self._order: Callable[[], Sequence[str]] = tuple
        self._places: dict[str, int] | None = None
        self._ahead: dict[str, int] = {}
        """How many documents of a kind to prefetch next; 0: none, since prefetch did not help."""

    def begin(self, order: Callable[[], Sequence[str]]) -> None:
        """Prepare the cache for an evaluation.

        Args:
            order: Returns the evaluation's candidates, in the order in which policies go through
                them.
        """
        self._order, self._places = order, None
        self._ahead.clear()
        self._passing.clear()

    def find(self, kind: str, name: str) -> bytes | None:
        """Return the cached document of a cluster."""
        found = self._kinds.get(kind, {}).get(name)
        if found is None and self._passing:
            found = self._passing.get(kind, {}).pop(name, None)
        return found

    def ahead(self, kind: str, name: str) -> tuple[str, ...]:
        """Return clusters to prefetch: the next ones in order, whose documents may be read soon.

        Each call returns more: a policy that reads all clusters, in any order, soon has all
        documents, and no longer waits for the host.
        """
        count = self._ahead.get(kind, AHEAD_MIN)
        passing = self._passing.get(kind)
        if passing and len(passing) > self._passed[kind] * (1 - _USED_MIN):
            count = 0
        self._ahead[kind] = min(count * 2, AHEAD_MAX)
        if not count:
            return ()
        order = self._order()
        if self._places is None:
            self._places = {each: place for place, each in enumerate(order)}
        place = self._places.get(name)
        if place is None:
            return ()
        cached = self._kinds.get(kind, {})
        found: list[str] = []
        for part in (order[place + 1 :], order[:place]):
            for each in part:
                if each not in cached:
                    found.append(each)
                    if len(found) == count:
                        return tuple(found)
        return tuple(found)

    def came(self, kind: str, wanted: Sequence[str]) -> None:
        """Record the result of a prefetch: if it returned nothing, prefetch no more."""
        cached, passing = self._kinds.get(kind, {}), self._passing.get(kind, {})
        if len(wanted) >= _TRIES and wanted[0] not in cached and wanted[0] not in passing:
            self._ahead[kind] = 0

    def keep(self, kind: str, items: Mapping[str, bytes]) -> dict[str, bytes]:
        """Store new entries while there is room; return those that did not fit."""
        documents = self._kinds.setdefault(kind, {})
        left: dict[str, bytes] = {}
        for name, packed in items.items():
            size = len(packed) + KEPT_ENTRY_BYTES
            if name in documents:
                continue
            if self._bytes + size > self._bytes_max:
                left[name] = packed
            else:
                documents[name] = packed
                self._bytes += size
        return left

    def obey(self, frame: frames.KeepDocuments) -> None:
        """Drop and add documents on an order of the host."""
        if frame.stale != ():
            self.forget(frame.stale)
        if frame.items:
            left = self.keep(frame.kind, frame.items)
            if left:
                self._passing[frame.kind], self._passed[frame.kind] = left, len(left)

    def forget(self, stale: Iterable[str] | None) -> None:
        """Drop outdated documents; None: drop all."""
        if stale is None:
            self._kinds.clear()
            self._passing.clear()
            self._bytes = 0
            return
        for name in stale:
            for documents in self._kinds.values():
                packed = documents.pop(name, None)
                if packed is not None:
                    self._bytes -= len(packed) + KEPT_ENTRY_BYTES
            for passing in self._passing.values():
                passing.pop(name, None)

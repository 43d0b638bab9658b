"""What a cell keeps of the host's answers: packed documents by kind and cluster, within a bound.

Used by `worker`. Entries are decoded at each read, so no policy changes them.
"""

from collections.abc import Mapping
from typing import Final

from moorage.sandbox.wire import frames
from moorage.sandbox.wire.limits import AHEAD_KEPT_BYTES_MAX, KEPT_BYTES_MAX, KEPT_ENTRY_BYTES

_NONE: Final[Mapping[str, bytes]] = {}


class DocumentCache:
    """Packed answers; the host says which of them have become stale."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, bytes]] = {}
        self._bytes = 0

    def of(self, kind: str) -> Mapping[str, bytes]:
        """Return all of one kind, by cluster."""
        return self._kinds.get(kind, _NONE)

    def keep_one(self, kind: str, name: str, packed: bytes) -> None:
        """Keep the answer to a call, if there is room for it."""
        size = self._bytes + len(packed) + KEPT_ENTRY_BYTES
        documents = self._kinds.setdefault(kind, {})
        if size <= KEPT_BYTES_MAX and name not in documents:
            documents[name] = packed
            self._bytes = size

    def keep(self, kind: str, items: Mapping[str, bytes], bytes_max: int = KEPT_BYTES_MAX) -> None:
        """Store new entries while there is room."""
        documents = self._kinds.setdefault(kind, {})
        new = {name: packed for name, packed in items.items() if name not in documents}
        size = sum(map(len, new.values())) + len(new) * KEPT_ENTRY_BYTES
        while new and self._bytes + size > bytes_max:
            size -= len(new.popitem()[1]) + KEPT_ENTRY_BYTES
        documents.update(new)
        self._bytes += size

    def obey(self, frame: frames.KeepDocuments) -> None:
        """Forget and keep what the host says."""
        if frame.stale != ():
            self.forget(frame.stale)
        if frame.items:
            self.keep(frame.kind, frame.items, AHEAD_KEPT_BYTES_MAX)

    def forget(self, stale: tuple[str, ...] | None) -> None:
        """Forget what is not true any more; None: everything."""
        if stale is None:
            self._kinds.clear()
            self._bytes = 0
            return
        for name in stale:
            for documents in self._kinds.values():
                packed = documents.pop(name, None)
                if packed is not None:
                    self._bytes -= len(packed) + KEPT_ENTRY_BYTES

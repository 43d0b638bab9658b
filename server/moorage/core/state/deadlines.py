"""What is due next. A part of `State`; only `apply` adds to it."""

import heapq
from collections.abc import Callable, Iterable
from typing import Final

from moorage.model import RequestId

__all__ = ["Deadlines"]

SPARE: Final = 1_000
"""Outdated deadlines that are kept, beyond two for every lease and waiter, before a sweep."""


class Deadlines:
    """Deadlines of leases, waiters and reservations, those that hold no longer among them.

    Args:
        of: Returns when something is due as it is now, in seconds since the epoch; None: never.

    """

    def __init__(self, of: Callable[[RequestId], float | None]) -> None:
        self._of = of
        self._due: list[tuple[float, RequestId]] = []

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._due)

    def first(self) -> tuple[float, RequestId] | None:
        """Return what is due next, and when; None where nothing is."""
        while self._due:
            at, request = self._due[0]
            if at == self._of(request):
                return at, request
            heapq.heappop(self._due)  # Renewed, ended or dequeued meanwhile.
        return None

    def rebuild(self, requests: Iterable[RequestId]) -> None:
        """Rebuild the heap from the deadlines of these requests."""
        due = ((self._of(request), request) for request in requests)
        self._due = sorted((at, request) for at, request in due if at is not None)

    def note(self, request: RequestId, live: int) -> None:
        """Note when something is due. A lease renewed each second leaves many behind: a sweep.

        Args:
            request: What; it is due some time.
            live: How many things may have a deadline.

        """
        at = self._of(request)
        assert at is not None
        heapq.heappush(self._due, (at, request))
        if len(self._due) > SPARE + 2 * live:
            self._due = sorted({(at, name) for at, name in self._due if at == self._of(name)})

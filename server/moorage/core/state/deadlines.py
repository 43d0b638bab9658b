"""Deadlines: finds the next deadline, and computes later deadlines after a stall.

`Deadlines` is a part of `State`; only `apply` adds to it.
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Final

import msgspec

from moorage.model import RequestId

SPARE: Final = 1_000
"""Maximum heap entries beyond two per lease and waiter; one more removes outdated deadlines."""


class Deadlines:
    """A heap of the deadlines of leases, waiters and reservations; `first` removes outdated ones.

    Args:
        of: Returns the present deadline of an object, in seconds since the epoch; None: no
            deadline.
    """

    def __init__(self, of: Callable[[RequestId], float | None]) -> None:
        self._of = of
        self._due: list[tuple[float, RequestId]] = []

    def __len__(self) -> int:
        return len(self._due)

    def first(self) -> tuple[float, RequestId] | None:
        """Return the next deadline and the id of its object; None if there is none."""
        while self._due:
            at, request = self._due[0]
            if at == self._of(request):
                return at, request
            heapq.heappop(self._due)  # The object was renewed, ended or dequeued.
        return None

    def rebuild(self, requests: Iterable[RequestId]) -> None:
        """Rebuild the heap from the deadlines of these requests."""
        due = ((self._of(request), request) for request in requests)
        self._due = sorted((at, request) for at, request in due if at is not None)

    def note(self, request: RequestId, live: int) -> None:
        """Add a deadline; sweep the heap when it has too many outdated ones.

        Args:
            request: Id of an object with a deadline.
            live: Number of objects that may have a deadline.
        """
        at = self._of(request)
        assert at is not None
        heapq.heappush(self._due, (at, request))
        if len(self._due) > SPARE + 2 * live:
            self._due = sorted({(at, name) for at, name in self._due if at == self._of(name)})


class Grace(msgspec.Struct, frozen=True, gc=False):
    """Computes new deadlines after a stall.

    Args:
        now: The end of the stall, in seconds since the epoch.
        grace_seconds: Least seconds from now to a deadline that expired during the stall. The least
            for other deadlines is the stall's length, if that is less: a renewal may have failed.
    """

    now: float
    seconds: float
    grace_seconds: float

    def until(self, due: float) -> float:
        """Return the new deadline for an old one, in seconds since the epoch."""
        least = self.grace_seconds if due <= self.now else min(self.seconds, self.grace_seconds)
        return max(due, self.now + least)

    def outlasting(self, moved: Iterable[tuple[float, float]]) -> Callable[[float], float]:
        """Return a function that moves deadlines of waiters as deadlines of leases moved.

        A waiter's deadline moves by the largest shift of the leases' earlier deadlines, but at most
        to `grace_seconds` after the latest new deadline of these leases.

        Args:
            moved: Old and new deadlines of the leases that have a deadline.
        """
        pairs = sorted(moved)
        old = [before for before, _ in pairs]
        later = [0.0, *accumulate((until - before for before, until in pairs), max)]
        last = [0.0, *accumulate((until for _, until in pairs), max)]

        def until(due: float) -> float:
            earlier = bisect_left(old, due)
            outlasts = min(due + later[earlier], last[earlier] + self.grace_seconds)
            return max(self.until(due), outlasts)

        return until

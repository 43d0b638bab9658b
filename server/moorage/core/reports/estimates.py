"""Shares the estimates of `forecast` among all readers within `SHARED_SECONDS`.

Fifty open consoles cost as much as one. A new estimate is made earlier for a waiter that arrived
after the shared one was made.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from moorage.core.fit.feasibility import Candidates, Feasibility
from moorage.core.queue.order import WaitingQueue
from moorage.core.reports import forecast
from moorage.core.state.state import State
from moorage.model import Demand, RequestId

SHARED_SECONDS: Final = 2.0
"""Age at which a shared estimate is replaced, in seconds."""
AWAITED_SECONDS: Final = 10.0
"""Seconds for which the leases that a demand waits for are cached, without ended leases."""
AWAITED_MAX: Final = 256
"""Maximum demands whose awaited leases are cached."""


class Estimates:
    """Estimates of one state, shared by all readers.

    Args:
        state: The present state, which is only read.
        queue: The order of the waiters.
    """

    def __init__(self, state: State, feasibility: Feasibility, queue: WaitingQueue) -> None:
        self._state = state
        self._feasibility = feasibility
        self._queue = queue
        self._made_at = self._awaited_at = float("-inf")
        self._turns: dict[RequestId, float] = {}
        self._awaited: dict[tuple[Demand, Candidates], forecast.Awaited] = {}

    def turns(self, requests: Iterable[RequestId], now: float) -> Mapping[RequestId, float]:
        """Return the estimated start of the queue's first waiters, in seconds since the epoch.

        Args:
            requests: The requests of interest; an estimate older than one of these is made again.
            now: The present time, in seconds since the epoch.
        """
        waiting, made_at = self._state.waiting, self._made_at
        is_shared = _is_shared(made_at, now) and all(
            waiting[each].at < made_at for each in requests if each in waiting
        )
        if not is_shared:
            first = self._queue.in_turn(forecast.WAITERS_MAX)
            self._turns = forecast.expect_turns(self._state, self._feasibility, first, now)
            self._made_at = now
        return self._turns

    def awaited(self, demand: Demand, where: Candidates, now: float) -> forecast.Awaited:
        """Return the leases that a demand waits for; cached result of `forecast.find_awaited`."""
        if (
            not _is_shared(self._awaited_at, now, AWAITED_SECONDS)
            or len(self._awaited) >= AWAITED_MAX
        ):
            self._awaited.clear()
            self._awaited_at = now
        key = demand, where
        if key not in self._awaited:
            self._awaited[key] = forecast.find_awaited(self._state, self._feasibility, *key)
        leases, room_at = self._awaited[key]
        holding = [each for each in leases if each[0].id in self._state.leases]
        return forecast.Awaited(holding, room_at if holding else None)

    def clear(self) -> None:
        """Drop all remembered estimates."""
        self._turns = {}
        self._awaited.clear()
        self._made_at = self._awaited_at = float("-inf")


def _is_shared(made_at: float, now: float, seconds: float = SHARED_SECONDS) -> bool:
    """Return whether an estimate may still be shared; one made at the same `now` may not."""
    return 0 < now - made_at < seconds

"""The accuracy of `expected_at`: a part of the benchmark `waiting`.

The jobs of a trace are served in the order of arrival, with backfill. Like a user, each job
requests a lease for a round time that is longer than it needs, and releases it when done. For some
waiting jobs, three estimates at submission are compared with the actual wait:

- history: the server's estimate; it expects that leases last as long as similar ended leases.
- deadlines: the server's estimate if it expects that all leases last until their deadlines.
- recent: a naive baseline, the median wait of the last served jobs of similar size.
"""

import heapq
from bisect import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from benchmarks.packing import Consulting
from benchmarks.waiting_jobs import SIZES, WAIT_SECONDS, Job, fleet_of, needs, policy_of
from moorage.core.reports import forecast
from moorage.core.state.durations import Durations
from moorage.core.turns.effects import Address, LeaseNews
from moorage.core.turns.events import Asked, Event, ReleaseAsked
from moorage.model import Ask, LeaseTerms, PolicyRef, RequestId, SessionId, Tenant

BOUNDS: Final = tuple(hours * 3600.0 for hours in (1, 4, 24, 7 * 24, 30 * 24, 90 * 24, 365 * 24))
"""Lease times in seconds; users choose the shortest that is enough for their job."""
SAMPLES: Final = 400
"""Number of jobs, evenly spread over the trace, whose wait the server forecasts."""
RECENT: Final = 50
"""Number of last served jobs of a size; their median wait is the baseline."""
METHODS: Final = ("history", "deadlines", "recent")


def calibrate(jobs: Sequence[Job], nodes: int, rule: str) -> dict[str, Any]:
    """Return the errors of the estimates at submission, in seconds, by method.

    Args:
        jobs: The jobs in the order of their submission.
        nodes: Number of nodes of the fleet.
        rule: The shipped policy that places the jobs.
    """
    running = _Course(jobs, nodes, rule)
    every = max(1, len(jobs) // SAMPLES)
    for number, job in enumerate(jobs):
        running.until(job.at)
        running.come(number, sampled=number % every == 0)
    running.until(float("inf"))
    forecasts = running.forecasts
    common = [n for n, by in forecasts.items() if all(by[each] is not None for each in METHODS)]
    errors = {
        each: np.abs([forecasts[n][each] - running.waits[n] for n in common]) for each in METHODS
    }
    return {
        "waiting": len(forecasts),
        "compared": len(common),
        "estimated": {
            each: sum(by[each] is not None for by in forecasts.values()) / max(1, len(forecasts))
            for each in METHODS
        },
        "wait_median_seconds": _median([running.waits[n] for n in common]),
        "error_median_seconds": {each: _median(found) for each, found in errors.items()},
        "error_p90_seconds": {each: _p90(found) for each, found in errors.items()},
    }


def _median(values: Any) -> float:
    return float(np.median(values)) if len(values) else 0.0


def _p90(values: Any) -> float:
    return float(np.quantile(values, 0.9)) if len(values) else 0.0


class _Course:
    """Plays a run: jobs arrive, wait, hold GPUs and release them."""

    def __init__(self, jobs: Sequence[Job], nodes: int, rule: str) -> None:
        site = fleet_of(nodes)
        self._jobs, self._core = jobs, site.allocator
        self._consulting = Consulting(policy_of(rule), site)
        self._ends: list[tuple[float, int]] = []
        self._recent = {size: deque[float](maxlen=RECENT) for size in SIZES}
        self.waits: dict[int, float] = {}
        self.forecasts: dict[int, dict[str, Any]] = {}

    def until(self, moment: float) -> None:
        """End the jobs that are due until a given time."""
        while self._ends and self._ends[0][0] <= moment:
            now, number = heapq.heappop(self._ends)
            self._step(ReleaseAsked(_to(number), RequestId(str(number)), ""), now)
        due = self._core.next_deadline()
        assert due is None or due > moment or moment == float("inf"), "leases outlast their jobs"

    def come(self, number: int, *, sampled: bool) -> None:
        """Submit a job, and request the estimate of its start."""
        job = self._jobs[number]
        ask = Ask(
            id=RequestId(str(number)),
            tenant=Tenant(job.cluster),
            policy=PolicyRef("waiting:1.0-trial", "0" * 64),
            demand=needs(job.gpus),
            terms=LeaseTerms(BOUNDS[bisect(BOUNDS, job.seconds)], WAIT_SECONDS),
            inputs={},
            seed=number,
        )
        self._step(Asked(_to(number), ask), job.at)
        if sampled and number not in self.waits:
            recent = self._recent[_size(job)]
            self.forecasts[number] = {
                "history": self._expectation(number),
                "deadlines": self._by_deadlines(number),
                "recent": float(np.median(recent)) if recent else None,
            }

    def _expectation(self, number: int) -> float | None:
        state, now = self._core.state, self._jobs[number].at
        first = self._core.requests.queue.in_turn(forecast.WAITERS_MAX)
        turns = forecast.expect_turns(state, self._core.feasibility, first, now)
        turn = turns.get(RequestId(str(number)))
        return None if turn is None else turn - now

    def _by_deadlines(self, number: int) -> float | None:
        state = self._core.state
        learned, state.durations = state.durations, Durations()
        try:
            return self._expectation(number)
        finally:
            state.durations = learned

    def _step(self, event: Event, now: float) -> None:
        for _ in self._consulting.step(event, now):
            pass
        for number, answer in self._answers():
            job = self._jobs[number]
            if isinstance(answer, LeaseNews) and number not in self.waits:
                self.waits[number] = now - job.at
                self._recent[_size(job)].append(now - job.at)
                heapq.heappush(self._ends, (now + job.seconds, number))

    def _answers(self) -> Iterator[tuple[int, Any]]:
        answers = self._consulting.answers
        while answers:
            yield answers.popitem()


def _to(number: int) -> Address:
    return Address(SessionId("trace"), number)


def _size(job: Job) -> int:
    return SIZES[bisect(SIZES, job.gpus) - 1]

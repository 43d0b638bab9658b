"""Learns how long leases really last: many are released early, or renewed.

`Durations` is a part of `State`; only `apply` adds to it, and `forecast` reads it. Durations are
counted in steps of a quarter of a doubling, by tenant, policy and GPUs; estimates use the most
similar leases.
"""

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from moorage.core.state.accounts import demand_amounts, placement_amounts
from moorage.model import Ask, Lease

Likeness = tuple[str, str, int]
"""Tenant, policy and GPU milli that similar leases share; "" and -1: any."""
STEPS: Final = 4
"""Number of steps per doubling of a duration: estimates are accurate to within 20 %."""
STEPS_MAX: Final = 128
"""The highest step: longer durations, from 136 years on, are added to this step."""
ENOUGH: Final = 8
"""Fewest similar leases for an estimate; those shorter than the lease's age do not count."""
COUNT_MAX: Final = 1_024
"""Maximum counted durations of one likeness; more halve all counts, so that old ones lose weight.
"""
LIKENESSES_MAX: Final = 2_000
"""Maximum stored likenesses; one more replaces the least recently seen."""


class Durations:
    """Counts of durations by likeness, the least recently seen first."""

    def __init__(self) -> None:
        self._counts: dict[Likeness, dict[int, int]] = {}
        self._medians: dict[tuple[str, str, int, int], float | None] = {}
        """Medians computed since the last change."""

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same counts, in the same order."""
        return isinstance(other, Durations) and list(self.counts()) == list(other.counts())

    __hash__ = None  # type: ignore[assignment]  # Mutable.

    def add(self, lease: Lease, at: float) -> None:
        """Count the duration of a lease that ends now, but not if it failed or was preempted."""
        failed = lease.outcome is not None and lease.outcome.phase == "failed"
        if lease.over or failed or lease.notice is not None:
            return
        step = _step(at - lease.granted_at)
        for each in _likenesses(
            lease.tenant, lease.policy.uri, placement_amounts(lease.placement)[0]
        ):
            counts = self._counts.pop(each, {})
            counts[step] = counts.get(step, 0) + 1
            if sum(counts.values()) > COUNT_MAX:
                counts = {at: many // 2 for at, many in counts.items() if many > 1}
            self._counts[each] = counts
        self._medians.clear()
        while len(self._counts) > LIKENESSES_MAX:
            del self._counts[next(iter(self._counts))]

    def counts(self) -> Iterator[tuple[Likeness, tuple[tuple[int, int], ...]]]:
        """Yield all counts, for a checkpoint."""
        for likeness, counts in self._counts.items():
            yield likeness, tuple(sorted(counts.items()))

    def carry(self, likeness: Likeness, counts: tuple[tuple[int, int], ...]) -> None:
        """Take over the counts of a checkpoint."""
        self._counts[likeness] = dict(counts)
        self._medians.clear()

    def of_lease(self, lease: Lease, age: float) -> float | None:
        """Return the expected duration of a lease of this age, from its grant, in seconds.

        Returns:
            The median of similar leases that lasted at least this long; None if there are too few.
        """
        return self._lasts(
            lease.tenant, lease.policy.uri, placement_amounts(lease.placement)[0], age
        )

    def of_request(self, ask: Ask) -> float | None:
        """Return the expected duration of a request's lease, in seconds; None if unknown."""
        return self._lasts(ask.tenant, ask.policy.uri, demand_amounts(ask)[0], 0.0)

    def _lasts(self, tenant: str, policy: str, gpu_milli: int, age: float) -> float | None:
        start = _step(age)
        key = (tenant, policy, gpu_milli, start)
        if key not in self._medians:
            self._medians[key] = self._median(tenant, policy, gpu_milli, start)
        median = self._medians[key]
        return None if median is None else max(age, median)

    def _median(self, tenant: str, policy: str, gpu_milli: int, start: int) -> float | None:
        for each in _likenesses(tenant, policy, gpu_milli):
            counts = self._counts.get(each, {})
            beyond = sorted((step, many) for step, many in counts.items() if step >= start)
            total = sum(many for _, many in beyond)
            if total < ENOUGH:
                continue
            so_far = accumulate(many for _, many in beyond)
            steps = zip(beyond, so_far, strict=True)
            median = next(step for (step, _), many in steps if 2 * many >= total)
            return float(2.0 ** ((median + 0.5) / STEPS))
        return None


def _step(seconds: float) -> int:
    return min(STEPS_MAX - 1, int(STEPS * math.log2(seconds))) if seconds > 1.0 else 0


def _likenesses(tenant: str, policy: str, gpu_milli: int) -> Iterator[Likeness]:
    """Yield the keys of leases similar to a lease, the most similar first."""
    yield tenant, policy, gpu_milli
    yield tenant, "", -1
    yield "", "", gpu_milli
    yield "", "", -1

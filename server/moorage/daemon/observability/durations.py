"""Measures durations, as histograms of `/metrics`.

On the hot path, an observation costs two additions and a search among a dozen bounds. The library's
own histograms would take a lock each time.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from moorage.core.state.facts import Fact, Granted, Started
from moorage.core.turns.effects import Consult
from moorage.core.turns.events import ConsultFailed, Proposed
from moorage.model import Lease, RequestId

LABELS_MAX: Final = 50
"""Maximum policies or backends with a series each; those that come later count as `other`."""
OTHER: Final = "other"
VERSIONS_MAX: Final = 1_000
"""Maximum versions of policies whose series is remembered; with more, all are forgotten."""
CONSULTATIONS_MAX: Final = 100_000
"""Maximum consultations measured at a time; beyond this, a consultation is not measured."""
_BRIEF: Final = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 0.1, 1.0)
_USUAL: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.25, 1.0, 5.0)
_WAITS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0),
    *(900.0, 3600.0, 14400.0, 86400.0),
)
_TAKEOVERS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_LONG: Final = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)


class _Histogram:
    """Counts durations in buckets, separately for each value of the label, if there is a label.

    The value for a policy is its name without the version, since versions come and go.
    """

    def __init__(self, name: str, about: str, bounds: tuple[float, ...], label: str = "") -> None:
        self.bounds = bounds
        self._name, self._about, self._label = name, about, label
        self._series: dict[str, _Series] = {}
        self._by_uri: dict[str, _Series] = {}

    def observe(self, uri: str, seconds: float) -> None:
        """Count one duration of a policy or another label in its bucket. Runs on the hot path."""
        series = self._by_uri.get(uri) or self._find(uri)
        series.counts[bisect_left(self.bounds, seconds)] += 1
        series.seconds += seconds

    def _find(self, uri: str) -> "_Series":
        label = uri.partition(":")[0]
        if len(self._by_uri) >= VERSIONS_MAX:
            self._by_uri.clear()
        series = self._by_uri[uri] = self._series.get(label) or self._new(label)
        return series

    def _new(self, label: str) -> "_Series":
        if len(self._series) >= LABELS_MAX:
            label = OTHER
        return self._series.setdefault(label, _Series([0] * (len(self.bounds) + 1)))

    def buckets(self) -> tuple[int, ...]:
        """Return the counts of all labels together, by bucket."""
        none = (0,) * (len(self.bounds) + 1)
        return tuple(map(sum, zip(none, *(s.counts for s in self._series.values()), strict=True)))

    def metric(self) -> Metric:
        """Return the metric with its counts."""
        labels = [self._label] if self._label else []
        family = HistogramMetricFamily(self._name, self._about, labels=labels)
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        if not labels and not self._series:
            self._new("")
        for label, series in self._series.items():
            total, buckets = 0, []
            for name, count in zip(names, series.counts, strict=True):
                total += count
                buckets.append((name, float(total)))
            family.add_metric([label] if labels else [], buckets, series.seconds)
        return family


@dataclass(slots=True)
class _Series:
    """Durations of one value of the label: counts by bucket, and the sum of the seconds."""

    counts: list[int]
    seconds: float = 0.0


class DurationMetrics:
    """Measures waiting, evaluation, verification, commits, starts of workloads, and takeovers.

    Args:
        lease: Finds a lease that holds resources, or was one of the last to end.
    """

    def __init__(self, lease: Callable[[RequestId], Lease | None]) -> None:
        self._lease = lease
        self._waiting = _Histogram(
            "moorage_wait_seconds", "Time from a request for a lease to its grant", _WAITS, "policy"
        )
        self._evaluation = _Histogram(
            "moorage_evaluation_seconds",
            "Time of one evaluation of a policy",
            _USUAL,
            "policy",
        )
        self._verification = _Histogram(
            "moorage_verification_seconds", "Time to verify and decide one proposal", _BRIEF
        )
        self._commit = _Histogram(
            "moorage_commit_seconds", "Time to make one group of facts durable", _USUAL
        )
        self._start = _Histogram(
            "moorage_start_seconds",
            "Time from a grant to the start of its workload",
            _LONG,
            "backend",
        )
        self._takeover = _Histogram(
            "moorage_takeover_seconds",
            "Time from when a standby saw that no server led, until it answered as the leader",
            _TAKEOVERS,
        )
        self._consulted: dict[RequestId, tuple[str, float]] = {}
        """Policy and start time of each request's consultation under way."""

    def buckets(self, what: str) -> tuple[int, ...]:
        """Return the counts of `grants`, `evaluations` or `commits` by bucket of duration."""
        return self._histogram(what).buckets()

    def bounds(self, what: str) -> tuple[float, ...]:
        """Return the upper bounds of a histogram's buckets; the last bucket has no bound."""
        return self._histogram(what).bounds

    def _histogram(self, what: str) -> _Histogram:
        return {"grants": self._waiting, "evaluations": self._evaluation, "commits": self._commit}[
            what
        ]

    def observe_consultation(self, effect: Consult) -> None:
        """Record that a policy begins to evaluate. Runs on the hot path."""
        if len(self._consulted) < CONSULTATIONS_MAX:
            self._consulted[effect.ask.id] = effect.ask.policy.uri, perf_counter()

    def forget_consultation(self, request: RequestId) -> None:
        """Record that an evaluation is no longer awaited."""
        self._consulted.pop(request, None)

    def observe_decision(self, event: Proposed | ConsultFailed, seconds: float) -> None:
        """Measure the evaluation that ended, and the step that decided. Runs on the hot path."""
        begun = self._consulted.pop(event.request, None)
        if begun is not None:
            self._evaluation.observe(begun[0], perf_counter() - seconds - begun[1])
        self._verification.observe("", seconds)

    def observe_facts(self, facts: Sequence[Fact]) -> None:
        """Measure waiting and starts, by durable facts. Runs on the hot path."""
        for fact in facts:
            if type(fact) is Granted:  # Here and below: quicker than `isinstance` of a Struct.
                lease = fact.lease
                waited = lease.granted_at - lease.asked_at
                self._waiting.observe(lease.policy.uri, max(0.0, waited))
            elif type(fact) is Started:
                self._note_start(fact)

    def observe_commit(self, seconds: float) -> None:
        """Measure how long one group of facts took to become durable."""
        self._commit.observe("", seconds)

    def observe_takeover(self, seconds: float) -> None:
        """Measure how long this server took to replace the last leader."""
        self._takeover.observe("", seconds)

    def _note_start(self, started: Started) -> None:
        lease = self._lease(started.lease)
        if lease is not None and lease.provision is not None:
            since = max(0.0, started.at - lease.granted_at)
            self._start.observe(lease.provision.backend, since)

    def metrics(self) -> Iterable[Metric]:
        """Yield the histograms."""
        for each in (
            self._waiting,
            self._evaluation,
            self._verification,
            self._commit,
            self._start,
            self._takeover,
        ):
            yield each.metric()


def quantile(bounds: Sequence[float], counts: Sequence[int], part: float) -> float | None:
    """Return a quantile of the durations, estimated from buckets; None: there are no durations.

    The value is interpolated within a bucket; for the last one, its lower bound is returned.
    """
    rest = part * sum(counts)
    if not rest:
        return None
    low = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if rest <= count:
            return round(low + (bound - low) * rest / count, 7)
        rest -= count
        low = bound
    return low

"""Counters of the daemon, for `/metrics`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moorage.core.state.facts import (
    Dequeued,
    Ended,
    Fact,
    Granted,
    Refusal,
    Renewed,
    Requeued,
    Warmed,
)
from moorage.core.turns.effects import Response

_COUNTED: Final[tuple[type, ...]] = (Granted, Renewed, Requeued, Warmed, Ended, Dequeued)


class Measures:
    """Counts facts, requests and refusals, and serves all metrics of the daemon.

    Attributes:
        requests: Number of requests for a placement that were not added to the counter yet.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # Requests are first counted here: the library's counters would take a lock for each.
        self.requests = 0
        self._recorded = dict[type, int].fromkeys(_COUNTED, 0)
        self.registry.register(_Gauges(self._settle))
        self._asks = Counter(
            "moorage_asks_total", "Requests for a placement", registry=self.registry
        )
        facts = Counter("moorage_facts_total", "Facts by kind", ["kind"], registry=self.registry)
        self._facts = {kind: facts.labels(kind.__name__.lower()) for kind in _COUNTED}
        self._taken_over = Counter(
            "moorage_taken_over_total", "Grants of warm workloads", registry=self.registry
        )
        self._refusals = Counter(
            "moorage_refusals_total", "Failure replies by code", ["code"], registry=self.registry
        )

    def watch(self, gauges: Callable[[], Iterable[Metric]]) -> None:
        """Read these gauges whenever the metrics are read."""
        self.registry.register(_Gauges(gauges))

    @contextmanager
    def watching(self, *gauges: Callable[[], Iterable[Metric]]) -> Iterator[None]:
        """Read these gauges whenever the metrics are read, until the `with` block ends."""
        watched = [_Gauges(each) for each in gauges]
        for each in watched:
            self.registry.register(each)
        try:
            yield
        finally:
            for each in watched:
                self.registry.unregister(each)

    def observe_facts(self, facts: Sequence[Fact]) -> None:
        """Count durable facts. Runs on the hot path."""
        recorded = self._recorded
        for fact in facts:
            kind = type(fact)
            if kind in recorded:
                recorded[kind] += 1
                if type(fact) is Granted and fact.lease.inherited:
                    self._taken_over.inc()

    def _settle(self) -> Iterable[Metric]:
        """Add the pending counts to the counters, which are read next."""
        self._asks.inc(self.requests)
        self.requests = 0
        for kind, many in self._recorded.items():
            self._facts[kind].inc(many)
        self._recorded = dict[type, int].fromkeys(_COUNTED, 0)
        return ()

    def count(self, answer: Response) -> None:
        """Count one reply of the core, if it is a failure. Runs on the hot path."""
        if type(answer) is Refusal:
            self._refusals.labels(answer.code.value).inc()

    def refusals(self) -> dict[str, int]:
        """Return the number of failure replies, by code."""
        (family,) = self._refusals.collect()
        counted = (each for each in family.samples if each.name.endswith("_total"))
        return {each.labels["code"]: int(each.value) for each in counted}

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)


class _Gauges(Collector):
    def __init__(self, gauges: Callable[[], Iterable[Metric]]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        """Yield the gauges as they are now."""
        return self._gauges()


def counter(name: str, about: str, value: float) -> Metric:
    """Return one counter without labels; the caller counts its value."""
    return CounterMetricFamily(name, about, value=value)


def counters(name: str, about: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    """Return one counter per value of a label; the caller counts their values."""
    family = CounterMetricFamily(name, about, labels=[label])
    for key, value in values:
        family.add_metric([key], value)
    return family


def gauge(name: str, about: str, value: float) -> Metric:
    """Return one gauge without labels, with its present value."""
    return GaugeMetricFamily(name, about, value=value)


def gauges_of(
    name: str, about: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Return one gauge per combination of values of several labels."""
    family = GaugeMetricFamily(name, about, labels=labels)
    for keys, value in values:
        family.add_metric(keys, value)
    return family


def gauges(name: str, about: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    """Return one gauge per value of a label."""
    return gauges_of(name, about, [label], (([key], value) for key, value in values))

"""Reads metrics of the fleet periodically from a Prometheus server into the catalog.

The daemon starts the poller if `prometheus_url` is set. A round is a fixed number of instant
queries, each for the whole fleet of any size. Documents are written as if a client had posted them,
so policies, filters and `/cluster/query` see them; they have `source`, `timestamp` and `stale`. If
Prometheus does not answer, the last values stay, with `stale: true` once they are too old.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlencode

import msgspec

from moorage.catalog.mirrored.http import (
    Service,
    ServiceReply,
    ServiceRequest,
    WrongAnswer,
    quote_body,
)
from moorage.catalog.mirrored.samples import (
    QUERIES,
    SOURCE,
    Composed,
    Labels,
    MetricSample,
    compose,
)
from moorage.catalog.ports import Catalog
from moorage.catalog.values import Document
from moorage.protocol.faults import ServiceError

TIMEOUT_SECONDS: Final = 10.0
"""Longest seconds of one query, including repetitions."""
VALUE_MAX: Final = 1e15
"""Largest sample that is used (a petabyte); larger samples are dropped, as NaN is."""

_NOW: Final = "vector(time())"
# All queries of a round are for one instant, and ages are by Prometheus's own clock.
_UNREACHABLE: Final = "unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusSource:
    """The settings of a Prometheus server: its URL, and the labels of its series.

    Args:
        url: The server's base URL; credentials as in `catalog.mirrored.http.Service`.
        labels: The labels that name a series' cluster and node.
        interval_seconds: Pause between two rounds.
        stale_seconds: Age from which a node's samples are marked as stale.
    """

    url: str
    labels: Labels = field(default_factory=Labels)
    interval_seconds: float = 30.0
    stale_seconds: float = 120.0


class PrometheusPoller:
    """Updates the metrics documents of live clusters from a Prometheus server.

    Args:
        catalog: The catalog to update; its metrics must be embedded.
        tell: Called with a sentence whenever a fault begins or ends: the server does not answer, or
            series belong to no known node.
    """

    def __init__(
        self, catalog: Catalog, source: PrometheusSource, tell: Callable[[str], None]
    ) -> None:
        self._catalog = catalog
        self._source = source
        self._tell = tell
        self._service = Service("Prometheus server", source.url, TIMEOUT_SECONDS)
        self.up = False
        """Whether the server answered in the last round."""
        self.last = Composed()
        """Metrics documents and findings of the last round."""

    async def run(self) -> None:
        """Poll periodically until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self._source.interval_seconds)

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()

    async def poll(self) -> Composed:
        """Send all queries once, and store changed metrics. Faults are in the returned findings."""
        wrong: dict[str, str] = {}
        answers: dict[str, list[MetricSample]] = {}
        now = time.time()
        try:
            now = await self._service.ask(_question(_NOW), _instant)
            answers = {query: await self._ask(query, now) for query in QUERIES}
        except ServiceError as error:
            wrong[_UNREACHABLE] = error.reason
        if not wrong and not any(answers.values()):
            wrong["empty"] = "it has no series of the DCGM exporter and of the node exporter"
        clusters = await self._clusters()
        composed = await asyncio.to_thread(
            compose,
            answers,
            {cluster_id: nodes for cluster_id, (nodes, _) in clusters.items()},
            {cluster_id: old for cluster_id, (_, old) in clusters.items() if old},
            self._source.labels,
            now=now,
            stale_seconds=self._source.stale_seconds,
        )
        composed.findings |= wrong
        for document in composed.documents:
            try:
                await self._catalog.metrics.put(document)
            except ServiceError as error:
                composed.findings["refused"] = f"{document['clusterId']}: {error.reason}"
        self._tell_changes(composed)
        return composed

    def _tell_changes(self, composed: Composed) -> None:
        before, self.last = self.last, composed
        self.up = _UNREACHABLE not in composed.findings
        for kind, finding in composed.findings.items():
            if kind not in before.findings:
                self._tell(finding)
        for kind in before.findings.keys() - composed.findings.keys():
            self._tell(f"no longer {kind}: {before.findings[kind]}")

    async def _clusters(self) -> dict[str, tuple[frozenset[str], Document | None]]:
        """Return the nodes of each live cluster, and its metrics if this poller wrote them."""
        found: dict[str, tuple[frozenset[str], Document | None]] = {}
        for cluster_id in self._catalog.memory.live_ids():
            try:
                document = await self._catalog.clusters.get(cluster_id)
            except ServiceError:
                continue  # The cluster was deleted meanwhile.
            entries = (document.get("nodes") or {}).get("nodeData") or ()
            nodes = frozenset(str(entry["id"]) for entry in entries)
            found[cluster_id] = nodes, await self._metrics(cluster_id)
        return found

    async def _metrics(self, cluster_id: str) -> Document | None:
        try:
            document = await self._catalog.metrics.get(cluster_id)
        except ServiceError:
            return None  # No metrics yet.
        return document if document.get("source") == SOURCE else None

    async def _ask(self, query: str, at: float) -> list[MetricSample]:
        return await self._service.ask(_question(query, time=at), _samples)


def _question(query: str, **more: float) -> ServiceRequest:
    return ServiceRequest("GET", "/api/v1/query?" + urlencode({"query": query, **more}))


class _Series(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Vector(msgspec.Struct, tag_field="resultType", tag="vector"):
    result: list[_Series]


class _Answer(msgspec.Struct):
    """The fields that we read in an answer of Prometheus's HTTP API."""

    status: str
    data: _Vector | None = None
    error: str = ""


def _samples(reply: ServiceReply) -> list[MetricSample]:
    """Return the samples of an instant vector, without NaN and infinite values."""
    try:
        answer = msgspec.json.decode(reply.body, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WrongAnswer(
            f"answered {reply.status} and no vector{quote_body(reply.body)}"
        ) from error
    if answer.status != "success" or answer.data is None:
        raise WrongAnswer(f"answered {reply.status}: {answer.error or answer.status}")
    return [
        MetricSample(series.metric, value)
        for series in answer.data.result
        if (value := _number(series.value[1])) is not None
    ]


def _instant(reply: ServiceReply) -> float:
    """Return the time of the Prometheus server, in seconds since the epoch."""
    samples = _samples(reply)
    if len(samples) != 1:
        raise WrongAnswer("sends no valid time")
    return samples[0].value


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and abs(value) <= VALUE_MAX else None

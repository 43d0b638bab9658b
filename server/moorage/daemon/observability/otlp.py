"""Sends spans to an OTLP receiver; the only module that imports OpenTelemetry.

`start` imports it where the setting `traces` is on. OpenTelemetry's SDK reads everything else from
the variables `OTEL_…`.
"""

import asyncio
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client.metrics_core import Metric

from moorage.daemon.observability.counters import counter

QUEUE_MAX: Final = 2_048
"""Maximum spans that wait to be sent, unless `OTEL_BSP_MAX_QUEUE_SIZE` sets another limit."""
ANSWER_BYTES_MAX: Final = 1 << 16
"""Maximum bytes that are read of a receiver's answer, which might be endless."""
CLOSE_SECONDS_MAX: Final = 2.0
"""Seconds that a stop waits for the receiver to take the last spans."""


class _Session(requests.Session):
    """An HTTP session that reads a bounded part of an answer, and follows no redirect."""

    def send(self, request: requests.PreparedRequest, **how: Any) -> requests.Response:
        answer = super().send(request, **{**how, "stream": True})
        answer.raw.read(ANSWER_BYTES_MAX)  # Else the connection is not used again.
        answer.close()
        answer.raw = None
        if answer.is_redirect:
            raise requests.TooManyRedirects(f"{request.url} redirects to another address")
        return answer


class _CountingExporter:
    """Passes spans to an exporter, and counts those that it got, sent and could not send."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        self._exporter = exporter
        self.shutdown = exporter.shutdown
        self.force_flush = exporter.force_flush
        self.taken = self.sent = self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch; give up after `OTEL_EXPORTER_OTLP_TIMEOUT`."""
        self.taken += len(spans)
        result: SpanExportResult = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.sent += len(spans)
            else:
                self.failed += len(spans)
        return result


class Spans:
    """Makes spans, which a thread sends. A receiver that does not answer blocks nothing.

    Raises:
        ValueError: A variable `OTEL_…` has a value that cannot be read.
    """

    def __init__(self) -> None:
        self._queue_max = int(os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE) or QUEUE_MAX)
        self._exporter = _CountingExporter(OTLPSpanExporter(session=_Session()))
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "moored"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = cast("SpanExporter", self._exporter)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, self._queue_max))
        self._tracer = self._provider.get_tracer("moorage")
        self._incoming = TraceContextTextMapPropagator()
        self._ended = self._dropped = 0

    def begin_request(self, traceparent: str) -> Span:
        """Begin the span of a request below the client's span, or as the root of a new trace."""
        context = self._incoming.extract({"traceparent": traceparent})
        return self._tracer.start_span("request", context, SpanKind.SERVER)

    def begin(self, name: str, parent: Span) -> Span:
        """Begin a child span."""
        return self._tracer.start_span(name, set_span_in_context(parent))

    def end(self, span: Span) -> None:
        """End a span. If too many spans wait to be sent, drop and count it."""
        if not span.is_recording():  # The span is not sampled.
            return
        if self._ended - self._exporter.taken >= self._queue_max:
            self._dropped += 1
            return
        self._ended += 1
        span.end()

    @staticmethod
    def trace_id(span: Span) -> str:
        """Return the id of a span's trace, as receivers show it."""
        return format_trace_id(span.get_span_context().trace_id)

    def metrics(self) -> Iterable[Metric]:
        """Yield the numbers of sent and dropped spans."""
        sent, lost = self._exporter.sent, self._dropped + self._exporter.failed
        yield counter("moorage_spans_sent_total", "Spans that the OTLP receiver accepted", sent)
        yield counter(
            "moorage_spans_dropped_total", "Spans that were not sent: too many, or refused", lost
        )

    async def close(self) -> None:
        """Send the queued spans within `CLOSE_SECONDS_MAX`."""
        # The SDK waits for up to half a minute, but Python does not wait for a daemon thread.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_SECONDS_MAX)

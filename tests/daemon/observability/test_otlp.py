"""Tests of the sender of spans at receivers that misbehave."""

import importlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytestmark = pytest.mark.heavy

Answer = Callable[[BaseHTTPRequestHandler], None]
BODY_BYTES_MAX = 64 << 20
"""Maximum bytes that a receiver may send before its connection ends, the system's buffers included.
"""


class Receiver(ThreadingHTTPServer):
    """A receiver that answers each batch of spans with `answer`, and counts bytes of bodies."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        self.bytes, self.batches, self.over = 0, 0, threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.batches += 1
                self.rfile.read(int(self.headers["Content-Length"]))
                answer(self)
                receiver.over.set()

            def log_message(self, *_: object) -> None:
                """Write no log."""

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def receiving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], Receiver]]:
    running: list[tuple[Receiver, threading.Thread]] = []

    def receive(answer: Answer) -> Receiver:
        receiver = Receiver(answer)
        thread = threading.Thread(target=receiver.serve_forever, args=(0.05,))
        thread.start()
        running.append((receiver, thread))
        url = f"http://127.0.0.1:{receiver.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        return receiver

    yield receive
    for receiver, thread in running:
        receiver.shutdown()
        receiver.server_close()
        thread.join()


@pytest.fixture
def otlp() -> Any:
    """The module, which needs the extra `otel`."""
    pytest.importorskip("opentelemetry.exporter", reason="the extra `otel` is not installed")
    return importlib.import_module("moorage.daemon.observability.otlp")


async def send_one(otlp: Any) -> dict[str, float]:
    """Send a span; return the counters."""
    spans = otlp.Spans()
    spans.end(spans.begin_request(""))
    await spans.close()
    return {sample.name: sample.value for each in spans.metrics() for sample in each.samples}


async def test_spans_name_the_service_moored_by_default(otlp, monkeypatch) -> None:
    for given, name in ((None, "moored"), ("gpus", "gpus")):
        if given is not None:
            monkeypatch.setenv("OTEL_SERVICE_NAME", given)
        spans = otlp.Spans()
        span = spans.begin_request("")
        assert span.resource.attributes["service.name"] == name
        spans.end(span)
        await spans.close()


async def test_an_endless_answer_of_the_receiver_is_not_read_to_its_end(otlp, receiving) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        part = b"x" * (1 << 16)
        try:
            while receiver.bytes < BODY_BYTES_MAX:
                handler.wfile.write(part)
                receiver.bytes += len(part)
        except OSError:
            handler.close_connection = True

    receiver = receiving(answer)
    assert (await send_one(otlp))["moorage_spans_sent_total"] == 1
    assert receiver.over.wait(30)
    assert otlp.ANSWER_BYTES_MAX <= receiver.bytes < BODY_BYTES_MAX


async def test_a_redirected_batch_counts_as_dropped(otlp, receiving) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(307)
        handler.send_header("Location", f"http://127.0.0.1:{receiver.server_port}/other")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    receiver = receiving(answer)
    counted = await send_one(otlp)
    assert counted["moorage_spans_sent_total"] == 0
    assert counted["moorage_spans_dropped_total"] == 1
    assert receiver.batches == 1

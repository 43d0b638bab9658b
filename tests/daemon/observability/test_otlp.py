"""Receivers of spans that misbehave."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("opentelemetry.exporter", reason="the extra `otel` is not installed")

from moorage.daemon.observability.otlp import ANSWER_BYTES_MAX, Spans

Answer = Callable[[BaseHTTPRequestHandler], None]
BODY_BYTES_MAX = 64 << 20
"""What a receiver may get rid of before its connection ends: buffers of the system, and more."""


class Receiver(ThreadingHTTPServer):
    """Answers each batch with `answer`, and counts the bytes of bodies."""

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
                """Say nothing."""

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


async def send_one() -> dict[str, float]:
    """Send a span; return the counters."""
    spans = Spans()
    spans.end(spans.begin_request(""))
    await spans.close()
    return {sample.name: sample.value for each in spans.metrics() for sample in each.samples}


async def test_an_answer_without_end_is_not_read(receiving) -> None:
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
    assert (await send_one())["moorage_spans_sent_total"] == 1
    assert receiver.over.wait(30)
    assert ANSWER_BYTES_MAX <= receiver.bytes < BODY_BYTES_MAX


async def test_a_batch_that_is_sent_elsewhere_counts_as_dropped(receiving) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(307)
        handler.send_header("Location", f"http://127.0.0.1:{receiver.server_port}/other")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    receiver = receiving(answer)
    counted = await send_one()
    assert counted["moorage_spans_sent_total"] == 0
    assert counted["moorage_spans_dropped_total"] == 1
    assert receiver.batches == 1

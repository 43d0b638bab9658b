"""With `traces`, an OTLP receiver gets a trace per request, below the client's span."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from served import FIRST_FIT, Server, ask_message, here, serving, until

from moorage_client.blocking import BlockingClient

pytestmark = pytest.mark.heavy  # Daemons.

PARTS = ["admission", "policy", "commit", "start"]
TRACE, PARENT = "ab" * 16, "cd" * 8
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
LEASE = {"ttl_seconds": 60}
SLEEP = {"category": "process", "command": ["sleep", "600"]}
QUICK = {"OTEL_BSP_SCHEDULE_DELAY": "50", "MOORAGE_BACKENDS": "local,memory"}


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve HTTP on loopback; yield the URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Receiver:
    """An OTLP receiver over HTTP, and the spans that it received."""

    def __init__(self) -> None:
        self.spans: list = []
        self.services: set[str] = set()

    def handler(self) -> type[BaseHTTPRequestHandler]:
        pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        received = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                for each in service.ExportTraceServiceRequest.FromString(body).resource_spans:
                    received.services.add(attributes(each.resource)["service.name"])
                    for scope in each.scope_spans:
                        received.spans.extend(scope.spans)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")  # An answer without any field.
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Write no log."""

        return Handler

    def of(self, trace: str, names: list[str]) -> dict:
        """Wait until a trace has the spans `names`, and no others; return them by name."""
        until(lambda: len([s for s in self.spans if s.trace_id.hex() == trace]) >= len(names))
        found = {s.name: s for s in self.spans if s.trace_id.hex() == trace}
        assert sorted(found) == sorted(names)
        return found


def attributes(of) -> dict:
    return {each.key: each.value.string_value for each in of.attributes}


@contextmanager
def serve_traced(url: str, **more: str) -> Iterator[Server]:
    environment = {"MOORAGE_TRACES": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": url, **QUICK, **more}
    with serving(environment=environment) as server:
        server.fill(here())
        yield server


def check_order(spans: dict, parts: list[str]) -> None:
    """Check that the request is below the client's span, and its parts below it, in order."""
    request = spans["request"]
    assert request.parent_span_id.hex() == PARENT
    assert all(spans[each].parent_span_id == request.span_id for each in parts)
    begun = [spans[each].start_time_unix_nano for each in parts]
    assert begun == sorted(begun)
    assert begun[0] >= request.start_time_unix_nano
    assert len({attributes(each)["moorage.request"] for each in spans.values()}) == 1


@pytest.fixture(scope="module")
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture(scope="module")
def server(receiver: Receiver) -> Iterator[Server]:
    with (
        listening(receiver.handler()) as url,
        serve_traced(url, OTEL_SERVICE_NAME="gpus") as server,
    ):
        yield server


def test_a_request_over_either_port_is_a_single_trace(server: Server, receiver: Receiver) -> None:
    provision = {"backend": "local", "spec": SLEEP}
    one = {"resources": {"gpus": 1}, "lease": LEASE}
    lease = server.ask(provision=provision, traceparent=TRACEPARENT, **one)["lease"]
    server.in_state(lease, "active")
    spans = receiver.of(TRACE, ["request", *PARTS])
    check_order(spans, PARTS)
    assert attributes(spans["start"])["moorage.request"] == lease["id"]
    assert attributes(spans["start"])["moorage.backend"] == "local"
    assert attributes(spans["policy"])["moorage.policy"] == FIRST_FIT
    server.release(lease)

    other = TRACE.replace("a", "e")
    header = {"traceparent": TRACEPARENT.replace(TRACE, other)}
    answer = server.http.post("/allocate", json=ask_message(**one), headers=header)
    assert answer.json()["success"], answer.text
    check_order(receiver.of(other, ["request", *PARTS[:3]]), PARTS[:3])

    refused = TRACE.replace("a", "f")
    server.ask("none:1.0-stable", traceparent=TRACEPARENT.replace(TRACE, refused))
    spans = receiver.of(refused, ["request", "admission"])
    assert attributes(spans["request"])["moorage.code"] == "unknown_policy"
    assert receiver.services == {"gpus"}
    until(lambda: server.metric("moorage_spans_sent_total") >= 11)
    assert server.metric("moorage_spans_dropped_total") == 0


def test_the_client_sends_its_active_span(server: Server, receiver: Receiver) -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    api = pytest.importorskip("opentelemetry.trace")
    tracer = trace.TracerProvider(shutdown_on_exit=False).get_tracer("test")
    before = len(receiver.spans)
    with BlockingClient(server.running.ws) as client:
        with tracer.start_as_current_span("mine") as span:
            client.ask(FIRST_FIT)
        client.ask(FIRST_FIT)  # Without a span, the request begins a new trace.
    context = span.get_span_context()
    spans = receiver.of(api.format_trace_id(context.trace_id), ["request", *PARTS[:2]])
    assert spans["request"].parent_span_id.hex() == api.format_span_id(context.span_id)
    until(lambda: len(receiver.spans) == before + 6)


def test_with_a_receiver_that_refuses_everything_the_server_loses_only_spans() -> None:
    taken = threading.Event()

    class Silent(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.wait(60)
            self.close_connection = True

    pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
    small = {"OTEL_BSP_MAX_QUEUE_SIZE": "8", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4"}
    small["OTEL_EXPORTER_OTLP_TIMEOUT"] = "1"
    with listening(Silent) as url:
        with serve_traced(url, **small) as server:
            replies = server.say(*[ask_message() for _ in range(20)])
            assert all(each["success"] for each in replies)
            assert server.metric("moorage_spans_dropped_total") >= 60 - 8 - 4
            assert server.metric("moorage_spans_sent_total") == 0
        taken.set()


def test_without_the_setting_traces_only_the_debug_log_follows_a_request() -> None:
    more = {"MOORAGE_LOG_LEVEL": "debug", "MOORAGE_LOG_FORMAT": "json"}
    with serving(environment={"PYTHONPROFILEIMPORTTIME": "1", **more}) as server:
        server.fill(here())
        provision = {"backend": "local", "spec": SLEEP}
        one = {"resources": {"gpus": 1}, "lease": LEASE, "provision": provision}
        lease = server.ask(traceparent=TRACEPARENT, **one)["lease"]
        server.in_state(lease, "active")
        log = server.log()
        lines = [json.loads(each) for each in log.splitlines() if each.startswith("{")]
        mine = [each for each in lines if each.get("request") == lease["id"]]
        assert {each["trace"] for each in mine} == {TRACE}
        ended = [each["part"] for each in mine if each["event"] == "request_part_ended"]
        assert ended == PARTS
        (admitted,) = [each for each in mine if each.get("part") == "admission"]
        assert admitted["session"]
        assert "moorage.daemon.observability.traces" in log
        assert "opentelemetry" not in log

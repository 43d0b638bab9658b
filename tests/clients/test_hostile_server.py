"""At a server with arbitrary answers, each command prints a clear error and has its exit code."""

import contextlib
import io
import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from moorage_client.cli.exits import Exit
from moorage_client.cli.program import run
from tests.sites import Answer, Site

PLACE = {"cluster_id": "c", "node_id": "n"}
LEASE = {
    "id": "r-1", "state": "active", "tenant": "ann",
    "placement": [{**PLACE, "gpus": ["0"], "gpu_milli": 500}], "expires_at": 2e9, "granted_at": 1e9,
    "fencing": 1, "token": "t", "ttl_seconds": 60.0,
    "workload": {
        "backend": "local", "phase": "failed", "attempt": 1,
        "outcome": {
            "phase": "failed", "detail": "died", "at": 1e9, "nodes": [PLACE], "log_tail": ["oh"],
        },
    },
}  # fmt: skip
ALIAS = {
    "alias": "one:stable", "policy_rule_uri": "one:1-x", "former": "one:0-x", "who": "ann",
    "canary": {"version": "one:2-x", "percent": 10.0, "by": "request"}, "shadow": "one:3-x",
    "history": [{"at": 1e9, "who": "ann", "what": "activated"}],
}  # fmt: skip
ARM = {
    "policy_rule_uri": "one:1-x",
    "asked": 3,
    "refused": {"no_capacity": 1},
    "faults": 0,
    "latency_ms": {"p50": 1.0, "p99": 2.0},
}
SIDE = {"policy_rule_uri": "one:1-x", "placed": 1, "latency_ms": {"p50": 1.0}}
SAMPLE = {
    "request": "r",
    "active": {"placement": [{**PLACE, "gpus": ["0"]}]},
    "candidate": {"error": {"code": "no", "reason": "no"}},
}
SHADOW = {"active": SIDE, "candidate": SIDE, "asked": 3, "cost": {"gpus": 1}, "samples": [SAMPLE]}
CHANGE = {"at": 1e9, "who": "ann", "what": "registered", "fields": ["code"], "digest": "0" * 64}
CLUSTER = {"id": "c", "nodes": {"count": 1, "nodeData": []}, "gpus": {"count": 1}, "memory": 5}
SLOTS = {"gpus": [{"id": "0", "slots": 1}]}
HOLDING = {"transaction": "t-1", "pid": 1, "expires_at": 2e9, "resources": SLOTS}
POOL = {"resources": SLOTS, "holdings": [HOLDING]}
LOG = {"base64": "aGVsbG8=", "offset": 5, "attempt": 1, "over": True, "exit_code": 0}


def data(value: Any) -> dict[str, Any]:
    return {"success": True, "data": value}


def lease_answer(value: Any = None) -> dict[str, Any]:
    return {"success": True, "data": value, "lease": LEASE, "warnings": ["hm"], "request": "r-1"}


WAITER = {
    "position": 1, "request": "r", "policy_rule_uri": "one:1-x", "priority": 1, "deadline": 2e9,
    "resources": {"gpus": 1, "models": ["A100"]},
}  # fmt: skip
NODE = {"node_id": "n", "models": ["A100"], "gpus": {"0": 250}, "cpu_milli_free": 1}
TOTALS = {"cluster_id": "c", "nodes": 1, "gpus": 2, "gpu_milli_free": 1, "gpu_milli_total": 2}
FAULT = {
    "code": "bad_policy", "reason": "no", "field": "code", "attempts": [2],
    "findings": [{}, {"message": "m", "file": "f", "line": 1, "text": "t"}], "nodes": {"busy": 1},
}  # fmt: skip
REFUSAL = {"success": False, "message": "no", "request": "r-1", "error": FAULT}
TOKEN = ("--lease-token", "t")
COMMANDS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("ask", "one:1-x", "--explain"), data({"cluster_id": "c"}) | {"reasons": {"a": [1]}}),
    (("ask", "one:1-x", "--lease"), lease_answer()),
    (("renew", "r-1", *TOKEN), lease_answer()),
    (("release", "r-1", *TOKEN), lease_answer()),
    (("flush",), data({"flushed": ["r-1"]})),
    (("cancel", "r-1"), data(WAITER)),
    (("leases",), data({"leases": [LEASE], "next": None})),
    (("status", "r-1"), lease_answer()),
    (("why", "r-1"), data({"request": "r-1", "lease": LEASE, "at": 1e9})),
    (("queue",), data({"waiting": [WAITER, WAITER], "next": None})),
    (("fleet",), data({"clusters": [TOTALS], "next": None})),
    (("fleet", "c"), data({"nodes": [NODE], "next": None})),
    (("logs", "r-1", *TOKEN), data(LOG)),
    (("logs", "r-1", "-f", *TOKEN), data(LOG)),
    (("exec", "r-1", *TOKEN, "--", "x"), data({"exit_code": 0, "output": "hello"})),
    (("run", "--", "x"), lease_answer() | {"data": LOG}),
    (("watch", "--count", "1"), data({"topics": ["leases"]})),
    (("policy", "list"), data([{"policy_rule_uri": "one:1-x", "description": "d"}])),
    (("policy", "show", "one:1-x"), data({"policy_rule_uri": "one:1-x", "code": "pass"})),
    (("policy", "show", "one:1-x", "--history"), data([CHANGE])),
    (("policy", "delete", "one:1-x"), data({})),
    (("policy", "activate", "one:1-x"), data(ALIAS)),
    (("policy", "rollback", "one"), data(ALIAS)),
    (("policy", "aliases"), data([ALIAS])),
    (("policy", "aliases", "one"), data(ALIAS)),
    (("policy", "aliases", "one", "--delete"), data(ALIAS)),
    (("policy", "canary", "one", "one:2-x"), data(ALIAS)),
    (("policy", "canary", "one", "--report"), data({"active": ARM, "candidate": ARM})),
    (("policy", "shadow", "one", "--stop"), data(ALIAS)),
    (("policy", "shadow", "one", "--report"), data(SHADOW)),
    (("policy", "manage", "one", "look"), data({"did": 1})),
    (("policy", "logs", "one"), data({"printed": {"eval": "x"}, "rests": {"overruns": 1}})),
    (("policy", "push", "RULE", "--uri=one:1-x", "--no-test"), data({"policy_rule_uri": "u"})),
    (("fleet", "import", "FLEET", "--replace"), CLUSTER),
    (("pool", "show"), POOL),
    (("pool", "checkout", "gpus", "--pid", "0"), POOL | {"transaction": "t-1"}),
    (("pool", "checkin", "t-1"), {}),
]
ABSURD: list[Any] = [
    *(None, True, -1, 0, 10**30, 1e308, -1e308, 0.5, "", "x" * 5000, "\N{CROSS MARK}"),
    *([], {}, [None], [[[]]], {"": {"": 1}}, {"\x1b[2J": "\x1b[2J"}),
    "\x1b]0;owned\x07\x9b31m\u202e\r\n",
]


_WAYS = (
    "ask one:1-x", "logs r-1", "run --", "watch --count", "leases", "pool show", "policy list",
    "policy manage", "fleet import",
)  # fmt: skip
WAYS = [{" ".join(words[:2]): words for words, _ in COMMANDS}[way] for way in _WAYS]
"""One command for each way to a server."""


def nest(depth: int) -> bytes:
    return b'{"success":true,"data":' + b"[" * depth + b"]" * depth + b"}"


class Hostile(Site):
    """A server that answers every request, on the socket and over HTTP, as a test prepared."""

    def __init__(self) -> None:
        self.calm()
        self._socket = serve(self._talk, "127.0.0.1", 0, max_size=None, compression=None)
        threading.Thread(target=self._socket.serve_forever, daemon=True).start()
        self.socket_url = f"ws://127.0.0.1:{self._socket.socket.getsockname()[1]}"
        super().__init__()

    def calm(self) -> None:
        self.document: Any = {}
        self.raw: bytes | None = None
        """A whole WebSocket message or HTTP body that the server sends as its answer."""
        self.wire: bytes | None = None
        """Bytes that the server sends in place of an HTTP answer or a frame before it closes."""
        self.status = 200

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> Answer:
        if self.wire is not None:
            request.wfile.write(self.wire)
            return None
        document = self.document
        if request.command == "PUT" and isinstance(document, list) and document:
            document = document[0]  # The first one of the list.
        return self.status, document if self.raw is None else self.raw

    def _talk(self, connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed, OSError):
            for message in connection:
                request = json.loads(message)
                if self.wire is not None:
                    connection.socket.sendall(self.wire)
                    connection.socket.shutdown(socket.SHUT_RDWR)
                elif self.raw is not None:
                    connection.send(self.raw, text=True)
                else:
                    answer = self.document
                    if isinstance(answer, dict):
                        answer = {"id": request.get("id"), **answer}
                    connection.send(json.dumps(answer))
                    if request.get("op") == "watch":
                        news = answer.get("data") if isinstance(answer, dict) else answer
                        connection.send(json.dumps({"event": "e", "topic": "t", "data": news}))

    def server_close(self) -> None:
        self._socket.shutdown()
        super().server_close()


@pytest.fixture(scope="module")
def hostile_server(tmp_path_factory) -> Iterator[Hostile]:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "rule.py").write_text("pass\n")
    (folder / "fleet.json").write_text(json.dumps([CLUSTER]))
    with Hostile() as hostile, pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "MOORAGE_URL": hostile.socket_url,
            "MOORAGE_HTTP_URL": hostile.url,
            "MOORAGE_POOL_ADDRESS": f"tcp:127.0.0.1:{hostile.server_port}",
            "MOORAGE_STATE": str(folder / "leases.json"),
            "HOSTILE": str(folder),
        }.items():
            patch.setenv(name, value)
        yield hostile


@pytest.fixture
def hostile(hostile_server: Hostile) -> Hostile:
    hostile_server.calm()
    return hostile_server


def run_command(words: tuple[str, ...], *, as_json: bool, seconds: float = 5.0) -> int:
    """Run a command, check that it prints a single clear error, and return its exit code."""
    files = {"RULE": "rule.py", "FLEET": "fleet.json"}
    given = [os.path.join(os.environ["HOSTILE"], files[w]) if w in files else w for w in words]  # noqa: PTH118  # These are words of a command line.
    shared = ["--timeout", str(seconds), *(["--json"] if as_json else [])]
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([*shared, *given])
    said, noted = out.buffer.getvalue().decode(errors="replace"), err.getvalue()
    passes_on = words[0] in {"logs", "exec", "run"}  # They print output unchanged.
    assert "Traceback" not in noted, noted
    assert "a defect of moorage" not in said + noted, noted
    for text in (noted, *([] if passes_on else [said])):
        assert all(c.isprintable() or c in "\n\t" for c in text), text
    if words[0] != "exec":
        assert code in list(Exit), (code, noted)
    if as_json and words[0] not in {"watch", "exec"}:
        json.loads(said)
    elif code and not as_json and not passes_on:
        assert "moorage: " in noted
    return code


def paths(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every part of a document, and to the whole document."""
    yield at
    parts = document.items() if isinstance(document, dict) else ()
    parts = enumerate(document) if isinstance(document, list) else parts
    for key, part in parts:
        yield from paths(part, (*at, key))


def change(document: Any, at: tuple[Any, ...], value: Any, *, gone: bool) -> Any:
    """Return a document with another value at one place, or without the value."""
    if not at:
        return value
    copy = document.copy()
    if gone and len(at) == 1:
        del copy[at[0]]
    else:
        copy[at[0]] = change(document[at[0]], at[1:], value, gone=gone)
    return copy


CASES = [
    (words, answer, at)
    for words, reply in COMMANDS
    for answer in (reply, REFUSAL)
    for at in paths(answer)
]


@pytest.mark.parametrize("as_json", [False, pytest.param(True, marks=pytest.mark.heavy)])
@pytest.mark.parametrize(
    ("words", "answer"), COMMANDS, ids=[" ".join(words) for words, _ in COMMANDS]
)
def test_the_command_line_shows_a_good_answer(hostile, words, answer, as_json):
    hostile.document = answer
    assert run_command(words, as_json=as_json) in {Exit.OK, Exit.LEASE_LOST}


@pytest.mark.heavy
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    case=st.sampled_from(CASES), value=st.sampled_from(ABSURD), gone=st.booleans(), js=st.booleans()
)
def test_an_impossible_part_of_an_answer_gives_at_most_one_error(hostile, case, value, gone, js):
    words, answer, at = case
    hostile.document = change(answer, at, value, gone=gone)
    run_command(words, as_json=js)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"null", b"NaN", b"\xff\xfe\x00", b"<html>\x1b[31m</html>"),
        *(nest(500), nest(990), nest(100_000)),
        b'{"success":true,"data":NaN}',
        b'{"success":true,"data":1e999}',
        b'{"success":true,"data":' + b"9" * 5000 + b"}",
        b'{"success":true,"data":"\\ud800"}',
        b'{"success":false,"error":{"code":"busy","details":' + b"[" * 990 + b"]" * 990 + b"}}",
    ],
    ids=range(14),
)
def test_an_unreadable_answer_of_a_server_gives_a_single_error(hostile, raw):
    hostile.raw = raw
    for number, words in enumerate(WAYS):
        hostile.status = 500 if number % 2 else 200
        run_command(words, as_json=number % 3 == 0, seconds=0.1)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "wire",
    [
        b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnope",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://[::1\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://\xff\xff/\r\n\r\n",
        b"HTTP/9.9 abc \x1b[31m\r\n\r\n", b"\x81\x7f\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x82\x03abc", b"\x81\x02\xff\xfe", b"\xff" * 100, b"\x88\x02\x03\xe8",
    ],
    ids=range(13),
)  # fmt: skip
def test_a_connection_that_breaks_or_speaks_another_protocol_gives_a_single_error(hostile, wire):
    hostile.wire = wire
    for words in WAYS:
        run_command(words, as_json=False, seconds=0.1)

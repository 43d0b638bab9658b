"""A harbour is a small server that speaks the protocol over real sockets, on its own thread.

It grants GPUs from a pile, remembers leases across its own restarts, and misbehaves on request.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from moorage.protocol.codes import SESSION_HEADER
from moorage_client import Client
from moorage_client.loops import LoopThread
from tests.commands import run_moorage

REFUSALS = {
    "full:1-x": {"code": "no_capacity", "reason": "It does not fit now.", "nodes": {"busy": 3}},
    "huge:1-x": {"code": "never_fits", "reason": "It fits nowhere."},
    "broken:1-x": {"code": "policy_error", "reason": "KeyError: 'x'"},
    "badly:1-x": {
        "code": "bad_message",
        "reason": "resources.gpus: expected a number",
        "field": "resources.gpus",
        "expected": "a number",
    },
    "defect:1-x": {"code": "internal", "reason": "A defect."},
    "unknown:1-x": {
        "code": "unknown_policy",
        "reason": "There is no policy unknown:1-x.",
        "similar": ["first:1-x"],
    },
}


OUTPUT = {"base64": "", "offset": 0, "attempt": 1, "over": True, "exit_code": 0}
WAITER = {"position": 1, "request": "r-9", "priority": 5}
CORDONED = {"leases": [], "unavailable": "cordoned"}
DATA: dict[str, Callable[[dict[str, Any]], Any]] = {
    "logs": lambda _: OUTPUT,
    "why": lambda message: {"request": message["request"], "reason": "\x1b[31mred"},
    "queue": lambda _: {"waiting": [WAITER | {"deadline": time.time() + 60}], "next": None},
    "cordon": lambda at: CORDONED | {"cluster_id": at["cluster"], "node_id": at["node"] or None},
    "cancel": lambda message: {"request": message["request"], "state": "cancelled"},
    "watch": lambda message: {"topics": message["topics"]},
    "manage": lambda message: {"did": message["action"]},
}
"""Answers that do not depend on the harbour's state, by operation."""


READS = frozenset({"status", "why", "leases", "queue", "fleet", "decisions", "watch"})
"""Operations that a standby answers itself."""


class Gate(threading.Event):
    """An event that both a thread and a coroutine can wait for."""

    async def opened(self) -> None:
        await asyncio.to_thread(self.wait, 30)


class Harbour:
    """A small Moorage server whose state survives `stop` and `start`."""

    def __init__(self) -> None:
        self.leases: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, str] = {}
        self.heard: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.mute: set[str] = set()
        self.refusals = dict(REFUSALS)
        self.nodes, self.backends = ["n1"], ["local"]
        self.registered: list[str] = []
        self.states: list[dict[str, Any]] = []
        self.garbage: str | bytes | None = None
        self.drop_after_grant = self.standby = self.names_sessions = False
        self.gate = Gate()
        self.token: str | None = None
        self.leader: str | None = None
        """The URL of the leader that a standby names; None if the standby knows no leader."""
        self.sessions: list[str] = []
        self.port = 0
        self._thread = LoopThread("harbour")
        self._server: Server | None = None
        self._fencing = itertools.count(1)
        self._changed = threading.Condition()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def start(self) -> None:
        async def begin() -> Server:
            doors = {"process_request": self._door, "process_response": self._name_session}
            return await serve(self._talk, "127.0.0.1", self.port, **doors)

        self._server = self._thread.run(begin())
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    def stop(self) -> None:
        if self._server is not None:
            self._thread.run(self._close(self._server))
            self._server = None

    def end(self) -> None:
        self.stop()
        self._thread.stop()

    def lose_sockets(self) -> None:
        """Break every socket without a close; the server keeps running."""

        async def break_them() -> None:
            assert self._server is not None
            for connection in self._server.connections:
                connection.transport.abort()

        self._thread.run(break_them())

    def wait_for(self, what: Any, seconds: float = 60.0) -> None:
        """Return as soon as `what()` is true, which is checked after each handled message."""
        with self._changed:
            assert self._changed.wait_for(what, seconds), f"never came: {self.heard}"

    def count(self, op: str) -> int:
        return sum(message.get("op", "ask") == op for message in self.heard)

    def take_over(self, other: "Harbour") -> None:
        """Make this harbour the leader, with the state of the other harbour."""
        self.leases, self.keys, self._fencing = other.leases, other.keys, other._fencing
        self.standby = False

    def freeze(self) -> None:
        """Have the harbour receive messages, but answer neither requests nor pings."""

        async def freeze_them() -> None:
            assert self._server is not None
            for connection in self._server.connections:
                connection.transport.pause_reading()

        self._thread.run(freeze_them())

    async def _close(self, server: Server) -> None:
        server.close(code=1012)
        await server.wait_closed()

    def _door(self, connection: ServerConnection, request: Any) -> Any:
        shown = request.headers.get("Authorization")
        self.headers.append(shown)
        if self.token is not None and shown != f"Bearer {self.token}":
            return connection.respond(401, "Send a valid token.\n")
        return None

    def _name_session(self, connection: ServerConnection, request: Any, response: Any) -> None:
        if self.names_sessions:
            self.sessions.append(f"s-{self.port}-{len(self.sessions)}")
            response.headers[SESSION_HEADER] = self.sessions[-1]

    async def _talk(self, connection: ServerConnection) -> None:
        tasks = set()
        async for text in connection:
            message = json.loads(text)
            with self._changed:
                self.heard.append(message)
                self._changed.notify_all()
            tasks.add(asyncio.create_task(self._answer_if_there(connection, message)))

    async def _answer_if_there(self, connection: ServerConnection, message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionClosed):  # The client has left meanwhile.
            await self._answer(connection, message)

    async def _answer(self, connection: ServerConnection, message: dict[str, Any]) -> None:
        op = message.get("op", "ask")
        if op in self.mute:
            return
        if self.garbage is not None:
            await connection.send(self.garbage)
            return
        if self.standby and op not in READS:
            reply = no("not_leader", "This server is a standby.", leader=self.leader)
            await connection.send(json.dumps({"id": message["id"], **reply}))
            return
        if op in DATA:
            reply = {"success": True, "data": DATA[op](message)}
        else:
            reply = getattr(self, f"_{op}")(message)
        if asyncio.iscoroutine(reply):
            reply = await reply
        if op == "ask" and self.drop_after_grant and reply["success"]:
            self.drop_after_grant = False
            connection.transport.abort()
            return
        await connection.send(json.dumps({"id": message["id"], **reply}))
        with self._changed:
            self._changed.notify_all()

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        policy = message["policy_rule_uri"]
        if policy in self.refusals:
            return no(**self.refusals[policy])
        if self.registered and policy not in self.registered:
            known = {"nearest": [], "registered": self.registered}
            return no("unknown_policy", "It is not here.", field="policy_rule_uri", **known)
        backend = message.get("provision", {}).get("backend", "")
        if backend and backend not in self.backends:
            there = {"field": "provision.backend", "backends": self.backends}
            return no("unsupported", "It is not here.", **there)
        if policy == "slow:1-x":
            await self.gate.opened()
        place = {"cluster_id": "c0", "node_id": "n1", "gpus": ["0", "1"]}
        if policy == "shy:1-x":
            return {"success": True, "data": {"error": "not today"}, "request": "r-shy"}
        if "lease" not in message:
            data = message["inputs"].get("say", place)
            return {"success": True, "data": data, "request": "r-0", "warnings": ["three clusters"]}
        key = message["lease"].get("idempotency_key", "")
        lease = self.leases.get(self.keys.get(key, ""))
        if lease is None:
            lease = self._grant(message["lease"]["ttl_seconds"], policy)
            self.keys[key] = lease["id"]
        return {"success": True, "data": place, "lease": lease, "request": lease["id"]}

    def _grant(self, ttl: float, policy: str) -> dict[str, Any]:
        number, now = next(self._fencing), time.time()
        share = {"cluster_id": "c0", "node_id": "n1", "gpus": ["0", "1"], "gpu_milli": 1000}
        lease = {
            "id": f"l-{number}", "token": f"t-{number}", "fencing": number, "state": "active",
            "tenant": "local", "placement": [share], "granted_at": now, "expires_at": now + ttl,
            "ttl_seconds": ttl, "policy_rule_uri": policy,
        }  # fmt: skip
        self.leases[lease["id"]] = lease
        return lease

    def _find_owned(self, message: dict[str, Any]) -> dict[str, Any]:
        lease = self.leases.get(message["lease"])
        if lease is None:
            return no("unknown_lease", f"There is no lease {message['lease']}.")
        if message["token"] not in {None, lease["token"]}:
            return no("wrong_token", "The token is not that of the lease.")
        return lease

    def _renew(self, message: dict[str, Any]) -> dict[str, Any]:
        lease = self._find_owned(message)
        if "success" in lease:
            return lease
        if lease["state"] == "ended":
            return no("lease_ended", f"Lease {lease['id']} ended: {lease['reason']}.")
        ttl = message.get("ttl_seconds", lease["ttl_seconds"])
        lease |= {"expires_at": time.time() + ttl, "ttl_seconds": ttl}
        return {"success": True, "data": lease["placement"], "lease": lease}

    def _release(self, message: dict[str, Any]) -> dict[str, Any]:
        lease = self._find_owned(message)
        if "success" in lease:
            return lease
        lease |= {"state": "ended", "reason": "released"}
        return {"success": True, "data": lease["placement"], "lease": lease}

    def _status(self, message: dict[str, Any]) -> dict[str, Any]:
        lease = self.leases.get(message["request"])
        if lease is None:
            return no("unknown_lease", "There is no such lease.")
        if self.states:
            lease |= self.states.pop(0)
        return {"success": True, "data": lease["placement"], "lease": _public_part(lease)}

    def _decisions(self, message: dict[str, Any]) -> dict[str, Any]:
        wanted = message.get("filters", {}).get("state")
        rows = [
            {"request": f"r-{number}", "at": 100.0 - number, "state": state, "reason": f"{state}!"}
            for number, state in enumerate(("granted", "ended", "refused", "ended"))
        ]
        rows = [row for row in rows if wanted in (None, row["state"])]
        start = int(message.get("after", 0))
        following = str(start + 1) if len(rows) > start + 1 else None
        return {"success": True, "data": {"decisions": rows[start : start + 1], "next": following}}

    def _leases(self, message: dict[str, Any]) -> dict[str, Any]:
        wanted = message.get("filters", {}).get("state")
        rows = [_public_part(row) for row in self.leases.values() if wanted in (None, row["state"])]
        start = int(message.get("after", 0))
        following = str(start + 2) if len(rows) > start + 2 else None
        return {"success": True, "data": {"leases": rows[start : start + 2], "next": following}}

    def _fleet(self, message: dict[str, Any]) -> dict[str, Any]:
        if "cluster" in message:
            node = {"models": ["A100"], "gpus": {"0": 1000, "1": 250}}
            nodes = [{"node_id": name, **node} for name in self.nodes]
            return {"success": True, "data": {"nodes": nodes, "next": None}}
        cluster = {"cluster_id": "c0", "nodes": 1, "gpus": 2, "gpu_milli_free": 1250}
        data = {"clusters": [cluster | {"gpu_milli_total": 2000}], "next": None}
        return {"success": True, "data": data}

    def _resume(self, message: dict[str, Any]) -> dict[str, Any]:
        return no("not_found", "There is no such session.")


def _public_part(lease: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in lease.items() if name != "token"}


def no(code: str, reason: str, **more: Any) -> dict[str, Any]:
    error = {"code": code, "reason": reason, **more}
    return {"success": False, "message": reason, "error": error, "request": "r-no"}


@contextlib.contextmanager
def open_harbour() -> Iterator[Harbour]:
    harbour = Harbour()
    harbour.start()
    yield harbour
    harbour.gate.set()
    harbour.end()


@pytest.fixture
def harbour() -> Iterator[Harbour]:
    """A running harbour."""
    with open_harbour() as harbour:
        yield harbour


@pytest.fixture
def other() -> Iterator[Harbour]:
    """A second running harbour."""
    with open_harbour() as other:
        yield other


@pytest.fixture
async def client(harbour: Harbour) -> AsyncIterator[Client]:
    """A client of the harbour."""
    async with Client(harbour.url) as client:
        yield client


@pytest.fixture
def nowhere() -> Iterator[str]:
    """A URL at which no server answers: its port is taken, but has no listener."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"ws://127.0.0.1:{taken.getsockname()[1]}"


class Shell:
    """Runs `moorage` command lines: calls within this process, which is quick, or as processes."""

    program = Path(sys.executable).with_name("moorage")

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_moorage(arguments, **self.environment)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.program, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell's background jobs ignore Ctrl-C, and so would this one.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # No other thread holds a lock that this needs.
        )

    def process(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=30)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)


@pytest.fixture
def shell(harbour: Harbour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """The command line, pointed at the harbour, with a separate state file."""
    for name in tuple(os.environ):
        if name.startswith("MOORAGE_"):
            monkeypatch.delenv(name)
    ours = {"MOORAGE_URL": harbour.url, "XDG_STATE_HOME": str(tmp_path), "COLUMNS": "100"}
    return Shell({**os.environ, **ours})

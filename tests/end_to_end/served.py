"""A running daemon for end-to-end tests, and documents for it."""

import contextlib
import json
import os
import platform
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from interface import CHECKED_BYTES_MAX, Interface
from typer.testing import CliRunner
from websockets.sync.client import connect

from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import Running, daemon
from moorage_policies import catalog
from tests.commands import run_moorage
from tests.waiting import until

FIRST_FIT = "first_fit:1.0-stable"
MOORAGE = Path(sys.executable).with_name("moorage")
CONTEXT = ssl.create_default_context()
"""The TLS context of all HTTP clients, since loading its authorities takes long."""


def cluster(name: str, nodes: int = 2, gpus: int = 4, model: str = "A100", **more) -> dict:
    node = {
        "gpus": {"count": gpus, "gpus": [{"modelName": model, "memory": 81_920}] * gpus},
        "vcpus": {"count": 64},
        "memory": 262_144,
    }
    rows = [{"id": f"{name}-{number}", **node} for number in range(nodes)]
    return {"id": name, "nodes": {"count": nodes, "nodeData": rows}, **more}


def here(gpus: int = 8, name: str = "here", **more) -> dict:
    """Return the document of a cluster with this machine as its only node."""
    document = cluster(name, nodes=1, gpus=gpus, **more)
    document["nodes"]["nodeData"][0]["id"] = platform.node()
    return document


def policy(body: str, name: str, **more) -> dict:
    """Return a PolicyRule document whose `eval` is `body`."""
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    code = (
        "class AIOSv1PolicyRule:\n"
        "    def __init__(self, rule_id, settings, parameters):\n"
        "        self.rule_id, self.settings, self.parameters = rule_id, settings, parameters\n"
        "    def eval(self, parameters, input_data, context):\n" + lines + "\n"
    )
    return {"policy_rule_uri": name, "type": "python_class_v1", "code": code, **more}


def bearing(token: str) -> dict[str, str]:
    """Return the headers of a request with a token."""
    return {"Authorization": f"Bearer {token}"}


def tell(socket, message: dict) -> dict:
    """Send a message, and return the next message that arrives."""
    socket.send(json.dumps(message))
    return read_message(socket)


def read_message(socket) -> dict:
    return json.loads(socket.recv(60))


def ran(
    *command: str | Path, seconds: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program with additional variables until it ends, with any exit code."""
    return subprocess.run(
        command,
        env={**os.environ, **variables},
        check=False,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def invoke(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `moored` in the test process, which is quick, for tests of its output."""
    from moorage.commands.program import app  # noqa: PLC0415  # Slow to import, and few tests need it.

    runner = CliRunner(env=variables)
    done = runner.invoke(app, [str(word) for word in words], catch_exceptions=False)
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)


class Server:
    """A running daemon, and helpers for tests.

    Args:
        running: The daemon.
        token: The token of each request that does not set its own.
    """

    def __init__(self, running: Running, token: str = "") -> None:
        self.running = running
        self.token = token
        self.data: Path | None = None
        self.leases: list[dict] = []
        """Leases to end after the test, if tests share the daemon."""
        self.headers = bearing(token) if token else {}
        self.http = httpx.Client(
            base_url=running.http, headers=self.headers, timeout=30, verify=CONTEXT
        )
        self.http.event_hooks = {"response": [self._check]}
        self._interface: Interface | None = None

    @property
    def pid(self) -> int:
        return self.running.pid

    def log(self) -> str:
        return self.running.log.read_text()

    def _check(self, response: httpx.Response) -> None:
        """Check a response against the served interface description, unless it is large."""
        request = response.request
        length = int(response.headers.get("content-length", CHECKED_BYTES_MAX + 1))
        if request.url.path == "/openapi.json" or length > CHECKED_BYTES_MAX:
            return
        if self._interface is None:
            headers = {k: v for k, v in request.headers.items() if k == "authorization"}
            described = self.http.get("/openapi.json", headers=headers)
            if not described.is_success:  # This caller may not read the description.
                return
            self._interface = Interface(described.json())
        response.read()
        self._interface.check(request, response)

    def register(self, *documents: dict) -> None:
        for document in documents:
            self.http.post("/clusters", json=document).raise_for_status()

    def fill(self, *documents: dict) -> None:
        """Register clusters, and publish first_fit."""
        self.register(*documents)
        self.publish(catalog.document("first_fit"))

    def publish(self, *documents: dict) -> None:
        for document in documents:
            answer = self.http.post("/policy", json=document)
            assert answer.status_code == 200, answer.text

    def socket(
        self, headers: dict[str, str] | None = None, bearer: str = "", unread_max: int | None = None
    ):
        """Return a new socket, with the given token or the server's.

        With `unread_max`, the close of the socket takes 10 s if more messages are unread.
        """
        given = bearing(bearer) if bearer else headers or self.headers
        options = {"compression": None, "max_size": None, "max_queue": unread_max}
        return connect(self.running.ws, additional_headers=given, **options)

    @contextlib.contextmanager
    def watching(self, *topics: str, bearer: str = "") -> Iterator[Any]:
        """Yield a socket whose next messages are news of the given topics."""
        with self.socket(bearer=bearer) as socket:
            assert tell(socket, {"op": "watch", "topics": topics, "id": 1})["success"]
            yield socket

    def say(self, *messages: dict | str, bearer: str = "") -> list[dict]:
        """Send all messages over one new socket without waiting; return the replies."""
        with self.socket(bearer=bearer) as socket:
            for message in messages:
                socket.send(message if isinstance(message, str) else json.dumps(message))
            return [json.loads(socket.recv(30)) for _ in messages]

    def ask(self, policy: str = FIRST_FIT, **more) -> dict:
        return self.say(ask_message(policy, **more))[0]

    def release(self, lease: dict) -> dict:
        """Release a lease, and return the reply."""
        return self.say({"op": "release", "lease": lease["id"], "token": lease["token"]})[0]

    def status(self, lease: dict) -> dict:
        return self.say({"op": "status", "lease": lease["id"]})[0]["lease"]

    def in_state(self, lease: dict, state: str) -> dict:
        """Wait until a lease is in a state; return it."""
        until(lambda: self.status(lease)["state"] == state)
        return self.status(lease)

    def held(self, **filters: str) -> list[dict]:
        """Return the leases that have not ended, or those of a state or a cluster."""
        return self.say({"op": "leases", **filters})[0]["data"]["leases"]

    def waiting(self) -> list[dict]:
        return self.say({"op": "queue"})[0]["data"]["waiting"]

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))

    def moorage(
        self, *words: str | Path, folder: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of `moorage` in the test process, which is quick, to test its output."""
        urls = {"MOORAGE_URL": self.running.ws, "MOORAGE_HTTP_URL": self.running.http}
        given = urls | {"MOORAGE_TOKEN": self.token, "COLUMNS": "200", "NO_COLOR": "1"} | variables
        return run_moorage(words, folder, **given)

    def close(self) -> None:
        self.http.close()


@contextlib.contextmanager
def serving(
    data: Path | None = None,
    *,
    bearer: str = "",
    options: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[Server]:
    """Run a daemon until the block ends; yield a `Server` whose requests have a token."""
    with daemon(data, options=options, environment=environment) as running:
        server = Server(running, bearer)
        server.data = data
        try:
            yield server
        finally:
            server.close()


@contextlib.contextmanager
def serve_and_kill(data: Path, **more: Any) -> Iterator[Server]:
    """Run a daemon that the test may kill."""
    with contextlib.suppress(CommandError), serving(data, **more) as server:
        yield server


def kill(server: Server) -> None:
    """Kill a daemon, and wait until it is gone."""
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: is_over(server.pid))


def is_over(pid: int) -> bool:
    """Return whether a process has ended; a dead process may still wait to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def workload_processes(data: Path) -> dict[str, set[int]]:
    """Return the processes of workloads of a daemon's folder, by the name of the workload."""
    found: dict[str, set[int]] = {}
    prefix = f"MOORAGE_WORKLOAD={data}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                for variable in (folder / "environ").read_bytes().split(b"\0"):
                    if variable.startswith(prefix):
                        name = variable.decode().rpartition("/")[2]
                        found.setdefault(name, set()).add(int(folder.name))
    return found


def ask_message(policy: str = FIRST_FIT, **more) -> dict:
    return {"adhoc": True, "policy_rule_uri": policy, "inputs": {}, **more}

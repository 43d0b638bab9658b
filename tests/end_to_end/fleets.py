"""A server and agents as processes, over loopback sockets.

All agents are on one machine, so they have names instead of the machine id.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from served import Server, invoke, ran, serve_and_kill

from moorage.testing.daemon_process import child, daemon, serve_variables
from moorage_policies import catalog

MOORED = [sys.executable, "-P", "-m", "moorage"]
COUNTING = "seq 20; until [ -e {go} ]; do sleep 0.05; done; seq 21 40; echo whole; exit 3"
"""A command that writes the first half of its output, and the second half once a file exists."""
COUNTED = ("".join(f"{number}\n" for number in range(1, 41)) + "whole\n", 3)
"""The output and the exit code of the command `COUNTING`."""


class Fleet:
    """A server over a folder, and agents that join one of its clusters."""

    def __init__(
        self, folder: Path, server: Server, stack: ExitStack, data: Path, cluster: str = "lab"
    ) -> None:
        self.folder = folder
        self.server = server
        self.stack = stack
        self.data = data
        self.cluster = cluster

    @contextmanager
    def apart(self, folder: Path, cluster: str = "") -> "Iterator[Fleet]":
        """Yield another cluster of the server; the cluster's agents end with the block."""
        with ExitStack() as stack:
            yield Fleet(folder, self.server, stack, self.data, cluster or folder.name)

    def token(self) -> str:
        made = invoke("agent", "token", "--cluster", self.cluster, "--data", self.data)
        assert made.returncode == 0, made.stderr
        return made.stdout.strip()

    def command(self, name: str, *more: str, data: str = "") -> list[str]:
        place = ["--server", self.server.running.ws, "--data", str(self.folder / (data or name))]
        return [*MOORED, "agent", *place, "--name", name, "--no-machine-id", *more]

    def agent(self, name: str, token: str | None = None, *more: str) -> subprocess.Popen[str]:
        shown = ["--token", token] if token else []
        log = self.folder / f"{name}.log"
        running = child(self.command(name, *shown, *more), log, serve_variables())
        process, ready = self.stack.enter_context(running)
        assert ready == {"event": "connected", "cluster_id": self.cluster, "node_id": name}
        return process

    def refused(self, command: list[str]) -> str:
        """Run an agent that the server refuses; return its output."""
        done = ran(*command)
        assert done.returncode == 3, done.stderr
        return done.stderr

    def listed(self) -> dict[str, dict]:
        rows = json.loads(invoke("agent", "list", "--json", "--data", self.data).stdout)
        return {row["node_id"]: row for row in rows if row["cluster_id"] == self.cluster}

    def node(self, name: str) -> dict:
        document = self.server.http.get(f"/clusters/{self.cluster}").json()
        return next(each for each in document["nodes"]["nodeData"] if each["id"] == name)

    def now(self) -> dict:
        return self.server.http.get("/history").json()["data"]["now"]

    def ask(self, command: str, nodes: int = 1, **provision) -> dict:
        spec = {"category": "process", "command": ["sh", "-c", command]}
        answer = self.server.ask(
            clusters=[self.cluster],
            resources={"cpu_milli": 100, "nodes": nodes},
            lease={"ttl_seconds": 600},
            provision={"backend": "local", "spec": spec, **provision},
        )
        assert answer["success"], answer
        return answer["lease"]

    def output(self, lease: dict) -> tuple[str, int]:
        """Wait until a workload ends; return all its output and its exit code."""
        text, reply = "", {"over": False, "offset": 0}
        while not reply["over"]:
            message = {"op": "logs", "lease": lease["id"], "token": lease["token"]}
            (answer,) = self.server.say(message | {"offset": reply["offset"], "wait_seconds": 5})
            if answer["success"]:
                reply = answer["data"]
                text += reply["text"]
            else:  # The machine is not connected.
                assert "is not heard of since" in answer["message"]
        return text, reply["exit_code"]

    def state(self, lease: dict) -> str:
        return self.server.status(lease)["state"]


@contextmanager
def serve_doomed_fleet(folder: Path, agents: ExitStack, **environment: str) -> Iterator[Fleet]:
    """Run a server that the test kills; the agents of its fleet end when the given stack closes."""
    data = folder / "data"
    with serve_and_kill(data, environment=environment) as server:
        server.publish(catalog.document("first_fit"))
        yield Fleet(folder, server, agents, data)


@contextmanager
def serve_fleet(
    folder: Path, *options: str, bearer: str = "", **environment: str
) -> Iterator[Fleet]:
    data = folder / "data"
    with ExitStack() as stack:
        running = daemon(data, options=options, environment=environment)
        server = Server(stack.enter_context(running), bearer)
        stack.callback(server.close)
        server.publish(catalog.document("first_fit"))
        yield Fleet(folder, server, stack, data)

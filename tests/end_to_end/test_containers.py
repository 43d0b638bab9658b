"""Containers that a lease starts: found after a crash of the daemon, started once, never leaked."""

import contextlib
import os
import platform
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from served import Server, cluster, until

from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import daemon
from moorage_policies import catalog


@contextlib.contextmanager
def killed(data: Path):
    """A daemon that the test kills, which is no error."""
    with contextlib.suppress(CommandError), daemon(data) as running:
        yield running
        os.kill(running.pid, signal.SIGKILL)


def fill(server: Server) -> None:
    document = cluster("here", nodes=1, gpus=8)
    document["nodes"]["nodeData"][0]["id"] = platform.node()
    server.register(document)
    server.publish(catalog.document("first_fit"))


def run(server: Server, image: str, script: str, **more: Any) -> dict[str, Any]:
    spec = {"image": image, "command": ["sh", "-c", script], "stop_seconds": 0, **more}
    reply = server.ask(
        resources={"cpu_milli": 100, "memory_mib": 32},
        lease={"ttl_seconds": 3_600},
        provision={"backend": "local", "spec": {"category": "container", **spec}},
    )
    assert reply["success"], reply
    return reply["lease"]


def status(server: Server, lease: dict[str, Any]) -> dict[str, Any]:
    return server.say({"op": "status", "lease": lease["id"]})[0]["lease"]


def in_state(server: Server, lease: dict[str, Any], state: str) -> dict[str, Any]:
    until(lambda: status(server, lease)["state"] == state)
    return status(server, lease)


def release(server: Server, lease: dict[str, Any]) -> None:
    server.say({"op": "release", "lease": lease["id"], "token": lease["token"]})


def leases(server: Server) -> dict[str, str]:
    page = server.say({"op": "leases", "limit": 1000})[0]["data"]["leases"]
    return {each["id"]: each["state"] for each in page}


def here(api: Any) -> Counter[str]:
    """Count the containers there are of every workload, running or not."""
    return Counter(each["Labels"]["moorage.workload"] for each in api.containers(all=True))


@pytest.mark.heavy
def test_a_container_is_found_again_after_kill_9_and_one_that_ended_meanwhile_is_told(
    tmp_path, container_engine, container_image
):
    with killed(tmp_path) as running:
        server = Server(running)
        fill(server)
        lives = run(server, container_image, "exec sleep 1000")
        ends = run(server, container_image, "sleep 1; exit 3")
        in_state(server, lives, "active")
        in_state(server, ends, "active")
        server.close()
    before = here(container_engine)
    assert before == {lives["id"]: 1, ends["id"]: 1}
    until(lambda: len(container_engine.containers()) == 1)
    with daemon(tmp_path) as running:
        server = Server(running)
        assert "exit status 3" in in_state(server, ends, "ended")["reason"]
        assert status(server, lives)["state"] == "active"
        until(lambda: here(container_engine) == {lives["id"]: 1})
        release(server, lives)
        in_state(server, lives, "ended")
        assert here(container_engine) == {}
        server.close()

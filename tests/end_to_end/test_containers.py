"""Containers that a lease starts: found after a crash of the daemon, started once, never leaked."""

from collections import Counter
from typing import Any

import pytest
from served import Server, here, kill, killed, serving, until


def run(server: Server, image: str, script: str, **more: Any) -> dict[str, Any]:
    spec = {"image": image, "command": ["sh", "-c", script], "stop_seconds": 0, **more}
    reply = server.ask(
        resources={"cpu_milli": 100, "memory_mib": 32},
        lease={"ttl_seconds": 3_600},
        provision={"backend": "local", "spec": {"category": "container", **spec}},
    )
    assert reply["success"], reply
    return reply["lease"]


def workloads(api: Any) -> Counter[str]:
    """Count the containers there are of every workload, running or not."""
    return Counter(each["Labels"]["moorage.workload"] for each in api.containers(all=True))


@pytest.mark.heavy
def test_after_kill_9_containers_are_found_again_and_so_is_their_end(
    tmp_path, container_engine, container_image
):
    with killed(tmp_path) as server:
        server.fill(here())
        lives = run(server, container_image, "exec sleep 1000")
        ends = run(server, container_image, "sleep 1; exit 3")
        server.in_state(lives, "active")
        server.in_state(ends, "active")
        kill(server)
    before = workloads(container_engine)
    assert before == {lives["id"]: 1, ends["id"]: 1}
    until(lambda: len(container_engine.containers()) == 1)
    with serving(tmp_path) as server:
        assert "exit status 3" in server.in_state(ends, "ended")["reason"]
        assert server.status(lives)["state"] == "active"
        until(lambda: workloads(container_engine) == {lives["id"]: 1})
        server.release(lives)
        server.in_state(lives, "ended")
        assert workloads(container_engine) == {}

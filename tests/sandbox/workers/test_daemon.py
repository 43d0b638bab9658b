"""A daemon with policies on a real Ray duplicates no grant, and leaves nothing behind."""

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from served import Server, cluster, policy, until

from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import daemon

pytestmark = [pytest.mark.heavy, pytest.mark.ray]
SENT = "self._agent.tell(relay.CellSaid(self._number, data, given_bytes))"
FITS = """
import time
time.sleep(input_data["inputs"].get("seconds", 0))
n = input_data["inputs"]["n"]
return {"cluster_id": "east", "node_id": f"east-{n // 8}", "gpus": [str(n % 8)]}
"""


def figure(server: Server, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def count(server: Server, what: str) -> float:
    return figure(server, f'moorage_sandbox{{what="{what}"}}')


@contextmanager
def serve_workers(world: Any, folder: Path, workers: int) -> Iterator[Server]:
    """Run a daemon on this Ray until the block ends, and wait for its workers."""
    environment = {
        "MOORAGE_POLICY_WORKERS": world.address,
        "MOORAGE_POLICY_WORKER_CELLS": "4",
        "MOORAGE_POLICY_DEADLINE_SECONDS": "10",
    }
    with daemon(folder, environment=environment) as running, closing(Server(running)) as server:
        server.register(cluster("east", nodes=10, gpus=8))
        server.publish(policy(FITS, "fits:1-test"))
        until(lambda: figure(server, "moorage_policy_workers") == workers, 90)
        yield server


def lease(server: Server, **inputs: Any) -> dict[str, Any]:
    message = {"inputs": inputs, "resources": {"gpus": 1}, "lease": {"ttl_seconds": 600}}
    return server.ask("fits:1-test", **message)


def bridges(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            title = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == str(pid) and b"sandbox.workers.bridge" in title:
            found.append(int(folder.name))
    return found


def held_devices(replies: list[dict[str, Any]]) -> list[tuple[str, str]]:
    shares = [share for each in replies for share in each["lease"]["placement"]]
    return [(share["node_id"], gpu) for share in shares for gpu in share["gpus"]]


def test_leases_survive_the_death_of_a_raylet_and_of_the_bridge(world, tmp_path) -> None:
    world.have(2)
    with serve_workers(world, tmp_path, 2) as server, ThreadPoolExecutor(40) as threads:
        asks = [threads.submit(lease, server, n=n, seconds=0.2) for n in range(40)]
        until(lambda: count(server, "evaluations") > 2)
        world.kill(0)
        replies = [ask.result() for ask in asks]
        assert all(each["success"] for each in replies), replies
        assert len(set(held_devices(replies))) == 40
        (bridge,) = bridges(server.running.pid)
        os.kill(bridge, signal.SIGKILL)
        more = [lease(server, n=n) for n in range(40, 45)]
        assert all(each["success"] for each in more), more
        assert len(set(held_devices(replies + more))) == 45
        until(lambda: figure(server, "moorage_policy_workers") == 1, 90)


def test_a_placement_invented_by_a_worker_is_not_granted(world, tmp_path) -> None:
    made_up = f"data = data.replace(b'\"east-', b'\"west-')\n        {SENT}"
    world.have(0, world.changed("sandbox/workers/agent.py", SENT, made_up))
    with serve_workers(world, tmp_path, 1) as server:
        replies = [lease(server, n=n) for n in range(4)]
        assert all(each["success"] for each in replies), replies
        assert all(node.startswith("east-") for node, _ in held_devices(replies))
        doubts, evaluations = count(server, "worker_doubts"), count(server, "evaluations")
        assert doubts >= 1
        assert evaluations == 4 + doubts  # One retry each.


def test_a_killed_daemon_leaves_nothing_on_ray(world, tmp_path) -> None:
    world.have(1)
    with (  # noqa: PT012  # The end of the block checks how the daemon ended.
        pytest.raises(CommandError, match="ended with exit code -9"),
        serve_workers(world, tmp_path, 1) as server,
    ):
        assert lease(server, n=0)["success"]
        (bridge,) = bridges(server.running.pid)
        assert len(world.agents(0)) == 1
        os.kill(server.running.pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{bridge}").exists())
        until(lambda: not world.agents(0))

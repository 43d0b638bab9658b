"""Workloads on a real Ray run on their devices, once, and leave nothing behind."""

import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import ray
from ray.autoscaler._private.constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.autoscaler.sdk import request_resources
from ray.experimental import internal_kv
from ray_world import RayWorld, ray_world
from served import Server, until
from websockets.exceptions import WebSocketException

from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import daemon
from moorage_policies import catalog

__all__ = ["ray_world"]

pytestmark = [pytest.mark.heavy, pytest.mark.ray]

MOORAGE = str(Path(sys.executable).parent / "moorage")
KILLS = int(os.environ.get("RAY_TEST_KILLS", "4"))
ASKS = 3


def environment(world: RayWorld) -> dict[str, str]:
    return {
        "MOORAGE_BACKENDS": "ray,memory",
        "MOORAGE_RAY_ADDRESS": world.address,
        "MOORAGE_POLICY_DEADLINE_SECONDS": "10",  # Raylets keep the processors busy.
    }


def gpus(server: Server) -> int:
    reply = server.http.get("/clusters/ray")
    return reply.json()["gpus"]["count"] if reply.status_code == 200 else 0


def open_server(running, world: RayWorld) -> Server:
    """Return a server with the whole Ray cluster in its inventory."""
    server = Server(running)
    until(lambda: gpus(server) == 8, 120)
    return server


def leases(server: Server) -> list[dict]:
    return server.say({"op": "leases"})[0]["data"]["leases"]


def ask(server: Server, spec: dict, count: int = 1, **more) -> dict:
    provision = {"backend": "ray", "spec": spec}
    terms = {"ttl_seconds": 3_600}
    return server.ask(resources={"gpus": count}, lease=terms, provision=provision, **more)


def clear(world: RayWorld) -> None:
    """End what daemons started, and restore the initial nodes."""
    world.mend()
    for name in world.actors():
        with contextlib.suppress(ValueError):  # The actor has ended meanwhile.
            ray.kill(ray.get_actor(name, namespace="moorage"))
    until(lambda: not world.workloads(), 60)


@pytest.fixture(scope="module")
def ray_server(ray_world, tmp_path_factory) -> Iterator[Server]:
    """The daemon of all tests that neither kill it nor need other settings."""
    folder = tmp_path_factory.mktemp("data")
    with daemon(folder, environment=environment(ray_world)) as running:
        server = open_server(running, ray_world)
        server.publish(catalog.document("first_fit"))
        yield server
        server.close()


def test_run_prints_the_output_of_a_command_on_ray(ray_world, ray_server, tmp_path):
    variables = {
        "PATH": os.environ["PATH"],
        "MOORAGE_URL": ray_server.running.ws,
        "MOORAGE_HTTP_URL": ray_server.running.http,
        "MOORAGE_STATE": str(tmp_path / "leases.json"),
        "MOORAGE_POLICY": "first_fit:1.0-stable",
    }
    script = "echo gpus $CUDA_VISIBLE_DEVICES; echo done >&2; exit 3"
    words = [MOORAGE, "run", "--backend", "ray", "--gpus", "2", "--", "sh", "-c", script]
    done = subprocess.run(
        words, check=False, env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3, done.stderr
    assert re.fullmatch(r"gpus \d,\d\ndone\n", done.stdout)
    until(lambda: not leases(ray_server))
    until(lambda: not ray_world.workloads())
    reply = ask(ray_server, {"command": ["sleep", "1000"], "cpu_count": 2})
    assert reply["error"]["code"] == "unsupported"
    assert reply["error"]["field"] == "provision.spec"


def test_a_deleted_document_of_a_ray_cluster_is_registered_again(ray_server):
    assert ray_server.http.delete("/clusters/ray").status_code == 200
    until(lambda: gpus(ray_server) == 8, 120)


def autoscaler_requests() -> list[dict]:
    """Return the resource requests that Ray's autoscaler reads."""
    text = internal_kv._internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL)
    return json.loads(text or "[]")


def test_the_ray_autoscaler_gets_waiting_and_held_resources(ray_world, tmp_path):
    """The test plays the autoscaler: it adds the node that the request needs."""
    clear(ray_world)  # An earlier attempt of this test may have failed.
    request_resources(bundles=[{"GPU": 64}])  # As left by an earlier daemon.
    variables = {**environment(ray_world), "MOORAGE_RAY_AUTOSCALE": "true"}
    spec = {"command": ["sleep", "1000"]}
    with daemon(tmp_path, environment=variables) as running:
        server = open_server(running, ray_world)
        server.publish(catalog.document("first_fit"))
        until(lambda: autoscaler_requests() == [])
        replies = [ask(server, spec, count) for count in (4, 3)]
        assert all(each["success"] for each in replies), replies
        held = [each["lease"] for each in replies]
        until(lambda: all(each["state"] == "active" for each in leases(server)))
        with ThreadPoolExecutor(1) as threads:
            waits = {"ttl_seconds": 3_600, "wait_seconds": 100}
            waiting = threads.submit(
                server.ask,
                resources={"gpus": 2},
                lease=waits,
                provision={"backend": "ray", "spec": spec},
            )
            until(lambda: [each.get("GPU") for each in autoscaler_requests()] == [4, 4, 2])
            ray_world.add(2)
            reply = waiting.result(100)
        assert reply["lease"]["placement"][0]["node_id"] == ray_world.node(2)
        until(lambda: autoscaler_requests() == [])
        for lease in (*held, reply["lease"]):
            server.say({"op": "release", "lease": lease["id"], "token": lease["token"]})
        until(lambda: not ray_world.workloads())
        server.close()
    ray_world.kill(2)


class Workers:
    """The start records of workloads: one file each."""

    SCRIPT = (
        'echo "$CUDA_VISIBLE_DEVICES" > "$0/$MOORAGE_LEASE_ID.$MOORAGE_FENCING.$$"; exec sleep 1000'
    )

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def spec(self) -> dict:
        return {"command": ["sh", "-c", self.SCRIPT, str(self.folder)], "stop_seconds": 0.1}

    def doubled(self) -> list[str]:
        """Return grants whose workload was started more than once."""
        starts = collections.Counter(each.name.rpartition(".")[0] for each in self.folder.iterdir())
        return [name for name, number in starts.items() if number > 1]

    def overlaps(self) -> list[str]:
        """Return the GPUs that two workloads use at the same time."""
        held: dict[tuple[str, str], str] = {}
        found = []
        for each in self.folder.iterdir():
            lease, fencing, pid = each.name.rsplit(".", 2)
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                known = dict(line.split("=", 1) for line in variables if "=" in line)
                # An ending process has no environment, and its number may be used again.
                if (known.get("MOORAGE_LEASE_ID"), known.get("MOORAGE_FENCING")) != (
                    lease,
                    fencing,
                ):
                    continue
                for gpu in known["CUDA_VISIBLE_DEVICES"].split(","):
                    place = known["MOORAGE_NODE_ID"], gpu
                    if held.setdefault(place, each.name) != each.name:
                        found.append(f"{place}: {each.name} and {held[place]}")
        return found


def test_after_kill_9_of_the_daemon_no_workload_on_ray_is_duplicated_or_orphaned(
    ray_world, tmp_path
):
    clear(ray_world)
    chance = random.Random(7)
    folder = tmp_path / "started"
    folder.mkdir()
    workers = Workers(folder)
    tokens: dict[str, str] = {}
    variables = environment(ray_world)
    wrong: list[str] = []
    for kill in range(KILLS):
        with (
            contextlib.suppress(CommandError, OSError, WebSocketException, httpx.HTTPError),
            daemon(tmp_path / "data", environment=variables) as running,
        ):
            killing = threading.Timer(
                chance.uniform(1.0, 6.0), os.kill, (running.pid, signal.SIGKILL)
            )
            killing.start()
            server = Server(running)
            try:
                if not kill:
                    until(lambda server=server: gpus(server) > 0)
                server.publish(catalog.document("first_fit"))
                for _ in range(ASKS):
                    kind = {"category": chance.choice(["process", "job"])}
                    reply = ask(server, workers.spec() | kind, chance.choice([1, 1, 2]))
                    if reply["success"]:
                        tokens[reply["lease"]["id"]] = reply["lease"]["token"]
                held = [each["id"] for each in leases(server)]
                for name in chance.sample(held, min(len(held), 2)):
                    if name in tokens:
                        server.say({"op": "release", "lease": name, "token": tokens[name]})
            finally:
                killing.join()
                server.close()
        wrong += workers.doubled() + workers.overlaps()
    with daemon(tmp_path / "data", environment=variables) as running:
        server = open_server(running, ray_world)
        until(lambda: all(each["state"] == "active" for each in leases(server)), 120)
        held = {each["id"] for each in leases(server)}

        def running_now() -> set[str]:
            return {name.partition("/")[2] for name in ray_world.workloads()}

        with contextlib.suppress(AssertionError):  # The next line then shows the difference.
            until(lambda: running_now() == held, 60)
        assert running_now() == held
        started = len(list(folder.iterdir()))
        wrong += workers.doubled() + workers.overlaps()
        assert len(ray_world.actors()) == len(held), "one actor for each lease"
        for name in held:
            server.say({"op": "release", "lease": name, "token": tokens.get(name, "")})
        unknown = held - tokens.keys()  # Granted, but the daemon was killed before it replied.
        until(lambda: {each["id"] for each in leases(server)} <= unknown, 120)
        until(lambda: {name.partition("/")[2] for name in ray_world.workloads()} <= unknown, 60)
        server.close()
    print(f"{KILLS} kills, {started} workloads started, wrong: {wrong}")
    assert wrong == []
    clear(ray_world)


def test_a_gang_that_lost_a_node_is_requeued_and_then_ends(ray_world, ray_server):
    clear(ray_world)  # An earlier attempt of this test may have failed.
    until(lambda: gpus(ray_server) == 8, 120)
    spec = {"command": ["sleep", "1000"]}
    provision = {"backend": "ray", "spec": spec, "on_failure": "requeue", "attempts_max": 2}
    terms = {"ttl_seconds": 3_600}
    reply = ray_server.ask(resources={"gpus": 1, "nodes": 2}, lease=terms, provision=provision)
    lease = reply["lease"]["id"]

    def status() -> dict:
        return ray_server.say({"op": "status", "lease": lease})[0]["lease"]

    def is_active_on(*numbers: int) -> bool:
        now = status()
        nodes = {each["node_id"] for each in now["placement"]}
        return now["state"] == "active" and nodes == {ray_world.node(n) for n in numbers}

    until(lambda: is_active_on(0, 1))
    ray_world.kill(1)
    ray_world.add(2)
    until(lambda: is_active_on(0, 2), 120)
    assert status()["workload"]["attempt"] == 2
    lost = ray_world.node(2)
    ray_world.kill(2)
    until(lambda: status()["state"] == "ended")
    assert lost in json.dumps(status()), "the reason names the node"
    until(lambda: not ray_world.workloads())
    clear(ray_world)

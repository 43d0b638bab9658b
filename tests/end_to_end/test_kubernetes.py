"""What leases start in Kubernetes, through a real daemon: exactly there, once, and to its end."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_objects import dra_node, node
from kubernetes_plane import Plane, fresh_plane, plane
from served import Server, until

from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import Running, daemon
from moorage_policies import catalog

__all__ = ["fresh_plane", "plane"]

pytestmark = [pytest.mark.kubernetes, pytest.mark.heavy]

MOORAGE = str(Path(sys.executable).parent / "moorage")
IMAGE = "registry.example/none:1"
SEEN_SECONDS_MAX = 90
KILLS = 8


def variables(plane: Plane, folder: Path, clusters: Sequence[str]) -> dict[str, str]:
    """Return the settings of a daemon that knows the plane by several names, as clusters."""
    config = yaml.safe_load(plane.kubeconfig().read_text())
    (only,) = config["contexts"]
    config["contexts"] = [{**only, "name": name} for name in clusters]
    (folder / "kubeconfig").write_text(yaml.safe_dump(config))
    return {
        "MOORAGE_BACKENDS": "kubernetes",
        "MOORAGE_KUBERNETES_CLUSTERS": ",".join(clusters),
        "MOORAGE_KUBERNETES_CONFIG": str(folder / "kubeconfig"),
        "MOORAGE_REQUEUE_PAUSE_SECONDS": "0",
    }


@contextlib.contextmanager
def served(plane: Plane, folder: Path, *clusters: str) -> Iterator[Server]:
    clusters = clusters or ("west",)
    with daemon(folder / "data", environment=variables(plane, folder, clusters)) as running:
        server = Server(running)
        server.publish(catalog.document("first_fit"), catalog.document("best_fit"))
        for name in clusters:
            until(lambda name=name: known(server, name), SEEN_SECONDS_MAX)
        yield server
        server.close()


def known(server: Server, name: str) -> bool:
    return server.http.get(f"/clusters/{name}").is_success


def ask(server: Server, gpus: int, clusters: list[str], **provision: Any) -> dict[str, Any]:
    reply = server.ask(
        resources={"gpus": gpus},
        clusters=clusters,
        lease={"ttl_seconds": 3_600},
        provision={"backend": "kubernetes", **provision},
    )
    assert reply["success"], reply
    return reply["lease"]


def in_state(server: Server, lease: dict[str, Any], wanted: str) -> dict[str, Any]:
    def state() -> dict[str, Any]:
        return server.say({"op": "status", "lease": lease["id"]})[0]["lease"]

    until(lambda: state()["state"] == wanted, SEEN_SECONDS_MAX)
    return state()


def release(server: Server, lease: dict[str, Any]) -> None:
    server.say({"op": "release", "lease": lease["id"], "token": lease["token"]})
    in_state(server, lease, "ended")


def given(plane: Plane) -> list[str]:
    (claim,) = plane.all("ResourceClaim")
    return [each["device"] for each in claim["status"]["allocation"]["devices"]["results"]]


def test_a_lease_runs_where_it_says_and_is_found_again_after_kill_9(fresh_plane, tmp_path):
    plane = fresh_plane
    plane.create(*dra_node("n1"))
    with contextlib.suppress(CommandError), served(plane, tmp_path) as server:
        lease = ask(server, 2, ["west"], spec={"image": IMAGE})
        held = in_state(server, lease, "active")
        (share,) = held["placement"]
        assert given(plane) == [f"gpu-{each.rpartition('-')[2]}" for each in share["gpus"]]
        (before,) = plane.all("Pod")
        assert before["spec"]["nodeName"] == share["node_id"]
        os.kill(server.running.pid, signal.SIGKILL)
        server.close()
    with served(plane, tmp_path) as server:
        in_state(server, lease, "active")
        (after,) = plane.all("Pod")
        assert after["metadata"]["uid"] == before["metadata"]["uid"]
        release(server, lease)
        assert (plane.all("Pod"), plane.all("ResourceClaim")) == ([], [])


def test_a_gang_is_leased_and_started_whole(fresh_plane, tmp_path):
    plane = fresh_plane
    plane.create(*dra_node("n1"), *dra_node("n2"))
    with served(plane, tmp_path) as server:
        reply = server.ask(
            resources={"gpus": 4, "nodes": 2},
            clusters=["west"],
            lease={"ttl_seconds": 3_600},
            provision={"backend": "kubernetes", "spec": {"image": IMAGE}},
        )
        assert reply["success"], reply
        in_state(server, reply["lease"], "active")
        assert sorted(each["spec"]["nodeName"] for each in plane.all("Pod")) == ["n1", "n2"]
        release(server, reply["lease"])
        assert plane.all("Pod") == []


def test_what_fails_in_one_cluster_is_tried_in_the_other(fresh_plane, tmp_path):
    fresh_plane.create(node("n1", gpus=2))
    with served(fresh_plane, tmp_path, "west", "east") as server:
        spec = {"image": IMAGE, "environment": {"SIM_FATE": "imagepull"}}
        lease = ask(server, 1, ["west", "east"], spec=spec, on_failure="requeue", attempts_max=2)
        first = lease["placement"][0]["cluster_id"]
        ended = in_state(server, lease, "ended")
        assert "check the image's name" in ended["reason"]
        outcome = ended["workload"]["outcome"]
        assert outcome["attempt"] == 2
        assert {each["cluster_id"] for each in outcome["nodes"]} == {"west", "east"} - {first}
        assert fresh_plane.all("Pod") == []


def moorage(running: Running, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": os.environ["PATH"],
        "MOORAGE_URL": running.ws,
        "MOORAGE_HTTP_URL": running.http,
        "MOORAGE_STATE": str(folder / "leases.json"),
    }
    return subprocess.run(
        [MOORAGE, *words],
        check=False,  # Exit codes are what is tested.
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )


def test_the_command_line_runs_reads_and_executes(fresh_plane, tmp_path):
    fresh_plane.create(*dra_node("n1"))
    with served(fresh_plane, tmp_path) as server:
        running = server.running
        words = ["run", "--backend", "kubernetes", "--image", IMAGE, "--gpus", "1"]
        words += ["--cluster", "west", "--env", "SIM_RUN=1s", "--env", "SIM_EXIT=3", "--", "train"]
        done = moorage(running, tmp_path, *words)
        assert (done.returncode, done.stdout) == (3, "started\n"), done.stderr
        until(lambda: not fresh_plane.all("Pod"))
        spec = {"image": IMAGE, "environment": {"SIM_RUN": "8s"}}
        lease = ask(server, 1, ["west"], spec=spec)
        in_state(server, lease, "active")
        own = ("--lease-token", lease["token"])
        done = moorage(
            running, tmp_path, "exec", lease["id"], *own, "--", "sh", "-c", "echo hi; exit 4"
        )
        assert (done.returncode, done.stdout) == (4, "hi\n"), done.stderr
        done = moorage(running, tmp_path, "logs", "-f", lease["id"], *own)
        assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
        ended = in_state(server, lease, "ended")
        assert ended["workload"]["outcome"]["phase"] == "succeeded", json.dumps(ended)


def test_kills_of_the_daemon_lose_and_double_nothing(fresh_plane, tmp_path):
    """Killed with -9 while pods start and end: each lease has one pod, on its own devices."""
    plane, draws = fresh_plane, random.Random(14)
    for number in range(4):
        plane.create(*dra_node(f"n{number}"))
    held: list[dict[str, Any]] = []
    for _ in range(KILLS):
        with contextlib.suppress(CommandError), served(plane, tmp_path) as server:
            held.append(ask(server, 1, ["west"], spec={"image": IMAGE}))
            held.append(ask(server, 1, ["west"], spec={"image": IMAGE}))
            over = held.pop(0)
            server.say({"op": "release", "lease": over["id"], "token": over["token"]})
            time.sleep(draws.uniform(0, 1))  # The moment is what is tried.
            os.kill(server.running.pid, signal.SIGKILL)
            server.close()
    with served(plane, tmp_path) as server:
        for lease in held:
            in_state(server, lease, "active")
        until(lambda: len(plane.all("Pod")) == len(held), SEEN_SECONDS_MAX)
        until(lambda: len(plane.all("ResourceClaim")) == len(held), SEEN_SECONDS_MAX)
        claims = {
            each["metadata"]["annotations"]["moorage.dev/workload"]: each
            for each in plane.all("ResourceClaim")
        }
        for lease in held:
            results = claims[lease["id"]]["status"]["allocation"]["devices"]["results"]
            given = [f"GPU-{each['pool']}-{each['device'][4:]}" for each in results]
            assert given == lease["placement"][0]["gpus"]
        for lease in held:
            release(server, lease)
        assert (plane.all("Pod"), plane.all("ResourceClaim")) == ([], [])

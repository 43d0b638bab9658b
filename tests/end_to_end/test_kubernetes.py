"""Workloads in Kubernetes run on their node, once and to their end, through a real daemon."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_objects import dra_node, node
from kubernetes_plane import Plane, fresh_plane, plane
from served import Server, serving, until

from moorage.lab.errors import CommandError
from moorage_policies import catalog

__all__ = ["fresh_plane", "plane"]

pytestmark = [pytest.mark.kubernetes, pytest.mark.heavy]

IMAGE = "registry.example/none:1"
SEEN_SECONDS_MAX = 90
KILLS = 4


def variables(plane: Plane, folder: Path, clusters: Sequence[str]) -> dict[str, str]:
    """Return settings of a daemon for which one plane counts as several clusters."""
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
def serve_clusters(plane: Plane, folder: Path, *clusters: str) -> Iterator[Server]:
    clusters = clusters or ("west",)
    with serving(folder / "data", environment=variables(plane, folder, clusters)) as server:
        server.publish(catalog.document("first_fit"), catalog.document("best_fit"))
        for name in clusters:
            until(lambda name=name: is_known(server, name), SEEN_SECONDS_MAX)
        yield server


def is_known(server: Server, name: str) -> bool:
    return server.http.get(f"/clusters/{name}").is_success


def ask(
    server: Server, gpus: int, *clusters: str, nodes: int = 1, **provision: Any
) -> dict[str, Any]:
    """Request GPUs on some nodes of clusters, and start a pod on these GPUs."""
    reply = server.ask(
        resources={"gpus": gpus, "nodes": nodes},
        clusters=clusters or ["west"],
        lease={"ttl_seconds": 3_600},
        provision={"backend": "kubernetes", "spec": {"image": IMAGE}, **provision},
    )
    assert reply["success"], reply
    return reply["lease"]


def in_state(server: Server, lease: dict[str, Any], wanted: str) -> dict[str, Any]:
    until(lambda: server.status(lease)["state"] == wanted, SEEN_SECONDS_MAX)
    return server.status(lease)


def release(server: Server, lease: dict[str, Any]) -> None:
    server.release(lease)
    in_state(server, lease, "ended")


def test_a_gang_is_leased_and_started_whole(fresh_plane, tmp_path):
    plane = fresh_plane
    plane.create(*dra_node("n1"), *dra_node("n2"))
    with serve_clusters(plane, tmp_path) as server:
        lease = ask(server, 4, nodes=2)
        in_state(server, lease, "active")
        assert sorted(each["spec"]["nodeName"] for each in plane.all("Pod")) == ["n1", "n2"]
        release(server, lease)
        assert plane.all("Pod") == []


def test_a_workload_that_fails_in_one_kubernetes_cluster_moves_to_the_other(fresh_plane, tmp_path):
    fresh_plane.create(node("n1", gpus=2))
    with serve_clusters(fresh_plane, tmp_path, "west", "east") as server:
        spec = {"image": IMAGE, "environment": {"SIM_FATE": "imagepull"}}
        lease = ask(server, 1, "west", "east", spec=spec, on_failure="requeue", attempts_max=2)
        first = lease["placement"][0]["cluster_id"]
        ended = in_state(server, lease, "ended")
        assert "check the image's name" in ended["reason"]
        outcome = ended["workload"]["outcome"]
        assert outcome["attempt"] == 2
        assert {each["cluster_id"] for each in outcome["nodes"]} == {"west", "east"} - {first}
        assert fresh_plane.all("Pod") == []


def test_the_command_line_runs_a_pod_reads_its_output_and_executes_commands(fresh_plane, tmp_path):
    fresh_plane.create(*dra_node("n1"))
    with serve_clusters(fresh_plane, tmp_path) as server:
        state = {"MOORAGE_STATE": str(tmp_path / "leases.json")}
        words = ["run", "--backend", "kubernetes", "--image", IMAGE, "--gpus", "1"]
        words += ["--cluster", "west", "--env", "SIM_RUN=1s", "--env", "SIM_EXIT=3", "--", "train"]
        done = server.moorage(*words, **state)
        assert (done.returncode, done.stdout) == (3, "started\n"), done.stderr
        until(lambda: not fresh_plane.all("Pod"))
        lease = ask(server, 1)
        in_state(server, lease, "active")
        own = (lease["id"], "--lease-token", lease["token"])
        done = server.moorage("exec", *own, "--", "sh", "-c", "echo hi; exit 4", **state)
        assert (done.returncode, done.stdout) == (4, "hi\n"), done.stderr
        done = server.moorage("logs", *own, **state)
        assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
        release(server, lease)


def test_kills_of_the_daemon_lose_and_duplicate_no_lease(fresh_plane, tmp_path):
    """The daemon is killed while pods start and end; each lease has one pod, on its devices."""
    plane, draws = fresh_plane, random.Random(14)
    for number in range(4):
        plane.create(*dra_node(f"n{number}"))
    with contextlib.suppress(CommandError), serve_clusters(plane, tmp_path) as server:
        first = ask(server, 2)
        in_state(server, first, "active")
        (before,) = plane.all("Pod")
        os.kill(server.pid, signal.SIGKILL)
    held: list[dict[str, Any]] = []
    for _ in range(KILLS):
        with contextlib.suppress(CommandError), serve_clusters(plane, tmp_path) as server:
            held += [ask(server, 1), ask(server, 1)]
            server.release(held.pop(0))
            time.sleep(draws.uniform(0, 1))  # A random moment for each kill.
            os.kill(server.pid, signal.SIGKILL)
    held.append(first)
    with serve_clusters(plane, tmp_path) as server:
        for lease in held:
            in_state(server, lease, "active")
        until(lambda: len(plane.all("Pod")) == len(held), SEEN_SECONDS_MAX)
        until(lambda: len(plane.all("ResourceClaim")) == len(held), SEEN_SECONDS_MAX)
        pods = {each["metadata"]["uid"]: each["spec"]["nodeName"] for each in plane.all("Pod")}
        assert pods[before["metadata"]["uid"]] == first["placement"][0]["node_id"]
        claims = {
            each["metadata"]["annotations"]["moorage.dev/workload"]: each
            for each in plane.all("ResourceClaim")
        }
        for lease in held:
            results = claims[lease["id"]]["status"]["allocation"]["devices"]["results"]
            given = [f"GPU-{each['pool']}-{each['device'][4:]}" for each in results]
            assert given == lease["placement"][0]["gpus"]
            server.release(lease)
        for lease in held:
            in_state(server, lease, "ended")
        assert (plane.all("Pod"), plane.all("ResourceClaim")) == ([], [])

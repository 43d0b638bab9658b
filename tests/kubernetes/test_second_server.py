"""A standby server that takes over knows the pods that the former leader started."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from kubernetes_objects import node
from kubernetes_plane import Plane

from benchmarks.faults.database import PostgresServer
from moorage.testing.daemon_process import child, serve_command, serve_variables
from moorage_client import BlockingClient
from moorage_client.services import Services
from moorage_policies import catalog

pytestmark = [pytest.mark.kubernetes, pytest.mark.heavy, pytest.mark.postgres]

POD = {
    "backend": "kubernetes",
    "spec": {"category": "pod", "image": "registry.example/none:1"},
}


@contextmanager
def serving(
    folder: Path, plane: Plane, storage: str
) -> Iterator[tuple["subprocess.Popen[str]", Any]]:
    """Run a server with a separate data folder; the server may end with any exit code."""
    variables = {
        **serve_variables(),
        "MOORAGE_STORAGE": storage,
        "MOORAGE_BACKENDS": "kubernetes",
        "MOORAGE_KUBERNETES_CLUSTERS": "here=test",
        "MOORAGE_KUBERNETES_CONFIG": str(plane.kubeconfig()),
    }
    with child(serve_command(folder), folder.with_suffix(".log"), variables) as started:
        yield started


def is_ready(http: str) -> bool:
    try:
        return httpx.get(f"{http}/readyz", trust_env=False).is_success
    except httpx.HTTPError:
        return False


def starts(plane: Plane) -> list[str]:
    return [each["metadata"]["uid"] for each in plane.all("Pod")]


def test_a_takeover_starts_no_pod_again_and_ends_the_pods_of_released_leases(
    fresh_plane: Plane, postgres: PostgresServer, tmp_path: Path
) -> None:
    fresh_plane.create(node("n1"))
    storage = postgres.database()
    with (
        serving(tmp_path / "a", fresh_plane, storage) as (first, led),
        serving(tmp_path / "b", fresh_plane, storage) as (_, standby),
    ):
        with Services(led["http"]) as services, BlockingClient(led["ws"]) as client:
            services.publish_policy(catalog.document("first_fit"))
            fresh_plane.until(client.fleet, "the cluster is there")
            lease = client.ask(
                "first_fit:1.0-stable",
                resources={"cpu_milli": 100},
                lease={"ttl_seconds": 600},
                provision=POD,
            ).lease
            fresh_plane.until(lambda: client.status(lease.id)["state"] == "active", "the pod runs")
        before = starts(fresh_plane)
        first.send_signal(signal.SIGKILL)
        fresh_plane.until(lambda: is_ready(standby["http"]), "the standby leads")
        with BlockingClient(standby["ws"]) as client:
            fresh_plane.until(
                lambda: client.call({"op": "logs", "lease": lease.id})["text"] == "started\n",
                "its output is read",
            )
            assert client.status(lease.id)["state"] == "active"
            assert starts(fresh_plane) == before
            client.release(lease.id, lease.token)
        fresh_plane.until(lambda: not starts(fresh_plane), "its pod has ended")

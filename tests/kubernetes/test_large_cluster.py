"""A daemon knows all 1,000 nodes and 10,000 pods of a cluster, which come in many pages."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from kubernetes_objects import node, pod
from kubernetes_plane import Plane, own_plane

from moorage.testing.daemon_process import daemon
from moorage_client import BlockingClient

pytestmark = [pytest.mark.kubernetes, pytest.mark.heavy]

plane = own_plane

NODES, PODS_PER_NODE = 1_000, 10
BATCH = 100
"""Objects in one transaction of etcd, whose limit is 128."""
CREATED = "2026-01-01T00:00:00Z"


def machines() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield etcd keys and nodes; no kubelet reports on these nodes."""
    for number in range(NODES):
        made = node(f"node-{number:04}", gpus=8)
        made["metadata"] |= {"uid": f"node-{number}", "creationTimestamp": CREATED}
        del made["metadata"]["labels"]["kubelet"]
        yield f"/registry/minions/{made['metadata']['name']}", made


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield etcd keys and running pods, as large as real ones; every fifth has a GPU."""
    note = {"example.com/configuration": "x" * 1500}
    for number in range(NODES * PODS_PER_NODE):
        place = f"node-{number // PODS_PER_NODE:04}"
        made = pod(f"pod-{number:05}", gpus=0 if number % 5 else 1, cpu="500m")
        made["metadata"] |= {
            "uid": f"pod-{number}",
            "creationTimestamp": CREATED,
            "annotations": note,
        }
        made["spec"]["nodeName"] = place
        made["status"] = {"phase": "Running"}
        yield f"/registry/pods/default/{made['metadata']['name']}", made


def encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def write(plane: Plane, objects: Iterator[tuple[str, dict[str, Any]]]) -> None:
    """Write objects directly into etcd, since the API server would take ten minutes."""
    with httpx.Client(base_url=plane.etcd_url, timeout=60) as client:
        batch: list[dict[str, Any]] = []

        def send() -> None:
            client.post("/v3/kv/txn", json={"success": batch}).raise_for_status()
            batch.clear()

        for key, document in objects:
            put = {"key": encode(key), "value": encode(json.dumps(document))}
            batch.append({"requestPut": put})
            if len(batch) == BATCH:
                send()
        if batch:
            send()


@pytest.fixture(scope="module")
def large(plane: Plane) -> Plane:
    """Return a plane with only an API server, and with all these nodes and pods."""
    for name in ("kwok", "kube-scheduler", "kube-controller-manager"):
        plane.kill(name)  # These would mark all nodes as lost, since there are no kubelets.
    write(plane, machines())
    write(plane, pods())
    last = f"pod-{NODES * PODS_PER_NODE - 1:05}"
    plane.until(lambda: plane.get("Pod", last), "the API server has seen all of them")
    return plane


def test_a_daemon_follows_all_nodes_and_pods_of_a_large_cluster(large: Plane) -> None:
    environment = {
        "MOORAGE_KUBERNETES_CLUSTERS": "large=test",
        "MOORAGE_KUBERNETES_CONFIG": str(large.kubeconfig()),
    }
    with daemon(environment=environment) as running, BlockingClient(running.ws) as client:

        def find_cluster() -> dict[str, Any] | None:
            rows = client.fleet()
            return rows[0] if rows and rows[0]["nodes"] == NODES else None

        row = large.until(find_cluster, "the fleet has all nodes", 300)
        assert row["gpus"] == NODES * (8 - PODS_PER_NODE // 5)

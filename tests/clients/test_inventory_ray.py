"""Tests of nodes that Ray's dashboard, Ray's command line and a real Ray list."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from moorage_client.inventory import InventoryError, collect
from tests.ports import free_port
from tests.sites import Answer, Site

ALIVE = {
    "node_id": "cb7337e0bb2b1158ab90f431346393eddb050cfaf34fc9a658459593", "node_ip": "192.0.2.2",
    "node_name": "192.0.2.2", "is_head_node": True, "state": "ALIVE", "state_message": None,
    "resources_total": {
        "CPU": 2.0, "GPU": 2.0, "accelerator_type:A100": 1.0, "memory": 24073395968.0,
        "object_store_memory": 100000000.0, "node:192.0.2.2": 1.0, "node:__internal_head__": 1.0,
    },
    "labels": {"rack": "r1", "ray.io/node-id": "cb7337"}, "start_time_ms": 1795187237660,
    "end_time_ms": 0,
}  # fmt: skip
DEAD = {**ALIVE, "node_id": "aa", "state": "DEAD", "resources_total": {}}
PRINTED = {**ALIVE, "resources_total": {**ALIVE["resources_total"], "memory": "22.420 GiB"}}
FROM_PYTHON = {
    "NodeID": "bb", "Alive": True, "NodeManagerAddress": "192.0.2.3", "NodeName": "worker",
    "Resources": {"CPU": 4.0, "memory": 1073741824.0}, "Labels": {},
}  # fmt: skip
GPU = {"index": 0, "name": "NVIDIA A100-SXM4-80GB", "memoryUsed": 1, "memoryTotal": 81920}


class Dashboard(Site):
    """A server that answers like Ray's dashboard, or as a test prepared."""

    def __init__(self) -> None:
        self.nodes, self.total, self.warning = [ALIVE, DEAD], 2, ""
        self.summary = [{"raylet": {"nodeId": ALIVE["node_id"]}, "gpus": [GPU, GPU]}]
        self.raw: bytes | None = None
        self.token = ""
        super().__init__()

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> Answer:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return 401, b"Unauthorized"
        if self.raw is not None:
            return 200, self.raw
        if request.path.startswith("/api/v0/nodes?"):
            rows = {"total": self.total, "result": self.nodes}
            data = {"result": {**rows, "partial_failure_warning": self.warning}}
        elif request.path == "/nodes?view=summary":
            data = {"summary": self.summary}
        else:
            return 404, b"404: Not Found"
        return 200, {"result": True, "msg": "", "data": data}


@pytest.fixture
def dashboard(monkeypatch, tmp_path) -> Iterator[Dashboard]:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # `ray.init()` may have left a token in the real one.
    with Dashboard() as dashboard:
        yield dashboard


def import_document(dashboard):
    (document,) = collect([f"ray:{dashboard.url}/"], "ray").documents
    return document["nodes"]["nodeData"]


def test_a_dashboard_lists_nodes_and_devices(dashboard):
    found = collect([f"ray:{dashboard.url}"], "ray")
    (node,) = found.documents[0]["nodes"]["nodeData"]
    assert node["id"] == ALIVE["node_id"]  # Ray's node affinity needs this id.
    assert node["providerId"] == f"ray:{ALIVE['node_id']}"  # A second import recognizes the node.
    assert node["vcpus"] == {"count": 2.0}
    assert node["memory"] == 22_958
    assert node["rack"] == "r1"
    assert node["labels"]["ray.io/node-name"] == "192.0.2.2"
    assert node["gpus"]["gpus"] == [{"modelName": "NVIDIA A100-SXM4-80GB", "memory": 81_920}] * 2
    assert found.notes == (f"ray:{dashboard.url}: left out 1 dead nodes",)


def test_unmeasured_devices_have_the_model_that_ray_schedules_by(dashboard):
    dashboard.summary = [{"raylet": {"nodeId": ALIVE["node_id"]}, "gpus": [GPU]}]
    (node,) = import_document(dashboard)
    assert node["gpus"]["gpus"] == [{"modelName": "A100", "memory": 0}] * 2
    dashboard.summary = []
    assert import_document(dashboard) == [node]


def test_a_token_of_ray_is_sent(dashboard, monkeypatch, tmp_path):
    dashboard.token = "secret"  # noqa: S105  # For a server of one test.
    with pytest.raises(InventoryError, match="HTTP 401 Unauthorized"):
        import_document(dashboard)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret\n")  # As Ray writes it.
    assert len(import_document(dashboard)) == 1
    (tmp_path / "other").write_text("wrong")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "other"))
    with pytest.raises(InventoryError, match="put the cluster's token into RAY_AUTH_TOKEN"):
        import_document(dashboard)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert len(import_document(dashboard)) == 1


def test_nodes_that_ray_leaves_out_yield_a_note_or_an_error(dashboard):
    dashboard.warning = "1 node did not answer"
    assert collect([f"ray:{dashboard.url}"], "r").notes[-1].endswith("1 node did not answer")
    dashboard.total = 12_000
    with pytest.raises(InventoryError, match=r"at most 10000 nodes.*not 12000"):
        import_document(dashboard)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"<html>", "HTTP 200 OK"),
        (b'{"msg": "no"}', "not: no"),
        (b'{"data": {}}', "data.result.result: expected a list"),
        (b'{"data": {"result": {"result": [7]}}}', r"\[0\]: expected a node"),
    ],
)
def test_the_error_names_a_server_that_is_not_a_dashboard(dashboard, raw, said):
    dashboard.raw = raw
    with pytest.raises(InventoryError, match=said) as caught:
        import_document(dashboard)
    assert dashboard.url in str(caught.value)


def test_an_address_of_ray_that_does_not_answer_gives_an_error(nowhere):
    with pytest.raises(InventoryError, match="ray:http://HOST:8265"):
        collect([f"ray:{nowhere.replace('ws', 'http')}"], "r")


def test_output_of_ray_is_read_from_a_file(tmp_path):
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps([PRINTED, FROM_PYTHON]))
    (document,) = collect([str(path)], "ray").documents
    first, second = document["nodes"]["nodeData"]
    assert (first["memory"], first["gpus"]["count"]) == (22_958, 2)
    assert (second["id"], second["vcpus"]["count"], second["memory"]) == ("bb", 4.0, 1024)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"node_id": ""}, r"\[0\].node_id"),
        ({"resources_total": None}, r"\[0\].resources_total: .*--detail"),
        ({"resources_total": {"CPU": "2 cores"}}, r"\[0\].resources_total.CPU: .*'2 cores'"),
        ({"resources_total": {"GPU": -1}}, r"\[0\].resources_total.GPU"),
    ],
)
def test_errors_name_the_fault_in_a_node(tmp_path, change, said):
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps([ALIVE | change]))
    with pytest.raises(InventoryError, match=said):
        collect([str(path)], "ray")


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder whose path is short: Ray puts sockets deep into it."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as name:
        yield name


RAY = shutil.which("ray", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.heavy
@pytest.mark.skipif(RAY is None, reason="no `ray` on the PATH: pip install 'ray[default]'")
def test_nodes_of_a_real_ray_are_read(tmp_path, folder):
    port, dashboard = free_port(), free_port()
    start = (
        *(RAY, "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1"),
        *("--include-dashboard=true", f"--dashboard-port={dashboard}", "--num-cpus=3"),
        *("--num-gpus=2", '--resources={"accelerator_type:A100": 1}', "--labels=rack=r7"),
        *("--object-store-memory=100000000", f"--temp-dir={folder}", "--min-worker-port=0"),
        "--max-worker-port=0",
    )
    log, environment = tmp_path / "log", {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    with log.open("w") as output:
        ray = subprocess.Popen(start, env=environment, stdout=output, stderr=output)
    try:
        for _ in range(60):
            try:
                (document,) = collect([f"ray:http://127.0.0.1:{dashboard}"], "r").documents
                (node,) = document["nodes"]["nodeData"]
                break
            except (InventoryError, ValueError):
                assert ray.poll() is None, log.read_text()
                with pytest.raises(subprocess.TimeoutExpired):
                    ray.wait(1)  # The dashboard answers some seconds after Ray's start.
        assert (node["vcpus"]["count"], node["gpus"]["count"], node["rack"]) == (3.0, 2, "r7")
        assert node["gpus"]["modelNames"] == ["A100"]
        assert node["memory"] > 0
    finally:
        ray.terminate()
        ray.wait(60)

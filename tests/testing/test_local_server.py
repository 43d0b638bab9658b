"""Tests of the server for users' tests: fleet, policies, settings and errors."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from moorage.testing import ServerError, fake_cluster, server
from moorage_client import BlockingClient, RequestRefused

FIRST_FIT = "first_fit:1.0-stable"
POLICY = """
class AIOSv1PolicyRule:
    def __init__(self, rule_id, settings, parameters):
        pass

    def eval(self, parameters, input_data, context):
        return {"cluster_id": "far", "node_id": "far-2", "gpu_ids": ["0"]}
"""


def test_a_lease_is_granted_and_workloads_start_in_memory() -> None:
    terms = {"lease": {"ttl_seconds": 60}, "provision": {"backend": "memory"}}
    with server() as running, BlockingClient(running.ws) as client:
        granted = client.ask(FIRST_FIT, resources={"gpus": 4}, **terms)
        assert granted.lease is not None
        assert granted.lease.placement[0].node_id == "lab-1"
        shown = subprocess.run(
            [Path(sys.executable).parent / "moorage", "ask", FIRST_FIT, "--gpus", "1"],
            env={**os.environ, **running.variables},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    assert "lab-2" in shown


def test_workloads_in_a_temporary_folder_end_with_their_server(tmp_path) -> None:
    """No later server would find workloads of a temporary folder."""
    here = fake_cluster(nodes=1)
    here["nodes"]["nodeData"][0]["id"] = platform.node()
    os.mkfifo(tmp_path / "pid")
    command = ["sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 600"]
    workload = {"backend": "local", "spec": {"category": "process", "command": command}}
    terms = {"lease": {"ttl_seconds": 600}, "provision": workload}
    with server([here]) as running, BlockingClient(running.ws) as client:
        client.ask(FIRST_FIT, resources={"cpu_milli": 100}, **terms)
        pid = int((tmp_path / "pid").read_text())  # Waits for the command.
    assert not Path(f"/proc/{pid}").exists()


def test_the_caller_of_the_local_server_gives_fleet_and_policies_and_settings(tmp_path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(POLICY)
    with (
        server(
            [fake_cluster("near"), fake_cluster("far", gpus=1)],
            policies=[own],
            environment={"MOORAGE_TOKENS": "ann:secret-1"},
            token="secret-1",  # noqa: S106  # A test's value.
        ) as running,
        BlockingClient(running.ws, "secret-1") as client,
    ):
        granted = client.ask("mine:1.0-test", resources={"gpus": 1}, lease={"ttl_seconds": 60})
        assert granted.lease is not None
        assert granted.lease.placement[0].node_id == "far-2"
        with pytest.raises(RequestRefused, match="first_fit"):
            client.ask(FIRST_FIT)


def test_the_error_of_the_local_server_quotes_the_refusal_of_a_policy(tmp_path) -> None:
    own = tmp_path / "mine.py"
    own.write_text("class Other:\n    pass\n")
    with pytest.raises(ServerError, match="AIOSv1PolicyRule"), server(policies=[own]):
        pass

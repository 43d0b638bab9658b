"""The control plane for tests refuses what RBAC does not grant; it ends with its tests.

tests/backends/kubernetes/test_backend.py tests scheduling, failures and lost nodes.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kubernetes_plane import Plane, PlaneError

from moorage_client import BlockingClient, NeverFits

pytestmark = [pytest.mark.kubernetes, pytest.mark.heavy]

STARTED_SECONDS_MAX = 120


def test_a_kubernetes_user_without_a_role_may_do_nothing(fresh_plane: Plane) -> None:
    with pytest.raises(PlaneError, match="403"):
        fresh_plane.call("GET", "/api/v1/pods", user="nobody")


OUTLIVED = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from kubernetes_plane import Plane
with Plane.run(Path(sys.argv[2])) as plane:
    print(*[plane.pid(name) for name in plane.programs], flush=True)
    sys.stdin.read()
"""


def test_the_control_plane_ends_with_the_tests(plane: Plane, tmp_path: Path) -> None:
    here = Path(__file__).parent
    owner = subprocess.Popen(
        [sys.executable, "-c", OUTLIVED, here, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = [int(each) for each in owner.stdout.readline().split()]
    assert len(pids) == 5
    owner.kill()
    owner.communicate()

    def has_ended(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        # Its new parent may not have read its exit code yet.
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()

    plane.until(lambda: all(has_ended(pid) for pid in pids), "every program has ended", 10)


def test_the_playground_gives_leases_on_its_fake_gpus_and_follows_kubectl(plane: Plane) -> None:
    script = Path(__file__).parent / "playground.py"
    playground = subprocess.Popen(
        [sys.executable, script, "--port", "0", "--http-port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        said = ""
        while "Ctrl-C ends" not in said:
            line = playground.stdout.readline()
            assert line, said
            said += line
        kubeconfig, path, url = (
            re.search(f"{name}=(\\S+)", said)[1] for name in ("KUBECONFIG", "PATH", "MOORAGE_URL")
        )
        kubectl, moorage = (shutil.which(each, path=path) for each in ("kubectl", "moorage"))
        assert moorage
        with BlockingClient(url) as client:
            (cluster,) = client.fleet()
            assert (cluster["nodes"], cluster["gpus"]) == (5, 24)
            wanted = {"gpus": 4, "topology": "nvlink"}
            with pytest.raises(NeverFits):
                client.ask("first_fit:1.0-stable", resources=wanted)
            answer = client.ask(
                "first_fit:1.0-stable", resources={"gpus": 2}, lease={"ttl_seconds": 60}
            )
            (share,) = answer.lease.placement
            node_id = share.node_id
            subprocess.run(
                [kubectl, f"--kubeconfig={kubeconfig}", "cordon", node_id],
                check=True,
                capture_output=True,
            )
            plane.until(
                lambda: (
                    "cordoned"
                    in {
                        each.get("unavailable")
                        for each in client.fleet("playground")
                        if each["node_id"] == node_id
                    }
                ),
                f"{node_id} takes nothing new",
            )
        playground.send_signal(signal.SIGINT)
        rest, _ = playground.communicate(timeout=STARTED_SECONDS_MAX)
        assert "Ending all of it." in rest
        assert playground.returncode == 0
        assert not Path(kubeconfig).exists()
    finally:
        playground.kill()
        playground.communicate()

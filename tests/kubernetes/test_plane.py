"""The control plane for tests is a real one: it schedules, refuses, loses nodes, and ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kubernetes_objects import (
    claim,
    dra_node,
    gpu,
    node,
    pod,
    resource_slice,
)
from kubernetes_plane import Plane, PlaneError

pytestmark = [pytest.mark.kubernetes, pytest.mark.heavy]


def phase(plane: Plane, name: str, *wanted: str) -> dict:
    """Wait until a pod has one of these phases, and return its status."""
    return plane.until(
        lambda: (
            found["status"]
            if (found := plane.get("Pod", name)) and found["status"]["phase"] in wanted
            else None
        ),
        f"{name} is {wanted}",
    )


def test_a_pod_of_counted_gpus_is_scheduled_and_one_too_many_is_not(fresh_plane: Plane) -> None:
    plane = fresh_plane
    plane.create(node("n1", gpus=2), pod("fits", gpus=2))
    phase(plane, "fits", "Running")
    plane.create(pod("waits", gpus=1))
    why = plane.until(
        lambda: plane.get("Pod", "waits")["status"].get("conditions"), "the scheduler says why"
    )
    assert why[0]["reason"] == "Unschedulable"
    assert "Insufficient nvidia.com/gpu" in why[0]["message"]


def test_a_claim_gets_the_very_devices_that_it_names(fresh_plane: Plane) -> None:
    plane = fresh_plane
    plane.create(*dra_node("n1"), claim("c1", ["GPU-n1-0", "GPU-n1-2"]))
    plane.create(pod("p1", claim_name="c1", node_name="n1"))
    phase(plane, "p1", "Running")
    results = plane.get("ResourceClaim", "c1")["status"]["allocation"]["devices"]["results"]
    assert sorted(each["device"] for each in results) == ["gpu-0", "gpu-2"]


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ({"run": "10ms"}, ("Succeeded", "Completed", 0)),
        ({"run": "10ms", "exit_code": 3}, ("Failed", "Error", 3)),
        ({"run": "10ms", "exit_code": 137}, ("Failed", "OOMKilled", 137)),
    ],
)
def test_a_pod_ends_as_it_is_told(fresh_plane: Plane, told: dict, status: tuple) -> None:
    fresh_plane.create(node("n1"), pod("p1", **told))
    found = phase(fresh_plane, "p1", "Succeeded", "Failed")
    ended = found["containerStatuses"][0]["state"]["terminated"]
    assert (found["phase"], ended["reason"], ended["exitCode"]) == status


def test_a_pod_fails_in_the_ways_that_machines_fail(fresh_plane: Plane) -> None:
    plane = fresh_plane
    plane.create(node("n1"), pod("p1", fate="imagepull"), pod("p2", fate="evicted"))
    plane.create(pod("p3", fate="hang"))
    assert phase(plane, "p2", "Failed")["reason"] == "Evicted"
    waiting = plane.until(
        lambda: plane.get("Pod", "p1")["status"].get("containerStatuses"), "the image is missing"
    )
    assert waiting[0]["state"]["waiting"]["reason"] == "ImagePullBackOff"
    assert plane.get("Pod", "p3")["status"]["phase"] == "Pending"


def test_what_a_pod_wrote_can_be_read(fresh_plane: Plane) -> None:
    plane = fresh_plane
    plane.create(node("n1"), pod("p1"))
    phase(plane, "p1", "Running")
    assert plane.log_of("p1") == "started\n"


def test_a_node_whose_kubelet_is_silent_is_lost_and_found(fresh_plane: Plane) -> None:
    plane = fresh_plane
    plane.create(node("n1"), node("n2"))

    def ready(name: str) -> str:
        conditions = plane.get("Node", name)["status"].get("conditions", [])
        return next((each["status"] for each in conditions if each["type"] == "Ready"), "")

    for name in ("n1", "n2"):
        plane.until(lambda name=name: ready(name) == "True", f"{name} is ready")
    plane.lose_node("n1")
    plane.until(lambda: ready("n1") == "Unknown", "n1 is lost")
    assert ready("n2") == "True"
    plane.find_node("n1")
    plane.until(lambda: ready("n1") == "True", "n1 is ready again")


def test_a_user_without_a_role_may_do_nothing(fresh_plane: Plane) -> None:
    with pytest.raises(PlaneError, match="403"):
        fresh_plane.call("GET", "/api/v1/pods", user="nobody")


def test_a_killed_api_server_forgets_nothing(fresh_plane: Plane) -> None:
    plane = fresh_plane
    plane.create(node("n1"), resource_slice("n1", [gpu(0, "GPU-1")]))
    plane.kill("kube-apiserver")
    plane.start("kube-apiserver")
    assert [each["metadata"]["name"] for each in plane.all("ResourceSlice")]
    plane.create(pod("p1"))
    phase(plane, "p1", "Running")


OUTLIVED = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from kubernetes_plane import Plane
with Plane.run(Path(sys.argv[2])) as plane:
    print(*[plane.pid(name) for name in plane.programs], flush=True)
    sys.stdin.read()
"""


def test_whatever_ends_the_tests_ends_the_plane(plane: Plane, tmp_path: Path) -> None:
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

    def ended(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        # What became of it, its new parent may not have asked yet.
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()

    plane.until(lambda: all(ended(pid) for pid in pids), "every program has ended", 10)

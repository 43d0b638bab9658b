"""The commands in docs/how-to/kubernetes.md work at a real API server."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes_binaries import binaries
from kubernetes_objects import dra_node
from kubernetes_plane import Plane

from moorage_client.cli.running import DEFAULT_POLICY

pytestmark = [pytest.mark.kubernetes, pytest.mark.heavy]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "kubernetes.md"
SERVE = "moored serve"


def typed_blocks() -> list[str]:
    """Return the commands that a reader of the page types, block by block."""
    return re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def say(text: str, environment: dict[str, str]) -> str:
    """Run lines in a shell; the first line that fails ends the test."""
    command = ["bash", "-euc", text]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def environment(fresh_plane: Plane, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a user who has only a kubeconfig, kubectl and Moorage."""
    fresh_plane.create(*dra_node("gpu-1", 4), *dra_node("gpu-2", 4))
    (tmp_path / "kubectl").symlink_to(binaries("kubectl")["kubectl"])
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("MOORAGE_")}
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {
        **inherited,
        "PATH": path,
        "KUBECONFIG": str(fresh_plane.kubeconfig()),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "MOORAGE_PORT": "0",
        "MOORAGE_HTTP_PORT": "0",
    }


@pytest.fixture
def settings() -> str:
    """Return the block of the page that sets variables."""
    return next(each for each in typed_blocks() if each.startswith("export "))


@pytest.fixture
def server(environment: dict[str, str], settings: str) -> Iterator[dict[str, Any]]:
    """Start the server as the page does; yield its ready line."""
    assert f"{SERVE}\n" in typed_blocks()
    child = subprocess.Popen(
        ["bash", "-euc", f"{settings}exec {SERVE}"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield json.loads(child.stdout.readline())
    finally:
        child.terminate()
        child.wait()
        child.stdout.close()


def test_the_page_about_kubernetes_leads_from_a_kubeconfig_to_a_running_pod(
    fresh_plane: Plane, environment: dict[str, str], server: dict[str, Any], settings: str
) -> None:
    reach = {"MOORAGE_URL": server["ws"], "MOORAGE_HTTP_URL": server["http"]}
    environment |= reach
    fresh_plane.until(
        lambda: "gpu-2" in say("moorage fleet lab || true", environment), "the cluster is read"
    )
    blocks = [each for each in typed_blocks() if each not in {settings, f"{SERVE}\n"}]
    outputs = [say(each, environment) for each in blocks]
    contexts, fleet, pushed, leased, started = outputs
    assert contexts == "test\n"
    assert all(name in fleet for name in ("lab", "gpu-1", "gpu-2"))
    assert DEFAULT_POLICY in pushed
    assert "GPU-gpu-1-0" in leased
    assert "pod" in started
    leases = json.loads(say("moorage leases --json", environment))
    assert [len(each["placement"][0]["gpus"]) for each in leases] == [2, 1]
    (claim,) = fresh_plane.all("ResourceClaim")
    (result,) = claim["status"]["allocation"]["devices"]["results"]
    assert f"GPU-gpu-1-{result['device'][-1]}" == leases[1]["placement"][0]["gpus"][0]
    for each in leases:
        assert "moorage release ID" in PAGE.read_text()
        say(f"moorage release {each['id']}", environment)
    fresh_plane.until(lambda: not fresh_plane.all("Pod"), "the pod is gone")


def test_the_kubernetes_page_names_existing_metrics_and_files() -> None:
    text = PAGE.read_text()
    followed = PAGE.parents[2] / "server/moorage/backends/kubernetes/registration.py"
    for name in ("moorage_cluster_fresh", "moorage_drift"):
        assert name in text
        assert name in followed.read_text()
    for path in re.findall(r"`(deploy/\S+)`", text):
        assert (PAGE.parents[2] / path).is_file()

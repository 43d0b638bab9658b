"""What `make kubernetes-playground` starts works together, and ends together."""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kubernetes_plane import Plane

from moorage_client import BlockingClient, NeverFits

pytestmark = [pytest.mark.kubernetes, pytest.mark.heavy]

STARTED_SECONDS_MAX = 120


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

"""`moorage fleet import kubernetes` imports a cluster once, or with `--watch` continuously."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes_objects import node, pod
from kubernetes_plane import Plane

from moorage.testing.daemon_process import Running, daemon
from moorage_client.services import Services

pytestmark = [pytest.mark.kubernetes, pytest.mark.heavy]

PROGRAM = "from moorage_client.cli import main; main()"
END_SECONDS_MAX = 60
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with daemon() as running:
        yield running


@pytest.fixture
def start(fresh_plane: Plane, running: Running) -> Iterator[Start]:
    """Start `moorage fleet import`; end the command after the test if it still runs."""
    made: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> "subprocess.Popen[str]":
        environment = {
            **os.environ,
            "KUBECONFIG": str(fresh_plane.kubeconfig()),
            "MOORAGE_HTTP_URL": running.http,
        }
        command = [sys.executable, "-P", "-c", PROGRAM, "fleet", "import"]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        child = subprocess.Popen([*command, *arguments], env=environment, **pipes)
        made.append(child)
        return child

    yield start
    for child in made:
        child.kill()
        child.communicate()


def wait_end(child: "subprocess.Popen[str]") -> tuple[int, Any]:
    out, _ = child.communicate(timeout=END_SECONDS_MAX)
    return child.returncode, json.loads(out)


def test_a_cluster_is_imported_with_its_present_nodes(fresh_plane: Plane, start: Start) -> None:
    fresh_plane.create(node("n1", gpus=4), node("n2", gpus=2), pod("p", gpus=3, node_name="n1"))
    fresh_plane.patch("Node", "n2", {"spec": {"unschedulable": True}})
    fresh_plane.until(
        lambda: fresh_plane.get("Pod", "p")["spec"].get("nodeName"), "the pod is bound"
    )
    code, said = wait_end(start("kubernetes", "--dry-run", "--json"))
    assert (code, said["clusters"][0]["id"]) == (0, "test"), "the name of the context"
    code, said = wait_end(start("kubernetes", "--cluster-id", "once", "--dry-run", "--json"))
    (document,) = said["clusters"]
    nodes = {each["id"]: each for each in document["nodes"]["nodeData"]}
    assert (code, document["id"]) == (0, "once")
    assert [len(nodes[name]["gpus"]["gpus"]) for name in ("n1", "n2")] == [1, 2]
    assert nodes["n2"]["unavailable"] == "cordoned"
    code, said = wait_end(start("kubernetes", "--cluster-id", "once", "--json"))
    assert (code, said["clusters"][0]["action"], said["clusters"][0]["nodes"]) == (0, "created", 2)
    code, said = wait_end(start("kubernetes", "--cluster-id", "once", "--watch", "--json"))
    assert (code, said["error"]["code"]) == (3, "already_exists")


def test_errors_name_the_object_that_cannot_be_imported(fresh_plane: Plane, start: Start) -> None:
    for arguments, words in (
        (("kubernetes:nowhere",), "nowhere"),
        (("local", "--watch"), "--watch"),
        (("kubernetes", "--cluster-id", "x", "--watch", "--merge"), "--merge"),
    ):
        code, said = wait_end(start(*arguments, "--json"))
        assert code == 2
        assert words in said["error"]["reason"]


def test_an_import_with_watch_registers_each_change(
    fresh_plane: Plane, running: Running, start: Start
) -> None:
    plane = fresh_plane
    plane.create(node("n1", gpus=4))
    child = start("kubernetes", "--cluster-id", "west", "--watch", "--json")
    with Services(running.http) as services:

        def stored_document() -> dict[str, Any]:
            return next(iter(services.clusters({"id": "west"})), {})

        def machines() -> list[Any]:
            return stored_document().get("nodes", {}).get("nodeData", [])

        plane.until(machines, "the cluster is there")
        plane.patch("Node", "n1", {"spec": {"unschedulable": True}})
        plane.until(lambda: machines()[0].get("unavailable") == "cordoned", "it is cordoned")
        plane.kill("kube-apiserver")
        plane.until(lambda: stored_document().get("unavailable"), "the cluster is out of reach")
        assert machines()
        plane.start("kube-apiserver")
        plane.until(lambda: not stored_document().get("unavailable"), "it is there again")
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=END_SECONDS_MAX)
        assert (child.returncode, "Traceback" in err) == (130, False), err
        assert {json.loads(line)["cluster_id"] for line in out.splitlines() if "nodes" in line} == {
            "west"
        }
        assert stored_document()["nodes"]["count"] == 1

"""Each process that uses the library has a folder, and no folder stays behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moorage.resources import CloudRunner, K8sRunner, LocalRunner, RayRunner
from moorage.resources.runners import default_runners
from tests.waiting import until

SCRIPT = """
import asyncio, os, signal, sys
from moorage.resources import ProcessResourceSpec, ResourceEngine
async def main():
    await ResourceEngine.start(ProcessResourceSpec(command=["sleep", "1000"]))
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "closed":
        await ResourceEngine.close()
asyncio.run(main())
"""


def play(home: Path, end: str) -> int:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(home)}
    command = [sys.executable, "-W", "default::ResourceWarning", "-c", SCRIPT, end]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert "unclosed file" not in done.stderr
    return done.returncode


NOWHERE = """
import asyncio
from moorage.resources import ProcessResourceSpec, ResourceEngine
try:
    asyncio.run(ResourceEngine.acquire("a", ProcessResourceSpec(command=["sleep", "1000"]), "k8s"))
except ValueError as error:
    print(error)
"""


def elsewhere(home: Path) -> dict[str, str]:
    """The environment of a program that has no Kubernetes."""
    unset = {"KUBECONFIG", "MOORAGE_KUBERNETES_CONFIG", "KUBERNETES_SERVICE_HOST"}
    given = {name: value for name, value in os.environ.items() if name not in unset}
    return given | dict.fromkeys(("TMPDIR", "HOME", "XDG_RUNTIME_DIR"), str(home))


@pytest.mark.heavy
def test_an_unavailable_backend_leaves_no_caretaker(tmp_path):
    pytest.importorskip("kubernetes.client", reason="the extra `kubernetes` is not installed")
    command = [sys.executable, "-c", NOWHERE]
    done = subprocess.run(
        command, env=elsewhere(tmp_path), capture_output=True, text=True, check=True
    )
    assert "there is no kubeconfig ~/.kube/config; set KUBECONFIG" in done.stdout
    assert done.stderr == ""
    until(lambda: not [*tmp_path.glob("moorage-kubernetes-*")])  # The caretaker removes the folder.


KILLED = """
import asyncio, os, signal
from moorage.resources import ProcessResourceSpec, ResourceEngine
async def main():
    for name in ("a", "b"):
        try:
            await ResourceEngine.acquire(name, ProcessResourceSpec(command=["sleep", "9"]), "k8s")
        except ValueError as error:
            print(error)
        with open(f"/proc/self/task/{os.getpid()}/children") as children:
            for each in map(int, children.read().split()):
                os.kill(each, signal.SIGKILL)
                os.waitpid(each, 0)
asyncio.run(main())
"""


@pytest.mark.heavy
def test_after_a_kill_of_the_caretaker_a_successor_starts(tmp_path):
    pytest.importorskip("kubernetes")
    done = subprocess.run(
        [sys.executable, "-c", KILLED],
        env=elsewhere(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("there is no kubeconfig") == 2
    assert done.stderr == ""


def test_runners_have_the_documented_names():
    names = {name: runner.name for name, runner in default_runners().items()}
    known = {"local": "local", "ray": "ray", "aws": "cloud", "k8s": "k8s", "kubernetes": "k8s"}
    assert names == {name: known.get(name, name) for name in names}
    made = [RayRunner(), CloudRunner(), K8sRunner(), LocalRunner()]
    assert [each.name for each in made] == ["ray", "cloud", "k8s", "local"]


def test_a_process_removes_its_folder_and_the_folders_of_killed_processes(tmp_path):
    assert play(tmp_path, "killed") == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert play(tmp_path, "closed") == 0
    assert not left.exists()
    assert play(tmp_path, "forgotten") == 0
    assert list(tmp_path.iterdir()) == []

"""`ResourceEngine` on every backend, configured only by environment variables.

A `Place` has the name of a backend, specs, and a function that counts what the backend still runs.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aws_world import AwsWorld
from kubernetes_objects import node
from kubernetes_plane import Plane
from ray_world import RayWorld

from moorage.backends.aws.specs import InstanceResourceSpec
from moorage.backends.base import BackendError, UnsupportedSpecError
from moorage.backends.kubernetes.specs import PodResourceSpec
from moorage.backends.specs import (
    BaseResourceSpec,
    ContainerResourceSpec,
    MemoryResourceSpec,
    ProcessResourceSpec,
    ServiceResourceSpec,
    VLLMModelResourceSpec,
)
from moorage.resources import ResourceEngine, ResourceStatus
from moorage.resources.runners import default_runners
from tests.waiting import until

pytestmark = pytest.mark.heavy

SEEN_SECONDS_MAX = 60
SLEEPS = ["sh", "-c", "echo begun; exec sleep 1000"]


@dataclass
class Place:
    """A backend, the specs that tests start there, and what the backend can do."""

    name: str
    spec: Callable[..., BaseResourceSpec]
    bad: BaseResourceSpec
    why: str
    left: Callable[[], int]
    runs: bool = True
    logs: bool = True


def process(**fields: Any) -> ProcessResourceSpec:
    return ProcessResourceSpec(command=SLEEPS, stop_seconds=1, **fields)


BROKEN = ProcessResourceSpec(command=["sh", "-c", "echo no such model; exit 4"])


def kubernetes_place(plane: Plane) -> Place:
    plane.create(node("n1"))
    fate = {"SIM_FATE": "imagepull"}
    bad = PodResourceSpec(image="registry.example/none:1", environment=fate)
    return Place("k8s", process, bad, "check the image's name", lambda: len(plane.all("Pod")))


def aws_place(world: AwsWorld) -> Place:
    def spec(**fields: Any) -> InstanceResourceSpec:
        return InstanceResourceSpec(instance_type="t3.micro", tags={"bench": "runs"}, **fields)

    before = {each["InstanceId"] for each in world.instances()}
    bad = InstanceResourceSpec(instance_type="t3.micro", tags={"bench": "fails"})

    def count_instances() -> int:
        return len({each["InstanceId"] for each in world.instances()} - before)

    return Place("aws", spec, bad, "Client.UserInitiatedShutdown", count_instances)


@pytest.fixture(
    params=[
        "local",
        "memory",
        pytest.param("ray", marks=pytest.mark.ray),
        pytest.param("k8s", marks=pytest.mark.kubernetes),
        pytest.param("aws", marks=pytest.mark.aws),
    ]
)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    match request.param:
        case "local":
            return Place("local", process, BROKEN, "no such model", lambda: 0)
        case "memory":
            bad = MemoryResourceSpec(fail="no such model")
            given = {"runs": False, "logs": False}
            return Place("memory", MemoryResourceSpec, bad, "no such model", lambda: 0, **given)
        case "ray":
            world: RayWorld = request.getfixturevalue("ray_world")
            monkeypatch.setenv("RAY_ADDRESS", world.address)
            return Place("ray", process, BROKEN, "no such model", lambda: len(world.workloads()))
        case "aws":
            return aws_place(request.getfixturevalue("aws"))
        case _:
            plane: Plane = request.getfixturevalue("fresh_plane")
            monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig()))
            return kubernetes_place(plane)


@pytest.fixture
async def engine(place: Place) -> AsyncIterator[ResourceEngine]:
    made = ResourceEngine(default_runners())
    yield made
    await made.close()
    assert await made.monitor() == {}
    assert place.left() == 0


async def counts(engine: ResourceEngine) -> tuple[int, int, int]:
    ((total, free, acquired),) = [
        tuple(each[name] for name in ("total", "free", "acquired"))
        for each in (await engine.monitor()).values()
    ]
    return total, free, acquired


async def test_a_resource_is_acquired_used_reset_released_and_used_again(place, engine):
    spec = place.spec(max_global_num=2)
    one = await engine.acquire("rollout/1", spec, place.name)
    assert await engine.acquire("rollout/1", spec, place.name) is one
    assert await engine.get_status("rollout/1") is ResourceStatus.RUNNING
    assert next(iter(await engine.monitor())).split("|")[1] == place.name
    await engine.reset("rollout/1")
    assert await engine.get_status("rollout/1") is ResourceStatus.RUNNING
    await engine.release("rollout/1")
    assert await counts(engine) == (1, 1, 0)
    assert await engine.acquire("rollout 2", spec, place.name) is one
    await engine.end("rollout 2")
    assert await one.get_status() is ResourceStatus.STOPPED
    assert await engine.monitor() == {}
    assert place.left() == 0


async def test_each_backend_runs_commands_and_reads_output_or_refuses_both(place, engine):
    one = await engine.acquire("a", place.spec(), place.name)
    if place.runs:
        output = await one.run_cmd("echo 'it''s \"me\"' $WHO; exit 3", environment={"WHO": "there"})
        assert (output, output.exit_code) == ('its "me" there\n', 3)
        with pytest.raises(TimeoutError):
            await one.run_cmd("sleep 10", timeout=0.3)
    else:
        with pytest.raises(UnsupportedSpecError):
            await one.run_cmd("true")
    if place.logs:
        assert not (await one.logs()).over
    else:
        with pytest.raises(UnsupportedSpecError):
            await one.logs()


async def test_a_failed_start_names_the_reason_and_leaves_nothing_behind(place, engine):
    with pytest.raises(BackendError, match=place.why):
        await engine.acquire("a", place.bad, place.name)
    assert await engine.monitor() == {}
    assert place.left() == 0


SERVES = (
    "import http.server as h, os; "
    "h.test(h.SimpleHTTPRequestHandler, port=int(os.environ['PORT']), bind='127.0.0.1')"
)
MODEL = """#!{python}
import http.server, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
host = sys.argv[sys.argv.index("--host") + 1]
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        body = b'{{"choices": [{{"message": {{"content": "hello"}}}}]}}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_GET = do_POST = answer
http.server.HTTPServer((host, port), Handler).serve_forever()
"""


@pytest.mark.ray
async def test_services_and_models_answer_on_ray(ray_world, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", ray_world.address)
    engine = ResourceEngine(default_runners())
    service = ServiceResourceSpec(command=[sys.executable, "-c", SERVES], cpu_count=1, gpus=1)
    one = await engine.acquire("a", service, "ray")
    assert one.endpoint.startswith("http://127.0.0.1:")
    gpus = (await one.run_cmd("echo $CUDA_VISIBLE_DEVICES")).strip()
    assert gpus in {str(each) for each in range(4)}, "Ray gave the process a GPU"
    python = tmp_path / "python"
    python.write_text(MODEL.format(python=sys.executable))
    python.chmod(0o755)
    spec = VLLMModelResourceSpec(model_name_or_path="m", port=0, python=str(python))
    model = await engine.acquire("m", spec, "ray")
    assert (await model.generate_async([]))["choices"][0]["message"]["content"] == "hello"
    await engine.close()
    assert ray_world.workloads() == set()


@pytest.mark.kubernetes
async def test_services_models_and_containers_run_as_pods(fresh_plane, monkeypatch):
    fresh_plane.create(node("n1", gpus=1))
    monkeypatch.setenv("KUBECONFIG", str(fresh_plane.kubeconfig()))
    engine = ResourceEngine(default_runners())
    extra = {"image": "python:3.13"}
    service = ServiceResourceSpec(
        command=["serve", "{port}"], workdir="/srv", cpu_count=0.5, mem_limit="64m", extra=extra
    )
    one = await engine.acquire("a", service, "k8s")
    assert one.endpoint.endswith(".svc:8000")
    (pod,) = await asyncio.to_thread(fresh_plane.all, "Pod")
    (box,) = pod["spec"]["containers"]
    assert (box["image"], box["command"]) == ("python:3.13", ["serve", "8000"])
    assert box["workingDir"] == "/srv"
    assert {"name": "PORT", "value": "8000"} in box["env"]
    assert box["resources"]["limits"] == {"cpu": "500m", "memory": str(64 << 20)}
    await engine.acquire("m", VLLMModelResourceSpec(model_name_or_path="m"), "k8s")
    await engine.acquire("c", ContainerResourceSpec(image="busybox"), "k8s")
    images = {x["spec"]["containers"][0]["image"] for x in fresh_plane.all("Pod")}
    assert {"busybox", "python:3.13"} < images
    await engine.close()
    assert fresh_plane.all("Pod") == []


AWAY = """
apiVersion: v1
kind: Config
clusters: [{name: a, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: a, user: {token: x}}]
contexts: [{name: a, context: {cluster: a, user: a}}]
current-context: a
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("ray", r"Ray at 127\.0\.0\.1:9 is not reached", marks=pytest.mark.ray),
        pytest.param("k8s", r"127\.0\.0\.1:9", marks=pytest.mark.kubernetes),
    ],
)
async def test_a_start_fails_in_time_if_no_server_answers(name, said, monkeypatch, tmp_path):
    (tmp_path / "config").write_text(AWAY)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    engine = ResourceEngine(default_runners())
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        with pytest.raises(TimeoutError, match=f"not ready within 2 s: .*{said}"):
            await engine.acquire("a", process(), name, timeout=2)
    assert await engine.monitor() == {}


SCRIPT = """
import asyncio, sys
from moorage.resources import InstanceResourceSpec, ProcessResourceSpec, ResourceEngine
tags = {"bench": "runs"}
spec = ProcessResourceSpec(command=["sh", "-c", "exec sleep 1000"])
if sys.argv[1] == "aws":
    spec = InstanceResourceSpec(instance_type="t3.micro", tags=tags)
async def main():
    await ResourceEngine.acquire("a", spec, sys.argv[1])
    print("begun", flush=True)
    await asyncio.sleep(1000 if sys.argv[2] == "killed" else 0)
asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["killed", "forgotten"])
def test_resources_of_an_engine_end_with_their_program(place, end):
    """The program may end by itself or be killed."""
    if place.name in {"local", "memory"}:
        return  # `test_runners` tests this, and no workload would remain.
    command = [sys.executable, "-c", SCRIPT, place.name, end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "begun\n"
        if end == "killed":
            assert place.left() == 1
            program.send_signal(signal.SIGKILL)
    until(lambda: not place.left())


CLOSED = """
import asyncio, os
from moorage.resources import ProcessResourceSpec, ResourceEngine
async def main():
    spec = ProcessResourceSpec(command=["sh", "-c", "exec sleep 1000"])
    await ResourceEngine.acquire("a", spec, "k8s")
    await ResourceEngine.close()
    os.remove(os.environ["KUBECONFIG"])
asyncio.run(main())
"""


@pytest.mark.kubernetes
def test_after_close_of_the_engine_no_request_reaches_the_backend(fresh_plane, tmp_path):
    fresh_plane.create(node("n1"))
    config = tmp_path / "config"
    config.write_bytes(Path(fresh_plane.kubeconfig()).read_bytes())
    given = {**os.environ, "KUBECONFIG": str(config), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", CLOSED], env=given, check=True)
    until(lambda: not [*tmp_path.glob("moorage-kubernetes-*")])  # The caretaker removes the folder.

"""Tests of containers on Ray, at the container engine of the node that Ray chooses."""

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_world import RayWorld

from moorage.backends.base import BackendError, UnsupportedSpecError
from moorage.backends.specs import ContainerResourceSpec, Readiness
from moorage.resources import ResourceEngine
from moorage.resources.runners import default_runners

pytestmark = [pytest.mark.heavy, pytest.mark.ray]
FAILS = "#!/bin/sh\nexit 1\n"


@pytest.fixture(scope="module")
def engines(podman: tuple[Path, Any], ray_world: RayWorld) -> Iterator[Path]:
    """The container engines of the nodes: Podman, and a Docker without its daemon."""
    home, folder = podman[0].parent, ray_world.programs
    lines = ["#!/bin/sh", f"export CONTAINERS_CONF={home}/containers.conf"]
    lines += [f"export CONTAINERS_STORAGE_CONF={home}/storage.conf"]
    lines += [f'exec {shutil.which("podman")} "$@"', ""]
    folder.mkdir()
    (folder / "podman").write_text("\n".join(lines))
    (folder / "docker").write_text(FAILS)
    for each in folder.iterdir():
        each.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
async def engine(
    engines: Path, ray_world: RayWorld, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ResourceEngine]:
    monkeypatch.setenv("RAY_ADDRESS", ray_world.address)
    made = ResourceEngine(default_runners())
    yield made
    await made.close()
    assert ray_world.workloads() == set()


def names(api: Any) -> list[str]:
    found = [name for each in api.containers(all=True) for name in each["Names"]]
    return [each for each in found if "moorage-ray-" in each]


async def test_a_container_runs_commands_is_reset_and_ends(
    engine, container_engine, container_image, tmp_path
):
    (tmp_path / "in").write_text("from the node")
    spec = ContainerResourceSpec(
        image=container_image,
        command=["sh", "-c", "echo begun; echo $OWN; exec sleep 1000"],
        environment={"OWN": "mine", "NVIDIA_VISIBLE_DEVICES": "all"},
        mount={str(tmp_path): "/given:ro"},
        stop_seconds=1,
    )
    box = await engine.acquire("a", spec, "ray")
    assert (await box.logs()).text == "begun\nmine\n"
    output = await box.run_cmd(
        'cat /given/in; echo " $OWN $MORE $NVIDIA_VISIBLE_DEVICES"; exit 3',
        environment={"MORE": "1"},
    )
    assert (output, output.exit_code) == ("from the node mine 1 void\n", 3)
    await box.run_cmd("touch /tmp/mine")
    assert await box.run_cmd("pwd", workdir="/etc") == "/etc\n"
    with pytest.raises(TimeoutError):
        await box.run_cmd("sleep 10", timeout=0.5)
    await engine.release("a")
    assert await engine.acquire("b", spec, "ray") is box
    assert await box.run_cmd("ls /tmp") == ""
    assert len(names(container_engine)) == 1
    await engine.end("b")
    assert names(container_engine) == []


async def test_a_shell_in_a_container_keeps_running_and_a_service_in_a_container_answers(
    engine, container_engine, container_image
):
    shell = ContainerResourceSpec(image=container_image, command=["sh"], stop_seconds=0)
    box = await engine.acquire("a", shell, "ray")
    assert await box.run_cmd("echo hello") == "hello\n"
    serves = ContainerResourceSpec(
        image=container_image,
        command=["httpd", "-f", "-p", "8080"],
        container_port=8080,
        readiness=Readiness(port=8080),
        stop_seconds=0,
    )
    web = await engine.acquire("b", serves, "ray")
    assert web.endpoint.startswith("http://127.0.0.1:")
    await engine.close()
    assert names(container_engine) == []


async def test_a_failed_container_start_names_the_reason(engine, container_engine, container_image):
    script = "echo no such model; exit 4"
    spec = ContainerResourceSpec(image=container_image, command=["sh", "-c", script])
    with pytest.raises(BackendError, match="no such model"):
        await engine.acquire("a", spec, "ray")
    assert names(container_engine) == []


async def test_a_node_without_a_container_engine_is_an_error(engine, engines, container_image):
    away = engines / "away"
    (engines / "podman").rename(away)
    (engines / "podman").write_text(FAILS)
    (engines / "podman").chmod(0o755)
    try:
        with pytest.raises(BackendError, match=r"needs a working docker or podman.* has none"):
            await engine.acquire("a", ContainerResourceSpec(image=container_image), "ray")
    finally:
        away.rename(engines / "podman")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ray_actor_options": {"runtime_env": {"image_uri": "x"}}}, "image_uri: .* engine .*runs"),
        ({"ray_actor_options": {"name": "x"}}, "ray_actor_options.name"),
        ({"gpus": "all"}, "gpus: expected a number"),
    ],
)
async def test_resources_that_ray_lacks_are_refused(engine, fields, reason):
    with pytest.raises(UnsupportedSpecError, match=reason):
        await engine.acquire("a", ContainerResourceSpec(image="x", **fields), "ray")

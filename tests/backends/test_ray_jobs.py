"""Jobs on a real Ray: commands that call `ray.init()`, and the tasks and actors they start."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import ray
from ray_world import RayWorld, ray_world, until

from moorage.backends.base import BackendError, Order, Phase, UnsupportedSpecError
from moorage.backends.ray import inventory
from moorage.backends.ray.backend import RayBackend
from moorage.backends.remote_specs import JobResourceSpec, RayJobResourceSpec
from moorage.model import ClusterId, NodeId, Share

__all__ = ["ray_world"]

pytestmark = [pytest.mark.heavy, pytest.mark.ray]

PROGRAM = str(Path(__file__).with_name("moorage_ray_job.py"))


def share(world: RayWorld, number: int, *gpus: str, milli: int = 1000, **held: int) -> Share:
    return Share(ClusterId("ray"), NodeId(world.node(number)), gpus, milli, **held)


def job(devices: int, mode: str = "waits") -> RayJobResourceSpec:
    command = [sys.executable, PROGRAM, str(devices), mode]
    return RayJobResourceSpec(command=command, stop_seconds=5)


def processes_of_jobs() -> int:
    """Count the jobs that Ray holds to be running, this test's own aside."""
    jobs = ray._private.state.jobs()
    own = ray.get_runtime_context().get_job_id()
    entries = [each for each in jobs if each["JobID"] != own and not each["IsDead"]]
    return sum(PROGRAM in each.get("Entrypoint", "") for each in entries)


@pytest.fixture
async def backend(ray_world: RayWorld, tmp_path: Path) -> AsyncIterator[RayBackend]:
    made = RayBackend(tmp_path, ray_world.address)
    yield made
    for workload in await made.discover():
        await made.stop(workload.id)
    await made.close()
    assert ray_world.workloads() == set()
    await asyncio.to_thread(until, lambda: not ray_world.groups())
    await asyncio.to_thread(until, lambda: not processes_of_jobs())


async def said(backend: RayBackend, name: str) -> dict:
    """Return what the job says once its tasks have run."""
    async with asyncio.timeout(60):
        while "\n" not in (text := (await backend.logs(name)).text):
            assert not (await backend.status(name)).phase.over, text
            await asyncio.sleep(0.1)  # Nothing tells.
    found: dict = json.loads(text)
    return found


async def test_the_tasks_of_a_job_see_the_gpus_of_its_lease_where_ray_would_choose_others(
    backend, ray_world
):
    node = ray_world.node(0)
    ready = await backend.start(Order("a", job(2, "stays"), (share(ray_world, 0, "3", "1"),)))
    assert ready.phase is Phase.READY
    seen = await said(backend, "a")
    assert seen["tasks"] == [[node, "1"], [node, "3"]]
    assert seen["below"] in ([node, "1"], [node, "3"])
    assert seen["stays"][0] in {"1", "3"}
    assert "cannot fit into any bundles" in seen["more"]
    document = inventory.document("ray", await backend.observe())
    (found,) = [each for each in document["nodes"]["nodeData"] if each["id"] == node]
    assert [each["id"] for each in found["gpus"]["gpus"]] == ["0", "1", "2", "3"]
    await backend.stop("a")
    assert ray_world.groups() == []
    await asyncio.to_thread(until, lambda: not stays())
    free = {each["id"]: each["free"].get("GPU") for each in (await backend.observe())["nodes"]}
    assert free[node] == 4


def stays() -> bool:
    """Whether the detached actor of a job is there."""
    return any(each["name"] == "stays" for each in ray.util.list_named_actors(all_namespaces=True))

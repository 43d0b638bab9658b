"""Tests of jobs on a real Ray: commands that call `ray.init()`, with their tasks and actors."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import ray
from ray_world import RayWorld, empty, share, until

from moorage.backends.base import BackendError, Order, Phase, UnsupportedSpecError
from moorage.backends.kubernetes.specs import JobResourceSpec
from moorage.backends.ray import inventory
from moorage.backends.ray.backend import RayBackend
from moorage.backends.ray.specs import RayJobResourceSpec

pytestmark = [pytest.mark.heavy, pytest.mark.ray]

PROGRAM = str(Path(__file__).with_name("moorage_ray_job.py"))


def job(devices: int, mode: str = "waits") -> RayJobResourceSpec:
    command = [sys.executable, PROGRAM, str(devices), mode]
    return RayJobResourceSpec(command=command, stop_seconds=5)


def processes_of_jobs() -> int:
    """Count the running jobs on Ray, except the job of this test."""
    jobs = ray._private.state.jobs()
    own = ray.get_runtime_context().get_job_id()
    entries = [each for each in jobs if each["JobID"] != own and not each["IsDead"]]
    return sum(PROGRAM in each.get("Entrypoint", "") for each in entries)


@pytest.fixture
async def backend(ray_backend: RayBackend, ray_world: RayWorld) -> AsyncIterator[RayBackend]:
    yield ray_backend
    await empty(ray_backend)
    await asyncio.to_thread(until, lambda: not ray_world.workloads())
    await asyncio.to_thread(until, lambda: not ray_world.groups())
    await asyncio.to_thread(until, lambda: not processes_of_jobs())


async def until_free(backend: RayBackend, node: str, count: float) -> None:
    """Wait until a number of GPUs of a node is free."""
    async with asyncio.timeout(60):
        while True:
            seen = await backend.observe()
            (free,) = [each["free"] for each in seen["nodes"] if each["id"] == node]
            if free.get("GPU", 0) == count:
                return
            await asyncio.sleep(0.1)  # No event reports this.


async def wait_output(backend: RayBackend, name: str) -> dict:
    """Wait until the tasks of a job have run, and return the job's output."""
    async with asyncio.timeout(60):
        while True:
            log = await backend.logs(name)
            for line in log.text.splitlines(keepends=True):
                if line.startswith("{") and line.endswith("\n"):  # Other lines are Ray's.
                    found: dict = json.loads(line)
                    return found
            assert not log.over, log.text
            await asyncio.sleep(0.1)  # No event reports this.


async def test_tasks_of_a_job_get_the_gpus_of_its_lease_and_not_those_that_ray_would_choose(
    backend, ray_world
):
    node = ray_world.node(0)
    ready = await backend.start(Order("a", job(2, "stays"), (share(ray_world, 0, "2", "1"),)))
    assert ready.phase is Phase.READY
    seen = await wait_output(backend, "a")
    assert seen["tasks"] == [[node, "1"], [node, "2"]]
    assert seen["below"] in ([node, "1"], [node, "2"])
    assert seen["stays"][0] in {"1", "2"}
    assert seen["order"] == "PCI_BUS_ID", "CUDA's order must be Ray's"
    assert "cannot fit into any bundles" in seen["more"]
    document = inventory.document("ray", await backend.observe())
    (found,) = [each for each in document["nodes"]["nodeData"] if each["id"] == node]
    assert [each["id"] for each in found["gpus"]["gpus"]] == ["0", "1", "2", "3"]
    await backend.stop("a")
    assert ray_world.groups() == []
    await asyncio.to_thread(until, lambda: not stays())
    await until_free(backend, node, 4)


async def test_a_job_on_two_nodes_runs_one_command_with_devices_of_both(backend, ray_world):
    both = (share(ray_world, 1, "1", cpu_milli=1000), share(ray_world, 0, "2", cpu_milli=1000))
    await backend.start(Order("g", job(2, "ends"), both))
    assert len(ray_world.actors()) == 1
    seen = await wait_output(backend, "g")
    assert sorted(seen["tasks"]) == sorted([[ray_world.node(1), "1"], [ray_world.node(0), "2"]])
    async with asyncio.timeout(30):
        while not (end := await backend.status("g")).phase.over:  # noqa: ASYNC110  # No event reports this.
            await asyncio.sleep(0.1)  # As above.
    assert (end.phase, end.exit_code) == (Phase.SUCCEEDED, 0)
    await backend.stop("g")
    assert ray_world.groups() == []


async def test_jobs_that_start_at_the_same_time_can_share_one_gpu(backend, ray_world):
    orders = [Order(name, job(0), (share(ray_world, 0, "1", milli=500),)) for name in "ab"]
    await asyncio.gather(*map(backend.start, orders))
    groups = [each for each in ray.util.placement_group_table().values() if each["name"]]
    held = [each for each in groups if each["state"] == "CREATED"]
    assert [each["bundles"] for each in held] == [{0: {"GPU": 0.5}}] * 2
    await until_free(backend, ray_world.node(0), 3)


async def test_a_job_is_adopted_after_a_crash_of_the_daemon(ray_world, tmp_path):
    order = Order("a", job(1), (share(ray_world, 1, "1"),))
    before, after = (RayBackend(tmp_path, ray_world.address) for _ in range(2))
    try:
        await before.start(order)
        seen = await wait_output(before, "a")
        groups = ray_world.groups()
        os.kill(before.connection.pid, signal.SIGKILL)
        assert [each.phase for each in await after.discover()] == [Phase.READY]
        assert (await after.start(order)).phase is Phase.READY
        assert await wait_output(after, "a") == seen, "the job was not started a second time"
        assert ray_world.groups() == groups
        await after.stop("a")
        assert ray_world.workloads() == set()
        assert ray_world.groups() == []
    finally:
        await before.close()
        await after.close()


async def test_a_placement_group_left_by_a_crash_is_removed(backend, ray_world):
    server = backend.connection._server()
    ray.shutdown()
    ray.init(ray_world.address, namespace="moorage", log_to_driver=False)
    ray.util.placement_group([{"GPU": 1}], name=f"{server}/a/0/1", lifetime="detached").wait(30)
    assert len(ray_world.groups()) == 1
    assert list(await backend.discover()) == []
    await asyncio.to_thread(until, lambda: not ray_world.groups())  # Another check may remove it.


async def test_a_killed_actor_leaves_nothing_of_its_job(backend, ray_world):
    reports = []
    backend.listen(reports.append)
    await backend.start(Order("a", job(1, "stays"), (share(ray_world, 0, "1"),)))
    await wait_output(backend, "a")
    (name,) = ray_world.actors()
    ray.kill(ray.get_actor(name, namespace="moorage"))
    await asyncio.to_thread(until, lambda: any(each.phase.over for each in reports))
    assert reports[-1].phase is Phase.FAILED
    await backend.stop("a")
    assert ray_world.groups() == []
    await asyncio.to_thread(until, lambda: not stays())


async def test_a_job_that_does_not_get_its_gpu_leaves_no_placement_group(backend, ray_world):
    stranger = await ray_world.stranger(0)
    try:
        whole = share(ray_world, 0, "0", "1", "2", "3")
        with pytest.raises(TimeoutError):
            await backend.start(Order("a", job(1), (whole,), timeout_seconds=2))
        await asyncio.to_thread(until, lambda: not ray_world.groups())
    finally:
        ray.kill(stranger)


async def test_a_job_that_cannot_be_limited_to_its_lease_is_refused(backend, ray_world):
    with pytest.raises(BackendError, match="request gpus, cpu_milli or memory_mib"):
        await backend.start(Order("a", job(1), (share(ray_world, 0),)))
    with pytest.raises(UnsupportedSpecError, match="is a command"):
        backend.refuse(JobResourceSpec(image="x"))


def stays() -> bool:
    """Return whether the detached actor of a job exists."""
    return any(each["name"] == "stays" for each in ray.util.list_named_actors(all_namespaces=True))

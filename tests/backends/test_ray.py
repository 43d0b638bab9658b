"""Tests of the backend `ray`, on a real Ray, that the conformance suite of backends lacks."""

import asyncio
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray_world import RayWorld, empty, share, until

from moorage.backends.base import (
    BackendError,
    Order,
    Phase,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.ray import connection, inventory
from moorage.backends.ray.backend import RayBackend
from moorage.backends.ray.connection import WorkloadFailedError
from moorage.backends.ray.records import Records
from moorage.backends.ray.specs import RayActorResourceSpec, RayJobResourceSpec
from moorage.backends.specs import ProcessResourceSpec, ServiceResourceSpec
from tests.ray_clusters import give_up_soon

pytestmark = [pytest.mark.heavy, pytest.mark.ray]
FOREVER = ProcessResourceSpec(command=["sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exec sleep 1000"])


@pytest.fixture
async def backend(ray_backend: RayBackend, ray_world: RayWorld) -> AsyncIterator[RayBackend]:
    yield ray_backend
    await empty(ray_backend)
    assert ray_world.workloads() == set()


@pytest.fixture
def reports(backend: RayBackend) -> list[WorkloadReport]:
    """The reports that the backend `ray` sends by itself."""
    heard: list[WorkloadReport] = []
    backend.listen(heard.append)
    return heard


async def end(reports: list[WorkloadReport]) -> WorkloadReport:
    """Wait until a workload has ended by itself."""
    await asyncio.to_thread(until, lambda: any(each.phase.over for each in reports))
    return next(each for each in reports if each.phase.over)


async def wait_output(backend: RayBackend, name: str) -> str:
    async with asyncio.timeout(60):
        while not (text := (await backend.logs(name)).text):  # noqa: ASYNC110  # No event reports this.
            await asyncio.sleep(0.05)  # As above.
    return text.strip()


async def answer(handle, method, *args):
    return await asyncio.to_thread(ray.get, handle.call.remote(method, *args), timeout=30)


def actor_of(endpoint: str):
    scheme, _, rest = endpoint.partition("://")
    namespace, _, name = rest.partition("/")
    assert scheme == "ray-actor"
    return ray.get_actor(name, namespace=namespace)


async def test_a_workload_gets_the_gpus_of_its_lease_and_not_those_that_ray_would_choose(
    backend, ray_world
):
    for name, gpus in {"a": ("2", "1"), "b": ("0",), "c": ("3",)}.items():
        placement = (share(ray_world, 0, *gpus),)
        await backend.start(Order(name, FOREVER, placement))
        assert await wait_output(backend, name) == ",".join(gpus)
    seen = await backend.observe()
    (free,) = [each["free"] for each in seen["nodes"] if each["id"] == ray_world.node(0)]
    assert free.get("GPU", 0) == 0, "Ray counts all GPUs as in use"
    (used,) = [each["workers"] for each in seen["nodes"] if each["id"] == ray_world.node(0)]
    assert {each["actor"] for each in used} <= set(seen["ours"])
    assert sorted(tuple(sorted(each["used"]["GPU"])) for each in used) == [
        ("0",),
        ("1", "2"),
        ("3",),
    ]


async def test_leases_starting_at_the_same_time_get_their_own_gpus(backend, ray_world):
    orders = [Order(f"w{gpu}", FOREVER, (share(ray_world, 1, str(gpu)),)) for gpu in (2, 0, 1)]
    await asyncio.gather(*map(backend.start, orders))
    assert [await wait_output(backend, each.id) for each in orders] == ["2", "0", "1"]


async def test_two_workloads_share_one_gpu(backend, ray_world):
    for name in "ab":
        await backend.start(Order(name, FOREVER, (share(ray_world, 0, "1", milli=500),)))
        assert await wait_output(backend, name) == "1"
    with pytest.raises(BackendError, match="one GPU of a node"):
        await backend.start(Order("c", FOREVER, (share(ray_world, 0, "0", "1", milli=500),)))


async def test_resources_of_other_programs_are_not_leased(backend, ray_world):
    node = ray_world.node(0)
    await backend.start(Order("a", FOREVER, (share(ray_world, 0, "1"),)))
    strangers = [await ray_world.stranger(number) for number in (0, 1)]
    label = {"ray.io/node-id": node}
    group = ray.util.placement_group([{"GPU": 1}], bundle_label_selector=[label])
    assert group.wait(30)

    def offer():
        return asyncio.run_coroutine_threadsafe(observation(), loop).result()

    async def observation():
        document = inventory.document("ray", await backend.observe())
        (found,) = [each for each in document["nodes"]["nodeData"] if each["id"] == node]
        return [each["id"] for each in found["gpus"]["gpus"]], found["vcpus"]["count"]

    loop = asyncio.get_running_loop()
    await asyncio.to_thread(until, lambda: offer() == (["1", "2"], 3))
    job = RayJobResourceSpec(command=["sleep", "1000"])
    orders = [Order("b", FOREVER, (share(ray_world, 0, "0"),))]
    orders += [Order("j", job, (share(ray_world, 1, "0"),))]
    for error in await asyncio.gather(*map(backend.start, orders), return_exceptions=True):
        assert isinstance(error, BackendError)
        assert re.search(r"GPU 0 of Ray node .* is used by other programs", str(error))
    for stranger in strangers:
        ray.kill(stranger)
    ray.util.remove_placement_group(group)
    await asyncio.to_thread(until, lambda: offer() == (["0", "1", "2", "3"], 4))
    assert (await backend.status("a")).phase is Phase.READY


async def test_the_endpoint_names_the_users_actor_for_calls(backend, ray_world):
    spec = RayActorResourceSpec(
        actor_cls_path="moorage_ray_classes.Counter",
        init_args=[5],
        ray_actor_options={"max_concurrency": 2, "runtime_env": {"env_vars": {"KIND": "x"}}},
    )
    order = Order(
        "a", spec, (share(ray_world, 1, "3"),), {"MOORAGE_LEASE_ID": "a", "MOORAGE_FENCING": "7"}
    )
    ready = await backend.start(order)
    assert ready.phase is Phase.READY
    assert ready.endpoint.endswith("/a/7/1/0")
    handle = actor_of(ready.endpoint)
    assert await answer(handle, "add", 2) == 7
    assert await answer(handle, "later", 2) == 9
    assert await answer(handle, "devices") == ("3", "a")
    assert (await backend.logs("a")).text == "counts from 5\nhas 7\nhas 9\n"
    done = await backend.execute("a", ["sh", "-c", "echo $MOORAGE_LEASE_ID $KIND"])
    assert (done.exit_code, done.output) == (0, "a x\n")


async def test_the_error_says_why_an_actor_cannot_be_created(backend, ray_world):
    fails = {"fail": "no weights"}
    spec = RayActorResourceSpec(actor_cls_path="moorage_ray_classes.Counter", init_kwargs=fails)
    with pytest.raises(BackendError, match="ValueError: no weights: counts from 0"):
        await backend.start(Order("a", spec))
    spec = RayActorResourceSpec(actor_cls_path="moorage_ray_classes.Missing")
    with pytest.raises(BackendError, match="Missing"):
        await backend.start(Order("a", spec))
    wrong = {"runtime_env": {"env_vars": {"X": 5}}}
    spec = RayActorResourceSpec(actor_cls_path="collections.Counter", ray_actor_options=wrong)
    with pytest.raises(WorkloadFailedError, match="env_vars"):
        await backend.start(Order("a", spec))
    slow = RayActorResourceSpec(
        actor_cls_path="moorage_ray_classes.Counter", init_kwargs={"seconds": 60}
    )
    with pytest.raises(TimeoutError):
        await backend.start(Order("a", slow, timeout_seconds=3))
    assert ray_world.actors() == []


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (ProcessResourceSpec(command=["true"], cpu_count=2), "cpu_count"),
        (RayActorResourceSpec(actor_cls_path="Counter"), "actor_cls_path"),
        (
            RayActorResourceSpec(actor_cls_path="a.B", ray_actor_options={"num_gpus": 2}),
            "ray_actor_options.num_gpus",
        ),
        *(
            (RayActorResourceSpec(actor_cls_path="a.B", ray_actor_options={name: wrong}), field)
            for name, wrong, field in [
                ("max_concurrency", True, "ray_actor_options.max_concurrency"),
                ("runtime_env", 5, "ray_actor_options.runtime_env"),
                ("resources", "x", "ray_actor_options.resources"),
                ("resources", {"GPU": 2}, "ray_actor_options.resources.GPU"),
                ("resources", {"x": -1}, "ray_actor_options.resources.x"),
                ("resources", {"x": float("nan")}, "ray_actor_options.resources.x"),
            ]
        ),
    ],
)
def test_a_spec_cannot_override_the_resources_of_the_lease(tmp_path, spec, field):
    with pytest.raises(UnsupportedSpecError, match=field):
        RayBackend(tmp_path).refuse(spec)


async def test_all_members_of_a_gang_start_and_end_together(backend, ray_world):
    script = "echo $MOORAGE_RANK $CUDA_VISIBLE_DEVICES; exec sleep 1000"
    spec = ProcessResourceSpec(command=["sh", "-c", script])
    both = (share(ray_world, 0, "1"), share(ray_world, 1, "1", "0"))
    ready = await backend.start(Order("g", spec, both))
    assert ready.phase is Phase.READY
    assert len(ray_world.actors()) == 2
    assert await wait_output(backend, "g") == "0 1"
    await backend.stop("g")
    assert ray_world.workloads() == set()
    fails = ServiceResourceSpec(command=["sh", "-c", "exit $MOORAGE_RANK"])
    with pytest.raises(BackendError):
        await backend.start(Order("g", fails, both))
    assert ray_world.workloads() == set(), "if one member fails, no member is left"


async def test_a_failing_member_fails_its_gang(backend, ray_world, reports):
    script = '[ "$MOORAGE_RANK" = 0 ] && exec sleep 1000; sleep 1; echo lost it; exit 5'
    both = (share(ray_world, 0), share(ray_world, 1))
    await backend.start(Order("g", ProcessResourceSpec(command=["sh", "-c", script]), both))
    ended = await end(reports)
    assert (ended.phase, ended.exit_code, ended.log_tail) == (Phase.FAILED, 5, ("lost it",))


async def test_a_start_that_ray_cannot_place_ends_in_time(backend, ray_world):
    whole = tuple(share(ray_world, number, cpu_milli=4000) for number in (0, 1))
    await backend.start(Order("a", FOREVER, whole))
    async with asyncio.timeout(8):
        with pytest.raises(TimeoutError, match="not ready within 1 s"):
            await backend.start(Order("b", FOREVER, whole, timeout_seconds=1))


@pytest.mark.parametrize("own", [True, False])
async def test_exec_runs_in_the_folder_of_its_workload(backend, tmp_path, own):
    command = ["sh", "-c", "mkdir below; pwd; exec sleep 1000"]
    spec = ProcessResourceSpec(command=command, workdir=str(tmp_path) if own else None)
    await backend.start(Order("a", spec))
    folder = await wait_output(backend, "a")
    assert (await backend.execute("a", ("pwd",))).output == f"{folder}\n"
    assert (await backend.execute("a", ("pwd",), workdir="below")).output == f"{folder}/below\n"


async def test_if_an_actor_is_killed_the_processes_of_its_workload_end(backend, ray_world, reports):
    script = "pwd; setsid sleep 1000 & exec sleep 1000"
    await backend.start(Order("a", ProcessResourceSpec(command=["sh", "-c", script])))
    folder = Path(await wait_output(backend, "a"))
    (name,) = ray_world.actors()
    ray.kill(ray.get_actor(name, namespace="moorage"))
    ended = await end(reports)
    assert ended.phase is Phase.FAILED
    assert "the actor is gone" in ended.detail
    await asyncio.to_thread(until, lambda: not ray_world.workloads())
    await asyncio.to_thread(until, lambda: not folder.parent.exists())
    assert [each.phase for each in await backend.discover()] == [Phase.FAILED]
    again = await backend.start(Order("a", FOREVER))
    assert again.phase is Phase.FAILED, "an ended workload is not started a second time"


async def test_workloads_survive_when_the_process_connected_to_ray_dies_or_hangs(
    backend, ray_world, reports, monkeypatch, tmp_path
):
    await backend.start(Order("a", FOREVER, (share(ray_world, 0, "0"),)))
    order = tmp_path / "end"
    command = f"until [ -e {order} ]; do sleep 0.1; done; exit 3"
    await backend.start(Order("b", ProcessResourceSpec(command=["sh", "-c", command])))

    async def another_than(driver: int) -> None:
        await asyncio.to_thread(until, lambda: backend.connection.pid not in {None, driver})
        assert (await backend.status("a")).phase is Phase.READY

    driver = backend.connection.pid
    os.kill(driver, signal.SIGKILL)
    await another_than(driver)
    order.touch()
    await end(reports)
    ends = [(each.id, each.exit_code) for each in reports if each.phase.over]
    assert set(ends) == {("b", 3)}, "the next driver may report it again"
    with monkeypatch.context() as patch:
        patch.setattr(connection, "SILENCE_SECONDS_MAX", 5.0)
        driver = backend.connection.pid
        os.kill(driver, signal.SIGSTOP)
        await asyncio.to_thread(until, lambda: backend.connection.pid != driver)
    await another_than(driver)
    assert len(ray_world.actors()) == 2


async def test_a_node_that_is_lost_fails_its_workload(backend, ray_world, reports):
    ray_world.add(2)
    until(lambda: ray_world.node(2) in ray_world.alive())
    lost = share(ray_world, 2, "0")
    await backend.start(Order("a", FOREVER, (lost,)))
    await asyncio.to_thread(ray_world.kill, 2)
    assert (await end(reports)).phase is Phase.FAILED
    await backend.stop("a")
    with pytest.raises(BackendError):
        await backend.start(Order("a", FOREVER, (lost,)))
    until(lambda: not ray_world.workloads())  # The node's processes end soon after it.


async def test_an_address_without_ray_is_reported(monkeypatch, tmp_path):
    give_up_soon(monkeypatch)
    backend = RayBackend(tmp_path, "127.0.0.1:1")
    with pytest.raises(BackendError, match=r"Ray at 127\.0\.0\.1:1 is not reached"):
        await backend.observe()
    await backend.close()


DAEMON = """
import pathlib, sys, time
from moorage.backends.ray.backend import RayBackend
connection = RayBackend(pathlib.Path(sys.argv[1]), sys.argv[2]).connection
connection.open()
while connection.pid is None:
    time.sleep(0.05)
print(connection.pid, flush=True)
time.sleep(1000)
"""


async def test_a_server_that_takes_over_finds_the_workloads_that_the_former_leader_started(
    ray_world, tmp_path
):
    names: dict[str, str] = {}

    def lead(server: str) -> RayBackend:
        folder = tmp_path / server
        Records(folder).join(lambda own: names.setdefault("ray", own))
        return RayBackend(folder, ray_world.address)

    order = Order("w", FOREVER, (share(ray_world, 0, "1"),))
    ended = Order("ended", FOREVER, (share(ray_world, 1, "1"),), resumed=True)
    first = lead("first")
    await first.start(order)
    await first.close()
    actors = ray_world.actors()
    second = lead("second")
    assert [each.id for each in await second.discover()] == ["w"]
    assert (await second.start(replace(order, resumed=True))).phase is Phase.READY
    assert (await second.start(ended)).phase is Phase.FAILED
    assert ray_world.actors() == actors
    await second.stop("w")
    assert ray_world.workloads() == set()
    await second.close()


def test_a_daemon_that_is_killed_before_ray_answers_leaves_no_process(tmp_path):
    arguments = [sys.executable, "-c", DAEMON, os.fspath(tmp_path), "127.0.0.1:1"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as daemon:
        try:
            driver = os.pidfd_open(int(daemon.stdout.readline()))
            until(lambda: "Connecting" in (tmp_path / "driver.log").read_text())  # In `ray.init`.
        finally:
            daemon.kill()
    try:
        ended, _, _ = select.select([driver], [], [], 60)
        assert ended, "the driver outlives its daemon"
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(driver, signal.SIGKILL)
        os.close(driver)

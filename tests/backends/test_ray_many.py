"""The backend `ray`: commands beside a workload, and many workloads, on a real Ray."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from ray_world import RayWorld, empty, until

from moorage import ray_devices
from moorage.backends.base import BackendError, Order, Phase
from moorage.backends.ray.backend import RayBackend
from moorage.backends.ray.records import OUTPUTS_MAX, Records
from moorage.backends.ray.specs import RayActorResourceSpec
from moorage.backends.specs import ProcessResourceSpec

pytestmark = [pytest.mark.heavy, pytest.mark.ray]
SECONDS_MAX = 120
FOREVER = ProcessResourceSpec(command=["sleep", "1000"])
COUNTER = RayActorResourceSpec(actor_cls_path="collections.Counter")
EXECUTIONS = 8
"""The daemon's limit of concurrent commands beside one workload."""
STARTS = 140


@pytest.fixture
async def backend(ray_backend: RayBackend, ray_world: RayWorld) -> AsyncIterator[RayBackend]:
    yield ray_backend
    await empty(ray_backend)
    assert ray_world.workloads() == set()


@pytest.mark.parametrize("spec", [FOREVER, COUNTER], ids=["process", "actor"])
async def test_background_processes_end_with_the_workload(backend, ray_world, spec):
    await backend.start(Order("a", spec))
    leaves = "setsid sleep 1000 > /dev/null 2>&1 & echo left; exit 3"
    done = await backend.execute("a", ["sh", "-c", leaves])
    assert (done.exit_code, done.output) == (3, "left\n")
    late = ["sh", "-c", "setsid sleep 1000 & exec sleep 1000"]
    with pytest.raises(TimeoutError):
        await backend.execute("a", late, timeout_seconds=0.5)
    with pytest.raises(BackendError, match="no such program"):
        await backend.execute("a", ["no such program"])
    assert (await backend.status("a")).phase is Phase.READY
    await backend.stop("a")
    assert ray_world.workloads() == set()


async def test_an_actor_that_exits_during_creation_is_reported(backend):
    spec = RayActorResourceSpec(actor_cls_path="sys.exit", init_args=["not today"])
    with pytest.raises(BackendError, match="SystemExit: not today"):
        await backend.start(Order("a", spec))


async def test_a_command_may_be_as_long_as_the_system_allows(backend):
    spec = ProcessResourceSpec(command=["sh", "-c", 'echo "$#"; sleep 1000', *["x" * 1000] * 400])
    await backend.start(Order("a", spec))
    async with asyncio.timeout(SECONDS_MAX):
        while not (text := (await backend.logs("a")).text):  # noqa: ASYNC110  # No event reports this.
            await asyncio.sleep(0.05)  # As above.
    assert text == "399\n"


async def test_commands_in_one_workload_do_not_delay_commands_in_another(backend, tmp_path):
    trap = f"trap 'touch {tmp_path}/heard; exit' TERM; echo begun; while :; do sleep 0.1; done"
    spec = ProcessResourceSpec(command=["sh", "-c", trap], stop_seconds=SECONDS_MAX)
    await backend.start(Order("a", spec))
    begins = f"touch {tmp_path}/$0; exec sleep 1000"
    beside = [
        asyncio.create_task(backend.execute("a", ["sh", "-c", begins, f"begun-{number}"]))
        for number in range(EXECUTIONS)
    ]
    await asyncio.to_thread(until, lambda: len([*tmp_path.glob("begun-*")]) == EXECUTIONS)
    async with asyncio.timeout(SECONDS_MAX):
        while not (await backend.logs("a")).text:  # noqa: ASYNC110  # No event reports this.
            await asyncio.sleep(0.05)  # As above.
    await backend.stop("a")
    assert (tmp_path / "heard").exists(), "it had a signal to end before it was killed"
    assert (await backend.logs("a")).text.startswith("begun\n")
    await asyncio.gather(*beside, return_exceptions=True)


async def test_starts_that_wait_for_ray_delay_no_other_calls_of_the_backend(backend, ray_world):
    waits = RayActorResourceSpec(
        actor_cls_path="collections.Counter", ray_actor_options={"resources": {"nowhere": 1}}
    )
    starts = [asyncio.create_task(backend.start(Order(f"w{n}", waits))) for n in range(STARTS)]
    await asyncio.to_thread(until, lambda: len(ray_world.actors()) >= STARTS // 2, SECONDS_MAX)
    async with asyncio.timeout(SECONDS_MAX):
        await backend.start(Order("a", FOREVER))
        await backend.stop("w0")
        await backend.stop("a")
    for start in starts:
        start.cancel()
    await asyncio.gather(*starts, return_exceptions=True)
    assert ray_world.workloads() == set()


async def test_starts_cancelled_immediately_leave_nothing_behind(backend, ray_world):
    starts = [asyncio.create_task(backend.start(Order(f"w{n}", FOREVER))) for n in range(20)]
    await asyncio.sleep(0)  # The starts have begun.
    for start in starts:
        start.cancel()
    await asyncio.gather(*starts, return_exceptions=True)
    assert ray_world.workloads() == set()


def test_a_slowly_starting_node_is_awaited(ray_world, monkeypatch):
    monkeypatch.setattr(ray_devices, "FREE_SECONDS_MAX", 1.0)
    (raylet,) = ray_world.hosts[0].all_processes["raylet"]
    with ThreadPoolExecutor(1) as threads:
        os.kill(raylet.process.pid, signal.SIGSTOP)
        try:
            arguments = (ray_world.node(0), ["0"], 1.0, lambda: True)
            taken = threads.submit(ray_devices.Holders().exact, *arguments)
            wait([taken], 3)
        finally:
            os.kill(raylet.process.pid, signal.SIGCONT)
        assert taken.result(SECONDS_MAX)


def test_concurrent_stops_store_no_more_outputs_than_allowed(tmp_path):
    records = Records(tmp_path)

    def store(number: int) -> None:
        records.archive(f"w{number}", {"attempt": 1, "data": "", "start": 0, "exit_code": 0})
        records.archived(f"w{number}")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(store, range(OUTPUTS_MAX * 2)))
    assert len([*(tmp_path / "output").iterdir()]) == OUTPUTS_MAX

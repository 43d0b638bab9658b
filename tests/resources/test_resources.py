"""Resources of the engine, as real processes and containers, are alive and clean when acquired."""

import asyncio
import contextlib
import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from moorage.backends.local.backend import LocalBackend
from moorage.backends.memory.backend import MemoryBackend
from moorage.backends.spec_documents import pool_key
from moorage.extras import install_command
from moorage.resources import (
    BackendError,
    BaseResource,
    BaseResourceSpec,
    CommandOutput,
    ContainerResourceSpec,
    LocalEnvResourceSpec,
    MemoryResourceSpec,
    PodResourceSpec,
    ProcessResourceSpec,
    Readiness,
    ResourceEngine,
    ResourceStatus,
    ServiceResourceSpec,
    VLLMModelResourceSpec,
)
from moorage.resources.resources import BackendRunner
from moorage.resources.runners import LocalRunner

SEEN_SECONDS_MAX = 30
SLEEP = ["sleep", "1000"]
LIMITS = "grep 'data size' /proc/$(cat pid)/limits"


@pytest.fixture
async def engine(tmp_path) -> AsyncIterator[ResourceEngine]:
    backend = LocalBackend(tmp_path / "backend", outlive=False)
    made = ResourceEngine({"local": LocalRunner(backend)})
    yield made
    await made.close()
    assert list(await backend.discover()) == []
    await backend.close()


async def pool_counts(engine: ResourceEngine) -> list[tuple[int, int, int]]:
    pools = (await engine.monitor()).values()
    return [(pool["total"], pool["free"], pool["acquired"]) for pool in pools]


async def kill_process(resource: BaseResource) -> None:
    """Kill the process of a `pid` file in its folder, and wait until the engine notices."""
    os.kill(int(await resource.run_cmd("cat pid")), signal.SIGKILL)
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        while await resource.get_status() is ResourceStatus.RUNNING:
            pause = 0.02  # No event reports the end of a process here.
            await asyncio.sleep(pause)


def process(**fields: object) -> ProcessResourceSpec:
    return ProcessResourceSpec(command=["sh", "-c", "echo $$ > pid; exec sleep 1000"], **fields)


# A command that ends at once ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo cannot open /model; exit 4", "exit status 4.*Its output:\ncannot open /model$"),
        ("echo done", "exit status 0.*Its output:\ndone$"),
        ("exit 3", "exit status 3.*Its output: none"),
    ],
)
async def test_a_command_that_ends_at_once_is_an_error_with_its_output(engine, script, reason):
    spec = ProcessResourceSpec(command=["sh", "-c", script])
    for call in (engine.acquire("a", spec), engine.start(spec)):
        with pytest.raises(BackendError, match=f"(?s)ended at once.*{reason}"):
            await call
    assert await engine.monitor() == {}


@pytest.mark.heavy
async def test_a_container_that_ends_at_once_is_an_error_with_its_output(engine, container_image):
    spec = ContainerResourceSpec(image=container_image, command=["sh", "-c", "echo no GPU; exit 7"])
    with pytest.raises(BackendError, match=r"(?s)ended at once.*exit status 7.*\nno GPU"):
        await engine.acquire("a", spec)
    assert await engine.monitor() == {}


# Dead resources ---------------------------------------------------------------------------------


async def test_start_and_monitor_leave_out_dead_resources(engine):
    spec = process(max_global_num=2)
    await engine.start(spec, size=2)
    one, two = await engine.acquire("a", spec), await engine.acquire("b", spec)
    pids = [await each.run_cmd("cat pid") for each in (one, two)]
    await engine.release("a")
    await engine.release("b")
    assert await pool_counts(engine) == [(2, 2, 0)]
    pids = [await each.run_cmd("cat pid") for each in (one, two)]
    await kill_process(one)
    assert await pool_counts(engine) == [(1, 1, 0)]
    await engine.start(spec, size=2)
    assert await pool_counts(engine) == [(2, 2, 0)]
    await kill_process(two)
    held = [await engine.acquire(name, spec) for name in "cd"]
    assert [await each.get_status() for each in held] == [ResourceStatus.RUNNING] * 2
    assert not {await each.run_cmd("cat pid") for each in held} & set(pids)


async def test_a_dead_resource_that_is_acquired_counts_until_it_is_released(engine, tmp_path):
    once = f"echo x >> {tmp_path}/runs; echo $$ > pid; exec sleep 1000"
    spec = ProcessResourceSpec(command=["sh", "-c", once])
    await kill_process(await engine.acquire("a", spec))
    assert await pool_counts(engine) == [(1, 0, 1)]
    await engine.release("a")
    assert await engine.monitor() == {}
    assert (tmp_path / "runs").read_text() == "x\n"


# Clean resources --------------------------------------------------------------------------------


async def test_a_released_process_is_returned_clean(engine):
    spec = process(max_global_num=1, mem_limit="512m")
    thing = await engine.acquire("a", spec)
    await thing.run_cmd("echo mine > notes; setsid sleep 1000 &")
    await engine.control("a", mem_limit="256m")
    pid = await thing.run_cmd("cat pid")
    await engine.release("a")
    assert await pool_counts(engine) == [(1, 1, 0)]
    again = await engine.acquire("b", spec)
    assert (await again.run_cmd("cat notes")).exit_code == 1
    assert await again.run_cmd("cat pid") != pid
    assert str(512 << 20) in await again.run_cmd(LIMITS)


async def test_a_reset_command_keeps_the_process_and_restores_limits(engine):
    spec = process(mem_limit="512m", reset_command=["rm", "-f", "notes"])
    thing = await engine.acquire("a", spec)
    pid = await thing.run_cmd("echo mine > notes; cat pid")
    await engine.release("a")
    assert await engine.acquire("b", spec) is thing
    assert await thing.run_cmd("ls; cat pid") == f"pid\n{pid}"
    await engine.control("b", mem_limit="256m")
    await engine.release("b")
    assert await engine.acquire("c", spec) is thing
    assert str(512 << 20) in await thing.run_cmd(LIMITS)


@pytest.mark.heavy
async def test_a_released_container_is_returned_clean_and_warm(engine, container_image):
    spec = ContainerResourceSpec(image=container_image, command=SLEEP, stop_seconds=0)
    thing = await engine.acquire("a", spec)
    await thing.run_cmd("echo mine > /tmp/notes; (sleep 1000 &)")
    await engine.release("a")
    assert await pool_counts(engine) == [(1, 1, 0)]
    again = await engine.acquire("b", spec)
    assert (await again.run_cmd("cat /tmp/notes")).exit_code == 1
    assert (await again.run_cmd("ps")).count("sleep 1000") == 1


async def test_each_built_in_resource_can_be_reset(engine, tmp_path):
    thing = await engine.acquire("process", process())
    await thing.run_cmd("touch notes")
    await engine.reset("process")
    assert await thing.run_cmd("ls") == "pid\n"
    page = ServiceResourceSpec(
        command=[sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"],
        readiness=Readiness(path="/"),
    )
    service = await engine.acquire("service", page)
    await service.run_cmd("touch notes")
    await engine.reset("service")
    assert await engine.get_status("service") is ResourceStatus.RUNNING
    assert await service.run_cmd("ls") == ""
    assert service.endpoint.startswith("http://127.0.0.1:")
    thing = await engine.acquire("object", LocalEnvResourceSpec(env_cls_path="collections.Counter"))
    thing.update("aab")
    await engine.reset("object")
    assert thing.total() == 0
    with pytest.raises(TypeError, match="Counter has no reset"):
        await engine.reset("object", 1)


async def test_a_failed_reset_is_reported_and_resets_do_not_overlap(tmp_path):
    backend = MemoryBackend()
    engine = ResourceEngine({"memory": BackendRunner(backend)})
    spec = MemoryResourceSpec(resettable=False, start_seconds=0.2)
    thing = await engine.acquire("a", spec, backend="memory")
    resets = await asyncio.gather(engine.reset("a"), engine.reset("a"), return_exceptions=True)
    assert [str(each) for each in resets] == ["None", "a is being reset already"]
    under_way = asyncio.create_task(engine.reset("a"))
    while await backend.discover():  # noqa: ASYNC110  # The reset first stops it, and the start takes longer.
        await asyncio.sleep(0)
    await engine.end("a")
    with contextlib.suppress(BackendError):
        await under_way
    assert list(await backend.discover()) == []
    assert await thing.get_status() is ResourceStatus.STOPPED


@pytest.mark.parametrize("seed", range(10))
async def test_the_cap_of_a_pool_holds_under_concurrent_operations(seed):
    draw, backend = random.Random(seed), MemoryBackend()
    engine = ResourceEngine({"memory": BackendRunner(backend)})
    spec = MemoryResourceSpec(
        resettable=False, start_seconds=0.003, stop_seconds=0.002, max_global_num=2
    )
    tasks: list[asyncio.Task[object]] = []
    for _ in range(150):
        name, chance = f"id{draw.randrange(5)}", draw.randrange(6)
        calls = {
            0: lambda name=name: engine.acquire(name, spec, "memory", wait_timeout=0.05),
            1: lambda name=name: engine.acquire(name, spec, "memory", wait_timeout=0.05),
            2: lambda name=name: engine.release(name),
            3: lambda name=name: engine.end(name),
            4: lambda name=name: engine.reset(name),
        }
        if chance in calls:
            tasks.append(asyncio.ensure_future(calls[chance]()))
        else:
            draw.choice([*tasks, asyncio.ensure_future(engine.monitor())]).cancel()
        if draw.random() < 0.5:
            await asyncio.sleep(draw.random() / 200)  # Anything may happen meanwhile.
        assert len(list(await backend.discover())) <= 2
    await asyncio.gather(*tasks, return_exceptions=True)
    for pool in engine._store._pools.values():
        pool.check()
        assert not pool.waiters
        assert pool.moving == 0
    await engine.close()
    assert list(await backend.discover()) == []


async def test_a_custom_resource_without_reset_is_refused_with_advice():
    class Robot(BaseResource):
        resource_id, category = "robot-1", "robot"

        async def get_status(self) -> ResourceStatus:
            return ResourceStatus.RUNNING

        async def end(self) -> None:
            pass

    with pytest.raises(NotImplementedError, match=r"end it and acquire another, or give its class"):
        await Robot().reset()


# A shell as command -----------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("command", [None, ["sh"], ["/bin/sh", "-i"]])
async def test_the_command_of_a_container_may_be_a_shell(
    engine, container_image, shell_image, command
):
    image = shell_image if command is None else container_image
    spec = ContainerResourceSpec(image=image, command=command, stop_seconds=600)
    thing = await engine.acquire("a", spec)
    assert await thing.get_status() is ResourceStatus.RUNNING
    assert (await thing.run_cmd("echo hello; exit 5")).exit_code == 5
    async with asyncio.timeout(120):  # A shell ignores SIGTERM; calls must not wait for it.
        await engine.release("a")
        await engine.end("a")


# Exit codes -------------------------------------------------------------------------------------


async def test_run_cmd_gives_exit_codes(engine):
    thing = await engine.acquire("a", process())
    output = await thing.run_cmd("echo hello")
    assert (output, output.exit_code) == ("hello\n", 0)
    assert isinstance(output, str)
    assert (await thing.run_cmd("exit 3")).exit_code == 3
    assert (await thing.run_cmd("kill -9 $$")).exit_code == -9
    again = pickle.loads(pickle.dumps(CommandOutput("x", 2)))  # noqa: S301  # Our own data.
    assert (again, again.exit_code) == ("x", 2)


# Equal specs ------------------------------------------------------------------------------------


class Terse:
    def __repr__(self) -> str:
        return "Terse"


TERSE = Terse()


def of(value: object) -> LocalEnvResourceSpec:
    return LocalEnvResourceSpec(env_cls_path="some.Class", init_kwargs={"value": value})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (process(mem_limit="1g"), process(mem_limit="1024m")),
        (process(mem_limit="1g"), process(mem_limit=1 << 30)),
        (process(mem_limit="1GiB", cpu_count=1), process(mem_limit="1 gb", cpu_count=1.0)),
        (ContainerResourceSpec(), ContainerResourceSpec(image="ubuntu:22.04")),
        (ContainerResourceSpec(mem_limit="2g"), ContainerResourceSpec(mem_limit="2048m")),
        (ContainerResourceSpec(host_ip="127.0.0.1"), ContainerResourceSpec()),
        (ContainerResourceSpec(mount={"/a": "/b:rw"}), ContainerResourceSpec(mount={"/a": "/b"})),
        (
            ContainerResourceSpec(ray_actor_options={"num_cpus": 2.0}),
            ContainerResourceSpec(ray_actor_options={"num_cpus": 2}),
        ),
        (PodResourceSpec(mem_limit="2g"), PodResourceSpec(mem_limit="2048m")),
        (of({"a": {1, 2}, "b": TERSE}), of({"b": TERSE, "a": {2, 1}})),
        (of((Path("a"), 1)), of((Path("a"), 1.0))),
    ],
)
def test_specs_with_equal_values_in_different_spellings_share_one_pool(one, other):
    assert pool_key(one, "local") == pool_key(other, "local")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (process(mem_limit="1g"), process(mem_limit="1025m")),
        (process(mem_limit="1g"), process()),
        (ContainerResourceSpec(mount={"/a": "/b:ro"}), ContainerResourceSpec(mount={"/a": "/b"})),
        (BaseResourceSpec(extra={"a": 1.5}), BaseResourceSpec(extra={"a": 1})),
        *(
            (of(one), of(other))
            for one, other in [
                ((1,), [1]),
                (b"1", "b'1'"),
                ({1: 2}, {"1": 2}),
                (Path("a"), Path("b")),
                (Path("a"), "PosixPath('a')"),
                (Terse(), Terse()),
            ]
        ),
    ],
)
def test_specs_with_different_values_have_different_pools(one, other):
    assert pool_key(one, "local") != pool_key(other, "local")


# Missing extras ---------------------------------------------------------------------------------

_WITHOUT = """
import asyncio, importlib.metadata, sys
there = importlib.metadata.distribution
def distribution(name):
    if name in sys.argv[2:]:
        raise importlib.metadata.PackageNotFoundError(name)
    return there(name)
importlib.metadata.distribution = distribution
for name in sys.argv[2:]:
    sys.modules[name] = None
sys.path.insert(0, "")
from moorage.resources import *
call = eval(sys.argv[1])
asyncio.run(call)
"""


@pytest.mark.parametrize(
    ("call", "without", "extra"),
    [
        ("ResourceEngine.acquire('a', InstanceResourceSpec(), 'aws')", "boto3", "aws"),
        ("ResourceEngine.start(InstanceResourceSpec(), 1, 'aws')", "boto3", "aws"),
        ("ResourceEngine.acquire('a', ContainerResourceSpec())", "docker", "containers"),
        (
            "ResourceEngine.acquire('a', ProcessResourceSpec(command=['a'], gpus=1))",
            "pynvml",
            "nvml",
        ),
        ("ResourceEngine.monitor()", "pydantic", "server"),
        ("ResourceEngine.monitor()", "httpx", "server"),
        ("ResourceEngine.acquire('a', BaseResourceSpec(), 'ray')", "ray", "ray"),
        ("ResourceEngine.acquire('a', PodResourceSpec(), 'k8s')", "kubernetes", "kubernetes"),
    ],
)
def test_the_error_names_a_missing_extra(tmp_path, call, without, extra):
    ran = subprocess.run(
        [sys.executable, "-c", _WITHOUT, call, without],
        cwd=tmp_path,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 1
    assert install_command(extra) in ran.stderr.splitlines()[-1]
    assert list(Path(tmp_path).iterdir()) == []


def test_vllm_runs_with_the_python_of_the_spec_or_with_the_running_python():
    def program(**fields: str) -> str:
        spec = VLLMModelResourceSpec(model_name_or_path="m", **fields)
        return spec.service().command[0]

    assert program() == sys.executable
    assert program(python="/opt/vllm/bin/python") == "/opt/vllm/bin/python"

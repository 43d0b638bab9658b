"""The conformance suite of backends, for memory and every real backend that works here.

A `Bench` provides a backend, another backend over the same machine (as in the daemon
after a crash), and specs with and without faults.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest
from aws_world import AwsBench
from kubernetes_objects import node
from kubernetes_plane import Plane
from ray_world import RayBench, RayJobBench
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from moorage.backends.agents.backend import AgentMachine, FleetBackend
from moorage.backends.agents.host import AgentHost
from moorage.backends.agents.link import AgentLink
from moorage.backends.base import (
    Backend,
    BackendError,
    Order,
    Phase,
    UnknownWorkloadError,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.kubernetes.specs import PodResourceSpec
from moorage.backends.local.backend import LocalBackend
from moorage.backends.memory.backend import MemoryBackend
from moorage.backends.specs import (
    BaseResourceSpec,
    ContainerResourceSpec,
    MemoryResourceSpec,
    ProcessResourceSpec,
    Readiness,
    ServiceResourceSpec,
)
from moorage.model import (
    ClusterId,
    Lease,
    LeaseTerms,
    NodeId,
    PolicyRef,
    RequestId,
    Share,
    Tenant,
)
from moorage.protocol.agent_socket import AgentSocket
from tests.waiting import async_until as until

pytestmark = pytest.mark.heavy

SEEN_SECONDS_MAX = 60


class Bench(Protocol):
    """A backend under test, and specs for it."""

    def backend(self) -> Backend:
        """Return a new backend over the machine, with the workloads of all earlier backends."""

    def spec(self) -> BaseResourceSpec:
        """Return a spec whose workload starts, and runs until it is stopped."""

    def slow(self) -> BaseResourceSpec:
        """Return a spec whose workload takes many seconds to be ready."""

    def failing(self) -> tuple[BaseResourceSpec, str]:
        """Return a spec whose workload fails while it starts, and a text of the reason."""

    def dying(self) -> tuple[BaseResourceSpec, int]:
        """Return a spec whose workload gets ready and soon ends by itself, and its exit code."""

    def limits(self) -> dict[str, Any]:
        """Return limits that can be changed while a workload runs; {} if no limit can."""

    def gang(self) -> "Gang | None":
        """Return a gang of two nodes; None if the backend starts no gangs."""

    def writing(self) -> BaseResourceSpec | None:
        """Return a spec that writes 300 lines and `last`, and ends; None if no output is stored."""

    async def left(self) -> int:
        """Count the workloads that really run: processes, containers or instances."""


Gang = tuple[Order, Callable[[], Awaitable[str]]]
"""An order for a gang, and a function that ends a member and returns the member's node."""


WRITING = ["sh", "-c", "seq 300; echo last"]


def shares(*nodes: str, cluster: str = "c") -> tuple[Share, ...]:
    return tuple(Share(ClusterId(cluster), NodeId(each), cpu_milli=100) for each in nodes)


class MemoryBench:
    def __init__(self) -> None:
        self.machine: dict[str, Any] = {}

    def backend(self) -> Backend:
        return MemoryBackend(self.machine)

    def spec(self) -> BaseResourceSpec:
        return MemoryResourceSpec()

    def slow(self) -> BaseResourceSpec:
        return MemoryResourceSpec(start_seconds=30)

    def failing(self) -> tuple[BaseResourceSpec, str]:
        return MemoryResourceSpec(start_seconds=0.05, fail="no image"), "no image"

    def dying(self) -> tuple[BaseResourceSpec, int]:
        return MemoryResourceSpec(die_seconds=0.05, exit_code=3), 3

    def limits(self) -> dict[str, Any]:
        return {"cpu_count": 2, "mem_limit": "1g"}

    def gang(self) -> Gang | None:
        async def lose() -> str:
            return "n2"  # The member ends by itself.

        return Order("a", MemoryResourceSpec(lose_seconds=0.2), shares("n1", "n2")), lose

    def writing(self) -> None:
        return None  # No program runs that could write.

    async def left(self) -> int:
        return len(self.machine)


class ProcessBench:
    """Real processes of this machine, each with a child in a separate session."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def backend(self) -> Backend:
        return LocalBackend(self.root)

    def spec(self) -> BaseResourceSpec:
        script = "setsid sleep 1000 & echo started; exec sleep 1000"
        return ProcessResourceSpec(command=["sh", "-c", script])

    def slow(self) -> BaseResourceSpec:
        return ServiceResourceSpec(command=["sleep", "1000"])

    def failing(self) -> tuple[BaseResourceSpec, str]:
        script = "sleep 0.1; echo no such model; exit 4"
        return ServiceResourceSpec(command=["sh", "-c", script]), "exit status 4: no such model"

    def dying(self) -> tuple[BaseResourceSpec, int]:
        return ProcessResourceSpec(command=["sh", "-c", "sleep 0.3; exit 3"]), 3

    def limits(self) -> dict[str, Any]:
        return {"cpu_count": 1, "mem_limit": "1g"}

    def gang(self) -> Gang | None:
        return None

    def writing(self) -> BaseResourceSpec:
        return ProcessResourceSpec(command=WRITING)

    async def left(self) -> int:
        return await asyncio.to_thread(self._count_marked)

    def _count_marked(self) -> int:
        """Count workloads with living processes, by the mark in a process's environment."""
        mark = f"MOORAGE_WORKLOAD={self.root}".encode()
        marked = set()
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    variables = (folder / "environ").read_bytes().split(b"\0")
                    marked.update(each for each in variables if each.startswith(mark))
        return len(marked)


class AgentBench(ProcessBench):
    """Real processes, as in `ProcessBench`, on machines whose agents connect over a socket."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.placement = shares("n1")

    def backend(self) -> Backend:
        return AgentBackend(self, LocalBackend(self.root / "server"), "n1", "n2")

    def gang(self) -> Gang | None:
        self.placement = shares("n1", "n2")
        spec = ProcessResourceSpec(command=["sh", "-c", "exec sleep 1000"])

        async def lose() -> str:
            note = self.root / "n2" / "running" / "a" / "process.json"
            os.kill(json.loads(note.read_text())["pid"], signal.SIGKILL)
            return "n2"

        return Order("a", spec, self.placement), lose


class MixedBench(AgentBench):
    """An `AgentBench` in which the second node of a gang is the server's own machine."""

    def backend(self) -> Backend:
        return AgentBackend(self, LocalBackend(self.root / "n2", ["n2"]), "n1")


class AgentBackend(FleetBackend):
    """A server's backend that places workloads on the agents' nodes, or on its own machine."""

    def __init__(self, bench: AgentBench, own: LocalBackend, *agents: str) -> None:
        self.bench = bench
        super().__init__(own, lambda _: self.made_lease())
        self.attached = asyncio.Event()
        self.attached_agents = 0
        self.agents = [self.machine((ClusterId("c"), NodeId(each))) for each in agents]
        roots = bench.root, bench.root / "n2"
        pairs = zip(self.agents, roots, strict=False)
        self.running = [asyncio.ensure_future(self.run(each, root)) for each, root in pairs]

    def made_lease(self) -> Lease:
        return Lease(
            *(RequestId("a"), Tenant("t"), "", PolicyRef("p", ""), self.bench.placement),
            *(1, 0.0, 0.0, LeaseTerms(60)),
            state="active",
        )

    async def run(self, machine: AgentMachine, root: Path) -> None:
        async with serve(partial(self.take, machine), "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            url, host = f"ws://127.0.0.1:{port}", AgentHost(LocalBackend(root), root)
            try:
                async for connection in connect(url):  # Again if silence ended one.
                    await host.serve(AgentSocket(connection), 1.0, 0)
            finally:
                await host.close()

    async def take(self, machine: AgentMachine, connection: ServerConnection) -> None:
        link = AgentLink(AgentSocket(connection), partial(self.tell, machine), 0)
        attaching = asyncio.ensure_future(self.attach(machine, link))
        attaching.add_done_callback(lambda _: self.note_attached())
        await link.run()
        await attaching
        machine.disconnect(link)

    def note_attached(self) -> None:
        self.attached_agents += 1
        if self.attached_agents == len(self.agents):
            self.attached.set()

    async def discover(self) -> Collection[WorkloadReport]:
        await self.attached.wait()
        return await super().discover()

    async def start(self, order: Order) -> WorkloadReport:
        return await super().start(replace(order, placement=self.bench.placement))

    async def stop(self, workload: str, stop_seconds_max: float | None = None) -> None:
        if not self.running[0].done():  # Not after `close`.
            await super().stop(workload, stop_seconds_max)

    async def close(self) -> None:
        for each in self.running:
            each.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        await super().close()


class ContainerBench:
    """Real containers, at the tests' own container engine."""

    def __init__(self, root: Path, api: Any, image: str) -> None:
        self.root = root
        self.api = api
        self.image = image

    def made(self, script: str, **fields: Any) -> ContainerResourceSpec:
        command = ["sh", "-c", script]
        return ContainerResourceSpec(image=self.image, command=command, stop_seconds=0, **fields)

    def backend(self) -> Backend:
        return LocalBackend(self.root)

    def spec(self) -> BaseResourceSpec:
        return self.made("sleep 1000 & echo started; exec sleep 1000")

    def slow(self) -> BaseResourceSpec:
        return self.made("sleep 1000", readiness=Readiness(command=["false"]))

    def failing(self) -> tuple[BaseResourceSpec, str]:
        never = Readiness(command=["false"])
        made = self.made("sleep 0.3; echo no such model; exit 4", readiness=never)
        return made, "exit status 4: no such model"

    def dying(self) -> tuple[BaseResourceSpec, int]:
        return self.made("sleep 0.3; exit 3"), 3

    def limits(self) -> dict[str, Any]:
        return {"cpu_count": 1, "mem_limit": "1g"}

    def gang(self) -> Gang | None:
        return None

    def writing(self) -> BaseResourceSpec:
        return self.made(WRITING[-1])

    async def left(self) -> int:
        return len(self.api.containers(all=True))


class KubernetesBench:
    """Pods at a real API server; a variable of each pod tells KWOK what to do with it."""

    def __init__(self, plane: Plane, root: Path) -> None:
        self.plane = plane
        self.root = root
        plane.create(node("n1"))

    def backend(self) -> Backend:
        from moorage.backends.kubernetes.backend import (  # noqa: PLC0415  # It needs the extra.
            KubernetesBackend,
        )
        from moorage.backends.kubernetes.following import ClusterSource  # noqa: PLC0415  # As above.

        return KubernetesBackend(
            self.root, [ClusterSource("c1", kubeconfig=self.plane.kubeconfig())]
        )

    def spec(self, **simulated: str) -> BaseResourceSpec:
        return PodResourceSpec(image="registry.example/none:1", environment=simulated)

    def slow(self) -> BaseResourceSpec:
        return self.spec(SIM_FATE="hang")

    def failing(self) -> tuple[BaseResourceSpec, str]:
        return self.spec(SIM_FATE="imagepull"), "ImagePullBackOff: .*check the image's name"

    def dying(self) -> tuple[BaseResourceSpec, int]:
        return self.spec(SIM_RUN="300ms", SIM_EXIT="3"), 3

    def limits(self) -> dict[str, Any]:
        return {}

    def gang(self) -> Gang | None:
        self.plane.create(node("n2"))

        async def lose() -> str:
            pods = await asyncio.to_thread(self.plane.all, "Pod")
            (pod,) = [each for each in pods if each["spec"]["nodeName"] == "n2"]
            await asyncio.to_thread(self.plane.delete, "Pod", pod["metadata"]["name"])
            return "n2"

        return Order("a", self.spec(), shares("n1", "n2", cluster="c1")), lose

    def writing(self) -> None:
        return None  # No program runs that could write.

    async def left(self) -> int:
        return await asyncio.to_thread(lambda: len(self.plane.all("Pod")))


HEAVY = [pytest.param(name, marks=pytest.mark.heavy) for name in ("container", "aws")]
HEAVY += [pytest.param("kubernetes", marks=[pytest.mark.heavy, pytest.mark.kubernetes])]
RAY = [
    pytest.param(name, marks=[pytest.mark.heavy, pytest.mark.ray]) for name in ("ray", "ray_job")
]


BENCHES = sorted(Path(__file__).parents[1].glob("backends/*/bench.py"))
"""Modules of backends with their own test folder. Each has a function `bench`; a true `UNFINISHED`
allows its tests to fail."""


def load(file: Path) -> ModuleType:
    name = f"bench_of_{file.parent.name}"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def param(file: Path) -> Any:
    unfinished = getattr(load(file), "UNFINISHED", False)
    marks = [pytest.mark.xfail(reason="being written", strict=False)] if unfinished else []
    return pytest.param(file, marks=marks, id=file.parent.name)


@pytest.fixture(
    params=["memory", "process", "agent", "mixed", *HEAVY, *RAY, *map(param, BENCHES)],
)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    match request.param:
        case Path():
            return load(request.param).bench(request, tmp_path)
        case "memory":
            return MemoryBench()
        case "process":
            return ProcessBench(tmp_path)
        case "agent":
            return AgentBench(tmp_path)
        case "mixed":
            return MixedBench(tmp_path)
        case "aws":
            return AwsBench(request.getfixturevalue("aws"), tmp_path)
        case "kubernetes":
            return KubernetesBench(request.getfixturevalue("fresh_plane"), tmp_path)
        case "ray":
            return RayBench(request.getfixturevalue("ray_world"), tmp_path)
        case "ray_job":
            return RayJobBench(request.getfixturevalue("ray_world"), tmp_path)
        case _:
            api = request.getfixturevalue("container_engine")
            return ContainerBench(tmp_path, api, request.getfixturevalue("container_image"))


@pytest.fixture
async def backend(bench: Bench) -> AsyncIterator[Backend]:
    made = bench.backend()
    yield made
    for workload in await made.discover():
        await made.stop(workload.id)
    await made.close()
    assert await bench.left() == 0


async def test_a_start_waits_until_the_workload_is_ready_and_a_stop_until_nothing_is_left(
    bench, backend
):
    workload = await backend.start(Order("a", bench.spec()))
    assert workload.phase is Phase.READY
    assert workload.id == "a"
    assert (await backend.status("a")).phase is Phase.READY
    assert [each.id for each in await backend.discover()] == ["a"]
    assert await bench.left() == 1
    await backend.stop("a")
    assert await bench.left() == 0
    with pytest.raises(UnknownWorkloadError, match="'a'"):
        await backend.status("a")
    assert list(await backend.discover()) == []


async def test_glance_reports_only_ready_workloads(bench, backend):
    """`glance` may report nothing: some backends do not know the state without a request."""
    assert backend.glance("a") is None
    ready = await backend.start(Order("a", bench.spec()))
    assert backend.glance("a") in {None, ready}
    await backend.stop("a")
    assert backend.glance("a") is None


async def test_a_second_start_of_a_name_finds_the_first_workload(bench, backend):
    first = await backend.start(Order("a", bench.spec()))
    second = await backend.start(Order("a", bench.spec()))
    assert second == first
    assert await bench.left() == 1


async def test_starts_of_one_name_at_the_same_time_make_one_workload(bench, backend):
    order = Order("a", bench.spec())
    started = await asyncio.gather(*(backend.start(order) for _ in range(4)))
    assert len(set(started)) == 1
    assert await bench.left() == 1


async def test_two_names_have_two_workloads(bench, backend):
    await asyncio.gather(*(backend.start(Order(name, bench.spec())) for name in "ab"))
    assert await bench.left() == 2
    await backend.stop("a")
    assert (await backend.status("b")).phase is Phase.READY


async def test_a_cancelled_start_leaves_no_workload(bench, backend):
    start = asyncio.create_task(backend.start(Order("a", bench.slow())))
    await asyncio.sleep(0.3)  # In the middle of the start, which takes many seconds.
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert await bench.left() == 0


async def test_a_stop_ends_a_start_under_way(bench, backend):
    """The daemon first cancels the start; then the stop removes what the start left."""
    start = asyncio.create_task(backend.start(Order("a", bench.slow())))
    await asyncio.sleep(0.3)  # As above.
    start.cancel()
    await asyncio.wait([start])
    await backend.stop("a")
    assert await bench.left() == 0
    started = await backend.start(Order("a", bench.spec()))
    assert started.phase is Phase.READY


async def test_a_second_stop_of_a_workload_and_a_stop_of_an_unknown_workload_succeed(
    bench, backend
):
    await backend.start(Order("a", bench.spec()))
    await backend.stop("a")
    await backend.stop("a")
    await backend.stop("never")
    assert await bench.left() == 0


async def test_stops_of_one_workload_at_the_same_time_all_return(bench, backend):
    await backend.start(Order("a", bench.spec()))
    await asyncio.gather(*(backend.stop("a") for _ in range(3)))
    assert await bench.left() == 0


async def test_a_start_that_takes_too_long_raises_and_leaves_nothing_behind(bench, backend):
    with pytest.raises(TimeoutError):
        await backend.start(Order("a", bench.slow(), timeout_seconds=0.3))
    assert await bench.left() == 0
    with pytest.raises(UnknownWorkloadError):
        await backend.status("a")


async def test_a_start_that_fails_half_way_says_why_and_leaves_nothing_behind(bench, backend):
    spec, reason = bench.failing()
    with pytest.raises(BackendError, match=reason):
        await backend.start(Order("a", spec))
    assert await bench.left() == 0
    assert list(await backend.discover()) == []


async def test_after_a_failure_the_name_of_the_workload_can_be_started_again(bench, backend):
    """A lease whose workload failed starts it again under the same name."""
    failing, _ = bench.failing()
    with pytest.raises(BackendError):
        await backend.start(Order("a", failing))
    dying, _ = bench.dying()
    await backend.start(Order("a", dying))

    async def over() -> bool:
        return (await backend.status("a")).phase.over

    await until(over)
    await backend.stop("a")
    assert (await backend.start(Order("a", bench.spec()))).phase is Phase.READY
    assert (await backend.status("a")).phase is Phase.READY
    assert await bench.left() == 1


async def test_a_backend_adopts_running_workloads_after_a_crash(bench, backend):
    await backend.start(Order("a", bench.spec()))
    after = bench.backend()  # As after a kill: the first backend is not closed.
    assert [each.id for each in await after.discover()] == ["a"]
    assert (await after.status("a")).phase is Phase.READY
    adopted = await after.start(Order("a", bench.spec()))
    assert adopted.phase is Phase.READY
    assert await bench.left() == 1
    await after.stop("a")
    assert await bench.left() == 0
    await after.close()


async def test_a_listener_of_the_backend_gets_the_end_of_a_workload(bench, backend):
    reports: list[WorkloadReport] = []
    backend.listen(reports.append)
    spec, code = bench.dying()
    await backend.start(Order("a", spec))
    await until(lambda: any(each.phase.over for each in reports))
    last = reports[-1]
    assert last.phase is (Phase.FAILED if code else Phase.SUCCEEDED)
    assert last.exit_code in {code, None}
    assert [each.id for each in await backend.discover()] == ["a"], "a stop removes it"
    await backend.stop("a")
    assert list(await backend.discover()) == []


async def test_a_workload_that_ended_during_a_crash_is_not_restarted(bench, backend):
    spec, _ = bench.dying()
    await backend.start(Order("a", spec))

    async def over() -> bool:
        return (await backend.status("a")).phase.over

    await until(over)
    after = bench.backend()
    again = await after.start(Order("a", spec))
    assert again.phase.over
    await after.stop("a")
    await after.close()


async def test_a_listener_of_the_backend_gets_the_start_and_the_stop_of_a_workload(bench, backend):
    reports: list[WorkloadReport] = []
    backend.listen(reports.append)
    await backend.start(Order("a", bench.spec()))
    await backend.stop("a")
    phases = [each.phase for each in reports]
    assert phases[-2:] == [Phase.READY, Phase.STOPPED]
    assert Phase.STARTING in phases


async def test_limits_of_a_running_workload_change_or_are_refused_by_name(bench, backend):
    await backend.start(Order("a", bench.spec()))
    if limits := bench.limits():
        await backend.control("a", limits)
    assert limits.keys() <= backend.support.limits
    with pytest.raises(UnsupportedSpecError, match="shoe_size"):
        await backend.control("a", {"shoe_size": 45})
    with pytest.raises(UnknownWorkloadError):
        await backend.control("nobody", limits)


async def test_a_reset_leaves_the_workload_ready_or_is_refused(bench, backend):
    await backend.start(Order("a", bench.spec()))
    if backend.support.reset:
        await backend.reset("a")
    else:
        with pytest.raises(UnsupportedSpecError):
            await backend.reset("a")
    assert (await backend.status("a")).phase is Phase.READY
    with pytest.raises(UnknownWorkloadError):
        await backend.reset("nobody")


async def test_a_spec_of_another_backend_is_refused_before_any_resource_is_held(bench, backend):
    spec = ProcessResourceSpec(command=["true"])
    if spec.category in backend.support.categories:
        backend.refuse(spec)
    else:
        with pytest.raises(UnsupportedSpecError, match="process"):
            backend.refuse(spec)


async def test_a_backend_returns_logs_and_runs_commands_or_refuses_both(bench, backend):
    await backend.start(Order("a", bench.spec()))
    if backend.support.execute:
        done = await backend.execute("a", ("/bin/sh", "-c", "echo hello; exit 3"))
        assert (done.exit_code, done.output) == (3, "hello\n")
        with pytest.raises(TimeoutError):
            await backend.execute("a", ("sleep", "30"), timeout_seconds=0.3)
    else:
        with pytest.raises(UnsupportedSpecError):
            await backend.execute("a", ("true",))
    if backend.support.logs:
        assert not (await backend.logs("a")).over
    else:
        with pytest.raises(UnsupportedSpecError):
            await backend.logs("a")


async def test_workloads_continue_after_the_backend_is_closed(bench, backend):
    await backend.start(Order("a", bench.spec()))
    await backend.close()
    assert await bench.left() == 1
    after = bench.backend()
    assert [each.id for each in await after.discover()] == ["a"]
    await after.stop("a")
    await after.close()


async def test_a_gang_fails_when_one_member_is_lost(bench, backend):
    """A backend opened after a crash also reports the failure; a stop removes the other member."""
    gang = bench.gang()
    if gang is None:
        assert not backend.support.gangs or isinstance(bench, RayJobBench)
        return
    order, lose = gang
    reports: list[WorkloadReport] = []
    backend.listen(reports.append)
    assert (await backend.start(order)).phase is Phase.READY
    node = await lose()
    await until(lambda: any(each.phase is Phase.FAILED for each in reports))
    assert node in next(each.detail for each in reports if each.phase is Phase.FAILED)
    for look in (backend.status, backend.probe):
        assert (await look("a")).phase is Phase.FAILED
    assert backend.glance("a") is None
    assert [each.phase for each in await backend.discover()] != [Phase.READY]
    after = bench.backend()
    assert [each.phase for each in await after.discover()] != [Phase.READY]
    with contextlib.suppress(BackendError):  # A backend may also refuse the start.
        assert (await after.start(replace(order, resumed=True))).phase is Phase.FAILED
    await after.stop("a")
    await backend.stop("a")
    await until(none_remain(bench))
    await after.close()


def none_remain(bench: Bench) -> Callable[[], Any]:
    async def left() -> bool:
        return await bench.left() == 0

    return left


RUNS = int(os.environ.get("OUTPUT_RUNS", "8"))


async def test_the_output_of_a_command_is_complete_however_fast_the_command_ends(bench, backend):
    """Many commands run at a time; each is stopped as soon as it has ended, as a daemon does."""
    writing = bench.writing()
    if writing is None:
        return
    ended: dict[str, asyncio.Event] = {f"w{number}": asyncio.Event() for number in range(RUNS)}
    loop = asyncio.get_running_loop()

    def note(report: WorkloadReport) -> None:
        if report.phase in {Phase.SUCCEEDED, Phase.FAILED}:
            loop.call_soon_threadsafe(ended[report.id].set)

    backend.listen(note)
    slots = asyncio.Semaphore(5)

    async def run(name: str) -> str:
        async with slots:
            report = await backend.start(Order(name, writing))
            if not report.phase.over:
                await ended[name].wait()
            await backend.stop(name)
            log = await backend.logs(name)
            while not log.over:
                log = await backend.logs(name)
            return log.text

    async with asyncio.timeout(SEEN_SECONDS_MAX * RUNS):
        texts = await asyncio.gather(*(run(name) for name in ended))
    assert [text.splitlines()[-1:] for text in texts] == [["last"]] * RUNS
    assert {len(text.splitlines()) for text in texts} == {301}

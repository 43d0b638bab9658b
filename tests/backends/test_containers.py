"""Tests of containers on this machine that the conformance suite of backends lacks."""

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any, ClassVar

import httpx
import pytest

from moorage.backends.base import BackendError, Order, Phase, UnsupportedSpecError, WorkloadReport
from moorage.backends.local.backend import LocalBackend
from moorage.backends.local.container_api import ContainerApi, find_socket
from moorage.backends.local.container_plans import ContainerPlan, plan
from moorage.backends.local.containers import Containers
from moorage.backends.local.deadline import HeardFile, now
from moorage.backends.local.devices import Devices
from moorage.backends.local.readiness import answers
from moorage.backends.spec_fields import NO_DEVICES
from moorage.backends.specs import ContainerResourceSpec, Readiness
from moorage.model import ClusterId, NodeId, Share
from tests.waiting import until

HEARD_SECONDS_MAX = 60
GPU = "moorage-test-0"


def share(**fields: Any) -> Share:
    return Share(ClusterId("lab"), NodeId("here"), **fields)


def make_plan(spec: ContainerResourceSpec, *placement: Share, **fields: Any) -> ContainerPlan:
    order = Order("a", spec, placement, **fields)
    grant = Devices(["u0", "u1"], {}).take(order)
    return plan(order, spec, grant, "name", {})


# Arguments for the container engine ------------------------------------------------------------


def test_a_containers_default_limits_are_those_of_its_lease():
    lease = share(gpus=("3", "GPU-aa"), cpu_milli=1500, memory_mib=64)
    made = make_plan(ContainerResourceSpec(), lease)
    assert made.devices == ["nvidia.com/gpu=3", "nvidia.com/gpu=GPU-aa"]
    assert (made.cpu_count, made.memory_bytes) == (1.5, 64 << 20)
    assert made.image == "ubuntu:22.04"
    made = make_plan(ContainerResourceSpec(cpu_count=0.5, mem_limit="1g", gpus="all"), lease)
    assert (made.cpu_count, made.memory_bytes) == (0.5, 1 << 30)
    assert len(made.devices) == 2, "only the devices of the lease"


def test_without_a_lease_a_spec_gives_the_number_or_names_of_gpus():
    assert make_plan(ContainerResourceSpec()).devices == []
    assert len(make_plan(ContainerResourceSpec(gpus=2)).devices) == 2
    assert make_plan(ContainerResourceSpec(gpus="all")).devices == ["nvidia.com/gpu=all"]
    assert make_plan(ContainerResourceSpec(gpus=["1"])).devices == ["nvidia.com/gpu=1"]
    with pytest.raises(UnsupportedSpecError, match="gpus"):
        make_plan(ContainerResourceSpec(gpus=3))


def test_an_image_cannot_give_gpus_to_a_container_that_has_no_gpus():
    environment = make_plan(ContainerResourceSpec(), share()).environment
    assert environment == NO_DEVICES
    part = share(gpus=("0",), gpu_milli=250)
    environment = make_plan(ContainerResourceSpec(environment={"A": "1"}), part).environment
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert environment["A"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in environment, "inside, GPUs are numbered from 0"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    own = ContainerResourceSpec(environment={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert make_plan(own, part).environment["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_ports_of_the_readiness_check_are_published():
    spec = ContainerResourceSpec(
        ports={80: 8080}, container_port=81, readiness=Readiness(path="/", port=82)
    )
    assert make_plan(spec).ports == {80: 8080, 81: 0, 82: 0}
    assert make_plan(spec).host_ip == "127.0.0.1"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mount": {"data": "/data"}}, "mount: expected absolute paths"),
        ({"mount": {"/data": "data:ro"}}, "mount: expected absolute paths"),
        ({"mount": {"/data": "/data:ro,rslave"}}, "mount: expected options among .*'rslave'"),
        ({"readiness": Readiness(path="/health")}, "readiness: expected a container_port"),
    ],
)
def test_an_impossible_spec_is_refused_before_a_lease(tmp_path, monkeypatch, fields, reason):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(UnsupportedSpecError, match=reason):
        LocalBackend(tmp_path).refuse(ContainerResourceSpec(**fields))


@pytest.mark.heavy
@pytest.mark.containers
@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("unix:///nowhere/docker.sock", "no container engine is reachable .*/nowhere/docker.sock"),
        ("tcp://elsewhere:2375", "DOCKER_HOST is tcp://elsewhere:2375"),
    ],
)
def test_without_a_container_engine_a_refusal_of_containers_has_the_reason(
    tmp_path, monkeypatch, host, reason
):
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(UnsupportedSpecError, match=reason):
        LocalBackend(tmp_path).refuse(ContainerResourceSpec())


@pytest.mark.heavy
@pytest.mark.containers
async def test_a_container_in_an_unknown_state_stays_recorded(tmp_path, monkeypatch):
    """The container engine may return with the container, so its GPUs must not count as free."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    folder = tmp_path / "containers" / "running" / "a"
    folder.mkdir(parents=True)
    (folder / "order.json").write_text(json.dumps({"id": "a", "stop_seconds": 0}))
    backend = LocalBackend(tmp_path)
    (found,) = await backend.discover()
    assert (found.id, found.phase) == ("a", Phase.PENDING)
    assert "no container engine is reachable" in found.detail
    with pytest.raises(BackendError, match="no container engine is reachable"):
        await backend.stop("a")
    assert len(await backend.discover()) == 1
    await backend.close()


@pytest.mark.parametrize("hangs_up", [True, False])
async def test_a_port_with_only_the_engines_proxy_is_not_ready(hangs_up):
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not hangs_up:
            await reader.read()
        writer.close()

    async def run(*_: object) -> int:
        raise AssertionError("there is no command to run")

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await answers(Readiness(), "127.0.0.1", port, run)
        seen = await answers(Readiness(), "127.0.0.1", port, run, proxied=True)
        assert seen is not hangs_up


class QuickEngine(BaseHTTPRequestHandler):
    """A container engine whose commands have written output when it answers, as on a busy machine.

    It answers as Podman does, also to a client that wants to upgrade the connection.
    """

    def do_GET(self) -> None:  # The library's name.
        ping = self.path.endswith("/_ping")
        status, body = (200, b"OK") if ping else self.describe()
        self.send_response(status)
        self.send_header("Api-Version", "1.41")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def describe(self) -> tuple[int, bytes]:
        """Return the status and body of the answer to a question about a command or container."""
        return 200, b'{"ExitCode": 7}'

    def do_POST(self) -> None:  # The library's name.
        self.rfile.read(int(self.headers["content-length"]))
        head = b"HTTP/1.1 200 OK\r\n"
        if "upgrade" in self.headers:
            head = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
        frames = [b"\1\0\0\0\0\0\0" + bytes([len(each)]) + each for each in (b"one\n", b"two\n")]
        kind = b"Content-Type: application/vnd.docker.raw-stream\r\n\r\n"
        self.wfile.write(head + kind + b"".join(frames))

    def address_string(self) -> str:
        """Return no address, since a Unix socket has no address."""
        return ""

    def log_message(self, *_: object) -> None:
        """Write no log."""


@contextlib.contextmanager
def connected(kind: type[QuickEngine], folder: Path) -> Iterator[ContainerApi]:
    """Serve an engine at a socket in a folder; yield a connection to the engine."""
    place = folder / "engine.sock"
    with ThreadingUnixStreamServer(str(place), kind) as engine:
        serving = threading.Thread(target=engine.serve_forever)
        serving.start()
        try:
            with contextlib.closing(ContainerApi(place)) as api:
                yield api
        finally:
            engine.shutdown()
            serving.join()


class RacingEngine(QuickEngine):
    """Fails as Podman does if it looks at a container while the container ends."""

    answers: ClassVar[list[tuple[int, bytes]]] = []

    def describe(self) -> tuple[int, bytes]:
        return self.answers.pop(0)


@pytest.mark.heavy
@pytest.mark.containers
def test_the_backend_looks_again_at_a_container_that_ended_while_podman_looked(tmp_path):
    ended = {"Id": "c1", "State": {"Status": "exited", "ExitCode": 3}, "HostConfig": {}}
    gone = {"cause": "no such process", "message": "read /proc/28245/cgroup: no such process"}
    broken = {"cause": "disk", "message": "the disk is broken"}
    failures = [(500, json.dumps(each).encode()) for each in (gone, broken)]
    RacingEngine.answers[:] = [failures[0], (200, json.dumps(ended).encode()), failures[1]]
    with connected(RacingEngine, tmp_path) as api:
        seen = api.inspect("c1")
        assert seen is not None
        assert (seen.ended, seen.exit_code) == (True, 3)
        with pytest.raises(BackendError, match="the disk is broken"):
            api.inspect("c1")


@pytest.mark.heavy
@pytest.mark.containers
def test_output_that_comes_together_with_the_answer_is_not_lost(tmp_path):
    with connected(QuickEngine, tmp_path) as api:
        assert api.run_command("c1") == (7, "one\ntwo\n")


# Real containers -----------------------------------------------------------------------------


@pytest.fixture
async def backend(tmp_path: Path, container_engine: Any) -> AsyncIterator[LocalBackend]:
    made = LocalBackend(tmp_path / "root")
    yield made
    for workload in await made.discover():
        await made.stop(workload.id)
    await made.close()
    assert container_engine.containers(all=True) == []


@pytest.fixture
def gpu() -> Iterator[str]:
    """A CDI device that does not exist, described as NVIDIA's tools describe real devices."""
    folder = Path("/var/run/cdi")
    made = not folder.exists()
    node = {"path": f"/dev/{GPU}", "hostPath": "/dev/null", "type": "c", "major": 1, "minor": 3}
    device = {"name": GPU, "containerEdits": {"deviceNodes": [node]}}
    document = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [device]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "moorage-test.json").write_text(json.dumps(document))
    yield GPU
    (folder / "moorage-test.json").unlink()
    if made:
        shutil.rmtree(folder)


def shell(image: str, script: str, **fields: Any) -> ContainerResourceSpec:
    fields = {"stop_seconds": 0, **fields}
    return ContainerResourceSpec(image=image, command=["sh", "-c", script], **fields)


async def inside(backend: LocalBackend, script: str, **options: Any) -> str:
    return (await backend.execute("a", ("sh", "-c", script), **options)).output


@pytest.mark.heavy
def test_str_of_an_engine_has_its_name_and_version(container_engine):
    version = container_engine.version()["Version"]
    with contextlib.closing(ContainerApi(find_socket())) as api:
        assert str(api) == f"Podman {version} at {find_socket()}"


@pytest.mark.heavy
async def test_a_container_gets_its_ports_mounts_and_variables(tmp_path, backend, container_image):
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text("from outside")
    spec = shell(
        container_image,
        "exec httpd -f -p 8080 -h /page",
        container_port=8080,
        mount={str(tmp_path / "page"): "/page:ro,rbind", str(tmp_path): "/here"},
        environment={"COLOUR": "blue"},
        readiness=Readiness(path="/index.html"),
    )
    order = Order("a", spec, environment={"MOORAGE_LEASE_ID": "lease-1"})
    started = await backend.start(order)
    assert started.phase is Phase.READY
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{started.endpoint}/index.html")).text == "from outside"
    assert (await backend.status("a")).endpoint == started.endpoint
    assert await inside(backend, "echo $COLOUR $MOORAGE_LEASE_ID") == "blue lease-1\n"
    assert "Read-only" in await inside(backend, "echo x > /page/x")
    await inside(backend, "echo written > /here/x")
    assert (tmp_path / "x").read_text() == "written\n"
    options = {"workdir": "/page", "user": "12:34", "environment": {"B": "2"}}
    assert await inside(backend, "pwd; id -u; id -g; echo $B", **options) == "/page\n12\n34\n2\n"


@pytest.mark.heavy
async def test_a_taken_port_fails_the_start_with_address_in_use(backend, container_image):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BackendError, match="address already in use"):
            await backend.start(Order("a", shell(container_image, "sleep 99", ports={80: port})))


@pytest.mark.heavy
async def test_limits_of_a_container_are_enforced_and_change_while_the_container_runs(
    backend, container_image
):
    spec = shell(container_image, "sleep 1000", cpu_count=0.5, mem_limit="64m")
    await backend.start(Order("a", spec))
    read = (
        "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/cpu/cpu.cfs_quota_us"
        " || cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/cpu.max"
    )
    assert (await inside(backend, f"({read}) 2>/dev/null")).split()[:2] == ["67108864", "50000"]
    await backend.control("a", {"cpu_count": 1, "mem_limit": "128m"})
    assert (await inside(backend, f"({read}) 2>/dev/null")).split()[:2] == ["134217728", "100000"]
    await backend.control("a", {"mem_limit": "96m"})
    assert (await inside(backend, f"({read}) 2>/dev/null")).split()[:2] == ["100663296", "100000"]
    with pytest.raises(UnsupportedSpecError, match="mem_limit"):
        await backend.control("a", {"mem_limit": "much"})


@pytest.mark.heavy
async def test_a_container_over_its_memory_limit_is_killed_and_reported(backend, container_image):
    reports: asyncio.Queue[WorkloadReport] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    backend.listen(lambda news: loop.call_soon_threadsafe(reports.put_nowait, news))
    greedy = "sleep 0.5; exec tail -c 200m /dev/zero"
    await backend.start(Order("a", shell(container_image, greedy, mem_limit="32m")))
    async with asyncio.timeout(HEARD_SECONDS_MAX):
        while not (news := await reports.get()).phase.over:
            pass
    assert news.phase is Phase.FAILED
    assert news.exit_code == -9
    assert "more memory than its mem_limit" in news.detail


@pytest.mark.heavy
async def test_gpus_of_the_lease_are_passed_by_cdi(backend, container_image, gpu, tmp_path):
    spec = shell(
        container_image, "sleep 1000", cpu_count=0.5, mem_limit="64m", container_port=80,
        mount={str(tmp_path): "/here:ro"}, environment={"A": "1"},
    )  # fmt: skip
    await backend.start(Order("a", spec, (share(gpus=(gpu,)),)))
    seen = await inside(
        backend, f"ls /dev/{gpu}; echo $A $NVIDIA_VISIBLE_DEVICES; ls -d /here/root"
    )
    assert seen == f"/dev/{gpu}\n1 void\n/here/root\n"
    assert (await backend.status("a")).endpoint.startswith("http://127.0.0.1:")
    assert "Read-only" in await inside(backend, "touch /here/x")


@pytest.mark.heavy
async def test_a_gpu_that_the_container_engine_does_not_know_fails_the_start(
    backend, container_image
):
    order = Order("a", shell(container_image, "sleep 1000"), (share(gpus=("unheard-of",)),))
    with pytest.raises(BackendError, match=r"nvidia\.com/gpu=unheard-of"):
        await backend.start(order)


@pytest.mark.heavy
async def test_an_image_is_pulled_and_the_backend_reports_the_pull(backend):
    reports: list[WorkloadReport] = []
    backend.listen(reports.append)
    with pytest.raises(BackendError, match=r"127.0.0.1:1/no/such:1 cannot be pulled: .*refused"):
        await backend.start(Order("a", ContainerResourceSpec(image="127.0.0.1:1/no/such:1")))
    assert [each.phase for each in reports] == [Phase.PULLING]
    assert "127.0.0.1:1/no/such:1" in reports[0].detail


@pytest.mark.heavy
async def test_a_paused_or_silent_container_is_not_usable(
    backend, container_engine, container_image
):
    probe = Readiness(command=["test", "-e", "/good"], every_seconds=0.05)
    script = "touch /good; exec sleep 1000"
    await backend.start(Order("a", shell(container_image, script, readiness=probe)))
    await backend.start(Order("b", shell(container_image, "exec sleep 1000")))
    for name in ("a", "b"):
        assert (await backend.probe(name)).phase is Phase.READY
    await backend.execute("a", ("rm", "/good"))
    for each in container_engine.containers():
        if each["Labels"].get("moorage.workload") == "b":
            container_engine.pause(each["Id"])
    for name in ("a", "b"):
        assert (await backend.probe(name)).phase is Phase.STARTING


async def test_readers_get_output_by_offsets_and_the_output_outlasts_the_container(
    backend, container_image
):
    script = (
        "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done; sleep 0.5; echo wrong >&2"
    )
    await backend.start(Order("a", shell(container_image, f"{script}; exec sleep 1000")))
    whole = "".join(f"line {number}\n" for number in range(2000)) + "wrong\n"
    async with asyncio.timeout(HEARD_SECONDS_MAX):
        while (log := await backend.logs("a")).text != whole:
            pass  # The container still writes.
    assert (log.offset, log.over) == (len(whole), False)
    assert (await backend.logs("a", 100)).text == whole[100:]
    assert (await backend.logs("a", -6)) == type(log)("wrong\n", len(whole))
    assert (await backend.logs("a", len(whole))).text == ""
    await backend.stop("a")
    stored = await backend.logs("a")
    assert (stored.text, stored.over) == (whole, True)


@pytest.mark.heavy
async def test_a_command_that_takes_too_long_is_killed_with_all_processes_that_it_started(
    backend, container_image
):
    await backend.start(Order("a", shell(container_image, "exec sleep 1000")))
    with pytest.raises(TimeoutError, match=r"sh ran longer than 0\.5 s"):
        await inside(backend, "setsid sleep 555 & sleep 555", timeout_seconds=0.5)
    assert "sleep 555" not in (await inside(backend, "ps -o args")).replace("ps -o", "")
    begun = asyncio.create_task(backend.execute("a", ("sleep", "555")))
    async with asyncio.timeout(HEARD_SECONDS_MAX):
        while "sleep 555" not in await inside(backend, "ps -o args | grep -v grep"):
            pass  # The command has not started yet; it then runs for minutes.
    begun.cancel()
    with pytest.raises(asyncio.CancelledError):
        await begun
    assert "sleep 555" not in await inside(backend, "ps -o args | grep -v grep")
    code = (await backend.execute("a", ("sh", "-c", "kill -9 $$"))).exit_code
    assert code == -9


@pytest.mark.heavy
async def test_a_container_that_a_killed_daemon_had_just_created_is_adopted(
    tmp_path, backend, container_engine, container_image
):
    """The daemon is killed after it created the container; the name finds that container again."""
    spec = shell(container_image, "exec sleep 1000")
    await backend.start(Order("a", spec))
    (before,) = container_engine.containers()
    for name in ("container.json", "ready.json"):
        (tmp_path / "root" / "containers" / "running" / "a" / name).unlink()
    after = LocalBackend(tmp_path / "root")
    assert (await after.start(Order("a", spec))).phase is Phase.READY
    assert [each["Id"] for each in container_engine.containers(all=True)] == [before["Id"]]
    await after.close()


@pytest.mark.heavy
async def test_a_container_without_its_folder_is_stopped(
    tmp_path, backend, container_engine, container_image
):
    await backend.start(Order("a", shell(container_image, "exec sleep 1000")))
    shutil.rmtree(tmp_path / "root" / "containers" / "running" / "a")
    after = LocalBackend(tmp_path / "root")
    assert [each.id for each in await after.discover()] == ["a"]
    await after.stop("a")
    assert container_engine.containers(all=True) == []
    await after.close()


@pytest.mark.heavy
async def test_a_container_removed_from_outside_has_failed_and_does_not_start_again(
    backend, container_engine, container_image
):
    reports: asyncio.Queue[WorkloadReport] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    await backend.start(Order("a", shell(container_image, "exec sleep 1000")))
    backend.listen(lambda news: loop.call_soon_threadsafe(reports.put_nowait, news))
    (found,) = container_engine.containers()
    await asyncio.to_thread(container_engine.kill, found["Id"])
    await asyncio.to_thread(container_engine.remove_container, found["Id"], force=True)
    async with asyncio.timeout(HEARD_SECONDS_MAX):
        assert (await reports.get()).phase is Phase.FAILED
    again = await backend.start(Order("a", shell(container_image, "exec sleep 1000")))
    assert again.phase is Phase.FAILED
    assert container_engine.containers(all=True) == []


@pytest.mark.heavy
async def test_the_end_is_the_last_report_of_a_container(
    backend, container_engine, container_image, monkeypatch
):
    """The container ends after the check that finds it ready, and before the report."""
    phases: list[Phase] = []
    ended, loop, answers_at_once = asyncio.Event(), asyncio.get_running_loop(), Containers._answers

    def listen(news: WorkloadReport) -> None:
        phases.append(news.phase)
        if news.phase.over:
            loop.call_soon_threadsafe(ended.set)

    async def answers_before_its_end(*arguments: Any) -> bool:
        running = await answers_at_once(*arguments)
        if running:
            (found,) = container_engine.containers()
            await asyncio.to_thread(container_engine.kill, found["Id"])
            await asyncio.wait_for(ended.wait(), HEARD_SECONDS_MAX)
        return running

    backend.listen(listen)
    monkeypatch.setattr(Containers, "_answers", answers_before_its_end)
    await backend.start(Order("a", shell(container_image, "exec sleep 1000")))
    assert phases == [Phase.STARTING, Phase.FAILED]


@pytest.mark.heavy
async def test_a_container_ends_when_the_server_is_silent_too_long(
    tmp_path, backend, container_image
):
    agent = HeardFile(tmp_path / "root", 3_600.0)
    agent.note_agreement(now())
    reports: asyncio.Queue[WorkloadReport] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    await backend.start(Order("a", shell(container_image, "exec sleep 1000")))
    backend.listen(lambda news: loop.call_soon_threadsafe(reports.put_nowait, news))
    HeardFile(tmp_path / "root", 0.001)
    async with asyncio.timeout(HEARD_SECONDS_MAX):
        assert (await reports.get()).phase is Phase.FAILED
    with pytest.raises(BackendError, match="not heard the server"):
        await backend.start(Order("b", shell(container_image, "exec sleep 1000")))
    HeardFile(tmp_path / "root", 0.0).note_agreement(now())  # Lets the guards of the container end.


_LIBRARY = """
import asyncio, sys
from moorage.resources import ContainerResourceSpec, ResourceEngine

async def main():
    spec = ContainerResourceSpec(image=sys.argv[1], command=["sleep", "1000"])
    await ResourceEngine.acquire("a", spec)
    print("ready", flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


@pytest.mark.heavy
def test_containers_of_the_library_end_with_the_process_that_uses_the_library(
    container_engine, container_image
):
    with subprocess.Popen(
        [sys.executable, "-c", _LIBRARY, container_image],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"ready\n"
        assert len(container_engine.containers()) == 1
        program.kill()
    until(lambda: not container_engine.containers(all=True))

"""Tests of processes on this machine that the conformance suite of backends lacks."""

import asyncio
import contextlib
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from moorage.backends.base import (
    BackendError,
    Order,
    Phase,
    UnknownAttemptError,
    UnknownWorkloadError,
    UnsupportedSpecError,
)
from moorage.backends.local import control_groups, supervisor, workload_store
from moorage.backends.local.backend import LocalBackend
from moorage.backends.local.deadline import HeardFile, now
from moorage.backends.local.workload_store import WorkloadStore
from moorage.backends.specs import ProcessResourceSpec, Readiness, ServiceResourceSpec
from moorage.model import ClusterId, NodeId, Share

SEEN_SECONDS_MAX = 60


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    made = LocalBackend(tmp_path)
    yield made
    for workload in await made.discover():
        await made.stop(workload.id)
    await made.close()


def noting(folder: Path, then: str = "true") -> ProcessResourceSpec:
    """Return a command that writes a line when it starts."""
    return ProcessResourceSpec(command=["sh", "-c", f"echo $$ >> {folder}/starts; {then}"])


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().split() if (folder / "starts").exists() else []


async def wait_starts(folder: Path, times: int) -> list[str]:
    """Wait until a file lists `times` starts; return their processes."""
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        while len(starts(folder)) < times:  # noqa: ASYNC110  # No event of another process.
            await asyncio.sleep(0.02)  # A file does not report that it has grown.
    return starts(folder)


def supervise(folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Run a supervisor over a folder with an order, until the supervisor ends."""
    command = [sys.executable, "-I", "-S", supervisor.__file__, str(folder), "1"]
    return subprocess.run(command, check=False, capture_output=True, timeout=SEEN_SECONDS_MAX)


def marks(folder: Path) -> set[str]:
    """Return the processes that belong to workloads of a backend."""
    found = set()
    for each in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                each.name.isdigit()
                and b"=%s/" % str(folder).encode() in (each / "environ").read_bytes()
            ):
                found.add(each.name)
    return found


async def over(backend: LocalBackend, workload: str) -> None:
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        while not (await backend.status(workload)).phase.over:  # noqa: ASYNC110  # As above.
            await asyncio.sleep(0.02)  # A process does not report here that it has ended.


async def test_a_quick_check_notices_a_dead_process_at_once(backend, tmp_path):
    ready = await backend.start(Order("a", ProcessResourceSpec(command=["sleep", "1000"])))
    assert backend.glance("a") == ready
    before = LocalBackend(tmp_path)  # As after a crash of the daemon.
    assert before.glance("a") is None
    await before.discover()
    assert before.glance("a") == ready
    (process,) = (tmp_path / "running").glob("*/process.json")
    supervisor_pid = json.loads(process.read_text())["supervisor"]
    watched = os.pidfd_open(supervisor_pid)
    os.kill(supervisor_pid, signal.SIGKILL)
    select.select([watched], [], [], SEEN_SECONDS_MAX)
    assert backend.glance("a") is None
    assert before.glance("a") is None
    os.close(watched)
    await before.close()


async def test_a_dead_command_is_not_ready_before_its_supervisors_report(backend, tmp_path):
    await backend.start(Order("a", ProcessResourceSpec(command=["sleep", "1000"])))
    (process,) = (tmp_path / "running").glob("*/process.json")
    noted = json.loads(process.read_text())
    os.kill(noted["supervisor"], signal.SIGSTOP)  # As if it had had no time to report.
    try:
        watched = os.pidfd_open(noted["pid"])
        os.kill(noted["pid"], signal.SIGKILL)
        select.select([watched], [], [], SEEN_SECONDS_MAX)
        os.close(watched)
        assert backend.glance("a") is None
        assert (await backend.probe("a")).phase is not Phase.READY
    finally:
        os.kill(noted["supervisor"], signal.SIGCONT)


async def test_a_supervisor_that_starts_after_the_end_starts_nothing(backend, tmp_path):
    """The daemon is killed after it started a supervisor; the next daemon starts a second one."""
    await backend.start(Order("a", noting(tmp_path)))
    await over(backend, "a")
    late = supervise(tmp_path / "running" / "a")
    assert late.returncode == 1
    assert json.loads(late.stdout) == {"begun": True}
    assert len(starts(tmp_path)) == 1


async def test_a_supervisor_that_starts_after_the_stop_starts_nothing(backend, tmp_path):
    await backend.start(Order("a", noting(tmp_path)))
    await over(backend, "a")
    folder = tmp_path / "running" / "a"
    for name in ("process.json", "exit.json"):
        (folder / name).unlink()
    (folder / "stop").touch()
    assert supervise(folder).returncode == 1
    await backend.stop("a")
    assert supervise(folder).returncode == 1, "the workload's folder is gone"
    assert len(starts(tmp_path)) == 1


async def test_a_recorded_start_order_is_carried_out_after_a_crash(backend, tmp_path):
    """The daemon was killed between the order and the start of its supervisor."""
    await backend.start(Order("a", noting(tmp_path)))
    await over(backend, "a")
    folder = tmp_path / "running" / "a"
    for name in ("process.json", "exit.json", "ready.json"):
        (folder / name).unlink(missing_ok=True)
    before = (folder / "order.json").read_bytes()
    after = LocalBackend(tmp_path)
    await after.start(Order("a", noting(tmp_path)))
    await over(after, "a")
    assert (folder / "order.json").read_bytes() == before
    assert len(starts(tmp_path)) == 2
    await after.close()


@pytest.mark.parametrize("name", ["no-such-program", "/", "x" * 100_000])
async def test_a_program_that_cannot_be_run_fails_each_start(backend, name):
    for _ in range(5):  # The supervisor may have ended or not when its report is read.
        with pytest.raises(BackendError, match=r"the command did not start: [x/n]"):
            await backend.start(Order("a", ProcessResourceSpec(command=[name])))
    assert list(await backend.discover()) == []


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "3,PCI_BUS_ID"),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "3,FASTEST_FIRST"),
    ],
    ids=["the devices of the lease override the spec", "the order of the spec takes effect"],
)
async def test_a_workload_sees_the_devices_of_its_lease(backend, tmp_path, environment, seen):
    held = Share(ClusterId("lab"), NodeId("here"), gpus=("3",))
    command = ["sh", "-c", f"echo $CUDA_VISIBLE_DEVICES,$CUDA_DEVICE_ORDER >> {tmp_path}/starts"]
    spec = ProcessResourceSpec(command=command, environment=environment)
    await backend.start(Order("a", spec, (held,)))
    assert await wait_starts(tmp_path, 1) == [seen]


async def test_a_lease_with_too_many_processors_is_refused(backend):
    held = Share(ClusterId("lab"), NodeId("here"))
    spec = ProcessResourceSpec(command=["true"], cpu_count=60_000)
    with pytest.raises(UnsupportedSpecError, match="does not have the requested resources"):
        await backend.start(Order("a", spec, (held,)))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (ServiceResourceSpec(command=["sleep", "9"], host="no such host"), "not known"),
        (ServiceResourceSpec(command=["sleep", "9"], host="x" * 300), "host|label|Name"),
    ],
)
async def test_a_system_error_fails_only_its_workload(backend, spec, reason):
    """An unknown error would end the daemon, and the next daemon would start the lease again."""
    with pytest.raises(BackendError, match=reason):
        await backend.start(Order("a", spec))
    assert list(await backend.discover()) == []


async def test_a_command_ignores_no_signal(backend, tmp_path):
    """Python ignores SIGPIPE; a shell that starts a background process has it ignore SIGINT."""
    said = f"grep SigIgn /proc/self/status | cut -f2 > {tmp_path}/new; mv {tmp_path}/new"
    spec = ProcessResourceSpec(command=["sh", "-c", f"{said} {tmp_path}/starts"])
    await backend.start(Order("a", spec))
    (ignored,) = await wait_starts(tmp_path, 1)
    ours = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    assert [each for each in ours if int(ignored, 16) >> (each - 1) & 1] == []


async def test_exec_returns_although_a_child_process_of_the_command_still_runs(backend, tmp_path):
    await backend.start(Order("a", ProcessResourceSpec(command=["sleep", "1000"])))
    script = "setsid sleep 1000 & echo $! done"
    done = await backend.execute("a", ("sh", "-c", script), timeout_seconds=SEEN_SECONDS_MAX)
    left, word = done.output.split()
    assert (done.exit_code, word) == (0, "done")
    assert left in marks(tmp_path), "the background process still runs"
    await backend.stop("a")
    assert marks(tmp_path) == set(), "it ends with the workload"


async def test_processes_left_by_exec_end_before_the_next_user(backend, tmp_path):
    await backend.start(Order("a", ProcessResourceSpec(command=["sleep", "1000"])))
    before = marks(tmp_path)
    await backend.execute("a", ("sh", "-c", "setsid sleep 1000 &"))
    assert marks(tmp_path) > before
    with pytest.raises(UnsupportedSpecError):  # The spec has no reset_command.
        await backend.reset("a")
    assert marks(tmp_path) == before


async def test_a_command_that_takes_too_long_is_killed_with_all_processes_that_it_started(
    backend, tmp_path
):
    await backend.start(Order("a", ProcessResourceSpec(command=["sleep", "1000"])))
    before = marks(tmp_path)
    script = "setsid sleep 1000 & sleep 1000"
    with pytest.raises(TimeoutError, match=r"longer than 0\.5 s"):
        await backend.execute("a", ("sh", "-c", script), timeout_seconds=0.5)
    assert marks(tmp_path) == before


async def test_exec_has_the_limits_and_folder_of_its_workload(backend, tmp_path):
    (tmp_path / "here" / "below").mkdir(parents=True)
    spec = ProcessResourceSpec(
        command=["sleep", "1000"], workdir=str(tmp_path / "here"), mem_limit="512m"
    )
    await backend.start(Order("a", spec))
    script = "sleep 0.2; ulimit -d; pwd"  # The limits are set once the command has a pid.
    done = await backend.execute("a", ("bash", "-c", script), workdir="below")
    assert done.output.split() == [str(512 * 1024), str(tmp_path / "here" / "below")]


async def test_the_error_names_a_missing_workdir(backend):
    with pytest.raises(BackendError, match="the workdir /no/such: No such file"):
        await backend.start(Order("a", ProcessResourceSpec(command=["true"], workdir="/no/such")))


async def test_output_is_cut_between_characters(backend):
    script = "printf a; printf 'ü%.0s' $(seq 200000)"
    await backend.start(Order("a", ProcessResourceSpec(command=["sh", "-c", script])))
    await over(backend, "a")
    text, offset, last = "", 0, False
    while not last:
        log = await backend.logs("a", offset)
        text, offset, last = text + log.text, log.offset, log.over
    assert text == "a" + "ü" * 200_000


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"cpu_count": "many"}, "cpu_count"),
        ({"cpu_count": float("nan")}, "cpu_count"),
        ({"cpu_count": 1e9}, "cpu_count"),
        ({"mem_limit": "much"}, "mem_limit"),
        ({"mem_limit": None}, "mem_limit"),
    ],
)
async def test_an_unknown_limit_is_refused_by_name(backend, limits, field):
    await backend.start(Order("a", ProcessResourceSpec(command=["sleep", "1000"])))
    with pytest.raises(UnsupportedSpecError, match=f"^{field}: expected"):
        await backend.control("a", limits)


async def test_a_limit_with_too_many_processors_is_refused(backend):
    await backend.start(Order("a", ProcessResourceSpec(command=["sleep", "1000"])))
    with pytest.raises(UnsupportedSpecError, match="does not have the requested resources"):
        await backend.control("a", {"cpu_count": 60_000})


def may_raise() -> bool:
    """Return whether this process may raise every limit: CAP_SYS_RESOURCE."""
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> 24 & 1)


def data_limits(folder: Path) -> tuple[int, int]:
    """Return the limits of data of a workload's command, soft and hard, in MiB."""
    limits = resource.prlimit(int(starts(folder)[0]), resource.RLIMIT_DATA)
    return limits[0] >> 20, limits[1] >> 20


async def test_a_limit_of_memory_that_was_lowered_can_be_raised_again(backend, tmp_path):
    spec = noting(tmp_path, "exec sleep 1000")
    spec.mem_limit = "512m"
    await backend.start(Order("a", spec))
    await wait_starts(tmp_path, 1)
    for mib in (512, 256, 512, 1024):
        await backend.control("a", {"mem_limit": f"{mib}m"})
        assert data_limits(tmp_path)[0] == mib
        done = await backend.execute("a", ("bash", "-c", "sleep 0.2; ulimit -S -d"))
        assert int(done.output) >> 10 == mib


async def test_a_limit_refused_by_the_system_is_reported_with_the_reason(backend, tmp_path):
    spec = noting(tmp_path, f"ulimit -S -d {128 << 10}; ulimit -H -d {512 << 10}; exec sleep 1000")
    spec.mem_limit = "256m"
    await backend.start(Order("a", spec))
    await wait_starts(tmp_path, 1)
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        while data_limits(tmp_path) != (128, 512):  # noqa: ASYNC110  # As above.
            await asyncio.sleep(0.02)  # A process does not report its limits.
    reason = r"mem_limit: the system refuses 1024 MiB .* hard limit of 512 MiB .* not permitted"
    may = contextlib.nullcontext() if may_raise() else pytest.raises(BackendError, match=reason)
    with may:
        await backend.control("a", {"mem_limit": "1g", "cpu_count": 1})
    assert data_limits(tmp_path) == ((1024, 1024) if may_raise() else (128, 512))
    await backend.control("a", {"mem_limit": "512m"})
    assert data_limits(tmp_path)[0] == 512


async def test_a_service_may_listen_on_ipv6(backend):
    serve = (
        "import http.server as h, os, socket; h.ThreadingHTTPServer.address_family = "
        "socket.AF_INET6; h.ThreadingHTTPServer(('::1', int(os.environ['PORT'])), "
        "h.SimpleHTTPRequestHandler).serve_forever()"
    )
    spec = ServiceResourceSpec(
        command=[sys.executable, "-c", serve], host="::1", readiness=Readiness(path="/")
    )
    ready = await backend.start(Order("a", spec, timeout_seconds=SEEN_SECONDS_MAX))
    assert ready.endpoint.startswith("http://[::1]:")


async def test_a_stop_that_was_cut_short_is_finished_before_the_next_start(backend, tmp_path):
    await backend.start(Order("a", noting(tmp_path, "exec sleep 1000")))
    (first,) = await wait_starts(tmp_path, 1)
    (tmp_path / "running" / "a" / "stop").touch()
    again = await backend.start(Order("a", noting(tmp_path, "exec sleep 1000")))
    assert again.phase is Phase.READY
    _, second = await wait_starts(tmp_path, 2)
    with pytest.raises(ProcessLookupError):
        os.kill(int(first), 0)
    os.kill(int(second), 0)


def exiting(text: str, code: int = 5) -> ProcessResourceSpec:
    return ProcessResourceSpec(command=["sh", "-c", f"echo {text}; exit {code}"])


async def test_each_start_of_a_workload_has_separate_output(backend):
    for attempt in (1, 2, 3):
        await backend.start(Order("a", exiting(f"start {attempt}"), attempt=attempt))
        await over(backend, "a")
        assert (await backend.logs("a")).text == f"start {attempt}\n"
        await backend.stop("a")
    for attempt in (1, 2, 3):
        log = await backend.logs("a", 2, attempt)
        assert (log.text, log.over, log.exit_code) == (f"art {attempt}\n", True, 5)
    assert (await backend.logs("a")).text == "start 3\n"
    with pytest.raises(UnknownAttemptError) as none:
        await backend.logs("a", 0, 4)
    assert none.value.attempts == (1, 2, 3)
    with pytest.raises(UnknownWorkloadError):
        await backend.logs("b", 0, 1)


async def test_a_reader_gets_output_only_once_while_a_stop_archives_the_output(tmp_path):
    """The reader reads before, during and after the move of the folder."""
    folders = WorkloadStore(tmp_path)
    text = "begin\nMESSAGE\n"
    stop = threading.Event()
    names = [str(number) for number in range(300)]
    for name in names:
        folder = folders.folder(name)
        folder.mkdir()
        workload_store.write(folder / "order.json", {"id": name})
        (folder / "output.log").write_text(text)
        workload_store.write(folder / "exit.json", {"code": 5, "detail": ""})
    seen: dict[str, set[str]] = {name: set() for name in names}

    def look() -> None:
        while not stop.is_set():
            for name in names[-100:]:
                log = folders.log(name, 6)
                seen[name].add("none" if log is None else f"{log.text}{log.offset}{log.over}")

    looking = threading.Thread(target=look)
    looking.start()
    for name in names:
        folders.archive(name)
    stop.set()
    looking.join()
    assert set().union(*seen.values()) == {f"MESSAGE\n{len(text)}True"}


HIDDEN = "env -i setsid sleep 1000 & echo $!"
"""A script that starts a process without link to its workload by parent, session or environment."""
grouped = pytest.mark.skipif(
    control_groups.find().base is None,
    reason=f"no control groups here: {control_groups.find().detail}",
)


def lives(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid.strip()}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def group_of(folder: Path, workload: str) -> Path:
    return Path(control_groups.find().of(folder / "running" / workload))


@grouped
async def test_a_hidden_process_ends_with_its_workload(backend, tmp_path):
    await backend.start(Order("a", ProcessResourceSpec(command=["sleep", "1000"])))
    done = await backend.execute("a", ["sh", "-c", HIDDEN], timeout_seconds=20)
    assert lives(done.output)
    await backend.stop("a")
    assert not lives(done.output)
    assert not group_of(tmp_path, "a").exists()


@grouped
async def test_a_hidden_process_ends_before_the_next_user(backend, tmp_path):
    spec = ProcessResourceSpec(command=["sleep", "1000"], reset_command=["true"])
    await backend.start(Order("a", spec))
    done = await backend.execute("a", ["sh", "-c", HIDDEN], timeout_seconds=20)
    await backend.reset("a")
    assert not lives(done.output)
    assert (await backend.status("a")).phase is Phase.READY
    again = await backend.execute("a", ["sh", "-c", HIDDEN], timeout_seconds=20)
    assert lives(again.output), "the next command runs"


@grouped
async def test_a_process_that_made_its_own_control_group_ends_with_the_workload(backend, tmp_path):
    """The process ends at once when the command has ended by itself."""
    deep = f"p={group_of(tmp_path, 'a')}/main/deep; mkdir $p; echo 0 > $p/cgroup.procs; "
    command = ["sh", "-c", f"{deep} {HIDDEN}; exit 3"]
    await backend.start(Order("a", ProcessResourceSpec(command=command)))
    await over(backend, "a")
    hidden = (await backend.logs("a")).text
    assert hidden.strip().isdigit()
    assert not lives(hidden)
    assert not group_of(tmp_path, "a").exists()


@grouped
async def test_processes_of_a_killed_supervisor_end_with_the_stop(backend, tmp_path):
    command = ["sh", "-c", f"{HIDDEN}; exec sleep 1000"]
    await backend.start(Order("a", ProcessResourceSpec(command=command)))
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        while not (hidden := (await backend.logs("a")).text):  # noqa: ASYNC110  # As above.
            await asyncio.sleep(0.02)  # A file does not report that it has grown.
    document = json.loads((tmp_path / "running" / "a" / "process.json").read_text())
    os.kill(document["supervisor"], signal.SIGKILL)
    await over(backend, "a")
    assert lives(hidden)
    await backend.stop("a")
    assert not lives(hidden)
    assert not group_of(tmp_path, "a").exists()


def filling(processes: int, mib: int, *, shared: bool) -> list[str]:
    """Return a command whose processes hold an amount of memory: each alone, or all shared."""
    hold = f"held = bytearray(b'x') * ({mib} << 20)"
    lines = ["import os, time", f"if {shared}: {hold}", f"for _ in range({processes - 1}):"]
    lines += [
        "    if os.fork() == 0: break",
        f"if not {shared}: {hold}",
        "print('full', flush=True)",
    ]
    return [sys.executable, "-c", "\n".join([*lines, "time.sleep(1000)"])]


async def test_a_workload_over_its_total_memory_limit_is_ended(backend):
    """Each process of the workload stays below the limit; only their sum exceeds it."""
    spec = ProcessResourceSpec(command=filling(3, 60, shared=False), mem_limit="128m")
    await backend.start(Order("a", spec))
    await over(backend, "a")
    ended = await backend.status("a")
    assert (ended.phase, ended.exit_code) == (Phase.FAILED, -signal.SIGKILL)
    assert "memory together" in ended.detail
    assert "128 MiB" in ended.detail


async def test_shared_memory_of_processes_counts_once(backend):
    """A sum over the workload's processes would count the shared 60 MiB three times."""
    spec = ProcessResourceSpec(command=filling(3, 60, shared=True), mem_limit="128m")
    await backend.start(Order("a", spec))
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        while (await backend.logs("a")).text.count("full") < 3:  # noqa: ASYNC110  # As above.
            await asyncio.sleep(0.02)  # A file does not report that it has grown.
    assert (await backend.status("a")).phase is Phase.READY
    await backend.control("a", {"mem_limit": "48m"})
    await over(backend, "a")
    detail = (await backend.status("a")).detail
    assert "48 MiB" in detail
    used = re.search(r"used (\d+) MiB", detail)
    assert used is None or int(used[1]) < 128, "if the supervisor measured it"


def test_an_out_of_memory_kill_is_reported(tmp_path):
    events = tmp_path / "memory.events"
    (tmp_path / "memory.max").write_text("134217728\n")
    events.write_text("low 0\nhigh 0\nmax 7\noom 1\noom_kill 0\n")
    assert supervisor.memory_kill_message(str(tmp_path)) == ""
    events.write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 2\n")
    assert "memory together than its mem_limit of 128 MiB" in supervisor.memory_kill_message(
        str(tmp_path)
    )


def test_the_output_of_a_workload_is_limited_and_the_last_half_stays(tmp_path):
    log = tmp_path / "output.log"
    output = supervisor.Output(str(log), 300_000)
    written = b""
    for number in range(2_000):
        piece = b"%06d " % number * (1 + number % 900)
        output.take(piece)
        written += piece
        assert log.stat().st_size <= 300_000
    left = log.read_bytes()
    assert len(left) >= 150_000 - 8_000
    assert written.endswith(left)
    again = supervisor.Output(str(log), 300_000)
    again.take(b"more")
    assert log.read_bytes() == left + b"more", "another supervisor continues the log"


async def test_the_log_of_a_workload_that_writes_fast_stays_within_its_bound(backend, tmp_path):
    await backend.start(Order("a", ProcessResourceSpec(command=["sleep", "1000"])))
    folder = tmp_path / "running" / "a"
    order = json.loads((folder / "order.json").read_text())
    await backend.stop("a")
    folder.mkdir()
    script = "yes 0123456789 | head -c 200M; echo the end"
    workload_store.write(
        folder / "order.json", {**order, "command": ["sh", "-c", script], "log_bytes_max": 2 << 20}
    )
    running = asyncio.ensure_future(asyncio.to_thread(supervise, folder))
    log, largest = folder / "output.log", 0
    while not running.done():
        await asyncio.sleep(0)
        with contextlib.suppress(FileNotFoundError):
            largest = max(largest, log.stat().st_size)
    assert 1 << 20 <= largest <= 2 << 20
    assert log.read_bytes().endswith(b"01the end\n")


def grant_order(folder: Path, fencing: int, script: str, attempt: int = 1, **more) -> Order:
    """Order a service that never answers, but records each start, for one grant of a lease."""
    command = ["sh", "-c", f"echo $$ >> {folder}/starts; {script}"]
    spec = ServiceResourceSpec(command=command, port=0, readiness=Readiness(path="/"))
    return Order("a", spec, environment={"MOORAGE_FENCING": str(fencing)}, attempt=attempt, **more)


@pytest.mark.parametrize("moment", ["put away", "being put away"])
@pytest.mark.parametrize(
    ("script", "kind", "reason", "more"),
    [
        ("echo no such model; exit 4", BackendError, "exit status 4: no such model", {}),
        ("exec sleep 1000", TimeoutError, "not ready within 0.3 s", {"timeout_seconds": 0.3}),
    ],
)
async def test_a_failed_start_is_not_repeated_after_a_daemon_crash(
    backend, tmp_path, moment, script, kind, reason, more
):
    """The daemon is killed before it records the failure, and then orders the same start again."""
    order = grant_order(tmp_path, 7, script, **more)
    with pytest.raises(kind, match=reason):
        await backend.start(order)
    (ended,) = (tmp_path / "ended").iterdir()
    if moment == "being put away":
        ended.rename(tmp_path / "running" / "a")
    after, reports = LocalBackend(tmp_path), []
    after.listen(reports.append)
    with pytest.raises(BackendError, match=reason):
        await after.start(order)
    assert len(starts(tmp_path)) == 1
    assert reports[0].phase is Phase.FAILED
    assert kind is TimeoutError or reports[0].exit_code == 4
    assert list(await after.discover()) == []
    with pytest.raises(kind, match=reason):
        await after.start(grant_order(tmp_path, 8, script, attempt=2, **more))
    assert len(starts(tmp_path)) == 2, "another grant starts the workload again"
    await after.close()


def stubborn(folder: Path) -> dict[str, Any]:
    """Return fields of a spec whose workload ignores a stop for an hour."""
    script = f"trap '' TERM; echo $$ >> {folder}/starts; while :; do sleep 0.1; done"
    return {"command": ["sh", "-c", script], "stop_seconds": 3600}


async def test_the_time_of_a_stop_is_limited_for_any_spec(backend, tmp_path):
    spec = ProcessResourceSpec(**stubborn(tmp_path))
    await backend.start(Order("a", spec))
    await wait_starts(tmp_path, 1)
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        await backend.stop("a", 0.2)
    assert marks(tmp_path) == set()


async def test_the_time_of_a_stop_is_limited_while_a_service_starts(backend, tmp_path):
    """The workload takes too long to be ready, or its lease ends first."""
    spec = ServiceResourceSpec(**stubborn(tmp_path), readiness=Readiness(path="/"))
    starting = asyncio.create_task(backend.start(Order("a", spec, stop_seconds_max=0.2)))
    await wait_starts(tmp_path, 1)
    starting.cancel()
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        await asyncio.wait([starting])
        with pytest.raises(TimeoutError):
            await backend.start(Order("b", spec, timeout_seconds=0.5, stop_seconds_max=0.2))
    assert marks(tmp_path) == set()


async def test_cancelling_a_start_limits_the_stop_time_of_the_service(backend, tmp_path):
    spec = ServiceResourceSpec(**stubborn(tmp_path), readiness=Readiness(path="/"))
    starting = asyncio.create_task(backend.start(Order("a", spec, stop_seconds_max=3600)))
    await wait_starts(tmp_path, 1)
    starting.cancel(0.2)
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        await asyncio.wait([starting])
    assert marks(tmp_path) == set()


def test_all_output_of_a_workload_is_stored_while_another_process_holds_its_pipe(tmp_path):
    """The reader lags: when the workload ends, it first reads the rest of the pipe."""
    seen, written = os.pipe()
    output = supervisor.Output(str(tmp_path / "output"), 1 << 20)
    output.taking.acquire()  # As on a busy machine.
    output.follow(seen)
    os.write(written, b"x" * 60_000)
    behind = threading.Timer(0.5, output.taking.release)
    behind.start()
    output.complete()
    assert (tmp_path / "output").stat().st_size == 60_000
    os.close(written)


async def test_other_users_cannot_read_the_workloads_folder(tmp_path):
    """The daemon's umask does not matter: the workload has its own folder and umask."""
    root = tmp_path / "local"
    (root / "running").mkdir(parents=True, mode=0o755)  # As an earlier release created it.
    before = os.umask(0)
    try:
        backend = LocalBackend(root)
        await backend.start(Order("a", ProcessResourceSpec(command=["sh", "-c", "echo hi"])))
        await over(backend, "a")
        await backend.stop("a")
        await backend.close()
    finally:
        os.umask(before)
    places = [root, *root.rglob("*")]
    assert any(each.name == "exit.json" for each in places)
    open_to_others = {
        each: oct(each.stat().st_mode) for each in places if each.stat().st_mode & 0o77
    }
    assert open_to_others == {}


async def test_a_process_ends_when_the_server_is_silent_too_long(backend, tmp_path):
    """The agent has died without a successor; the deadline that it set still holds."""
    well = ProcessResourceSpec(command=["sh", "-c", "trap 'exit 0' TERM; sleep 1000 & wait"])
    await backend.start(Order("a", well))
    agent = HeardFile(tmp_path, 3_600.0)
    agent.note_agreement(now())
    await backend.start(Order("b", noting(tmp_path, "sleep 1000")))
    assert (await backend.status("a")).phase is Phase.READY
    HeardFile(tmp_path, 0.001)
    await over(backend, "a")
    await over(backend, "b")
    ended = await backend.status("a")
    assert (ended.phase, ended.exit_code) == (Phase.FAILED, -signal.SIGTERM)
    assert ended.detail == supervisor.UNHEARD
    with pytest.raises(BackendError, match="not heard the server"):
        await backend.start(Order("c", noting(tmp_path)))
    assert len(starts(tmp_path)) == 1

"""Fixtures of all packages: isolation of tests, a container engine, and Ctrl-C."""

import contextlib
import gc
import io
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from benchmarks.faults.database import PostgresServer, find_programs, running_postgres

# Hypothesis draws the same examples in every run of a commit, without time limits. Others:
# pytest --hypothesis-profile=wander
_UNTIMED: Final = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", _UNTIMED, derandomize=True, database=None)
settings.register_profile("wander", _UNTIMED, print_blob=True)
settings.load_profile("steady")

# Ray's default niceness 15 would start its workers too late beside other tests.
os.environ.setdefault("RAY_worker_niceness", "0")

IMAGE: Final = "localhost/moorage-test:1"
SERVICE_SECONDS_MAX: Final = 30
_HERE: Final = Path(__file__).parent
FILES_SHOWN: Final = 40
"""Maximum files in the list of the slowest files at the end of a run."""
_LONG_ROOMS: Final = ("simulation", "policies", "docs", "sandbox", "end_to_end", "lab")
_GROUP_OF_FIXTURE: Final = {
    "aws_server": "aws",
    "chromium": "browser",
    "container_engine": "containers",
    "plane": "kubernetes",
    "postgres": "postgres",
    "ray_world": "ray",
}
_GROUP_OF_FOLDER: Final = {"sandbox": "sandbox", "simulation": "simulation", "slices": "ray"}
_GROUPS: Final = {
    "fast": "what `make test` runs",
    "aws": "asks moto's server",
    "browser": "drives Debian's Chromium",
    "containers": "starts containers at a Podman of its own",
    "kubernetes": "needs a control plane of tests/kubernetes, which Go builds once per machine",
    "postgres": "needs a PostgreSQL, which it starts: Debian's package of that name",
    "ray": "needs a real Ray of some raylets, which it starts",
    "sandbox": "heavy tests of the jail",
    "simulation": "laws of the core under random events, and the mutants that they kill",
    "daemons": "all other heavy tests: of whole servers, the command line and the house",
}
"""The groups of tests; `make test-heavy GROUP=…` runs one of these groups, except `fast`."""


class _FailureLines:
    """Prints failures at once, since a killed run prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print a line for a test that failed or that is repeated."""
        if report.outcome not in ("failed", "rerun"):
            return
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        reason = report.longreprtext.rstrip().rpartition("\n")[2]
        reporter.write_line(f"\n{report.outcome} at {report.when}: {report.nodeid}: {reason}")


class _Leftovers(logging.Handler):
    """Log messages of asyncio about tasks and futures that were never awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "never retrieved" in message or "was destroyed but" in message:
            self.found.append(message)

    def refuse(self, place: str) -> None:
        """Fail the test `place` if anything was found since the last call."""
        found, self.found = self.found, []
        if found:
            pytest.fail(f"{place} left behind:\n" + "\n".join(found), pytrace=False)


class _CpuClock:
    """A clock for the CPU time of the test process and of its children that have ended."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def lap(self) -> float:
        """Return the CPU seconds since the last call of `lap`."""
        usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        before, self._seconds = self._seconds, sum(each.ru_utime + each.ru_stime for each in usages)
        return self._seconds - before


_CPU: Final = "cpu_seconds"
_CPU_CLOCK: Final = _CpuClock()
_LEFTOVERS: Final = _Leftovers()
logging.getLogger("asyncio").addHandler(_LEFTOVERS)


# Allowed reasons of skips: `.ci/run` cannot install what these tests need, or not quickly.
_MAY_LACK: Final = re.compile(
    r"root may look into every process|the production traces are not at|no control groups here"
    r"|no Landlock|no GPU here|only root can make a small disk"
    r"|only root can write in the folder of another user|make kubernetes-tools kueue"
)


_SHARES_PLANE: Final = re.compile(
    r"tests/(kubernetes/test_(plane|following|how_to|import|second_server)|backends/kubernetes/"
    r"|conformance/test_backend|end_to_end/test_kubernetes|resources/test_everywhere)"
)
"""Files whose tests can share one control plane: they clear it before each use."""
_HEAVY_FILE: Final = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.heavy", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--skips-fail",
        action="store_true",
        help="a test that skips fails, unless nothing that can be installed would have it run",
    )


def _refuse_skip(report: Any, config: pytest.Config) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or not config.getoption("skips_fail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not _MAY_LACK.search(reason):
        report.outcome = "failed"
        report.longrepr = f"{reason}\nWith --skips-fail this is a failure."


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Turn a skip into a failure if everything must be installed; store the test's CPU time."""
    report = yield
    report.user_properties.append((_CPU, _CPU_CLOCK.lap()))
    _refuse_skip(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Turn the skip of a whole file into a failure if everything must be installed."""
    report = yield
    _refuse_skip(report, collector.config)
    return report


class _InTurn(LoadFileScheduling):
    """Gives each worker whole files; those that share a control plane go to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return "kubernetes" if _SHARES_PLANE.match(nodeid) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _InTurn:
    return _InTurn(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Use more workers than cores, since tests often wait for processes, clocks or disks.

    With heavy tests, fewer workers run: these tests start more processes.
    """
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # The user has chosen a number.
    cores = len(os.sched_getaffinity(0))
    return cores * 5 // 2 if config.option.markexpr == "not heavy" else cores * 2


def pytest_configure(config: pytest.Config) -> None:
    """Register a mark for each group."""
    for name, meaning in _GROUPS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailureLines(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave heavy files out of the fast tests, since their extras may be missing."""
    if config.option.markexpr == "not heavy" and collection_path.suffix == ".py":
        return bool(_HEAVY_FILE.search(collection_path.read_text(encoding="utf-8"))) or None
    return None


@pytest.hookimpl(tryfirst=True)  # Before `-m` selects tests.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its group, and run long files first, so that no worker ends with one."""
    for item in items:
        if not _GROUP_OF_FIXTURE.keys().isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("heavy")
        item.add_marker(_group(item))
    places = {room: place for place, room in enumerate(_LONG_ROOMS)}
    items.sort(key=lambda item: places.get(_room(item), len(places)))


def _group(item: pytest.Item) -> str:
    """Return the group of a test: by its marks, else by its fixtures, else by its folder."""
    if not item.get_closest_marker("heavy"):
        return "fast"
    for name in _GROUPS:
        if item.get_closest_marker(name):
            return name
    for fixture, group in _GROUP_OF_FIXTURE.items():
        if fixture in getattr(item, "fixturenames", ()):
            return group
    return _GROUP_OF_FOLDER.get(_room(item), "daemons")


def _room(item: pytest.Item) -> str:
    return item.nodeid.partition("/")[2].partition("/")[0]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show failures of tests that then passed when repeated, and times of groups and files."""
    tries = terminalreporter.stats.get("rerun", [])
    if tries:
        terminalreporter.section("failed at first")
    for report in tries:
        terminalreporter.write_sep("_", report.nodeid)
        terminalreporter.write_line(report.longreprtext)
    seconds, of_files, cpu = Counter[str](), Counter[str](), Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                group = next((name for name in _GROUPS if name in report.keywords), "fast")
                file = report.nodeid.partition("::")[0]
                seconds[group] += report.duration
                of_files[file] += report.duration
                for name in (group, file):
                    cpu[name] += dict(report.user_properties).get(_CPU, 0.0)
    slowest = of_files.most_common(FILES_SHOWN) if len(of_files) > FILES_SHOWN else []
    for name, total in [*seconds.most_common(), *slowest]:
        terminalreporter.write_line(f"{total:8.0f} s, {cpu[name]:5.0f} s of CPU in {name}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect the tests without the garbage collector, since imported objects stay anyway."""
    gc.disable()
    collected = yield
    gc.enable()
    return collected


def pytest_collection_finish() -> None:
    """Let the garbage collector skip imported objects from here on."""
    gc.freeze()
    _CPU_CLOCK.lap()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Function) -> None:
    """Before repeating a test, set up its file's fixtures again: the test may have changed them."""
    if getattr(item, "execution_count", 1) == 1:
        return
    # Private, since pytest has no other way. `item` itself lists no fixture that an earlier test
    # requested by name.
    for fixture in item.session._fixturemanager._get_all_fixture_defs():
        is_set_up = fixture.scope == "module" and fixture.cached_result is not None
        if is_set_up and fixture.argname != "_nothing_is_left_for_the_next_file":
            fixture.finish(item._request)
    _end_shared_plane()


def _end_shared_plane() -> None:
    if planes := sys.modules.get("kubernetes_plane"):
        planes.Plane.end_shared()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Fail the test that leaves tasks or futures behind, if reference counts reveal them.

    After the last file that shares a control plane, end the plane.
    """
    _LEFTOVERS.refuse("This test")
    if nextitem is None or not _SHARES_PLANE.match(nextitem.nodeid):
        _end_shared_plane()


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left_for_the_next_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collect garbage after each file, so that its leftovers are not blamed on the next file."""
    yield
    gc.collect()
    _LEFTOVERS.refuse(f"One of the tests of {request.node.name}")
    gc.freeze()  # Later collections skip the objects that remain.


@pytest.fixture(scope="session", autouse=True)
def _restore_ctrl_c() -> None:
    """Restore Ctrl-C, which shells disable in background processes, also for child processes."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _no_workload_outlives_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kill workloads of daemons that tests have killed: workloads outlive daemons by design."""
    yield
    mark = f"MOORAGE_WORKLOAD={tmp_path_factory.getbasetemp()}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            if any(each.startswith(mark) for each in environment.read_bytes().split(b"\0")):
                os.kill(int(environment.parent.name), signal.SIGKILL)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real PostgreSQL server, started once per run of the tests."""
    pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with running_postgres(programs) as server:
        yield server


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the wheel that is built from the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=_HERE.parent, check=True, capture_output=True)
    (built,) = folder.glob("moorage-*.whl")
    return built


@pytest.fixture(scope="session")
def ray_clusters() -> Iterator[None]:
    """End the Ray cluster that test files share."""
    from tests.ray_clusters import RayCluster  # noqa: PLC0415  # An extra.

    yield
    RayCluster.end_shared()


@pytest.fixture(scope="session")
def podman() -> Iterator[tuple[Path, Any]]:
    """The socket and a client of a real Podman that has an image of busybox."""
    for tool, package in (("podman", "podman"), ("runc", "runc"), ("busybox", "busybox-static")):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not here; on Debian: apt-get install {package}")
    if os.getuid() != 0:
        pytest.skip("the tests' own Podman needs root")
    pytest.importorskip("docker", reason="the extra `containers` is not installed")
    with tempfile.TemporaryDirectory(prefix="pod-") as name:
        folder = Path(name)
        place = folder / "podman.sock"
        service = _serve(folder, place)
        try:
            with _connect(place) as api:
                api.import_image_from_data(_busybox(), repository=IMAGE[:-2], tag=IMAGE[-1])
                if not any(IMAGE in (each["RepoTags"] or ()) for each in api.images()):
                    api.tag(IMAGE[:-2], IMAGE[:-2], IMAGE[-1])  # Podman's import ignores the tag.
                yield place, api
                for each in api.containers(all=True):
                    api.remove_container(each["Id"], force=True, v=True)
        finally:
            service.terminate()
            service.wait()


@pytest.fixture(scope="module")
def container_engine(podman: tuple[Path, Any]) -> Iterator[Any]:
    """A client of the fixture `podman`; `DOCKER_HOST` names it only for the tests of one file.

    Daemons of other test files must not find this Podman: if it is slow, it delays their
    starts.
    """
    place, api = podman
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", f"unix://{place}")
        yield api


@pytest.fixture
def container_image(container_engine: Any) -> str:
    """Return the name of an image that has a shell and little else."""
    return IMAGE


def _serve(folder: Path, place: Path) -> "subprocess.Popen[bytes]":
    """Start Podman's API server, with all its data in a separate folder."""
    # Some machines do not allow Podman's own higher limits.
    files, tasks = (min(_BOUND, *resource.getrlimit(each)) for each in _BOUNDED)
    (folder / "containers.conf").write_text(
        f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc={tasks}:{tasks}"]\n'
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        "exit_command_delay = 1\n"
    )
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/root"\nrunroot = "{folder}/run"\n'
    )
    settings = {
        "CONTAINERS_CONF": f"{folder}/containers.conf",
        "CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf",
    }
    with (folder / "service.log").open("wb") as log:
        return subprocess.Popen(
            ["podman", "system", "service", "--time=0", f"unix://{place}"],
            cwd=folder,  # Podman's monitor writes a file here if a container runs out of memory.
            env={**os.environ, **settings},
            stdout=log,
            stderr=log,
        )


def _connect(place: Path) -> Any:
    import docker  # noqa: PLC0415  # An extra, which the fast tests do without.

    deadline = time.monotonic() + SERVICE_SECONDS_MAX
    while not place.exists() and time.monotonic() < deadline:
        time.sleep(0.05)  # No event reports that the server listens.
    return docker.APIClient(base_url=f"unix://{place}", version="auto", timeout=60)


def _busybox() -> bytes:
    """Return an archive of a file system with one static program under many names."""
    program = Path(shutil.which("busybox") or "").resolve()
    names = subprocess.run([program, "--list"], check=True, capture_output=True, text=True)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(program, "bin/busybox")
        for name in set(names.stdout.split()) - {"busybox"}:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
        for folder in ("tmp", "proc", "sys", "dev", "etc"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
    return archive.getvalue()


_BOUNDED: Final = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
_BOUND: Final = 4096

"""`kills`: kills the daemon at random moments under load, and counts the errors that result.

A few clients (`kill_load`) request and release leases as fast as the daemon answers. The workloads
are real processes or containers. The daemon is killed many times by `kill -9`, sometimes while it
starts, and a new daemon with the same folder replaces it. At the end, each granted lease must
exist, and its workload must run and have started once. After all releases, nothing may be left.

Each workload appends a line to a common file when it starts. This process is a subreaper, so that
orphaned processes become its children and can be counted.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

import httpx

from benchmarks.kill_load import KillLoad, Kind, fleet, leases
from benchmarks.processes import marked_processes
from moorage.backends.base import BackendError
from moorage.backends.local import container_reaper
from moorage.backends.local.container_api import ContainerApi, find_socket
from moorage.backends.local.machine import this_node
from moorage.backends.local.marks import WORKLOAD
from moorage.backends.local.supervisor import PR_SET_CHILD_SUBREAPER, descendants
from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import daemon, serve_command, serve_variables, tail
from moorage_policies import catalog as shipped

SEED: Final = 5
GPUS: Final = 32
"""GPUs of the only node, this machine. They exist only in the cluster document."""
CPUS: Final = 8
"""Cores of the node. They limit how many containers run at a time, as these are slow to start."""
CPU_MILLI: Final = 500
"""Thousandths of a core, for a lease with a container."""
WHILE_STARTING: Final = 0.25
"""Share of the kills that come before the daemon is ready."""
LOAD_SECONDS_MAX: Final = 1.5
"""Maximum seconds from the moment that the daemon is ready to a kill under load."""
SETTLE_SECONDS_MAX: Final = 300.0
"""Maximum seconds until the last daemon has all leases as expected."""
LOOK_SECONDS: Final = 0.05
IMAGE: Final = "docker.io/library/busybox:stable"
"""Image of the containers, which is pulled if it is missing."""

Category = Literal["process", "container"]
Figures = dict[str, Any]


@dataclass(slots=True)
class Findings:
    """The errors of each kind; all lists should be empty.

    Args:
        double_starts: Workloads that were started more than once.
        shared_gpus: GPUs that processes of two leases had at one time.
        lost_leases: Granted leases that no client released, but that are missing or run nothing.
        never_started: Workloads that should have run, and never did.
        orphans: Workloads that run although their lease has ended.
        left_behind: Leftovers after all leases were released and the daemon had stopped.
    """

    double_starts: list[str] = field(default_factory=list[str])
    shared_gpus: list[str] = field(default_factory=list[str])
    lost_leases: list[str] = field(default_factory=list[str])
    never_started: list[str] = field(default_factory=list[str])
    orphans: list[str] = field(default_factory=list[str])
    left_behind: list[str] = field(default_factory=list[str])


def kills(
    times: int,
    category: str = "process",
    image: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Figures:
    """Kill the daemon several times under load, and count errors.

    Args:
        times: Number of kills.
        category: Kind of the workloads: `process` or `container`.
        image: Image of the containers; None: `IMAGE`.
        progress: Called with the progress, in words.

    Returns:
        The numbers of kills and leases, and of each of the `Findings`, which must be 0.

    Raises:
        CommandError: There were faults, or the run failed. The folder with the ledger, the log and
            the starts stays, and the message names it.
    """
    if category not in get_args(Category):
        raise CommandError(f"category: expected {' or '.join(get_args(Category))}, not {category}")
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = Path(tempfile.mkdtemp(prefix="moorage-kills-"))
    try:
        machine = _Machine(folder, image or IMAGE if category == "container" else None)
        trial = _Run(folder, machine, progress)
        try:
            figures = asyncio.run(trial.play(times))
        except BaseException:
            machine.clear()
            raise
    except CommandError as error:
        raise CommandError(
            f"{error}\nThe ledger, the server's log and the list of workload starts are in {folder}"
        ) from error
    shutil.rmtree(folder)
    return figures


class _Machine:
    """Makes the specs of workloads, and finds workloads that started or still run.

    Args:
        image: Image of the workloads' containers; None: the workloads are processes.
    """

    def __init__(self, folder: Path, image: str | None) -> None:
        self.data = folder / "data"
        self._shared = folder / "shared"
        self._shared.mkdir()
        self._image = image
        self._root = str(self.data / "local" / "containers")
        self._api: ContainerApi | None = None
        if image is not None:
            try:
                self._api = ContainerApi(find_socket())
            except BackendError as error:
                raise CommandError(f"no container can be started: {error}") from error

    @property
    def resources(self) -> Mapping[str, Any]:
        """The resources of every lease. Containers get no GPUs, as this machine may have none."""
        return {"gpus": 1} if self._image is None else {"cpu_milli": CPU_MILLI, "memory_mib": 32}

    def spec(self, kind: Kind) -> Mapping[str, Any]:
        """Return the spec of a workload that records its start, and ends by itself if `short`."""
        folder = self._shared if self._image is None else Path("/shared")
        note = f'echo "$MOORAGE_LEASE_ID" >> {folder}/starts'
        # One of a workload's two processes hides in its own session.
        rest = "sleep 0.05" if kind == "short" else "setsid sleep 100000 & exec sleep 100000"
        spec: dict[str, Any] = {"command": ["sh", "-c", f"{note}; {rest}"], "stop_seconds": 0}
        if self._image is None:
            return spec
        mount = {str(self._shared): str(folder)}
        return {"category": "container", "image": self._image, "mount": mount, **spec}

    def starts(self) -> Counter[str]:
        """Return how often each workload has started, by the lines that workloads wrote."""
        noted = self._shared / "starts"
        return Counter(noted.read_text().split() if noted.exists() else ())

    def running(self) -> set[str]:
        """Return the leases that have a running process or container."""
        if self._api is not None:
            labels = self._api.labelled("moorage.root", self._root)
            return {each["moorage.workload"] for each in labels}
        return {each["MOORAGE_LEASE_ID"] for each in self._environments()}

    def shared_gpus(self) -> Iterator[str]:
        """Yield every GPU that processes of several leases use."""
        holders: dict[str, set[str]] = {}
        for each in self._environments():
            holders.setdefault(each["CUDA_VISIBLE_DEVICES"], set()).add(each["MOORAGE_LEASE_ID"])
        for gpu, held_by in holders.items():
            if len(held_by) > 1:
                yield f"GPU {gpu} of {', '.join(sorted(held_by))}"

    def left(self) -> Iterator[str]:
        """Yield remaining processes of workloads and daemons."""
        reap()
        for pid in descendants():
            with contextlib.suppress(OSError):  # The process has ended meanwhile.
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                yield f"process {pid}: {b' '.join(arguments).decode(errors='replace').strip()}"
        for workload in sorted(self.running()):
            yield f"workload {workload}"

    def clear(self) -> None:
        """Kill all remaining daemons and workloads after a failed run."""
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._api is not None:
            container_reaper.reap(str(self._api.place), "moorage.root", self._root)
        reap()

    def _environments(self) -> Iterator[dict[str, str]]:
        """Yield the variables of every process of a workload."""
        for _, variables in marked_processes(f"{WORKLOAD}={self.data}/"):
            pairs = (each.decode(errors="replace").partition("=") for each in variables)
            yield {name: value for name, _, value in pairs}


class _Run:
    """Runs daemons one after the other, and kills them."""

    def __init__(self, folder: Path, machine: _Machine, progress: Callable[[str], None]) -> None:
        self._log = folder / "stderr.log"
        self._machine = machine
        self._progress = progress
        self._draw = random.Random(SEED)
        self._load = KillLoad(self._draw, machine.resources, machine.spec)
        self._findings = Findings()
        self._while_starting = 0
        self._start_seconds = 1.0

    async def play(self, times: int) -> Figures:
        """Kill several daemons, stop the last one, and count leftovers."""
        self._fill()
        found = self._findings
        for number in range(1, times + 1):
            await self._kill_one()
            reap()
            # No lease is granted or stopped now, so two processes with one GPU have it at the same
            # time.
            found.shared_gpus += self._machine.shared_gpus()
            self._progress(f"{number} of {times} kills, {len(self._load.granted)} leases granted")
        with daemon(self._machine.data) as running:
            await self._settle(running.ws)
            await self._load.finish(running.ws, release=True)
            await _until(running.ws, lambda there: not there)
            free = (await fleet(running.ws))["gpu_milli_free"]
            if free != GPUS * 1000:
                found.left_behind.append(f"{GPUS * 1000 - free} thousandths of GPUs held")
        found.left_behind += self._machine.left()
        counts = {name: len(each) for name, each in asdict(found).items()}
        if any(counts.values()):
            text = json.dumps(asdict(found), indent=2)
            raise CommandError(f"after {times} kills, there are errors: {text}")
        return {
            "kills": times,
            "kills_while_starting": self._while_starting,
            "leases_granted": len(self._load.granted),
            "workloads_started": self._machine.starts().total(),
            "messages_repeated": self._load.repeated,
            **counts,
        }

    def _fill(self) -> None:
        """Start a first daemon that registers this machine and a policy."""
        gpus = {"count": GPUS, "gpus": [{"modelName": "A100", "memory": 40_960}] * GPUS}
        row = {"id": this_node(), "vcpus": {"count": CPUS}, "memory": 1_048_576, "gpus": gpus}
        cluster = {"id": "here", "nodes": {"count": 1, "nodeData": [row]}}
        with (
            daemon(self._machine.data) as running,
            httpx.Client(base_url=running.http, trust_env=False) as http,
        ):
            http.post("/clusters", json=cluster).raise_for_status()
            http.post("/policy", json=shipped.document("first_fit")).raise_for_status()

    async def _kill_one(self) -> None:
        """Run a daemon under load until a random moment; then kill it."""
        started = time.monotonic()
        with self._log.open("a") as errors:
            process = await asyncio.create_subprocess_exec(
                *serve_command(self._machine.data),
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=serve_variables(),
            )
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        early = self._draw.random() < WHILE_STARTING
        if early:
            loop.call_later(self._draw.random() * self._start_seconds, process.kill)
        ready = await process.stdout.readline()
        if ready:
            if not early:
                self._start_seconds = time.monotonic() - started
                loop.call_later(self._draw.random() * LOAD_SECONDS_MAX, process.kill)
            await self._load.play(json.loads(ready)["ws"])
        else:
            self._while_starting += 1
        if await process.wait() != -signal.SIGKILL:
            raise CommandError(
                f"a daemon ended before it was killed:\
{tail(self._log)}"
            )

    async def _settle(self, url: str) -> None:
        """Wait until all leases are active; record differences between leases and workloads."""
        await self._load.finish(url, release=False)
        there = await _until(url, lambda there: set(there.values()) <= {"active"})
        held, running, starts = self._load.held, self._machine.running(), self._machine.starts()
        found = self._findings
        found.lost_leases += sorted(held - there.keys()) + sorted(held & there.keys() - running)
        found.orphans += sorted(running - there.keys())
        found.double_starts += sorted(name for name, count in starts.items() if count > 1)
        found.never_started += sorted((held | self._load.ended) - starts.keys())


async def _until(url: str, settled: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    """Wait until `settled` accepts the states of all leases; return the states."""
    give_up_at = time.monotonic() + SETTLE_SECONDS_MAX
    while not settled(there := await leases(url)):
        if time.monotonic() > give_up_at:
            states = dict(Counter(there.values()))
            raise CommandError(
                f"after {SETTLE_SECONDS_MAX:g} s, leases have unexpected states: {states}"
            )
        pause = LOOK_SECONDS
        await asyncio.sleep(pause)
    return there


def reap() -> None:
    """Reap ended processes whose parent was a daemon. No other code may await a child meanwhile."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass

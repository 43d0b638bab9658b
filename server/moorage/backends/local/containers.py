"""Runs containers on this machine with Docker or Podman.

`LocalBackend` is the only caller. The names of containers follow from the workloads' names, and
labels mark this server's containers, so a restarted daemon finds them and starts none twice. All
other data is in a folder per workload (`workload_store`): the order, whether the workload was
ready, and the output of stopped ones.

    ROOT/containers/running/NAME/order.json       written before anything is created
                                /container.json   written when the container has been created
                                /ready.json       written when it answers
                                /output.log       written when it is stopped
"""

import asyncio
import contextlib
import hashlib
import os
import re
import signal
import threading
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from moorage.backends.base import (
    LOG_TAIL_LINES,
    BackendError,
    CommandExecution,
    Listener,
    Log,
    Order,
    Phase,
    UnknownWorkloadError,
    UnsupportedSpecError,
    WorkloadReport,
    exit_code,
)
from moorage.backends.completion import finish
from moorage.backends.local import container_reaper, marks, readiness, supervisor, workload_store
from moorage.backends.local.container_api import ContainerApi, Events, Seen, find_socket
from moorage.backends.local.container_plans import (
    ContainerPlan,
    mounts,
    plan,
    probe_port,
    reachable_host,
)
from moorage.backends.local.deadline import HEARD
from moorage.backends.local.devices import DeviceBinding, Devices
from moorage.backends.local.workloads import LocalWorkloads
from moorage.backends.specs import ContainerResourceSpec, Readiness
from moorage.protocol.origins import authority_of
from moorage.records.json_values import JsonMapping, JsonObject

CATEGORIES: Final = frozenset({"container"})
COMMANDS_MAX: Final = 64
"""Maximum commands that run in containers at the same time; further ones wait."""
RECONNECT_SECONDS: Final = 1.0
"""Pause before events are requested again from a container engine that closed the connection."""
OUTPUT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum bytes of a stopped container's output that are stored."""
RUNNING_SECONDS: Final = 0.05
"""Seconds between two checks whether a started container runs."""
_LABEL_ROOT: Final = "moorage.root"
_LABEL_ID: Final = "moorage.workload"
_KILL: Final = 'for p in /proc/[0-9]*; do grep -qs "$0" "$p/environ" && kill -9 "${p#/proc/}"; done'


class Containers(LocalWorkloads):
    """Runs workloads as containers; see `LocalWorkloads`."""

    noun = "container"

    def __init__(
        self,
        folders: workload_store.WorkloadStore,
        devices: Devices,
        tell: Listener,
        hidden: Path | None,
        *,
        outlive: bool,
    ) -> None:
        super().__init__(folders, devices, tell, outlive=outlive)
        self._hidden = hidden
        # Commands may take an hour, so they do not share the few default threads.
        self._commands = ThreadPoolExecutor(COMMANDS_MAX, "container-command")
        self._reaper: int | None = None
        self._contact_file = folders.root.parent / HEARD
        self._begun_here: set[str] = set()
        self._stopping: set[str] = set()
        self._reported: set[str] = set()
        self._strays: set[str] = set()  # Containers without a stored order.
        self._connected: ContainerApi | None = None
        self._events: Events | None = None
        self._listening: threading.Thread | None = None
        self._closed = threading.Event()

    def has(self, workload: str) -> bool:
        """Return whether a workload was started here as a container, and not stopped."""
        return workload in self._strays | self._begun_here or self._store.has(workload)

    def keeps(self, workload: str) -> bool:
        """Return whether this machine stores output of a workload, running or stopped."""
        return self._store.keeps(workload)

    def refuse(self, spec: ContainerResourceSpec) -> None:
        for outside, _, _ in mounts(spec):
            if self._hidden is not None and shows(outside, os.fspath(self._hidden)):
                raise UnsupportedSpecError(
                    f"mount: {outside} would give access to the data folder of this server:"
                    " expected a folder outside the server's data folder"
                )
        probe_port(spec)
        find_socket()

    async def discover(self) -> Collection[WorkloadReport]:
        """Return the container workloads of this machine, and report their ends from now on."""
        return await asyncio.to_thread(self._discover)

    async def _bring_up(self, order: Order) -> WorkloadReport:
        spec = order.spec
        assert isinstance(spec, ContainerResourceSpec)
        given_up = threading.Event()
        try:
            await asyncio.to_thread(self._fetch, order.id, spec.title, given_up)
        finally:
            given_up.set()
        await finish(asyncio.to_thread(self._begin, order, spec))
        return await self._until_ready(order.id, spec)

    async def stop(self, workload: str, stop_seconds_max: float | None = None) -> None:
        if not self.has(workload):
            return
        await finish(asyncio.to_thread(self._stop, workload, stop_seconds_max))
        self._tell(WorkloadReport(workload, Phase.STOPPED))

    async def status(self, workload: str) -> WorkloadReport:
        return await asyncio.to_thread(self._look, workload)

    def _limit(
        self, workload: str, memory_bytes: int | None, grant: DeviceBinding | None
    ) -> JsonMapping:
        """Change limits at the container engine; see `LocalWorkloads`."""
        cpu_count = None if grant is None else grant.cpu_count
        self._api().update(self._name(workload), cpu_count, memory_bytes)
        return {} if grant is None else {"devices": grant.rows}

    async def reset(self, workload: str) -> None:
        """Refuse a reset: nothing distinguishes a user's files from those of the image."""
        self._order(workload)
        raise UnsupportedSpecError("a container cannot be reset: end it, and start another")

    async def execute(
        self,
        workload: str,
        command: Sequence[str],
        *,
        timeout_seconds: float | None = None,
        workdir: str | None = None,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> CommandExecution:
        self._order(workload)
        name, mark = self._name(workload), uuid.uuid4().hex
        begun = asyncio.ensure_future(
            asyncio.to_thread(
                lambda: self._api().begin_command(
                    name,
                    command,
                    workdir=workdir,
                    user=user,
                    environment={**(environment or {}), marks.EXECUTION: mark},
                )
            )
        )
        running: asyncio.Future[tuple[int, str]] | None = None
        try:
            async with asyncio.timeout(timeout_seconds):
                made = await finish(begun)
                running = asyncio.ensure_future(
                    asyncio.get_running_loop().run_in_executor(
                        self._commands, lambda: self._api().run_command(made)
                    )
                )
                await asyncio.wait([running])
                code, output = running.result()
        except BaseException as error:
            if running is not None and not running.done():
                await finish(asyncio.to_thread(self._kill_command, name, begun.result(), mark))
                await finish(asyncio.gather(running, return_exceptions=True))
            if isinstance(error, TimeoutError):
                reason = f"{command[0]} ran longer than {timeout_seconds} s"
                raise TimeoutError(reason) from None
            raise
        return CommandExecution(exit_code(code), output)

    async def logs(self, workload: str, offset: int, attempt: int) -> Log:
        """Read the output of a container, even a stopped one; see `Backend.logs`."""
        return await asyncio.to_thread(self._log, workload, offset, attempt)

    def close(self) -> None:
        """Stop listening to the container engine. The containers continue to run."""
        self._closed.set()
        self._commands.shutdown(wait=False)
        with self._lock:
            events, listening, connected = self._events, self._listening, self._connected
            self._connected = None
            if self._reaper is not None and not any(self._store.names()):
                os.kill(self._reaper, signal.SIGKILL)
                os.waitpid(self._reaper, 0)
                self._reaper = None
        if events is not None:
            events.close()
        if listening is not None and listening is not threading.current_thread():
            listening.join()
        if connected is not None:
            connected.close()

    # Beginning ---------------------------------------------------------------------------------

    def _fetch(self, workload: str, image: str, given_up: threading.Event) -> None:
        """Pull the image, unless this machine has it. Blocks."""
        api = self._api()
        if (self._store.folder(workload) / "container.json").exists() or api.has_image(image):
            return
        self._tell(WorkloadReport(workload, Phase.PULLING, detail=f"pulling the image {image}"))
        api.pull(image, given_up)

    def _begin(self, order: Order, spec: ContainerResourceSpec) -> None:
        """Create and start a workload's container, unless that was done before. Blocks."""
        folder = self._store.folder(order.id)
        with self._alone(order.id):
            api, name = self._api(), self._name(order.id)
            self._listen()
            self._begun_here.add(order.id)
            if not (folder / "container.json").exists():
                wanted = self._plan(order, spec)
                self._tell(WorkloadReport(order.id, Phase.STARTING))
                api.create(wanted)
                workload_store.write(folder / "container.json", {"name": name})
            seen = api.inspect(name)
            if seen is not None and seen.state in {"created", "configured", "initialized"}:
                if supervisor.unheard({"heard": self._contact_file}):
                    raise BackendError(supervisor.UNHEARD)
                api.start(name)

    def _plan(self, order: Order, spec: ContainerResourceSpec) -> ContainerPlan:
        """Store a container's order and devices on disk; return the arguments for the container."""
        grant = self._devices.take(order)
        folder = self._store.folder(order.id)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        noted: JsonObject = {"id": order.id, "attempt": order.attempt}
        noted |= {"category": spec.category, "devices": grant.rows}
        if spec.readiness is not None:
            noted |= {"probe": asdict(spec.readiness), "host": reachable_host(spec)}
            noted |= {"probe_port": probe_port(spec)}
        noted["stop_seconds"] = order.bound_stop(spec.stop_seconds)
        workload_store.write(folder / "order.json", noted)
        labels = {_LABEL_ID: order.id, _LABEL_ROOT: str(self._store.root)}
        return plan(order, spec, grant, self._name(order.id), labels)

    async def _until_ready(self, workload: str, spec: ContainerResourceSpec) -> WorkloadReport:
        ready = self._store.folder(workload) / "ready.json"
        probe, name = spec.readiness, self._name(workload)
        host = reachable_host(spec)
        order = self._order(workload)
        while True:
            workload_seen = await asyncio.to_thread(self._look, workload)
            if workload_seen.phase is Phase.READY and ready.exists():
                return workload_seen
            if workload_seen.phase.over:
                if ready.exists() or (probe is None and workload_seen.exit_code is not None):
                    return workload_seen  # The container was ready before, or has completed.
                self._tell_end(workload_seen)
                lines = "; ".join(workload_seen.log_tail[-3:])
                raise BackendError(f"{workload_seen.detail}{': ' if lines else ''}{lines}")
            if await self._answers(workload, order, probe):
                break
            await asyncio.sleep(RUNNING_SECONDS if probe is None else probe.every_seconds)
        seen = await asyncio.to_thread(lambda: self._api().inspect(name))
        ports: Mapping[int, int] = {} if seen is None else seen.ports
        port = None if spec.container_port is None else ports.get(spec.container_port)
        endpoint = "" if port is None else f"http://{authority_of(host, port)}"
        workload_store.write(ready, {"endpoint": endpoint})
        news = WorkloadReport(workload, Phase.READY, endpoint=endpoint)
        with self._lock:
            # The report of a container's end or stop must be the last report about it.
            if workload in self._begun_here and workload not in self._reported:
                self._tell(news)
        return news

    async def _answers(self, workload: str, order: JsonMapping, probe: Readiness | None) -> bool:
        seen = await asyncio.to_thread(lambda: self._api().inspect(self._name(workload)))
        if seen is None or seen.state != "running" or probe is None:
            return seen is not None and seen.state == "running"
        port = seen.ports.get(order["probe_port"])
        bare = replace(probe, port=None)
        inside = self._inside(workload)
        return await readiness.answers(bare, order["host"], port, inside, proxied=True)

    # Looking -----------------------------------------------------------------------------------

    def _look(self, workload: str) -> WorkloadReport:
        folder = self._store.folder(workload)
        if not self.has(workload):
            raise UnknownWorkloadError(workload)
        seen = self._api().inspect(self._name(workload))
        if seen is None:
            if not (folder / "container.json").exists():
                self._strays.discard(workload)
                self._order(workload)
                return WorkloadReport(workload, Phase.STARTING)
            detail = "another program removed its container"
            return WorkloadReport(workload, Phase.FAILED, detail=detail)
        if seen.ended:
            return _end_report(workload, seen, self._tail(workload))
        ready = workload_store.read(folder / "ready.json")
        if ready is None or not seen.running:
            return WorkloadReport(workload, Phase.STARTING)
        return WorkloadReport(workload, Phase.READY, endpoint=ready["endpoint"])

    def _discover(self) -> list[WorkloadReport]:
        names = set(self._store.names())
        try:
            api = self._api()
            self._listen()
            labels = api.labelled(_LABEL_ROOT, str(self._store.root))
        except BackendError as error:  # The container may still run: report no end.
            detail = f"the container cannot be inspected: {error}"
            return [WorkloadReport(name, Phase.PENDING, detail=detail) for name in sorted(names)]
        self._strays |= {each[_LABEL_ID] for each in labels if _LABEL_ID in each} - names
        found = []
        for name in sorted(names | self._strays):
            with contextlib.suppress(UnknownWorkloadError):  # Stopped meanwhile.
                found.append(self._look(name))
        return found

    def _tail(self, workload: str) -> tuple[str, ...]:
        return self._api().tail(self._name(workload), LOG_TAIL_LINES)

    def _log(self, workload: str, offset: int, attempt: int) -> Log:
        """Read output: of existing containers from the engine, of removed ones from files.

        By the time of the engine's answer, the container's name may belong to another start. So the
        answer counts only if the folder of the start is still the same.
        """
        folder = self._store.folder(workload)
        begun = self._start_number(folder, attempt)
        if begun is not None:
            with contextlib.suppress(BackendError):
                log = self._api().log(self._name(workload), offset)
                if self._start_number(folder, attempt) == begun:
                    return log
        return self._read_stored_log(workload, offset, attempt)

    @staticmethod
    def _start_number(folder: Path, attempt: int) -> int | None:
        """Return a number that identifies the folder of a start; None if the folder is gone."""
        order = workload_store.read(folder / "order.json")
        if order is None or attempt not in {0, order.get("attempt", 1)}:
            return None
        with contextlib.suppress(FileNotFoundError):
            return folder.stat().st_ino
        return None

    # Ending ------------------------------------------------------------------------------------

    def _stop(self, workload: str, stop_seconds_max: float | None = None) -> None:
        """Stop and remove the container, and store its output. Blocks."""
        folder, name = self._store.folder(workload), self._name(workload)
        order = self._store.order(workload) or {}
        with self._lock:
            self._stopping.add(workload)
        try:
            api = self._api()
            if api.inspect(name) is not None:
                seconds = float(order.get("stop_seconds", 0))
                bound = seconds if stop_seconds_max is None else stop_seconds_max
                api.stop(name, min(seconds, bound))
                with contextlib.suppress(BackendError, OSError):  # E.g. two stops at a time.
                    self._keep_output(folder, name)
                api.remove(name)
        finally:
            with self._lock:
                self._stopping.discard(workload)
        self._strays.discard(workload)
        self._begun_here.discard(workload)
        self._reported.discard(workload)
        self._devices.give(workload)
        if os.path.lexists(folder):
            self._store.archive(workload)

    def _keep_output(self, folder: Path, name: str) -> None:
        left = OUTPUT_BYTES_MAX
        (folder / "output.log").unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(folder / "output.log", flags, 0o600), "wb") as file:  # noqa: PTH123  # Opens a descriptor.
            for piece in self._api().output(name):
                file.write(piece[:left])
                left -= len(piece[:left])

    def _kill_command(self, name: str, command: str, mark: str) -> None:
        """Kill a command in a container and its child processes, from the host or from inside."""
        wanted = f"{marks.EXECUTION}={mark}"
        with contextlib.suppress(BackendError):  # The container may be gone.
            api = self._api()
            marks.kill_by_mark(wanted)
            if api.command_runs(command):  # The command runs as another user.
                killer = api.begin_command(name, ("/bin/sh", "-c", _KILL, wanted), user="0")
                api.run_command(killer)

    def _tell_end(self, workload: WorkloadReport) -> None:
        """Report once that a container ended by itself."""
        with self._lock:
            if workload.id in self._reported or workload.id in self._stopping:
                return
            self._reported.add(workload.id)
        self._tell(workload)

    # The container engine ------------------------------------------------------------------------

    def _api(self) -> ContainerApi:
        """Return the container engine's API; connect to the engine at the first call."""
        with self._lock:
            if self._connected is None:
                self._connected = ContainerApi(find_socket())
            return self._connected

    def _listen(self) -> None:
        """Start a thread that receives all events of the container engine from now on."""
        with self._lock:
            if self._listening is not None or self._closed.is_set():
                return
            api = self._connected
            assert api is not None
            self._events = api.events(_LABEL_ROOT, str(self._store.root))
            self._listening = threading.Thread(
                target=self._hear, args=(api,), name="containers", daemon=True
            )
            self._listening.start()
            if not self._outlive:
                root = str(self._store.root)
                self._reaper = container_reaper.start(str(api.place), _LABEL_ROOT, root)
            elif self._contact_file.exists():  # A second reaper ends at once.
                place = str(api.place), _LABEL_ROOT, str(self._store.root)
                container_reaper.start(*place, os.fspath(self._contact_file))

    def _hear(self, api: ContainerApi) -> None:
        """Report each container's end, also one that came while the connection was lost."""
        while not self._closed.is_set():
            for labels in self._events or ():
                self._look_at_end(labels.get(_LABEL_ID, ""))
            if self._closed.wait(RECONNECT_SECONDS):
                return
            with contextlib.suppress(BackendError):
                events = api.events(_LABEL_ROOT, str(self._store.root))
                with self._lock:
                    self._events = events
                if self._closed.is_set():
                    events.close()
                for name in list(self._store.names()):
                    self._look_at_end(name)

    def _look_at_end(self, workload: str) -> None:
        with contextlib.suppress(BackendError):  # The next `status` reports the error.
            seen = self._look(workload)
            if seen.phase in {Phase.SUCCEEDED, Phase.FAILED}:
                self._tell_end(seen)

    def _name(self, workload: str) -> str:
        """Return the unique name of a workload's container; it contains the workload's name."""
        digest = hashlib.sha256(f"{self._store.root}\0{workload}".encode()).hexdigest()[:16]
        return f"moorage-{re.sub('[^a-zA-Z0-9_.-]', '-', workload)[:48]}-{digest}"


def _end_report(workload: str, seen: Seen, lines: tuple[str, ...]) -> WorkloadReport:
    code = exit_code(seen.exit_code)
    phase = Phase.SUCCEEDED if code == 0 else Phase.FAILED
    if seen.out_of_memory:
        detail = "it was killed because it used more memory than its mem_limit"
    elif code < 0:
        detail = f"it was killed by signal {-code}"
        if code == -signal.SIGKILL and seen.bounded:  # cgroup v1 may not report it.
            detail += ", as happens to a process that uses more memory than its mem_limit"
    else:
        detail = f"it ended by itself with exit status {code}"
    if seen.error:
        detail = f"{detail}: {seen.error}"
    return WorkloadReport(workload, phase, detail=detail, exit_code=code, log_tail=lines)


@dataclass(frozen=True, slots=True)
class _Mount:
    place: str
    device: str
    root: str


def shows(outside: str, hidden: str) -> bool:
    """Return whether a mount of `outside` would show the hidden folder, or a part of it.

    Links are followed. A folder may be mounted in several places, so devices and folders within
    devices are compared, not paths. Mounts below `outside` count, too.
    """
    mounts = _mounts()
    secret, shown = (
        _lies(os.path.realpath(hidden), mounts),
        _lies(os.path.realpath(outside), mounts),
    )
    below = [each for each in mounts if _leads(os.path.realpath(outside), each.place)]
    return any(_overlap(each, secret) for each in (shown, *below))


def _mounts() -> list[_Mount]:
    """Return all mounts of this machine, the latest first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        _, _, device, root, place = line.split(" ")[:5]
        found.append(_Mount(_unescape(place), device, _unescape(root)))
    return found[::-1]


def _unescape(text: str) -> str:
    for number in (0o40, 0o11, 0o12, 0o134):  # The kernel escapes these, the backslash last.
        text = text.replace(f"\\{number:03o}", chr(number))
    return text


def _lies(path: str, mounts: list[_Mount]) -> _Mount:
    """Return the device that has a path, and the path within this device."""
    over = [each for each in mounts if _leads(each.place, path)]
    mount = max(over, key=lambda each: len(each.place))  # `max` returns the first, the latest.
    inside = os.path.relpath(path, mount.place)
    return _Mount(path, mount.device, os.path.normpath(os.path.join(mount.root, inside)))  # noqa: PTH118  # Plain text.


def _overlap(one: _Mount, other: _Mount) -> bool:
    same = one.device == other.device
    return same and (_leads(one.root, other.root) or _leads(other.root, one.root))


def _leads(folder: str, place: str) -> bool:
    return f"{place}/".startswith(f"{folder.rstrip('/')}/")

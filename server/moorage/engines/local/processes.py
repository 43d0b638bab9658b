"""Processes and services of this machine, each under a supervisor that outlives the daemon.

`LocalEngine` is the only caller. What there is to know of a workload is in its folder (`shelf`);
this module starts supervisors, waits for them, and asks workloads whether they answer.
"""

import asyncio
import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from moorage.engines.base import (
    EngineError,
    Execution,
    Listener,
    Log,
    Order,
    Phase,
    UnknownWorkloadError,
    UnsupportedSpecError,
    Workload,
)
from moorage.engines.finishing import finished
from moorage.engines.local import commands, control_groups, marks, readiness, shelf
from moorage.engines.local.devices import Devices, Grant
from moorage.engines.local.parts import Part
from moorage.engines.local.watcher import Watcher, lives
from moorage.engines.specs import (
    BaseResourceSpec,
    ProcessResourceSpec,
    Readiness,
    ServiceResourceSpec,
    VLLMModelResourceSpec,
    memory_bytes,
)

__all__ = ["CATEGORIES", "Processes"]

CATEGORIES: Final = frozenset({"process", "service", "vllm"})
OUTPUT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of a workload's log; beyond it the older half is dropped."""
RESET_SECONDS_MAX: Final = 60.0
"""How long a reset command may take; a workload that it does not reset is ended."""
SUPERVISOR_SECONDS_MAX: Final = 30.0
"""How long a supervisor may take to say that the command runs."""
STOP_SPARE_SECONDS: Final = 20.0
"""Beyond a workload's own time to stop: for what it left behind, which is killed."""
_SUPERVISOR: Final = Path(__file__).with_name("supervisor.py")
_INHERITED: Final = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR"),
        *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
        *("http_proxy", "https_proxy", "no_proxy"),
    }
)
"""Variables of the daemon that workloads get too. Its secrets are not among them."""


class Processes(Part):
    """See the module, and `Part`."""

    noun = "process"

    def __init__(
        self, folders: shelf.Shelf, devices: Devices, tell: Listener, *, outlive: bool
    ) -> None:
        super().__init__(folders, devices, tell, outlive=outlive)
        self._watcher = Watcher()
        self._groups = control_groups.find()
        self._ends: dict[str, Future[None]] = {}
        self._watched: dict[str, tuple[int, int]] = {}
        self._ready: dict[str, Workload] = {}

    async def discover(self) -> Collection[Workload]:
        """Return what is here, and watch it from now on."""
        found = []
        for name in await asyncio.to_thread(lambda: list(self._shelf.names())):
            workload = await asyncio.to_thread(self._look, name)
            if workload is not None:
                found.append(workload)
        return found

    async def _bring_up(self, order: Order) -> Workload:
        """Start a process and wait until it is ready; see `Part`."""
        spec = _process(order.spec)
        if self._shelf.forbidden(order.id):  # Its stop was cut short by a crash.
            await self.stop(order.id)
        await finished(asyncio.to_thread(self._begin, order, spec))
        return await self._until_ready(order.id, spec)

    async def stop(self, workload: str) -> None:
        """Stop a process and all it started; see `Engine.stop`."""
        folder = self._shelf.folder(workload)
        order = shelf.read(folder / "order.json")
        if order is None:
            return
        with self._lock:
            self._ready.pop(workload, None)
        # First the word, then the look: a supervisor that takes the lock later finds the word.
        self._shelf.forbid(workload)
        pid = shelf.holder(folder)
        with self._lock:
            ended = self._ends.get(workload)
        if pid is not None:
            ended = self._watch(workload, pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if ended is not None:  # Its end is told before this returns: the name is free after it.
            limit = float(order["stop_seconds"]) + STOP_SPARE_SECONDS
            try:
                async with asyncio.timeout(limit):
                    await asyncio.shield(asyncio.wrap_future(ended))
            except TimeoutError:
                reason = f"{workload} is still there {limit:g} s after it was told to stop"
                raise EngineError(reason) from None
        await asyncio.to_thread(self._sweep, workload)
        self._devices.give(workload)
        await asyncio.to_thread(self._shelf.archive, workload)
        self._tell(Workload(workload, Phase.STOPPED))

    async def status(self, workload: str) -> Workload:
        """Look at a process; see `Engine.status`."""
        found = await asyncio.to_thread(self._look, workload)
        if found is None:
            raise UnknownWorkloadError(workload)
        return found

    def glance(self, workload: str) -> Workload | None:
        """Return a process that is ready, if it lives, and its supervisor is watched and lives.

        A service, which has an endpoint, is not known to be ready before it has answered.
        """
        with self._lock:
            ready, watched = self._ready.get(workload), self._watched.get(workload)
        if ready and ready.endpoint:
            return None
        if not (ready and watched and self._watcher.lives(*watched)):
            return None
        with contextlib.suppress(OSError):  # No descriptor is left, say: then it is not known.
            return ready if self._command_lives(workload) else None
        return None

    def _command_lives(self, workload: str) -> bool:
        """Return whether the command itself has not ended; its supervisor may tell that later."""
        noted = shelf.read(self._shelf.folder(workload) / "process.json")
        return noted is not None and lives(noted["pid"])

    def _limit(
        self, workload: str, memory_bytes: int | None, grant: Grant | None
    ) -> Mapping[str, Any]:
        """Bind and bound a process and all it started; see `Part`."""
        for pid in _below(shelf.holder(self._shelf.folder(workload))):
            _bound(pid, grant.cpus if grant else (), memory_bytes)
        if memory_bytes is not None:
            control_groups.bound(self._order(workload).get("group", ""), memory_bytes)
        noted = {} if memory_bytes is None else {"memory_bytes": memory_bytes}
        return noted if grant is None else {**noted, "cpus": grant.cpus, "devices": grant.rows}

    async def reset(self, workload: str) -> None:
        """Run the spec's own reset command; see `Engine.reset`.

        What commands beside it left running is killed in any case: the next user shall not meet it.
        """
        order = self._order(workload)
        mark = f"{marks.WORKLOAD}={self._mark(workload)}"
        await finished(asyncio.to_thread(marks.kill_marked, mark, marks.EXECUTION))
        if group := order.get("group", ""):
            await finished(asyncio.to_thread(control_groups.clear, f"{group}/exec"))
        command = order["reset_command"]
        if not command:
            raise UnsupportedSpecError("a process without a reset_command cannot be reset")
        try:
            done = await self.execute(workload, command, timeout_seconds=RESET_SECONDS_MAX)
        except TimeoutError as error:
            raise EngineError(f"its reset: {error}") from error
        if done.exit_code != 0:
            raise EngineError(f"its reset ended with {done.exit_code}: {done.output[-500:]}")

    async def execute(
        self,
        workload: str,
        command: Sequence[str],
        *,
        timeout_seconds: float | None = None,
        workdir: str | None = None,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Execution:
        """Run a command beside a process, with its environment and bounds; see `Engine.execute`."""
        order = self._order(workload)
        if user is not None:
            raise UnsupportedSpecError("a command beside a process runs as the process's own user")

        with control_groups.door(order.get("group", "")) as door:
            return await commands.run(
                command,
                folder=Path(order["workdir"] or self._shelf.folder(workload), workdir or ""),
                environment={**order["environment"], **(environment or {})},
                begun=lambda pid: _bound(pid, order["cpus"], order["memory_bytes"] or None),
                timeout_seconds=timeout_seconds,
                door=door,
            )

    async def logs(self, workload: str, offset: int, attempt: int) -> Log:
        """Read what a process wrote, also of one that was stopped; see `Engine.logs`."""
        return await asyncio.to_thread(self._kept_log, workload, offset, attempt)

    def close(self) -> None:
        """Watch no longer. The processes go on."""
        self._watcher.close()

    # Beginning ---------------------------------------------------------------------------------

    def _begin(self, order: Order, spec: ProcessResourceSpec) -> None:
        """Have a supervisor start the command, unless it was begun before. Blocks."""
        folder = self._shelf.folder(order.id)
        with self._alone(order.id):
            if (
                shelf.holder(folder) is None
                and not (folder / "process.json").exists()
                and not (folder / "exit.json").exists()
            ):
                if not (folder / "order.json").exists():  # Else a supervisor may have read it.
                    folder.mkdir(exist_ok=True, mode=0o700)
                    shelf.write(folder / "order.json", self._orders(order, spec))
                self._tell(Workload(order.id, Phase.STARTING))
                self._supervise(folder)
        pid = shelf.holder(folder)
        if pid is not None:
            self._watch(order.id, pid)

    def _orders(self, order: Order, spec: ProcessResourceSpec) -> dict[str, Any]:
        """Return what a supervisor is told, and an engine after a crash needs to know."""
        grant = self._devices.take(order)
        port, host, probe = 0, "", None
        command, environment = spec.command, dict(spec.environment)
        if isinstance(spec, ServiceResourceSpec):
            host, probe = spec.host, asdict(spec.readiness or Readiness())
            port = spec.port or _free_port(spec.host)
            command = [part.replace("{port}", str(port)) for part in command]
            environment = {"PORT": str(port), **environment}
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name in _INHERITED or name.startswith("LC_")
        }
        return {
            "id": order.id,
            "attempt": order.attempt,
            "category": spec.category,
            "command": command,
            "workdir": spec.workdir,
            "environment": {
                **inherited,
                **environment,
                **grant.environment,  # What it holds is not for the spec to say.
                **order.environment,
                marks.WORKLOAD: self._mark(order.id),
            },
            "cpus": grant.cpus,
            "devices": grant.rows,
            "memory_bytes": memory_bytes(spec.mem_limit) if spec.mem_limit else 0,
            "stop_seconds": spec.stop_seconds,
            "reset_command": spec.reset_command,
            "group": self._groups.of(self._shelf.folder(order.id)),
            "log_bytes_max": OUTPUT_BYTES_MAX,
            "port": port,
            "host": host,
            "probe": probe,
            "owner": None if self._outlive else os.getpid(),
        }

    def _supervise(self, folder: Path) -> None:
        """Start a supervisor and wait for its word.

        Raises:
            EngineError: The command cannot be run.

        """
        seen, told = os.pipe()
        words = os.fspath(folder / "supervisor.log")
        writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", str(_SUPERVISOR), str(folder), "3"],
                {},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, words, writing, 0o600),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                    (os.POSIX_SPAWN_DUP2, told, 3),
                ],
            )
        except OSError as error:
            raise EngineError(f"no supervisor can be started: {error}") from error
        finally:
            os.close(told)
        try:
            said = _line(seen, SUPERVISOR_SECONDS_MAX)
        finally:
            os.close(seen)
        report = json.loads(said) if said else {}
        if not said and shelf.holder(folder) is None:
            report = {"error": "its supervisor said nothing"}
        if "error" in report:
            raise EngineError(f"it did not start: {report['error']}")

    async def _until_ready(self, workload: str, spec: ProcessResourceSpec) -> Workload:
        folder = self._shelf.folder(workload)
        order = self._order(workload)
        while True:
            seen = await asyncio.to_thread(self._shelf.look, workload)
            if seen is None:
                raise EngineError(f"{workload} was stopped while it started")
            if seen.phase is Phase.READY:
                return self._noted(seen)
            if seen.phase.over:
                if (folder / "ready.json").exists():  # It was ready, and has ended since.
                    return seen
                if not isinstance(spec, ServiceResourceSpec) and seen.exit_code is not None:
                    return seen
                self._tell(seen)
                lines = "; ".join(seen.log_tail[-3:])
                raise EngineError(f"{seen.detail}{': ' if lines else ''}{lines}")
            if not isinstance(spec, ServiceResourceSpec):
                endpoint = ""
                break
            probe = spec.readiness or Readiness()
            if await self._answers(workload, order, probe):
                endpoint = f"http://{readiness.authority(spec.host, int(order['port']))}"
                break
            await asyncio.sleep(probe.every_seconds)
        shelf.write(folder / "ready.json", {"endpoint": endpoint})
        ready = Workload(workload, Phase.READY, endpoint=endpoint)
        self._tell(ready)
        return self._noted(ready)

    async def _answers(
        self, workload: str, order: Mapping[str, Any], probe: Readiness | None
    ) -> bool:
        """Ask a service whether it is ready; see `Part`."""
        if probe is None:
            return self._command_lives(workload)
        inside = self._inside(workload)
        return await readiness.answers(probe, order["host"], int(order["port"]), inside)

    # Ending ------------------------------------------------------------------------------------

    def _watch(self, workload: str, pid: int) -> "Future[None]":
        """Have the end of a supervisor noticed. Returns what is resolved then."""
        with self._lock:
            ended = self._ends.get(workload)
            if ended is not None:
                return ended
            ended = self._ends[workload] = Future()
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended(workload)
            return ended
        with self._lock:
            self._watched[workload] = (descriptor, pid)
        self._watcher.watch(descriptor, pid, lambda: self._ended(workload))
        return ended

    def _ended(self, workload: str) -> None:
        with self._lock:
            ended = self._ends.pop(workload)
            self._watched.pop(workload, None)
            self._ready.pop(workload, None)
        seen = self._shelf.look(workload)
        if seen is not None and seen.phase in {Phase.SUCCEEDED, Phase.FAILED}:
            self._tell(seen)
        ended.set_result(None)

    def _look(self, workload: str) -> Workload | None:
        """Return how a workload is, and watch it."""
        pid = shelf.holder(self._shelf.folder(workload))
        if pid is not None:
            self._watch(workload, pid)
        seen = self._shelf.look(workload)
        return self._noted(seen) if seen is not None else None

    def _noted(self, seen: Workload) -> Workload:
        """Note for `glance` that a workload is ready, if it is; its end takes the note back."""
        with self._lock:
            if seen.phase is Phase.READY and seen.id in self._ends:
                self._ready[seen.id] = seen
        return seen

    def _tail(self, workload: str) -> tuple[str, ...]:
        """Return the last lines that a process wrote; see `Part`."""
        return shelf.tail(self._shelf.folder(workload))

    def _sweep(self, workload: str) -> None:
        """Kill what no supervisor looks after: its own orphans, and commands run beside it."""
        marks.kill_marked(f"{marks.WORKLOAD}={self._mark(workload)}")
        control_groups.end(
            (shelf.read(self._shelf.folder(workload) / "order.json") or {}).get("group", "")
        )

    def _mark(self, workload: str) -> str:
        return str(self._shelf.folder(workload))


def _process(spec: BaseResourceSpec) -> ProcessResourceSpec:
    if isinstance(spec, VLLMModelResourceSpec):
        return spec.service()
    if not isinstance(spec, ProcessResourceSpec):
        raise UnsupportedSpecError(f"a {spec.category} is no process")
    if spec.mem_limit is not None:
        return replace(spec, mem_limit=memory_bytes(spec.mem_limit))
    return spec


def _line(descriptor: int, seconds_max: float) -> bytes:
    """Return the first line that comes through a pipe; empty where none does."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return os.read(descriptor, 4096) if poll.poll(seconds_max * 1000) else b""


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def _below(pid: int | None) -> list[int]:
    """Return the pids of all processes below one."""
    children: dict[int, list[int]] = {}
    for each in marks.all_pids():
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{each}/stat").read_bytes()
            children.setdefault(int(stat.rpartition(b")")[2].split()[1]), []).append(each)
    found: list[int] = []
    todo = [] if pid is None else [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _bound(pid: int, cpus: Collection[int], memory_bytes: int | None) -> None:
    """Bind all threads of a process to processors, if any, and bound its memory, if so.

    One that has ended meanwhile is passed over.
    """
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        if memory_bytes is not None:
            resource.prlimit(pid, resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        for thread in Path(f"/proc/{pid}/task").iterdir() if cpus else ():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cpus)

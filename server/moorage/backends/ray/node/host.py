"""The actor of one workload on one node of Ray: it runs the command, or holds the user's object.

Ray sends this code to the node, like `ray_devices`. `orders.plans` makes the `plan`. All methods
are coroutines, so the actor answers while the workload runs.
"""

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import ray

from moorage.backends.ray.node.containers import NodeContainer, free_port
from moorage.ray_devices import device_names, devices_of_actor
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue

_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_LOG_BYTES_MAX = 256 * 1024
_OUTPUT_BYTES_MAX = 1024 * 1024
_TAIL_LINES = 20
_TAIL_BYTES = 16 * 1024
_FAILED_FROM = 400

Report = JsonObject
"""A workload's report as JSON: some fields of `base.WorkloadReport`, such as `phase`."""


class _Kept:
    """Runs a command under `warden`, so that all its processes end with this process."""

    def __init__(
        self,
        warden: str,
        keep: JsonMapping,
        environment: Mapping[str, str],
        folder: str | Path,
        output: IO[bytes],
    ) -> None:
        self.code: int | None = None
        self.ended = threading.Event()
        self.gone = threading.Event()
        self._process = subprocess.Popen(  # noqa: S603  # Our own program.
            [sys.executable, "-I", "-S", "-c", warden],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=environment,
            cwd=folder,
        )
        assert self._process.stdout is not None
        self._tell(json.dumps(keep))
        said = json.loads(self._process.stdout.readline() or "{}")
        self._process.wait()  # The warden has forked.
        if "pid" not in said:
            raise OSError(said.get("error", "the processes of the command cannot be supervised"))
        self._leader = int(said["pid"])
        threading.Thread(target=self._listen, daemon=True).start()

    def end(self, seconds: float) -> None:
        """Send SIGTERM, and SIGKILL after some seconds; `gone` is set when no process is left."""
        self._tell(str(seconds))

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # The warden has ended.
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.code = json.loads(line).get("exit_code")
            self.ended.set()
        if not self.ended.is_set():  # The warden was killed, mostly by the command.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._leader, signal.SIGKILL)
        self.ended.set()
        self.gone.set()


class WorkloadHost:
    """Runs one workload on its node, as a Ray actor.

    Args:
        plan: The command or object to run, with its devices.
    """

    def __init__(self, plan: JsonMapping) -> None:
        self._plan = plan
        self._folder = Path(tempfile.mkdtemp(prefix="moorage-ray-"))
        self._work = Path(plan["workdir"] or self._folder / "work")
        self._log = self._folder / "output"
        self._log.touch()
        if not plan["workdir"]:
            self._work.mkdir()
        self._beginning: asyncio.Task[Report] | None = None
        self._report: Report = {"phase": "starting", "detail": plan["title"]}
        self._changing = threading.Lock()
        self._starting = threading.Lock()
        self._over: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._command: _Kept | None = None
        self._executions: set[_Kept] = set()
        self._object: Any = None
        self._stopping = False
        self._ending: asyncio.Future[bytes] | None = None
        self._port = 0
        self._gpus: list[str] = []
        self._container: NodeContainer | None = None
        self._written = 0
        self._environment: dict[str, str] = {}
        self._calls = ThreadPoolExecutor(plan["concurrency"], thread_name_prefix="call")
        self._own = ThreadPoolExecutor(8, thread_name_prefix="host")
        self._beside = ThreadPoolExecutor(64, thread_name_prefix="execute")
        self._awaiting: asyncio.AbstractEventLoop | None = None

    async def begin(self) -> Report:
        """Start the workload, unless it was started; return when it is ready or has ended.

        If Ray gave this actor other devices than the lease's, nothing is started, and the report
        has these devices as `given`.
        """
        if self._beginning is None:
            given = devices_of_actor()
            # A job's devices were checked when its placement group was made.
            gpus = self._plan["gpus"]
            if gpus is None:  # Without a lease, Ray's choice counts.
                self._gpus = given
            elif not self._plan["bundles"] and sorted(given) != sorted(device_names(gpus)):
                return {"phase": "pending", "given": given}
            self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
            self._beginning = asyncio.ensure_future(self._begin())
        return await asyncio.shield(self._beginning)

    async def report(self) -> Report:
        """Return the present report of the workload."""
        return self._report

    async def about(self) -> JsonMapping:
        """Return workload, attempt and stop seconds of this actor's plan."""
        return {name: self._plan[name] for name in ("workload", "attempt", "stop_seconds")}

    async def wait_for_end(self, seconds: float) -> Report | None:
        """Return the report of the workload's end; None if it still runs after `seconds`."""
        if self._over is None:
            await asyncio.sleep(seconds)
            return None
        try:
            await asyncio.wait_for(self._over.wait(), seconds)
        except TimeoutError:
            return None
        return self._report

    async def probe(self) -> Report:
        """Run the workload's readiness check, and return its report."""
        is_checked = self._report["phase"] == "ready" and self._plan["readiness"]
        if is_checked and not await self._in_thread(self._answers):
            return {**self._report, "phase": "starting", "endpoint": ""}
        return self._report

    async def call(self, method: str, *args: JsonValue, **kwargs: JsonValue) -> JsonValue:
        """Call a method of the user's object."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._calls, self._call, method, args, kwargs)

    async def logs(self, offset: int) -> tuple[bytes, int, bool, int | None]:
        """Return a piece of output, its offset, whether it is the last piece, and the exit code."""
        piece: tuple[bytes, int, bool, int | None]
        piece = await self._in_thread(lambda: self._read(offset))
        return piece

    async def execute(
        self,
        command: Sequence[str],
        seconds: float | None,
        folder: str | None,
        environment: Mapping[str, str],
    ) -> tuple[int | None, str]:
        """Run a command beside the workload; return its exit code (None: too slow) and output."""
        loop = asyncio.get_running_loop()
        done: tuple[int | None, str] = await loop.run_in_executor(
            self._beside, lambda: self._execute(command, seconds, folder, environment)
        )
        return done

    async def stop(self, seconds: float | None = None) -> tuple[bytes, int, int | None]:
        """End the workload, but not this process: the caller kills the process after the answer.

        If this process ended itself, the answer with the output could be lost. A second call
        returns the same result.

        Args:
            seconds: Seconds between SIGTERM and SIGKILL; None: as in the plan.

        Returns:
            The last part of its output, the offset of this part, and the exit code.
        """
        self._stopping = True
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._in_thread(lambda: self._end(seconds)))
        output = await asyncio.shield(self._ending)
        return output, max(self._written - len(output), 0), self._report.get("exit_code")

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._own, work)

    async def _begin(self) -> Report:
        plan = self._plan
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # Like Ray; CUDA's default is fastest first.
        named = self._gpus if plan["gpus"] is None else device_names(plan["gpus"])
        self._gpus = list(named)
        visible = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "MOORAGE_GPUS"), ",".join(named))
        self._environment = {**order, **plan["environment"], **visible}
        try:
            if plan["actor"] is not None:
                await asyncio.get_running_loop().run_in_executor(self._calls, self._construct)
            else:
                await self._in_thread(self._start)
                await self._until_ready()
        except Exception as error:  # noqa: BLE001  # The user's code may raise anything.
            self._finish("failed", f"{type(error).__name__}: {error}", None)
        endpoint = self._endpoint()
        with self._changing:  # The workload may be ending now.
            if self._report["phase"] == "starting":
                self._report = {**self._report, "phase": "ready", "endpoint": endpoint}
        return self._report

    def _construct(self) -> None:
        """Create the user's object; its output is stored like a command's."""
        actor = self._plan["actor"]
        output = os.open(self._log, os.O_WRONLY | os.O_APPEND)
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # Some streams lack it.
        os.environ.update(self._environment)
        module, _, name = actor["cls_path"].rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), name)
            self._object = kind(*actor["args"], **actor["kwargs"])
        except SystemExit as error:  # Would only end the event loop.
            raise RuntimeError(f"SystemExit: {error}") from error

    def _call(self, method: str, args: tuple[JsonValue, ...], kwargs: JsonMapping) -> JsonValue:
        try:
            result = getattr(self._object, method)(*args, **kwargs)
        except SystemExit as error:  # As above.
            raise RuntimeError(f"SystemExit: {error}") from error
        if not inspect.isawaitable(result):
            return result
        if self._awaiting is None:
            self._awaiting = asyncio.new_event_loop()
            threading.Thread(target=self._awaiting.run_forever, daemon=True).start()

        async def wait_result() -> JsonValue:
            return await result

        return asyncio.run_coroutine_threadsafe(wait_result(), self._awaiting).result()

    def _start(self) -> None:
        """Start the command, unless the workload is being stopped; a stop waits for this call."""
        with self._starting:
            if not self._stopping:
                self._start_command()

    def _start_command(self) -> None:
        plan = self._plan
        environment = {**os.environ, **self._environment}
        after: list[str] = []
        if plan["container"]:
            environment = dict(os.environ)  # For the engine's program only.
            made = NodeContainer(plan["container"], plan["host"], self._gpus, plan["environment"])
            command, after = made.run, made.remove
            self._container = made
        else:
            first, *rest = plan["command"]
            command = [sys.executable if first == "{python}" else first, *rest]
        if plan["port"] is not None:
            self._port = plan["port"] or free_port()
            command = [part.replace("{port}", str(self._port)) for part in command]
            environment["PORT"] = str(self._port)
        self._environment = environment
        if plan["bundles"]:
            site = self._folder / "site"
            site.mkdir()
            (site / "sitecustomize.py").write_text(plan["site"])
            known = environment.get("PYTHONPATH")
            environment["PYTHONPATH"] = f"{site}{os.pathsep}{known}" if known else str(site)
            environment["MOORAGE_RAY_GROUP"] = plan["group"]
            _order_devices(environment)
            # Without this variable, `ray.init()` might join another cluster, or start one.
            environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        keep = {"command": command, "memory_bytes": plan["memory_bytes"], "stay": False}
        keep |= {"folder": str(self._folder), "after": after}
        with self._log.open("ab") as output:
            self._command = _Kept(plan["warden"], keep, environment, self._work, output)
        threading.Thread(target=self._await_command, daemon=True).start()

    def _await_command(self) -> None:
        """Wait for the command's end and store its outcome; runs in its own thread."""
        assert self._command is not None
        self._command.gone.wait()
        code = self._command.code
        if self._stopping:
            phase, detail = "stopped", "it was stopped"
        elif code == 0:
            phase, detail = "succeeded", "exit status 0"
        elif code is None:
            phase, detail = "failed", "the processes of the workload were killed"
        else:
            ended = f"exit status {code}" if code > 0 else f"{signal.Signals(-code).name}"
            phase, detail = "failed", ended
        self._finish(phase, detail, code)

    def _finish(self, phase: str, detail: str, code: int | None) -> None:
        tail = self._tail() if phase == "failed" else []
        with self._changing:
            self._report = {"phase": phase, "detail": detail, "exit_code": code, "log_tail": tail}
        if self._loop is not None and self._over is not None:
            with contextlib.suppress(RuntimeError):  # The loop is closing.
                self._loop.call_soon_threadsafe(self._over.set)

    async def _until_ready(self) -> None:
        readiness = self._plan["readiness"]
        while readiness and self._report["phase"] == "starting":
            if await self._in_thread(self._answers):
                return
            await asyncio.sleep(readiness["every_seconds"])

    def _answers(self) -> bool:
        """Run each configured probe once; return whether all succeed."""
        readiness = self._plan["readiness"]
        seconds = readiness["timeout_seconds"]
        port = readiness["port"] or self._port
        if self._container is not None:
            if not self._container.runs():
                return False
            if not readiness["asked"]:
                return True
            port = self._container.ports.get(port, port)
        if readiness["command"]:
            code, _ = self._execute(readiness["command"], seconds, None, {}, stay=False)
            if code != 0:
                return False
        host = self._plan["host"]
        try:
            if readiness["path"] is not None:
                url = f"http://{host}:{port}/{readiness['path'].lstrip('/')}"
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                with opener.open(url, timeout=seconds) as reply:
                    return bool(reply.status < _FAILED_FROM)
            if not readiness["command"]:
                socket.create_connection((host, port), seconds).close()
        except urllib.error.HTTPError as error:
            return error.code < _FAILED_FROM
        except (OSError, ValueError):
            return False
        return True

    def _endpoint(self) -> str:
        if self._plan["actor"] is not None:
            return f"ray-actor://{self._plan['namespace']}/{self._plan['name']}"
        port = self._port
        if self._container is not None:
            port = self._container.ports.get(self._plan["container"]["container_port"], 0)
        if not port:
            return ""
        host = self._plan["host"]
        if host in {"0.0.0.0", "::"}:  # noqa: S104  # Compared, not bound.
            host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray has no types.
        return f"http://{host}:{port}"

    def _execute(
        self,
        command: Sequence[str],
        seconds: float | None,
        folder: str | None,
        environment: Mapping[str, str],
        *,
        stay: bool = True,
    ) -> tuple[int | None, str]:
        variables = {**os.environ, **self._environment, **environment}
        if self._container is not None:
            command, folder = self._container.execute(command, folder, environment), None
            variables = dict(os.environ)
        keep = {"command": list(command), "memory_bytes": 0, "stay": stay, "folder": ""}
        with tempfile.TemporaryFile() as output:
            with self._starting:
                if self._stopping:
                    raise OSError("the workload is being stopped")
                where = self._work / (folder or "")
                execution = _Kept(self._plan["warden"], keep, variables, where, output)
                self._executions = {each for each in self._executions if not each.gone.is_set()}
                self._executions.add(execution)
            done = execution.ended.wait(seconds)
            if not done:
                execution.end(0.0)
                execution.gone.wait()
            output.seek(0)
            text = output.read(_OUTPUT_BYTES_MAX).decode(errors="replace")
            if done and execution.code is None:
                raise OSError("the processes of the command were killed")
            return execution.code if done else None, text

    def _read(self, offset: int) -> tuple[bytes, int, bool, int | None]:
        over = self._report["phase"] not in {"starting", "ready"}  # Read first.
        size = self._log.stat().st_size
        start = max(size + offset, 0) if offset < 0 else min(offset, size)
        with self._log.open("rb") as file:
            file.seek(start)
            data = file.read(_LOG_BYTES_MAX)
        return data, start, over and start + len(data) >= size, self._report.get("exit_code")

    def _tail(self) -> list[str]:
        with self._log.open("rb") as file:
            file.seek(max(self._log.stat().st_size - _TAIL_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]

    def _end(self, seconds: float | None) -> bytes:
        with self._starting:  # Wait for starts under way.
            executions = list(self._executions)
        for each in executions:
            each.end(0.0)
        if self._command is not None:
            self._command.end(self._plan["stop_seconds"] if seconds is None else seconds)
            self._command.gone.wait()
        for each in executions:
            each.gone.wait()
        self._written = self._log.stat().st_size
        with self._log.open("rb") as file:
            file.seek(max(self._written - _OUTPUT_BYTES_MAX, 0))
            output = file.read()
        shutil.rmtree(self._folder, ignore_errors=True)
        return output


def _order_devices(environment: dict[str, str]) -> None:
    """Make CUDA number devices as Ray does in a job's tasks, unless the job sets the order."""
    config = json.loads(environment.get(_JOB_CONFIG, "{}"))
    given = config.setdefault("runtime_env", {}).setdefault("env_vars", {})
    given.setdefault("CUDA_DEVICE_ORDER", environment["CUDA_DEVICE_ORDER"])
    environment[_JOB_CONFIG] = json.dumps(config)
    environment.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")

"""Starts, calls, watches and restarts the driver: the process that speaks to Ray."""

import asyncio
import contextlib
import itertools
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from moorage.backends.base import BackendError, UnknownWorkloadError
from moorage.launch import command
from moorage.records.json_values import JsonMapping, JsonValue

CONNECT_SECONDS_MAX: Final = 60.0
"""Longest time that the driver may take to connect to the cluster."""
SILENCE_SECONDS_MAX: Final = 15.0
"""Longest time without an answer of Ray; after that the driver is killed and started again."""
PAUSES_SECONDS: Final = (0.5, 1.0, 2.0, 5.0)
"""Pauses in seconds before restarts of the driver: one per failure in a row; the last repeats."""
WAITING_SECONDS: Final = 0.05
"""Seconds between two checks whether the driver is connected to the cluster."""
READ_BYTES: Final = 1 << 16
WORDS_MAX: Final = 500
"""Maximum characters shown of the last log line of a driver that ended."""
_ENDED: Final = "its process ended"


class RayUnreachableError(BackendError):
    """Ray does not answer; workloads may still run, in an unknown state."""


class WorkloadFailedError(BackendError):
    """Ray answered that a workload did not start, or cannot be stopped."""


class RayConnection:
    """Runs one driver process from the first call until `close`; a later call starts a new one.

    Args:
        address: Address of the Ray cluster.
        server: Returns the server's id, with which its actors' names begin.
        connected: Called in a thread whenever the driver has connected to the cluster.
        ended: Called in a thread with the name and report of a workload that ended by itself.
    """

    def __init__(
        self,
        address: str,
        server: Callable[[], str],
        namespace: str,
        folder: Path,
        connected: Callable[[], None],
        ended: Callable[[str, JsonMapping], None],
    ) -> None:
        self.address = address
        self._server = server
        self._namespace = namespace
        self._folder = folder
        self._connected = connected
        self._ended = ended
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[JsonValue]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._up = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._trouble = ""
        self._failures = 0

    @property
    def trouble(self) -> str:
        """Why Ray cannot be reached; empty while Ray answers."""
        return "" if self._up.is_set() else self._trouble or "it has not answered yet"

    @property
    def pid(self) -> int | None:
        """The pid of the driver process; None if no driver runs."""
        with self._lock:
            return self._process.pid if self._process is not None else None

    async def call(self, name: str, seconds: float | None, /, **arguments: JsonValue) -> JsonValue:
        """Send a call to the driver, and return its answer.

        Args:
            name: Name of the call; see `driver`.
            seconds: Longest wait for the answer; None: no limit.
            **arguments: Arguments of the call.

        Raises:
            RayUnreachableError: Ray does not answer.
            WorkloadFailedError: The workload failed.
            UnknownWorkloadError: No workload has this name.
        """
        self.open()
        connecting = min(CONNECT_SECONDS_MAX, seconds or CONNECT_SECONDS_MAX)
        if not await self._wait(connecting):
            raise RayUnreachableError(f"Ray at {self.address} is not reached: {self.trouble}")
        number = next(self._numbers)
        future: Future[JsonValue] = Future()
        with self._lock:
            if self._process is None:  # The driver has just ended.
                raise RayUnreachableError(f"Ray at {self.address} is not reached: {self.trouble}")
            self._waiting[number] = future
        self._write({"id": number, "call": name, "arguments": arguments})
        try:
            async with asyncio.timeout(seconds):
                answer = await asyncio.wrap_future(future)
        except TimeoutError:
            reason = f"Ray at {self.address} has not answered {name} within {seconds:g} s"
            raise RayUnreachableError(reason) from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        if "value" in answer:
            return answer["value"]
        if answer["kind"] == "unknown":
            raise UnknownWorkloadError(str(arguments.get("workload", "")))
        if answer["kind"] == "failure":
            raise WorkloadFailedError(answer["error"])
        raise RayUnreachableError(f"Ray at {self.address}: {answer['error']}")

    def open(self) -> None:
        """Start the driver process, unless it runs."""
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="ray", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the driver process; workloads on Ray continue to run."""
        self._closing.set()
        with self._lock:
            process, thread = self._process, self._thread
        if process is not None:
            process.kill()
        if thread is not None:
            thread.join()
        with self._lock:
            self._thread, self._trouble = None, ""
        self._closing.clear()

    async def _wait(self, seconds: float) -> bool:
        """Wait until the driver is connected or has failed; return True if it is connected."""
        deadline = time.monotonic() + seconds
        failures = self._failures
        while not self._up.is_set():
            failed = self._failures > failures
            if self._closing.is_set() or failed or time.monotonic() > deadline:
                return False
            await asyncio.sleep(WAITING_SECONDS)  # A thread's event cannot wake the loop.
        return True

    def _write(self, message: JsonMapping) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            process = self._process
            if process is None or process.stdin is None:
                return  # The driver's end fails the call with its reason.
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except OSError:
                return  # As above.

    def _run(self) -> None:
        pauses = iter(PAUSES_SECONDS)
        pause = PAUSES_SECONDS[0]
        while not self._closing.is_set():
            self._start()
            if self._serve():
                pauses = iter(PAUSES_SECONDS)
            pause = next(pauses, pause)
            self._closing.wait(pause)

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        arguments = (self.address, self._server(), self._namespace)
        environment = {"RAY_USAGE_STATS_ENABLED": "0", **os.environ}
        with (self._folder / "driver.log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603  # Our own program.
                command("moorage.backends.ray.driver.__main__", *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        with self._lock:
            self._process = process
        if self._closing.is_set():
            process.kill()

    def _serve(self) -> bool:
        """Read the driver's messages until it ends; return whether the driver ever connected."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        trouble = _ENDED
        found = False
        rest = b""
        while True:
            limit = SILENCE_SECONDS_MAX if found else CONNECT_SECONDS_MAX
            ready, _, _ = select.select([process.stdout], [], [], limit)
            if not ready:
                trouble = f"no answer for {limit:g} s"
                break
            data = os.read(process.stdout.fileno(), READ_BYTES)
            if not data:
                trouble += self._last_words() if trouble == _ENDED else ""
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                trouble = message.get("fatal", trouble)
                if "connected" in message:
                    found, self._trouble = True, ""
                    self._up.set()
                    self._connected()
                elif "ended" in message:
                    self._ended(message["ended"], message["report"])
                elif "id" in message:
                    self._take_answer(message)
        process.kill()
        process.wait()
        self._trouble = trouble
        self._up.clear()
        with self._lock:
            self._process = None
            process.stdin.close()
            process.stdout.close()
            left, self._waiting = self._waiting, {}
        self._failures += not found
        for future in left.values():
            if not future.done():
                future.set_result({"kind": "trouble", "error": trouble})
        return found

    def _last_words(self) -> str:
        """Return `: ` and the last line of the driver's log, for the end of a message; or ""."""
        with contextlib.suppress(OSError):
            lines = (self._folder / "driver.log").read_text(errors="replace").split("\n")
            return next((f": {each[:WORDS_MAX]}" for each in reversed(lines) if each.strip()), "")
        return ""

    def _take_answer(self, message: JsonMapping) -> None:
        with self._lock:
            future = self._waiting.pop(message["id"], None)
        if future is not None and not future.done():
            future.set_result(message)

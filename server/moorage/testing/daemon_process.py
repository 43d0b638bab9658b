"""A real daemon as a child process, for tests, benchmarks and the commands that need one."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moorage.backends.local.workload_store import holder
from moorage.config.settings import CONFIG_FILE, EXECUTION_NAMES, EXTERNAL_SERVICES
from moorage.lab.errors import CommandError
from moorage.records.json_values import JsonObject

_ELSEWHERE: Final = {**EXTERNAL_SERVICES, **EXECUTION_NAMES}
NOT_INHERITED: Final = frozenset(
    {CONFIG_FILE, *(f"MOORAGE_{each}" for each in ("HOST", "HTTP_HOST", "STORAGE", "TOKENS"))}
    | {*_ELSEWHERE}
    | {f"MOORAGE_{setting.upper()}" for setting in _ELSEWHERE.values()}
)
"""Variables of an operator's own daemon that child daemons must not inherit: child daemons run on
loopback, with built-in parts and without tokens."""
READY_SECONDS_MAX: Final = 180.0
"""Seconds that a child process may take until it is ready."""
STOP_SECONDS_MAX: Final = 60.0
"""Seconds that a child process may take to stop before it is killed."""
STDERR_LINES_SHOWN: Final = 20


class ServerError(CommandError):
    """A server of `moorage.testing` did not start, did not stop, or refused an order."""


@dataclass(frozen=True, slots=True)
class Running:
    """A daemon that accepts requests.

    Args:
        ws: URL of the daemon's WebSocket.
        http: URL of the daemon's HTTP services.
        pid: Id of the daemon's process.
        log: File that the daemon's stderr goes to.
    """

    ws: str
    http: str
    pid: int
    log: Path


@contextlib.contextmanager
def daemon(
    data: Path | None = None,
    *,
    options: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[Running]:
    """Run `moored serve` on free loopback ports until the block ends.

    Args:
        data: The daemon's data directory; None: a temporary directory. Afterwards, the workloads
            of its daemon on this machine are stopped, and the directory is removed.
        options: Further flags of `moored serve`.
        environment: Further variables of the daemon's environment.

    Raises:
        ServerError: The daemon did not become ready, or did not stop cleanly.
    """
    with tempfile.TemporaryDirectory(prefix="moorage-") as folder:
        command = [*serve_command(data or Path(folder) / "data"), *options]
        log = Path(folder) / "stderr.log"
        variables = {**serve_variables(), **(environment or {})}
        with child(command, log, variables) as (process, ready):
            yield Running(ready["ws"], ready["http"], process.pid, log)
        if data is None:
            _end_workloads(Path(folder) / "data")
        if process.returncode != 0:
            raise ServerError(f"the daemon ended with exit code {process.returncode}:\n{tail(log)}")


def _end_workloads(data: Path) -> None:
    """Stop the workloads of a removed data folder: no other daemon would find them."""
    for folder in (data / "local" / "running").glob("*"):
        with contextlib.suppress(ProcessLookupError):  # The process has ended meanwhile.
            if (supervisor := holder(folder)) is not None:
                ended = os.pidfd_open(supervisor)
                try:
                    signal.pidfd_send_signal(ended, signal.SIGTERM)
                    select.select([ended], [], [], STOP_SECONDS_MAX)
                finally:
                    os.close(ended)


def serve_command(data: Path) -> list[str]:
    """Return the command that starts a daemon over a folder, on free loopback ports."""
    ports = ["--port", "0", "--http-port", "0", "--data", str(data)]
    return [sys.executable, "-P", "-m", "moorage", "serve", *ports]


def serve_variables() -> dict[str, str]:
    """Return the environment of a daemon that a command starts."""
    given = {name: text for name, text in os.environ.items() if name not in NOT_INHERITED}
    return {"MOORAGE_LOG_LEVEL": "warning", **given}


@contextlib.contextmanager
def child(
    command: Sequence[str], log: Path, variables: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], JsonObject]]:
    """Run a program that prints one JSON line when it is ready; stop it when the block ends."""
    process = None
    try:
        with log.open("w") as errors, _defer_sigterm():
            process = subprocess.Popen(  # noqa: S603  # Our own program.
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables
            )
        yield process, _ready(process, log)
    finally:
        if process is not None:
            stop(process)
            if process.stdout is not None:
                process.stdout.close()


@contextlib.contextmanager
def _defer_sigterm() -> Iterator[None]:
    """Defer SIGTERM to the end of the block: a child that is being started would stay alive."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Handlers run in the main thread alone.
        return
    arrived: list[int] = []
    handler = signal.signal(signal.SIGTERM, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
    for number in arrived:
        signal.raise_signal(number)


def stop(process: "subprocess.Popen[str]") -> None:
    """Ask a child process to stop; kill it if it does not."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-STDERR_LINES_SHOWN:])


def _ready(process: "subprocess.Popen[str]", log: Path) -> JsonObject:
    assert process.stdout is not None
    late = threading.Timer(READY_SECONDS_MAX, process.kill)
    late.daemon = True  # The end of this process does not wait for the timer.
    try:
        late.start()
        line = process.stdout.readline()
    finally:
        late.cancel()
    if not line:
        process.wait()
        raise ServerError(f"{process.args!r} did not become ready:\n{tail(log)}")
    ready: JsonObject = json.loads(line)
    return ready

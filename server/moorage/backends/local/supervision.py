"""Starts the supervisor of a process, and waits for its report. `Processes` is the only caller."""

import json
import os
import select
import sys
from pathlib import Path
from typing import Final

from moorage.backends.base import BackendError
from moorage.backends.local import marks, workload_store

SUPERVISOR_SECONDS_MAX: Final = 30.0
"""Longest wait until a supervisor reports that the command runs."""
_SUPERVISOR: Final = Path(__file__).with_name("supervisor.py")


def begin(folder: Path) -> None:
    """Start a supervisor and wait for its report.

    Raises:
        BackendError: The command cannot be run.
    """
    seen, written = os.pipe()
    log_path = os.fspath(folder / "supervisor.log")
    writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", str(_SUPERVISOR), str(folder), "3"],
            {marks.SUPERVISOR: os.fspath(folder.absolute())},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log_path, writing, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
                (os.POSIX_SPAWN_DUP2, written, 3),
            ],
        )
    except OSError as error:
        raise BackendError(f"no supervisor can be started: {error}") from error
    finally:
        os.close(written)
    try:
        line = _line(seen, SUPERVISOR_SECONDS_MAX)
    finally:
        os.close(seen)
    report = json.loads(line) if line else {}
    if not line and workload_store.holder(folder) is None:
        report = {"error": "its supervisor said nothing"}
    if "error" in report:
        raise BackendError(f"it did not start: {report['error']}")


def _line(descriptor: int, seconds_max: float) -> bytes:
    """Return the first line from a pipe; empty if none comes in time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return os.read(descriptor, 4096) if poll.poll(seconds_max * 1000) else b""

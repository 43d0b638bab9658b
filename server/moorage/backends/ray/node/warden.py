"""Supervises one command; ends all its processes on an order, or when the actor is gone.

`host` runs the text of this file as a program beside a workload's actor; it needs only the standard
library. Its standard input has two lines. The first is JSON: `command`; `memory_bytes` (0: no
limit); `after`, a command to run when no process is left; `stay`, whether processes that the
command leaves behind may run on; and `folder`. The second is an order to stop: the seconds between
SIGTERM and SIGKILL. The end of the input means that the actor is gone: then all processes are
killed at once, and `folder` is removed. The warden writes two lines of JSON. The first has the pid
of the command, or the error of its start. The second has the exit code; it comes when no process is
left, or with `stay` when the command has ended. The warden closes its output last.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import threading

AFTER_SECONDS_MAX = 60.0
"""Longest run of the command `after`, which cleans up."""
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl: this process adopts orphaned descendants."""


def _descendants() -> list[int]:
    """Return the pids of all present descendants of this process."""
    parents: dict[int, int] = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue  # The process has ended.
        parents[int(folder.name)] = int(parent)
    found = {os.getpid()}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        grown = bool(more)
        found |= more
    return [pid for pid in found if pid != os.getpid()]


def _signal_all(number: int) -> None:
    for pid in _descendants():
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _obey(main: int) -> None:
    """Wait for an order on standard input, then end the command; runs in its own thread."""
    line = sys.stdin.readline()
    if not line:
        _alone.set()
    seconds = float(line) if line.strip() else 0.0
    if seconds > 0:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(main, signal.SIGTERM)
        _over.wait(seconds)
    _over.set()
    _signal_all(signal.SIGKILL)


_over = threading.Event()
"""Set when the command has ended or must end; then all its remaining processes are killed."""

_alone = threading.Event()
"""Set when the actor is gone, so that this process must remove the actor's folder."""


def _say(message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # The actor may be gone.
        os.write(1, json.dumps(message).encode() + b"\n")


def _keep(main: int, after: list[str], *, stay: bool) -> None:
    """Wait until the command and all its descendants have ended, and report its exit code."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        if pid == main:
            code = os.waitstatus_to_exitcode(status)
            if stay:
                _say({"exit_code": code})
            else:
                _over.set()
        if _over.is_set():
            _signal_all(signal.SIGKILL)
    if after:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(after, check=False, capture_output=True, timeout=AFTER_SECONDS_MAX)  # noqa: S603  # Our own command.
    if not stay:
        _say({"exit_code": code})


def main() -> None:
    """Start the command, and supervise its processes until all have ended."""
    plan = json.loads(sys.stdin.readline())
    # When an actor dies, Ray kills its child processes and its process group; this process must
    # survive.
    if os.fork():
        return
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        begun = subprocess.Popen(  # noqa: S603  # The user's own command.
            plan["command"],
            stdin=subprocess.PIPE if plan.get("after") else subprocess.DEVNULL,
            stdout=2,
            stderr=2,
            start_new_session=True,
        )
    except OSError as error:
        _say({"error": f"{plan['command'][0]}: {error.strerror}"})
        return
    if plan["memory_bytes"]:
        bound = (plan["memory_bytes"], plan["memory_bytes"])
        resource.prlimit(begun.pid, resource.RLIMIT_AS, bound)
    _say({"pid": begun.pid})
    threading.Thread(target=_obey, args=(begun.pid,), daemon=True).start()
    _keep(begun.pid, plan.get("after", []), stay=plan["stay"])
    if _alone.is_set() and plan["folder"]:
        shutil.rmtree(plan["folder"], ignore_errors=True)


if __name__ == "__main__":
    main()

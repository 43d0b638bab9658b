"""Removes a daemon's containers after the daemon has ended or crashed; a separate program.

`Containers` starts it beside a process that uses the resource engine as a library, since the
library's containers must end with that process. Its arguments are the container engine's socket, a
label and its value, and the process's pid. The program uses only the standard library, so that it
starts fast.

Beside an agent, the program outlives the agent, and kills containers while the server is silent. An
agent passes the path of `heard.json` (see `deadline`) instead of a pid.
"""

import contextlib
import fcntl
import http.client
import json
import os
import select
import socket
import sys
import time
import urllib.parse
from pathlib import Path

QUIET_SECONDS = 5.0
"""Seconds to watch for further containers: a request of the ended daemon may be under way."""
REAP_SECONDS_MAX = 120.0
"""Longest time for the whole removal; after that, remaining containers are left alone."""
PAUSE_SECONDS = 0.5
ANSWER_SECONDS_MAX = 30.0


class _Connection(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def __init__(self, place: str) -> None:
        super().__init__("localhost", timeout=ANSWER_SECONDS_MAX)
        self._place = place

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(ANSWER_SECONDS_MAX)
        self.sock.connect(self._place)


def start(place: str, label: str, value: str, contact_file: str = "") -> int:
    """Start this program, to watch the calling process or a contact file; return its pid."""
    about = contact_file or str(os.getpid())
    command = [sys.executable, "-I", "-S", __file__, place, label, value, about]
    quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    return os.posix_spawn(
        sys.executable, command, {}, setsid=True, file_actions=quiet if contact_file else []
    )


def reap(place: str, label: str, value: str) -> None:
    """Remove all containers whose `label` has this value, until no more appear."""
    filters = urllib.parse.quote(json.dumps({"label": [f"{label}={value}"]}))
    deadline = time.monotonic() + REAP_SECONDS_MAX
    quiet_since = time.monotonic()
    while time.monotonic() < min(deadline, quiet_since + QUIET_SECONDS):
        quiet = False
        try:
            found = json.loads(_say(place, "GET", f"/containers/json?all=1&filters={filters}"))
            for each in found:
                _say(place, "POST", f"/containers/{each['Id']}/kill")
                _say(place, "DELETE", f"/containers/{each['Id']}?force=1&v=1")
            quiet = not found
        except (OSError, ValueError, http.client.HTTPException):
            pass  # The next round tries again.
        if not quiet:
            quiet_since = time.monotonic()
        time.sleep(PAUSE_SECONDS)  # No event reports the absence of containers.


def guard(place: str, label: str, value: str, contact_file: str) -> None:
    """Kill the labelled containers while the server is silent; return when the file is removed.

    If another reaper with this file runs already, return at once.
    """
    lock = os.open(f"{contact_file}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        while True:
            document = json.loads(Path(contact_file).read_text(encoding="utf-8"))
            if time.clock_gettime(time.CLOCK_BOOTTIME) > document["at"] + document["seconds"]:
                with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                    kill(place, label, value)
            time.sleep(PAUSE_SECONDS)  # Polls the clock.
    except (BlockingIOError, FileNotFoundError):
        return


def kill(place: str, label: str, value: str) -> None:
    """Kill all running containers whose `label` has this value; the daemon removes them later."""
    filters = urllib.parse.quote(json.dumps({"label": [f"{label}={value}"]}))
    for each in json.loads(_say(place, "GET", f"/containers/json?filters={filters}")):
        _say(place, "POST", f"/containers/{each['Id']}/kill")


def _say(place: str, method: str, path: str) -> bytes:
    with contextlib.closing(_Connection(place)) as connection:
        connection.request(method, path)
        return connection.getresponse().read()


def main(place: str, label: str, value: str, owner: int) -> None:
    """Wait until the owner process has ended; then remove its containers."""
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(owner)
        if os.getppid() == owner:  # Else the owner has ended, and the pid may be reused.
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            poll.poll()
    reap(place, label, value)


if __name__ == "__main__":
    if sys.argv[4].isdigit():
        main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        guard(*sys.argv[1:])

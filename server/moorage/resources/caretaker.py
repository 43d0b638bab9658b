"""Opens remote backends, and ends their workloads when this process has ended.

Workloads on this machine end with the process that started them. Workloads on Ray, Kubernetes or
AWS would keep running. So another process, the caretaker, waits until this process ends for any
reason, and then stops its remaining workloads.
"""

import asyncio
import contextlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final

from moorage.backends.base import Backend, BackendError
from moorage.backends.registry import kinds
from moorage.launch import command

BEGUN: Final = b"+"
"""The byte that tells the caretaker that a workload is about to be started."""
NOTHING: Final = b"-"
"""The byte that tells the caretaker that a start left no workload, or its workload has ended."""

TRY_SECONDS: Final = 5.0
"""Seconds between two tries to end the workloads that are left."""
TRY_SECONDS_MAX: Final = 300.0
"""Seconds after which the caretaker gives up on the workloads that are left."""


def open_backend(name: str, root: Path) -> Backend:
    """Open a backend at the address that the environment names for it."""
    return kinds()[name].open_alone(root, os.environ)


def watch(name: str, root: Path) -> int:
    """Stop the remaining workloads of a backend when this process has ended.

    Returns:
        A file descriptor. The caller writes `BEGUN` before each start, and `NOTHING` when that
        start left no workload or its workload was ended. If workloads may be left, the caretaker
        looks for them. Keep the descriptor open: it closes when this process ends.
    """
    theirs, ours = os.pipe()
    actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_DUP2, theirs, 0)]
    actions += [(os.POSIX_SPAWN_OPEN, each, os.devnull, os.O_WRONLY, 0) for each in (1, 2)]
    program = command(__name__, name, os.fspath(root))
    os.posix_spawn(program[0], program, os.environ, file_actions=actions, setsid=True)
    os.close(theirs)
    return ours


def main() -> None:
    """Wait until the parent process has ended; then stop its workloads and remove its folder."""
    name, root = sys.argv[1], Path(sys.argv[2])
    said = sys.stdin.buffer.read()
    left = said.count(BEGUN) > said.count(NOTHING)
    until = time.monotonic() + TRY_SECONDS_MAX
    while left and time.monotonic() < until:
        with contextlib.suppress(BackendError):
            asyncio.run(_end_all(open_backend(name, root)))
            break
        time.sleep(TRY_SECONDS)  # No event reports that a cluster can be reached again.
    shutil.rmtree(root, ignore_errors=True)


async def _end_all(backend: Backend) -> None:
    try:
        found = await backend.discover()
        await asyncio.gather(*(backend.stop(each.id) for each in found))
    finally:
        await backend.close()

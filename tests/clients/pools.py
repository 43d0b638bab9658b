"""Helpers that serve slot pools with the command line, as users do."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from moorage_client.pool import ResourcePoolAdapter

MOORAGE = Path(sys.executable).with_name("moorage")
SECONDS_MAX = 30


@contextlib.contextmanager
def serving(*options: str, **environment: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Serve a slot pool until the block ends; yield its address and its process."""
    command = [MOORAGE, "pool", "serve", *options]
    given = environment or dict(os.environ)
    process = subprocess.Popen(command, env=given, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], SECONDS_MAX)
        line = process.stdout.readline() if readable else ""
        assert line, "no ready line"
        yield json.loads(line)["address"], process
        if process.poll() is None:
            process.terminate()
            assert process.wait(SECONDS_MAX) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def refusal(*options: str, **environment: str) -> str:
    """Try to serve a pool at an address that is refused; return the error."""
    command, given = [MOORAGE, "pool", "serve", *options], environment or dict(os.environ)
    done = subprocess.run(
        command, env=given, capture_output=True, text=True, check=False, timeout=SECONDS_MAX
    )
    assert done.returncode == 2
    return done.stderr


def free(pool: ResourcePoolAdapter, kind: str = "gpus") -> float:
    return sum(row["slots"] for row in pool.state()["resources"][kind])


def comes_back(pool: ResourcePoolAdapter, slots: float) -> bool:
    """Wait until the pool has the given number of free GPUs."""
    deadline = time.monotonic() + SECONDS_MAX
    while free(pool) != slots and time.monotonic() < deadline:
        time.sleep(0.01)  # No event reports that the server noticed the end.
    return free(pool) == slots

"""Starts the servers of peers on loopback; each ends with the `with` block that started it."""

import asyncio
import contextlib
import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Final

from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import tail

READY_SECONDS_MAX: Final = 120.0
STOP_SECONDS_MAX: Final = 20.0
POLL_SECONDS: Final = 0.05


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Make a folder that other users may read, and that is removed when the block ends."""
    with tempfile.TemporaryDirectory(prefix="moorage-", ignore_cleanup_errors=True) as path:
        Path(path).chmod(0o755)
        yield Path(path)


@contextlib.asynccontextmanager
async def program(
    command: Sequence[str], port: int | None, log: Path, variables: dict[str, str] | None = None
) -> AsyncIterator[int]:
    """Run a server until the block ends; yield its process id, once `port` (if any) answers."""
    tied = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
    with log.open("wb") as output:
        child = subprocess.Popen(  # noqa: ASYNC220, S603  # It starts at once; our own arguments.
            [*tied, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(variables or {})},
        )
    try:
        if port is not None:
            await _answers(child, port, log)
        yield child.pid
    finally:
        child.terminate()
        try:
            await asyncio.to_thread(child.wait, STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


async def _answers(child: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    async with asyncio.timeout(READY_SECONDS_MAX):
        while True:
            if child.poll() is not None:
                raise CommandError(f"{child.args!r} ended:\n{tail(log)}")
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(POLL_SECONDS)
            else:
                writer.close()
                return


def find_program(name: str, *patterns: str) -> str | None:
    """Return the path of a program: on the PATH, or the newest file that matches a pattern."""
    if path := shutil.which(name):
        return path
    paths = [each for pattern in patterns for each in Path("/").glob(pattern.lstrip("/"))]
    return str(max(paths)) if paths else None


def version_of(path: str | None, *flags: str) -> str | None:
    """Return the version that a program prints; None if there is no program or no version."""
    if path is None:
        return None
    done = subprocess.run(  # noqa: S603  # A program of a peer, with our own arguments.
        [path, *(flags or ("--version",))], capture_output=True, text=True, check=False
    )
    numbers = re.search(r"\d+(\.\d+)+", done.stdout + done.stderr)
    return numbers[0] if numbers else None


def library(*names: str) -> str | None:
    """Return the version of the first of some Python packages; None if one is not installed."""
    try:
        first, *_ = [importlib.metadata.version(name) for name in names]
    except importlib.metadata.PackageNotFoundError:
        return None
    return first

"""Runs a command beside a workload's process; `Processes.execute` is the only caller."""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from moorage.backends.base import BackendError, CommandExecution
from moorage.backends.completion import finish
from moorage.backends.local import marks

OUTPUT_BYTES_MAX: Final = 1024 * 1024
"""Maximum bytes of a command's output that are stored; the rest is dropped."""
OUTPUT_SECONDS: Final = 0.5
"""Seconds to read on after the command's end: its child processes may keep the pipe open."""
_CHUNK_BYTES: Final = 65_536


async def run(
    command: Sequence[str],
    *,
    folder: str,
    environment: Mapping[str, str],
    begun: Callable[[int], None],
    timeout_seconds: float | None,
    membership: int | None = None,
    confine: Callable[[], None] | None = None,
) -> CommandExecution:
    """Run a command to its end, and return its outcome. Its background processes keep running.

    Args:
        command: The program and its arguments.
        folder: The working folder.
        environment: All environment variables of the command.
        begun: Called with the pid of the started command.
        timeout_seconds: Longest run of the command; None: no limit.
        membership: Descriptor of `cgroup.procs` of the group for the command and its child
            processes.
        confine: Hides folders from the calling process; called in the child, before it enters
            `folder`.

    Raises:
        BackendError: The command cannot be run.
        TimeoutError: The command took too long; it was killed with all its child processes.
    """
    if not os.path.isdir(folder):  # noqa: ASYNC240, PTH112  # One look; a path may be relative.
        raise BackendError(f"{folder}: {os.strerror(errno.ENOENT)}")
    mark = uuid.uuid4().hex
    seen, written = os.pipe()
    output = _Output(seen)
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                cwd=folder if confine is None else None,
                env={**environment, marks.EXECUTION: mark},
                start_new_session=True,
                preexec_fn=_preparation(folder, membership, confine),
            )
        except subprocess.SubprocessError as error:  # A step before exec failed.
            raise BackendError(
                f"the command cannot run in {folder}, or cannot be confined"
            ) from error
        except OSError as error:
            raise BackendError(f"{command[0]}: {error.strerror or error}") from error
        finally:
            os.close(written)
        begun(process.pid)
        try:
            async with asyncio.timeout(timeout_seconds):
                code = await process.wait()
                return CommandExecution(code, await output.text())
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(BackendError):  # The rest ends with the workload.
                await finish(asyncio.to_thread(marks.kill_by_mark, f"{marks.EXECUTION}={mark}"))
            await finish(process.wait())
            if isinstance(error, TimeoutError):
                reason = f"{command[0]} ran longer than {timeout_seconds} s"
                raise TimeoutError(reason) from None
            raise
    finally:
        output.close()


def _preparation(
    folder: str, membership: int | None, confine: Callable[[], None] | None
) -> Callable[[], None] | None:
    """Return the function that the child process calls before it executes the command, or None."""

    def prepare() -> None:  # In the child: must take no lock that a thread may hold.
        if membership is not None:
            with contextlib.suppress(OSError):  # The group may have been removed.
                os.write(membership, b"0")
        if confine is not None:
            confine()
            os.chdir(folder)

    return None if membership is None and confine is None else prepare


class _Output:
    """Reads the output of a command from a pipe as it arrives."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._data = bytearray()
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._read)

    async def text(self) -> str:
        """Return the whole output; if a process keeps the pipe open, the output so far."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OUTPUT_SECONDS):
                await self._over.wait()
        return self._data.decode(errors="replace")

    def close(self) -> None:
        """Stop reading the pipe, and close it."""
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._descriptor, _CHUNK_BYTES)
            self._data += data[: OUTPUT_BYTES_MAX - len(self._data)]
            if not data:
                self._loop.remove_reader(self._descriptor)
                self._over.set()

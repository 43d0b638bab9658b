"""Runs commands in pods, over a WebSocket of the API server.

A shell in the container merges standard output and error in order, and prints the pid to kill on a
timeout, since Kubernetes has no call for that.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from moorage.backends.base import BackendError, CommandExecution, exit_code
from moorage.backends.kubernetes.connection import ClusterConnection
from moorage.backends.kubernetes.errors import KubernetesError
from moorage.backends.kubernetes.workloads import manifests
from moorage.backends.kubernetes.workloads.states import PodState

PROTOCOL: Final = "v4.channel.k8s.io"
OUTPUT_BYTES_MAX: Final = 1024 * 1024
"""Maximum bytes of a command's output that are stored; the rest is read and dropped."""
KILL_SECONDS_MAX: Final = 5.0
_INNER: Final = (
    'exec 2>&1; echo "$$"; if [ -n "$1" ]; then cd "$1" || exit 126; fi; shift; exec "$@"'
)
_OUTER: Final = f"/bin/sh -c '{_INNER}' sh \"$@\"; printf '\\n%d' \"$?\""
_SHELL: Final = ("/bin/sh", "-c", _OUTER, "sh")
"""Shell wrapper that prints the command's pid first and its exit code last."""
_LAST_BYTES: Final = 16


@dataclass(slots=True)
class _Written:
    """Collects the first and the last bytes of a command's output."""

    first: bytearray = field(default_factory=bytearray)
    last: bytes = b""
    count: int = 0

    def add(self, data: bytes) -> None:
        self.first += data[: max(OUTPUT_BYTES_MAX + _LAST_BYTES - len(self.first), 0)]
        self.last = (self.last + data)[-_LAST_BYTES:]
        self.count += len(data)

    @property
    def process(self) -> int | None:
        line, end, _ = bytes(self.first[:_LAST_BYTES]).partition(b"\n")
        return int(line) if end and line.isdigit() else None

    @property
    def code(self) -> int | None:
        _, end, line = self.last.rpartition(b"\n")
        return int(line) if end and line.isdigit() else None

    def output(self) -> str:
        begins = self.first.index(b"\n") + 1
        ends = self.count - len(self.last.rpartition(b"\n")[2]) - 1
        return bytes(self.first[begins:ends][:OUTPUT_BYTES_MAX]).decode(errors="replace")


async def execute(
    connection: ClusterConnection,
    pod: PodState,
    command: Sequence[str],
    timeout_seconds: float | None,
    workdir: str,
    environment: Mapping[str, str],
) -> CommandExecution:
    """Run a command in the container of a pod.

    Raises:
        BackendError: The API server refused the command, or the container has no /bin/sh.
        TimeoutError: The command took too long, and was killed.
    """
    variables = [f"{key}={text}" for key, text in environment.items()]
    whole = [*_SHELL, workdir, *(["env", *variables] if variables else []), *command]
    written = _Written()
    try:
        async with asyncio.timeout(timeout_seconds):
            said = await _run(connection, pod, whole, written)
    except TimeoutError:
        await _kill(connection, pod, written.process)
        raise TimeoutError(f"the command took longer than {timeout_seconds:g} s") from None
    except KubernetesError as error:
        raise BackendError(f"no command can be run in pod {pod.name}: {error}") from error
    if written.process is None or written.code is None:
        reason = said or "the connection was cut"
        raise BackendError(f"the command did not run in pod {pod.name} by /bin/sh: {reason}")
    return CommandExecution(exit_code(written.code), written.output())


async def _run(
    connection: ClusterConnection, pod: PodState, command: Sequence[str], written: _Written
) -> str:
    """Run a command, collect its output in `written`, and return the status from Kubernetes."""
    path = f"{manifests.PODS.format(pod.namespace)}/{pod.name}/exec"
    query = [("container", manifests.CONTAINER), ("stdout", "true"), ("stderr", "true")]
    query += [("command", each) for each in command]
    async with connection.socket(path, query, PROTOCOL) as socket:
        async for message in socket:
            data = message.data if isinstance(message.data, bytes) else b""
            if data[:1] in {b"\x01", b"\x02"}:  # Standard output and error.
                written.add(data[1:])
            elif data[:1] == b"\x03":
                return str(msgspec.json.decode(data[1:]).get("message", ""))
    return ""


async def _kill(connection: ClusterConnection, pod: PodState, process: int | None) -> None:
    if process is None:
        return  # The command never began.
    with contextlib.suppress(KubernetesError, TimeoutError):
        async with asyncio.timeout(KILL_SECONDS_MAX):
            kill = ["/bin/sh", "-c", f"kill -9 {process}"]
            await _run(connection, pod, kill, _Written())

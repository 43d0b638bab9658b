"""The interface of all backends: one Protocol, and the types of its arguments and results.

Two callers: the daemon's workload control, which names workloads by lease, and `ResourceEngine`,
whose user names them. Calls are idempotent by name: after a crash the caller repeats its orders,
and nothing is started twice.

    BackendError                 the backend cannot do that; the message says why
    ├── UnknownWorkloadError     no workload of this name runs, or ran lately
    │   └── UnknownAttemptError  the workload is known, but this start of it no longer is
    ├── UnknownFileError         a run has no such file
    ├── UnsupportedSpecError     this backend can never do it: use another backend or spec
    ├── BackendUnavailableError  the backend's address or credentials are not configured
    └── EngineClosedError        the resource engine was closed while the caller waited

`UnsupportedSpecError` and `BackendUnavailableError` are also `ValueError`s. A start that takes too
long raises `TimeoutError`, as everywhere in Python.
"""

import codecs
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol, assert_never, runtime_checkable

from moorage.backends.completion import stop_bound
from moorage.backends.specs import BaseResourceSpec
from moorage.model import DeviceId, Placement
from moorage.records.json_values import JsonMapping, JsonValue

LOG_TAIL_LINES: Final = 20
"""Number of last lines of a workload's output in the report of its failure."""
LOG_BYTES_MAX: Final = 256 * 1024
"""Maximum bytes that one call of `logs` returns."""

RUN_FILES_MAX: Final = 10_000
"""Maximum files of a run that are listed."""
FILE_BYTES_MAX: Final = 256 * 1024
"""Maximum bytes that one call of `read_file` returns."""

_SIGNALS: Final = 128
"""A container that a signal ended has the exit code 128 plus the signal's number."""


class BackendError(Exception):
    """A call of a backend failed; after a failed start, nothing of the workload is left."""


class UnknownWorkloadError(BackendError):
    """The backend has no workload of this name."""

    def __init__(self, workload: str) -> None:
        super().__init__(f"nothing runs under the name {workload!r}")


class UnknownAttemptError(UnknownWorkloadError):
    """The backend stores nothing about this start of the workload.

    Args:
        workload: Name of the workload.
        attempts: Numbers of the starts with stored data, in order.
    """

    def __init__(self, workload: str, attempts: tuple[int, ...]) -> None:
        super().__init__(workload)
        self.attempts = attempts


class UnknownFileError(BackendError):
    """The folder of a run has no such plain file."""


class UnsupportedSpecError(BackendError, ValueError):
    """This backend can never do what the spec asks for: use another backend or spec."""


class BackendUnavailableError(BackendError, ValueError):
    """The environment has no address or credentials for the backend; nothing was started."""


class EngineClosedError(BackendError):
    """The resource engine was closed while the caller waited."""


class Phase(StrEnum):
    """The phase of a workload."""

    PENDING = "pending"
    """The backend has not begun to start the workload."""
    PULLING = "pulling"
    """The workload's image is being pulled, or its machine is being started."""
    STARTING = "starting"
    """The workload exists, and is not ready yet."""
    READY = "ready"
    """The workload runs, and passes its readiness check if it has one."""
    LOST = "lost"
    """The workload's machine does not report; the workload may still run there."""
    SUCCEEDED = "succeeded"
    """The workload ended by itself with success: a process with exit status 0."""
    FAILED = "failed"
    """The workload ended by itself with a failure."""
    STOPPED = "stopped"
    """The backend stopped the workload."""

    @property
    def over(self) -> bool:
        """Whether nothing of the workload is left to stop."""
        match self:
            case Phase.PENDING | Phase.PULLING | Phase.STARTING | Phase.READY | Phase.LOST:
                return False
            case Phase.SUCCEEDED | Phase.FAILED | Phase.STOPPED:
                return True
            case _:
                assert_never(self)


@dataclass(frozen=True, slots=True)
class Order:
    """The order to run a workload.

    Args:
        id: Name of the workload: the lease's id, or the name that the library's user chose.
        spec: The spec of the workload to start.
        placement: Nodes and devices; empty: the backend chooses them.
        environment: Variables for the workload, e.g. the lease's id.
        timeout_seconds: Longest time until it must be ready; None: no limit.
        attempt: Number of this start of the workload, from 1; each start has its own output.
        fencing: Fencing number of the grant; 0: there is no lease.
        tenant: The lease's tenant; empty: there are no tenants.
        devices: The devices of `placement`, as in `model.Lease.devices`.
        stop_seconds_max: Limit for the spec's seconds between SIGTERM and SIGKILL; None: no limit.
        resumed: Whether the workload was ready before, under an earlier daemon. If so, the backend
            finds it; a missing member of a gang counts as lost, and is not started.
    """

    id: str
    spec: BaseResourceSpec
    placement: Placement = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout_seconds: float | None = None
    attempt: int = 1
    fencing: int = 0
    tenant: str = ""
    devices: tuple[tuple[DeviceId, ...], ...] = ()
    stop_seconds_max: float | None = None
    resumed: bool = False

    def bound_stop(self, seconds: float) -> float:
        """Return the seconds between SIGTERM and SIGKILL: `seconds`, up to the order's limit."""
        return seconds if self.stop_seconds_max is None else min(seconds, self.stop_seconds_max)

    def undo_seconds(self, error: BaseException) -> float | None:
        """Return the `stop_seconds_max` for the cleanup after a start that raised `error`."""
        bound = stop_bound(error)
        return self.stop_seconds_max if bound is None else self.bound_stop(bound)


@dataclass(frozen=True, slots=True)
class WorkloadReport:
    """The state of a workload, as its backend reports it.

    Args:
        id: The workload's name, as in the `Order`.
        phase: The workload's phase.
        endpoint: Address of the workload, if possible as a URL; empty before it is ready.
        detail: One sentence for a person: the progress, or the reason of the failure.
        exit_code: Exit code of an ended process; negative: a signal's number; None: unknown.
        log_tail: Last lines of its output if it failed, at most `LOG_TAIL_LINES`.
    """

    id: str
    phase: Phase
    endpoint: str = ""
    detail: str = ""
    exit_code: int | None = None
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CommandExecution:
    """The outcome of a command that ran in a workload.

    Args:
        exit_code: Exit code of the command; negative: a signal's number.
        output: The command's standard output and error, in the order of writing.
    """

    exit_code: int
    output: str


def exit_code(code: int) -> int:
    """Return a container's exit code in the backends' form: minus N if signal N ended it."""
    return _SIGNALS - code if _SIGNALS < code <= _SIGNALS + signal.SIGRTMAX else code


Listener = Callable[[WorkloadReport], None]
"""A function that the backend calls with a report at every change of a workload.

A listener may be called in any thread, must not block, and must not raise."""


NO_NODE: Final = ""
"""An id that no node has. A backend with only this id in `Support.nodes` can start nothing yet."""


@dataclass(frozen=True, slots=True)
class Support:
    """The abilities of a backend beyond start and stop.

    Args:
        categories: Categories of the specs that it starts.
        default: Category of a spec that names none.
        limits: Names of the limits that `control` can change while a workload runs.
        reset: Whether every used workload can be restored to its initial state.
        execute: Whether commands can be run inside a workload.
        logs: Whether a workload's output can be read.
        gangs: Whether one workload may have several nodes.
        nodes: Names of the nodes that it starts on; empty if it starts on any.
        clusters: Ids of the clusters that it starts in; empty if it starts in any.
        kinds: Spec classes by category, where this backend's class differs from the common one.
    """

    categories: frozenset[str]
    default: str
    limits: frozenset[str] = frozenset()
    reset: bool = False
    execute: bool = False
    logs: bool = False
    gangs: bool = False
    nodes: frozenset[str] = frozenset()
    clusters: frozenset[str] = frozenset()
    kinds: Mapping[str, type[BaseResourceSpec]] = field(
        default_factory=dict[str, type[BaseResourceSpec]]
    )


@dataclass(frozen=True, slots=True)
class Log:
    """A piece of a workload's output.

    Args:
        text: The output from the requested offset on.
        offset: Offset of the next piece.
        over: Whether this is the last piece: the workload has ended.
        exit_code: Exit code of an ended process; negative: a signal's number; None: unknown.
        data: The bytes of `text`, as they were written.
    """

    text: str
    offset: int
    over: bool = False
    exit_code: int | None = None
    data: bytes = field(default=b"", compare=False, repr=False)

    @classmethod
    def of(cls, data: bytes, start: int, *, over: bool, exit_code: int | None = None) -> "Log":
        """Return a piece of output; an incomplete character at its end goes to the next piece.

        Args:
            data: The piece.
            start: Offset of the piece.
            over: Whether it is the last piece.
            exit_code: Exit code of an ended process; None: unknown.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data, final=over)
        rest, _ = decoder.getstate()
        whole = data[: len(data) - len(rest)]
        return cls(text, start + len(whole), over, exit_code, whole)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files that a workload left in its folder.

    Args:
        files: Path and size of each plain file.
        left_out: Path of each entry that cannot be fetched, and the reason.
    """

    files: tuple[tuple[str, int], ...]
    left_out: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A piece of a file of a run.

    Args:
        data: The bytes of the piece.
        offset: Offset of the next piece.
        over: Whether it is the last piece.
    """

    data: bytes
    offset: int
    over: bool


@runtime_checkable
class FileSource(Protocol):
    """Reads the working folders of workloads, even of ended ones."""

    async def files(self, workload: str, attempt: int = 0) -> RunFiles:
        """List the files of one start of a workload; `attempt` as in `logs`.

        Raises:
            UnsupportedSpecError: This workload has no folder of its own.
            UnknownWorkloadError: No workload has this name.
        """

    async def read_file(
        self, workload: str, path: str, offset: int = 0, attempt: int = 0
    ) -> FilePiece:
        """Read a piece of a file of one start of a workload, at most `FILE_BYTES_MAX`.

        Raises:
            UnknownFileError: The folder has no such file, or the path would leave the folder.
            UnsupportedSpecError: This workload has no folder of its own.
            UnknownWorkloadError: No workload has this name.
        """


class Backend(Protocol):
    """A backend starts and stops workloads; `provision.backend` names it.

    Several threads and event loops may use one backend; a call need not come from the loop that
    started the workload.

    A gang that was ready and lost a member has failed, until it is stopped: `discover`, `start`,
    `status` and `probe` report that, `glance` returns None, and the listener is called. The detail
    names the member's node. The other members run on until the stop that follows.
    """

    @property
    def name(self) -> str:
        """The name of the backend in requests."""

    @property
    def support(self) -> Support:
        """The abilities of the backend beyond start and stop."""

    def listen(self, listener: Listener | None) -> None:
        """Call `listener` at every change of a workload from now on; None: call nothing."""

    def refuse(self, spec: BaseResourceSpec) -> None:
        """Refuse a spec that this backend cannot start, before a lease is granted for it.

        Raises:
            UnsupportedSpecError: This backend can never start it.
        """

    async def discover(self) -> Collection[WorkloadReport]:
        """Return all workloads of this backend, also those that an earlier daemon started.

        A workload that ended by itself is listed until it is stopped, so that a restarted daemon
        learns how it ended.
        """

    async def start(self, order: Order) -> WorkloadReport:
        """Start a workload, unless it runs already, and wait until it is ready.

        A cancelled start leaves nothing behind; `task.cancel(seconds)` sets the `stop_seconds_max`
        of its cleanup (see `stop`). A workload that was started before and has ended is not started
        again: its end is returned.

        Raises:
            BackendError: The workload did not become ready and was removed.
            TimeoutError: The workload did not become ready in time and was removed.
        """

    async def stop(self, workload: str, stop_seconds_max: float | None = None) -> None:
        """Stop a workload; return when all its parts are gone. A second call does nothing.

        Args:
            workload: Name of the workload.
            stop_seconds_max: Limit for the spec's seconds between SIGTERM and SIGKILL; None: no
                limit.

        Raises:
            BackendError: The workload cannot be stopped, and may still use its devices.
        """

    async def status(self, workload: str) -> WorkloadReport:
        """Return the present report of a workload.

        Raises:
            UnknownWorkloadError: No workload has this name.
        """

    async def probe(self, workload: str) -> WorkloadReport:
        """Return the report of a workload; if it is ready, run its readiness check first.

        A paused workload, or one that does not answer, is reported as `STARTING`.

        Raises:
            UnknownWorkloadError: No workload has this name.
        """

    def glance(self, workload: str) -> WorkloadReport | None:
        """Return the report of a workload without waiting, if it is certainly ready; else None.

        After None, call `probe`.
        """

    async def control(self, workload: str, limits: JsonMapping) -> None:
        """Change limits of a running workload: all given ones, or on an error none.

        Raises:
            UnsupportedSpecError: A limit is not in `support.limits`, or its value is invalid.
            UnknownWorkloadError: No workload has this name.
        """

    async def reset(self, workload: str) -> JsonValue:
        """Restore a used workload to its initial state, for the next user.

        Raises:
            UnsupportedSpecError: This kind of workload cannot be reset.
            BackendError: The reset failed; the workload must not be used again.
        """

    async def execute(
        self,
        workload: str,
        command: Sequence[str],
        *,
        timeout_seconds: float | None = None,
        workdir: str | None = None,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> CommandExecution:
        """Run a command in a workload.

        Raises:
            UnsupportedSpecError: This kind of workload runs no commands.
            UnknownWorkloadError: No workload has this name.
            TimeoutError: The command took too long, and was killed.
        """

    async def logs(self, workload: str, offset: int = 0, attempt: int = 0) -> Log:
        """Read a piece of a workload's output from a byte offset on, at most `LOG_BYTES_MAX`.

        A negative offset counts from the end; `attempt` as in `Order`, 0 for the last start.

        Raises:
            UnsupportedSpecError: This backend stores no output.
            UnknownWorkloadError: No workload has this name.
            UnknownAttemptError: The workload exists, but this start's output is no longer stored.
        """

    async def close(self) -> None:
        """Close the backend. Workloads continue to run."""


class CommonBackend:
    """Default implementations of the methods of `Backend` that most backends share."""

    _listener: Listener | None = None

    def listen(self, listener: Listener | None) -> None:
        """Call `listener` at every change of a workload; see `Backend.listen`."""
        self._listener = listener

    def _tell(self, workload: WorkloadReport) -> None:
        if self._listener is not None:
            self._listener(workload)

    def glance(self, workload: str) -> WorkloadReport | None:
        """Return None: without a call, it is not certain that a workload is ready."""
        del workload
        return None

    async def control(self: Backend, workload: str, limits: JsonMapping) -> None:
        """Refuse to change a limit: this backend can change none."""
        await self.status(workload)
        if limits:
            names = ", ".join(sorted(limits))
            raise UnsupportedSpecError(f"the backend {self.name} has no limit named {names}")

"""The interface of all backends: one Protocol, and the types of its arguments and results.

Two callers: the daemon's workload control, which names workloads by lease, and `ResourceEngine`,
which names them as its user does. Calls are idempotent by that name: after a crash the same order
is given again, and nothing is started twice.

    BackendError                 the backend cannot do that; the message says why
    ├── UnknownWorkloadError     nothing of that name runs, or ran lately
    │   └── UnknownAttemptError  it does, or did; of that start nothing is known any more
    ├── UnknownFileError         a run has no such file
    ├── UnsupportedSpecError     this backend never can: another backend or spec is needed
    ├── BackendUnavailableError  nothing says where the backend is, or how to log in there
    └── EngineClosedError        the resource engine was closed while the caller waited

`UnsupportedSpecError` and `BackendUnavailableError` are a `ValueError`, too. A start that takes too
long is a `TimeoutError`, as everywhere in Python.
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
"""Bytes that one call of `logs` returns at most."""

RUN_FILES_MAX: Final = 10_000
"""Files of a run that are listed."""
FILE_BYTES_MAX: Final = 256 * 1024
"""Bytes that one call of `read_file` returns at most."""

_SIGNALS: Final = 128
"""The exit code of a container that a signal ended is this plus the signal's number."""


class BackendError(Exception):
    """A call of the backend failed; after a failed start, nothing of the workload is left."""


class UnknownWorkloadError(BackendError):
    """The backend has no workload of this name."""

    def __init__(self, workload: str) -> None:
        super().__init__(f"nothing runs under the name {workload!r}")


class UnknownAttemptError(UnknownWorkloadError):
    """The backend stores nothing about this start of the workload.

    Args:
        workload: Its name.
        attempts: The starts of which something is, in order.
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
        id: Name of the workload: of the lease, or what the user of the library chose.
        spec: What to start.
        placement: Where, device by device; empty if the backend chooses for itself.
        environment: Variables for the workload, e.g. the lease's id.
        timeout_seconds: How long it may take to be ready; None for as long as it takes.
        attempt: Which start under this name it is, from 1: each has output of its own.
        fencing: Of the grant that it is started for; 0 if there is none.
        tenant: Whose it is; empty if there are no tenants.
        devices: As `model.Lease.devices`, of `placement`.
        stop_seconds_max: The most that it may ask for between the signal to end and being killed;
            None if that is not bounded.
        resumed: Whether it was ready before, under another daemon: then it is found, and what is
            missing of a gang was lost rather than never made.
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
        """Return the seconds between SIGTERM and SIGKILL: those given, up to the order's limit."""
        return seconds if self.stop_seconds_max is None else min(seconds, self.stop_seconds_max)

    def undo_seconds(self, error: BaseException) -> float | None:
        """Return the `stop_seconds_max` for what a start leaves that ended with `error`."""
        bound = stop_bound(error)
        return self.stop_seconds_max if bound is None else self.bound_stop(bound)


@dataclass(frozen=True, slots=True)
class WorkloadReport:
    """The state of a workload, as its backend reports it.

    Args:
        id: Its name, as in the `Order`.
        phase: How far it is.
        endpoint: Where it is reached, as a URL where there is one; empty before it is ready.
        detail: One sentence for a person: what is going on, or why it failed.
        exit_code: Of a process that ended; negative is a signal's number, None is not known.
        log_tail: Its last lines, at most `LOG_TAIL_LINES`, where it failed.
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
        exit_code: Of the command; negative is a signal's number.
        output: Its standard output and error, in the order they were written.
    """

    exit_code: int
    output: str


def exit_code(code: int) -> int:
    """Return a container's exit code in the backends' form: minus N if signal N ended it."""
    return _SIGNALS - code if _SIGNALS < code <= _SIGNALS + signal.SIGRTMAX else code


Listener = Callable[[WorkloadReport], None]
"""A function that the backend calls at every change of a workload, also without an order.

It may be called in any thread, must not block, and must not raise."""


NO_NODE: Final = ""
"""An id that no node has. A backend with only this id in `Support.nodes` can start nothing yet."""


@dataclass(frozen=True, slots=True)
class Support:
    """The abilities of a backend beyond start and stop.

    Args:
        categories: Of the specs that it starts.
        default: Category of a spec that names none.
        limits: Which limits `control` changes while a workload runs.
        reset: Whether every used workload can be made as new.
        execute: Whether a command can be run inside of a workload.
        logs: Whether a workload's output can be read.
        gangs: Whether one workload may have several nodes.
        nodes: Names of the nodes that it starts on; empty if it starts on any.
        clusters: Ids of the clusters that it starts in; empty if it starts in any.
        kinds: What a category of spec means here, where it means something else elsewhere.
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
        text: What was written since the offset.
        offset: Where to go on.
        over: The workload has ended, and nothing will follow.
        exit_code: Of a process that ended; negative is a signal's number, None is not known.
        data: The text as it was written, byte by byte.
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
            start: Its offset.
            over: Nothing will follow.
            exit_code: See above.
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
        left_out: Path of what cannot be fetched, and why.
    """

    files: tuple[tuple[str, int], ...]
    left_out: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A piece of a file of a run.

    Args:
        data: What it is.
        offset: Where to go on.
        over: Nothing follows.
    """

    data: bytes
    offset: int
    over: bool


@runtime_checkable
class FileSource(Protocol):
    """A backend that can read the folders of its workloads, also of ended ones."""

    async def files(self, workload: str, attempt: int = 0) -> RunFiles:
        """List the files of a start of a workload; `attempt` is as in `logs`.

        Raises:
            UnsupportedSpecError: This workload has no folder of its own.
            UnknownWorkloadError: There is none of that name.
        """

    async def read_file(
        self, workload: str, path: str, offset: int = 0, attempt: int = 0
    ) -> FilePiece:
        """Read a file of a start of a workload; at most `FILE_BYTES_MAX` at a time.

        Raises:
            UnknownFileError: There is none, or the path would leave the folder.
            UnsupportedSpecError: As `files`; so does `UnknownWorkloadError`.
        """


class Backend(Protocol):
    """A backend starts and stops workloads; `provision.backend` names it.

    Engines are used from several threads and event loops; none of their calls belongs to the loop
    that started a workload.

    A gang that was ready and lost a member has failed: `discover`, `start`, `status` and `probe`
    say so, `glance` says nothing, and the listener is called, until it is stopped. The detail names
    the node of the member. What is left of the gang goes on until the stop that follows.
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
            UnsupportedSpecError: It could never be started as it says.
        """

    async def discover(self) -> Collection[WorkloadReport]:
        """Return all workloads of this backend, also those that an earlier daemon started.

        A workload that ended by itself is listed until it is stopped, so that a restarted daemon
        learns how it ended.
        """

    async def start(self, order: Order) -> WorkloadReport:
        """Start a workload, unless it runs already, and wait until it is ready.

        Cancelled, it leaves nothing behind: `task.cancel(seconds)` bounds how long that takes, as
        `stop_seconds_max` of `stop` does. A workload that has ended since its start is not started
        again: its end is returned.

        Raises:
            BackendError: It did not get ready; nothing of it is left.
            TimeoutError: Nor did it in time; nothing of it is left.
        """

    async def stop(self, workload: str, stop_seconds_max: float | None = None) -> None:
        """Stop a workload; return when nothing of it is left. A second time does nothing.

        Args:
            workload: Its name.
            stop_seconds_max: The most that it has between the signal to end and being killed,
                whatever its spec says; None if that is not bounded.

        Raises:
            BackendError: It cannot be stopped; it may still be using what it holds.
        """

    async def status(self, workload: str) -> WorkloadReport:
        """Return the present report of a workload.

        Raises:
            UnknownWorkloadError: There is none of that name.
        """

    async def probe(self, workload: str) -> WorkloadReport:
        """Return the report of a workload; if it is ready, run its readiness check first.

        A workload that does not answer is `STARTING` again, as is a paused one.

        Raises:
            UnknownWorkloadError: There is none of that name.
        """

    def glance(self, workload: str) -> WorkloadReport | None:
        """Return the report of a workload without waiting, if it is surely ready now; else None.

        After None, `probe` finds out.
        """

    async def control(self, workload: str, limits: JsonMapping) -> None:
        """Change limits of a running workload, all of them or none.

        Raises:
            UnsupportedSpecError: One of them is not in `support.limits`, or its value is no good.
            UnknownWorkloadError: There is none of that name.
        """

    async def reset(self, workload: str) -> JsonValue:
        """Restore a used workload to its initial state, for the next user.

        Raises:
            UnsupportedSpecError: This kind of workload cannot be.
            BackendError: It could not be, and must not be used again.
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
            UnsupportedSpecError: This kind of workload takes none.
            UnknownWorkloadError: There is none of that name.
            TimeoutError: It took too long, and was killed.
        """

    async def logs(self, workload: str, offset: int = 0, attempt: int = 0) -> Log:
        """Read the output of a workload, from a byte offset on; at most `LOG_BYTES_MAX` at a time.

        A negative offset counts from the end; `attempt` is as in the `Order`, 0 for the last one.

        Raises:
            UnsupportedSpecError: This backend keeps no output.
            UnknownWorkloadError: There is none of that name.
            UnknownAttemptError: There is, and nothing is known of that start any more.
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
        """Return None: this backend cannot know without a call; see `Backend.glance`."""
        del workload
        return None

    async def control(self: Backend, workload: str, limits: JsonMapping) -> None:
        """Refuse: no limit can be changed; see `Backend.control`."""
        await self.status(workload)
        if limits:
            names = ", ".join(sorted(limits))
            raise UnsupportedSpecError(f"the backend {self.name} has no limit named {names}")

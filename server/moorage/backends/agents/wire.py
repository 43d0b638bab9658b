"""Frames between the server and its agents: MessagePack, one per WebSocket message.

An agent sends `AgentHello`. The server answers `AgentWelcome` or `AgentFarewell`, then sends
orders, each in an `AgentCall`; the agent reports results. Both sides import this module: `link` and
`host`.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Final, TypeVar, cast

import msgspec

from moorage.backends.base import (
    LOG_TAIL_LINES,
    Backend,
    BackendError,
    CommandExecution,
    Log,
    Order,
    UnknownAttemptError,
    UnknownFileError,
    UnknownWorkloadError,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.spec_documents import document_from_spec, spec_from_document
from moorage.backends.specs import SpecError
from moorage.model import DeviceId, Placement
from moorage.records.fields import SHOWN
from moorage.records.json_values import JsonObject

VERSION: Final = 3
"""Version of these frames. An agent with another version gets an `AgentFarewell`."""
BEATS_MISSED_MAX: Final = 4
"""Longest silence in beats; then either end closes the connection, and the agent reconnects."""
SENTENCE_CHARS_MAX: Final = 4_000
"""Maximum characters of an agent's text for leases and logs; the rest is cut off."""

EXIT_CODE_MAX: Final = (1 << 31) - 1
"""Largest exit code, the maximum of a C integer; the smallest is `-EXIT_CODE_MAX - 1`."""
NAME_CHARS_MAX: Final = 100
"""Maximum characters of a release's number, and of an agent's id."""
ADDRESSES_MAX: Final = 64
"""Maximum hardware addresses of a machine that its agent sends."""
T = TypeVar("T")
_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX, pattern=SHOWN)]


class _Frame(msgspec.Struct, tag=True):
    pass


class AgentFolder(msgspec.Struct, frozen=True):
    """Marks that tell an agent's data folder from a copy of that folder.

    Args:
        made_at: Creation time by the file system, in nanoseconds since the epoch: programs cannot
            copy it. 0: the file system does not store it.
        addresses: Hardware addresses of the machine, which a copied disk does not have.
        boot: Id of the kernel's present boot; empty: unknown.
    """

    made_at: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    addresses: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=ADDRESSES_MAX)] = ()
    boot: Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)] = ""

    def is_copy_of(self, first: "AgentFolder") -> bool:
        """Return whether this folder is a copy of the one that was seen first.

        Only marks that both folders have are compared. One common hardware address means the same
        machine. After a reboot of the machine, no workload of the first agent is left, so a copy
        does no harm.
        """
        other = 0 != self.made_at != first.made_at != 0
        same_start = self.boot and self.boot == first.boot
        if same_start or not (self.addresses and first.addresses):
            return other  # The same boot means the same machine, even with other network cards.
        if not set(self.addresses) & set(first.addresses):
            return True
        return other and not (self.boot and first.boot)


class AgentHello(_Frame):
    """The first frame of an agent.

    Args:
        version: Version of its frames.
        agent: Id of its data folder, created once.
        node: The agent's machine, as a node of a cluster document.
        unheard_seconds: Seconds without contact to the server after which it ends its workloads; 0:
            never.
        busy: Devices that foreign processes use; see `backends.local.measurements.Measurement`.
        folder: Marks of its data folder; None: the agent's release does not send them.
    """

    version: int
    release: _Name
    agent: _Name
    node: JsonObject
    unheard_seconds: Annotated[float, msgspec.Meta(ge=0)]
    busy: dict[str, str]
    folder: AgentFolder | None = None


class AnyHello(msgspec.Struct, tag="AgentHello"):
    """The fields of a hello that agents of all versions send."""

    version: int
    release: str = ""


class AgentBeat(_Frame):
    """A sign of life of the agent, with the sending time by the agent's clock."""

    at: float


class AgentNews(_Frame):
    """Reports the state of a workload."""

    report: WorkloadReport


class AgentMetrics(_Frame):
    """The metrics of the machine; see `backends.local.measurements.Measurement`.

    With `at`, the frame also counts as a beat.
    """

    groups: dict[str, dict[str, float]]
    gpus: list[dict[str, float]]
    busy: dict[str, str]
    at: float | None = None


class AgentDone(_Frame):
    """The agent's answer to a call that succeeded, with the result."""

    id: int
    value: msgspec.Raw


class AgentFailure(_Frame):
    """The agent's answer to a call that failed, with the error."""

    id: int
    kind: str
    reason: str
    attempts: tuple[int, ...] = ()

    @classmethod
    def of(cls, call: int, error: Exception) -> "AgentFailure":
        """Return the frame for a backend's error."""
        kind = next((name for name, kind in _ERRORS.items() if type(error) is kind), "failed")
        attempts = error.attempts if isinstance(error, UnknownAttemptError) else ()
        return cls(call, kind, str(error) or type(error).__name__, attempts)

    def error(self, workload: str) -> Exception:
        """Return the error in the frame, about the given workload."""
        if self.kind == "unknown_attempt":
            return UnknownAttemptError(workload, self.attempts)
        if self.kind == "unknown_workload":
            return UnknownWorkloadError(workload)
        return _ERRORS.get(self.kind, BackendError)(self.reason[:SENTENCE_CHARS_MAX])


_ERRORS: Final[dict[str, type[Exception]]] = {
    "unknown_attempt": UnknownAttemptError,
    "unknown_workload": UnknownWorkloadError,
    "unsupported": UnsupportedSpecError,
    "unknown_file": UnknownFileError,
    "timeout": TimeoutError,
}


class AgentWelcome(_Frame):
    """The server's answer that accepts an agent.

    Args:
        cluster_id: The cluster of the agent's machine.
        node_id: The node that stands for the machine in this cluster.
        key: The key to send instead of the joining token from now on; empty: keep the present one.
        epoch: Epoch of the leading server; an agent accepts no orders of earlier epochs.
        beat_seconds: Seconds between two beats.
    """

    cluster_id: str
    node_id: str
    key: str
    epoch: int
    beat_seconds: float


class AgentFarewell(_Frame):
    """The server's answer that refuses an agent.

    Args:
        final: Whether the server will refuse every later attempt, too.
    """

    reason: str
    final: bool


class AgentHeard(_Frame):
    """The server's confirmation of a beat; `at` is copied from the beat."""

    at: float


class MeetOrder(_Frame):
    """Asks for an address at which a gang's members reach this machine; answered by `Meeting`."""


class Meeting(msgspec.Struct):
    """The address of a machine for members of a gang on other machines.

    Args:
        port: A free port.
    """

    address: str
    port: int


class _WorkloadOrder(_Frame):
    workload: str


class DiscoverOrder(_Frame):
    """Asks for the machine's workloads, as `Backend.discover` returns them."""


class StartOrder(_WorkloadOrder):
    """Starts a workload by `Backend.start`; all fields except `spec` are as in `Order`."""

    spec: JsonObject
    placement: Placement
    environment: dict[str, str]
    timeout_seconds: float | None
    attempt: int
    fencing: int
    tenant: str
    devices: tuple[tuple[DeviceId, ...], ...]
    stop_seconds_max: float | None
    resumed: bool

    @classmethod
    def of(cls, order: Order) -> "StartOrder":
        """Return the frame of an order."""
        fields = {name: getattr(order, name) for name in _COMMON}
        return cls(workload=order.id, spec=document_from_spec(order.spec), **fields)

    def order(self, backend: Backend) -> Order:
        """Return the order for the machine's backend.

        Raises:
            UnsupportedSpecError: This release cannot read the spec.
        """
        support = backend.support
        try:
            spec = spec_from_document(self.spec, support.default, support.kinds)
        except SpecError as error:
            reason = f"the agent of this machine cannot read the spec: {error}; upgrade it"
            raise UnsupportedSpecError(reason) from error
        return Order(self.workload, spec, **{name: getattr(self, name) for name in _COMMON})


_COMMON: Final = tuple(
    each.name for each in dataclasses.fields(Order) if each.name not in {"id", "spec"}
)


class StopOrder(_WorkloadOrder):
    """Stops a workload by `Backend.stop`."""

    stop_seconds_max: float | None


class StatusOrder(_WorkloadOrder):
    """Asks for a workload's report by `Backend.status`."""


class ProbeOrder(_WorkloadOrder):
    """Probes a workload by `Backend.probe`."""


class ControlOrder(_WorkloadOrder):
    """Changes limits of a workload by `Backend.control`."""

    limits: JsonObject


class ResetOrder(_WorkloadOrder):
    """Resets a workload by `Backend.reset`."""


class ExecuteOrder(_WorkloadOrder):
    """Runs a command in a workload by `Backend.execute`."""

    command: Sequence[str]
    timeout_seconds: float | None
    workdir: str | None
    user: str | None
    environment: dict[str, str] | None


class LogsOrder(_WorkloadOrder):
    """Reads output of a workload by `Backend.logs`."""

    offset: int
    attempt: int


class FilesOrder(_WorkloadOrder):
    """Lists the files of a run by `FileSource.files`."""

    attempt: int


class ReadFileOrder(_WorkloadOrder):
    """Reads a piece of a run's file by `FileSource.read_file`."""

    path: str
    offset: int
    attempt: int


BackendOrder = (
    DiscoverOrder
    | StopOrder
    | StatusOrder
    | ProbeOrder
    | ControlOrder
    | ResetOrder
    | ExecuteOrder
    | LogsOrder
)
"""The orders that `carrying` passes to the machine's backend."""
FileOrder = FilesOrder | ReadFileOrder
AnyOrder = BackendOrder | FileOrder | StartOrder | MeetOrder


class AgentCall(_Frame):
    """An order from the server, with a number that the agent's report repeats.

    Args:
        id: Number of the call; its report repeats it.
        epoch: Epoch of the server that sends it; an agent refuses earlier epochs.
    """

    id: int
    order: AnyOrder
    epoch: int = 0


class AgentCancel(_Frame, omit_defaults=True):
    """Cancels a call; the agent still reports the call's result.

    Args:
        stop_seconds_max: Limit from SIGTERM to SIGKILL for processes of a cancelled start; None:
            the limit of the start's order.
    """

    id: int
    stop_seconds_max: float | None = None


Report = AgentHello | AgentBeat | AgentMetrics | AgentNews | AgentDone | AgentFailure
Instruction = AgentWelcome | AgentFarewell | AgentHeard | AgentCall | AgentCancel


def cut_to_bounds(value: T) -> T:
    """Return an agent's value with texts and exit codes cut to this module's limits."""
    cut: object = value
    if isinstance(cut, WorkloadReport):
        lines = tuple(each[:SENTENCE_CHARS_MAX] for each in cut.log_tail[-LOG_TAIL_LINES:])
        endpoint, detail = cut.endpoint[:SENTENCE_CHARS_MAX], cut.detail[:SENTENCE_CHARS_MAX]
        cut = dataclasses.replace(cut, endpoint=endpoint, detail=detail, log_tail=lines)
    if isinstance(cut, WorkloadReport | Log | CommandExecution) and cut.exit_code is not None:
        code = min(max(cut.exit_code, -EXIT_CODE_MAX - 1), EXIT_CODE_MAX)
        cut = dataclasses.replace(cut, exit_code=code)
    return cast("T", cut)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", frame: bytes | msgspec.Raw) -> T:
    """Decode a frame or value from the other end of the connection.

    Raises:
        msgspec.MsgspecError: The value is invalid, has text that is not UTF-8, or is nested too
            deep.
    """
    try:
        return decoder.decode(frame)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def decode_value(raw: msgspec.Raw, kind: type[T]) -> T:
    """Return the value of an `AgentDone`; see `_decode`."""
    return _decode(msgspec.msgpack.Decoder(kind), raw)


encode: Final = msgspec.msgpack.Encoder().encode
decode_hello: Final = partial(_decode, msgspec.msgpack.Decoder(AnyHello))
decode_report: Final = partial(_decode, msgspec.msgpack.Decoder(Report))
decode_instruction: Final = partial(_decode, msgspec.msgpack.Decoder(Instruction))

"""Frames between the server and the agents of machines: MessagePack, one a WebSocket message.

An agent says `AgentHello`; the server answers `AgentWelcome` or `AgentFarewell`, and sends orders,
each in an `AgentCall`. The agent reports. Both sides import this module: `link` and `host`.
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
"""Of these frames. An agent of another version is refused with a sentence."""
BEATS_MISSED_MAX: Final = 4
"""Longest silence of a connection; then either end closes it, and the agent dials again."""
SENTENCE_CHARS_MAX: Final = 4_000
"""Of a text of an agent that goes to leases and logs; the rest is cut off."""

EXIT_CODE_MAX: Final = (1 << 31) - 1
"""Of an exit code, which is a C integer; a negative one may be lower by 1."""
NAME_CHARS_MAX: Final = 100
"""Of a release, and of an agent's id."""
ADDRESSES_MAX: Final = 64
"""Hardware addresses of a machine that its agent says."""
T = TypeVar("T")
_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX, pattern=SHOWN)]


class _Frame(msgspec.Struct, tag=True):
    pass


class AgentFolder(msgspec.Struct, frozen=True):
    """The marks that distinguish an agent's data folder from a copy of the folder.

    Args:
        made_at: When it was made, in nanoseconds since the epoch, as its file system has it: no
            program can copy that. 0: the file system does not have it.
        addresses: Hardware addresses of the machine, which a copied disk does not bring along.
        boot: Names the start of the machine's kernel; empty: it is not known.
    """

    made_at: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    addresses: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=ADDRESSES_MAX)] = ()
    boot: Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)] = ""

    def is_copy_of(self, first: "AgentFolder") -> bool:
        """Return whether this is another folder than the one that was seen first.

        It counts only what both have. A machine with one address of that time is the same one; if
        it has restarted since, nothing that the first agent ran is left.
        """
        other = 0 != self.made_at != first.made_at != 0
        same_start = self.boot and self.boot == first.boot
        if same_start or not (self.addresses and first.addresses):
            return other  # With the same start it is the same machine, whatever cards it has now.
        if not set(self.addresses) & set(first.addresses):
            return True
        return other and not (self.boot and first.boot)


class AgentHello(_Frame):
    """The first frame of an agent.

    Args:
        version: Of the frames that it speaks.
        agent: Id of its data folder, made once.
        node: Its machine, as a node of a cluster document.
        unheard_seconds: How long what it runs goes on while the server is not heard; 0: as long as
            it likes.
        busy: Devices that others use; see `backends.local.measurements.Measurement`.
        folder: Its data folder; None: the agent is of a release that does not say.
    """

    version: int
    release: _Name
    agent: _Name
    node: JsonObject
    unheard_seconds: Annotated[float, msgspec.Meta(ge=0)]
    busy: dict[str, str]
    folder: AgentFolder | None = None


class AnyHello(msgspec.Struct, tag="AgentHello"):
    """The part of a hello that agents of all versions send."""

    version: int
    release: str = ""


class AgentBeat(_Frame):
    """A sign of life of the agent, with the time at which it was sent, by the agent's clock."""

    at: float


class AgentNews(_Frame):
    """Reports the state of a workload."""

    report: WorkloadReport


class AgentMetrics(_Frame):
    """The metrics of the machine; see `backends.local.measurements.Measurement`.

    With `at`, it also counts as a beat.
    """

    groups: dict[str, dict[str, float]]
    gpus: list[dict[str, float]]
    busy: dict[str, str]
    at: float | None = None


class AgentDone(_Frame):
    """A call was carried out."""

    id: int
    value: msgspec.Raw


class AgentFailure(_Frame):
    """A call was not carried out."""

    id: int
    kind: str
    reason: str
    attempts: tuple[int, ...] = ()

    @classmethod
    def of(cls, call: int, error: Exception) -> "AgentFailure":
        """Return the frame of an error of a backend."""
        kind = next((name for name, kind in _ERRORS.items() if type(error) is kind), "failed")
        attempts = error.attempts if isinstance(error, UnknownAttemptError) else ()
        return cls(call, kind, str(error) or type(error).__name__, attempts)

    def error(self, workload: str) -> Exception:
        """Return the error, for a workload of this name."""
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
    """Lets an agent in.

    Args:
        cluster_id: The cluster that its machine is in.
        node_id: The node that it is there.
        key: Shown instead of the joining token from now on; empty: the one that it has.
        epoch: Of the server that gives orders; an agent takes none of an earlier one.
        beat_seconds: The pause between two beats.
    """

    cluster_id: str
    node_id: str
    key: str
    epoch: int
    beat_seconds: float


class AgentFarewell(_Frame):
    """Refuses an agent.

    Args:
        final: Whether it is in vain to try again.
    """

    reason: str
    final: bool


class AgentHeard(_Frame):
    """The server has read a beat; `at` is as in the beat."""

    at: float


class MeetOrder(_Frame):
    """Asks where the members of a gang may find this machine; the answer is a `Meeting`."""


class Meeting(msgspec.Struct):
    """The address of a machine for other machines.

    Args:
        port: A free one.
    """

    address: str
    port: int


class _WorkloadOrder(_Frame):
    workload: str


class DiscoverOrder(_Frame):
    """See `Backend.discover`."""


class StartOrder(_WorkloadOrder):
    """See `Backend.start`; all but `spec` is as in the `Order`."""

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
        """Return the order.

        Raises:
            UnsupportedSpecError: This release knows no such spec.
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
    """See `Backend.stop`."""

    stop_seconds_max: float | None


class StatusOrder(_WorkloadOrder):
    """See `Backend.status`."""


class ProbeOrder(_WorkloadOrder):
    """See `Backend.probe`."""


class ControlOrder(_WorkloadOrder):
    """See `Backend.control`."""

    limits: JsonObject


class ResetOrder(_WorkloadOrder):
    """See `Backend.reset`."""


class ExecuteOrder(_WorkloadOrder):
    """See `Backend.execute`."""

    command: Sequence[str]
    timeout_seconds: float | None
    workdir: str | None
    user: str | None
    environment: dict[str, str] | None


class LogsOrder(_WorkloadOrder):
    """See `Backend.logs`."""

    offset: int
    attempt: int


class FilesOrder(_WorkloadOrder):
    """See `FileSource.files`."""

    attempt: int


class ReadFileOrder(_WorkloadOrder):
    """See `FileSource.read_file`."""

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
"""The orders that a backend of the machine carries out unchanged."""
FileOrder = FilesOrder | ReadFileOrder
AnyOrder = BackendOrder | FileOrder | StartOrder | MeetOrder


class AgentCall(_Frame):
    """An order.

    Args:
        id: What its report names.
        epoch: Of the server that gives it, as in the welcome; an agent refuses an earlier one.
    """

    id: int
    order: AnyOrder
    epoch: int = 0


class AgentCancel(_Frame, omit_defaults=True):
    """Cancels a call; the agent reports it nevertheless.

    Args:
        stop_seconds_max: For what a cancelled start leaves; None: as the start's order says.
    """

    id: int
    stop_seconds_max: float | None = None


Report = AgentHello | AgentBeat | AgentMetrics | AgentNews | AgentDone | AgentFailure
Instruction = AgentWelcome | AgentFarewell | AgentHeard | AgentCall | AgentCancel


def cut_to_bounds(value: T) -> T:
    """Return what an agent says, with texts and exit codes cut to the bounds of leases."""
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
    """Decode what the other side sent.

    Raises:
        msgspec.MsgspecError: It is invalid: also by a text that is no UTF-8, or by its depth.
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

"""The messages between host and cells: length-prefixed msgpack, decoded into typed structs.

Imported by both halves. A frame is a little-endian 32-bit length and that many bytes. The host
trusts nothing in a frame from a cell but its grammar: every struct below is checked field by
field while it is decoded, values of policies travel as JSON text (which cannot hold an object), and
each answer must carry the unpredictable nonce of the question at the head of the pipe.
"""

import struct
from typing import Final, Literal

import msgspec

from moorage.records.json_values import JsonValue

HEADER: Final = struct.Struct("<I")


class _Frame(msgspec.Struct, array_like=True, tag=True, gc=False, forbid_unknown_fields=True):
    pass


# Host to cell ------------------------------------------------------------------------------


class Probe(_Frame, tag=0):
    """Self-test: try this attack and say what happened."""

    attack: str


ENTRY: Final = "function.py"
"""The file of a policy that has its class."""


class LoadPolicy(_Frame, tag=1):
    """Become the worker of this policy. Sent once, and only after `CellJailed` arrived.

    `entry` is what the author calls `function.py`. `settings` and `parameters` are msgpack maps.
    With `check` the policy is also constructed with its defaults.
    """

    uri: str
    files: dict[str, bytes]
    entry: str
    settings: bytes
    parameters: bytes
    output_bytes_max: int
    check: bool


Row = tuple[int, int, int, tuple[int, ...]]
"""Row, then what is free on it as the host knows it: CPU milli, memory MiB, milli per device."""
Part = tuple[str, bytes]
"""A cluster whose rows were replaced: its id, and its rows as a packed snapshot; empty: gone."""
Items = dict[str, bytes]
"""Documents, or other answers about clusters, packed, by cluster id."""
DOCUMENTS: Final = "documents"
"""Kind of what `cluster_data` is made of; other kinds are methods of injected clients."""
ShareFields = tuple[str, str, tuple[str, ...], int, int, int]
"""The fields of `Share` in their order."""
DemandFields = tuple[int, int, tuple[str, ...], int, int, int, int, str]
"""The fields of `Demand` in their order."""


class Evaluate(_Frame, tag=2):
    """Evaluate the policy once. `cell.replica.Replica` explains the fields about the fleet."""

    nonce: int
    request: str
    tenant: str
    demand: DemandFields | None
    candidates: tuple[str, ...] | None
    reserved: tuple[tuple[str, str], ...]
    inputs: JsonValue
    seed: int
    provisional: bool
    overrides: bytes
    context: bytes | None
    forget_contexts: bool
    rows: tuple[Row, ...]
    settled: tuple[str, ...]
    snapshot: bytes | None
    parts: tuple[Part, ...]
    matching: bytes
    """A bit for each row, set where it has the required labels; empty: all have."""
    excluded_parts: tuple[ShareFields, ...] = ()
    """What the policy sees as held, since others reserved it."""


class RunManagement(_Frame, tag=3):
    """Run `management(action, data)`."""

    nonce: int
    action: str
    data: JsonValue
    overrides: bytes = b""


class Apply(_Frame, tag=6):
    """Evaluate the policy once on plain input, msgpack, which no fleet and no lease depend on.

    With `ids_only`, documents that the policy returns are answered as their ids and what it added.
    With `fleet`, a packed snapshot, the policy also finds the columns of that in its input.
    """

    nonce: int
    tenant: str
    input_data: bytes
    overrides: bytes
    context: bytes | None
    forget_contexts: bool
    ids_only: bool
    fleet: bytes | None


class CallAnswer(_Frame, tag=4):
    """The answer of a service to a `Call`. `value` is msgpack; `message` is empty on success.

    What `lasts` holds until a frame names the cluster as stale.
    """

    nonce: int
    value: bytes
    message: str
    status: int
    lasts: bool = False


class Documents(_Frame, tag=5):
    """Documents that were wanted: (id, blob). `more`: further frames follow."""

    nonce: int
    items: Items
    more: bool


class KeepDocuments(_Frame, tag=7):
    """Documents to drop, then documents to cache ahead of their first read. It has no answer.

    `stale` names clusters of which documents, or answers that last, have changed; None: all that
    is cached. `kind` is the method whose answers the items are, or `DOCUMENTS`.
    """

    stale: tuple[str, ...] | None
    kind: str
    items: Items


# Cell to host ------------------------------------------------------------------------------


class CellJailed(_Frame, tag=16):
    """The wall stands (or `error` says which layer does not). The first frame of every cell."""

    layers: dict[str, str]
    failed_layer: str
    error: str


class Probed(_Frame, tag=17):
    """The outcome of an attack: `refused: …`, or `BREACH: …`."""

    outcome: str


class Fault(_Frame, tag=18):
    """One finding in a policy's code; the fields of `sandbox.host.contract.CodeFinding`."""

    message: str
    file: str
    line: int
    column: int
    text: str


class PolicyLoaded(_Frame, tag=19):
    """The policy was loaded, or why not. A cell with faults answers nothing else but faults."""

    faults: tuple[Fault, ...]
    management: bool
    output: str
    warnings: tuple[str, ...] = ()


class Result(_Frame, tag=20):
    """A value as JSON text; the packed context if it changed; printed output.

    Of `management` also the settings and parameters that it changed, as JSON text of an object.
    """

    nonce: int
    value: bytes
    context: bytes | None
    output: str
    changes: bytes = b""


FailureKind = Literal["error", "memory", "output", "context", "unsupported"]


class Failed(_Frame, tag=21):
    """The policy did not return a usable value; `traceback` has a line for each of its calls."""

    nonce: int
    kind: FailureKind
    exception: str
    message: str
    file: str
    line: int
    output: str
    traceback: tuple[str, ...] = ()


class Call(_Frame, tag=22):
    """An injected client wants something. `arguments` is a msgpack array.

    What is answered at once about the clusters in `ahead` comes before the answer, to be cached.
    """

    nonce: int
    client: str
    method: str
    arguments: bytes
    ahead: tuple[str, ...] = ()


class Want(_Frame, tag=23):
    """The policy touches these documents for the first time. `ahead` is as in `Call`."""

    nonce: int
    ids: tuple[str, ...]
    ahead: tuple[str, ...] = ()


ToCell = (
    Probe | LoadPolicy | Evaluate | RunManagement | Apply | CallAnswer | Documents | KeepDocuments
)
FromCell = CellJailed | Probed | PolicyLoaded | Result | Failed | Call | Want

_encoder: Final = msgspec.msgpack.Encoder()
decode_to_cell: Final = msgspec.msgpack.Decoder(ToCell).decode
decode_from_cell: Final = msgspec.msgpack.Decoder(FromCell).decode


def pack(frame: ToCell | FromCell) -> bytes:
    """Return the encoded frame, with its length in front."""
    body = _encoder.encode(frame)
    return HEADER.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into frames, whatever pieces it arrives in.

    Args:
        limit: Longest frame in bytes; a longer one is an error before it is stored.

    Attributes:
        error: Not empty once the other side sent something that is no frame. What came before
            it is still returned; after it nothing is.
    """

    def __init__(self, limit: int) -> None:
        self.error = ""
        self._limit = limit
        self._buffer = bytearray()

    @property
    def missing(self) -> int:
        """Bytes that complete the present frame; 0 between two frames."""
        if len(self._buffer) < HEADER.size:
            return 0
        return int(HEADER.unpack_from(self._buffer)[0]) + HEADER.size - len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes and return the frames that are now complete."""
        if self.error:
            return []
        if not self._buffer and len(data) > HEADER.size:
            # Nearly always one whole frame arrives and nothing else.
            (length,) = HEADER.unpack_from(data)
            if length + HEADER.size == len(data) and length <= self._limit:
                return [data[HEADER.size :]]
        if self._buffer:
            self._buffer += data
            if self.missing > 0 and self._length_ok(self._buffer, 0):
                return []  # A long frame in many pieces is not cut before it is whole.
            data = bytes(self._buffer)
            self._buffer.clear()
        frames: list[bytes] = []
        start, size = 0, len(data)
        while size - start >= HEADER.size and self._length_ok(data, start):
            end = start + HEADER.size + int(HEADER.unpack_from(data, start)[0])
            if end > size:
                break
            frames.append(data[start + HEADER.size : end])
            start = end
        if start < size and not self.error:
            self._buffer += data[start:]
        return frames

    def _length_ok(self, data: bytes | bytearray, start: int) -> bool:
        length = int(HEADER.unpack_from(data, start)[0])
        if not 0 < length <= self._limit:
            self.error = f"a frame of {length} bytes; at most {self._limit} are read"
            self._buffer.clear()
        return not self.error

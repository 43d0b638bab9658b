"""The messages between host process and cells: length-prefixed msgpack, decoded into typed structs.

Both halves import this module. A frame is a little-endian 32-bit length and that many bytes. The
host trusts nothing in a frame from a cell but its grammar: every struct below is checked field by
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
    """Self-test: order the cell to try this attack and report the outcome."""

    attack: str


ENTRY: Final = "function.py"
"""Name of the policy file that contains the policy's class."""


class LoadPolicy(_Frame, tag=1):
    """Order the cell to load this policy. Sent once, and only after `CellJailed` arrived.

    `entry` is the author's name for `function.py`. `settings` and `parameters` are msgpack maps.
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
"""A node's row number, its free CPU in thousandths, memory in MiB, and thousandths per device."""
Part = tuple[str, bytes]
"""A changed cluster: its id, and its rows as a packed snapshot; empty if it was removed."""
Items = dict[str, bytes]
"""Packed documents of clusters, or packed answers about clusters, by cluster id."""
DOCUMENTS: Final = "documents"
"""The kind for cluster documents, for `cluster_data`; other kinds are injected clients' methods."""
ShareFields = tuple[str, str, tuple[str, ...], int, int, int]
"""The fields of `Share`, in order."""
DemandFields = tuple[int, int, tuple[str, ...], int, int, int, int, str]
"""The fields of `Demand`, in order."""


class Evaluate(_Frame, tag=2):
    """Order the cell to evaluate its policy once. `cell.replica` explains the fields."""

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
    """One bit per row, set if its node has the required labels; empty if all nodes have them."""
    excluded_parts: tuple[ShareFields, ...] = ()
    """Parts of nodes that the policy sees as held, since other requests reserved them."""


class RunManagement(_Frame, tag=3):
    """Order the cell to run the policy's `management(action, data)`."""

    nonce: int
    action: str
    data: JsonValue
    overrides: bytes = b""


class Apply(_Frame, tag=6):
    """Order the cell to evaluate its policy once on plain input, without a lease.

    With `ids_only`, each returned document is answered as its id and the keys that the policy
    added. With `fleet`, a packed snapshot, the policy also finds its columns in the input.
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

    With `lasts`, the answer is valid until a frame names its cluster as stale.
    """

    nonce: int
    value: bytes
    message: str
    status: int
    lasts: bool = False


class Documents(_Frame, tag=5):
    """Documents that the cell requested, by id. `more`: further frames follow."""

    nonce: int
    items: Items
    more: bool


class KeepDocuments(_Frame, tag=7):
    """Order the cell to drop some cached documents, then to cache others. This frame has no answer.

    `stale` names clusters whose cached documents or answers have changed; None: all clusters.
    `kind` is the method that returned the items, or `DOCUMENTS`.
    """

    stale: tuple[str, ...] | None
    kind: str
    items: Items


# Cell to host ------------------------------------------------------------------------------


class CellJailed(_Frame, tag=16):
    """The cell is jailed, or `error` says which layer failed. The first frame of every cell."""

    layers: dict[str, str]
    failed_layer: str
    error: str


class Probed(_Frame, tag=17):
    """The outcome of a self-test's attack: `refused: …`, or `BREACH: …`."""

    outcome: str


class CodeFinding(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A fault in a policy's code.

    Args:
        message: The fault, in a sentence.
        file: File within the archive; empty if no file is at fault.
        line: The number of the line, from 1; 0 if unknown.
        column: The number of the column, from 1; 0 if unknown.
        text: The source line and, where the column is known, a caret line below it.
    """

    message: str
    file: str = ""
    line: int = 0
    column: int = 0
    text: str = ""


class PolicyLoaded(_Frame, tag=19):
    """The policy was loaded, or why not. A cell with a faulty policy only answers faults."""

    faults: tuple[CodeFinding, ...]
    management: bool
    output: str
    warnings: tuple[str, ...] = ()


class Result(_Frame, tag=20):
    """The policy's returned value as JSON text, its changed context, and its printed output.

    After `management`, also the settings and parameters that it changed, as JSON text of an object.
    """

    nonce: int
    value: bytes
    context: bytes | None
    output: str
    changes: bytes = b""


FailureKind = Literal["error", "memory", "output", "context", "unsupported"]


class Failed(_Frame, tag=21):
    """The policy returned no usable value; `traceback` has one line per call of the policy."""

    nonce: int
    kind: FailureKind
    exception: str
    message: str
    file: str
    line: int
    output: str
    traceback: tuple[str, ...] = ()


class Call(_Frame, tag=22):
    """A call of the policy to an injected client. `arguments` is a msgpack array.

    Before the answer, the host sends what it has in memory about the clusters in `ahead`, to be
    cached.
    """

    nonce: int
    client: str
    method: str
    arguments: bytes
    ahead: tuple[str, ...] = ()


class Want(_Frame, tag=23):
    """The policy reads these documents for the first time. For `ahead` see `Call`."""

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
    """Return a frame, encoded, with its length in front."""
    body = _encoder.encode(frame)
    return HEADER.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into frames; the pieces may have any size.

    Args:
        limit: Longest frame in bytes; a longer one is an error before it is stored.

    Attributes:
        error: The error text, once the other side sent bytes that are not a frame; else empty.
            Frames before it are still returned, frames after it are not.
    """

    def __init__(self, limit: int) -> None:
        self.error = ""
        self._limit = limit
        self._buffer = bytearray()

    @property
    def missing(self) -> int:
        """Number of bytes missing in the present frame; 0 between two frames."""
        if len(self._buffer) < HEADER.size:
            return 0
        return int(HEADER.unpack_from(self._buffer)[0]) + HEADER.size - len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes, and return the frames that are now complete."""
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

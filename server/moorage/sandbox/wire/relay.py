"""The messages between the daemon, its bridge to Ray and the agents on Ray's nodes.

A cell on another machine uses the same frames as any cell: these messages carry their bytes, and
reports about the cell's process. The daemon trusts only their grammar.
"""

from typing import Final

import msgspec

from moorage.sandbox.wire.frames import HEADER
from moorage.sandbox.wire.limits import HOST_FRAME_BYTES_MAX, Limits

LINE_BYTES_MAX: Final = HOST_FRAME_BYTES_MAX + (8 << 20)
"""Bytes of one message between daemon and bridge: a frame to a cell, and further messages."""
BATCH_BYTES_MAX: Final = 4 << 20
"""Bytes that an agent sends at one time; a single message may exceed this."""
REASON_CHARACTERS_MAX: Final = 400
"""Characters of a text from an agent or from Ray that the daemon passes on."""


class _Message(msgspec.Struct, array_like=True, tag=True, gc=False, forbid_unknown_fields=True):
    pass


# Daemon to agent ---------------------------------------------------------------------------


class Spawn(_Message, tag=0):
    """Order the agent to fork a cell with this number."""

    cell: int


class Give(_Message, tag=1):
    """Order the agent to write these bytes to the cell's channel."""

    cell: int
    data: bytes


class AskWhere(_Message, tag=2):
    """Order the agent to ask the cell for the line that it executes."""

    cell: int


class Kill(_Message, tag=3):
    """Order the agent to kill the cell; the daemon sends no further message about it."""

    cell: int


class Ping(_Message, tag=4):
    """Request a `Pong` once all messages before this one are read."""

    number: int


# Agent to daemon ---------------------------------------------------------------------------


class Born(_Message, tag=16):
    """Report that a cell was forked."""

    cell: int


class Unborn(_Message, tag=17):
    """Report that a cell could not be forked."""

    cell: int
    reason: str


class CellSaid(_Message, tag=18):
    """Bytes that a cell wrote, and how many bytes the agent has written to the cell before."""

    cell: int
    data: bytes
    given_bytes: int


class Closed(_Message, tag=19):
    """Report that a cell closed its channel."""

    cell: int


class CellEnded(_Message, tag=20):
    """Report the end of a cell's process; for the fields see `sandbox.host.zygote.Death`."""

    cell: int
    cause: str
    innocent: bool
    held_mib: int


class Pong(_Message, tag=21):
    """The answer to a `Ping`: all earlier messages were read."""

    number: int


# Daemon and bridge -------------------------------------------------------------------------


class Carry(_Message, tag=32):
    """Packed messages to or from an agent, which the bridge passes on."""

    worker: str
    bodies: list[bytes]


class Drop(_Message, tag=33):
    """Order the bridge to end a worker that is not trusted or was silent for too long."""

    worker: str
    reason: str


class WorkerUp(_Message, tag=34):
    """Report that an agent runs, and that its self-test has passed."""

    worker: str
    node: str
    cells: int
    layers: dict[str, str]
    probes: dict[str, str]


class WorkerDown(_Message, tag=35):
    """Report that an agent ended or did not start, and why; `worker`: empty if it never ran."""

    worker: str
    node: str
    reason: str


class Unreachable(_Message, tag=36):
    """Report that Ray cannot be reached; the bridge then ends."""

    reason: str


ToAgent = Spawn | Give | AskWhere | Kill | Ping
FromAgent = Born | Unborn | CellSaid | Closed | CellEnded | Pong
ToBridge = Carry | Drop | Ping
FromBridge = Carry | WorkerUp | WorkerDown | Unreachable | Pong


class AgentSettings(msgspec.Struct, frozen=True):
    """The settings for the start of a bridge and its agents."""

    address: str
    cells: int
    limits: Limits
    mode: str
    release: str


class Report(msgspec.Struct, frozen=True):
    """The report of an agent about its start; `refused` says why it may run no policy."""

    layers: dict[str, str]
    probes: dict[str, str]
    refused: str = ""


_encoder: Final = msgspec.msgpack.Encoder()
encode: Final = _encoder.encode
decode_to_agent: Final = msgspec.msgpack.Decoder(ToAgent).decode
decode_from_agent: Final = msgspec.msgpack.Decoder(FromAgent).decode
decode_to_bridge: Final = msgspec.msgpack.Decoder(ToBridge).decode
decode_from_bridge: Final = msgspec.msgpack.Decoder(FromBridge).decode


def pack(message: object) -> bytes:
    """Return a message, encoded, with its length in front."""
    body = encode(message)
    return HEADER.pack(len(body)) + body

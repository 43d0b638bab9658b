"""The messages between the daemon, its bridge to Ray and the agents on Ray's nodes.

A cell on another machine sends and gets what every cell does: these
messages carry those bytes, and the news of its process, between the daemon and its channel. The
daemon believes no more of them than their grammar.
"""

from typing import Final

import msgspec

from moorage.sandbox.wire.frames import HEADER
from moorage.sandbox.wire.limits import HOST_FRAME_BYTES_MAX, Limits

LINE_BYTES_MAX: Final = HOST_FRAME_BYTES_MAX + (8 << 20)
"""One message between daemon and bridge: a frame to a cell, and what was waiting beside it."""
BATCH_BYTES_MAX: Final = 4 << 20
"""What an agent sends at one time, unless it is one message."""
REASON_CHARACTERS_MAX: Final = 400
"""Text of an agent or of Ray that the daemon passes on."""


class _Message(msgspec.Struct, array_like=True, tag=True, gc=False, forbid_unknown_fields=True):
    pass


# Daemon to agent ---------------------------------------------------------------------------


class Spawn(_Message, tag=0):
    """Fork a cell and call it by this number."""

    cell: int


class Give(_Message, tag=1):
    """Write these bytes to the cell's channel."""

    cell: int
    data: bytes


class AskWhere(_Message, tag=2):
    """Ask the cell for the line that it executes."""

    cell: int


class Kill(_Message, tag=3):
    """Kill the cell; no further message is about it."""

    cell: int


class Ping(_Message, tag=4):
    """Request a `Pong` once all messages before this one are read."""

    number: int


# Agent to daemon ---------------------------------------------------------------------------


class Born(_Message, tag=16):
    """The cell was forked."""

    cell: int


class Unborn(_Message, tag=17):
    """The cell could not be forked."""

    cell: int
    reason: str


class CellSaid(_Message, tag=18):
    """Bytes that the cell wrote on this channel, and how many it was given before."""

    cell: int
    data: bytes
    given_bytes: int


class Closed(_Message, tag=19):
    """The cell's channel closed."""

    cell: int


class CellEnded(_Message, tag=20):
    """The end of the cell's process; fields as in `sandbox.host.zygote.Death`."""

    cell: int
    cause: str
    innocent: bool
    held_mib: int


class Pong(_Message, tag=21):
    """All messages before that ping were read."""

    number: int


# Daemon and bridge -------------------------------------------------------------------------


class Carry(_Message, tag=32):
    """Messages to an agent, or from it, packed."""

    worker: str
    bodies: list[bytes]


class Drop(_Message, tag=33):
    """End a worker: the daemon does not trust it, or has not heard of it for too long."""

    worker: str
    reason: str


class WorkerUp(_Message, tag=34):
    """An agent runs, and its self-test has passed."""

    worker: str
    node: str
    cells: int
    layers: dict[str, str]
    probes: dict[str, str]


class WorkerDown(_Message, tag=35):
    """An agent ended, or never started, and why. `worker` is empty if it was never up."""

    worker: str
    node: str
    reason: str


class Unreachable(_Message, tag=36):
    """Ray cannot be reached; the bridge ends."""

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
    """The report of an agent about its start; `refused` is the reason why it may run no policy."""

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
    """Return a message as it goes between daemon and bridge."""
    body = encode(message)
    return HEADER.pack(len(body)) + body

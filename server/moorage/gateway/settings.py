"""Every limit of the gateway, with the answer that a client gets at the limit.

`config` fills in the settings; `Gateway` obeys them. Source of the defaults:
docs/reference/sandbox.md, "WebSocket settings".
"""

from dataclasses import dataclass
from typing import Final

from moorage.protocol.origins import Origins
from moorage.protocol.proxies import Proxies

MESSAGE_BYTES_MAX: Final = 2**20
SESSIONS_MAX: Final = 10_000
HANDSHAKES_MAX: Final = 1_024
INFLIGHT_MAX: Final = 256
PARKED_MAX: Final = 4_096
EVENTS_MAX: Final = 1_024
HELD_BYTES_MAX: Final = 262_144
"""Buffered bytes of a lost session; beyond them, a reply ends the session, and news are missed."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The limits of the gateway, in bytes, numbers and seconds.

    Args:
        message_bytes_max: Size of one message, after decompression. Beyond it: close 1009.
        frames_queued_max: Frames read ahead per connection. Beyond it the socket is not read, so
            the client is held back by TCP. Receive memory is at most this times
            `message_bytes_max`.
        write_buffer_bytes_max: Unsent bytes per connection. Beyond it, replies stay in the outbox
            and the socket is not read.
        sessions_max: Open sessions; of one address at most three quarters. Beyond it: HTTP 503.
        handshakes_max: Connections without a session; of one address at most three quarters.
            Beyond it, the server cuts the oldest. As many further ones wait in the kernel.
        connections_max: Connections with and without a session. Beyond it: the oldest without a
            session is cut.
        inflight_max: Messages of a session whose replies are not yet written. Beyond it the
            socket is not read; nothing is dropped.
        parked_max: Messages of a session that wait in the queue and so do not count as in
            flight. Beyond it, new requests that may wait are refused as busy.
        events_max: Pushed messages that a session may have unread. Beyond it they are dropped,
            and the session learns how many once it reads again.
        slow_seconds_max: How long a client may leave a full write buffer unread. Then: close
            1013, and the connection is cut `close_seconds_max` later.
        ping_interval_seconds: Pause between keepalive pings.
        ping_timeout_seconds: How long a pong may take, while the socket is read. Then: close 1011.
        open_seconds_max: How long an opening handshake may take. Then the connection is cut.
        close_seconds_max: How long a closing handshake may take. Then the connection is cut.
        resume_seconds: How long a session that lost its connection may be resumed; 0: not at all.
            At most `sessions_max` sessions wait, each with up to `HELD_BYTES_MAX`.
        drain_seconds_max: How long `Gateway.close` waits for replies to be written.
        deflate: Whether permessage-deflate is offered. Costs 40 KiB per session.
        origins: The host names and the pages' origins that the port accepts. Any other: HTTP 403.
        proxies: The proxies that may name another client than themselves.
    """

    message_bytes_max: int = MESSAGE_BYTES_MAX
    frames_queued_max: int = 16
    write_buffer_bytes_max: int = 32_768
    sessions_max: int = SESSIONS_MAX
    handshakes_max: int = HANDSHAKES_MAX
    connections_max: int = SESSIONS_MAX + HANDSHAKES_MAX
    inflight_max: int = INFLIGHT_MAX
    parked_max: int = PARKED_MAX
    events_max: int = EVENTS_MAX
    slow_seconds_max: float = 30.0
    ping_interval_seconds: float = 20.0
    ping_timeout_seconds: float = 20.0
    open_seconds_max: float = 10.0
    close_seconds_max: float = 2.0
    resume_seconds: float = 0.0
    drain_seconds_max: float = 10.0
    deflate: bool = False
    origins: Origins = Origins()  # noqa: RUF009  # It is immutable.
    proxies: Proxies = Proxies()  # noqa: RUF009  # It is immutable.

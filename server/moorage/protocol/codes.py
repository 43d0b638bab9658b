"""The codes of the protocol: why a request was refused, and why a socket was closed.

The gateway closes sockets with these codes; the client package and the docs explain them.
"""

from typing import Final

from moorage.model import Code

CODES: Final[dict[Code, str]] = {
    Code.BAD_JSON: "The message is not JSON; the reason gives the first wrong byte.",
    Code.BAD_MESSAGE: "A field has the wrong type or value; `field` and `expected` say which.",
    Code.MISSING_FIELDS: "Required fields are missing or empty; `missing` names all of them.",
    Code.UNKNOWN_OP: "There is no such `op`; `known` lists the existing ones.",
    Code.UNSUPPORTED: "The message is well formed, but this server does not support it.",
    Code.TOO_LARGE: "The message, or something in it, is larger than the stated limit.",
    Code.UNAUTHORIZED: "The token is missing, unknown, or not allowed to do this.",
    Code.FORBIDDEN: "A web page of another site sent it, or its `Host` is not the server's.",
    Code.UNKNOWN_POLICY: "No policy has this `policy_rule_uri`.",
    Code.UNKNOWN_CLUSTERS: "No cluster that the request names or searches for is live.",
    Code.UNKNOWN_LEASE: "There is no such lease, or it ended too long ago to be remembered.",
    Code.UNKNOWN_REQUEST: "There is no such request, or it ended too long ago to be remembered.",
    Code.WRONG_TOKEN: "The token does not own this lease.",
    Code.LEASE_ENDED: "The lease has ended and cannot be renewed; ask for a new one.",
    Code.IDEMPOTENCY_MISMATCH: "The idempotency key was used before, for a different request.",
    Code.ALREADY_EXISTS: "Another object is registered under this name.",
    Code.NOT_FOUND: "No object is registered under this name.",
    Code.NEVER_FITS: "No candidate could hold the request even if it were empty.",
    Code.QUOTA_EXCEEDED: "The tenant's or project's quota is too small; see `used`, `quota`.",
    Code.NO_CAPACITY: "The request would fit an empty fleet, but not beside the present leases.",
    Code.WAIT_TIMEOUT: "The request waited `wait_seconds`, and in that time it did not fit.",
    Code.CONFLICT: "Other requests took the proposed resources, at each evaluation.",
    Code.BAD_POLICY: "The policy cannot be loaded; the reason says where it is wrong.",
    Code.POLICY_ERROR: "The policy raised an exception.",
    Code.POLICY_TIMEOUT: "The policy exceeded its time limit.",
    Code.POLICY_CRASHED: "The policy's process died, or did something that the sandbox forbids.",
    Code.POLICY_MEMORY: "The policy exceeded its memory limit.",
    Code.POLICY_BAD_OUTPUT: (
        "The policy's answer is not JSON, is not a placement, or is against its schema."
    ),
    Code.POLICY_UNSOUND: "The policy proposed resources that do not exist or do not fit.",
    Code.POLICY_DECLINED: "The policy returned no placement, so there is nothing to lease.",
    Code.CANCELLED: "The request was cancelled while it waited.",
    Code.ENGINE_FAILED: "The placement was granted, but the workload could not be started on it.",
    Code.BUSY: "A limit is reached, or the policy's circuit is open; try again later.",
    Code.SHUTTING_DOWN: "The server is stopping; connect again in a moment.",
    Code.NOT_LEADER: "This server stands by; send the request to `leader` (null: none leads).",
    Code.UNAVAILABLE: "A service or a part of the disk that the request needs does not answer.",
    Code.INTERNAL: "The server has a defect; its log has the details.",
}
"""One sentence for each code."""

WORTH_RETRYING: Final = frozenset(
    {
        Code.NO_CAPACITY,
        Code.WAIT_TIMEOUT,
        Code.CONFLICT,
        Code.BUSY,
        Code.SHUTTING_DOWN,
        Code.NOT_LEADER,
        Code.UNAVAILABLE,
    }
)
"""Codes after which the same request may succeed later, without being changed."""


SESSION_HEADER: Final = "Moorage-Session"
"""Header of the handshake's response: the session's unguessable id, for `resume`."""


class Close:
    """Why a socket was closed (RFC 6455 §7.4, IANA's registry)."""

    NORMAL: Final = 1000
    GOING_AWAY: Final = 1001
    PROTOCOL_ERROR: Final = 1002
    NOT_TEXT: Final = 1007
    TOO_LARGE: Final = 1009
    DEFECT: Final = 1011
    RESTART: Final = 1012
    TRY_LATER: Final = 1013
    UNAUTHORIZED: Final = 4401
    RESUMED: Final = 4409


CLOSE_CODES: Final[dict[int, str]] = {
    Close.NORMAL: "Both sides are done.",
    Close.GOING_AWAY: "The client leaves.",
    Close.PROTOCOL_ERROR: "A frame broke the WebSocket protocol.",
    Close.NOT_TEXT: "A text message was not UTF-8.",
    Close.TOO_LARGE: "A message was larger than the limit, or came in too many fragments.",
    Close.DEFECT: "The server has a defect, or the client answered no ping in time.",
    Close.RESTART: "The server stops or restarts; connect again. Leases stay.",
    Close.TRY_LATER: "The client read its replies too slowly; connect again and read faster.",
    Close.UNAUTHORIZED: "The token or login that opened the session is no longer valid.",
    Close.RESUMED: "Another connection resumed the session and now uses it.",
}
"""One sentence for each close code that the server or the library under it uses."""

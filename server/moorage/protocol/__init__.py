"""Every message on the socket, and every code a reply may carry.

The gateway, the web room and the daemon read requests and write replies with it; the client
package does the reverse. `messages`: what clients say. `replies`: what the server says. `codes`:
why not. `errors`: the exceptions of this package:

    ProtocolError(ValueError)
    ├── BadMessage    the server could not read a client's message
    └── BadReply      a client could not read the server's

`protocol.faults.ServiceError` is no part of that tree: services raise it, and no reading does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moorage.protocol.codes import CLOSE_CODES, CODES, WORTH_RETRYING, Close
    from moorage.protocol.errors import BadMessage, BadReply, ProtocolError
    from moorage.protocol.messages import (
        OPERATIONS,
        AllocationRequest,
        BlockRequest,
        Cancel,
        Cordon,
        DecisionFleet,
        DecisionListing,
        Drain,
        FleetListing,
        Flush,
        LeaseListing,
        Manage,
        Message,
        Operation,
        QueueListing,
        QuotaListing,
        Release,
        RemoveQuota,
        Renew,
        ReservationListing,
        ReserveNodes,
        Resume,
        SetQuota,
        Status,
        Uncordon,
        UnreserveNodes,
        WatchTopics,
        WhatIf,
        Why,
        decode,
        decode_allocation,
        encode,
        ignored_fields,
    )
    from moorage.protocol.parts import LeaseRequest, ProvisionRequest, Resources
    from moorage.protocol.replies import (
        ErrorObject,
        Event,
        LeaseObject,
        NodeObject,
        OutcomeObject,
        Reply,
        ShareObject,
        WorkloadObject,
        decode_reply,
        event,
        failure,
        failure_from,
        raw,
        success,
    )

__all__ = [
    "CLOSE_CODES",
    "CODES",
    "OPERATIONS",
    "WORTH_RETRYING",
    "AllocationRequest",
    "BadMessage",
    "BadReply",
    "BlockRequest",
    "Cancel",
    "Close",
    "Cordon",
    "DecisionFleet",
    "DecisionListing",
    "Drain",
    "ErrorObject",
    "Event",
    "FleetListing",
    "Flush",
    "LeaseListing",
    "LeaseObject",
    "LeaseRequest",
    "Manage",
    "Message",
    "NodeObject",
    "Operation",
    "OutcomeObject",
    "ProtocolError",
    "ProvisionRequest",
    "QueueListing",
    "QuotaListing",
    "Release",
    "RemoveQuota",
    "Renew",
    "Reply",
    "ReservationListing",
    "ReserveNodes",
    "Resources",
    "Resume",
    "SetQuota",
    "ShareObject",
    "Status",
    "Uncordon",
    "UnreserveNodes",
    "WatchTopics",
    "WhatIf",
    "Why",
    "WorkloadObject",
    "decode",
    "decode_allocation",
    "decode_reply",
    "encode",
    "event",
    "failure",
    "failure_from",
    "ignored_fields",
    "raw",
    "success",
]

_HOMES = ("codes", "errors", "parts", "replies", "messages")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: clients read replies, and no messages."""
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"{__name__}.{home}")
            if name in vars(module):
                value = globals()[name] = vars(module)[name]
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Effects: answers, and orders that are carried out once the facts of a turn are durable.

A closed union of frozen records, as `events` and `facts` are. The daemon carries the effects out.
"""

from typing import Final

import msgspec

from moorage.core.state.facts import Refusal
from moorage.model import Ask, Lease, Placement, RequestId, SessionId, Tenant
from moorage.records.json_values import JsonMapping, JsonValue


class Address(msgspec.Struct, frozen=True, gc=False):
    """The address of an answer: a session, and the session's own number for the message."""

    session: SessionId
    number: int


class Advice(msgspec.Struct, frozen=True, gc=False):
    """An answer: the proposal of a policy as advice; nothing is held."""

    data: JsonValue
    reasons: JsonMapping | None = None


class LeaseNews(msgspec.Struct, frozen=True, gc=False):
    """An answer: a lease as it is now, with its policy's result if it has just been granted."""

    lease: Lease
    data: JsonValue = None
    reasons: JsonMapping | None = None
    owner: bool = True
    """Whether the receiver owns the lease and so gets its token."""
    ttl_max_seconds: float | None = None
    """Seconds that the lease may last from now, if the client requested more; else None."""
    lost: str = ""
    """The machine of the lease, and since when it has not reported; empty if it reports."""


class Information(msgspec.Struct, frozen=True, gc=False):
    """An answer that is neither a lease nor advice, such as a list, as plain JSON values."""

    data: JsonValue


Response = Advice | LeaseNews | Information | Refusal


class Respond(msgspec.Struct, frozen=True, gc=False):
    """Send an answer to an address."""

    to: Address
    answer: Response


class Consult(msgspec.Struct, frozen=True, gc=False):
    """Consult the policy of `ask` for a proposal.

    A `Consult` may be sent before the facts of its turn are durable: a cell has no way to pass the
    question on, and the answer comes back as an event.

    Args:
        reserved: Excluded nodes, which the policy sees as full.
        excluded_parts: Excluded parts of other nodes, which the policy sees as held.
    """

    ask: Ask
    consultation: int
    reserved: tuple[tuple[str, str], ...] = ()
    excluded_parts: Placement = ()


class Forget(msgspec.Struct, frozen=True, gc=False):
    """Drop a consultation whose answer is no longer awaited."""

    request: RequestId
    consultation: int


class Look(msgspec.Struct, frozen=True, gc=False):
    """Check whether a workload that a lease takes over is ready.

    A `Look` may be sent before the facts of its turn are durable: no client sees it, and the answer
    comes back as an event. `Start` follows in any case, and checks again.
    """

    lease: Lease


class Start(msgspec.Struct, frozen=True, gc=False):
    """Start the workload of a lease; idempotent by lease id."""

    lease: Lease


class Stop(msgspec.Struct, frozen=True, gc=False):
    """Stop the workload of a lease; idempotent by lease id."""

    lease: Lease


class KeepWarm(msgspec.Struct, frozen=True, gc=False):
    """Reset the workload of a lease for its next user, or stop it; idempotent."""

    lease: Lease


class Recall(msgspec.Struct, frozen=True, gc=False):
    """Answer `why` from the ledger's history: the core no longer knows this subject."""

    to: Address
    tenant: Tenant
    subject: str
    sees_all: bool = False


Effect = Respond | Consult | Forget | Look | Start | Stop | KeepWarm | Recall


EARLY: Final = frozenset({Consult, Forget, Look})
"""Effects that may be sent before the facts of their turn are durable: no client sees them."""

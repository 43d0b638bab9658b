"""What the core says: facts stay, effects go out. What it is told is in `events`.

Each vocabulary is a closed union of frozen records. A new behaviour is a new member;
`assert_never` then points at every place that must learn it.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moorage.model import (
    Ask,
    Cluster,
    ClusterId,
    Code,
    Lease,
    Outcome,
    RequestId,
    SessionId,
    Tenant,
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where an answer goes: a session, and the session's own number for the message."""

    session: SessionId
    number: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A "no" as a value. `why` and every failure reply are made of it.

    Args:
        reason: One sentence for a person.
        field: The field of the request that was wrong, or empty.
        expected: What was expected there, or empty.
        details: More data, e.g. `nodes` counted by constraint.

    """

    code: Code
    reason: str
    field: str = ""
    expected: str = ""
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


# Facts: what is true from now on. They are all that the ledger stores. ---------------------


@dataclass(frozen=True, slots=True)
class ClusterSet:
    """The inventory has this cluster, so and no different."""

    cluster: Cluster


@dataclass(frozen=True, slots=True)
class ClusterRemoved:
    """The inventory no longer has this cluster. Leases on it stand until they end."""

    cluster: ClusterId


@dataclass(frozen=True, slots=True)
class Queued:
    """An ask waits, at most until `deadline`."""

    ask: Ask
    at: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Dequeued:
    """A waiter left the queue without a lease."""

    request: RequestId
    at: float
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease exists."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Renewed:
    """A lease lasts until `expires_at`."""

    lease: RequestId
    expires_at: float


@dataclass(frozen=True, slots=True)
class Started:
    """The workload of a lease runs."""

    lease: RequestId
    at: float
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The workload of a lease came to an end by itself: it did not start, died, or did its work.

    What is left of it still holds what the lease holds. Another fact says what follows: the lease
    is `Ending` or `Ended`, or `Requeued` when its engine has let go.
    """

    lease: RequestId
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Requeued:
    """A lease whose workload failed waits for another place, and holds nothing meanwhile."""

    lease: RequestId
    at: float
    reason: str


@dataclass(frozen=True, slots=True)
class Paused:
    """A lease in the queue is not tried again before `retry_at`.

    Args:
        faults: How often in a row its rule did not get to answer; 0: its workload failed.

    """

    lease: RequestId
    at: float
    retry_at: float
    faults: int = 0


@dataclass(frozen=True, slots=True)
class Resumed:
    """The pause of a lease in the queue is over: it stands in line again."""

    lease: RequestId
    at: float


@dataclass(frozen=True, slots=True)
class Ending:
    """A lease is over, but its engine has not let go: what it holds is not free yet."""

    lease: RequestId
    at: float
    reason: str


@dataclass(frozen=True, slots=True)
class Warmed:
    """A released lease, nobody's now, keeps what it holds for the next request like its own."""

    lease: RequestId
    at: float
    expires_at: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A lease is over and what it held is free."""

    lease: RequestId
    at: float
    reason: str


@dataclass(frozen=True, slots=True)
class Carried:
    """A lease as a checkpoint found it, held or ended. Only checkpoints hold this fact."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Counted:
    """Fencing numbers up to this one were given out. Only checkpoints, which forget, hold it."""

    fencing: int


Fact = (
    ClusterSet
    | ClusterRemoved
    | Queued
    | Dequeued
    | Granted
    | Renewed
    | Started
    | Finished
    | Requeued
    | Paused
    | Resumed
    | Ending
    | Warmed
    | Ended
    | Carried
    | Counted
)

# Effects: what the shells must do now that the facts are safe. -----------------------------


@dataclass(frozen=True, slots=True)
class Advice:
    """What a rule returned; nothing is held."""

    data: Any
    reasons: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class LeaseNews:
    """A lease as it now is, with what the rule returned where it has just been granted."""

    lease: Lease
    data: Any = None
    reasons: Mapping[str, Any] | None = None
    owner: bool = True
    """Whether the receiver is told the token."""


@dataclass(frozen=True, slots=True)
class Told:
    """The answer to a question, as plain JSON values."""

    data: Any


Answer = Advice | LeaseNews | Told | Refusal


@dataclass(frozen=True, slots=True)
class Tell:
    """Answer a message."""

    to: Address
    answer: Answer


@dataclass(frozen=True, slots=True)
class Consult:
    """Ask the rule of `ask` for a proposal.

    It may leave before the facts of its turn are durable: a cell can tell nobody what it was
    asked, and its answer comes back as an event.

    Args:
        reserved: Nodes kept for the head of the queue, which this proposal must leave alone.

    """

    ask: Ask
    consultation: int
    reserved: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody waits for this consultation any more."""

    request: RequestId
    consultation: int


@dataclass(frozen=True, slots=True)
class Look:
    """Look whether the workload that a lease takes over is ready as it should be.

    It may leave before the facts of its turn are durable: nobody sees a look, and the answer comes
    back as an event. `Start` follows in any case, and says so again.
    """

    lease: Lease


@dataclass(frozen=True, slots=True)
class Start:
    """Start the workload of a lease. Idempotent by lease id."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the workload of a lease. Idempotent by lease id."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Keep:
    """Make the workload of a lease fit for its next user, or stop it. Idempotent."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Recall:
    """Answer "why" from the ledger's history: the core no longer remembers this subject."""

    to: Address
    tenant: Tenant
    subject: str


Effect = Tell | Consult | Forget | Look | Start | Stop | Keep | Recall


EARLY = Consult | Forget | Look
"""Effects that may leave before the facts of their turn are durable: nobody outside sees them."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the crank: the facts must be durable before any effect but those of `EARLY`."""

    facts: list[Fact] = field(default_factory=list[Fact])
    effects: list[Effect] = field(default_factory=list[Effect])

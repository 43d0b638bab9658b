"""Asks between their consultation and their answer. The allocator is the only caller."""

from collections import Counter
from typing import Final

import msgspec

from moorage.core.state.facts import Refusal
from moorage.model import Ask, Nodes, Placement, PolicyRef, RequestId, Tenant

PENDING_MAX: Final = 10_000
"""Asks being consulted about; the next one is answered `busy`."""
ASKS_BYTES_MAX: Final = 128 << 20
"""What all asks being consulted about may bring along as JSON, and as much again those that wait;
the next one is answered `busy`."""


class Pending(msgspec.Struct):
    """An ask that its policy is being consulted about."""

    ask: Ask
    since: float
    consultation: int = 0
    consultations: int = 0
    version: int = 0
    """`Fleet.version` when the policy was asked."""
    layout: int = 0
    """`Fleet.layout` then: what it names may have existed."""
    gains: int = 0
    """`State.gains` when the policy was asked: what it declines, it declines as of then."""
    waits: bool = False
    """It stands in the queue meanwhile."""
    turned_down: int = 0
    """How many proposals had been turned down then: a policy may have missed what they were for."""
    reserved: Nodes = ()
    """Nodes that were kept for a waiter ahead of it."""
    only_own: Nodes = ()
    """Nodes kept for such a waiter of which it could have what its tenant reserved."""
    left_alone: Placement = ()
    """What of other nodes was reserved."""
    avoided: Nodes = ()
    """Nodes that were left out because its workload has failed there."""
    insisted: bool = False
    """The policy wants none of the others, so nothing is left out any more."""
    over: Refusal | None = None
    """Why one of its alternatives was passed over, where that is its quota."""


class Undecided:
    """All asks that policies are being consulted about, and the idempotency keys they came with.

    Attributes:
        waiters: How many of them stand in the queue meanwhile, by policy and priority.

    """

    def __init__(self) -> None:
        self.waiters: dict[PolicyRef, Counter[int]] = {}
        self._asks: dict[RequestId, Pending] = {}
        self._bytes = 0
        self._keys: dict[tuple[Tenant, str], RequestId] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._asks)

    def get(self, request: RequestId) -> Pending | None:
        """Return one by its id, or None."""
        return self._asks.get(request)

    def named(self, tenant: Tenant, idempotency_key: str) -> RequestId | None:
        """Return the id of the one that came with this key, or None."""
        return self._keys.get((tenant, idempotency_key))

    def has_capacity(self, ask: Ask) -> bool:
        """Return whether one more may be decided."""
        return len(self._asks) < PENDING_MAX and self._bytes + ask.size <= ASKS_BYTES_MAX

    def add(self, pending: Pending) -> None:
        """Keep one; again changes nothing."""
        ask = pending.ask
        if ask.id not in self._asks:
            self._bytes += ask.size
            if pending.waits:
                self.waiters.setdefault(ask.policy, Counter())[ask.priority] += 1
        self._asks[ask.id] = pending
        key = ask.terms.idempotency_key if ask.terms else ""
        if key and not ask.dry_run:
            self._keys[ask.tenant, key] = ask.id

    def move_times(self, seconds: float) -> None:
        """Move the times at which requests arrived by some seconds."""
        for pending in self._asks.values():
            pending.since += seconds

    def settle(self, ask: Ask) -> None:
        """Note that no policy is being consulted about `ask` any more."""
        pending = self._asks.pop(ask.id, None)
        if pending is not None:
            self._bytes -= ask.size
            if pending.waits:
                self._drop_waiter(ask)
        key = ask.terms.idempotency_key if ask.terms else ""
        if key and self._keys.get((ask.tenant, key)) == ask.id:
            del self._keys[ask.tenant, key]

    def _drop_waiter(self, ask: Ask) -> None:
        many = self.waiters[ask.policy]
        many[ask.priority] -= 1
        if not many[ask.priority]:
            del many[ask.priority]
        if not many:
            del self.waiters[ask.policy]

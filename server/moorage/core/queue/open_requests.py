"""Open requests, which are being decided or wait, and the sessions that await the answers.

The one owner of what is known of a request between its arrival and its answer. The parts of the
core read and change it; it calls none of them.
"""

from collections import Counter
from typing import Final

import msgspec

from moorage.core.queue.exclusions import NONE, Exclusions
from moorage.core.queue.order import WaitingQueue
from moorage.core.state.facts import Refusal
from moorage.core.state.tenant_loads import TenantLoads
from moorage.core.turns.effects import Address, Forget
from moorage.core.turns.turn import TurnWriter
from moorage.model import Ask, Nodes, PolicyRef, RequestId, SessionId, Tenant

PENDING_MAX: Final = 10_000
"""Asks being consulted about; the next one is answered `busy`, see `TenantLoads`."""
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
    """`Fleet.version` when the policy was consulted."""
    layout: int = 0
    """`Fleet.layout` then: what it names may have existed."""
    gains: int = 0
    """`State.gains` when the policy was consulted: what it declines, it declines as of then."""
    waits: bool = False
    """It stands in the queue meanwhile."""
    turned_down: int = 0
    """How many proposals had been turned down then: a policy may have missed what they were for."""
    exclusions: Exclusions = NONE
    """What it could not use then."""
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
        self._loads = TenantLoads()
        self._keys: dict[tuple[Tenant, str], RequestId] = {}

    def __len__(self) -> int:
        return len(self._asks)

    def get(self, request: RequestId) -> Pending | None:
        """Return an open request by its id, or None."""
        return self._asks.get(request)

    def named(self, tenant: Tenant, idempotency_key: str) -> RequestId | None:
        """Return the id of the one that came with this key, or None."""
        return self._keys.get((tenant, idempotency_key))

    def has_capacity(self, ask: Ask) -> bool:
        """Return whether the core may decide one more request."""
        return self._loads.has_room(ask, PENDING_MAX, ASKS_BYTES_MAX)

    def add(self, pending: Pending) -> None:
        """Add a request; a second call for the same request replaces it."""
        ask = pending.ask
        if ask.id not in self._asks:
            self._loads.add(ask)
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
        """Remove a request that no policy evaluates any more."""
        pending = self._asks.pop(ask.id, None)
        if pending is not None:
            self._loads.remove(ask)
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


class OpenRequests:
    """All requests that have no final answer yet.

    Args:
        writer: What the turn is written on.
        overtaken_max: As `OVERTAKEN_MAX` of the queue.

    Attributes:
        undecided: Those that policies are being consulted about.
        queue: Those that wait, in their order.
        listeners: Who gets the outcome of each, in the order of their requests.
    """

    def __init__(self, writer: TurnWriter, overtaken_max: int) -> None:
        self._turn = writer
        self._state = writer.state
        self.undecided = Undecided()
        self.queue = WaitingQueue(writer.state, overtaken_max)
        self.listeners: dict[RequestId, list[Address]] = {}
        self._of_session: dict[SessionId, dict[RequestId, None]] = {}

    def first_with(self, tenant: Tenant, idempotency_key: str) -> RequestId | None:
        """Return the id of the request that came first with this key, or None."""
        known = self._state.keys.get((tenant, idempotency_key))
        return known or self.undecided.named(tenant, idempotency_key)

    def policy_of(self, tenant: Tenant, idempotency_key: str) -> str:
        """Return the URI of the policy that the first request with this key went to, or ""."""
        first = self.first_with(tenant, idempotency_key) or RequestId("")
        known, lease = self.find(first), self._state.lease(first)
        return known.policy.uri if known else lease.policy.uri if lease else ""

    def find(self, request: RequestId) -> Ask | None:
        """Return the request with this id, if it is open."""
        found = self.undecided.get(request) or self._state.waiting.get(request)
        return found.ask if found else None

    def listen(self, request: RequestId, to: Address) -> None:
        """Register an address that awaits the answer of a request."""
        self.listeners.setdefault(request, []).append(to)
        self._of_session.setdefault(to.session, {})[request] = None

    def settle(self, ask: Ask) -> list[Address]:
        """Remove a request that has its answer; return the addresses that await the answer."""
        self.undecided.settle(ask)
        listeners = self.listeners.pop(ask.id, [])
        for session in {to.session for to in listeners}:
            requests = self._of_session[session]
            del requests[ask.id]
            if not requests:
                del self._of_session[session]
        return listeners

    def withdraw(self, ask: Ask) -> None:
        """Take a lease that waits for another place out of the queue."""
        self._forget(ask.id)
        self.settle(ask)
        if not self._state.waiting[ask.id].pauses:
            self.queue.remove(ask)

    def drop_session_requests(self, session: SessionId) -> None:
        """Drop the requests that only this session awaited, except those in the queue."""
        for request in self._of_session.pop(session, {}):
            others = [to for to in self.listeners.pop(request) if to.session != session]
            if others:
                self.listeners[request] = others
            elif request not in self._state.waiting:
                self._forget(request)

    def move_times(self, seconds: float) -> None:
        """Move the times at which requests arrived by some seconds."""
        self.undecided.move_times(seconds)
        self.queue.restore()

    def _forget(self, request: RequestId) -> None:
        pending = self.undecided.get(request)
        if pending is not None:
            self._turn.emit(Forget(request, pending.consultation))
            self.undecided.settle(pending.ask)

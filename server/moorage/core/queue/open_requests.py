"""Open requests, being decided or in the queue, and the sessions that wait for their answers.

`OpenRequests` owns all data of a request between its arrival and its answer. Other parts of the
core read and change the data; `OpenRequests` calls none of these parts.
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
"""Maximum requests that policies are deciding; one more is refused as `busy`, see `TenantLoads`."""
ASKS_BYTES_MAX: Final = 128 << 20
"""Maximum bytes of JSON of all requests being decided; the same maximum applies to all waiters. A
request beyond it is refused as `busy`."""


class Pending(msgspec.Struct):
    """A request that its policy is deciding."""

    ask: Ask
    since: float
    consultation: int = 0
    consultations: int = 0
    version: int = 0
    """`Fleet.version` when the policy was consulted."""
    layout: int = 0
    """`Fleet.layout` when the policy was consulted: its answer may name nodes that are gone now."""
    gains: int = 0
    """`State.gains` when the policy was consulted; once it grows, the policy's refusal is void."""
    waits: bool = False
    """Whether the request is in the queue while its policy decides."""
    turned_down: int = 0
    """Number of rejected proposals when the policy was consulted; later ones may free capacity."""
    exclusions: Exclusions = NONE
    """The exclusions that the policy was consulted with."""
    avoided: Nodes = ()
    """Nodes left out because the request's workload failed on them."""
    insisted: bool = False
    """Whether the policy declined all other nodes, so that no node is left out any more."""
    over: Refusal | None = None
    """The refusal of an alternative that exceeds a quota; None: no alternative does."""


class Undecided:
    """All requests that policies are deciding, and their idempotency keys.

    Attributes:
        waiters: Number of these requests in the queue, by policy and priority.
    """

    def __init__(self) -> None:
        self.waiters: dict[PolicyRef, Counter[int]] = {}
        self._pending: dict[RequestId, Pending] = {}
        self._loads = TenantLoads()
        self._keys: dict[tuple[Tenant, str], RequestId] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def get(self, request: RequestId) -> Pending | None:
        """Return a request by its id, or None."""
        return self._pending.get(request)

    def named(self, tenant: Tenant, idempotency_key: str) -> RequestId | None:
        """Return the id of the request with this idempotency key, or None."""
        return self._keys.get((tenant, idempotency_key))

    def has_capacity(self, ask: Ask) -> bool:
        """Return whether one more request may be decided."""
        return self._loads.has_room(ask, PENDING_MAX, ASKS_BYTES_MAX)

    def add(self, pending: Pending) -> None:
        """Add a request; a second call for the same request replaces it."""
        ask = pending.ask
        if ask.id not in self._pending:
            self._loads.add(ask)
            if pending.waits:
                self.waiters.setdefault(ask.policy, Counter())[ask.priority] += 1
        self._pending[ask.id] = pending
        key = ask.terms.idempotency_key if ask.terms else ""
        if key and not ask.dry_run:
            self._keys[ask.tenant, key] = ask.id

    def move_times(self, seconds: float) -> None:
        """Shift the arrival times of requests by `seconds`."""
        for pending in self._pending.values():
            pending.since += seconds

    def settle(self, ask: Ask) -> None:
        """Remove a request whose consultation has ended."""
        pending = self._pending.pop(ask.id, None)
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
        writer: Writer of the turn's facts and effects.
        overtaken_max: Maximum number of later requests that may overtake a waiter.

    Attributes:
        undecided: The requests that policies are deciding.
        queue: The waiting requests, in order.
        listeners: The addresses that wait for each request's answer, in order of arrival.
    """

    def __init__(self, writer: TurnWriter, overtaken_max: int) -> None:
        self._turn = writer
        self._state = writer.state
        self.undecided = Undecided()
        self.queue = WaitingQueue(writer.state, overtaken_max)
        self.listeners: dict[RequestId, list[Address]] = {}
        self._of_session: dict[SessionId, dict[RequestId, None]] = {}

    def first_with(self, tenant: Tenant, idempotency_key: str) -> RequestId | None:
        """Return the id of the first request with this idempotency key, or None."""
        known = self._state.keys.get((tenant, idempotency_key))
        return known or self.undecided.named(tenant, idempotency_key)

    def policy_of(self, tenant: Tenant, idempotency_key: str) -> str:
        """Return the URI of the policy for the first request with this key; "": no such request."""
        first = self.first_with(tenant, idempotency_key) or RequestId("")
        known, lease = self.find(first), self._state.lease(first)
        return known.policy.uri if known else lease.policy.uri if lease else ""

    def find(self, request: RequestId) -> Ask | None:
        """Return the request with this id, if it is open."""
        found = self.undecided.get(request) or self._state.waiting.get(request)
        return found.ask if found else None

    def repeated(self, to: Address, ask: Ask) -> RequestId | None:
        """Return the open request that `ask` repeats; None: `ask` is new.

        Args:
            to: The address that waits for the answer to `ask`.
            ask: The request that was received last.
        """
        key = ask.terms.idempotency_key if ask.terms else ""
        first = self.first_with(ask.tenant, key) if key else None
        if first is None or first == ask.id:
            return None
        # The core refused a different request with this key, so its address does not listen.
        return first if self.listeners.get(first, [])[-1:] == [to] else None

    def waits(self, request: RequestId) -> bool:
        """Return whether a request is in the queue."""
        return request in self._state.waiting

    def listen(self, request: RequestId, to: Address) -> None:
        """Add an address that waits for the answer to a request."""
        self.listeners.setdefault(request, []).append(to)
        self._of_session.setdefault(to.session, {})[request] = None

    def settle(self, ask: Ask) -> list[Address]:
        """Remove an answered request; return the addresses that wait for the answer."""
        self.undecided.settle(ask)
        listeners = self.listeners.pop(ask.id, [])
        for session in {to.session for to in listeners}:
            requests = self._of_session[session]
            del requests[ask.id]
            if not requests:
                del self._of_session[session]
        return listeners

    def withdraw(self, ask: Ask) -> None:
        """Remove from the queue a lease that waits for another place."""
        self._forget(ask.id)
        self.settle(ask)
        if not self._state.waiting[ask.id].pauses:
            self.queue.remove(ask)

    def drop_session_requests(self, session: SessionId) -> None:
        """Drop the requests that only this session waits for, except those in the queue."""
        for request in self._of_session.pop(session, {}):
            others = [to for to in self.listeners.pop(request) if to.session != session]
            if others:
                self.listeners[request] = others
            elif request not in self._state.waiting:
                self._forget(request)

    def move_times(self, seconds: float) -> None:
        """Shift the arrival times of requests by `seconds`, and order the queue again."""
        self.undecided.move_times(seconds)
        self.queue.restore()

    def _forget(self, request: RequestId) -> None:
        pending = self.undecided.get(request)
        if pending is not None:
            self._turn.emit(Forget(request, pending.consultation))
            self.undecided.settle(pending.ask)

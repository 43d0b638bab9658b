"""The requests that are open: being decided, or waiting; and who listens for their answers.

The one owner of what is known of a request between its arrival and its answer. The parts of the
core read and change it; it calls none of them.
"""

from moorage.core.queue.order import WaitingQueue
from moorage.core.queue.pending import Undecided
from moorage.core.turns.effects import Address, Forget
from moorage.core.turns.turn import TurnWriter
from moorage.model import Ask, RequestId, SessionId, Tenant


class OpenRequests:
    """All requests that have no final answer yet.

    Args:
        writer: What the turn is written on.
        overtaken_max: As `OVERTAKEN_MAX` of the queue.

    Attributes:
        undecided: Those that policies are being consulted about.
        queue: Those that wait, in their order.
        listeners: Who is told what becomes of each, in the order in which they asked.

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

    def policy_asked(self, tenant: Tenant, idempotency_key: str) -> str:
        """Return the URI of the policy that the first request with this key went to, or ""."""
        first = self.first_with(tenant, idempotency_key) or RequestId("")
        known, lease = self.known(first), self._state.lease(first)
        return known.policy.uri if known else lease.policy.uri if lease else ""

    def known(self, request: RequestId) -> Ask | None:
        """Return the request with this id, if it is open."""
        found = self.undecided.get(request) or self._state.waiting.get(request)
        return found.ask if found else None

    def listen(self, request: RequestId, to: Address) -> None:
        """Note that `to` waits for the answer of a request."""
        self.listeners.setdefault(request, []).append(to)
        self._of_session.setdefault(to.session, {})[request] = None

    def settle(self, ask: Ask) -> list[Address]:
        """Note that `ask` has its answer; return who waited for it."""
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

    def session_lost(self, session: SessionId) -> None:
        """Drop its requests that no other session waits for, but for those in the queue."""
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

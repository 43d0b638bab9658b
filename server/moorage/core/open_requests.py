"""The requests that are open: being decided, or waiting; and who listens for their answers.

The one owner of what is known of a request between its arrival and its answer. The clerks of the
core read and change it; it calls none of them.
"""

from moorage.core.desk import Desk
from moorage.core.pending import Pending, Undecided
from moorage.core.queue import Queue
from moorage.core.words import Address, Forget
from moorage.model import Ask, RequestId, Tenant


class OpenRequests:
    """All requests that have no final answer yet.

    Args:
        desk: What the turn is written on.

    Attributes:
        undecided: Those that rules are being consulted about.
        queue: Those that wait, in their order.
        listeners: Who is told, beside the asker, what becomes of a waiter.

    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._state = desk.state
        self.undecided = Undecided()
        self.queue = Queue(desk.state)
        self.listeners: dict[RequestId, list[Address]] = {}

    def first_with(self, tenant: Tenant, idempotency_key: str) -> RequestId | None:
        """Return the id of the request that came first with this key, or None."""
        kept = self._state.keys.get((tenant, idempotency_key))
        return kept or self.undecided.named(tenant, idempotency_key)

    def known(self, request: RequestId) -> Ask | None:
        """Return the request with this id, if it is open."""
        found = self.undecided.get(request) or self._state.waiting.get(request)
        return found.ask if found else None

    def settle(self, ask: Ask) -> tuple[Address, ...]:
        """Note that `ask` has its answer; return who listened for it besides its asker."""
        self.undecided.settle(ask)
        return tuple(self.listeners.pop(ask.id, ()))

    def withdraw(self, ask: Ask) -> None:
        """Take a lease that waits for another place out of the queue."""
        pending = self.undecided.get(ask.id)
        if pending is not None:
            self._forget(pending)
        self.listeners.pop(ask.id, None)
        if not self._state.waiting[ask.id].pauses:
            self.queue.remove(ask)

    def session_lost(self, session: str) -> None:
        """Drop those that nobody else waits for, but for those with a place in the queue."""
        for addresses in self.listeners.values():
            addresses[:] = [to for to in addresses if to.session != session]
        for pending in self.undecided.all():
            pending.to[:] = [to for to in pending.to if to.session != session]
            if not pending.to and pending.ask.id not in self._state.waiting:
                self._forget(pending)

    def _forget(self, pending: Pending) -> None:
        self._desk.do(Forget(pending.ask.id, pending.consultation))
        self.undecided.settle(pending.ask)

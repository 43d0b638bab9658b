"""The queue of events for the core: all parts post, only the commit loop takes.

Events that end or renew leases go ahead of requests for new leases: a release behind thousands of
requests would hold back the capacity that they wait for. Answers of policies also go ahead: the
longer they wait, the more often the fleet has changed since. Other events are taken from the
tenants in turn, so thousands of events of one tenant delay no other tenant.

A client with too many requests is read again only after a batch of the commit loop; otherwise
reading and refusing would take all the time that granting needs.
"""

import asyncio
from collections import Counter, deque
from typing import Final

from moorage.core.turns.events import (
    Asked,
    CancelAsked,
    ConsultFailed,
    Event,
    Proposed,
    ReleaseAsked,
    RenewAsked,
    SessionLost,
    Tick,
    WorkloadEnded,
    WorkloadFailed,
    WorkloadKept,
    WorkloadStarted,
    WorkloadStopped,
)
from moorage.model import RequestId, SessionId, Tenant

AHEAD_MAX: Final = 8
"""Maximum events in a row that go ahead of others: renewals must not stop grants."""
READERS_PER_BATCH: Final = 64
"""Clients that are read again after a batch of the commit loop; each may cost a refusal."""
_AHEAD: Final = frozenset(
    {
        Proposed,
        ConsultFailed,
        ReleaseAsked,
        RenewAsked,
        WorkloadEnded,
        WorkloadFailed,
        WorkloadKept,
        WorkloadStarted,
        WorkloadStopped,
        Tick,  # After the renewals that have arrived.
    }
)


class Inbox:
    """Queues each tenant's events in order, and events about leases ahead of all others."""

    def __init__(self) -> None:
        self._ahead: deque[Event] = deque()
        self._own: deque[Event] = deque()
        """The server's own events, such as inventory changes: later events rely on them."""
        self._of: dict[Tenant, deque[Event]] = {}
        """Events of clients, by tenant; the first tenant is next, and then moves to the end."""
        self._others = 0
        """Number of events in `_own` and `_of`."""
        self._requests: dict[RequestId, Tenant | None] = {}
        """Waiting requests, with their tenants. Cancellations of these requests do not go ahead."""
        self._requests_of: Counter[Tenant | None] = Counter()
        self._taken_ahead = 0
        self._posted = asyncio.Event()
        self._readers: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._ahead) + self._others

    def requests(self, tenant: Tenant) -> int:
        """Return the number of a tenant's waiting requests for a placement."""
        return self._requests_of[tenant]

    def post(self, event: Event, tenant: Tenant | None = None) -> None:
        """Queue an event for the core.

        Args:
            event: The event that happened.
            tenant: The tenant whose client sent the event; None: it is the server's own.
        """
        if type(event) in _AHEAD or (
            type(event) is CancelAsked and event.request not in self._requests
        ):
            self._ahead.append(event)
        else:
            if type(event) is Asked:
                self._requests[event.ask.id] = tenant
                self._requests_of[tenant] += 1
            (self._own if tenant is None else self._of.setdefault(tenant, deque())).append(event)
            self._others += 1
        self._posted.set()

    def leave(self, session: SessionId, tenant: Tenant) -> None:
        """Drop the placement requests of a session that has ended: no client reads their answers.

        Its other events still count, and are stepped before its `SessionLost`.
        """
        remaining: deque[Event] = deque()
        for event in self._of.get(tenant, ()):
            if isinstance(event, Asked) and event.to.session == session:
                self._forget(event.ask.id)
                self._others -= 1
            else:
                remaining.append(event)
        self._of[tenant] = remaining
        self.post(SessionLost(session), tenant)

    def take(self) -> Event:
        """Remove and return the event that the core gets next; the inbox must not be empty."""
        if self._ahead and (self._taken_ahead < AHEAD_MAX or not self._others):
            self._taken_ahead += 1
            return self._ahead.popleft()
        self._taken_ahead = 0
        self._others -= 1
        if self._own:
            return self._own.popleft()
        tenant = next(iter(self._of))
        events = self._of.pop(tenant)
        event = events.popleft()
        if events:
            self._of[tenant] = events
        if type(event) is Asked:
            self._forget(event.ask.id)
        return event

    def _forget(self, request: RequestId) -> None:
        """Record that a request has left the inbox."""
        tenant = self._requests.pop(request)
        self._requests_of[tenant] -= 1
        if not self._requests_of[tenant]:
            del self._requests_of[tenant]

    async def wait(self) -> None:
        """Wait until the inbox has an event."""
        while not self:
            self.read_on(len(self._readers))
            self._posted.clear()
            await self._posted.wait()

    def turn(self) -> asyncio.Future[None] | None:
        """Return an awaitable after which a client may be read again; None: at once."""
        if not self:
            return None
        turn = asyncio.get_running_loop().create_future()
        self._readers.append(turn)
        return turn

    def read_on(self, most: int = READERS_PER_BATCH) -> None:
        """Read again from up to `most` clients, those that have waited longest."""
        for _ in range(min(most, len(self._readers))):
            turn = self._readers.popleft()
            if not turn.done():  # Its session may have been cancelled.
                turn.set_result(None)

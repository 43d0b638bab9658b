"""Readers that wait for output: one poll serves all readers of the same start.

`WorkloadAccess` is the only caller. Files and containers send no event when they grow, so they
are polled, once for all readers.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from moorage.core.state.facts import Refusal
from moorage.model import Code, Lease, SessionId, Tenant

LOOK_SECONDS: Final = 0.1
"""Seconds between two polls for new output."""
READERS_MAX: Final = 64
"""Maximum readers that wait for output of one lease; one more is refused as `busy`."""
READERS_OF_TENANT_MAX: Final = 256
"""Maximum readers of one tenant that wait for output."""
READERS_ALL_MAX: Final = 2_048
"""Maximum readers of all tenants that wait for output."""


@dataclass(frozen=True, slots=True)
class LogView:
    """The state of an output at one poll. Readers wake when the next poll differs.

    Args:
        end: Number of bytes of output.
        over: Whether the output is complete.
        lease: The lease at that time.
    """

    end: int
    over: bool
    lease: Lease

    def tells_more_than(self, other: "LogView") -> bool:
        """Return whether this state has output or an outcome that the other state lacks."""
        ours, theirs = self.lease, other.lease
        return self.end > other.end or (self.over, ours.attempt, ours.state, ours.outcome) != (
            other.over,
            theirs.attempt,
            theirs.state,
            theirs.outcome,
        )


@dataclass(slots=True, eq=False)
class _Watch:
    """The readers that wait for output of one start."""

    seen: LogView
    waiting: set[asyncio.Future[None]] = field(default_factory=set[asyncio.Future[None]])
    looking: asyncio.Task[None] | None = None

    def wake(self) -> None:
        for each in self.waiting:
            if not each.done():
                each.set_result(None)


class Readers:
    """Limits the number of readers, and wakes them when their output grows."""

    def __init__(self) -> None:
        self._of_lease: Counter[str] = Counter()
        self._of_tenant: Counter[Tenant] = Counter()
        self._watches: dict[tuple[str, int], _Watch] = {}
        self._of_session: dict[SessionId, set[asyncio.Task[object]]] = {}

    def refusal(self, lease: Lease, tenant: Tenant) -> Refusal | None:
        """Return why one more reader may not wait, or None."""
        if self._of_lease[lease.id] >= READERS_MAX:
            reason = f"{READERS_MAX} readers wait for output of lease {lease.id} already"
        elif self._of_tenant[tenant] >= READERS_OF_TENANT_MAX:
            reason = f"{READERS_OF_TENANT_MAX} readers of your tenant wait for output already"
        elif self._of_tenant.total() >= READERS_ALL_MAX:
            reason = f"{READERS_ALL_MAX} readers wait for output on this server already"
        else:
            return None
        expected = "`wait_seconds` 0, or fewer waiting readers"
        return Refusal(Code.BUSY, f"{reason}; read without waiting.", "wait_seconds", expected)

    @asynccontextmanager
    async def reading(
        self, lease: Lease, tenant: Tenant, session: SessionId
    ) -> AsyncIterator[None]:
        """Count this task as a reader; cancel it when its session ends."""
        task = asyncio.current_task()
        assert task is not None
        self._of_lease[lease.id] += 1
        self._of_tenant[tenant] += 1
        self._of_session.setdefault(session, set()).add(task)
        try:
            yield
        finally:
            self._of_lease[lease.id] -= 1
            self._of_tenant[tenant] -= 1
            self._of_lease += Counter()  # Drops counts of 0.
            self._of_tenant += Counter()
            ours = self._of_session[session]
            ours.discard(task)
            if not ours:
                del self._of_session[session]

    def drop_session(self, session: SessionId) -> None:
        """Cancel the readers of a session that has ended."""
        for task in self._of_session.get(session, ()):
            task.cancel()

    async def grown(
        self, start: int, seen: LogView, look: Callable[[LogView], Awaitable[LogView]], until: float
    ) -> None:
        """Wait until there may be more output than `seen`, or until a time.

        Args:
            start: The number of the workload's start.
            seen: The output that the reader has seen.
            look: Polls again, from the end of the last poll on.
            until: The latest time of the return, by the loop's clock.
        """
        key = (seen.lease.id, start)
        watch = self._watches.setdefault(key, _Watch(seen))
        if watch.seen.tells_more_than(seen):
            return
        loop = asyncio.get_running_loop()
        grown = loop.create_future()
        watch.waiting.add(grown)
        if watch.looking is None:
            watch.looking = loop.create_task(self._look(watch, look))
        try:
            async with asyncio.timeout_at(until):
                await grown
        except TimeoutError:
            pass
        finally:
            watch.waiting.discard(grown)
            if not watch.waiting and self._watches.get(key) is watch:
                del self._watches[key]
                watch.looking.cancel()

    async def _look(self, watch: _Watch, look: Callable[[LogView], Awaitable[LogView]]) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                found = await look(watch.seen)
            except Exception:  # noqa: BLE001  # Each reader meets it, and reports it.
                watch.wake()
                continue
            grown = found.tells_more_than(watch.seen)
            watch.seen = found
            if grown:
                watch.wake()

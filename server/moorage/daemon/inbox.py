"""Events on their way to the core: everybody posts, the commit loop alone takes."""

import asyncio
from collections import deque

from moorage.core.events import Event


class Inbox:
    """Keeps events in the order in which they were posted."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._posted = asyncio.Event()

    def __len__(self) -> int:
        """Return how many events wait."""
        return len(self._events)

    def post(self, event: Event) -> None:
        """Have an event stepped soon, after those posted before it."""
        self._events.append(event)
        self._posted.set()

    def take(self) -> Event:
        """Return the oldest event; there must be one."""
        return self._events.popleft()

    async def wait(self) -> None:
        """Return when there is an event."""
        while not self._events:
            self._posted.clear()
            await self._posted.wait()

"""Holds leases: renews them in the background, and detects when they are lost.

`Client.lease` and `BlockingClient.lease` hand out a `HeldLease`; a `Keeper` renews it.

Renewals have a thread and a socket of their own. So a lease is not lost while its block blocks the
event loop, or while the client's other socket is busy or broken.
"""

import asyncio
import concurrent.futures
import random
import threading
import time
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from moorage.model import Code, Placement
from moorage.records.json_values import JsonValue
from moorage_client.answers import Lease
from moorage_client.errors import LeaseLost, MoorageError, RequestRefused
from moorage_client.link import Link, renew
from moorage_client.loops import LoopThread

RENEWALS_PER_TTL: Final = 3
"""Number of renewals in the time of a lease's TTL, so that two renewals may fail."""

RETRY_SECONDS_MAX: Final = 5.0
"""Longest pause in seconds after a failed renewal; the pause is shorter for a short TTL."""

Keeping = concurrent.futures.Future[None]
"""A future whose cancellation stops the renewals of a lease."""

_LOST_CODES: Final = frozenset(
    {Code.UNKNOWN_LEASE, Code.LEASE_ENDED, Code.WRONG_TOKEN, Code.NOT_FOUND}
)
OVER: Final = frozenset({"ending", "warm", "ended"})


class HeldLease:
    """A lease that a client holds and renews. Any thread may read it.

    Args:
        lease: The lease as granted.
        data: The policy's return value.
        warnings: Warnings of the answer.
        replayed: Whether the lease may have been granted long before its answer came.
    """

    def __init__(
        self, lease: Lease, data: JsonValue, warnings: tuple[str, ...], *, replayed: bool
    ) -> None:
        self.data = data
        self.warnings = warnings
        self._lease = lease
        self.replayed = replayed
        self._deadline = time.monotonic() + lease.lasts_seconds
        self._lost = threading.Event()
        self._reason = ""

    @property
    def lease(self) -> Lease:
        """The lease at its last renewal."""
        return self._lease

    @property
    def id(self) -> str:
        """The id of the lease."""
        return self._lease.id

    @property
    def token(self) -> str:
        """The token of the lease, which is needed to renew and release it."""
        return self._lease.token

    @property
    def placement(self) -> Placement:
        """The held resources: one share per node."""
        return self._lease.placement

    @property
    def fencing(self) -> int:
        """The fencing number, which grows with every grant; pass it to storage that compares it."""
        return self._lease.fencing

    @property
    def expires_at(self) -> float:
        """When the lease ends unless it is renewed: seconds since the epoch, server's clock."""
        return self._lease.expires_at

    @property
    def lost(self) -> bool:
        """Whether the lease has ended although this client did not release it."""
        return self._lost.is_set()

    def check(self) -> None:
        """Raise `LeaseLost` if the lease is lost; call this between steps of long work.

        Raises:
            LeaseLost: The lease has ended: stop using the GPUs.
        """
        if self.lost:
            raise LeaseLost(self.id, self._reason)

    def wait_lost(self, timeout: float) -> bool:
        """Block this thread for at most `timeout` seconds; return whether the lease is lost."""
        return self._lost.wait(timeout)

    def note_renewal(self, lease: Lease, deadline: float) -> None:
        """Store a renewal. The keeper calls this."""
        self._lease = replace(lease, token=self._lease.token)
        self._deadline = deadline

    def lose(self, reason: str) -> LeaseLost:
        """Mark the lease as lost, unless it is lost already; return the error. For the keeper."""
        if not self.lost:
            self._reason = reason
            self._lost.set()
        return LeaseLost(self.id, self._reason)

    @property
    def seconds_left(self) -> float:
        """Seconds for which the lease certainly lasts without another renewal."""
        return self._deadline - time.monotonic()


async def renew_until_lost(link: Link, held: HeldLease, on_lost: Callable[[], None]) -> None:
    """Renew a lease until it is lost; cancel this coroutine when the lease is no longer needed.

    Args:
        link: Sends the renewals.
        held: The lease.
        on_lost: Called once, on this loop, after `held` is marked as lost.
    """
    period = held.lease.ttl_seconds / RENEWALS_PER_TTL
    # The age of a replayed lease is unknown, so renew it at once.
    pause = 0.0 if held.replayed else _until_next(held.lease, period)
    problem = "no renewal was sent in time"
    while True:
        await asyncio.sleep(max(0.0, min(pause, held.seconds_left)))
        if held.seconds_left <= 0.0:
            held.lose(f"it could not be renewed before it expired: {problem}")
            break
        # Count the new deadline from the time before sending: the server starts to count later.
        sent = time.monotonic()
        try:
            seconds = min(period, max(held.seconds_left, 0.001))
            lease = await renew(link, held.id, held.token, seconds_max=seconds)
        except RequestRefused as refused:
            if refused.code in _LOST_CODES:
                held.lose(refused.reason)
                break
            problem = str(refused)
        except MoorageError as error:
            problem = str(error)
            # The socket may be broken, and a short lease cannot wait until pings detect that.
            await link.disconnect()
        else:
            if lease.state in OVER:
                held.lose(lease.reason or f"the server says that it is {lease.state}")
                break
            held.note_renewal(lease, sent + lease.lasts_seconds)
            pause = _until_next(lease, period)
            if lease.ttl_max_seconds is not None:
                problem = "its nodes are reserved for other tenants, or drained"
            continue
        pause = random.uniform(0.5, 1.0) * min(period / 4, RETRY_SECONDS_MAX)  # noqa: S311  # Jitter.
    on_lost()


def _until_next(lease: Lease, period: float) -> float:
    """Return the seconds until the next renewal: fewer if the server shortened the lease."""
    return min(period, max(lease.lasts_seconds / RENEWALS_PER_TTL, 1.0))


class Keeper:
    """Renews the leases of one client, with a separate thread and socket.

    Args:
        link: Sends the renewals; used only on the thread.
        thread: The thread to work on; None: start a thread at the first lease.
    """

    def __init__(self, link: Link, thread: LoopThread | None = None) -> None:
        self._link = link
        self._thread = thread
        self._own = thread is None
        self._starting = threading.Lock()

    def keep(self, held: HeldLease, on_lost: Callable[[], None]) -> Keeping:
        """Renew a lease until the returned future is cancelled or the lease is lost.

        Args:
            held: The lease.
            on_lost: Called once, on the keeper's thread, when the lease is lost.
        """
        with self._starting:
            if self._thread is None:
                self._thread = LoopThread("moorage-renewals")
        return self._thread.submit(renew_until_lost(self._link, held, on_lost))

    async def stop(self) -> None:
        """Close the socket, and end the thread if it was started for this keeper.

        If the thread is shared, call this on that thread.
        """
        with self._starting:
            thread, self._thread = self._thread, None
        if not self._own:
            await self._link.close()
        elif thread is not None:
            await asyncio.wrap_future(thread.submit(self._link.close()))
            await asyncio.to_thread(thread.stop)

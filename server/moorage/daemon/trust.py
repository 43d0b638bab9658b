"""Decides whether this server still leads: if not, it sends no answers and no orders.

A server that was paused does not notice it. By the clock, the server sees that its last heartbeat
is too old, and sends another heartbeat before it does anything else. The database then says whether
another server leads.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Final

from moorage.ledger.base import LedgerFailed
from moorage.storage.base import LEAD_SECONDS, Election, StorageError

BEAT_SECONDS: Final = 0.5
"""Seconds between two heartbeats of a leader."""
MARGIN_SECONDS: Final = 0.5
"""A leader stops this many seconds before its heartbeat expires and a successor can begin."""
ANSWER_SECONDS_MAX: Final = 5.0
"""Seconds that the event loop waits for the database if the heartbeat must be renewed at once."""


class Trust:
    """Renews this server's heartbeat, and knows until when the last one is valid.

    Args:
        election: The election that this server takes part in; None: no other server can lead.
        fail: Called with the error that ends the trust, and the process.

    Attributes:
        election: The election that this server takes part in, or None.
        wanted: Whether an operator wants another server to lead.
    """

    def __init__(self, election: Election | None, fail: Callable[[BaseException], None]) -> None:
        self.wanted = asyncio.Event()
        self.election = election
        self._fail = fail
        self._until = math.inf  # A standby sends no answer that could be wrong.
        self._over = False

    @property
    def epoch(self) -> int:
        """The number of this leadership. 0: no other server can lead."""
        return 0 if self.election is None else self.election.epoch

    def begin(self) -> None:
        """Record that this server leads: from now on it must renew its heartbeat."""
        if self.election is not None:
            self._until = 0.0

    def holds(self) -> bool:
        """Return whether this server leads; renew a late heartbeat first. Runs on the hot path."""
        return time.monotonic() < self._until or self._renew()

    def check(self) -> None:
        """Raise an error if this server does not lead.

        Raises:
            LedgerFailed: This server does not lead.
        """
        if not self.holds():
            raise LedgerFailed("this server no longer leads, so it answers no request")

    async def run(self) -> None:
        """Renew the heartbeat from the event loop, so that a server that hangs renews nothing.

        Raises:
            StorageError: The database failed, or another server leads.
        """
        election = self.election
        if election is None:
            return
        while True:
            began = time.monotonic()
            if await asyncio.to_thread(election.beat):
                self.wanted.set()
            self._until = max(self._until, _end(began))
            await asyncio.sleep(BEAT_SECONDS)

    def _renew(self) -> bool:
        """Renew the heartbeat; block the event loop until then, so that no answer leaves."""
        if self._over or self.election is None:
            return False
        began = time.monotonic()
        pool = ThreadPoolExecutor(1)
        try:
            pool.submit(self.election.beat).result(ANSWER_SECONDS_MAX)
        except (StorageError, TimeoutError) as error:
            self._over = True
            self._fail(error)
            return False
        finally:
            pool.shutdown(wait=False)
        self._until = _end(began)
        return True


def _end(began: float) -> float:
    return began + LEAD_SECONDS - MARGIN_SECONDS


@contextmanager
def beating(election: Election) -> Iterator[None]:
    """Send heartbeats from a thread while the event loop loads the stores."""
    over = threading.Event()

    def beat() -> None:
        with suppress(StorageError):  # The next use of the database reports the same error.
            while not over.wait(BEAT_SECONDS):
                election.beat()

    thread = threading.Thread(target=beat, name="beating", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
